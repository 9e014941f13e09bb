"""Builds what `hanayo check` checks, as `hanayo fit` would build it, and shows the verdict."""

import argparse
import json
import sys
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import Trainer
from rich.console import Console

from lightning_hanayo.checking import check
from lightning_hanayo.checking.case import TrainerOptions, topology_of
from lightning_hanayo.checking.examine import as_json, print_verdict
from lightning_hanayo.cli.trainer import WaveCLI, run_cli
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting.terminal_status import showing
from lightning_hanayo.strategy import HanayoStrategy

_COLUMNS = 120
"""characters per line in a pipe"""


def run_check(options: argparse.Namespace, rest: list[str]) -> int:
    """Check what the options of `hanayo fit` in `rest` describe, and return the exit code."""
    console = Console(highlight=False, stderr=options.json, width=None if sys.stdout.isatty() else _COLUMNS)
    return run_cli(lambda: CheckCLI(options, console, ["fit", *rest])).exit_code


class CheckCLI(WaveCLI):
    """Builds what `fit` would train, on CPUs and without loggers, and checks it instead."""

    def __init__(self, options: argparse.Namespace, console: Console, args: list[str]) -> None:
        self.exit_code = 0
        self._options = options
        self._console = console
        super().__init__(args)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer on CPUs: it says what the layout is."""
        config = self.config_init[self.subcommand]["trainer"]
        devices, num_nodes = config["devices"], config["num_nodes"]
        count = len(devices) if isinstance(devices, list) else devices
        if str(count).isdigit() and int(count):
            processes = int(count) * num_nodes
        elif devices == "auto" and isinstance(config["strategy"], HanayoStrategy):
            processes = topology_of(config["strategy"].options, None).world_size
        else:
            raise HanayoError(f"trainer.devices={devices!r}: a check needs a number; give --trainer.devices=N")
        on_cpus = {"accelerator": "cpu", "devices": processes, "num_nodes": 1, "precision": "32-true", "logger": False}
        return super().instantiate_trainer(**kwargs | on_cpus)

    def fit(self, model: Any, datamodule: Any = None, **_: Any) -> None:
        """Takes the place of `Trainer.fit`."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, HanayoStrategy):
            raise HanayoError(f"trainer.strategy is {type(strategy).__name__}: a check needs HanayoStrategy")
        with showing("checking") as say:
            trainer: Any = self.trainer
            verdict = check(
                model,
                datamodule,
                strategy,
                devices=strategy.topology.world_size,
                dtype=getattr(torch, self._options.dtype),
                seed=torch.initial_seed() % (1 << 32),
                tell=say,
                **{name: getattr(self._options, name) for name in ("steps", "depth", "timeout")},
                **{one.name: getattr(trainer, one.name) for one in fields(TrainerOptions)},
            )
        if self._options.json:
            print(json.dumps(as_json(verdict), indent=2))
        else:
            print_verdict(verdict, self._console)
        accepted = self._options.accept_microbatches and verdict.outcome == "depends on micro-batches"
        self.exit_code = 0 if accepted else verdict.exit_code
