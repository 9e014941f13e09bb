"""Entry point: `python -m recipes.h100` counts again, and rebuilds the page of step times, in minutes."""

from recipes.h100.page import COUNTS, PAGE, rebuild


def main() -> None:
    """Rebuild, and print the paths written."""
    rebuild()
    print(COUNTS)
    print(PAGE)


if __name__ == "__main__":
    main()
