"""Trains one architecture in one process and on layouts, in a process of its own, and says what came of it."""

import multiprocessing
import os
import re
import sys
import warnings
from copy import deepcopy
from importlib import import_module
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo import HanayoStrategy, check
from lightning_hanayo.checking.case import cast
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor.processes import begin_fork
from recipes.zoo.inputs import Batches
from recipes.zoo.models import MAPPINGS, Tiny

LAYOUTS: dict[str, dict[str, Any]] = {"P=2": {}, "cube": {"cube": (1, 2, 1), "pipeline_parallel_size": 1}}
"""options of the strategy on two ranks"""
Row = dict[str, Any]
"""of one architecture: model, class, precision, and by layout its verdict, reason and largest difference"""


class _WithoutFloat32(ModuleType):
    """Stands for `torch` in a library's modules: where these round to fp32, they keep fp64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def run(mapping: str, kind: str, name: str, layout: str, timeout: float) -> Row:
    """The row of an architecture on one layout. Its processes end with this call."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(sender, mapping, kind, name, layout, timeout / 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # Python 3.12
        process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(timeout) else _unknown(layout, f"no answer within {timeout:g} s")
    except EOFError:
        process.join()
        row = _unknown(layout, f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return {"model": kind, "class": name} | row


def _unknown(layout: str, reason: str) -> Row:
    return {"layouts": {layout: {"verdict": "no answer", "reason": reason}}}


def _main(sender: Connection, mapping: str, kind: str, name: str, layout: str, timeout: float) -> None:
    begin_fork()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sender.send(examine(mapping, kind, name, layout, timeout))
    os._exit(0)


def examine(mapping: str, kind: str, name: str, layout: str, timeout: float) -> Row:
    """Train in this process, in fp64 if the model can, and then compare a layout with one process."""
    library, _, candidates = MAPPINGS[mapping]
    errors: list[Exception] = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        torch.manual_seed(0)
        try:
            getattr(import_module(library), name, None)  # imports its module
            _lift_roundings(library, dtype)
            for module, batches in candidates(kind, name):
                try:
                    _train(module, batches, dtype)
                except Exception as error:  # whatever user code raises
                    errors.append(error)
                else:
                    torch.set_default_dtype(torch.float32)
                    found = _checked(module, batches, layout, dtype, timeout)
                    return {"precision": str(dtype).removeprefix("torch."), "layouts": {layout: found}}
        except Exception as error:  # of the library, while it makes a model
            errors.append(error)
    reason = f"{type(errors[0]).__name__}: {_first_line(errors[0])}" if errors else "it takes none of the batches"
    return {"layouts": {layout: {"verdict": "one process can't", "reason": reason}}}


def _lift_roundings(library: str, dtype: torch.dtype) -> None:
    """Let a library's models compute in fp64 throughout, so that results are compared to 1e-9."""
    if dtype == torch.float64:
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{library}.") and vars(module).get("torch") is torch:
                module.torch = _WithoutFloat32("torch")  # type: ignore[attr-defined]


def _train(module: Tiny, batches: Batches, dtype: torch.dtype) -> None:
    """One step of a copy on each batch.

    Raises:
        Exception: the model can't do it in this process.
        ValueError: its loss isn't a number, or depends on no parameter, or not on the images.
    """
    _check_images(deepcopy(module).eval(), cast(batches[0], dtype))
    module = deepcopy(module)  # steps may leave tensors with gradients in it
    for batch in batches:
        loss: Tensor = module.training_step(cast(batch, dtype), 0)
        if not torch.isfinite(loss):
            raise ValueError(f"its loss is {loss.item()}")
        loss.backward()
    if not any(one.grad is not None for one in module.parameters()):
        raise ValueError("its loss depends on no parameter")


def _check_images(module: Tiny, batch: Any) -> None:
    """Images without tokens in the text, or with other sizes than the model expects, may be left out."""
    for key in {"pixel_values", "flattened_patches"} & batch.keys():
        with torch.no_grad():
            losses = [module.training_step(batch | {key: by * batch[key]}, 0).item() for by in (1, 2)]
        if losses[0] == losses[1]:
            raise ValueError("its loss doesn't depend on the images")


def _checked(module: Tiny, batches: Batches, layout: str, dtype: torch.dtype, timeout: float) -> Row:
    try:
        strategy = HanayoStrategy(**LAYOUTS[layout], blocks=module.blocks)
        verdict = check(module, batches, strategy, devices=2, steps=len(batches), dtype=dtype, timeout=timeout)
    except HanayoError as error:
        verdict_of_one = "one process can't" if " in one process" in str(error) else "refused"
        return {"verdict": verdict_of_one, "reason": _first_line(error)}
    outcome = {"failed": "fails"}.get(verdict.outcome, verdict.outcome)
    row: Row = {"verdict": outcome, "reason": "" if outcome == "exact" else _first_line(verdict.summary)}
    if verdict.layout is not None:
        row["gap"] = float(f"{verdict.layout.gap:.1e}")
    notes = [f"with blocks={module.blocks}"] if module.blocks else []
    if notes := [*notes, *map(_first_line, verdict.notes)]:
        row["notes"] = notes
    return row


def _first_line(text: object) -> str:
    line = str(text).strip().partition("\n")[0].removeprefix("refused: ")
    return re.sub(r"/\S*/site-packages/", "", line)[:300]
