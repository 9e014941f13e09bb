"""Rebuilds the pages and their figures: `python -m recipes.paper`."""

import argparse
import time

from recipes.paper.pages import DOCS, DOCUMENTS, draw_all


def main() -> None:
    """Write the tables, then the figures, and print the names of the files."""
    parser = argparse.ArgumentParser(prog="python -m recipes.paper", description=__doc__)
    parser.add_argument("--tables-only", action="store_true", help="don't draw the figures")
    options = parser.parse_args()
    begin = time.perf_counter()
    for document in DOCUMENTS:
        document.rebuild()
        print(document.path.relative_to(DOCS.parent))
    if not options.tables_only:
        draw_all(DOCS / "figures")
        print((DOCS / "figures").relative_to(DOCS.parent))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
