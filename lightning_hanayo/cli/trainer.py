"""The commands that run a Trainer: `fit`, `validate`, `test` and `predict`, from YAML and options."""

import os
import sys
import warnings
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_hanayo.cli.parser import Parser
from lightning_hanayo.cli.readable import condense
from lightning_hanayo.cli.wandb_mode import default_to_offline
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.strategy.report.wave_report import WaveReport


def run(argv: list[str]) -> int:
    """Play one of the four commands; a class path may name anything that lies in the current directory."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    default_to_offline(os.environ)
    # Lightning 2.6.6 itself calls what torch 2.13 deprecates: nothing that a user could change.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated", category=FutureWarning)
    try:
        WaveCLI(argv)
    except MisconfigurationException as error:
        mistake = HanayoError(str(error))
        mistake.first_of_all = getattr(error, "first_of_all", False)
        raise mistake from error
    return 0


class WaveCLI(LightningCLI):
    """A LightningCLI for any model and data, whose pipeline runs log how they run and end with a report: `--report.*`.

    A rerun overwrites the saved configuration of the last one in the same place.
    """

    def __init__(self, args: list[str]) -> None:
        super().__init__(
            parser_class=Parser,
            parser_kwargs={"prog": "hanayo"},
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The report's options."""
        parser.add_lightning_class_args(WaveReport, "report")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse `args` alone: the parent warns of a command line beside them, which here is the same one."""
        assert isinstance(args, list)
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Build data, model and Trainer. A value that one of them refuses is a mistake in the configuration."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise HanayoError(condense(str(error))) from error

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        """With a report where there is something to report, unless the configuration lists one itself."""
        given = config.get("callbacks") or []
        listed = any(isinstance(one, WaveReport) for one in (given if isinstance(given, list) else [given]))
        if listed or self.subcommand != "fit" or not _is_hanayo(config.get("strategy")):
            callbacks = [callback for callback in callbacks if not isinstance(callback, WaveReport)]
        return super()._instantiate_trainer(config, callbacks)


def _is_hanayo(strategy: object) -> bool:
    return strategy == "hanayo" if isinstance(strategy, str) else isinstance(strategy, HanayoStrategy)
