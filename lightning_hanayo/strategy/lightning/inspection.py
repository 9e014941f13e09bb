"""Lets Lightning's model summaries show the whole model where this rank holds a part of it.

set-up      the module, still whole      ->  a copy with all tensors on the meta device
summary     `example_input_array` runs through the copy: sizes and FLOPs, without values or devices
"""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary

from lightning_hanayo.partition.meta_copy import MetaCopy

_WHOLE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""weak references to copies of modules from before they were cut: a copy leads to the Trainer, and so to its module"""


def _whole_of(module: Any) -> Any:
    found = _WHOLE.get(module)
    return None if found is None else found()


def keep_whole(module: "pl.LightningModule", *, is_cut: bool, cuts: bool) -> object:
    """From now on, summaries of `module` show it as it is now, whole. Called before a run cuts or converts it.

    `is_cut`: an earlier run has; `cuts`: this run will. If it won't, summaries show the module itself.

    Returns:
        What summaries need for as long as they are to do so.
    """
    if not cuts:
        _WHOLE.pop(module, None)
    elif _whole_of(module) is None or not is_cut:  # a copy of a module that was cut has the whole shapes of a pipeline
        whole = _on_meta(module)
        _WHOLE[module] = ref(whole)
        if not hasattr(ModelSummary.summarize, "__wrapped__"):
            ModelSummary.summarize = _summarizing_whole(ModelSummary.summarize)  # type: ignore[assignment,method-assign]
    return _whole_of(module)


def whole_on_meta(module: "pl.LightningModule") -> Any:
    """The whole module with all tensors on the meta device; of one that is cut, the copy that summaries show."""
    whole = _whole_of(module)
    if whole is None:
        return _on_meta(module)
    _follow(whole, module)
    return whole


def _on_meta(module: "pl.LightningModule") -> Any:
    whole: Any = MetaCopy(module).modules[""]
    vars(whole)["_device"] = torch.device("meta")  # where it expects its batches
    return whole


def _summarizing_whole(plain: Callable[[ModelSummary], Any]) -> Callable[[ModelSummary], Any]:
    """`ModelSummary.summarize`, which turns to the whole copy of a module that was cut."""

    @wraps(plain)
    def summarize(summary: ModelSummary) -> Any:
        module = summary._model
        whole = _whole_of(module)
        if whole is None:
            return plain(summary)
        summary._model = whole
        _follow(whole, module)
        try:
            with torch.device("meta"):
                return plain(summary)
        except Exception as error:
            _follow(whole, module)  # the failed forward has left it in eval mode
            rank_zero_warn(
                f"The model summary shows no sizes and FLOPs: forward depends on more than the shapes of "
                f"example_input_array ({error!r}), and no rank holds the whole model to run it."
            )
            vars(summary)["_forward_example_input"] = lambda: None
            return plain(summary)

    return summarize


def _follow(whole: "pl.LightningModule", module: "pl.LightningModule") -> None:
    """Take over what may have changed since the copy was made: modes, what is trained, and the Trainer."""
    vars(whole)["_trainer"] = vars(module)["_trainer"]
    modules, parameters = dict(whole.named_modules()), dict(whole.named_parameters())
    for name, part in module.named_modules():
        if name in modules:
            modules[name].training = part.training
    for name, parameter in module.named_parameters():
        if name in parameters:
            parameters[name].requires_grad_(parameter.requires_grad)
