"""The text of `hanayo fit --help`, without importing torch: what to write, and the strategy's options in groups.

The options, their defaults and meanings are read from the source of `HanayoStrategy`, which is not imported.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import lightning_hanayo

COMMANDS = {
    "fit": "Trains a model, and validates it meanwhile.",
    "validate": "Evaluates a model on its validation data.",
    "test": "Evaluates a model on its test data.",
    "predict": "Computes a model's predictions.",
}

GROUPS = {
    "How the ranks are used": (
        "pipeline_parallel_size",
        "num_waves",
        "data_parallel_size",
        "cube",
        "num_microbatches",
        "layout",
    ),
    "The model": ("blocks", "balance", "init_from", "master_weights", "tied_gradients"),
    "Memory": ("recompute", "shard_optimizer", "offload_optimizer", "measure_memory"),
    "Batches and losses": ("loss_weight", "batch_dim", "split_batch", "whole"),
    "The schedule": ("schedule", "costs", "activation_budget"),
    "In a cube": ("cube_outside", "cube_memory", "cube_weights", "cube_pieces", "pairs", "cube_tokens", "cube_exclude"),
    "Checkpoints": ("save_full", "save_async", "verify_checkpoints", "load_anyway"),
    "When something fails": ("timeout", "nonfinite", "check_replicas"),
}

_WIDTH = 100
_SOURCE = Path(lightning_hanayo.__file__).parent / "strategy" / "strategy.py"
_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """One of the strategy's options."""

    default: str
    meaning: str


def usage(command: str) -> str:
    """The text of `hanayo <command> --help`."""
    options = strategy_options()
    groups = "\n\n".join(
        f"{title}:\n" + "\n".join(_described(name, options[name]) for name in names) for title, names in GROUPS.items()
    )
    return f"""\
usage: hanayo {command} --config FILE [--config FILE ...] [options]

{COMMANDS[command]} A later file or option changes what an earlier one says.

a configuration:
  trainer:
    devices: 4
    strategy:
      class_path: lightning_hanayo.HanayoStrategy
      init_args:
        pipeline_parallel_size: 4     # and others of the options below
  model:
    class_path: my_module.MyModel     # a LightningModule
    init_args:
      width: 512
  data:
    class_path: my_module.MyData      # a LightningDataModule

options:
  --config FILE, -c FILE     a configuration; several are laid over each other
  --trainer.NAME VALUE       an option of Trainer, such as --trainer.max_steps 100
  --model.NAME VALUE         an argument of the model; --data.NAME of the data
  --ckpt_path PATH           a checkpoint to go on from
  --seed_everything SEED     the seed of all random generators
  --report.NAME VALUE        an option of the report on the pipeline, such as --report.every_n_steps 10
  --print_config             print the whole configuration, and end
  --help all                 all options, with their types

The strategy's options, in init_args or as --trainer.strategy.NAME VALUE:

{groups}"""


def strategy_options() -> Mapping[str, Option]:
    """The options of `HanayoStrategy` in the order of its constructor."""
    module = ast.parse(_SOURCE.read_text(encoding="utf-8"))
    strategy = next(one for one in module.body if isinstance(one, ast.ClassDef) and one.name == "HanayoStrategy")
    constructor = next(one for one in strategy.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    arguments, defaults = constructor.args, [*constructor.args.defaults, *constructor.args.kw_defaults]
    names = [one.arg for one in [*arguments.args[1:], *arguments.kwonlyargs]]
    described = (ast.get_docstring(strategy) or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    meanings = {name: " ".join(text.split()) for name, text in _ENTRY.findall(described)}
    pairs = zip(names, filter(None, defaults), strict=True)
    return {name: Option(_written(default), meanings[name]) for name, default in pairs}


def _written(default: ast.expr) -> str:
    """As a configuration file has it: `null` for None; a time in Python's words."""
    text = ast.unparse(default)
    return {"None": "null", "True": "true", "False": "false", "()": "[]"}.get(text, text.strip("'"))


def _described(name: str, option: Option) -> str:
    lines = fill(option.meaning, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return f"  {name} (default: {option.default})\n{lines}"
