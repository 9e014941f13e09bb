"""Runs `hanayo ckpt`: lists, shows, verifies, compares, converts and removes checkpoints.

`ls`, `show`, `verify` and `rm` import no torch.
"""

from argparse import Namespace

from lightning_hanayo.cli.subcommands import CommandGroup

SUBCOMMANDS = {
    "ls": "list the checkpoints in a folder, and what interrupted saves have left",
    "show": "show what is in a checkpoint: sizes, layout, versions, the largest tensors",
    "verify": "read every byte of a checkpoint, and compare the hashes",
    "diff": "compare two checkpoints: names, shapes, dtypes and values",
    "export": "write a Lightning file, safetensors, or a folder for from_pretrained",
    "import": "make a checkpoint folder of a Lightning file or of Hugging Face's weights",
    "rm": "remove checkpoints",
}
_GROUP = CommandGroup("ckpt", "List, check, compare, convert and remove checkpoints.", SUBCOMMANDS, "verify last.ckpt")


def run(argv: list[str]) -> int:
    """Run the subcommand that `argv` names, and return the exit code."""
    return _GROUP.run(argv, Namespace())
