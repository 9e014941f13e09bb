"""Habits: kinds of blocks, and layers with adapters, quantized weights or experts."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.habits.habit import EXACT, FP32_NORMS, Habit, PerMicrobatch, Refused, everywhere, on
from tests.habits.side_outputs import SIZES, Stack
from tests.harness import models
from tests.harness.models import CLASSES, MLP, WIDTH, Batch, Block, Trained
from tests.harness.quantized import Quantized

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
TEXTS = partial(models.windows, (8, 8, 8))
RANK = 2
NUM_EXPERTS = 4
PIXELS = 32


# code that computes with the weights of layers


class Penalised(Stack):
    """The output is scaled by a norm over all of the block's parameters, which makes every gradient depend on it."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            norm = torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()
            return super().forward(x) / (1 + 0.01 * norm + 0.1 * self.up.bias.abs().sum())


class Tied(Stack):
    """The second layer is the transposed first one."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + functional.linear(functional.gelu(self.up(self.norm(x))), self.up.weight.T, self.down.bias)


class SharedByBlocks(Stack):
    """As Zamba: every other block has the same layer; and the embedding is a block's weight, too."""

    class Block(Block):
        shared: nn.Module | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x if self.shared is None else x + torch.tanh(self.shared(x))

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        for block in self.blocks[1::2]:
            block.shared = shared
        self.blocks[2].up.weight = self.outside = nn.Parameter(self.blocks[2].up.weight.detach().clone())

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.01 * self.outside.square().sum()


class SumOfMagnitudes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.abs().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient * weight.sign()


class PassedOn(Stack):
    """The block's weight is passed to code that isn't Python's: an autograd.Function, torch.func, and torch.tensor."""

    warnings.filterwarnings("ignore", message="To copy construct from a tensor")

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.up.weight
            rows = torch.vmap(lambda row: row.norm())(weight)
            slope = torch.func.grad(lambda whole: whole.square().sum())(weight)
            total = (
                SumOfMagnitudes.apply(weight) + rows.sum() + slope.abs().sum() + torch.tensor(weight.detach()).norm()
            )
            return super().forward(x) / (1 + total)


class OwnWeight(Stack):
    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            weights = {"weight": 0.5 * self.up.weight}
            return x + self.down(torch.func.functional_call(self.up, weights, self.norm(x)))


class Converted(Stack):
    """`type()` reads a name, `type(dtype)` converts."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.up.weight
            return super().forward(x) / (1 + weight.type(x.dtype).norm() + weight.type(x.type()).abs().mean())


class Recurrent(Stack):
    """Keeps its weights in a list of its own, from which it computes."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.rnn(x[:, None])[0][:, 0]


class Keeps(Stack):
    """Blocks keep parameters in containers, some beside a number that the step sets, one made in each forward."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(WIDTH))
            self.kept = {"gain": self.gain, "factor": 1.0}
            self.pair = [self.up.weight, self.up.bias]

        def forward(self, x: Tensor) -> Tensor:
            self.last = [self.gain]
            hidden = functional.gelu(functional.linear(self.norm(x), *self.pair))
            return x + self.kept["factor"] * self.kept["gain"] * self.last[0] * self.down(hidden)

    def loss(self, batch: Batch) -> Tensor:
        for block in self.blocks:
            block.kept["factor"] = 0.5 + 0.1 * self.global_step
        return super().loss(batch)


class KeepsHead(Stack):
    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.kept[0].abs().mean()

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.kept = [self.head.weight]


class Clamps(Stack):
    """Weights are clipped in the forward, as in a Wasserstein critic."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.2, 0.2)
            return super().forward(x)


def reparametrized(change: Callable[[nn.Module], Any]) -> LightningModule:
    """`change` is one of torch's functions that compute a layer's weight from other parameters."""
    module = MLP()
    for block in module.blocks:
        change(block.up)
    return module


# adapters


class Adapter(nn.Module):
    """LoRA around a frozen layer, as in peft; with `magnitudes` DoRA, which normalises the rows of the whole weight."""

    def __init__(self, base: nn.Linear, *, magnitudes: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)
        self.magnitudes = nn.Parameter(base.weight.detach().norm(dim=1)) if magnitudes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + self.lora_B(self.lora_A(x))
        if self.magnitudes is None:
            return y
        change = self.lora_B(self.lora_A(torch.eye(self.base.in_features, dtype=x.dtype))).T
        norms = torch.linalg.norm(self.base.weight.to(x.dtype) + change.detach(), dim=1)
        return (y - self.base.bias) * (self.magnitudes / norms) + self.base.bias


