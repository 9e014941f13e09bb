"""Makes the two documents of a checkpoint's folder: its state, and what the manifest says of the whole."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from math import prod
from typing import Any

import lightning
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hanayo.checkpoint.format.state_document import OptimizerDocument, StateDocument
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.strategy.checkpoints.saving.distributed_tensors import with_distributed_marked
from lightning_hanayo.strategy.checkpoints.saving.parts import OwnValues
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.topology import Topology

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"


def state_document(
    checkpoint: Mapping[str, Any],
    tied: Mapping[str, str],
    optimizers: Sequence[tuple[Optimizer, Sequence[str]]],
    gathered: Sequence[OwnValues],
) -> StateDocument:
    """The state of rank 0, with the values that other ranks have sent.

    Args:
        checkpoint: Lightning's, as hooks have left it.
        tied: entries of the state dict that are stored under another name.
        optimizers: with the names of their parameters.
        gathered: of all ranks.
    """
    state = checkpoint[MODEL]
    names = dict.fromkeys((*state, *(name for own in gathered for name in (*own.names, *own.model))))
    states = checkpoint.get(OPTIMIZERS)
    return StateDocument(
        checkpoint=with_distributed_marked(
            {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
        ),
        names=list(names),
        tied=dict(tied),
        values={name: value for own in gathered for name, value in own.model.items()},
        versions=dict(getattr(state, "_metadata", {})),
        optimizers=None if states is None else [
            _optimizer_document(optimizer, parameters, one, gathered, index)
            for index, ((optimizer, parameters), one) in enumerate(zip(optimizers, states, strict=False))
        ],
    )  # fmt: skip


def _optimizer_document(
    optimizer: Optimizer, names: Sequence[str], state: Mapping[str, Any], gathered: Sequence[OwnValues], index: int
) -> OptimizerDocument:
    kind = type(optimizer)
    groups = state.get("param_groups", ())  # Lightning's stand-in for no optimizer has none
    without = dict.fromkeys(name for own in gathered for name in own.without_state[index])
    return OptimizerDocument(
        class_name=f"{kind.__module__}.{kind.__qualname__}",
        param_groups=[{**group, "params": [names[i] for i in group["params"]]} for group in groups],
        values={parameter: values for own in gathered for parameter, values in own.optimizers[index].items()},
        without_state=[name for name in names if name in without] if len(without) < len(names) else [],
        rest={key: value for key, value in state.items() if key not in ("state", "param_groups")},
    )


def about(
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    cube: Cube | None,
    topology: Topology,
    layout: Layout,
    tied: Mapping[str, str],
) -> dict[str, Any]:
    """What the manifest says of a checkpoint, for those who list and export it. JSON."""
    return {
        "step": checkpoint.get("global_step", 0),
        "epoch": checkpoint.get("epoch", 0),
        "layout": {**asdict(topology), "waves": layout.num_waves, "schedule": layout.schedule},
        "module": type(module).__qualname__,
        "num_parameters": num_parameters(module, cube),
        "versions": {
            "lightning_hanayo": version("lightning-hanayo"),
            "lightning": lightning.__version__,
            "torch": torch.__version__,
        },
        "tied": dict(tied),
        "huggingface": list(_huggingface(module)),
    }


def num_parameters(module: nn.Module, cube: Cube | None) -> int:
    """How many the whole model has."""
    shapes = {} if cube is None else cube.whole_shapes
    return sum(prod(shapes.get(parameter, parameter.shape)) for parameter in module.parameters())


def _huggingface(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The models of transformers that aren't inside another one, with what `from_pretrained` needs of them."""
    library = sys.modules.get("transformers.modeling_utils")  # else none of its models exists
    outer: list[str] = []
    for name, part in module.named_modules():
        is_inside = any(not prefix or name.startswith(f"{prefix}.") for prefix in outer)
        if library is not None and isinstance(part, library.PreTrainedModel) and not is_inside:
            outer.append(name)
            config = json.loads(part.config.to_json_string(use_diff=False))
            yield {"prefix": name, "class": type(part).__name__, "config": config}
