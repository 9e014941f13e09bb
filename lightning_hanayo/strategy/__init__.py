"""The strategy: where Lightning's hooks meet the pipeline. Importing it registers `"hanayo"`."""

try:
    from lightning_hanayo_autoload import register  # where a package is installed, the module lies beside it
except ImportError:
    from lightning_hanayo._autoload import register  # a checkout on the path

from lightning_hanayo.strategy.report.wave_report import WaveReport
from lightning_hanayo.strategy.strategy import HanayoStrategy

register()

__all__ = ["HanayoStrategy", "WaveReport"]
