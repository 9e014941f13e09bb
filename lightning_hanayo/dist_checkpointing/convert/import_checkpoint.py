"""Makes a checkpoint folder of files that other tools have written. Any layout then reads its part of it.

a plain file of Lightning      weights, optimizer states, and all else; numbers of parameters become names
a folder of Hugging Face       weights, under the names that the model has in memory
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_hanayo.dist_checkpointing.compare import as_in_a_folder, open_checkpoint, tied_in_memory
from lightning_hanayo.dist_checkpointing.export import check_free
from lightning_hanayo.dist_checkpointing.huggingface import (
    Merge,
    SafetensorsFolder,
    joined,
    make_model,
    match_names,
    named_values,
    names_of,
    read_config,
)
from lightning_hanayo.dist_checkpointing.load_state import parameters_in, with_keys
from lightning_hanayo.dist_checkpointing.part import RankPart, SavingRanks, TensorPart
from lightning_hanayo.dist_checkpointing.read_tensor import StoredTensor
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.state import STATE, OptimizerDocument, StateDocument
from lightning_hanayo.errors import HanayoError, UnsupportedError, listed

_VERSION = "pytorch-lightning_version"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""of normalization layers: buffers, which no optimizer has"""
_WITH_WEIGHTS = ("epoch", "global_step", "loops", "hyper_parameters", "hparams_name", "hparams_type")
"""what Lightning saves with `save_weights_only=True`, too"""


def import_checkpoint(path: str, target: str, *, module: str = "", weights_only: bool = False) -> None:
    """Make a checkpoint folder. Call it in one process; it needs memory for one tensor.

    Args:
        path: a plain file of Lightning, or a folder of safetensors as `save_pretrained` of transformers writes it.
        target: where nothing is yet, local or an fsspec URL.
        module: for a folder, the name of its model in your LightningModule, such as "net".
        weights_only: of a file, leave out states of optimizers, loops, callbacks and all else.

    Example:
        >>> import_checkpoint("gpt2", "gpt2.ckpt", module="net")
        >>> Trainer(strategy="hanayo", devices=4).validate(module, ckpt_path="gpt2.ckpt")

    Raises:
        HanayoError: the target exists, or `path` can't be read.
        UnsupportedError: nobody can tell which state of an optimizer is whose, or a value can't be stored.
    """
    check_free(target)
    part = _of_folder(Path(path), module) if Path(path).is_dir() else _of_file(path, weights_only)
    Saver(SavingRanks()).save(target, part)


def _of_file(path: str, weights_only: bool) -> RankPart:
    content = {_VERSION: version("lightning"), **open_checkpoint(path).content}
    if weights_only:
        content = {key: content[key] for key in ("state_dict", _VERSION, *_WITH_WEIGHTS) if key in content}
    state, states = content.pop("state_dict"), content.pop("optimizer_states", None)
    tied = tied_in_memory(state)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in tied}
    parts = [TensorPart.whole(f"model/{name}", value, "model") for name, value in tensors.items()]
    optimizers = None
    if states is not None:
        optimizers = [_optimizer(n, saved, _names(path, saved, tensors), parts) for n, saved in enumerate(states)]
    run_parts, run_texts = as_in_a_folder(content)
    document = StateDocument(
        checkpoint=content,
        names=list(state),
        tied=tied,
        values={name: value for name, value in state.items() if not isinstance(value, Tensor)},
        versions=dict(getattr(state, "_metadata", {})),
        optimizers=optimizers,
    )
    facts = {"step": content.get("global_step", 0), "epoch": content.get("epoch", 0), "tied": tied}
    facts["num_parameters"] = sum(one.numel() for one in tensors.values())
    return _rank_part(document, [*parts, *run_parts], facts, run_texts)


