"""What `hanayo doctor` says of pretended hosts, devices and networks, and of two real processes."""

import json
import resource
import shutil
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightning_hanayo import cli
from lightning_hanayo.cli import doctor
from lightning_hanayo.cli.doctor import host, links, measure
from lightning_hanayo.cli.doctor.host import GIB, Finding, Seen, exit_code
from lightning_hanayo.cli.doctor.links import Measured, pairs_of
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.machine import Link, Machine

FINE = {"torch": "2.13.0+cpu", "lightning": "2.6.6"}


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    """Those that aren't well, by name; each says a way out."""
    bad = [one for one in findings if one.level != "ok"]
    assert all(one.advice for one in bad)
    return {one.name: one.level for one in bad}


def test_only_a_problem_is_a_failure() -> None:
    ok, note, problem = (Finding("host", "a", "b", level) for level in ("ok", "note", "problem"))
    assert exit_code([ok, note]) == 0
    assert exit_code([ok, problem, note]) == 1


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("torch", "2.9.1", "older than 2.10"),
        ("torch", None, "not installed"),
        ("lightning", "2.6.5", "older than 2.6.6"),
    ],
)
def test_versions_that_are_not_supported_are_problems(name: str, version: str | None, said: str) -> None:
    found = list(host.examine_versions({**FINE, name: version}.get))
    assert levels(found) == {name: "problem"}
    assert any(said in one.value for one in found)


def test_supported_versions_are_well() -> None:
    assert not levels(host.examine_versions(FINE.get))
    assert not levels(host.examine_versions({"torch": "2.10.0rc1", "lightning": "2.7"}.get))


def test_gpus_that_torch_cannot_use_are_problems() -> None:
    driver = ["550.54, Enabled"] * 2
    assert not levels(host.examine_devices(Seen()))
    assert levels(host.examine_devices(Seen(driver=driver))) == {"GPUs": "problem"}
    assert levels(host.examine_devices(Seen(cuda="12.8", driver=driver))) == {"GPUs": "problem"}


def test_what_slows_gpus_down_is_noted() -> None:
    pair = Seen(["H100, 80.0 GiB"] * 2, (), "12.8", "2.27", ["550.54, Enabled"])
    assert not levels(host.examine_devices(pair))
    assert levels(host.examine_devices(replace(pair, nccl=""))) == {"CUDA of torch, NCCL": "problem"}
    assert levels(host.examine_devices(replace(pair, driver=["550.54, Disabled"]))) == {"driver, persistence": "note"}
    apart = replace(pair, gpus=["H100, 80.0 GiB", "H100, 1.0 GiB"], apart=[(0, 1)])
    assert levels(host.examine_devices(apart)) == {"kinds": "note", "direct access": "note"}


