"""Plans the worked examples again, and rewrites their tables: `python -m recipes.plans`."""

import argparse

from recipes.plans.page import PAGE, rebuild


def main() -> None:
    """Rewrite the tables, and print the path of the page."""
    argparse.ArgumentParser(prog="python -m recipes.plans", description=__doc__).parse_args()
    rebuild()
    print(PAGE)


if __name__ == "__main__":
    main()
