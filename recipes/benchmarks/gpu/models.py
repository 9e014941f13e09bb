"""The two models that are trained, as ordinary LightningModules, in each of the ways that are compared."""

from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.tensor_parallel import Mesh, StageContext, plan_parallelize
from recipes.benchmarks.fits import SteppedFit, new_trainer
from recipes.benchmarks.gpu.card import Card
from recipes.gpt.module import GPT

Kind = Literal["llama", "gpt"]
Precision = Literal["bf16-true", "bf16-mixed"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    width: int
    num_heads: int
    feed_forward: int
    num_blocks: int
    vocabulary: int = 0
    """of a GPT"""


class LlamaStack(L.LightningModule):
    """The blocks of a Llama, as transformers has them. It takes and returns hidden states [samples, seq, width]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.feed_forward,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_heads,
            num_hidden_layers=sizes.num_blocks,
            attn_implementation="sdpa",  # type: ignore[call-arg, unused-ignore]
        )
        self.rotary = LlamaRotaryEmbedding(config)
        self.blocks = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(sizes.num_blocks))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[samples, seq, width] to the same."""
        positions = self.rotary(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0))
        for block in self.blocks:
            x = block(x, position_embeddings=positions)
        return x

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square of what the stack returns: a loss that costs next to nothing."""
        loss: Tensor = self(batch).float().square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4, fused=self.device.type == "cuda")


Model = LlamaStack | GPT


def build(kind: Kind, sizes: Sizes, sequence: int, device: torch.device) -> Model:
    """Build the model on `device`, with the same values each time."""
    torch.manual_seed(1)
    with device:
        if kind == "llama":
            return LlamaStack(sizes)
        return GPT(sizes.vocabulary, sequence, sizes.num_blocks, sizes.width, sizes.num_heads)


def batch_of(
    kind: Kind, sizes: Sizes, shape: tuple[int, int], precision: Precision, device: torch.device
) -> Tensor | dict[str, Tensor]:
    """A batch of `shape` (samples, sequence) on `device`."""
    generator = torch.Generator(device).manual_seed(2)
    if kind == "llama":
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        return torch.randn(*shape, sizes.width, generator=generator, device=device, dtype=dtype)
    tokens = torch.randint(sizes.vocabulary, (shape[0], shape[1] + 1), generator=generator, device=device)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def operations(kind: Kind, sizes: Sizes, shape: tuple[int, int]) -> float:
    """Floating-point operations of forward and backward on a batch of `shape` (samples, sequence).

    Each token takes six per weight of a matrix, and 6 seq width per block in causal attention: 2 seq width forward for
    the products with keys and values, of which half is masked, and twice as many backward.
    """
    width, num_matrices = sizes.width, 3 if kind == "llama" else 2
    per_block = 4 * width**2 + num_matrices * width * sizes.feed_forward
    weights = sizes.num_blocks * per_block + sizes.vocabulary * width
    return float(shape[0] * shape[1] * (6 * weights + 6 * sizes.num_blocks * shape[1] * width))


MICROBATCHES = 4
"""per step"""


@dataclass(frozen=True)
class Candidate:
    """A way to train: the plain Trainer, the same with 3-D layers on one rank, or the strategy."""

    waves: int = 0
    """of the strategy; 1: the whole stack is one stage; 0: the plain Trainer, which accumulates the gradients of the
    same micro-batches"""
    has_3d_layers: bool = False
    is_compiled: bool = False
    """whether `block.compile()` was called for each block"""

    @property
    def label(self) -> str:
        """Its name in tables."""
        name = STRATEGY[self.waves] if self.waves else "3-D layers, (1,1,1)" if self.has_3d_layers else PLAIN
        return name + (COMPILED if self.is_compiled else "")


PLAIN, COMPILED = "plain Trainer", ", compiled"
STRATEGY = {1: "strategy, P=1", 2: "strategy, P=1 W=2"}
EAGER = Candidate(), Candidate(waves=1), Candidate(waves=2), Candidate(has_3d_layers=True)
ALL = *EAGER, *(Candidate(one.waves, one.has_3d_layers, True) for one in EAGER)


@dataclass(frozen=True)
class Case:
    """A model and its batches."""

    kind: Kind
    sizes: Sizes
    samples: int
    """per micro-batch"""
    sequence: int
    candidates: tuple[Candidate, ...] = EAGER
    precision: Precision = "bf16-true"

    @property
    def tokens(self) -> int:
        """Per micro-batch."""
        return self.samples * self.sequence

    @property
    def num_actions(self) -> int:
        """Forwards and backwards of single blocks in a step."""
        return 2 * self.sizes.num_blocks * MICROBATCHES


def start_fit(case: Case, candidate: Candidate, card: Card, num_steps: int) -> SteppedFit:
    """Set up a fit that takes the same batch in each step, whole or in micro-batches.

    Raises:
        Exception: whatever the fit raises.
    """
    shape = MICROBATCHES * case.samples, case.sequence
    batch = batch_of(case.kind, case.sizes, shape, case.precision, card.device)
    pieces = [batch] if candidate.waves else _split(batch, case.samples)

    def make() -> tuple[L.LightningModule, L.Trainer]:
        model = build(case.kind, case.sizes, case.sequence, card.device)
        return model, new_trainer(
            accelerator=card.accelerator,
            devices=1,
            strategy=_strategy(candidate.waves),
            precision=case.precision,
            accumulate_grad_batches=1 if candidate.waves else MICROBATCHES,
            callbacks=_prepare(model, candidate, card),
        )

    return SteppedFit(make, [pieces] * num_steps, candidate.label)


def _strategy(waves: int) -> HanayoStrategy | str:
    """One rank's stack is one stage, unless a schedule is named."""
    if waves == 0:
        return "auto"
    schedule = "auto" if waves == 1 else "hanayo"
    return HanayoStrategy(num_waves=waves, num_microbatches=MICROBATCHES, schedule=schedule)


def _split(batch: Tensor | dict[str, Tensor], samples: int) -> list[Any]:
    if isinstance(batch, Tensor):
        return list(batch.split(samples))
    names, columns = batch.keys(), (tensor.split(samples) for tensor in batch.values())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


class _StageRuns(Callback):
    """Tells the 3-D layers of a plain Trainer what a stage would tell them."""

    def __init__(self, context: StageContext) -> None:
        self._context = context

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % MICROBATCHES == 0:
            self._context.begin_batch()
        self._context.before_forward()

    @override
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._context.before_backward()

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._context.finish_gradients()


def _prepare(model: Model, candidate: Candidate, card: Card) -> list[Callback]:
    """Convert and compile the blocks; return the callbacks that they need."""
    blocks = list(model.blocks)
    callbacks: list[Callback] = []
    if candidate.has_3d_layers:
        mesh = Mesh.single()
        context = StageContext(mesh)
        plan_parallelize(blocks, "blocks", mesh.sizes).install(blocks, context)
        callbacks.append(_StageRuns(context))
    if candidate.is_compiled:
        for block in blocks:
            block.compile(backend=card.compiler, dynamic=False)
    return callbacks