@pytest.mark.parametrize(
    ("files", "limits", "expected"),
    [
        ({}, {}, {}),
        ({"cpu.max": "50000 100000"}, {}, {"cores": "note"}),
        ({"cpu.max": "max 100000"}, {}, {}),
        ({"memory.max": str(8 * GIB), "memory.current": "0"}, {}, {}),
        ({"memory.max": str(GIB // 2), "memory.current": "0"}, {}, {"memory": "problem"}),
        ({"memory.max": "max", "memory.current": "0"}, {}, {}),
        ({}, {resource.RLIMIT_NOFILE: 256}, {"open files": "note"}),
        ({}, {resource.RLIMIT_MEMLOCK: 2**16}, {"locked memory": "problem"}),
    ],
)
def test_limits_of_the_host_and_of_a_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    limits: dict[int, int],
    expected: dict[str, str],
) -> None:
    group, cards = tmp_path / "sys/fs/cgroup", tmp_path / "sys/class/infiniband"
    group.mkdir(parents=True)
    (cards / "mlx5_0").mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(f"{text}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY), 0))
    assert levels(host.examine_host(tmp_path)) == expected


def test_shared_memory_that_is_small_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 * 2**20))
    assert levels(host.examine_host(tmp_path))["/dev/shm"] == "note"


def test_a_folder_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    found = list(host.examine_disk(str(tmp_path / "runs" / "of" / "mine")))
    assert not any(one.level == "problem" for one in found)
    assert found[0].value.startswith(f"{tmp_path}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, name: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host.Storage, "create", refuse)
    found = list(host.examine_folder("TMPDIR", str(tmp_path)))
    assert levels(found) == {"writing to TMPDIR": "problem"}
    assert "Permission denied" in found[-1].value


@pytest.mark.parametrize(
    ("changes", "variables", "expected"),
    [
        ({}, {}, {}),
        ({"address": ""}, {}, {"hostname": "problem"}),
        ({"address": ""}, {"GLOO_SOCKET_IFNAME": "eth0"}, {"hostname": "note"}),
        ({"address": "127.0.1.1"}, {}, {"hostname": "note"}),
        ({}, {"GLOO_SOCKET_IFNAME": "eth"}, {"GLOO_SOCKET_IFNAME": "problem"}),
        ({}, {"NCCL_SOCKET_IFNAME": "eth"}, {}),
        ({}, {"NCCL_SOCKET_IFNAME": "=eth"}, {"NCCL_SOCKET_IFNAME": "problem"}),
        ({}, {"NCCL_SOCKET_IFNAME": "^lo,docker"}, {}),
    ],
)
def test_the_network(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], variables: dict[str, str], expected: dict[str, str]
) -> None:
    pretend_network(monkeypatch, **changes)
    assert levels(host.examine_network(variables)) == expected


def pretend_network(monkeypatch: pytest.MonkeyPatch, address: str = "10.0.0.1") -> None:
    look_up = socket.getaddrinfo

    def found(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name != "node1":
            return look_up(name, *arguments, **keywords)
        if not address:
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(("eth0", "eth1", "lo"), 1)])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": "problem"}),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, {}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "note"}),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"TORCH_DISTRIBUTED_DEBUG": "note"}),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}, {"SLURM_NTASKS": "problem"}),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}, {}),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {}),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "problem"}),
        ({"LOCAL_RANK": "0"}, {"LOCAL_RANK": "problem"}),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, {}),
    ],
)
def test_variables(variables: dict[str, str], expected: dict[str, str]) -> None:
    assert levels(host.examine_environment({"OMP_NUM_THREADS": "1", **variables})) == expected
    assert "OMP_NUM_THREADS" in levels(host.examine_environment(variables))


def test_the_worst_pair_is_named() -> None:
    all_links = dict.fromkeys(pairs_of(4), Link(2e-5, 8.0 * GIB))
    slow_link = Link(2e-5, GIB)
    fine = Measured("cpu", ["node1"] * 4, all_links, GIB)
    assert not levels(links.examine(fine))
    slow = replace(fine, links=all_links | {pair: slow_link for pair in all_links if pair[1] >= 2})
    (bandwidth,) = [one for one in links.examine(slow) if one.name.startswith("bandwidth")]
    assert bandwidth.level == "ok"  # most of the pairs: that is how this host is
    one_slow = replace(fine, links=all_links | {(2, 3): slow_link})
    (bandwidth,) = [one for one in links.examine(one_slow) if one.name.startswith("bandwidth")]
    assert bandwidth.level == "note" and "least: 2-3" in bandwidth.value


def test_links_between_nodes_are_summed_up_apart() -> None:
    measured = Measured("cpu", ["node1", "node1", "node2"], dict.fromkeys(pairs_of(3), Link(1e-5, GIB)), GIB)
    names = [one.name for one in links.examine(measured)]
    assert names[:4:2] == ["latency, 1 pairs in a node (cpu)", "latency, 2 pairs between nodes (cpu)"]


def test_two_processes_measure_their_link_and_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children(recursive=True))
    code = cli.run(["doctor", "--devices", "2", "--json", "--root", str(tmp_path), "--timeout", "100"])
    found = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
    assert code == exit_code(found)
    measured = [one for one in found if one.topic == "links"]
    assert [one.name.split(",")[0] for one in measured] == ["latency", "bandwidth", "all-reduce"]
    assert set(psutil.Process().children(recursive=True)) <= before


def test_processes_that_take_too_long_are_ended() -> None:
    found = links.measure_here(2, timeout=0.0)
    assert isinstance(found, Finding)
    assert found.level == "problem" and found.value == "rank 0: no answer within 0 s"


