"""What a package index shows: the README with addresses of the repository, or without files while there is none."""

import doctest
import re
import tomllib
from pathlib import Path

import hatch_build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def files_in(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]


def test_links_and_pictures_have_addresses() -> None:
    text = hatch_build.with_addresses(README, "https://example.org/wave")
    assert files_in(README) and files_in(text) == []
    assert "(https://example.org/wave/raw/HEAD/docs/figures/overview.png)" in text
    assert "(https://example.org/wave/blob/HEAD/docs/start.md)" in text


def test_without_a_repository_nothing_leads_to_files() -> None:
    text = hatch_build.without_files(README)
    assert files_in(text) == [] and "![" not in text


def test_the_examples() -> None:
    assert doctest.testmod(hatch_build).failed == 0


def test_the_repositorys_address_is_whole_or_unset() -> None:
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["lightning-hanayo"]["repository"]
    assert address == "" or re.fullmatch(r"https://[^/]+/.*[^/]", address)
