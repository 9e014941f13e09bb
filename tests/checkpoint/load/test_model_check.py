"""What a checkpoint has is compared with what a model needs, and one table says what differs."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.load_state import (
    Entry,
    Source,
    check_fit,
    entries,
)
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from lightning_hanayo.errors import CheckpointError

SOURCE = Source("last.ckpt", "GPT")


class MLP(nn.Sequential):
    pass


def model(width: int = 3, depth: int = 4) -> nn.Module:
    return MLP(*(nn.Linear(width, width) for _ in range(depth)))


def check(
    module: nn.Module,
    found: dict[str, Any],
    *,
    strict: bool = True,
    accept: Collection[str] = (),
    masters: bool = False,
) -> list[str]:
    needed = entries(module, None, has_masters=masters)
    return check_fit(needed, found, SOURCE, module, strict=strict, accept=accept)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as raised:
        check(*arguments, **options)
    return str(raised.value)


def test_the_same_model_fits() -> None:
    assert check(model(), model().state_dict()) == []


def test_buffers_of_whole_numbers_are_not_taken_for_quantized_weights() -> None:
    norm = nn.BatchNorm1d(2)
    stored = {name: StoredTensor.around(value) for name, value in norm.state_dict().items()}
    assert check(norm, stored) == []
    assert "num_batches_tracked  [1] int32   [] int64\n" in refusal(
        norm, stored | {"num_batches_tracked": torch.zeros(1, dtype=torch.int32)}
    )


def test_one_table_names_all_that_differs() -> None:
    state: dict[str, Tensor] = dict(model().state_dict())
    del state["1.bias"]
    state |= {"extra": torch.zeros(2), "2.weight": torch.zeros(3, 4), "3.weight": torch.zeros(3, 3, dtype=torch.half)}
    assert refusal(model(), state) == (
        "last.ckpt doesn't fit this MLP:\n"
        "  name      checkpoint      model\n"
        "  2.weight  [3, 4] float32  [3, 3] float32\n"
        "  3.weight  [3, 3] float16  [3, 3] float32\n"
        "  1.bias    missing         [3] float32\n"
        "  extra     [2] float32     not in the model\n"
        "Build the model with the sizes that it was saved with. Give the Trainer the precision that it had, or "
        "convert: HanayoStrategy(load_anyway=('dtype',)). Set self.strict_loading = False in the LightningModule to "
        "keep the model's own values of what is missing, and leave out what is not in the model. No value was changed."
    )


def test_another_model_is_called_so_and_the_table_stays_short() -> None:
    text = refusal(model(depth=20), {f"net.{name}": value for name, value in model(depth=20).state_dict().items()})
    assert text.startswith("last.ckpt was saved of a GPT, not of this MLP: they have 0 names in common.\n")
    assert len(text.splitlines()) == 14 and "  ... and 70 more\n" in text


def test_what_is_accepted_is_said() -> None:
    state: dict[str, Tensor] = {"extra": torch.zeros(2), **model().half().state_dict()}
    del state["0.bias"]
    assert check(model(), state, strict=False, accept=("dtype",)) == [
        "last.ckpt: converted to the model's dtype: 0.weight, 1.weight, 1.bias, 2.weight, 2.bias and 2 more",
        "last.ckpt: not in the checkpoint, keeps the model's values: 0.bias",
        "last.ckpt: not in the model, left out: extra",
    ]


def test_shapes_are_never_accepted() -> None:
    assert "[4] float32" in refusal(model(), {**model().state_dict(), "0.bias": torch.zeros(4)}, strict=False)
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    assert check(scalar, {"scale": torch.ones(1)}) == []  # as torch does


def test_master_weights_are_saved_in_fp32() -> None:
    low = model().bfloat16()
    assert check(low, model().state_dict(), masters=True) == [] == check(low, low.state_dict(), masters=True)
    assert "float32" in refusal(low, model().state_dict())
    assert "float64" in refusal(low, model().double().state_dict(), masters=True)


def test_a_quantized_weight_and_a_plain_one_are_told_apart() -> None:
    needed = {"w": Entry((2,), torch.float32, is_packed=True)}
    with pytest.raises(CheckpointError, match=r"\[2\] float32 +\[2\] float32 quantized\nQuantize the model"):
        check_fit(needed, {"w": torch.zeros(2)}, SOURCE, MLP(), strict=True, accept=())


class OlderNames(nn.Linear):
    """Has called its weight a kernel before."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state, prefix, *args)


def test_modules_that_translate_names_are_left_to_do_so() -> None:
    module = nn.ModuleDict({"old": OlderNames(2, 2), "new": nn.Linear(2, 2)})
    state = module.state_dict()
    state["old.kernel"] = state.pop("old.weight")
    assert check(module, state) == []
    state["new.kernel"] = state.pop("new.weight")
    assert "new.kernel" in refusal(module, state) and "old" not in refusal(module, state)
