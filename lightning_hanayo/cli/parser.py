"""The parser of configurations: LightningCLI's own, with one readable line in place of a nested report."""

from lightning.pytorch.cli import LightningArgumentParser

from lightning_hanayo.cli.readable import Readable


class Parser(Readable, LightningArgumentParser):
    """Reads YAML and options of the commands that run a Trainer."""
