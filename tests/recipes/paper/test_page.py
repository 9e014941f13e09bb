"""A command fills the blocks of a hand-written page."""

import pytest

from lightning_hanayo.errors import HanayoError
from recipes.paper.page import blocks_in, fill, markdown, percent

PAGE = """prose
<!-- begin one -->
old
<!-- end one -->
more
<!-- begin two -->
<!-- end two -->
"""


def test_blocks_are_replaced_and_prose_stays() -> None:
    filled = fill(PAGE, {"one": "new", "two": "| a |\n| b |"})
    assert blocks_in(filled) == {"one": "new", "two": "| a |\n| b |"}
    assert filled.startswith("prose\n") and "\nmore\n" in filled


def test_filling_twice_equals_filling_once() -> None:
    once = fill(PAGE, {"one": "new", "two": "x"})
    assert fill(once, {"one": "new", "two": "x"}) == once


def test_a_block_that_is_not_named_stays() -> None:
    assert blocks_in(fill(PAGE, {"two": "x"}))["one"] == "old"


def test_a_block_that_the_page_lacks_is_rejected() -> None:
    with pytest.raises(HanayoError, match="no block 'three'"):
        fill(PAGE, {"three": "x"})


def test_a_table() -> None:
    assert markdown(("a", "b"), [("x", percent(0.4286))]) == "| a | b |\n|---|---:|\n| x | 42.9 % |"
