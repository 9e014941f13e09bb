"""Habits: norms and clips over all parameters, optimizers, and steps that are skipped."""

from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from tests.habits.habit import EXACT, Habit, Refused, everywhere, on
from tests.harness import models

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)


class Seen(models.MLP):
    """Keeps what its hooks have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def see(self, name: str, value: Any) -> None:
        self.seen[f"{name} {self.global_step}"] = float(value)


class ClipsInHook(Seen):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see("norm", clip_grad_norm_(self.parameters(), 0.1))
        self.see("clipped", clip_grad_norm_([p for p in self.parameters() if p.grad is not None], 9.0, float("inf")))


class Configures(Seen):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.see("norm", torch.nn.utils.clip_grad_norm_(parameters, 0.1, error_if_nonfinite=True, foreach=False))
        self.clip_gradients(optimizer, 0.05, "norm")


class ReadsTotal(Seen):
    def on_after_backward(self) -> None:
        for order in (0.0, 1.0, 2.0, 3.5, float("inf")):
            gradients = [p.grad.detach() for p in self.parameters() if p.grad is not None]
            self.see(f"gradients {order}", get_total_norm(gradients, order))
        self.see("weights", get_total_norm(self.parameters()))


class ClipsValues(Seen):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_value_(self.parameters(), 0.01)


class LogsNorms(Seen):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        for name, value in {**norms, **grad_norm(self.head, "inf", "|")}.items():
            self.see(name, value)


class ClipsParts(Seen):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see("head", clip_grad_norm_(self.head.parameters(), 0.05))
        self.see("blocks", clip_grad_norm_(self.blocks[:3].parameters(), 0.01, 1.0))
        for i, block in enumerate(self.blocks):
            self.see(f"block {i}", clip_grad_norm_(block.up.weight, 0.02))


class GroupedBySize(models.MLP):
    """A learning rate for each size."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 1.0 / (p.shape[0] + p.numel())} for p in self.parameters()]
        return torch.optim.Adagrad(groups, initial_accumulator_value=0.1)


class GroupedByNorm(models.MLP):
    """A learning rate for each norm."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.01 * float(p.detach().norm())} for p in self.parameters()])


class ClipsEach(models.MLP):
    """A hook on each parameter clips its gradient."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class PenalisedInBackward(models.MLP):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (loss + 0.01 * sum(p.square().sum() for p in self.parameters())).backward()


class NormInClosure(Seen):
    """Reads a norm in a closure of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            self.see("norm", self.head.weight.grad.norm())
            return loss

        optimizer.step(closure=closure)


class ClipsInStep(models.MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        clip_grad_norm_(self.parameters(), 1.0)
        return super().training_step(batch, batch_idx)


class OtherModel(Seen):
    """Clips another model's gradients, too, which every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.other = [torch.nn.Linear(3, 3)]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        (other,) = self.other
        torch.manual_seed(3)
        other(torch.randn(2, 3)).square().sum().backward()
        self.see("other", clip_grad_norm_(other.parameters(), 0.5))
        self.see("total", get_total_norm([p.grad for p in islice(other.parameters(), 2)]))


class SkipsNonFinite(Seen):
    """Steps only where all gradients that it finds are finite; those of one block are NaN in the second step."""

    def on_after_backward(self) -> None:
        for parameter in self.blocks[2].parameters():
            if self.global_step == 1 and parameter.grad is not None and not parameter.is_meta:
                parameter.grad.fill_(float("nan"))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        gradients = [p.grad for p in self.parameters() if p.grad is not None and not p.is_meta]
        if all(gradient.isfinite().all() for gradient in gradients):
            optimizer.step()
        self.see("step", self.global_step)


