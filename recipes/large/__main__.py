"""Plans the layouts of the large models again, and rewrites the page's table: `python -m recipes.large [NAME ...]`."""

import argparse

from recipes.large.plans import CASES, PAGE, rebuild


def main() -> None:
    """Plan, and print the path of the page."""
    parser = argparse.ArgumentParser(prog="python -m recipes.large", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], help="layouts to plan again (default: all)")
    rebuild(parser.parse_args().names or list(CASES))
    print(PAGE)


if __name__ == "__main__":
    main()
