"""A proxy can be passed on; where no tracer records it, any other use raises an error that names the user's line."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import Proxy, proxies_like, subtree

USES: list[Callable[[Any], object]] = [
    lambda h: h + 1, lambda h: 1 + h, lambda h: torch.ones(1) + h, lambda h: h * 2, lambda h: h / 2, lambda h: h // 2,
    lambda h: h % 2, lambda h: h @ h, lambda h: h**2, lambda h: -h, lambda h: abs(h), lambda h: ~h, lambda h: h & h,
    lambda h: h == 1, lambda h: h != 1, lambda h: h < 1, lambda h: h[0], lambda h: h[0:1], lambda h: list(h),
    lambda h: len(h), lambda h: bool(h), lambda h: int(h), lambda h: float(h), lambda h: 1 in h, lambda h: h(1),
    lambda h: h.shape, lambda h: h.to("cpu"), lambda h: h.view(-1), lambda h: torch.relu(h), lambda h: torch.cat([h]),
    lambda h: torch.nn.functional.dropout(h, 0.1), lambda h: torch.nn.Linear(2, 2)(h), lambda h: operator.iadd(h, 1),
    lambda h: operator.setitem(h, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=range(len(USES)))
def test_every_use_raises_an_error_that_names_its_line(use: Callable[[Any], object]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"test_proxy\.py:\d+ \(.*lambda h: .*uses the output of a block"
    ) as caught:
        use(Proxy())
    assert "Let the block store it as an attribute" in str(caught.value)


def test_proxies_have_the_structure_of_the_last_output() -> None:
    h, (aux, nothing), table = proxies_like((torch.ones(1), [torch.ones(1), None], {"k": torch.ones(1)}), block=3)
    assert [type(x) for x in (h, aux, table["k"])] == [Proxy] * 3 and nothing is None
    assert (h.path, aux.path, table["k"].path, h.block) == ((0,), (1, 0), (2, "k"), 3)


def test_a_path_finds_its_subtree() -> None:
    tree = ({"k": [10, 20]}, 30)
    assert subtree(tree, (0, "k", 1)) == 20 and subtree(tree, ()) is tree


def test_what_needs_no_value_is_allowed() -> None:
    proxy = Proxy((1,), 2)
    assert proxy is not None and not isinstance(proxy, torch.Tensor) and len({proxy, proxy}) == 1
    assert repr(proxy) == "Proxy[1]" and f"{proxy}"
    assert not hasattr(proxy, "__array__")
    for duplicate in (copy.copy(proxy), copy.deepcopy(proxy), pickle.loads(pickle.dumps(proxy))):
        assert (duplicate.path, duplicate.block) == ((1,), 2)
