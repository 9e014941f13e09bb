"""Writes a checkpoint in a format that other tools read.

file           one file of Lightning: a plain Trainer and `load_from_checkpoint` read it
safetensors    a folder with the module's weights under the module's names
huggingface    a folder that `from_pretrained` of transformers reads: its names, and config.json
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hanayo.checkpoint.convert.huggingface import make_model, read_config, save_config, weights_for
from lightning_hanayo.checkpoint.convert.opened import OpenedCheckpoint, open_checkpoint
from lightning_hanayo.checkpoint.convert.torch_file import write_torch_file
from lightning_hanayo.checkpoint.convert.weights_folder import MAX_SHARD_SIZE, check_free, new_folder, write_weights
from lightning_hanayo.checkpoint.format.state_document import WITHOUT_STATE
from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.checkpoint.load.optimizer_state import CLASS_NAME
from lightning_hanayo.checkpoint.save.plain_file import write_file
from lightning_hanayo.errors import HanayoError, nearest

Format = Literal["file", "safetensors", "huggingface"]
FORMATS: tuple[Format, ...] = ("file", "safetensors", "huggingface")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: str
    num_tensors: int
    """of the model"""
    files: Sequence[str] = ()
    """in a folder, by name"""
    left_out: Sequence[str] = ()
    """entries of the state dict that have no place in the new format"""
    notes: Sequence[str] = field(default=())
    """what else the user should know"""


def export_checkpoint(
    path: str,
    target: str,
    *,
    to: Format,
    module: str | None = None,
    config: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> Exported:
    """Verify a checkpoint, and write it in another format. Call it in one process.

    No more than one tensor at a time is in memory, or those that transformers makes of one.

    Args:
        path: a checkpoint folder, local or an fsspec URL, or a plain file of Lightning.
        target: where nothing is yet. A file may be on a remote file system; folders are local.
        to: "file", "safetensors" or "huggingface".
        module: the name in the LightningModule of the model of transformers, such as "net"; None: the one that fits.
        config: a folder with its config.json; None: the configuration that the checkpoint has.
        max_shard_size: bytes of tensors in one file of a folder.

    Example:
        >>> export_checkpoint("checkpoints/last.ckpt", "whole.ckpt", to="file")
        >>> export_checkpoint("checkpoints/last.ckpt", "gpt2-tuned", to="huggingface")
        >>> model = GPT2LMHeadModel.from_pretrained("gpt2-tuned")

    Raises:
        CheckpointError: the checkpoint isn't whole, or the target can't be written.
        HanayoError: the target exists, or the checkpoint doesn't fit the format.
        UnsupportedError: transformers is missing, or converts the model's weights in a way that can't be followed.
    """
    if to not in FORMATS:
        raise HanayoError(f"there is no format {to!r}: {nearest(to, FORMATS)}")
    if max_shard_size < 1:
        raise HanayoError(f"max_shard_size={max_shard_size}: expected a number of bytes")
    check_free(target)
    opened = open_checkpoint(path)
    if to == "file":
        return _to_file(opened, target)
    if to == "safetensors":
        return _to_safetensors(opened, target, max_shard_size)
    return _to_huggingface(opened, target, module, config, max_shard_size)


def _to_file(opened: OpenedCheckpoint, target: str) -> Exported:
    content = dict(opened.content)
    if opened.folder is not None:
        content["state_dict"] = _with_shared_tensors(opened)
    if opened.folder is not None and "optimizer_states" in content:
        content["optimizer_states"] = [_numbered(state) for state in content["optimizer_states"]]
    write_file(target, lambda file: write_torch_file(file, content))
    return Exported(target, len(opened.state_dict), notes=_unsafe(target))


def _with_shared_tensors(opened: OpenedCheckpoint) -> dict[str, Any]:
    """The state dict, where tied parameters are one tensor, which is written once."""
    state = opened.state_dict
    tied = opened.tied
    shared = type(state)((name, state[tied.get(name, name)]) for name in state)
    vars(shared).update(vars(state))  # the versions of the modules' entries
    return shared


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with numbers of parameters in place of names, as `load_state_dict` of torch expects."""
    numbers: dict[str, int] = {}
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
    without = [numbers[name] for name in state.get(WITHOUT_STATE, ()) if name in numbers]
    return {
        **{key: value for key, value in state.items() if key not in (WITHOUT_STATE, CLASS_NAME)},
        **({WITHOUT_STATE: without} if without else {}),
        "state": {numbers.get(name, name): values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def _unsafe(target: str) -> list[str]:
    """Classes in the file that only code can rebuild: a Trainer refuses them unless it is told to trust the file."""
    if not Storage.of(target).is_local:
        return []
    names = torch.serialization.get_unsafe_globals_in_checkpoint(target)
    return [f"the Trainer reads {', '.join(sorted(names))} with weights_only=False only"] if names else []


def _to_safetensors(opened: OpenedCheckpoint, target: str, max_shard_size: int) -> Exported:
    tied = opened.tied
    tensors = {
        name: value for name, value in opened.state_dict.items() if isinstance(value, Tensor) and name not in tied
    }
    with new_folder(target) as folder:
        files = write_weights(folder, tensors, max_shard_size)
    left_out = [name for name, value in opened.state_dict.items() if not isinstance(value, Tensor)]
    return Exported(target, len(tensors), files, left_out)


def _to_huggingface(
    opened: OpenedCheckpoint, target: str, module: str | None, config: str | None, max_shard_size: int
) -> Exported:
    stored = _stored_model(opened, module, needed=config is None)
    if config is not None:
        values, class_name = read_config(config)
        prefix = module if module is not None else stored.get("prefix")
    else:
        values, class_name, prefix = stored["config"], stored["class"], stored["prefix"]
    model = make_model(values, class_name)
    weights, left_out = weights_for(model, opened.state_dict, prefix)
    with new_folder(target) as folder:
        files = write_weights(folder, weights, max_shard_size)
        save_config(model, weights, folder)
        files = sorted({*files, *os.listdir(folder)})
    return Exported(target, len(weights), files, left_out)


def _stored_model(opened: OpenedCheckpoint, module: str | None, *, needed: bool) -> Mapping[str, Any]:
    """What the checkpoint says of its model of transformers."""
    models = [one for one in _models(opened) if module is None or one["prefix"] == module]
    if len(models) == 1:
        return models[0]
    if not needed:
        return {}
    if models:
        places = ", ".join(repr(one["prefix"]) for one in models)
        raise HanayoError(f"{opened.path} has several models of transformers: {places}. Say which one: --module")
    where = f" at {module!r}" if module is not None else ""
    raise HanayoError(
        f"{opened.path} doesn't say that it has a model of transformers{where}. Give the folder of its config.json: "
        f"--config DIR; or export its weights with --to safetensors"
    )


def _models(opened: OpenedCheckpoint) -> list[dict[str, Any]]:
    """The models of transformers that a manifest names, as far as it says all that is needed of them."""
    listed = opened.about.get("huggingface")
    kinds = {"prefix": str, "class": str, "config": dict}
    return [
        one
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict) and all(isinstance(one.get(key), kind) for key, kind in kinds.items())
    ]
