"""Gives the weights of a checkpoint the names under which `from_pretrained` of transformers finds them.

checkpoint                               folder
net.transformer.wte.weight               transformer.wte.weight      without the module's name in the LightningModule
net.lm_head.weight                                                   tied to it, so not stored
net.model.layers.0.experts.gate_up_proj  model.layers.0.experts.0.w1.weight, ...     as the model's own rules split it

transformers' rules are asked with tensors on the meta device; then each tensor is converted when it is written.

Finds which tensor of a folder belongs to which parameter or buffer of a model.

folder                   LightningModule
wte.weight               net.transformer.wte.weight        names agree from some module on: here net.transformer
h.0.ln_1.weight          net.transformer.h.0.ln_1.weight
                         net.lm_head.weight                the same parameter as wte.weight, or missing in the folder

In a model of transformers its own rules count: names of older versions are renamed, and a folder may hold the whole
model or its base.

Reads tensors out of a folder of safetensors files, in Hugging Face's layout.

folder/model.safetensors       or       folder/model.safetensors.index.json      {"weight_map": {name: file}}
                                        folder/model-00001-of-00002.safetensors
                                        folder/model-00002-of-00002.safetensors

Files are mapped into memory: only what is copied out of a tensor is read, in pages of the operating system.
"""

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder, header_bytes
from lightning_hanayo.dist_checkpointing.format import ImpossibleError, Manifest, StoredPart, WholeTensor, read_header
from lightning_hanayo.dist_checkpointing.load_state import tensors_of
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from lightning_hanayo.errors import HanayoError, UnsupportedError, listed
from lightning_hanayo.partition.ownership import Placeholder


def make_model(config: Mapping[str, Any], class_name: str) -> Any:
    """Returns a model of transformers on the meta device.

    Raises:
        UnsupportedError: transformers isn't installed, or has no such class.
    """
    library = _transformers()
    found = getattr(library, class_name, None)
    if not (isinstance(found, type) and issubclass(found, library.PreTrainedModel)):
        raise UnsupportedError(
            f"transformers {library.__version__} has no model {class_name!r}. For a model of another package, export "
            f"its weights with --to safetensors, and load them into it."
        )
    model_class: Any = found
    try:
        made = model_class.config_class.from_dict(dict(config))
        with torch.device("meta"):
            return model_class(made)
    except Exception as error:  # each class of configurations has errors of its own
        raise HanayoError(f"{class_name} can't be built of its configuration: {error}") from error


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
    _check(state, start, model)
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in wanted.items() if name not in ignored}
    untie = import_module("transformers.modeling_utils").remove_tied_weights_from_state_dict
    stored = untie(kept, model)
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


def _prefix(wanted: Mapping[str, Tensor], state: Mapping[str, Any], model: Any) -> str:
    longest = max(wanted, key=len)
    fitting = [name.removesuffix(longest) for name in state if name == longest or name.endswith(f".{longest}")]
    whole = [start for start in fitting if all(start + name in state for name in wanted)] or fitting
    if len(whole) == 1:
        return whole[0]
    found = f"it is at {' and '.join(repr(one.rstrip('.')) for one in whole)}" if whole else f"there is no {longest}"
    raise HanayoError(f"the checkpoint doesn't have {type(model).__name__} at one place: {found}. Say where: --module")


def _check(state: Mapping[str, Any], start: str, model: Any) -> None:
    """Check that the names below `start` have all tensors of the model, which is on the meta device."""
    found = {name: one for name in model.state_dict() if isinstance(one := state.get(start + name), Tensor)}
    try:
        model.load_state_dict({n: torch.empty(one.shape, dtype=one.dtype, device="meta") for n, one in found.items()})
    except RuntimeError as error:
        raise HanayoError(
            f"the checkpoint doesn't have a {type(model).__name__} of this configuration: "
            f"{' '.join(str(error).split())[:500]}. Give the one that fits, --config; or if the model was changed "
            f"(adapters, quantization), export its weights with --to safetensors."
        ) from None


