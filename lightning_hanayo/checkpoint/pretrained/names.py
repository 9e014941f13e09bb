"""Finds which tensor of a folder belongs to which parameter or buffer of a model.

folder                   LightningModule
wte.weight               net.transformer.wte.weight        names agree from some module on: here net.transformer
h.0.ln_1.weight          net.transformer.h.0.ln_1.weight
                         net.lm_head.weight                the same parameter as wte.weight, or missing in the folder

In a model of transformers its own rules count: names of older versions are renamed, and a folder may hold the whole
model or its base.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, UnsupportedError, listed
from lightning_hanayo.partition.ownership import Placeholder

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
    candidates = [*_transformers_matches(model, names), *_suffix_matches(model, names)]
    most = max((len(one.sources) + len(one.split) for one in candidates), default=0)
    if not most:
        raise HanayoError(
            f"init_from: no tensor of {folder} has the name of one in {type(model).__name__}: {listed(names)} are in "
            f"the folder, {listed(name for name, _ in named_values(model))} in the model. Build the model "
            f"of the folder's config.json."
        )
    best = [one for one in candidates if len(one.sources) + len(one.split) == most]
    first = best[0]  # transformers' own rules before equal names
    others = [one.prefix for one in best if one.prefix != first.prefix and not _same_values(model, one, first)]
    if others:
        fitting = ", ".join([first.prefix, *others])
        raise HanayoError(
            f"init_from: {folder} fits several modules of {type(model).__name__} equally well: {fitting}. Say which: "
            f"HanayoStrategy(init_from={{{first.prefix!r}: {str(folder)!r}}})."
        )
    if first.split:
        raise UnsupportedError(
            f"init_from: transformers splits {listed(first.split)} of {folder} while it loads them, so a "
            f"rank can't read its part alone. Save the model once as it is in memory: safetensors.torch.save_model("
            f"{type(model.get_submodule(first.prefix)).__name__}.from_pretrained(folder), new_folder + "
            f"'/model.safetensors')."
        )
    return first


def _same_values(model: nn.Module, one: NameMatch, other: NameMatch) -> bool:
    """Whether both give the same tensors of the model the same values."""
    values = dict(named_values(model))

    def given(match: NameMatch) -> dict[Tensor, str | Merge]:
        return {values[joined(match.prefix, name)]: source for name, source in match.sources.items()}

    return not one.split and not other.split and given(one) == given(other)


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


def _transformers_matches(model: nn.Module, names: Collection[str]) -> Iterator[NameMatch]:
    """The models of transformers that aren't inside another one."""
    library = sys.modules.get("transformers.modeling_utils")  # else none of its models exists
    if library is None:
        return
    outer: list[str] = []
    for prefix, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel) and not any(f"{prefix}.".startswith(one) for one in outer):
            outer.append(f"{prefix}.".lstrip("."))
            yield from _transformers_match(prefix, module, names)


def _transformers_match(prefix: str, module: Any, names: Collection[str]) -> Iterator[NameMatch]:
    try:
        mapping, loading = map(import_module, ("transformers.conversion_mapping", "transformers.core_model_loading"))
    except ModuleNotFoundError:  # before version 5, where names that agree are all that is understood
        return
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
