"""Models of transformers that take their values from a folder equal those that `from_pretrained` makes of it.

Each is built on meta, as in `configure_model`. All parameters and buffers are compared, those that no file has as well.
Mixtral's file has each expert by itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.partition.deferred_init import DeferredInit
from lightning_hanayo.strategy.setup.values import fill_initial_values, load_pretrained, plan_pretrained
from tests.harness.pretrained_models import MODELS, trained
from tests.harness.thorough import covered


def built_and_loaded(like: Any, folder: Path) -> nn.Module:
    holder = nn.Module()
    with torch.device("meta"):
        holder.net = type(like)(like.config)
    plans = plan_pretrained(holder, "net", {"": folder})
    deferred = DeferredInit(holder, 0)
    load_pretrained(plans, holder, list(holder.modules()), deferred, torch.device("cpu"), None)
    fill_initial_values(deferred, list(holder.modules()), torch.device("cpu"), None)
    return holder.net


def assert_equal_models(actual: nn.Module, expected: nn.Module) -> None:
    named: Callable[[nn.Module], Any]
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        values, wanted = dict(named(actual)), dict(named(expected))
        assert values.keys() == wanted.keys()
        assert [name for name, value in wanted.items() if not torch.equal(values[name], value)] == []


@pytest.mark.parametrize("name", covered(MODELS, by=["BertForMaskedLM", "MixtralForCausalLM"]))
def test_a_model_equals_from_pretrained(tmp_path: Path, name: str) -> None:
    model = trained(name, MODELS[name])
    model.save_pretrained(tmp_path)
    assert_equal_models(built_and_loaded(model, tmp_path), type(model).from_pretrained(tmp_path))