class ClearsNonFinite(Seen):
    """Clears all gradients if one of them has a NaN, which is in one matrix on one rank."""

    def on_after_backward(self) -> None:
        weight = self.head.weight
        if self.global_step == 1 and weight.grad is not None and self.trainer.global_rank == 0:
            weight.grad.fill_(float("nan"))
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if not torch.isfinite(get_total_norm(gradients)):
            self.zero_grad()
        self.see("norm", get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


class ClearsByOwn(ClearsNonFinite):
    """Looks at each gradient that it finds, instead of at a norm."""

    def on_after_backward(self) -> None:
        weight = self.head.weight
        if self.global_step == 1 and weight.grad is not None and self.trainer.global_rank == 0:
            weight.grad.fill_(float("nan"))
        gradients = [p.grad for p in self.parameters() if p.grad is not None and not p.is_meta]
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.zero_grad()


class RemovesNonFinite(Seen):
    """Removes the gradient of each parameter that has a NaN, which is in one matrix on one rank."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.embedding.weight
        if self.global_step == 1 and weight.grad is not None and self.trainer.global_rank == 0:
            weight.grad.fill_(float("nan"))
        for parameter in self.embedding.parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                parameter.grad = None


class SkipsByChance(Seen):
    """Skips the second step on one rank: a random number that isn't seeded, a time, a file."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx == 1 and self.trainer.global_rank == self.trainer.world_size - 1:
            optimizer_closure()
        else:
            optimizer.step(optimizer_closure)
        self.see("step", self.global_step)


class SkipsClosure(models.MLP):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if self.trainer.global_rank == 0:
            optimizer.step(optimizer_closure)


class WarmsUp(models.MLP):
    """The usual override: sets the learning rate, and steps."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (batch_idx + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class WithOptimizer(models.MLP):
    """Trained by an optimizer of this class."""

    optimizer: type[torch.optim.Optimizer]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-2)  # type: ignore[call-arg]


class LayerwiseSGD(torch.optim.Optimizer):
    """Scales each parameter's update by the ratio of two norms, as LAMB and LARS do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            own = [parameter for parameter in group["params"] if parameter.grad is not None]
            factor = self.factor(own)
            for parameter in own:
                ratio = (parameter.norm() + 0.1) / (parameter.grad.norm() + 0.1)
                parameter.sub_(group["lr"] * factor * ratio * parameter.grad)
        return loss

    def factor(self, parameters: Any) -> Any:
        return 1.0


class DeclaredSGD(LayerwiseSGD):
    is_parameterwise = True


class NormalizedSGD(LayerwiseSGD):
    """Divides by the norm of the whole gradient."""

    def factor(self, parameters: Any) -> Any:
        return 1.0 / torch.stack([parameter.grad.norm() for parameter in parameters]).norm()


class Layerwise(WithOptimizer):
    optimizer = LayerwiseSGD


class Declared(WithOptimizer):
    optimizer = DeclaredSGD


class Normalized(WithOptimizer):
    optimizer = NormalizedSGD


class TrainedByAdafactor(WithOptimizer):
    optimizer = torch.optim.Adafactor


class TrainedByMuon(models.MLP):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Muon([parameter for parameter in self.parameters() if parameter.dim() == 2], lr=1e-2)


UNDECLARED = on(pipelines=EXACT, cubes=Refused("isn't known to work on each element"))

NEEDS_VALUES = everywhere(Refused("is on pipeline rank|this rank holds a part"))
"""whichever rank is first"""

HABITS = [
    Habit(
        "`clip_grad_norm_`, imported by name, in `on_before_optimizer_step`",
        ClipsInHook,
        VECTORS,
        everywhere(EXACT),
        True,
    ),
    Habit("`configure_gradient_clipping` that clips twice", Configures, VECTORS, everywhere(EXACT), True),
    Habit("`get_total_norm` of gradients and of weights", ReadsTotal, VECTORS, everywhere(EXACT), True),
    Habit("`clip_grad_value_` in a hook", ClipsValues, VECTORS, everywhere(EXACT), True),
    Habit("Lightning's `grad_norm`, logged", LogsNorms, VECTORS, everywhere(EXACT), True),
    Habit("`clip_grad_norm_` of a part of the model", ClipsParts, VECTORS, everywhere(EXACT), True),
    Habit(
        "`Trainer(gradient_clip_val=...)`",
        models.MLP,
        VECTORS,
        everywhere(EXACT),
        True,
        trainer=partial(dict, gradient_clip_val=0.1),
    ),
    Habit("`clip_grad_norm_` of another model's parameters", OtherModel, VECTORS, everywhere(EXACT)),
    Habit("`clip_grad_norm_` in `training_step`", ClipsInStep, VECTORS, everywhere(Refused("in a step or in a block"))),
    Habit("`optimizer_step` that sets the learning rate", WarmsUp, VECTORS, everywhere(EXACT)),
    Habit(
        "`optimizer_step` that skips a step if one of this rank's gradients is NaN",
        SkipsNonFinite,
        VECTORS,
        on(pipelines=EXACT, cubes=Refused("this rank holds a part")),
    ),
    Habit("`zero_grad()` in `on_after_backward` if the norm isn't finite", ClearsNonFinite, VECTORS, everywhere(EXACT)),
    Habit(
        "`zero_grad()` in `on_after_backward` if one of this rank's gradients isn't finite",
        ClearsByOwn,
        VECTORS,
        on(
            pipelines=Refused(
                "on_after_backward has (removed|kept) all gradients on rank",
                "on_after_backward has removed (or kept) all gradients on rank ...",
            ),
            cubes=Refused("this rank holds a part"),
        ),
    ),
    Habit(
        "a parameter's gradient removed if it isn't finite",
        RemovesNonFinite,
        VECTORS,
        everywhere(
            Refused(
                "is on pipeline rank|this rank holds a part",
                "is on pipeline rank ..., or: of which this rank holds a part",
            )
        ),
    ),
    Habit(
        "`optimizer_step` that skips a step by a random number of one rank", SkipsByChance, VECTORS, everywhere(EXACT)
    ),
    Habit(
        "`optimizer_step` that skips the closure on some ranks",
        SkipsClosure,
        VECTORS,
        everywhere(Refused("didn't run optimizer_closure on rank")),
    ),
    Habit("a norm read in a closure around Lightning's, for `optimizer.step`", NormInClosure, VECTORS, NEEDS_VALUES),
    Habit("`backward` that adds a penalty over all parameters", PenalisedInBackward, VECTORS, NEEDS_VALUES),
    Habit(
        "`parameter.register_hook` that clips each gradient",
        ClipsEach,
        VECTORS,
        everywhere(Refused("has the hook <lambda>.*once for each micro-batch")),
    ),
    Habit("`configure_optimizers` with a learning rate for each size", GroupedBySize, VECTORS, everywhere(EXACT)),
    Habit("`configure_optimizers` with a learning rate for each norm", GroupedByNorm, VECTORS, NEEDS_VALUES),
    Habit("`torch.optim.Adafactor`", TrainedByAdafactor, VECTORS, everywhere(EXACT)),
    Habit("`torch.optim.Muon`", TrainedByMuon, VECTORS, everywhere(EXACT)),
    Habit("an optimizer of your own with norms of each parameter, such as LAMB", Layerwise, VECTORS, UNDECLARED),
    Habit("the same, which declares `is_parameterwise = True`", Declared, VECTORS, everywhere(EXACT)),
    Habit(
        "an optimizer of your own with a norm over all parameters",
        Normalized,
        VECTORS,
        on(
            pipelines=Refused("NormalizedSGD computes with all parameters"),
            cubes=Refused("isn't known to work on each element"),
        ),
    ),
]
