"""One browser for all of these tests."""

from collections.abc import Iterator

import pytest

from tests.browser import chromium


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    if chromium.find() is None:
        pytest.skip(chromium.MISSING)
    with chromium.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
