"""Values from a folder: which tensors take them, what is converted, and what doesn't fit; on several ranks, agreement.

folder                    model
embedding.weight  bf16 -> net.embedding.weight  fp32
blocks.0.up.weight     -> net.blocks.0.up.weight
                          net.head.weight               keeps its initial values, and a warning names it
"""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.partition.deferred_init import DeferredInit, is_deferred
from lightning_hanayo.strategy.lightning.launcher import CheckingLauncher
from lightning_hanayo.strategy.setup.values import Reading, load_pretrained, plan_pretrained
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_bit_equal,
    make_loader,
    make_strategy,
    make_trainer,
    merge_owned,
    own_weights,
)

Change = Callable[[dict[str, Tensor]], None]
FILE = "model.safetensors"


class Wrapped(LightningModule):
    """Holds a model, as users do; two of them, if they differ."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.MLP()


def save(folder: Path, change: Change = lambda _: None) -> dict[str, Tensor]:
    """Save another MLP's weights, changed, and return them."""
    weights = {name: value.clone() for name, value in mlp(9).state_dict().items()}
    change(weights)
    save_file(weights, folder / FILE)
    return weights


def load(model: nn.Module, folder: Path, module: str = "") -> Reading:
    """Load a folder in this process."""
    plans = plan_pretrained(model, "net.blocks", {module: folder})
    deferred = DeferredInit(model, 0) if is_deferred(model) else None
    return load_pretrained(plans, model, list(model.modules()), deferred, torch.device("cpu"), None)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_tensors_take_the_values_of_the_folder(tmp_path: Path, device: str) -> None:
    weights = save(tmp_path)
    with torch.device(device):
        model = Wrapped(net=mlp())
    before = dict(model.named_parameters())
    reading = load(model, tmp_path)
    assert_bit_equal(model.get_submodule("net").state_dict(), weights)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert reading.num_bytes == sum(value.nbytes for value in weights.values())
    assert (reading.replaced != "") == (device == "cpu")


def test_values_take_the_dtype_of_the_model(tmp_path: Path) -> None:
    def halve(weights: dict[str, Tensor]) -> None:
        weights.update({name: value.bfloat16() for name, value in weights.items() if value.is_floating_point()})

    weights, model = save(tmp_path, halve), Wrapped(net=mlp())
    reading = load(model, tmp_path)
    assert reading.conversions == {"bfloat16 to float32"}
    assert torch.equal(model.get_parameter("net.head.weight"), weights["head.weight"].float())


def test_a_folder_is_for_the_module_that_is_named(tmp_path: Path) -> None:
    weights, model = save(tmp_path), Wrapped(net=mlp(1), teacher=mlp(2))
    with pytest.raises(HanayoError, match="equally well: net, teacher"):
        load(model, tmp_path)
    load(model, tmp_path, "teacher")
    assert_bit_equal(model.get_submodule("teacher").state_dict(), weights)
    assert_bit_equal(model.get_submodule("net").state_dict(), mlp(1).state_dict())
    with pytest.raises(HanayoError, match="has no module 'teacherr'; did you mean 'teacher'"):
        load(model, tmp_path, "teacherr")


def tied() -> nn.Module:
    model: Any = nn.Module()
    model.first, model.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model.second.weight = model.first.weight
    return model


@pytest.mark.parametrize("names", [["first"], ["second"], ["first", "second"]])
def test_a_tied_parameter_takes_its_value_from_any_of_its_names(tmp_path: Path, names: list[str]) -> None:
    model = Wrapped(net=tied())
    save_file({f"{name}.weight": torch.full((3, 3), 2.0) for name in names}, tmp_path / FILE)
    (plan,) = plan_pretrained(model, "", {"": tmp_path})
    load(model, tmp_path)
    assert (model.get_parameter("net.second.weight") == 2).all() and not plan.missing and not plan.unused


def test_two_values_for_a_tied_parameter_are_an_error(tmp_path: Path) -> None:
    save_file({"first.weight": torch.zeros(3, 3), "second.weight": torch.ones(3, 3)}, tmp_path / FILE)
    with pytest.raises(HanayoError, match="another value for second.weight.*tie_word_embeddings=False"):
        load(Wrapped(net=tied()), tmp_path)


