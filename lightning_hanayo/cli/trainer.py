"""Runs the commands `fit`, `validate`, `test` and `predict`: a Trainer that is configured by YAML and options.

Sets Weights & Biases to offline mode if the user has no account, so that a run doesn't ask for a key.
"""

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_hanayo.cli.common import OneLineErrors, condense
from lightning_hanayo.cli.trainer_start import check_config_files
from lightning_hanayo.dist_checkpointing.plain_file import load_mapped
from lightning_hanayo.errors import HanayoError, with_notes
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.strategy.checkpoints.load import check_local
from lightning_hanayo.strategy.report import WaveReport
from lightning_hanayo.tracebacks import name_doctor

Command = TypeVar("Command", bound="WaveCLI")


def run(argv: list[str]) -> int:
    """Run one of the four commands."""
    run_cli(lambda: WaveCLI(argv), is_quiet=False)
    return 0


def run_cli(build: Callable[[], Command], *, is_quiet: bool = True) -> Command:
    """Build a command line, which runs its command. A class path may name a module in the current directory.

    Args:
        build: makes the command line.
        is_quiet: whether Lightning doesn't log tips and which accelerators there are.
    """
    for name in ("lightning.pytorch", "lightning.fabric") if is_quiet else ():
        logging.getLogger(name).setLevel(logging.ERROR)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    default_to_offline()
    # Lightning 2.6.6 itself calls what torch 2.13 deprecates; the user can't change that.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated", category=FutureWarning)
    try:
        return build()
    except MisconfigurationException as error:
        name_doctor(error)
        mistake = HanayoError(with_notes(error))
        mistake.failed_first = getattr(error, "failed_first", False)
        raise mistake from error


_MISPLACED = re.compile(
    r"(?:NestedArg\(key='|(?:accept option '|arguments: --)(?!model\.|data\.)(?:\w+\.)*)(?P<option>\w+)"
)
"""an option of the strategy at another place; a model's may have its name"""


class TrainerParser(OneLineErrors, LightningArgumentParser):
    """Parses YAML files and options, as LightningCLI does."""

    def _one_line(self, message: str) -> str:
        line = super()._one_line(message)
        found = _MISPLACED.search(message)
        if found is None or found["option"] not in signature(HanayoStrategy).parameters:
            return line
        name, cause = found["option"], line.partition(";")[0]
        if "NestedArg" in line:
            cause = "trainer.strategy has no class"
        return f"{cause}; {name} is trainer.strategy.init_args.{name}, with class_path: lightning_hanayo.HanayoStrategy"


class SaveConfig(SaveConfigCallback):
    """Saves the configuration with the logs, and logs it to all loggers as the hyperparameter `config`."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log it. Called on rank 0."""
        config = json.loads(self.parser.dump(self.config, format="json", skip_none=False))
        for logger in trainer.loggers:
            logger.log_hyperparams({"config": config})


class WaveCLI(LightningCLI):
    """A LightningCLI for any model and data. Pipeline runs log their timings and end with a report: `--report.*`.

    A new run overwrites the configuration that the last one saved in the same directory.
    """

    def __init__(self, args: list[str]) -> None:
        super().__init__(
            parser_class=TrainerParser,
            parser_kwargs={"prog": "hanayo"},
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the report's options."""
        parser.add_lightning_class_args(WaveReport, "report")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse `args`, without the parent's warning that `sys.argv` is ignored: here both are the same."""
        assert isinstance(args, list)
        check_config_files(args)
        self.config = parser.parse_args(args)
        config = self.config[self.config.subcommand]
        for section in ("model", "data"):  # DataLoader finds it later, in all processes
            if config.get(f"{section}.init_args.batch_size") == 0:
                raise HanayoError(f"{section}.batch_size=0: expected a whole number of at least 1")
        path = config.get("ckpt_path")
        if path and Path(path).is_file():  # which Lightning opens next, for the model's arguments
            check_local(path)
            load_mapped(path, weights_only=True)

    def instantiate_classes(self) -> None:
        """Build data, model and Trainer.

        A ValueError from one of them is a mistake in the configuration, and so is a package that isn't installed, such
        as that of `--trainer.precision=transformer-engine`.
        """
        try:
            super().instantiate_classes()
        except (ValueError, ModuleNotFoundError) as error:
            raise HanayoError(condense(str(error))) from error
        except TypeError as error:
            if "`devices`" not in str(error):
                raise
            given = self.config[self.subcommand]["trainer"]["devices"]
            raise HanayoError(f"trainer.devices={given!r}: {error}") from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, with its report unless the configuration lists one.

        Runs without a pipeline have it too: what it counts is in checkpoints, and Lightning warns if nobody reads it.
        """
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[Callback] = vars(trainer)["callbacks"]
        report = self.config_init[self.subcommand]["report"]
        is_listed = any(isinstance(one, WaveReport) and one is not report for one in callbacks)
        if is_listed:
            callbacks.remove(report)
        return trainer


def default_to_offline() -> None:
    """Set `WANDB_MODE=offline` if the user has chosen no mode and has no API key."""
    from requests.utils import get_netrc_auth  # as wandb does

    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not ("WANDB_MODE" in os.environ or os.environ.get("WANDB_API_KEY") or get_netrc_auth(server)):
        os.environ["WANDB_MODE"] = "offline"
        os.environ.setdefault("WANDB_SILENT", "true")
