"""Looks at the run that a configuration describes: whether its layout fits, by the checks before every launch."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_hanayo.cli.doctor.host import Finding
from lightning_hanayo.cli.trainer import WaveCLI, run_cli
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy import HanayoStrategy

_TOPIC = "run"


def examine(arguments: Sequence[str]) -> tuple[str, list[Finding]]:
    """Build what `hanayo fit` would train, start nothing, and say what would stop it.

    Args:
        arguments: options of `hanayo fit`.

    Returns:
        The Trainer's default_root_dir, and what was found.

    Raises:
        SystemExit: an option is wrong; the parser has said which.
    """
    try:
        command = run_cli(lambda: _DoctorCLI(["fit", *arguments]))
    except (HanayoError, ImportError) as error:
        return ".", [Finding(_TOPIC, "configuration", str(error), "problem", "correct it; see hanayo fit --help")]
    return str(command.trainer.default_root_dir), command.findings


class _DoctorCLI(WaveCLI):
    """Builds what `fit` would train, and checks it instead."""

    def __init__(self, args: list[str]) -> None:
        self.findings: list[Finding] = []
        super().__init__(args)

    def fit(self, model: Any, **_: Any) -> None:
        """Takes the place of `Trainer.fit`."""
        trainer, strategy = self.trainer, self.trainer.strategy
        if not isinstance(strategy, HanayoStrategy):
            self.findings = [Finding(_TOPIC, "strategy", f"{type(strategy).__name__}, which isn't looked at", "note")]
            return
        strategy.connect(model)
        model.trainer = trainer
        trainer.state.fn = TrainerFn.FITTING
        sizes = strategy.topology
        layout = f"data {sizes.data} x pipeline {sizes.pipe} x cube {'x'.join(map(str, sizes.cube))}"
        self.findings = [Finding(_TOPIC, "layout", f"{layout}, {sizes.world_size} processes")]
        try:
            strategy.check_before_launch(trainer)
        except ValueError as error:
            advice = "correct it as the message says"
            self.findings = [Finding(_TOPIC, "layout", f"{layout}: {error}", "problem", advice)]
