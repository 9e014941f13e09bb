"""Entry point: `python -m recipes.paper` rebuilds the pages and their figures."""

import argparse
import time

from recipes.paper.pages import DOCS, DOCUMENTS, draw_all


def main() -> None:
    """Tables first, then figures; says what it wrote."""
    parser = argparse.ArgumentParser(prog="python -m recipes.paper", description=__doc__)
    parser.add_argument("--tables-only", action="store_true", help="leave the figures as they are")
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
