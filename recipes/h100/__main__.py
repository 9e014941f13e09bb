"""Counts again, and rebuilds the page of step times, in minutes: `python -m recipes.h100`."""

import argparse

from recipes.h100.page import COUNTS, PAGE, rebuild


def main() -> None:
    """Rebuild, and print the paths written."""
    argparse.ArgumentParser(prog="python -m recipes.h100", description=__doc__).parse_args()
    rebuild()
    print(COUNTS)
    print(PAGE)


if __name__ == "__main__":
    main()