def _names(path: str, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of an optimizer's parameters, in its order, which is the module's: by number and shape."""
    numbers = parameters_in(saved)
    candidates = [name for name in tensors if name.rpartition(".")[2] not in _STATISTICS]
    shapes = {number: [one.shape for one in values.values() if isinstance(one, Tensor) and one.ndim]
              for number, values in saved["state"].items()}  # fmt: skip
    fits = len(saved["param_groups"]) == 1 and len(numbers) == len(candidates) and all(
        tensors[name].shape in shapes.get(number, [tensors[name].shape]) or not shapes[number]
        for number, name in zip(numbers, candidates, strict=True)
    )  # fmt: skip
    if not fits:
        raise UnsupportedError(
            f"{path} numbers the parameters of an optimizer, and their names can't be told: it has "
            f"{len(saved['param_groups'])} groups of {len(numbers)} parameters, the module {len(candidates)} tensors. "
            f"Import the weights alone (--weights-only); or resume from the file itself, which any layout reads."
        )
    return candidates


def _optimizer(index: int, saved: Mapping[str, Any], names: list[str], parts: list[TensorPart]) -> OptimizerDocument:
    """What the document says of an optimizer; the tensors of its states are added to the parts."""
    by_number = dict(zip(parameters_in(saved), names, strict=True))
    values: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                parts.append(TensorPart.whole(f"optimizer/{index}/{by_number[number]}/{key}", value, "optimizer"))
            else:
                values.setdefault(by_number[number], {})[key] = value
    groups = with_keys(saved, by_number)["param_groups"]
    without = [name for number, name in by_number.items() if saved["state"] and number not in saved["state"]]
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return OptimizerDocument("", groups, values, without, rest)


def _of_folder(path: Path, module: str) -> RankPart:
    folder = SafetensorsFolder(path)
    config, class_name = read_config(str(path))
    model = make_model(config, class_name)
    match = match_names(model, folder.tensors, path)
    values = dict(named_values(model))
    sources = {values[joined(match.prefix, name)]: source for name, source in match.sources.items()}
    names = model.state_dict()
    missing = [name for name in names if values[name] not in sources]
    if missing:
        raise HanayoError(f"{path} has no values for {listed(missing)} of {class_name}")
    first: dict[Tensor, str] = {}
    tied = {name: one for name in names if (one := first.setdefault(values[name], name)) != name}
    stored = {name: _value(folder, values[name], sources[values[name]]) for name in names if name not in tied}
    tied = {joined(module, name): joined(module, one) for name, one in tied.items()}
    document = StateDocument(
        checkpoint={"epoch": 0, "global_step": 0, _VERSION: version("lightning")},
        names=[joined(module, name) for name in names],
        tied=tied,
    )
    parts = [TensorPart.whole(f"model/{joined(module, name)}", value, "model") for name, value in stored.items()]
    about = {"num_parameters": sum(one.numel() for one in model.parameters()), "tied": tied}
    about["huggingface"] = [{"prefix": module, "class": class_name, "config": dict(config)}]
    return _rank_part(document, parts, about)


def _value(folder: SafetensorsFolder, tensor: Tensor, source: str | Merge) -> StoredTensor:
    """A tensor of the model, which is read, or made of others, when it is written."""

    def read(_: object) -> Tensor:
        mapped = dict(folder.mapped(names_of(source)))
        return mapped[source] if isinstance(source, str) else source.of(mapped)

    if isinstance(source, str):
        stored = folder.tensors[source]
        if stored.shape != tensor.shape or stored.dtype is None:
            raise HanayoError(
                f"{folder.path}: {source} is {stored.shape} in {stored.dtype_name}, and the model of its config.json "
                f"has {tuple(tensor.shape)} in {tensor.dtype}"
            )
        return StoredTensor.of(tensor.shape, stored.dtype, read)
    [first, *_] = names_of(source)
    return StoredTensor.of(tensor.shape, folder.tensors[first].dtype or tensor.dtype, read)


def _rank_part(
    document: StateDocument, parts: list[TensorPart], about: Mapping[str, Any], texts: Mapping[str, Any] | None = None
) -> RankPart:
    text, tensors = document.encode()
    states = [TensorPart.whole(f"{STATE}/{number}", tensor, "state") for number, tensor in enumerate(tensors)]
    versions = {name.replace("-", "_"): version(name) for name in ("lightning-hanayo", "torch")}
    facts = {"step": 0, "epoch": 0, "layout": {}, "versions": versions, "huggingface": [], **about}
    return RankPart([*parts, *states], {STATE: text, **(texts or {})}, facts)
