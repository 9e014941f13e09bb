"""The strategy: where Lightning's hooks meet the pipeline. Importing it registers `"hanayo"`."""

from lightning_hanayo.strategy.strategy import HanayoStrategy

__all__ = ["HanayoStrategy"]