def adapted(adapt: Callable[[nn.Linear], nn.Module]) -> LightningModule:
    """A stack whose first layers have adapters, and whose second ones are frozen."""
    module = MLP()
    for block in module.blocks:
        block.up = adapt(block.up)
        block.down.requires_grad_(False)
    return module


# quantized weights


def with_quantized_weight(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(Quantized.of(layer.weight), requires_grad=False)
    return Adapter(layer, magnitudes=False)


class ProductInFp8(torch.autograd.Function):
    """A product of rounded factors, as torchao's: each is scaled by its largest value; gradients are rounded, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return in_fp8(x) @ in_fp8(weight).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x, weight), gradient = ctx.saved_tensors, in_fp8(gradient, torch.float8_e5m2)
        return gradient @ in_fp8(weight), gradient.flatten(0, -2).T @ in_fp8(x).flatten(0, -2)


def in_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-12)
    return (x * scale).to(dtype).to(x.dtype) / scale


class Float8Linear(nn.Linear):
    """A subclass with a forward of its own, as torchao's."""

    def forward(self, x: Tensor) -> Tensor:
        return ProductInFp8.apply(x, self.weight) + self.bias  # type: ignore[no-any-return]


class ComputesInFp8(MLP):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            for layer in (block.up, block.down):
                layer.__class__ = Float8Linear


class PackedParameter(nn.Parameter):
    """A weight as bytes of its 4-bit codes, as bitsandbytes': two codes in each, [out * in / 2, 1]."""


class PackedLinear(nn.Linear):
    """A subclass that unpacks its weight in its forward."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        weight = layer.weight.detach()
        self.bias = layer.bias
        self.register_buffer("scale", weight.abs().max() / 7)
        codes = (weight / self.scale).round().to(torch.uint8).bitwise_and(15).view(-1, 2)
        packed = codes[:, :1] + 16 * codes[:, 1:]
        self.weight = PackedParameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.cat([self.weight % 16, self.weight // 16], 1).to(x.dtype)
        signed = codes - 16 * (codes > 7)
        return functional.linear(x, signed.view(self.out_features, -1) * self.scale, self.bias)


def with_packed_weight(layer: nn.Linear) -> nn.Module:
    packed = PackedLinear(layer).requires_grad_(False)
    adapter = Adapter(nn.Linear(1, 1), magnitudes=False)
    adapter.base = packed
    adapter.lora_A, adapter.lora_B = nn.Linear(layer.in_features, RANK), nn.Linear(RANK, layer.out_features)
    return adapter


# experts


class Routed(nn.Module):
    """Each sample goes through one of several layers; layers that no sample needs aren't called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.add_module(name, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS)))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = x
        for number, expert in enumerate(self.get_submodule(self.name)):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class Mixture(MLP):
    """A layer of experts, called `name` in each block, behind the usual ones."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), Routed(name)) for _ in range(models.NUM_BLOCKS))


# models of transformers


class Causal(Trained):
    """A causal model of transformers with a loss in fp64: its own is computed in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Batch) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def mamba() -> LightningModule:
    from transformers import MambaConfig, MambaForCausalLM

    shapes = {"hidden_size": WIDTH, "num_hidden_layers": models.NUM_BLOCKS, "state_size": 4, "time_step_rank": 4}
    return Causal(MambaForCausalLM(MambaConfig(vocab_size=models.VOCABULARY, conv_kernel=3, **shapes)))


def qwen_moe() -> LightningModule:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
    config = Qwen3MoeConfig(**SIZES, **experts, experts_implementation="eager")
    return Causal(Qwen3MoeForCausalLM(config))


