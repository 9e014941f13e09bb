"""What a checkpoint has for a model is kept, with the versions of its modules, until the model is cut."""

from typing import Any

import torch
from torch import nn

from lightning_hanayo.dist_checkpointing.load_state import Source
from lightning_hanayo.strategy.checkpoints.load import KeptValues
from tests.harness.training import Layout, make_strategy


class SecondVersion(nn.Linear):
    """Doubles the values of its first version."""

    _version = 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *arguments: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *arguments)


def test_modules_hear_which_version_was_saved() -> None:
    module, options = nn.Sequential(SecondVersion(2, 2, bias=False)), make_strategy(Layout()).options
    state, weight = module.state_dict(), module[0].weight.detach().clone()
    for saved, expected in ((state, weight), (dict(state), 2 * weight)):  # a plain dictionary has no versions
        KeptValues(module, saved, Source("last.ckpt"), options, strict=True).put_in(module, None)
        assert torch.equal(module[0].weight, expected)


class WithoutArguments(nn.Linear):
    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


def test_what_user_code_has_loaded_since_is_kept_whatever_state_dict_takes() -> None:
    module, options = WithoutArguments(2, 2), make_strategy(Layout()).options
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    kept = KeptValues(module, saved, Source("last.ckpt"), options, strict=True)
    with torch.no_grad():
        module.bias.fill_(3)
    kept.drop_replaced(module)
    kept.put_in(module, None)
    assert torch.equal(module.bias, torch.full((2,), 3.0))


class Cached(nn.Linear):
    """Replaces a buffer in its forward, as rotary embeddings do: in evaluations by one made in inference mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("cache", torch.ones(2), persistent=False)
        return super().forward(x)


def test_a_buffer_may_have_been_made_in_inference_mode() -> None:
    module, options = Cached(2, 2), make_strategy(Layout()).options
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.inference_mode():
        module(torch.ones(2))
    kept = KeptValues(module, saved, Source("last.ckpt"), options, strict=True)
    with torch.no_grad():
        module.weight.zero_()
    kept.drop_replaced(module)
    kept.put_in(module, None)
    assert not module.weight.any() and torch.equal(module.bias, saved["bias"])
