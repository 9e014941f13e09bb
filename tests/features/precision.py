"""Features: the precisions of a Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch import Tensor
from torch.amp import GradScaler

from tests.features.feature import LAYOUTS, Equal, Feature, FeatureOutcome, RefusedByLightning
from tests.features.net import Net
from tests.features.trial import Trial
from tests.harness.training import unguarded

BF16 = Equal(2e-2)
"""bf16 has 8 bits"""
FP16 = Equal(8e-3)
"""fp16 has 11"""


class SeesTypes(Net):
    """Notes the types that steps and hooks find."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        autocast = torch.is_autocast_enabled("cpu") and str(torch.get_autocast_dtype("cpu"))
        types = {"inputs": x.dtype, "outputs": logits.dtype, "default": torch.get_default_dtype()}
        self.types |= {name: str(dtype) for name, dtype in types.items()} | {"autocast": autocast}
        return logits

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with unguarded(self.trainer):
            self.types["gradients"] = sorted({str(p.grad.dtype) for p in self.parameters() if p.grad is not None})


class Overflows(SeesTypes):
    """A gradient of pipeline rank 0 overflows in the second batch."""

    def on_after_backward(self) -> None:
        with unguarded(self.trainer):
            gradient = self.head.weight.grad
            if gradient is not None and self.trainer.fit_loop.batch_idx == 1:
                gradient.fill_(float("inf"))


def fit(trial: Trial) -> None:
    assert isinstance(trial.module, SeesTypes)
    trial.trainer.fit(trial.module, datamodule=trial.data)
    trial.record(types=dict(trial.module.types))


def with_scaler(_: Path) -> dict[str, Any]:
    """On CPUs `precision="16-mixed"` is bf16; this is fp16."""
    return {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**8, growth_interval=2))}


def everywhere(outcome: FeatureOutcome) -> dict[str, FeatureOutcome]:
    """The same outcome on all layouts, with a cube, too."""
    return dict.fromkeys(LAYOUTS, outcome)


def _feature(
    name: str, outcome: FeatureOutcome, trainer: Callable[[Path], dict[str, Any]] | None = None, note: str = ""
) -> Feature:
    options = trainer or (lambda _: {"precision": name})
    label = f'`precision="{name}"`' if trainer is None else name
    return Feature(label, options, SeesTypes, script=fit, outcomes=everywhere(outcome), note=note)


FEATURES = [
    _feature("32-true", Equal(), note="in this table also the types that steps, blocks and hooks find"),
    _feature("64-true", Equal(1e-12)),
    _feature("bf16-mixed", BF16),
    _feature("bf16-true", BF16),
    _feature("16-mixed", BF16, note="on CPUs Lightning takes bf16 instead, and says so"),
    Feature(
        "`MixedPrecision` with fp16 and a `GradScaler`",
        with_scaler,
        Overflows,
        script=fit,
        outcomes=everywhere(FP16),
        note="all ranks skip the step in which one has an infinite gradient",
    ),
    _feature("16-true", FP16),
    _feature('`plugins=HalfPrecision("bf16-true")`', BF16, lambda _: {"plugins": HalfPrecision("bf16-true")}),
    _feature(
        "transformer-engine",
        RefusedByLightning("transformer_engine"),
        note="without its package; with it, refused where a model is cut, since its fp8 context is one per process",
    ),
]