def _check_tied(name: str, stored: Mapping[str, Tensor], state: Mapping[str, Any], start: str, model: Any) -> None:
    """A name that isn't stored gets the value of the one that it is tied to, so both must have one value."""
    tensors = tensors_of(model)
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
    revert = import_module("transformers.core_model_loading").revert_weight_conversion
    on_meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in own.items()}
    sources_of = {id(tensor): name for name, tensor in on_meta.items()}  # what is only renamed is the same object
    on_disk = revert(model, dict(on_meta))
    renamed = {target: sources_of[id(tensor)] for target, tensor in on_disk.items() if id(tensor) in sources_of}
    result = {target: own[name] for target, name in renamed.items()}
    rest = {name: tensor for name, tensor in on_meta.items() if name not in renamed.values()}
    groups: dict[str, list[str]] = defaultdict(list)  # those of a layer together
    for name in rest:
        groups[re.match(r"^(.*?\.\d+)\.|", name)[0]].append(name)  # type: ignore[index]
    for names in groups.values():
        with suppress(RuntimeError, ValueError, KeyError, IndexError, AttributeError):  # they need others, too
            targets = revert(model, {name: rest[name] for name in names})
            result |= _converted(model, revert, {name: own[name] for name in names}, targets)
    made, expected = ({name: (one.shape, one.dtype) for name, one in found.items()} for found in (result, on_disk))
    if made == expected:
        return result
    raise UnsupportedError(
        f"transformers converts {listed(rest)} of {type(model).__name__} together, so they can't be written one after "
        f"another. Load the checkpoint into the model, and save it there: --to file, then model.save_pretrained."
    )


