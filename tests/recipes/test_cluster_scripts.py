"""The scripts for clusters: bash reads them, their options exist, and their layout holds the model on 64 ranks."""

import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from math import prod
from pathlib import Path

import pytest
import torch
import yaml

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.cli import run
from lightning_hanayo.strategy.setup.plan import plan_model
from lightning_hanayo.topology import resolve
from recipes.gpt.module import GPT
from tests.harness.launch import ROOT

CLUSTER = ROOT / "recipes/cluster"
SCRIPTS = ["slurm.sh", "torchrun.sh"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_a_script(name: str) -> None:
    ended = subprocess.run(["bash", "-n", CLUSTER / name], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_files_exist_and_it_says_what_it_needs(name: str) -> None:
    text = (CLUSTER / name).read_text()
    assert all((ROOT / config).is_file() for config in re.findall(r"--config (\S+)", text))
    ended = subprocess.run(
        ["bash", CLUSTER / name, "0", "node0"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert ended.returncode != 0 and "GLOO_SOCKET_IFNAME: set it to the network interface" in ended.stderr


@pytest.mark.thorough
def test_torchrun_has_the_options() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.findall(r"(--n[\w-]+|--m[\w-]+)=", (CLUSTER / "torchrun.sh").read_text())
    assert len(used) == 6 and all(option in known or option.replace("-", "_") in known for option in used)


@pytest.mark.thorough
def test_the_layout_holds_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    configs = [f"--config={ROOT / 'recipes/gpt/wave.yaml'}", f"--config={CLUSTER / 'gpus64.yaml'}"]
    printed = StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        run(["fit", *configs, "--print_config"])
    config = yaml.safe_load(printed.getvalue())
    own = yaml.safe_load((CLUSTER / "gpus64.yaml").read_text())["trainer"]["strategy"]["init_args"]
    options = HanayoStrategy(**own).options
    with torch.device("meta"):
        model = GPT(**config["model"]["init_args"])
    devices = config["trainer"]["devices"] * config["trainer"]["num_nodes"]
    names = ("pipeline_parallel_size", "data_parallel_size", "cube")
    topology = resolve(devices, **{name: getattr(options, name) for name in names})
    assert prod(topology.cube) == config["trainer"]["devices"], "a cube is a node"
    layout = plan_model(model, options, topology, steady=True, is_converted=False).layout
    assert layout.num_stages == 16
    assert config["data"]["init_args"]["batch_size"] % (layout.num_microbatches * prod(topology.cube) // 2) == 0
    assert 6.5e9 < sum(parameter.numel() for parameter in model.parameters()) < 6.9e9
