"""The models of the memory benchmark, counted once."""

from functools import cache

import torch

from lightning_hanayo.planner.model_facts import ModelFacts
from lightning_hanayo.strategy.model_facts import read_model
from recipes.benchmarks.memory_measured import Sizes, make_model


@cache
def counted(name: str) -> ModelFacts:
    """Of "gpt" or "llama", with the sizes of the page."""
    ids = torch.zeros(16, 256, dtype=torch.long)
    return read_model(make_model(Sizes(name, 128, 256)), {"input_ids": ids, "labels": ids}, 16)
