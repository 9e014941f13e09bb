"""Runs the command line: `python -m lightning_hanayo` is the same as the console script `hanayo`."""

import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from lightning_hanayo.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
