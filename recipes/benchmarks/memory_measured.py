"""Measures the most memory that ranks hold in a training step: ours, DDP and FSDP2, over gloo."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, UntypedStorage, nn
from typing_extensions import override

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.planner.candidates import Candidate
from lightning_hanayo.planner.ranking import strategy_options
from recipes.benchmarks.fits import random_batches
from recipes.benchmarks.harness import ORDINARY, run_ranks
from recipes.benchmarks.live_bytes import LiveBytes, peak_of_fit
from recipes.gpt.module import GPT
from recipes.h100 import models

STEPS = 3
"""the third one is measured"""
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of the batch of one data rank."""

    model: str
    """gpt or llama"""
    width: int
    context: int
    """tokens of a sequence"""
    blocks: int = 8
    words: int = 1024
    samples: int = 16

    @property
    def heads(self) -> int:
        """One for every 32 features."""
        return max(1, self.width // 32)

    @property
    def llama(self) -> models.Llama:
        """The sizes of a Llama; its feed-forward networks have 8/3 of the width, in eights."""
        features = 8 * self.width // 3 // 8 * 8
        return models.Llama(
            "small", self.blocks, self.width, features, self.heads, self.heads, self.words, self.context
        )


class ResizedBytes(LiveBytes):
    """Looks at the sizes of all live memory before it takes a peak for one."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()

    @override
    def note(self, tensors: Iterable[Any]) -> None:
        peak, found = self.peak, list(tensors)
        super().note(found)
        self._storages.update(one.untyped_storage() for one in found if isinstance(one, Tensor) and one.is_cpu)
        if self.peak > peak:
            for storage in tuple(self._storages):
                self._note(storage)
            self.peak = max(peak, self.num_bytes)


class Llama(L.LightningModule):
    """`LlamaForCausalLM` as it is, trained with AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss: Tensor = self.net(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def make_model(sizes: Sizes) -> L.LightningModule:
    """The model of these sizes."""
    if sizes.model == "gpt":
        return GPT(sizes.words, sizes.context, sizes.blocks, sizes.width, sizes.heads)
    return make_llama(sizes.llama)


def make_llama(sizes: models.Llama) -> Llama:
    """A Llama of these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.features,
        num_hidden_layers=sizes.num_blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.length,
        vocab_size=sizes.vocabulary,
    )
    return Llama(LlamaForCausalLM(config))


def run_ours(sizes: Sizes, layout: Candidate) -> list[int]:
    """The most bytes that each rank of a layout holds. `sizes.samples` are those of a data rank's batch."""
    ranks: list[int] = _run(layout.topology.world_size, partial(_fit_ours, sizes=sizes, layout=layout))
    return ranks


def run_peer(sizes: Sizes, system: str, num_ranks: int) -> int:
    """The most bytes that a rank holds with "DDP" or "FSDP2"."""
    peaks: list[int] = _run(num_ranks, partial(_fit_peer, sizes=sizes, system=system))
    return max(peaks)


def _run(num_ranks: int, work: Any) -> list[Any]:
    return [result for _, result in run_ranks(work, num_ranks, [ORDINARY] * num_ranks, TIMEOUT_S)]


def _fit_ours(rank: int, num_ranks: int, *, sizes: Sizes, layout: Candidate) -> int:
    torch.manual_seed(0)
    options = strategy_options(layout) | {
        "cube": layout.mesh,
        "step": "microbatch",
    }  # without dry runs of whole batches
    strategy = HanayoStrategy(**options)
    batches = random_batches(STEPS, sizes.samples, sizes.context, sizes.words)
    return peak_of_fit(rank, num_ranks, partial(make_model, sizes), batches, strategy=strategy)


def _fit_peer(_: int, num_ranks: int, *, sizes: Sizes, system: str) -> int:
    torch.manual_seed(0)
    live = ResizedBytes()
    with live.counting():
        model = _parallelize(make_model(sizes), system, num_ranks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        for _ in range(STEPS):
            tokens = torch.randint(sizes.words, (sizes.samples, sizes.context))
            live.restart()
            model({"input_ids": tokens, "labels": tokens}, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return live.peak


def _parallelize(model: Any, system: str, num_ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model.forward = model.training_step
    if system == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (num_ranks,))
    for part in (*model.net.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model
