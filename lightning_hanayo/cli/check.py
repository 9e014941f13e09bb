"""Check that a training is the same on its layout as in one process.

Reads the configuration of `hanayo fit`, trains a few steps on CPUs in one process and on the layout, compares losses,
gradients, weights, buffers and logged values, and names the first that differs.

Exit codes: 0 exact, 1 not exact (or refused by the strategy), 2 bad arguments.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from rich.console import Console

from lightning_hanayo.checking import check
from lightning_hanayo.checking.report import as_json, print_verdict
from lightning_hanayo.cli.error_messages import OneLineErrors
from lightning_hanayo.cli.trainer import WaveCLI, run_cli
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy import HanayoStrategy

_COLUMNS = 120
"""characters per line in a pipe"""
_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def run(argv: Sequence[str]) -> int:
    """Check the configuration that `argv` gives, and return the exit code."""
    options, rest = _parser().parse_known_args(argv[1:])
    console = Console(highlight=False, stderr=options.json, width=None if sys.stdout.isatty() else _COLUMNS)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)  # which accelerators there are; tips
    command = run_cli(lambda: CheckCLI(options, console, ["fit", *rest]))
    return command.exit_code


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
        if not str(count).isdigit() or not int(count):
            raise HanayoError(f"trainer.devices={devices!r}: a check needs a number; give --trainer.devices=N")
        processes = int(count) * num_nodes
        on_cpus = {"accelerator": "cpu", "devices": processes, "num_nodes": 1, "precision": "32-true", "logger": False}
        return super().instantiate_trainer(**kwargs | on_cpus)

    def fit(self, model: Any, datamodule: Any = None, **_: Any) -> None:
        """Takes the place of `Trainer.fit`."""
        trainer: Any = self.trainer
        strategy = trainer.strategy
        if not isinstance(strategy, HanayoStrategy):
            raise HanayoError(f"trainer.strategy is {type(strategy).__name__}: a check needs HanayoStrategy")
        verdict = check(
            model,
            datamodule,
            strategy,
            devices=strategy.topology.world_size,
            steps=self._options.steps,
            depth=self._options.depth,
            dtype=_DTYPES[self._options.dtype],
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            callbacks=trainer.callbacks,
            seed=torch.initial_seed() % (1 << 32),
            timeout=self._options.timeout,
            tell=self._tell,
        )
        if self._options.json:
            print(json.dumps(as_json(verdict), indent=2))
        else:
            print_verdict(verdict, self._console)
        accepted = self._options.accept_microbatches and verdict.outcome == "depends on micro-batches"
        self.exit_code = 0 if accepted else verdict.exit_code

    def _tell(self, text: str) -> None:
        self._console.print(f"[dim]{text} ...[/dim]")


class _CheckParser(OneLineErrors, argparse.ArgumentParser):
    """Parses the options of the check alone; all others are those of `hanayo fit`."""


def _parser() -> argparse.ArgumentParser:
    parser = _CheckParser(
        "hanayo check",
        usage="hanayo check --config recipe.yaml [options] [options of hanayo fit]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options are those of hanayo fit (hanayo fit --help), such as --config and --model.width=64.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps (default: 2)")
    parser.add_argument("--depth", type=int, metavar="N", help="keep the first N blocks only; each stage needs one")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="float64", help="precision (default: float64)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds per run (default: 600)")
    meaning = "exit with 0 if the layout is exact and only micro-batches make a difference"
    parser.add_argument("--accept-microbatches", action="store_true", help=meaning)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser
