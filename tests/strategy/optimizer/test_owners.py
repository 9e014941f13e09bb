"""Optimizers of whole parameters give, on any layout, the weights of one process; each state is on one rank."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from lightning_hanayo.errors import PeerFailed, UnsupportedError
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_bit_equal,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge_owned,
    own_weights,
)


class Lamb(Optimizer):
    """LAMB without a norm over all gradients: a step has the length of its parameter."""

    is_parameterwise = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                state["count"] = state.get("count", 0) + 1
                update = mean + 0.01 * parameter / state["count"]
                parameter.sub_(update * (parameter.norm() / (update.norm() + 1e-3)), alpha=group["lr"])
        return loss


def adafactor(parameters: list[Any]) -> Optimizer:
    """Gradients of the size of rounding errors, such as a key's bias has, stay small."""
    return torch.optim.Adafactor(parameters, lr=1e-2, eps=(1e-6, 1e-3))


def lamb(parameters: list[Any]) -> Optimizer:
    return Lamb(parameters, lr=1e-2)


def muon(parameters: list[Any]) -> Optimizer:
    return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=1e-2)


class InDouble(models.HuggingFace):
    """Its loss has the parameters' dtype; that of transformers is in fp32."""

    def loss(self, batch: models.Batch) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def gpt2() -> Any:
    return InDouble(models.gpt2(heads=4).model)  # type: ignore[arg-type]


def llama() -> Any:
    return InDouble(models.llama(heads=4, kv_heads=4).model)  # type: ignore[arg-type]


def trained_by(optimizer: Any, model: Any, dtype: torch.dtype) -> Any:
    """The model with this optimizer, whose rate changes after each epoch."""

    def configure(module: Any) -> Any:
        made = optimizer(list(module.parameters()))
        return [made], [ExponentialLR(made, 0.5)]

    module = models.build(model, dtype)
    module.__class__ = type("Configured", (type(module),), {"configure_optimizers": configure})
    return module


def train(
    layout: Layout,
    optimizer: Any,
    model: Any = gpt2,
    *,
    path: str = "",
    epochs: int = 2,
    resumes: bool = False,
    dtype: torch.dtype = torch.float64,
    trainer_options: Any = (),
    **options: Any,
) -> tuple[dict[str, Tensor], list[str], int]:
    """This rank's weights, the names of the parameters of which it has states, and the bytes of these."""
    trainer = make_trainer(
        layout,
        strategy="auto"
        if layout == Layout()
        else make_strategy(layout, loss_weight="samples" if model is models.MLP else "tokens", **options),
        max_epochs=epochs,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        **{"precision": "64-true"} | dict(trainer_options),
    )
    module = trained_by(optimizer, model, dtype)
    batches = models.vectors((12,) * 4, dtype) if model is models.MLP else models.texts((12,) * 4)
    shares = [{name: value[data_rank(layout) :: layout.data] for name, value in one.items()} for one in batches]
    trainer.fit(module, make_loader(shares), ckpt_path=f"{path}/first.ckpt" if resumes else None, weights_only=False)
    if path:
        trainer.save_checkpoint(f"{path}/{'second' if resumes else 'first'}.ckpt")
    names = {parameter: name for name, parameter in module.named_parameters()}
    states = trainer.optimizers[0].state
    sizes = [value.nbytes for one in states.values() for value in one.values() if isinstance(value, Tensor)]
    return own_weights(module, trainer), [names[parameter] for parameter in states], sum(sizes)


def merged(layout: Layout, ranks: list[Any]) -> dict[str, Tensor]:
    """The weights, on which all data ranks agree."""
    replicas = [merge_owned([ranks[rank][0] for rank in group]) for group in layout.topology.groups("pipe")]
    for replica in replicas[1:]:
        assert_bit_equal(replica, replicas[0])
    return replicas[0]


CUBES = [
    Layout(cube=(1, 2, 1)),
    Layout(cube=(1, 2, 2)),
    Layout(pipe=2, cube=(1, 2, 1)),
    Layout(cube=(2, 2, 1)),
    Layout(data=2, cube=(2, 1, 1)),
    Layout(pipe=2, data=2),
    Layout(data=2),
]
OPTIMIZERS, MODELS = (lamb, adafactor), (gpt2, llama, models.MLP)


