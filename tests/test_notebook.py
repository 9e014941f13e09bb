"""A function that is launched from a notebook trains as in one process; what goes wrong on a rank is raised there.

The recipe's notebook runs in a real Jupyter kernel: tox -e notebook.
"""

import gc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.notebook import launch
from lightning_hanayo.strategy.joining import serve_store
from lightning_hanayo.strategy.lightning import launcher
from tests.harness import limits, models
from tests.harness.training import assert_close, make_loader
from tests.test_words import ROOT

NOTEBOOK = ROOT / "recipes" / "notebook" / "wave.ipynb"
QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def train(devices: int, strategy: str) -> dict[str, torch.Tensor]:
    """The weights after two steps."""
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=2, **QUIET)
    module = models.build(models.MLP, torch.float64)
    batches = models.vectors((8, 8))
    for batch in batches:
        batch["x"] = batch["x"].double()
    trainer.fit(module, make_loader(batches))
    whole = module if devices == 1 else trainer.strategy.gather_model()  # type: ignore[attr-defined]
    return dict(whole.state_dict()) if trainer.is_global_zero else {}


def test_it_trains_as_in_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    text = "shown"

    def function() -> dict[str, torch.Tensor]:  # of no module, like those of a notebook
        print(text, os.environ["LOCAL_RANK"])
        return train(2, "hanayo")

    assert_close(launch(function, devices=2), train(1, "auto"), 1e-12)
    assert {"shown 0", "shown 1"} <= set(capfd.readouterr().out.splitlines())


def test_a_fork_destroys_nothing_of_its_parent() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.cycle, self.store = self, serve_store()  # with a thread that a fork can't join

    def collect() -> int:
        threads = [threading.Thread(target=int) for _ in range(20)]  # whose stacks take the place of the parent's
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        return 1

    gc.disable()
    try:
        for _ in range(20):
            Cycle()
        assert launch(collect, devices=1) == 1
    finally:
        gc.enable()
        gc.collect()


def fail(how: Callable[[], object]) -> None:
    """Fail on rank 1, while rank 0 waits."""
    if os.environ["LOCAL_RANK"] == "1":
        how()
    time.sleep(60)


def lookup() -> None:
    {}["missing"]


def leave() -> None:
    raise SystemExit(3)


class Unreadable(Exception):
    """Can be pickled, but not read again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one}, {two}")


def raise_unreadable() -> None:
    raise Unreadable(1, 2)


@pytest.mark.parametrize(
    "how, kind, message",
    [
        (lookup, KeyError, "'missing'"),
        (leave, RuntimeError, r"rank 1 left the run: SystemExit\(3\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RuntimeError, r"rank 1 was killed \(signal 9\)"),
        (lambda: os._exit(3), RuntimeError, "rank 1 ended with exit code 3 without saying why"),
        (raise_unreadable, RuntimeError, "Unreadable: 1, 2"),
    ],
)
def test_what_goes_wrong_on_a_rank_is_raised(
    how: Callable[[], object], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "KILL_AFTER", 0.1)
    with pytest.raises(kind, match=message) as raised:
        launch(fail, how, devices=2)
    if kind is KeyError:
        assert "in lookup" in str(raised.value.__cause__), "the rank's traceback"


def test_mistakes_are_named() -> None:
    with pytest.raises(HanayoError, match="devices=0: launch\\(\\) needs at least one rank"):
        launch(lookup, devices=0)
    with pytest.raises(HanayoError, match="result can't be sent to the notebook: .*Return numbers, tensors"):
        launch(lambda: lambda: None, devices=1)
    with pytest.raises(HanayoError, match="2 processes were started, but the Trainer's devices x num_nodes is 3"):
        launch(train, 3, "hanayo", devices=2)


def test_a_process_that_has_used_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(HanayoError, match="this process has used CUDA, so its forks can't. Restart the kernel"):
        launch(lookup, devices=1)


def test_a_trainer_in_a_notebook_names_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    pl.Trainer(accelerator="cpu", devices=1, strategy="hanayo", **QUIET)
    with pytest.raises(HanayoError, match=r"Make the Trainer in a function, and call .*launch\(function, devices=2\)"):
        pl.Trainer(accelerator="cpu", devices=2, strategy="hanayo", **QUIET)


def test_standard_input_cant_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-"])
    with pytest.raises(HanayoError, match="the other ranks can't read this program again from standard"):
        train(2, "hanayo")


@pytest.mark.thorough
def test_code_from_the_command_line_runs_again() -> None:
    code = "from tests.test_notebook import train\nprint('trained', len(train(2, 'hanayo')))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = limits.run([sys.executable, "-c", code, "an argument"], 100, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


def test_the_recipe_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in cells)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ipykernel", "nbclient")),
    reason="needs Jupyter: tox -e notebook, or pip install -e '.[notebook]'",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # Jupyter's own
def test_the_recipe_trains_in_a_jupyter_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    refused = 'L.Trainer(accelerator="cpu", devices=2, strategy="hanayo")'
    failing = f"try:\n    {refused}\nexcept ValueError as error:\n    print(error)"
    notebook.cells.append(nbformat.v4.new_code_cell(failing))
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    assert "blocks: 8 blocks, 4 stages on 2 pipeline ranks" in shown[3]
    assert float(shown[5].split()[-1]) > 0.9
    assert "launch(function, devices=2)" in shown[6]
