"""A training started by each launcher ends with the weights of one process.

Lightning's launcher    1 node  x 2
torchrun                1 node  x 2, and 2 nodes x 2: two network namespaces, which a switch connects
SLURM                   2 nodes x 2: a stand-in for srun, with the variables that SLURM sets
"""

import sys
from pathlib import Path

import pytest

from recipes.benchmarks.cluster import DEVICE, Cluster, Link, refusal
from tests.harness.pool import Pool
from tests.harness.training import assert_close
from tests.launching import srun
from tests.launching.nodes import SCRIPT, Weights, arguments, one_process, run_nodes, trained

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SRUN = [sys.executable, str(Path(srun.__file__))]


@pytest.fixture(scope="module")
def expected(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return one_process(pool, tmp_path_factory.mktemp("alone"))


def test_lightnings_launcher(tmp_path: Path, expected: Weights) -> None:
    command = [sys.executable, SCRIPT, *arguments(tmp_path, 1, 2)]
    assert_close(trained(tmp_path, [command], num_nodes=1, devices=2)[0], expected, 1e-12)


@pytest.mark.thorough
def test_torchrun_on_one_node(tmp_path: Path, expected: Weights) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", SCRIPT, *arguments(tmp_path, 1, 2)]
    assert_close(trained(tmp_path, [command], num_nodes=1, devices=2)[0], expected, 1e-12)


@pytest.mark.thorough
def test_torchrun_on_two_nodes(tmp_path: Path, expected: Weights) -> None:
    if reason := refusal():
        pytest.skip(reason)
    with Cluster(2, Link(1000, burst_kb=64)) as cluster:
        commands = [
            ["ip", "netns", "exec", host, "env", f"GLOO_SOCKET_IFNAME={DEVICE}", *TORCHRUN]
            + ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", "--master-addr=10.77.0.1"]
            + ["--master-port=29500", SCRIPT, *arguments(tmp_path, 2, 2)]
            for node, host in enumerate(cluster.hosts)
        ]
        assert_close(trained(tmp_path, commands, num_nodes=2, devices=2)[0], expected, 1e-12)


@pytest.mark.thorough
def test_slurm(tmp_path: Path, expected: Weights) -> None:
    command = [*SRUN, "2", "2", sys.executable, SCRIPT, *arguments(tmp_path, 2, 2)]
    weights, output = trained(tmp_path, [command], num_nodes=2, devices=2)
    assert_close(weights, expected, 1e-12)
    assert "SLURM auto-requeueing" in output, "Lightning has recognised SLURM"


@pytest.mark.thorough
def test_other_numbers_of_tasks_than_of_devices_are_one_line(tmp_path: Path) -> None:
    command = [*SRUN, "1", "1", sys.executable, SCRIPT, *arguments(tmp_path, 1, 2)]
    codes, output = run_nodes(tmp_path, [command])
    assert codes == [1]
    last = output.splitlines()[-1]
    assert "HanayoError: You set `devices=2`" in last and "`--ntasks-per-node=1` does not match" in last