class Swin(Trained):
    """Pictures are divided by two from stage to stage, while the features double."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        from transformers import SwinConfig, SwinModel

        config = SwinConfig(
            image_size=PIXELS, patch_size=2, num_channels=1, embed_dim=8, depths=list(depths), window_size=2,
            num_heads=[2**stage for stage in range(len(depths))], drop_path_rate=0.0,
        )  # fmt: skip
        self.swin = SwinModel(config)
        self.head = nn.Linear(8 * 2 ** (len(depths) - 1), CLASSES)

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.head(self.swin(batch["x"]).pooler_output), batch["y"])


def pictures() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    shape = 1, PIXELS, PIXELS
    return [
        {
            "x": torch.randn(size, *shape, generator=generator, dtype=torch.float64),
            "y": torch.randint(CLASSES, (size,), generator=generator),
        }
        for size in (8, 8, 6)
    ]


def exact(name: str, model: Any, batches: Any = VECTORS, **options: Any) -> Habit:
    """A habit that is exact on all layouts."""
    return Habit(name, model, batches, everywhere(EXACT), **options)


QUANTIZED = on(pipelines=EXACT, cubes=Refused("whose weights are packed"))
SPECTRAL = everywhere(PerMicrobatch("training changes in each of a batch.s 4 micro-batches"))

HABITS = [
    exact("a block computes with the parameters of its layers: a norm over `self.parameters()`", Penalised),
    exact("a block's second layer is the first one's weight, transposed", Tied),
    Habit(
        "blocks share a layer, and a block's weight is used outside the stack, too", SharedByBlocks, VECTORS,
        on(pipelines=EXACT, cubes=EXACT) | {"both": Refused("belongs to blocks on several pipeline ranks")},
    ),
    exact("a block passes its weight to an `autograd.Function`, `torch.func` and `torch.tensor`", PassedOn),
    exact("a block converts its weight: `self.up.weight.type(dtype)`", Converted),
    exact("`nn.LSTM` in a block, which keeps its weights in a list, too", Recurrent),
    exact("a block keeps its parameters in a list, and in a dictionary with a number that the step sets", Keeps),
    Habit(
        "blocks keep the head's weight in a list", KeepsHead, VECTORS,
        everywhere(Refused("is head.weight, which belongs to pipeline rank 0")) | {"cube": EXACT},
    ),
    Habit(
        "`functional_call` of a layer in a block", OwnWeight, VECTORS,
        on(pipelines=EXACT, cubes=Refused("is called with another weight or bias than its own")),
    ),
    Habit(
        "a block clamps its weight in its forward", Clamps, VECTORS,
        everywhere(Refused("is a parameter that the training step changes in place")),
    ),
    exact("`parametrizations.weight_norm`", partial(reparametrized, parametrizations.weight_norm)),
    exact("`parametrizations.orthogonal`", partial(reparametrized, parametrizations.orthogonal)),
    Habit(
        "`parametrizations.spectral_norm`", partial(reparametrized, parametrizations.spectral_norm), VECTORS, SPECTRAL,
    ),
    exact("LoRA around frozen layers", partial(adapted, partial(Adapter, magnitudes=False)), always_exact=True),
    exact("DoRA, which computes norms of whole weights", partial(adapted, partial(Adapter, magnitudes=True))),
    Habit(
        "LoRA around weights of a tensor subclass, such as torchao's", partial(adapted, with_quantized_weight), VECTORS,
        QUANTIZED,
    ),
    Habit(
        "LoRA around packed weights of a subclass of `nn.Linear`, such as `bnb.nn.Linear4bit`",
        partial(adapted, with_packed_weight), VECTORS, QUANTIZED,
    ),
    Habit(
        "`Float8Linear` as torchao's, which computes in fp8 with a scale for each tensor", ComputesInFp8, VECTORS,
        on(
            pipelines=PerMicrobatch("outputs or gradients of some samples change with other samples"),
            cubes=Refused("up is a Float8Linear, which scales by the largest value of a micro-batch"),
        ),
    ),
    exact("`experts` in a `ModuleList`, of which each sample needs one", partial(Mixture, "experts")),
    Habit(
        "the same under another name", partial(Mixture, "branches"), VECTORS,
        on(pipelines=EXACT, cubes=Refused(r"cube_exclude=\('branches',\)", "Leave those out that some samples skip")),
    ),
    exact(
        "the same with `cube_exclude=('branches',)`", partial(Mixture, "branches"),
        strategy={"cube_exclude": ("branches",)},
    ),
    exact("Qwen3-MoE, with fused weights of all experts", qwen_moe, TEXTS, tolerance=FP32_NORMS),
    exact("Mamba", mamba, TEXTS, tolerance=FP32_NORMS),
    Habit(
        "Swin, whose four stages have different shapes", partial(Swin, (1, 1, 1, 1)), pictures,
        everywhere(EXACT) | {"waves": Refused("the stack has 4 blocks", "the stack has 4 blocks ... has 8 stages")},
    ),
    exact(
        "the same with `blocks='swin.encoder.layers.2.blocks'`", partial(Swin, (1, 1, 8, 1)), pictures,
        strategy={"blocks": "swin.encoder.layers.2.blocks"},
    ),
]  # fmt: skip
