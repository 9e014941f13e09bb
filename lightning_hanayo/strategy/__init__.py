"""The Lightning strategy. Importing this package registers the name `"hanayo"`, and shortens uncaught errors."""

try:
    from lightning_hanayo._autoload import register  # in a checkout, of which an editable install has an older copy
except ImportError:
    # in an installed package it is a top-level module of its own
    from lightning_hanayo_autoload import register  # type: ignore[no-redef]

from lightning_hanayo.strategy.report import WaveReport
from lightning_hanayo.strategy.strategy import HanayoStrategy
from lightning_hanayo.tracebacks import install

register()
install()

__all__ = ["HanayoStrategy", "WaveReport"]
