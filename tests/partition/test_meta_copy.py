"""A copy of a model has its modules, shapes and ties, and no values.

model    embedding.weight [5, 4] = head.weight      up.weight, quantized [6, 4]
copy     embedding.weight [5, 4] = head.weight      up.weight, plain     [6, 4]      all on the meta device
"""

import torch
from torch import Tensor, nn

from lightning_hanayo.partition.deferred_init import MetaCopy
from tests.harness.quantized import Quantized


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.up = nn.Linear(4, 6, bias=False)
        self.up.weight = nn.Parameter(Quantized.of(self.up.weight), requires_grad=False)
        self.up.weight.codebook = torch.ones(3)  # type: ignore[attr-defined]


def test_a_copy_has_shapes_ties_and_attributes_of_the_original_and_no_values() -> None:
    copy = MetaCopy(Model()).modules[""]
    assert copy.head.weight is copy.embedding.weight  # type: ignore[union-attr]
    assert {name: tuple(p.shape) for name, p in copy.named_parameters()} == {
        "embedding.weight": (5, 4), "up.weight": (6, 4),
    }  # fmt: skip
    weight = copy.up.weight  # type: ignore[union-attr]
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad and weight.codebook.shape == (3,)  # type: ignore[attr-defined]
    tensors = [*copy.parameters(), *(one for one in vars(weight).values() if isinstance(one, Tensor))]
    assert all(one.is_meta for one in tensors)


def test_a_buffer_may_have_been_made_in_inference_mode() -> None:
    model = nn.BatchNorm1d(4)
    with torch.inference_mode():
        model.running_mean = torch.ones(4)
    copy = MetaCopy(model)
    assert model.running_mean is not None
    assert copy.get(model.running_mean).is_meta and copy.num_writes[model.running_mean] == 0
