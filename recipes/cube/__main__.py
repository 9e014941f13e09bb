"""Entry point: `python -m recipes.cube` rebuilds the tables of the page about the cube, and its pictures."""

from recipes.cube.page import FIGURES, PAGE, draw_all, rebuild


def main() -> None:
    """Tables first, then figures; says what it wrote."""
    rebuild(PAGE)
    print(PAGE)
    for path in draw_all(FIGURES):
        print(path)


if __name__ == "__main__":
    main()