@pytest.mark.thorough
def test_the_run_of_a_configuration_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "gpt" / "wave.yaml")
    arguments = ["doctor", "--json", "--root", str(tmp_path), "--config", recipe]
    for devices_given, level in (("4", "ok"), ("3", "problem")):
        cli.run([*arguments, "--trainer.devices", devices_given])
        output = capsys.readouterr().out
        found = [Finding(**one) for one in json.loads(output[output.index("[") :])]
        assert {one.level for one in found if one.topic == "run"} == {level}


def test_what_is_bad_or_other_on_another_host_is_said_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [Finding("versions", "torch", "2.13"), Finding("host", "cores", "8")]
    there = [
        Finding("versions", "torch", "2.10"),
        Finding("host", "cores", "4"),
        Finding("disk", "x", "y", "note", "z"),
    ]
    measured = Measured("cpu", ["node1", "node2"], {(0, 1): Link(1e-5, GIB)}, GIB, [here, there])
    monkeypatch.setattr(links, "place", lambda: (0, 2))
    monkeypatch.setattr(links, "measure_given", lambda *_: measured)
    _, found = doctor._links(doctor._parser().parse_args([]), here)
    assert [(one.topic, one.name) for one in found[:2]] == [
        ("on node2", "versions: torch"),
        ("on node2", "disk: x"),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "x"], "expected 2 or more processes"),
        (["--devices", "1"], "each other, got '1'"),
        (["--timeout", "nan"], "expected more than 0 seconds, got 'nan'"),
        (["--timeout", "soon"], "expected more than 0 seconds, got 'soon'"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor._parser().parse_args(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_rank_is_the_launchers() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}
    assert links.place({}) is None
    assert links.place({"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)
    assert links.place(slurm) == (0, 4)
    assert links.place(slurm | {"SLURM_JOB_NAME": "bash"}) is None  # it would wait for ranks that nobody starts


def test_a_machine_is_measured_and_read_back(tmp_path: Path) -> None:
    links_of_two = {(0, 1): Link(1e-5, 1e9), (0, 2): Link(1e-4, 1e8)}
    found = Measured("cpu", ["a", "a", "b", "b"], links_of_two, 1e9)
    said: list[str] = []
    machine = measure.measure(found, say=said.append, sizes=(8, 16))
    assert (machine.within_node.latency, machine.within_node.bandwidth) == (1e-5, 1e9)
    assert (machine.between_nodes.latency, machine.between_nodes.bandwidth) == (1e-4, 1e8)
    assert machine.ranks_per_node == 2
    assert [size for size, _ in machine.matmul["float32"]] == [8, 16]
    assert machine.matmul_rate("float32", 8) > 0
    assert machine.memory_bandwidth > 0
    assert machine.host_call > 0
    assert any("float32" in one for one in said)
    assert "2 nodes" in machine.source
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    shown = {one.name: one.value for one in measure.examine(machine, "machine.json")}
    assert shown["links between nodes"] == "100 us, 0.1 GB/s"


def test_links_between_nodes_may_be_given() -> None:
    one_node = Measured("cpu", ["a", "a"], {(0, 1): Link(1e-5, 1e9)}, 1e9)
    assert measure.measure(one_node, sizes=(8,)).between_nodes.bandwidth == 1e9
    given = measure.measure(one_node, network=5e10, sizes=(8,))
    assert (given.between_nodes.latency, given.between_nodes.bandwidth) == (1e-5, 5e10)
    assert "not measured, but given as 50 GB/s" in given.source
    with pytest.raises(HanayoError, match="--measure needs links: with --devices N"):
        measure.measure(None, sizes=(8,))


@pytest.mark.parametrize(("text", "speed"), [("50GB/s", 5e10), ("400Gbit/s", 5e10), ("100 MB", 1e8)])
def test_speeds(text: str, speed: float) -> None:
    assert doctor.speed(text) == speed


def test_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["doctor", "--network=fast"])
    assert "expected bytes or bits per second" in capsys.readouterr().err


@pytest.mark.slow
def test_the_doctor_writes_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "SIZES", (16, 32))
    monkeypatch.setattr(measure.measure, "__kwdefaults__", measure.measure.__kwdefaults__ | {"sizes": (16, 32)})
    cli.run(["doctor", "--devices=2", "--measure"])
    assert Machine.load("machine.json").within_node.bandwidth > 0
