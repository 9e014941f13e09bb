"""Make a checkpoint folder, of which any layout reads its part, one tensor at a time.

It is made of a plain file of Lightning, or of a folder of Hugging Face (config.json and safetensors). To start a new
training from a folder of Hugging Face, HanayoStrategy(init_from=...) reads it as it is.

A plain file has no names for optimizer states: they are taken to be in the order of the module's parameters, as after
Adam(self.parameters()). Was the order another one, resume from the file itself, which any layout reads.

Exit codes: 0, 1 if the checkpoint isn't whole, 2 if it can't be imported, or the target exists.
"""

import json
from argparse import ArgumentParser, Namespace

from lightning_hanayo.checkpoint.found import existing
from lightning_hanayo.cli.error_messages import fail
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.plotting.terminal_status import showing


def add_options(parser: ArgumentParser) -> None:
    """Add the source and the target."""
    parser.add_argument("source", metavar="SOURCE", help="a plain file, or a folder of Hugging Face")
    parser.add_argument("target", metavar="TARGET", help="a path where nothing is yet, or an fsspec URL")
    meaning = "of a folder: the name that its model has in your LightningModule, such as net"
    parser.add_argument("--module", default="", metavar="NAME", help=meaning)
    meaning = "of a file: leave out states of optimizers, loops, callbacks and all else"
    parser.add_argument("--weights-only", action="store_true", help=meaning)


def run(options: Namespace) -> int:
    """Import the source."""
    from lightning_hanayo.checkpoint.convert import import_checkpoint  # torch: seconds, which --help needn't wait for

    try:
        source = existing(options.source)
        with showing(f"importing {source}"):
            import_checkpoint(source, options.target, module=options.module, weights_only=options.weights_only)
    except CheckpointError as error:
        fail(str(error))
        return 1
    print(json.dumps({"path": options.target}) if options.json else f"wrote {options.target}")
    return 0
