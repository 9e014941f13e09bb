"""Objects between ranks: a tensor of a sender's GPU arrives on the receiver's, in one copy per device.

`OnGPU` stands in for a tensor on the sender's GPU: it names that device, and its values are in host memory. The
receiver's GPU is the meta device: what arrives there has gone through `from_bytes`, and not back to the sender's.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_hanayo
from lightning_hanayo.pipeline_parallel import object_collectives as module
from lightning_hanayo.pipeline_parallel.object_collectives import (
    all_gather_objects,
    broadcast_object,
    from_bytes,
    gather_objects,
    to_bytes,
)
from tests.harness.pool import Pool

OTHERS_GPU = torch.device("cuda:5")
CPU, OWN_GPU = torch.device("cpu"), torch.device("meta")


class OnGPU(Tensor):
    """A tensor on another rank's GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return OTHERS_GPU


class Logged(NamedTuple):
    """A value, and how many samples it is of."""

    value: Tensor
    size: int


def on_gpu(value: Any) -> Tensor:
    return torch.as_tensor(value).as_subclass(OnGPU)


def as_plain(value: Tensor) -> Tensor:
    return value.as_subclass(Tensor)


def test_tensors_come_to_the_receivers_own_device_and_the_rest_stays_in_host_memory() -> None:
    sent = {"loss": Logged(on_gpu(2.5), 4), "logits": [on_gpu(torch.ones(2, 3))], "labels": torch.arange(3)}
    got = from_bytes(to_bytes(sent), OWN_GPU)
    assert [as_plain(one).device for one in (got["loss"].value, got["logits"][0])] == [OWN_GPU, OWN_GPU]
    assert got["labels"].device == CPU and got["labels"].tolist() == [0, 1, 2]
    assert got["loss"].size == 4


def test_values_types_and_attributes_are_those_of_the_sender() -> None:
    values = on_gpu(torch.arange(6.0).reshape(2, 3).t())
    values.requires_grad_()
    values.note = "kept"  # type: ignore[attr-defined]
    got = from_bytes(to_bytes([values, values, on_gpu([True]), on_gpu(1 + 2j), on_gpu(torch.empty(0))]), CPU)
    assert as_plain(got[0]).tolist() == as_plain(values).tolist() and got[0].requires_grad and got[0].note == "kept"
    assert isinstance(got[0], OnGPU) and got[0].data_ptr() == got[1].data_ptr()
    assert as_plain(got[2]).tolist() == [True] and complex(as_plain(got[3])) == 1 + 2j and got[4].numel() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_number_is_sent_without_its_storage(dtype: torch.dtype) -> None:
    number = torch.tensor(1).to(dtype)
    data = to_bytes([number, number, number.clone()])
    one, same, other = from_bytes(data)
    assert one is same and one is not other and (one.dtype, one.shape, one.item()) == (dtype, (), 1)
    assert len(data) < 256  # torch's own pickle of one takes 400 bytes, and 100 us


def test_devices_lose_their_index() -> None:
    assert from_bytes(to_bytes((OTHERS_GPU, CPU)), OWN_GPU) == (OWN_GPU, CPU)


def test_each_device_is_copied_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: copies.append(tensor.nbytes) or tensor)
    to_bytes([on_gpu(float(i)) for i in range(20)])
    assert len(copies) == 1


def test_parameters_sparse_tensors_and_tensors_without_values_are_pickled_by_their_own_rules() -> None:
    parameter, sparse = nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse()
    got = from_bytes(to_bytes([parameter, sparse, torch.empty(3, device="meta")]))
    assert isinstance(got[0], nn.Parameter) and torch.equal(got[0], parameter)
    assert torch.equal(got[1].to_dense(), torch.eye(2)) and got[2].is_meta


def exchanged() -> tuple[list[Any], Any, list[Any]]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    gathered = all_gather_objects(world, {"rank": rank, "value": torch.tensor(float(rank))})
    return gathered, broadcast_object(("from", rank), source=1), gather_objects(world, ["to rank 0"] * rank)


def test_all_ranks_get_all_values(pool: Pool) -> None:
    results = pool.run(2, exchanged)
    assert [collected for _, _, collected in results] == [[[], ["to rank 0"]], []]
    for gathered, broadcast, _ in results:
        assert [one["rank"] for one in gathered] == [0, 1] and [float(one["value"]) for one in gathered] == [0.0, 1.0]
        assert broadcast == ("from", 1)


def gathered_on_the_device() -> tuple[list[Any], list[int]]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "to_bytes", None)
        rows = on_gpu(torch.full((rank + 1,), rank, dtype=torch.int16))
        gathered = all_gather_objects(world, {"loss": on_gpu(float(rank)), "rows": rows, "n": rank}, world)
        numbers = all_gather_objects(world, rank, world)
    return [(as_plain(one["loss"]).item(), as_plain(one["rows"]).tolist(), one["n"]) for one in gathered], numbers


def test_tensors_of_a_device_are_gathered_there(pool: Pool) -> None:
    expected = [(0.0, [0], 0), (1.0, [1, 1], 1), (2.0, [2, 2, 2], 2)]
    assert pool.run(3, gathered_on_the_device) == [(expected, [0, 1, 2])] * 3


def test_without_processes_a_value_is_its_own_broadcast() -> None:
    assert broadcast_object("alone") == "alone"


def object_collectives_of_torch(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and "object" in node.attr and getattr(node.value, "id", "") == "dist":
            yield node.attr


def test_no_other_file_calls_torchs_object_collectives() -> None:
    package = Path(lightning_hanayo.__file__).parent
    calls = {path.name: set(object_collectives_of_torch(path)) for path in package.rglob("*.py")}
    assert {name: found for name, found in calls.items() if found} == {
        "object_collectives.py": {"all_gather_object", "broadcast_object_list", "gather_object"}
    }
