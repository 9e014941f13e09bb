"""On a pretended GPU each rank has its tensors on the GPU, and what it leaves in host memory never meets them.

Values are those of the same training on the CPU: both compute the same, in the same order.
"""

import warnings
from contextlib import nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from torch import Tensor, nn
from torch.nn import functional

from tests.harness import models
from tests.harness.devices import largest_gap, train_on, trainer_on
from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.pretended_gpu import DeviceMixError, pretended_gpu
from tests.harness.staged_groups import staged_groups
from tests.harness.training import Layout, Outcome, make_loader, make_strategy, merge, unguarded


class Mixed(models.MLP):
    """Sums divided by numbers, as many as there are kinds of them, a norm with buffers, and logs of both devices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(models.WIDTH)

    def loss(self, batch: Batch) -> Tensor:
        logits = self(self.norm(batch["x"]))
        squares = logits.square().sum()
        self.log("on_cpu", torch.tensor(1.0))
        return functional.cross_entropy(logits, batch["y"]) + 0.01 * squares / 8 + 0.01 * squares / torch.tensor(8.0)


class Places(Callback):
    """The devices of this rank's parameters, gradients and buffers when the optimizer steps."""

    def __init__(self) -> None:
        self.types: set[str] = set()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        with unguarded(trainer):
            owned = [p for p in (*pl_module.parameters(), *pl_module.buffers()) if not p.is_meta]
            self.types |= {one.device.type for one in (*owned, *(p.grad for p in owned if p.grad is not None))}


GPT = partial(models.gpt, heads=4)
CASES: list[tuple[Layout, Any, dict[str, Any], dict[str, Any]]] = [
    (Layout(waves=2), Mixed, {}, {"precision": "bf16-mixed", "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}),
    (Layout(waves=2), Mixed, {}, {"precision": "16-mixed"}),
    (Layout(waves=2), GPT, {"master_weights": "fp32", "tied_gradients": "at_once"}, {"precision": "bf16-true"}),
    (Layout(waves=2, schedule="hanayo-zb"), GPT, {}, {"precision": "bf16-mixed"}),
    (Layout(2, 2, 1), Mixed, {}, {"gradient_clip_val": 1.0}),
    (Layout(2, 1, 2), GPT, {}, {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}),
    (Layout(cube=(2, 1, 2), outside="replicate"), GPT, {}, {}),
    (Layout(2, 1, 1, cube=(1, 2, 1)), GPT, {}, {"precision": "16-mixed", "gradient_clip_val": 1.0}),
]


def train(device: str, layout: Layout, model: Any, strategy: dict[str, Any], options: dict[str, Any]) -> Any:
    """The outcome of one rank, and the devices of what it owns."""
    warnings.filterwarnings("ignore", message=".*will normalise by the mean")  # of a model with BatchNorm
    places = Places()
    batches = models.vectors((8,) * 2) if model is Mixed else models.windows((8,) * 2)
    with pretended_gpu() if device == "cuda" else nullcontext(), staged_groups(device):
        options = options | {"strategy": make_strategy(layout, **strategy), "callbacks": [places]}
        return train_on(device, layout, model, batches, **options), places.types


def outcome(pool: Pool, device: str, layout: Layout, *arguments: Any) -> Outcome:
    """The outcome of all ranks, whose tensors were on the device."""
    ranks = pool.run(layout.world_size, train, device, layout, *arguments)
    assert set().union(*(types for _, types in ranks)) == {device}
    return merge([own for own, _ in ranks], layout)


@pytest.mark.parametrize(
    ("layout", "model", "strategy", "options"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.thorough) for case in CASES[1:])],
    ids=["-".join(map(str, (layout, *options.values()))) for layout, _, _, options in CASES],
)
def test_no_tensor_of_the_host_meets_one_of_the_gpu(
    pool: Pool, layout: Layout, model: Any, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    on_gpu = outcome(pool, "cuda", layout, model, strategy, options)
    assert largest_gap(on_gpu, outcome(pool, "cpu", layout, model, strategy, options)) == 0


def saved_after_fit(layout: Layout) -> list[str]:
    """The names of what a script saves after `fit`, when Lightning has moved the module to the CPU."""
    with pretended_gpu(), staged_groups("cuda"), TemporaryDirectory() as folder:
        trainer, module = trainer_on("cuda", layout, max_steps=1), models.build(GPT)
        trainer.fit(module, make_loader(models.windows((8,))))
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        strategy: Any = trainer.strategy
        whole = strategy.gather_model(module)
        return (
            [] if whole is None else [name for name, value in whole.state_dict().items() if value.device.type == "cpu"]
        )


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [Layout(2), Layout(cube=(1, 2, 1))], ids=str)
def test_the_whole_model_is_saved_after_fit(pool: Pool, layout: Layout) -> None:
    names, _ = pool.run(layout.world_size, saved_after_fit, layout)
    assert names == list(models.build(GPT).state_dict())


def refusals() -> list[str]:
    """What a pretended GPU refuses, of what a GPU does."""
    with pretended_gpu():
        x, host = torch.ones(2, device="cuda"), torch.ones(2)
        assert (x * torch.tensor(2.0)).device == x.new_zeros(1).device == host.cuda().device == x.device
        assert x.cpu().device.type == "cpu" and (x + 1).tolist() == [2.0, 2.0]
        refused = []
        for name, call in {
            "a sum": lambda: x + host,
            "a stack of numbers": lambda: torch.stack([x.sum(), host.sum()]),
            "a sum into the host's memory": lambda: host.sum().add_(x.sum()),
            "a generator": lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
        }.items():
            try:
                call()
            except DeviceMixError:
                refused.append(name)
        return refused


def test_a_pretended_gpu_refuses_what_a_gpu_refuses(pool: Pool) -> None:
    (refused,) = pool.run(1, refusals)
    assert refused == ["a sum", "a stack of numbers", "a sum into the host's memory", "a generator"]
