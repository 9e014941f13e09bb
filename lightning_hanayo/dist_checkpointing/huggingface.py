"""Gives the weights of a checkpoint the names under which `from_pretrained` of transformers finds them.

checkpoint                               folder
net.transformer.wte.weight               transformer.wte.weight      without the module's name in the LightningModule
net.lm_head.weight                                                   tied to it, so not stored
net.model.layers.0.experts.gate_up_proj  model.layers.0.experts.0.w1.weight, ...     as the model's own rules split it

transformers' rules are asked with tensors on the meta device; then each tensor is converted when it is written.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.checkpoint.load.stored_tensor import StoredTensor
from lightning_hanayo.errors import HanayoError, UnsupportedError, listed

_LAYER = re.compile(r"^(.*?\.\d+)\.")


def make_model(config: Mapping[str, Any], class_name: str) -> Any:
    """Returns a model of transformers on the meta device.

    Raises:
        UnsupportedError: transformers isn't installed, or has no such class.
    """
    model_class = _model_class(class_name)
    try:
        made = model_class.config_class.from_dict(dict(config))
        with torch.device("meta"):
            return model_class(made)
    except Exception as error:  # each class of configurations has errors of its own
        raise HanayoError(f"{class_name} can't be built of its configuration: {error}") from error


def _model_class(name: str) -> Any:
    library = _transformers()
    found = getattr(library, name, None)
    if isinstance(found, type) and issubclass(found, library.PreTrainedModel):
        return found
    raise UnsupportedError(
        f"transformers {library.__version__} has no model {name!r}. For a model of another package, export its weights "
        f"with --to safetensors, and load them into it."
    )


def read_config(folder: str) -> tuple[Mapping[str, Any], str]:
    """Returns the configuration in a folder's config.json, and the name of its model's class.

    Raises:
        HanayoError: there is none, or it names no class.
    """
    try:
        config = _transformers().PretrainedConfig.get_config_dict(folder, local_files_only=True)[0]
    except (OSError, ValueError) as error:
        raise HanayoError(f"{folder} has no config.json that can be read: {error}") from None
    names = config.get("architectures") or []
    if len(names) != 1:
        raise HanayoError(f'{folder}/config.json names no class: add "architectures": ["GPT2LMHeadModel"]')
    return config, names[0]


def weights_for(model: Any, state: Mapping[str, Any], prefix: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of the folder by name, and the names in `state` that have no place in it.

    Args:
        model: on the meta device.
        state: the LightningModule's state dict.
        prefix: the model's name in the LightningModule; None: the one that fits.

    Raises:
        HanayoError: the model has tensors that `state` lacks, or of other shapes.
        UnsupportedError: the model's names on the disk can't be found out.
    """
    wanted = model.state_dict()
    start = _prefix(wanted, state, model) if prefix is None else f"{prefix}.".lstrip(".")
    _check(wanted, state, start, model)
    stored = _untied(model, wanted)
    for name in wanted.keys() - stored.keys():
        _check_tied(name, stored, state, start, model)
    own = {name: state[start + name] for name in stored}
    used = {start + name for name in wanted}
    return _as_on_disk(model, own), [name for name in state if name not in used]


