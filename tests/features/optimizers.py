"""Features: optimizers and schedulers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from tests.features.checkpoints import resume
from tests.features.feature import EQUAL, Equal, Feature, RefusedByLightning, on
from tests.features.net import Net
from tests.habits.habit import Refused
from tests.harness.models import WIDTH


def with_optimizer(configure: Callable[["Net"], Any]) -> Callable[[], Net]:
    """A module with this `configure_optimizers`."""

    def make() -> Net:
        class Configured(Net):
            def configure_optimizers(self) -> Any:
                return configure(self)

        return Configured()

    return make


def _sgd(module: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _scheduled(make: Callable[[torch.optim.Optimizer], Any], **options: Any) -> Callable[[], Net]:
    def configure(module: Net) -> Any:
        optimizer = _sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer)} | options}

    return with_optimizer(configure)


def _groups(module: Net) -> Any:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _lists(module: Net) -> Any:
    optimizer = _sgd(module)
    return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]


class OwnSchedulerStep(Net):
    """Schedulers that take the epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.logger.log_metrics({"rate": scheduler.get_last_lr()[0]}, self.global_step)  # type: ignore[union-attr]


class OwnOptimizerStep(Net):
    """Warms the rate up, as Lightning's documentation shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)


class OwnZeroGrad(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5 / (1 + self.current_epoch), gradient_clip_algorithm="norm")


class OwnBackward(Net):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 0.5, *args, **kwargs)


def _optimizer(name: str, outcomes: Any = EQUAL, note: str = "", **options: Any) -> Feature:
    kind = getattr(torch.optim, name)
    shown = ", ".join(f"{key}={value!r}" for key, value in options.items() if key not in ("lr", "max_iter", "momentum"))
    return Feature(
        f"`torch.optim.{name}{shown and f'({shown})'}`",
        module=with_optimizer(lambda module: kind(module.parameters(), **options)),
        outcomes=outcomes,
        note=note,
    )


def _of_matrices(module: Net) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in module.parameters() if p.dim() == 2], lr=1e-3)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, as those of other packages do: every second step ends between where it began and ended."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0
        super().__init__(optimizer.param_groups, {})
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for fast, slow in self.slow.items():
                    fast.copy_(slow.lerp_(fast, 0.5))
        return loss


class SavedLookahead(torch.optim.Optimizer):
    """Keeps all that it has among the states of the optimizer inside, which it saves and loads."""

    is_elementwise = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {"count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for parameter in (one for one in group["params"] if one.grad is not None):
                slow = self.optimizer.state[parameter].setdefault("slow", parameter.detach().clone())
                if group["count"] % 2 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.param_groups = self.optimizer.param_groups


class SavedBeside(SavedLookahead):
    """Saves the states of the optimizer inside under a key of its own."""

    def state_dict(self) -> dict[str, Any]:
        return torch.optim.Optimizer.state_dict(self) | {"inner": self.optimizer.state_dict()}


class Several(torch.optim.Optimizer):
    """Steps several optimizers, each with groups of its own. The states of all are its own, so that it saves them."""

    is_elementwise = True

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for one in self.optimizers:
            one.state, one.param_groups = self.state, [next(groups) for _ in one.param_groups]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def _several(module: Net) -> torch.optim.Optimizer:
    matrices = torch.optim.SGD([p for p in module.parameters() if p.dim() == 2], lr=0.1, momentum=0.9)
    return Several(matrices, torch.optim.AdamW([p for p in module.parameters() if p.dim() != 2], lr=1e-3))


class SparseTable(Net):
    """Adds rows of a table, which alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table((x[:, 0] * 3).long().clamp(0, 9)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.table.parameters(), lr=1e-2)


class AveragesByHand(Net):
    """As torch's documentation shows: an average next to the module, which ends with it."""

    def on_train_start(self) -> None:
        vars(self)["average"] = AveragedModel(self)

    def on_train_batch_end(self, *_: Any) -> None:
        vars(self)["average"].update_parameters(self)

    def on_train_end(self) -> None:
        with torch.no_grad():
            averages = vars(self).pop("average").module
            for parameter, average in zip(self.parameters(), averages.parameters(), strict=True):
                parameter.copy_(average)


