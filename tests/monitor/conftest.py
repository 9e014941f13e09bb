"""Worlds of monitors for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.harness.monitors import Worlds, worlds


@pytest.fixture
def world() -> Iterator[Worlds]:
    with worlds() as link:
        yield link
