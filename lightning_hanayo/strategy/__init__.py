"""The strategy: where Lightning's hooks meet the pipeline. Importing it registers `"hanayo"`."""

from lightning_hanayo._autoload import register
from lightning_hanayo.strategy.strategy import HanayoStrategy

register()

__all__ = ["HanayoStrategy"]
