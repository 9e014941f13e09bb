"""State dicts of two ranks, each with half of the blocks, make up that of a single process.

rank 0   embedding  block 0    .          .: placeholders
rank 1       .         .     block 1
"""

import copy
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from lightning_hanayo.dist_checkpointing.plain_file import (
    gather_module_state,
    gather_optimizer_state,
    numbered_state_dict,
)
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.ownership import replace_with_placeholders
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub
from tests.harness.quantized import Quantized


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))


def owner(name: str) -> int:
    return 1 if name.startswith("blocks.1") else 0


def model_of_rank(model: nn.Module, rank: int) -> nn.Module:
    own = copy.deepcopy(model)
    keep = {parameter for name, parameter in own.named_parameters() if owner(name) == rank}
    replace_with_placeholders(
        own, keep, buffers_of=[m for name, m in own.named_modules() if owner(name) != rank or name == ""]
    )
    return own


def on_both_ranks(call: Any) -> list[Any]:
    results: list[Any] = [None, None]
    transports = Hub(2, timeout=real_seconds(30)).transports()
    threads = [Thread(target=lambda r=r: results.__setitem__(r, call(r, transports[r]))) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_module_state_is_gathered_on_rank_0() -> None:
    torch.manual_seed(0)
    model = Model()
    expected, parts = model.state_dict(), [model_of_rank(model, rank) for rank in range(2)]
    owners = {name: owner(name) for name in expected}
    whole, other = on_both_ranks(lambda rank, transport: gather_module_state(parts[rank], owners, transport))
    assert list(whole) == list(expected) and all(torch.equal(whole[name], expected[name]) for name in expected)
    assert set(other) == {name for name, rank in owners.items() if rank == 1}


def test_quantized_weights_are_gathered_as_they_are() -> None:
    model = Model()
    quantized = Quantized.of(torch.randn(2, 2))
    model.blocks[1][0].weight = nn.Parameter(quantized, requires_grad=False)  # type: ignore[index]
    parts = [model_of_rank(model, rank) for rank in range(2)]
    owners = {name: owner(name) for name in model.state_dict()}
    whole, _ = on_both_ranks(lambda rank, transport: gather_module_state(parts[rank], owners, transport))
    gathered = whole["blocks.1.0.weight"]
    assert type(gathered) is Quantized
    assert torch.equal(gathered.codes, quantized.codes) and torch.equal(gathered.scales, quantized.scales)


OPTIMIZERS = [
    lambda parameters: AdamW(parameters, amsgrad=True),
    lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: SGD(parameters, lr=0.1),
    lambda parameters: Adagrad(parameters),
]


def step(model: nn.Module, optimizer: Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        if not parameter.is_meta:
            parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["adamw", "momentum", "sgd", "adagrad"])
def test_optimizer_state_is_gathered(make: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    parts = [model_of_rank(model, rank) for rank in range(2)]
    optimizers = [make(p.parameters()) for p in parts]
    alone = make(model.parameters())
    for m, optimizer in ((model, alone), *zip(parts, optimizers, strict=True)):
        step(m, optimizer)
    whole, _ = on_both_ranks(lambda rank, transport: gather_optimizer_state(optimizers[rank], transport))
    expected = alone.state_dict()
    assert whole["param_groups"] == expected["param_groups"] and list(whole["state"]) == list(expected["state"])
    for index, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(whole["state"][index][name]), torch.as_tensor(value)), (index, name)


def test_a_file_says_which_parameters_had_no_state() -> None:
    model = Model()
    optimizer = AdamW(model.parameters())
    model.embedding.weight.grad = torch.ones(2, 2)
    optimizer.step()
    (transport,) = Hub(1, timeout=real_seconds(30)).transports()
    state = gather_optimizer_state(optimizer, transport)
    assert state["without_state"] == list(range(1, len(list(model.parameters()))))


class Around(SGD):
    """Its state dict has another optimizer's next to its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = AdamW(self.param_groups[0]["params"], lr=torch.tensor(0.1))

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"inner": self.inner.state_dict()}


class InGroups(SGD):
    """Keeps tensors among the options of its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["slow"] = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]


@pytest.mark.parametrize(("make", "key"), [(Around, "inner"), (InGroups, "slow")], ids=["around", "groups"])
def test_states_next_to_those_of_parameters_are_refused(make: Any, key: str) -> None:
    """Rank 0's would be saved alone."""
    model = Model()
    optimizer = make(model.parameters())
    step(model, optimizer)
    assert numbered_state_dict(optimizer, is_cut=False)["param_groups"]
    with pytest.raises(UnsupportedError, match=f"has tensors under '{key}', of which only rank 0's would be saved"):
        numbered_state_dict(optimizer, is_cut=True)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"optimizers": []}, "lacks 'state'"),
        ({"state": {}}, "lacks 'param_groups'"),
        ({"state": {"embedding.weight": {}}, "param_groups": []}, "has 'embedding.weight' where torch's have numbers"),
    ],
)
def test_states_that_are_not_numbered_are_refused(state: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD(Model().parameters())
    monkeypatch.setattr(optimizer, "state_dict", lambda: state)
    for is_cut in (False, True):
        with pytest.raises(UnsupportedError, match=f"SGD {message}"):
            numbered_state_dict(optimizer, is_cut=is_cut)


def test_a_learning_rate_may_be_a_tensor() -> None:
    optimizer = AdamW(Model().parameters(), lr=torch.tensor(0.1))
    assert numbered_state_dict(optimizer, is_cut=True)["param_groups"][0]["lr"] == torch.tensor(0.1)
