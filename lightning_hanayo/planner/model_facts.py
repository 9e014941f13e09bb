"""ModelFacts: what the planner knows of a model, counted without values: its blocks' products, parameters and bytes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from lightning_hanayo.divisibility import Divisibility, MeshSizes
from lightning_hanayo.planner.communication_volume import CubeWeights, ExpertLayer, LinearLayer, Storage, Volume


@dataclass(frozen=True)
class Product:
    """A linear layer of a block, or several that read one input, for one sample.

    Args:
        layer: its sizes, with the tokens of one sample.
        is_generic: whether its block isn't registered, so that the layer is parallelized by itself: either activations
            are exchanged around it, or the weight is gathered whole, whichever communicates less.
    """

    layer: LinearLayer
    is_generic: bool = False

    @property
    def flops(self) -> float:
        """Of the forward."""
        m, k, n = self.layer.tokens, self.layer.in_features, self.layer.out_features
        return 2.0 * m * k * n

    @property
    def parameters(self) -> int:
        """Of the weight."""
        return self.layer.in_features * self.layer.out_features

    def of(self, samples: int) -> LinearLayer:
        """The layer for a micro-batch of so many samples."""
        return replace(self.layer, tokens=samples * self.layer.tokens)

    def gathers_whole(self, samples: int, mesh: MeshSizes) -> bool:
        """Whether its weight is gathered whole over all ranks, and no activation is sent."""
        return self.is_generic and self._whole(mesh).total <= self.of(samples).generic_volume(mesh).total

    def volume(self, samples: int, mesh: MeshSizes) -> Volume:
        """What a rank receives for a micro-batch of so many samples."""
        if self.gathers_whole(samples, mesh):
            return self._whole(mesh)
        layer = self.of(samples)
        return layer.generic_volume(mesh) if self.is_generic else layer.volume(mesh)

    def storage(self, samples: int, mesh: MeshSizes) -> Storage:
        """What a rank stores from the forward to the backward."""
        if not self.gathers_whole(samples, mesh):
            return self.of(samples).storage(mesh)
        num_ranks = prod(mesh)
        kept = self.parameters if num_ranks > 1 else 0.0
        return Storage(self.parameters / num_ranks, samples * self.layer.sizes[0] / num_ranks, kept)

    def _whole(self, mesh: MeshSizes) -> Volume:
        others = self.parameters * (1 - 1 / prod(mesh))
        return Volume(gather_w=others, scatter_dw=others)


@dataclass(frozen=True)
class BlockFacts:
    """One block of the stack, for one sample."""

    products: tuple[Product, ...]
    """in the order of its forward"""
    parameters: int
    """all of them"""
    attention_flops: float = 0.0
    """of the forward's products that aren't linear layers"""
    traffic: float = 0.0
    """bytes that all other operations of the forward read and write"""
    calls: float = 0.0
    """operations that the host starts in the forward"""
    saved: float = 0.0
    """bytes that the forward keeps for the backward, besides parameters"""
    repeated_inputs: float = 0.0
    """those of them that autocast makes again for each of several layers of one input, which share it in a cube"""
    frozen: int = 0
    """parameters that aren't trained: they have no gradients and no states"""
    experts: ExpertLayer | None = None
    """those that the ranks of a cube can share; their work is part of `attention_flops` and `saved`"""
    shares_experts: bool = False
    """whether they do"""

    @cached_property
    def flops(self) -> float:
        """Of the forward."""
        return self.attention_flops + sum(one.flops for one in self.products)

    @cached_property
    def sharded_parameters(self) -> int:
        """Those of the linear layers, of which each rank of a cube stores its part."""
        return sum(one.parameters for one in self.products)

    def shared_experts(self, mesh: MeshSizes) -> ExpertLayer | None:
        """The experts that the ranks of this cube share."""
        return self.experts if self.shares_experts and mesh[1] * mesh[2] > 1 else None

    def parameters_of_a_rank(self, mesh: MeshSizes) -> float:
        """Elements that a rank of a cube holds while a batch runs."""
        of_others = 0.0
        if (experts := self.shared_experts(mesh)) is not None:
            of_others = experts.parameters - experts.parameters_of_a_rank(mesh)
        return self.parameters - self.sharded_parameters * (1 - 1 / prod(mesh)) - of_others

    def trained_by_a_rank(self, mesh: MeshSizes) -> float:
        """Those of them that are trained."""
        return self.parameters_of_a_rank(mesh) * self._trained

    def whole_of_a_rank(self, mesh: MeshSizes) -> float:
        """Those of them that a generic block has whole, gathered for the batch: between batches they are sharded."""
        if not any(one.is_generic for one in self.products):
            return 0.0
        experts = self.shared_experts(mesh)
        return self.parameters - self.sharded_parameters - (0 if experts is None else experts.parameters)

    def updated_by_a_rank(self, mesh: MeshSizes) -> float:
        """Elements that a rank of a cube trains, between batches."""
        return (self.parameters_of_a_rank(mesh) - self.whole_of_a_rank(mesh) * (1 - 1 / prod(mesh))) * self._trained

    @property
    def _trained(self) -> float:
        return 1 - self.frozen / max(1, self.parameters)

    def gathered_by_a_rank(self, samples: int, mesh: MeshSizes) -> float:
        """Elements of the weights that a rank of a cube gathers."""
        return sum(one.storage(samples, mesh).saved_weights for one in self.products)

    def cast_by_a_rank(self, samples: int, mesh: MeshSizes) -> float:
        """Elements of the weights that autocast casts for each micro-batch: those that a cube doesn't gather."""
        stored = (one.storage(samples, mesh) for one in self.products)
        return sum(one.weights for one in stored if not one.saved_weights)

    def gathers(self, samples: int, mesh: MeshSizes) -> float:
        """Elements of a rank's shards of the weights that a cube gathers."""
        stored = (one.storage(samples, mesh) for one in self.products)
        return sum(one.weights for one in stored if one.saved_weights)

    def sums(self, samples: int, mesh: MeshSizes) -> list[float]:
        """Elements of the gradient of each product's weights that a rank computes, before ranks add it up."""
        x = mesh[0]
        stored = (one.storage(samples, mesh) for one in self.products)
        return [(one.saved_weights or one.weights) * (1 + 1 / x) for one in stored]

    def saved_by_a_rank(
        self, samples: int, mesh: MeshSizes, element: int, weights: CubeWeights = "microbatch"
    ) -> float:
        """Bytes that a rank of a cube keeps for the backward of a micro-batch; `element` bytes per number."""
        inputs = element * samples * sum(one.layer.sizes[0] for one in self.products)
        saved = self.saved - (prod(mesh) > 1) * self.repeated_inputs
        others = max(0.0, samples * saved - inputs) / prod(mesh)
        if (experts := self.shared_experts(mesh)) is not None:  # memory must do for any choice of experts
            others += samples * (experts.most_saved(mesh) - experts.saved / prod(mesh))
        stored = [one.storage(samples, mesh) for one in self.products]
        own_weights = weights == "microbatch"
        return others + element * sum(one.saved_inputs + own_weights * one.saved_weights for one in stored)


