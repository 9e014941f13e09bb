"""Write a checkpoint in a format that other tools read, one tensor at a time. It is verified first.

file           one file of Lightning, for a plain Trainer (ckpt_path) and load_from_checkpoint
safetensors    a folder with the weights, under the names that they have in the LightningModule
huggingface    a folder for from_pretrained of transformers: its names, config.json, and an index above --max-shard-size

The checkpoint is a folder of HanayoStrategy or a plain file. A plain file doesn't say which model of transformers it
has: give the folder of its config.json with --config.

Exit codes: 0, 1 if the checkpoint isn't whole, 2 if it doesn't fit the format, or the target exists.
"""

import json
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict

from lightning_hanayo.checkpoint.found import existing
from lightning_hanayo.checkpoint.save.problems import UNITS
from lightning_hanayo.cli.error_messages import fail
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.plotting.terminal_status import showing


def add_options(parser: ArgumentParser) -> None:
    """Add the checkpoint, the format and the target."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder or a plain file")
    parser.add_argument("target", metavar="TARGET", help="a path where nothing is yet")
    formats = ("file", "safetensors", "huggingface")
    parser.add_argument("--to", choices=formats, required=True, help="the format")
    meaning = "name of the model of transformers in the LightningModule (default: the one that fits)"
    parser.add_argument("--module", metavar="NAME", help=meaning)
    meaning = "a folder with config.json (default: the configuration in the checkpoint)"
    parser.add_argument("--config", metavar="DIR", help=meaning)
    meaning = "bytes of weights in one file (default: 5GB)"
    parser.add_argument("--max-shard-size", type=size, default=size("5GB"), metavar="SIZE", help=meaning)


def run(options: Namespace) -> int:
    """Export the checkpoint, and say what was written."""
    from lightning_hanayo.checkpoint.convert import export_checkpoint  # torch: seconds, which --help needn't wait for

    try:
        source = existing(options.checkpoint)
        with showing(f"exporting {source}"):
            written = export_checkpoint(
                source,
                options.target,
                to=options.to,
                module=options.module,
                config=options.config,
                max_shard_size=options.max_shard_size,
            )
    except CheckpointError as error:
        fail(str(error))
        return 1
    if options.json:
        print(json.dumps(asdict(written)))
        return 0
    print(f"wrote {written.path}: {written.num_tensors} tensors of the model")
    if written.files:
        print(f"files: {', '.join(written.files)}")
    if written.left_out:
        print(f"left out: {', '.join(written.left_out)}")
    for note in written.notes:
        print(f"note: {note}")
    return 0


def size(text: str) -> int:
    """The bytes of a size such as "5GB" or "500 MB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?B)", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ArgumentTypeError(f"expected a size such as 5GB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2].upper().replace("KB", "kB")])