def _converted(
    model: Any, revert: Callable[..., Any], sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What comes of the sources, which are read for the first of them, and kept until the last one was read."""
    kept: dict[str, Tensor] = {}

    def read(name: str, region: object) -> Tensor:
        assert region is None, "files are written whole"
        if name not in kept:
            read_now = {n: one.read() if isinstance(one, StoredTensor) else one for n, one in sources.items()}
            kept.update(revert(model, read_now))
        return kept.pop(name).clone()

    return {name: StoredTensor.of(one.shape, one.dtype, partial(read, name)) for name, one in targets.items()}


_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""buffers that older versions of transformers saved, and that models now compute"""


@dataclass(frozen=True)
class Merge:
    """Tensors of a folder that transformers makes one of while it loads them, such as the experts of Mixtral."""

    target: str
    """the name in the model of transformers"""
    sources: Mapping[str, list[str]]
    """names in the folder, by the converter's patterns"""
    converter: Any
    model: Any

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The one tensor, of the folder's tensors by name. It is in memory, or on meta if they are.

        Raises:
            HanayoError: they don't fit together.
        """
        converter = deepcopy(self.converter)
        converter.collected_tensors = {key: [tensors[name] for name in names] for key, names in self.sources.items()}
        try:
            (merged,) = converter.convert(self.target, model=self.model, config=self.model.config).values()
        except (RuntimeError, ValueError, KeyError) as error:
            raise HanayoError(
                f"init_from: transformers can't merge {listed(names_of(self))} to {self.target}: {error}. Some are "
                f"missing, or of another size."
            ) from error
        tensor: Tensor = merged[0] if isinstance(merged, list) else merged
        return tensor


def names_of(source: str | Merge) -> list[str]:
    """The folder's tensors that a value is made of."""
    return [source] if isinstance(source, str) else [name for names in source.sources.values() for name in names]


@dataclass(frozen=True)
class NameMatch:
    """A module that a folder fits: names in the module, and those of their tensors in the folder."""

    prefix: str
    """the module's qualified name; "" is the model itself"""
    sources: Mapping[str, "str | Merge"]
    split: tuple[str, ...] = ()
    """tensors of the folder that transformers would split for this module"""
    ignored: Collection[str] = field(default=_COMPUTED, compare=False)
    """patterns of names that may be left over in the folder"""

    def unused(self, names: Collection[str]) -> list[str]:
        """Those of the folder's names that belong to nothing in the module."""
        used = {name for source in self.sources.values() for name in names_of(source)}
        ignored = re.compile("|".join(self.ignored))
        return [name for name in names if name not in used and not ignored.search(name)]


def named_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All names of parameters and saved buffers, also of those that modules share; without placeholders."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            is_saved = tensor is not None and name not in module._non_persistent_buffers_set
            if is_saved and not isinstance(tensor, Placeholder):
                yield joined(prefix, name), tensor


def joined(prefix: str, name: str) -> str:
    """The qualified name of what is called `name` in the module `prefix`; either may be empty."""
    return f"{prefix}.{name}".strip(".")


def match_names(model: nn.Module, names: Collection[str], folder: object) -> NameMatch:
    """Find the module of `model` that most of the folder's `names` belong to.

    Raises:
        HanayoError: there is none, or there are several.
        UnsupportedError: the module has parts of the folder's tensors as tensors of their own.
    """
    candidates = [
        *(match for prefix, one in transformers_models(model) for match in _transformers_match(prefix, one, names)),
        *_suffix_matches(model, names),
    ]
    most = max((len(one.sources) + len(one.split) for one in candidates), default=0)
    if not most:
        raise HanayoError(
            f"init_from: no tensor of {folder} ({listed(names)}) has the name of one in {type(model).__name__} "
            f"({listed(name for name, _ in named_values(model))}). Build the model of the folder's config.json."
        )
    best = [one for one in candidates if len(one.sources) + len(one.split) == most]
    first = best[0]  # transformers' own rules before equal names
    values = dict(named_values(model))

    def given(match: NameMatch) -> dict[Tensor, str | Merge]:
        return {values[joined(match.prefix, name)]: source for name, source in match.sources.items()}

    # two modules that share their parameters fit alike
    others = [one.prefix for one in best if one.prefix != first.prefix
              and (one.split or first.split or given(one) != given(first))]  # fmt: skip
    if others:
        fitting = ", ".join([first.prefix, *others])
        raise HanayoError(
            f"init_from: {folder} fits several modules of {type(model).__name__} equally well: {fitting}. Say which: "
            f"HanayoStrategy(init_from={{{first.prefix!r}: {str(folder)!r}}})."
        )
    if first.split:
        raise UnsupportedError(
            f"init_from: transformers splits {listed(first.split)} of {folder}, so a rank can't read its part. Save "
            f"the loaded model once: safetensors.torch.save_model(model, new_folder + '/model.safetensors')."
        )
    return first


def _suffix_matches(model: nn.Module, names: Collection[str]) -> list[NameMatch]:
    """Each module under which names of the folder are found as they are."""
    wanted = set(names)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, _ in named_values(model):
        parts = name.split(".")
        for i in range(len(parts)):
            rest = ".".join(parts[i:])
            if rest in wanted:
                found[".".join(parts[:i])][rest] = rest
    return [NameMatch(prefix, sources) for prefix, sources in found.items()]


def transformers_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The models of transformers in a model that aren't inside another one, by name."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    outer: list[str] = []
    for prefix, module in model.named_modules() if library is not None else ():  # else none of its models exists
        if isinstance(module, library.PreTrainedModel) and not any(f"{prefix}.".startswith(one) for one in outer):
            outer.append(f"{prefix}.".lstrip("."))
            yield prefix, module


def _transformers_match(prefix: str, module: Any, names: Collection[str]) -> Iterator[NameMatch]:
    mapping, loading = map(import_module, ("transformers.conversion_mapping", "transformers.core_model_loading"))
    transforms = mapping.get_model_conversion_mapping(module)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    own = dict(named_values(module))
    sources: dict[str, str] = {}
    merges: dict[str, Merge] = {}
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    split = []
    for name in sorted(names, key=loading.dot_natural_key):
        rename = loading.rename_source_key
        target, converter = rename(name, renamings, converters, module.base_model_prefix, own)
        if target not in own and name in own:
            target, converter = name, None
        if target not in own:
            continue
        if converter is not None and len(by_pattern[converter].target_patterns) > 1:
            split.append(name)
        elif converter is not None:
            merge = merges.setdefault(target, Merge(target, defaultdict(list), by_pattern[converter], module))
            merge.sources[converter].append(name)
        elif sources.setdefault(target, name) != name:
            raise HanayoError(f"init_from: the folder has {sources[target]} and {name}, which are both {target}")
    for target in sources.keys() & merges.keys():
        raise HanayoError(f"init_from: the folder has {sources[target]}, and the tensors that are merged to it")
    ignored = (*_COMPUTED, *(module._keys_to_ignore_on_load_unexpected or ()))
    yield NameMatch(prefix, {**sources, **merges}, tuple(split), ignored)


_FILE = "model.safetensors"
_INDEX = f"{_FILE}.index.json"
_SAMPLE = 8
"""values of each tensor that a signature takes"""


class SafetensorsFolder(CheckpointFolder):
    """A folder of safetensors, read as a checkpoint whose manifest is made of the headers of its files.

    Example:
        >>> folder = SafetensorsFolder(Path("gpt2"))
        >>> rows = folder.read("wte.weight", Region.whole((100, 768)))  # reads 100 rows

    Raises:
        HanayoError: there is no such folder, it has no safetensors, or a file is missing, damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._storage, self._headers = str(path), Storage(path), {}
        tensors: dict[str, WholeTensor] = {}
        for file, names in _expected(path).items():
            with _readable(path / file):
                num_bytes = os.path.getsize(path / file)  # also of a link, as in the cache of huggingface_hub
                header = self._headers[file] = read_header(header_bytes(self._storage, file, num_bytes), num_bytes)
            missing = [name for name in names if name not in header]
            if missing:
                raise HanayoError(
                    f"{path / file} has no tensor {missing[0]}, which {_INDEX} expects there. Download it again."
                )
            for name in names or header:
                entry = header[name]
                part = StoredPart(file, name, Region.whole(entry.shape), "")
                tensors[name] = WholeTensor(entry.shape, entry.dtype, (part,))
        self.manifest = Manifest("", 0, 0, "", {}, {}, tensors, {})

    @cached_property
    def signature(self) -> str:
        """The same on all ranks that see the same tensors: of their names, shapes and dtypes, and first few values.

        So it differs between two states of one training, and reads one page for each tensor.
        """
        found = []
        for name, one in sorted(self.manifest.tensors.items()):
            first = [min(1, size) for size in one.shape[:-1]] + [min(_SAMPLE, size) for size in one.shape[-1:]]
            found.append((name, one.shape, one.dtype, self.read(name, Region.whole(first)).tolist()))
        return sha256(repr(found).encode()).hexdigest()

    def verify(self, rank: int = 0, num_ranks: int = 1, *, kind: str = "") -> None:
        """Do nothing: the folder has no hashes."""


def _expected(path: Path) -> Mapping[str, list[str]]:
    """The names that each file must have; none: all that it has."""
    if (path / _INDEX).is_file():
        expected = defaultdict(list)
        with _readable(path / _INDEX):
            for name, file in json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].items():
                expected[file].append(name)
        return expected
    if not (path / _FILE).is_file():
        _refuse(path)
    return {_FILE: []}


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (ImpossibleError, OSError, KeyError, json.JSONDecodeError) as error:
        raise HanayoError(
            f"{file} can't be read: {error}. It is missing, damaged or truncated; download or save it again."
        ) from error


def _refuse(path: Path) -> None:
    if not path.is_dir():
        raise HanayoError(
            f"init_from: there is no folder {path}. Give one with {_FILE}, on a file system that all ranks see. To get "
            f"it from Hugging Face: huggingface_hub.snapshot_download(name)."
        )
    found = ", ".join(sorted(file.name for file in path.iterdir())) or "no files"
    raise HanayoError(
        f"init_from: {path} has neither {_FILE} nor {_INDEX}, but {found}. Save a model there, which may have read "
        f"another format: model.save_pretrained(folder), or safetensors.torch.save_model(model, folder + '/{_FILE}')."
    )
