"""Runs `hanayo ckpt`: lists, shows, verifies and removes checkpoints.

`ls`, `show`, `verify` and `rm` import no torch.
"""

from argparse import Namespace

from lightning_hanayo.cli.subcommands import CommandGroup

SUBCOMMANDS = {
    "ls": "list the checkpoints in a folder, and what interrupted saves have left",
    "show": "show what is in a checkpoint: sizes, layout, versions, the largest tensors",
    "verify": "read every byte of a checkpoint, and compare the hashes",
    "rm": "remove checkpoints",
}
_GROUP = CommandGroup("ckpt", "List, show, verify and remove checkpoints.", SUBCOMMANDS, "verify last.ckpt")


def run(argv: list[str]) -> int:
    """Run the subcommand that `argv` names, and return the exit code."""
    return _GROUP.run(argv, Namespace())
