"""The Lightning strategy. Importing this package registers the name `"hanayo"`."""

try:
    from lightning_hanayo_autoload import register  # in an installed package this is a top-level module of its own
except ImportError:
    from lightning_hanayo._autoload import register  # in a checkout on the path

from lightning_hanayo.strategy.report import WaveReport
from lightning_hanayo.strategy.strategy import HanayoStrategy

register()

__all__ = ["HanayoStrategy", "WaveReport"]
