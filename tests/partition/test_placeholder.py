"""Placeholders stand in for the parameters of other ranks."""

import torch
from torch import nn

from lightning_hanayo.partition.placeholder import replace_with_placeholders


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(6))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(3))


def test_placeholders_have_shape_dtype_ties_and_attributes_of_the_originals() -> None:
    model = Model()
    model.blocks[2][0].weight.requires_grad_(False)
    model.blocks[2][0].bias.mark = "no decay"
    before = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
    replaced = {model.embedding.weight, *model.blocks[2].parameters()}
    replace_with_placeholders(
        model, {p for p in model.parameters() if p not in replaced}, buffers_of=model.blocks[2].modules()
    )
    after = dict(model.named_parameters(remove_duplicate=False))
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in after.items()} == before
    assert [name for name, p in after.items() if p.is_meta] == [
        "embedding.weight", "blocks.2.0.weight", "blocks.2.0.bias", "blocks.2.1.weight", "blocks.2.1.bias",
        "head.weight",
    ]  # fmt: skip
    assert model.head.weight is model.embedding.weight and model.blocks[2][0].bias.mark == "no decay"
    assert model.blocks[2][1].running_mean.is_meta and not model.positions.is_meta


def test_kept_parameters_stay_the_same_objects() -> None:
    model = Model()
    keep = set(model.blocks[0].parameters())
    replace_with_placeholders(model, keep)
    assert {p for p in model.parameters() if not p.is_meta} == keep