def test_buffers_are_loaded_or_computed(tmp_path: Path) -> None:
    """A saved buffer is in the folder; one that isn't saved keeps what its module computes."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("table", torch.arange(2.0), persistent=False)

    model = Wrapped(net=Scaled())
    save_file({"scale": torch.full((2,), 3.0)}, tmp_path / FILE)
    load(model, tmp_path)
    assert {name: value.tolist() for name, value in model.named_buffers()} == {"net.scale": [3, 3], "net.table": [0, 1]}


def drop_head(weights: dict[str, Tensor]) -> None:
    del weights["head.weight"]
    weights["old.bias"] = torch.ones(1)


def drop_block(weights: dict[str, Tensor]) -> None:
    del weights["blocks.3.up.bias"]


def reshape(weights: dict[str, Tensor]) -> None:
    weights["head.weight"] = torch.ones(7, 16)


def quantize(weights: dict[str, Tensor]) -> None:
    weights["head.weight"] = weights["head.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (drop_block, HanayoError, r"no values for parameters of blocks: net\.blocks\.3\.up\.bias\. Build the model"),
        (reshape, HanayoError, r"net\.head\.weight is \(5, 16\), but head\.weight in the folder \(7, 16\)"),
        (
            quantize,
            UnsupportedError,
            r"net\.head\.weight is torch\.float32, but head\.weight in the folder torch\.float8",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Change, error: type[HanayoError], message: str) -> None:
    save(tmp_path, change)
    with pytest.raises(HanayoError, match=message) as caught:
        load(Wrapped(net=mlp()), tmp_path)
    assert type(caught.value) is error


def test_what_is_left_over_on_either_side_is_in_the_plan(tmp_path: Path) -> None:
    save(tmp_path, drop_head)
    (plan,) = plan_pretrained(Wrapped(net=mlp()), "net.blocks", {"": tmp_path})
    assert (plan.module, plan.missing, plan.unused) == ("net", ("net.head.weight",), ("old.bias",))


@pytest.mark.parametrize("in_hook", [False, True])
def test_a_bad_folder_is_an_error_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_hook: bool
) -> None:
    monkeypatch.setattr(CheckingLauncher, "_call_children_scripts", lambda _: pytest.fail("a process was started"))
    save(tmp_path, drop_block)
    folder = tmp_path / "nowhere" if in_hook else tmp_path
    trainer = make_trainer(Layout(2), strategy=HanayoStrategy(init_from=folder))
    with pytest.raises(HanayoError, match="there is no folder" if in_hook else r"blocks: blocks\.3\.up\.bias"):
        trainer.fit(Built() if in_hook else models.MLP(), make_loader(models.vectors((8,))))


class Built(models.Trained):
    """Its model is built in `configure_model`, on meta if the strategy says so."""

    def __init__(self, built: bool = True) -> None:
        super().__init__()
        if not built:
            self.net = mlp()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net: Any = models.MLP()

    def loss(self, batch: models.Batch) -> Tensor:
        return self.net.loss(batch)

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Values(Callback):
    """What this rank holds when training begins."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.values = own_weights(pl_module, trainer)


def twice(folder: Path, built: bool) -> list[dict[str, Tensor]]:
    """What this rank holds before and after a step, when two Trainers validate, and when another one resumes."""
    held, loader = [], make_loader(models.vectors((8,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for path in (None, folder / "step.ckpt"):
            module, first = Built(built), Values()
            strategy = make_strategy(Layout(2), init_from=folder)
            trainer = make_trainer(Layout(2), strategy=strategy, max_steps=1 if path is None else 2, callbacks=[first])
            trainer.fit(module, loader, ckpt_path=path)
            held += [first.values, own_weights(module, trainer)]
            other = make_trainer(Layout(2), strategy=make_strategy(Layout(2, num_microbatches=2), init_from=folder))
            for again in (trainer, other):
                again.validate(module, loader, verbose=False)
                held.append(own_weights(module, again))
            trainer.save_checkpoint(folder / "step.ckpt")
    said = [str(one.message) for one in caught]
    expected = 0 if built or trainer.global_rank else 2
    assert sum("had values on every rank before, so init_from has saved no memory" in one for one in said) == expected
    return held


@pytest.mark.parametrize("built", covered([False, True], by=[True]))
def test_trained_values_and_checkpoints_are_kept(pool: Pool, tmp_path: Path, built: bool) -> None:
    weights = save(tmp_path)
    ranks = pool.run(2, twice, tmp_path, built)
    first, trained, validated, recut, resumed = (merge_owned([rank[i] for rank in ranks]) for i in range(5))
    assert_bit_equal(first, {f"net.{name}": weight for name, weight in weights.items() if f"net.{name}" in first})
    assert not torch.equal(trained["net.head.weight"], first["net.head.weight"])
    assert_bit_equal(validated, trained)
    assert_bit_equal(recut, trained)
    assert_bit_equal(resumed, trained)


def elsewhere(root: Path, spoil: Change | None) -> None:
    """Rank 1 is on another node, whose folder is missing, or from a later step of the same training."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    folder = root / os.environ["RANK"]
    if folder.name == "1" and spoil is not None:
        shutil.copytree(root / "0", folder)
        weights = load_file(folder / FILE)
        spoil(weights)
        save_file(weights, folder / FILE)
    trainer = make_trainer(Layout(2), strategy=make_strategy(Layout(2), init_from=folder), max_steps=1)
    trainer.fit(Built(), make_loader(models.vectors((8,))))


def later_step(weights: dict[str, Tensor]) -> None:
    weights["blocks.2.up.weight"] += 1e-3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(None, r"there is no folder .*/1\."), (later_step, r"rank 1 finds other tensors in .* than rank 0")],
)
def test_ranks_that_see_other_files_end_the_run(pool: Pool, tmp_path: Path, spoil: Change | None, message: str) -> None:
    (tmp_path / "0").mkdir()
    save(tmp_path / "0")
    with pytest.raises(RunFailed, match=message) as caught:
        pool.run(2, elsewhere, tmp_path, spoil)
    assert [failure.rank for failure in caught.value.failures if failure.kind == "timed out"] == []
