"""What doesn't exist yet is refused with the condition from when on it does."""

from collections.abc import Callable

import pytest

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import NotAvailableError


@pytest.mark.parametrize(
    ("read", "condition"),
    [
        (lambda strategy: strategy.topology, "once the Trainer is constructed"),
        (lambda strategy: strategy.groups, "once the Trainer has started the processes"),
        (lambda strategy: strategy.module, "once the Trainer runs it"),
        (lambda strategy: strategy.session, "once the Trainer has started a run"),
        (lambda strategy: strategy.pipeline, "once the Trainer has started a run"),
        (lambda strategy: strategy.root_device, "once the Trainer is constructed"),
    ],
)
def test_state_before_its_time(read: Callable[[HanayoStrategy], object], condition: str) -> None:
    with pytest.raises(NotAvailableError, match=condition):
        read(HanayoStrategy())