class AveragesAfterSteps(AveragesByHand):
    """The optimizer updates the average."""

    def on_train_start(self) -> None:
        super().on_train_start()
        optimizer: Any = self.optimizers()
        optimizer.optimizer.register_step_post_hook(lambda *_: vars(self)["average"].update_parameters(self))

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def _halves_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@torch.no_grad()
def _limits_norms(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        parameter.div_(parameter.norm().clamp(min=1.0))


def _with_step_hook(kind: str, hook: Callable[..., None]) -> Callable[["Net"], Any]:
    def configure(module: Net) -> Any:
        optimizer = _sgd(module)
        getattr(optimizer, f"register_step_{kind}_hook")(hook)
        return optimizer

    return configure


class AveragesFromTheStart(Net):
    """The average is a part of the module, made before it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.blocks)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.blocks)


def _with_rates(module: Net) -> Any:
    optimizer = _groups(module)
    return [optimizer], [lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 0.9**epoch])]


ADAPTIVE = on(Equal(5e-5), in_cube=Equal(5e-5))
"""An update of Adam's is as large for a tiny gradient, of which rounding is a large part."""
EVERYWHERE = on(Equal(), in_cube=Equal())
CAPTURABLE = RefusedByLightning("If capturable=True, params and state_steps must be on supported devices")
DIFFERENTIABLE = RefusedByLightning("a leaf Variable that requires grad is being used in an in-place operation")
NOT_CUT = Refused("LBFGS computes with all parameters")

FEATURES = [
    _optimizer("SGD", EVERYWHERE, lr=0.1, nesterov=True, momentum=0.9),
    _optimizer("SGD", EVERYWHERE, lr=0.1, momentum=0.9, dampening=0.1, maximize=True, foreach=True),
    _optimizer("SGD", EVERYWHERE, lr=0.1, weight_decay=0.1, fused=True),
    _optimizer("AdamW", ADAPTIVE, lr=1e-3),
    _optimizer("AdamW", ADAPTIVE, lr=1e-3, fused=True),
    _optimizer("AdamW", ADAPTIVE, lr=1e-3, foreach=True, maximize=True),
    _optimizer("AdamW", ADAPTIVE, lr=1e-3, foreach=False, amsgrad=True),
    _optimizer("Adam", ADAPTIVE, lr=1e-3, amsgrad=True),
    _optimizer("RMSprop", ADAPTIVE, lr=1e-4),
    _optimizer("RMSprop", ADAPTIVE, lr=1e-4, centered=True, foreach=True),
    _optimizer("Rprop", EVERYWHERE, lr=1e-3),
    _optimizer("Adagrad", ADAPTIVE, lr=1e-3),
    _optimizer("Adagrad", ADAPTIVE, lr=1e-3, fused=True),
    _optimizer("NAdam", ADAPTIVE, lr=1e-3),
    _optimizer("RAdam", ADAPTIVE, lr=1e-3),
    _optimizer("Adamax", ADAPTIVE, lr=1e-3),
    _optimizer("Adadelta", ADAPTIVE, lr=0.1),
    _optimizer("ASGD", EVERYWHERE, lr=0.1),
    Feature(
        "`torch.optim.SparseAdam` of an embedding with `sparse=True`",
        module=SparseTable,
        outcomes=on(Equal(5e-5), in_cube=Refused("has sparse gradients, which a cube can't sum")),
    ),
    _optimizer("Adafactor", ADAPTIVE, lr=1e-3),
    Feature(
        "`torch.optim.Muon` of matrices",
        module=with_optimizer(_of_matrices),
        outcomes=on(Equal(0.02), in_cube=Equal(0.02)),
        note="it computes in bf16",
    ),
    _optimizer("LBFGS", on(NOT_CUT, in_cube=NOT_CUT), "works without a pipeline and a cube", lr=0.1, max_iter=3),
    Feature(
        "an optimizer around another, such as `Lookahead`",
        module=with_optimizer(lambda module: Lookahead(_sgd(module))),
        outcomes=on(Equal(), in_cube=Refused("lerp_ was called with")),
        note="this one copies the parameters when it is made; in a cube, make copies in the first step",
    ),
    Feature(
        "the same, which copies in the first step, saved and resumed",
        module=with_optimizer(lambda module: SavedLookahead(_sgd(module))),
        script=resume,
        outcomes=EVERYWHERE,
        note="what it has is in the states of the optimizer inside, whose `state_dict()` it returns",
    ),
    Feature(
        "the same, which saves the states inside next to its own",
        module=with_optimizer(lambda module: SavedBeside(_sgd(module))),
        script=resume,
        outcomes=on(Refused("has tensors under 'inner'"), in_cube=Refused("has tensors under 'inner'")),
    ),
    Feature(
        "an optimizer around several, each for some parameters, saved and resumed",
        module=with_optimizer(_several),
        script=resume,
        outcomes=ADAPTIVE,
        note="the states of all are in its own `state`",
    ),
    Feature(
        "a learning rate that is a tensor, saved and resumed",
        module=with_optimizer(lambda module: torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-3))),
        script=resume,
        outcomes=ADAPTIVE,
    ),
    _optimizer("AdamW", on(CAPTURABLE, in_cube=CAPTURABLE), "by torch, on CPUs", lr=1e-3, capturable=True),
    _optimizer("SGD", on(DIFFERENTIABLE, in_cube=DIFFERENTIABLE), "by torch", lr=0.1, differentiable=True),
    Feature(
        "`AveragedModel` of the module, made and updated in hooks",
        module=AveragesByHand,
        outcomes=on(Equal(), in_cube=Refused("to was called with")),
        note="in a cube, use `EMAWeightAveraging` or `WeightAveraging`",
    ),
    Feature(
        "the same, updated in `register_step_post_hook` of the optimizer",
        module=AveragesAfterSteps,
        outcomes=on(Equal(), in_cube=Refused("to was called with")),
    ),
    Feature(
        "`register_step_pre_hook` that changes each gradient",
        module=with_optimizer(_with_step_hook("pre", _halves_gradients)),
        outcomes=EVERYWHERE,
    ),
    Feature(
        "`register_step_post_hook` that limits the norm of each parameter",
        module=with_optimizer(_with_step_hook("post", _limits_norms)),
        outcomes=on(Equal(), in_cube=Refused("norm was called with")),
        note="`if parameter.norm() > 1` is refused on a pipeline, too: it needs values of other ranks",
    ),
    Feature(
        "`AveragedModel` of the blocks, made in `__init__`",
        module=AveragesFromTheStart,
        outcomes=on(Refused(r"values are needed here \(copy_\)", "values are needed here (copy_)")),
        note="make it in `on_train_start`",
    ),
    Feature("a `LambdaLR` with one function per group", module=with_optimizer(_with_rates)),
    Feature("parameter groups with their own options", module=with_optimizer(_groups)),
    Feature("lists of optimizers and schedulers", module=with_optimizer(_lists)),
    Feature(
        "a scheduler that steps with each batch",
        module=_scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.2, 6), interval="step"),
    ),
    Feature(
        "a scheduler with `frequency=2`",
        module=_scheduled(lambda o: lr_scheduler.StepLR(o, 1, 0.5), interval="step", frequency=2),
    ),
    Feature(
        "`ReduceLROnPlateau` with `monitor`",
        lambda _: {"max_epochs": 4},
        _scheduled(
            lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1.0), monitor="val_loss"
        ),
    ),
    Feature(
        "a `SequentialLR`",
        module=_scheduled(
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.ConstantLR(o, 0.5, 1), lr_scheduler.ExponentialLR(o, 0.9)], [1]
            )
        ),
    ),
    Feature("overridden `lr_scheduler_step`", module=OwnSchedulerStep),
    Feature("overridden `optimizer_step`", module=OwnOptimizerStep),
    Feature("overridden `optimizer_zero_grad`", module=OwnZeroGrad),
    Feature("overridden `configure_gradient_clipping`", module=OwnClipping),
    Feature("overridden `backward`", module=OwnBackward),
    Feature("`configure_optimizers` returns None", module=with_optimizer(lambda _: None)),
]
