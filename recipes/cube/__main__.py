"""Entry point: `python -m recipes.cube` rebuilds tables and pictures of the page about the cube."""

from recipes.cube.page import FIGURES, PAGE, draw_all, rebuild


def main() -> None:
    """Rebuild tables, then figures, and print the paths written."""
    rebuild(PAGE)
    print(PAGE)
    for path in draw_all(FIGURES):
        print(path)


if __name__ == "__main__":
    main()