@pytest.mark.parametrize(
    ("layout", "optimizer", "model", "sharded"),
    [
        case
        for case in covered(
            product(CUBES, OPTIMIZERS, MODELS, (False, True)),
            by=[(CUBES[5], lamb, models.MLP, True)],
        )
        if case.values[0].topology.cube != (1, 1, 1) or case.values[3]
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_whole_parameters_are_stepped_as_in_one_process(
    pool: Pool, layout: Layout, optimizer: Any, model: Any, sharded: bool
) -> None:
    ranks = pool.run(layout.world_size, partial(train, layout, optimizer, model, shard_optimizer=sharded))
    ((expected, all_names, _),) = pool.run(1, partial(train, Layout(), optimizer, model))
    assert_close(merged(layout, ranks), expected, 1e-6 if model is llama else 1e-10)  # its norms compute in fp32
    names = [name for _, own, _ in ranks for name in own]
    assert sorted(names) == sorted(all_names), "each parameter's states are on one rank"


@pytest.mark.thorough
def test_owners_share_the_states(pool: Pool) -> None:
    """Of the embedding and the matrices: no rank has more than the largest parameter and its share."""
    layout = Layout(cube=(1, 2, 2))
    sizes = [size for *_, size in pool.run(4, partial(train, layout, lamb, models.MLP, epochs=1))]
    ((_, _, whole),) = pool.run(1, partial(train, Layout(), lamb, models.MLP, epochs=1))
    assert sum(sizes) == whole and max(sizes) < 0.4 * whole


WAYS: list[tuple[Layout, Any, float, dict[str, Any]]] = [
    (Layout(cube=(1, 2, 1)), muon, 2e-2, {"epochs": 1}),
    (Layout(data=2), muon, 2e-2, {"shard_optimizer": True}),
    (Layout(cube=(1, 2, 1)), adafactor, 1e-10, {"offload_optimizer": True}),
    (Layout(cube=(1, 2, 1)), adafactor, 1e-10, {"trainer_options": {"precision": "64-true", "max_steps": 1}}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "optimizer", "tolerance", "how"),
    WAYS,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_other_ways(pool: Pool, layout: Layout, optimizer: Any, tolerance: float, how: Any) -> None:
    """Muon computes in bf16."""
    ranks = pool.run(layout.world_size, partial(train, layout, optimizer, **how))
    ((expected, *_),) = pool.run(1, partial(train, Layout(), optimizer, **how))
    assert_close(merged(layout, ranks), expected, tolerance)


@pytest.mark.thorough
def test_master_weights_are_stepped_whole(pool: Pool) -> None:
    """Both round from fp32, in which sums over ranks differ."""
    how: Any = {
        "model": models.MLP,
        "dtype": torch.bfloat16,
        "master_weights": "fp32",
        "trainer_options": {"precision": "bf16-true"},
    }
    layout, one = Layout(data=2, cube=(1, 2, 1)), Layout(pipe=2)
    found = merged(layout, pool.run(4, partial(train, layout, lamb, **how)))
    assert_close(found, merged(one, pool.run(2, partial(train, one, lamb, **how))), 2e-2)


RUNS = [
    (Layout(cube=(1, 2, 1)), Layout(pipe=2), False),
    (Layout(pipe=2), Layout(data=2, cube=(1, 2, 1)), False),
    (Layout(data=2), Layout(cube=(1, 2, 2)), True),
    (Layout(pipe=2, cube=(1, 2, 1)), Layout(), False),
    (Layout(), Layout(pipe=2, cube=(1, 2, 1)), True),
    (Layout(data=2, cube=(1, 2, 1)), Layout(), True),
]


@pytest.mark.parametrize(("first", "second", "save_full"), covered(RUNS, by=[RUNS[0]]), ids=str)
def test_any_layout_reads_its_checkpoints(
    pool: Pool, tmp_path: Any, first: Layout, second: Layout, save_full: bool
) -> None:
    if second == Layout() and not save_full:
        save_full = True  # a plain Trainer reads files
    options = {"save_full": save_full, "shard_optimizer": True}
    how: Any = {"model": models.MLP, "path": str(tmp_path)} | options
    pool.run(first.world_size, partial(train, first, adafactor, epochs=1, **how))
    ranks = pool.run(second.world_size, partial(train, second, adafactor, resumes=True, **how))
    ((expected, *_),) = pool.run(1, partial(train, Layout(), adafactor, models.MLP))
    assert_close(merged(second, ranks), expected, 1e-10)


class ReadsStates(models.MLP):
    def on_train_batch_end(self, *_: Any) -> None:
        for state in self.optimizers().optimizer.state.values():
            state["mean"].mul_(0.5)


class SavesStates(models.MLP):
    def on_train_end(self) -> None:
        self.optimizers().state_dict()


def eager(parameters: list[Any]) -> Optimizer:
    made = Lamb(parameters, lr=1e-2)
    made.state = {one: {"mean": torch.zeros_like(one)} for one in parameters}  # type: ignore[assignment]
    return made


def hooked(parameters: list[Any]) -> Optimizer:
    made = Lamb(parameters, lr=1e-2)
    made.register_step_post_hook(lambda *_: None)
    return made


REFUSED = [
    (ReadsStates, lamb, "optimizer.state can't be used here"),
    (SavesStates, lamb, "has on this rank only"),
    (models.MLP, eager, "makes states when it is constructed"),
    (models.MLP, hooked, "has a hook on its steps"),
]


@pytest.mark.parametrize(("model", "optimizer", "message"), covered(REFUSED, by=REFUSED[:1]))
def test_states_of_other_ranks_are_refused(pool: Pool, model: Any, optimizer: Any, message: str) -> None:
    for error in pool.run(2, partial(refused, model, optimizer)):
        assert message in error


def refused(model: Any, optimizer: Any) -> str:
    """The error of a run."""
    layout = Layout(cube=(1, 2, 1))
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_steps=1)
    module = trained_by(optimizer, model, torch.float32)
    with pytest.raises((UnsupportedError, PeerFailed)) as error:
        trainer.fit(module, make_loader(models.vectors((12,))))
    return str(error.value)
