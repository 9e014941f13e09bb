"""Wave pipelines and 3-D tensor parallelism for PyTorch Lightning: `Trainer(strategy="hanayo")`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_hanayo.checking import check
    from lightning_hanayo.chunked_loss import chunk_loss, chunked_cross_entropy
    from lightning_hanayo.strategy import HanayoStrategy, WaveReport

__all__ = ["HanayoStrategy", "WaveReport", "__version__", "check", "chunk_loss", "chunked_cross_entropy"]

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    """Import it on first use, so that `lightning_hanayo.schedule` loads neither torch nor Lightning."""
    if name == "check":
        from lightning_hanayo import checking

        return checking.check
    if name in ("chunk_loss", "chunked_cross_entropy"):
        from lightning_hanayo import chunked_loss

        return getattr(chunked_loss, name)
    if name in __all__:
        from lightning_hanayo import strategy

        return getattr(strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