@dataclass(frozen=True)
class Code:
    """Code outside the stack."""

    flops: float = 0.0
    """of its forward"""
    traffic: float = 0.0
    """bytes that operations other than products read and write"""
    calls: float = 0.0
    """operations that the host starts"""
    saved: float = 0.0
    """bytes that it keeps for the backward, such as logits"""
    workspace: float = 0.0
    """bytes that it takes besides while it runs"""

    def __mul__(self, samples: float) -> "Code":
        """The same calls for more samples."""
        flops, traffic, calls, saved, workspace = vars(self).values()
        return Code(samples * flops, samples * traffic, calls, samples * saved, samples * workspace)


@dataclass(frozen=True)
class ModelFacts:
    """A model, for one sample of its training data."""

    stack: str
    """the name of the stack of blocks"""
    blocks: tuple[BlockFacts, ...]
    message: float
    """bytes that go from one block to the next"""
    outside_parameters: int = 0
    """of embedding, head, and whatever else isn't in the stack"""
    computing_parameters: int = 0
    """those of them that are multiplied with: all but tables that are only looked up"""
    outside_frozen: int = 0
    """those of them that aren't trained"""
    outside: Code = Code()
    """code outside the stack, without `loss`"""
    loss: Code = Code()
    """`chunked_cross_entropy`, which ranks that run the step alike share; its backward repeats its products, and its
    memory is that of a chunk and of the head's weight, however many samples there are"""
    by_rows: tuple[Code, Code] | None = None
    """both with `cube_outside="tokens"`; None where a run rejects that"""
    vocabulary_bytes: float = 0.0
    """of the values of embedding and head, which a cube then keeps sharded during a batch"""
    vocabulary_gradients: float = 0.0
    """bytes"""
    required: tuple[Divisibility, ...] = ()
    """what must divide over a cube"""
    tokens: int = 1
    """of a sample, for figures per token"""
    dtype: str = "float32"
    """in which products are computed"""
    element: int = 4
    """bytes of a number in it"""
    parameter_bytes: float = 4.0
    """of each parameter"""
    gradient_bytes: float = 4.0
    """of each that is trained"""
    optimizer_bytes: float = 8.0
    """of the optimizer's states, and of master weights, for each parameter that is trained"""

    @cached_property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.outside_parameters + sum(block.parameters for block in self.blocks)

    @cached_property
    def is_registered(self) -> bool:
        """Whether a cube runs whole blocks in its layout, and not one layer after the other."""
        return not any(one.is_generic for block, _ in self.kinds for one in block.products)

    @cached_property
    def parameters_per_block(self) -> float:
        """At least one, so that it can divide."""
        return max(1.0, self.mean(lambda block: block.parameters))

    @cached_property
    def outside_bytes(self) -> float:
        """Of values and gradients of the parameters outside the stack."""
        trained = self.outside_parameters - self.outside_frozen
        return self.outside_parameters * self.parameter_bytes + trained * self.gradient_bytes

    @property
    def flops(self) -> float:
        """Of a forward and a backward of one sample."""
        return 3 * (self.outside.flops + self.loss.flops + sum(block.flops for block in self.blocks))

    @cached_property
    def kinds(self) -> tuple[tuple[BlockFacts, float], ...]:
        """The different blocks, and the part that each is of all blocks."""
        return tuple((kind, count / len(self.blocks)) for kind, count in Counter(self.blocks).items())

    @cached_property
    def has_frozen(self) -> bool:
        """Whether a block has parameters that aren't trained."""
        return any(block.frozen for block, _ in self.kinds)

    @cached_property
    def has_experts(self) -> bool:
        """Whether a cube's ranks can share experts."""
        return any(block.experts is not None for block, _ in self.kinds)

    @cached_property
    def sharing_experts(self) -> "ModelFacts":
        """The model where they do."""
        if all(block.shares_experts for block, _ in self.kinds):
            return self
        sharing = {block: replace(block, shares_experts=True) for block, _ in self.kinds}
        return replace(self, blocks=tuple(sharing[block] for block in self.blocks))

    def gathers_weights(self, samples: int, mesh: MeshSizes) -> bool:
        """Whether a cube gathers any weights for a micro-batch of so many samples."""
        return any(one.storage(samples, mesh).saved_weights > 0 for block, _ in self.kinds for one in block.products)

    def mean(self, of: Callable[[BlockFacts], float]) -> float:
        """The mean over the blocks of what `of` says of each."""
        return sum(part * of(kind) for kind, part in self.kinds)