def save_config(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write config.json and, of a model that generates, generation_config.json."""
    floating = [one.dtype for one in weights.values() if one.dtype.is_floating_point]
    model.config.dtype = str(floating[0]).removeprefix("torch.") if floating else None
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ModuleNotFoundError:
        raise UnsupportedError("Hugging Face's format needs transformers: pip install transformers") from None


def _rules(name: str, module: str) -> Any:
    """A function that save_pretrained of transformers uses, too."""
    found = getattr(import_module(f"transformers.{module}"), name, None)
    if found is None:
        raise UnsupportedError(
            f"this version of transformers, {_transformers().__version__}, doesn't say how its models are saved "
            f"({name}). Install a newer one: pip install --upgrade transformers"
        )
    return found


def _prefix(wanted: Mapping[str, Tensor], state: Mapping[str, Any], model: Any) -> str:
    longest = max(wanted, key=len)
    fitting = [name.removesuffix(longest) for name in state if name == longest or name.endswith(f".{longest}")]
    whole = [start for start in fitting if all(start + name in state for name in wanted)] or fitting
    if len(whole) == 1:
        return whole[0]
    found = f"it is at {' and '.join(repr(one.rstrip('.')) for one in whole)}" if whole else f"there is no {longest}"
    raise HanayoError(f"the checkpoint doesn't have {type(model).__name__} at one place: {found}. Say where: --module")


def _check(wanted: Mapping[str, Tensor], state: Mapping[str, Any], start: str, model: Any) -> None:
    missing = [start + name for name in wanted if not isinstance(state.get(start + name), Tensor)]
    if missing:
        raise HanayoError(
            f"the checkpoint lacks tensors of {type(model).__name__}: {listed(missing)}. Was the "
            f"model changed (adapters, quantization)? Export it with --to safetensors."
        )
    for name, tensor in wanted.items():
        if state[start + name].shape != tensor.shape:
            found, expected = tuple(state[start + name].shape), tuple(tensor.shape)
            raise HanayoError(
                f"{start}{name} is {found} in the checkpoint, and {expected} in a {type(model).__name__} of its "
                f"configuration. Give the one that fits: --config"
            )


def _untied(model: Any, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Without the names that the model ties to others, as save_pretrained leaves them out."""
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in wanted.items() if name not in ignored}
    result: Mapping[str, Tensor] = _rules("remove_tied_weights_from_state_dict", "modeling_utils")(kept, model)
    return result


def _check_tied(name: str, stored: Mapping[str, Tensor], state: Mapping[str, Any], start: str, model: Any) -> None:
    """A name that isn't stored gets the value of the one that it is tied to, so both must have one value."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    other = next((one for one in stored if tensors.get(one) is tensors.get(name)), None)
    if other is None or state[start + name] is state[start + other]:
        return
    if not torch.equal(state[start + name].cpu(), state[start + other].cpu()):
        raise HanayoError(
            f"{start}{name} and {start}{other} have different values, and the model's configuration says that they are "
            f"one. Give a configuration with tie_word_embeddings=false: --config"
        )


def _as_on_disk(model: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and convert the tensors as save_pretrained does; none is read before it is used."""
    revert = _rules("revert_weight_conversion", "core_model_loading")
    on_meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in own.items()}
    names = {id(tensor): name for name, tensor in on_meta.items()}
    on_disk = revert(model, dict(on_meta))
    result = {target: own[names[id(tensor)]] for target, tensor in on_disk.items() if id(tensor) in names}
    renamed = {names[id(tensor)] for tensor in on_disk.values() if id(tensor) in names}
    converted = {target: tensor for target, tensor in on_disk.items() if target not in result}
    rest = {name: tensor for name, tensor in on_meta.items() if name not in renamed}
    for key in (lambda name: name, _layer):
        groups = _groups(model, revert, rest, key)
        if _shapes(one for _, targets in groups for one in targets.items()) == _shapes(converted.items()):
            for sources, targets in groups:
                result |= _converted(model, revert, {name: own[name] for name in sources}, targets)
            return result
    raise UnsupportedError(
        f"transformers converts {listed(rest)} of {type(model).__name__} together when it saves "
        f"them, so they can't be written one after another. Load the checkpoint into the model, and save it there: "
        f"hanayo ckpt export --to file, then model.save_pretrained(folder)."
    )


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[1] if found else ""


def _groups(
    model: Any, revert: Callable[..., Any], rest: Mapping[str, Tensor], key: Callable[[str], str]
) -> list[tuple[list[str], dict[str, Tensor]]]:
    """Names whose tensors are converted together, and what comes of them; none if that doesn't work."""
    names: dict[str, list[str]] = {}
    for name in rest:
        names.setdefault(key(name), []).append(name)
    try:
        return [(group, revert(model, {name: rest[name] for name in group})) for group in names.values()]
    except (RuntimeError, ValueError, KeyError, IndexError, AttributeError):
        return []


def _shapes(tensors: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


def _converted(
    model: Any, revert: Callable[..., Any], sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What comes of the sources, which are read for the first of them, and kept until the last one was read."""
    kept: dict[str, Tensor] = {}

    def read(name: str, region: object) -> Tensor:
        assert region is None, "files are written whole"
        if name not in kept:
            kept.update(revert(model, {source: _values(tensor) for source, tensor in sources.items()}))
        return kept.pop(name).clone()

    return {name: StoredTensor.of(one.shape, one.dtype, partial(read, name)) for name, one in targets.items()}


def _values(tensor: Tensor) -> Tensor:
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor
