"""All features, by the heading under which the table lists them."""

from tests.features import callbacks, checkpoints, loaders, logged, loops, module, optimizers, output, precision
from tests.features.feature import Feature

GROUPS: dict[str, list[Feature]] = {
    "Loops": loops.FEATURES,
    "Loaders": loaders.FEATURES,
    "Precision": precision.FEATURES,
    "Optimizers and schedulers": optimizers.FEATURES,
    "Metrics, `self.log` and loggers": logged.FEATURES,
    "Callbacks": callbacks.FEATURES,
    "Progress bars, summaries, profilers, predictions": output.FEATURES,
    "Checkpoints": checkpoints.FEATURES,
    "The module, hooks and the Trainer": module.FEATURES,
}
FEATURES = [feature for group in GROUPS.values() for feature in group]


def find(name: str) -> Feature:
    """The feature of this name."""
    return next(feature for feature in FEATURES if feature.name == name)
