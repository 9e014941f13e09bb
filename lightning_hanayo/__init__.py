"""Wave pipelines and 3-D tensor parallelism for PyTorch Lightning: `Trainer(strategy="hanayo")`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_hanayo.strategy import HanayoStrategy

__all__ = ["HanayoStrategy"]


def __getattr__(name: str) -> object:
    """Import the strategy on first use: `lightning_hanayo.schedule` must load neither torch nor Lightning."""
    if name == "HanayoStrategy":
        from lightning_hanayo.strategy import HanayoStrategy

        return HanayoStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
