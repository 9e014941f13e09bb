"""Rebuilds the tables and pictures of the page about the cube: `python -m recipes.cube`."""

import argparse

from recipes.cube.page import FIGURES, PAGE, draw_all, rebuild


def main() -> None:
    """Rebuild tables, then figures, and print the paths written."""
    parser = argparse.ArgumentParser(prog="python -m recipes.cube", description=__doc__)
    parser.add_argument("--tables-only", action="store_true", help="don't draw the figures")
    options = parser.parse_args()
    rebuild(PAGE)
    print(PAGE)
    for path in () if options.tables_only else draw_all(FIGURES):
        print(path)


if __name__ == "__main__":
    main()
