"""bf16 parameters with fp32 gradients and master weights train as one process does it, written by hand."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.strategy.optimizer_steps import StepValues
from tests.harness import models
from tests.harness.checkpoints import read
from tests.harness.devices import trainer_on
from tests.harness.oracle import split
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    assert_bit_equal,
    data_rank,
    make_loader,
    make_strategy,
    merge,
)

STEPS = 4


def batches(accumulate: int = 1) -> list[models.Batch]:
    return [{"x": batch["x"].bfloat16(), "y": batch["y"]} for batch in models.vectors((8,) * STEPS * accumulate)]


class Descent(models.MLP):
    """The rate is so small that most steps change no weight in bf16."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=2e-3, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Fused(models.MLP):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Tied(models.SharesOutside, Descent):
    """Code before the stack and the last block, of which each adds to one gradient."""


def trainer_for(layout: Layout, device: str = "cpu", *, save_full: bool = True, **options: Any) -> Trainer:
    strategy = make_strategy(layout, master_weights="fp32", save_full=save_full)
    return trainer_on(device, layout, strategy=strategy, precision="bf16-true", **options)


class Masters(OutcomeCallback):
    """Takes the weights from the checkpoint, which are the masters."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        assert {value.dtype for value in self.outcome.weights.values()} == {torch.bfloat16}
        self.masters = {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def train(
    layout: Layout, model: Callable[[], LightningModule], clip: float | None, accumulate: int, device: str = "cpu"
) -> tuple[Outcome, dict[str, Tensor]]:
    """The outcome of one rank, and its master weights."""
    callback = Masters()
    trainer = trainer_for(
        layout, device, max_epochs=1, gradient_clip_val=clip, accumulate_grad_batches=accumulate, callbacks=[callback]
    )
    shares = [{k: v[data_rank(layout) :: layout.data] for k, v in batch.items()} for batch in batches(accumulate)]
    trainer.fit(models.build(model), make_loader(shares))
    return callback.outcome, callback.masters


def by_hand(
    model: Callable[[], LightningModule], clip: float | None, accumulate: int, num_pieces: int, device: str = "cpu"
) -> tuple[Outcome, dict[str, Tensor]]:
    """fp32 copies of bf16 parameters; each micro-batch's gradient is added to an fp32 sum."""
    module: Any = models.build(model, torch.bfloat16).to(device)
    module.log = lambda *_, **__: None
    masters = {p: nn.Parameter(p.detach().float()) for p in module.parameters()}
    optimizers, schedulers = module.configure_optimizers(), []
    if isinstance(optimizers, tuple):
        (optimizers,), schedulers = optimizers
    for group in optimizers.param_groups:
        group["params"] = [masters[p] for p in group["params"]]
    names = {p: name for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32  # each use of a shared parameter adds to its gradient
    outcome = Outcome()
    for index, batch in enumerate(batches(accumulate)):
        for piece in split({name: value.to(device) for name, value in batch.items()}, num_pieces):
            loss = module.training_step(piece, 0) * (len(piece["y"]) / len(batch["y"]) / accumulate)
            loss.backward()
            for parameter, master in masters.items():
                if parameter.grad is not None:
                    gradient, parameter.grad = parameter.grad, None
                    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        if (index + 1) % accumulate:
            continue
        if not outcome.gradients:
            outcome.gradients = {names[p]: m.grad.clone() for p, m in masters.items() if m.grad is not None}
        if clip is not None:
            nn.utils.clip_grad_norm_(masters.values(), clip)
        optimizers.step()
        optimizers.zero_grad()
        for config in schedulers:
            config["scheduler"].step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    outcome.weights = {names[p]: p.detach() for p in masters}
    return outcome, {name: masters[p].detach() for name, p in module.named_parameters(remove_duplicate=False)}


PIPELINES = [Layout(), Layout(2, 1, 1), Layout(2, 2, 1), Layout(2, 1, 1, "hanayo-zb")]
WAYS: list[Any] = [(Descent, None, 1), (Descent, 0.1, 2), (Fused, 0.1, 1), (Tied, None, 1)]


@pytest.mark.parametrize(
    ("layout", "how"),
    covered(product(PIPELINES, WAYS), by=[(PIPELINES[1], WAYS[3]), (PIPELINES[3], WAYS[1])]),
    ids=str,
)
def test_bit_equal(pool: Pool, layout: Layout, how: Any) -> None:
    ((expected, masters),) = pool.run(1, by_hand, *how, layout.num_microbatches)
    ranks = pool.run(layout.world_size, train, layout, *how)
    ours = merge([outcome for outcome, _ in ranks], layout)
    assert_bit_equal(ours.gradients, expected.gradients)
    assert_bit_equal(ranks[0][1], masters)
    assert_bit_equal(ours.weights, expected.weights)


SHARED = [Layout(2, 1, 2), Layout(cube=(2, 1, 1)), Layout(2, 1, 1, cube=(1, 2, 1)), Layout(1, 1, 2, cube=(1, 1, 2))]


@pytest.mark.parametrize("layout", covered(SHARED, by=SHARED[:1]), ids=str)
def test_sums_over_ranks_are_in_fp32(pool: Pool, layout: Layout) -> None:
    """Ranks compute with other parts of a batch or a weight, and round products to bf16 where one process doesn't."""
    ((expected, masters),) = pool.run(1, by_hand, Descent, 0.1, 2, layout.num_microbatches)
    ranks = pool.run(layout.world_size, train, layout, Descent, 0.1, 2)
    ours = merge([outcome for outcome, _ in ranks], layout)
    largest = max(gradient.abs().max() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert ours.gradients[name].dtype is torch.float32
        assert (ours.gradients[name] - gradient).abs().max() <= 2e-2 * largest, name
    for name, master in masters.items():
        assert (ranks[0][1][name] - master).abs().max() <= 1e-5, name  # steps are about 2e-4


def resume(layout: Layout, path: str, epochs: list[int], save_full: bool) -> None:
    """Train in several runs up to these epochs, each of which starts from the checkpoint of the one before."""
    for index, epoch in enumerate(epochs):
        trainer = trainer_for(layout, max_epochs=epoch, save_full=save_full)
        shares = [{k: v[data_rank(layout) :: layout.data] for k, v in batch.items()} for batch in batches()]
        trainer.fit(models.build(Adaptive), make_loader(shares), ckpt_path=path if index else None)
        trainer.save_checkpoint(path)


class Adaptive(models.MLP):
    """Makes its states when it is constructed, in bf16."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=1e-4)


SAVED = [(Layout(2), True), (Layout(2), False), (Layout(2, 1, 1, cube=(1, 2, 1)), False)]


@pytest.mark.parametrize(("layout", "save_full"), covered(SAVED, by=[SAVED[1]]), ids=str)
def test_a_checkpoint_has_the_master_weights(pool: Pool, layout: Layout, save_full: bool, tmp_path: Any) -> None:
    path = str(tmp_path / "training.ckpt")
    pool.run(layout.world_size, resume, layout, path, [2], save_full)
    at_once = read(path)["state_dict"]
    pool.run(layout.world_size, resume, layout, path, [1, 2], save_full)
    saved = read(path)
    assert_bit_equal(saved["state_dict"], at_once)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    states = saved["optimizer_states"][0]["state"]
    assert {state["sum"].dtype for state in states.values()} == {torch.float32}
    models.build(models.MLP, torch.bfloat16).load_state_dict(saved["state_dict"])


def masters(parameters: list[nn.Parameter], optimizers: list[torch.optim.Optimizer]) -> StepValues:
    options = SimpleNamespace(master_weights="fp32", offload_optimizer=False)
    run: Any = SimpleNamespace(options=options, module=SimpleNamespace(parameters=lambda: parameters))
    return StepValues(run, optimizers, None, None)


def test_steps_too_small_for_bf16_add_up() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weights = masters([parameter], [optimizer := torch.optim.SGD([parameter], lr=1.0)])
    for _ in range(16):
        for _ in range(300):
            (parameter * 2.0**-18).sum().backward()  # in bf16 no more than 256 of them add up
        assert parameter.dtype is torch.bfloat16 and parameter.grad.unique().item() == 300 * 2.0**-18
        optimizer.step()
        optimizer.zero_grad()
    with weights.in_use():
        assert parameter.unique().item() == 1 - 4800 * 2.0**-18
    assert parameter.unique().item() == torch.tensor(1 - 4800 * 2.0**-18).bfloat16().item()


def test_what_a_hook_writes_becomes_the_master_weight() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    weights = masters([parameter], [optimizer := torch.optim.SGD([parameter], lr=2.0**-12)])
    parameter.sum().backward()
    optimizer.step()
    parameter.data[0] = 3.0
    with weights.in_use():
        assert parameter.tolist() == [3.0, 1 - 2.0**-12]


def test_a_closure_runs_in_bf16_before_the_step() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    weights, dtypes = masters([parameter], [optimizer]), []
    memory = parameter.data_ptr()

    def closure() -> float:
        dtypes.append(parameter.dtype)
        parameter.sum().backward()
        return 7.0

    assert optimizer.step(closure) == 7.0 and optimizer.step(closure=closure) == 7.0
    assert dtypes == [torch.bfloat16] * 2 and parameter.tolist() == [-0.5, -0.5]
    weights.close()
    assert parameter.grad is None and parameter.data_ptr() == memory
    parameter.sum().backward()
    optimizer.step(lambda: dtypes.append(parameter.grad.dtype))
    assert dtypes[2:] == [torch.bfloat16] and parameter.tolist() == [-1.0, -1.0]


def test_a_step_that_fails_leaves_the_weights_as_they_were() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    weights = masters([parameter], [optimizer])
    optimizer.param_groups[0]["lr"] = "wrong"
    parameter.sum().backward()
    with pytest.raises(TypeError):
        optimizer.step()
    weights.abandon()
    assert parameter.dtype is torch.bfloat16 and parameter.tolist() == [1.0, 1.0]


def test_frozen_parameters_have_none() -> None:
    frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    trained = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with masters([frozen, trained], [torch.optim.SGD([frozen, trained])]).in_use():
        assert (frozen.dtype, trained.dtype) == (torch.bfloat16, torch.float32)


def test_what_has_no_use_for_them_is_refused() -> None:
    wide, low = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(HanayoError, match="^master_weights='fp32' is for parameters in bf16 or fp16"):
        masters([wide], [torch.optim.SGD([wide])])
    with pytest.raises(UnsupportedError, match="^master_weights='fp32' can't be used with LBFGS"):
        masters([low], [torch.optim.LBFGS([low])])
    with pytest.raises(HanayoError, match="^master_weights='bf16' is unknown"):
        make_strategy(Layout(2), master_weights="bf16")
