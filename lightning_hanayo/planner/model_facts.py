"""ModelFacts: what the planner knows of a model, counted without values: its blocks' products, parameters and bytes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from lightning_hanayo.divisibility import Divisibility, MeshSizes
from lightning_hanayo.planner.communication_volume import ExpertLayer, Experts, LinearLayer


@dataclass(frozen=True)
class BlockFacts:
    """One block of the stack, for one sample."""

    products: tuple[LinearLayer, ...]
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

    @cached_property
    def flops(self) -> float:
        """Of the forward."""
        return self.attention_flops + sum(one.flops for one in self.products)

    @cached_property
    def sharded_parameters(self) -> int:
        """Those of the linear layers, of which each rank of a cube stores its part."""
        return sum(one.parameters for one in self.products)

    def shared_experts(self, mesh: MeshSizes, where: Experts) -> ExpertLayer | None:
        """The experts that the ranks of this cube share."""
        return self.experts if where == "cube" and mesh[1] * mesh[2] > 1 else None

    def of_a_rank(self, samples: int, mesh: MeshSizes, where: Experts = "whole", element: int = 1) -> "RankBlock":
        """The part of a rank of a cube, for a micro-batch of so many samples; `element` bytes per number.

        `where`: the experts are.
        """
        num_ranks, experts = prod(mesh), self.shared_experts(mesh, where)
        of_others, of_experts = 0.0, 0
        if experts is not None:
            of_others, of_experts = experts.parameters - experts.parameters_of_a_rank(mesh), experts.parameters
        held = self.parameters - self.sharded_parameters * (1 - 1 / num_ranks) - of_others
        is_generic = any(one.is_generic for one in self.products)
        whole = self.parameters - self.sharded_parameters - of_experts if is_generic else 0.0
        trained = 1 - self.frozen / max(1, self.parameters)  # the part of them
        stored = [one.of(samples).storage(mesh) for one in self.products]
        sums = [(one.saved_weights or one.weights) * (1 + 1 / mesh[0]) for one in stored]
        inputs = element * samples * sum(one.sizes[0] for one in self.products)
        saved = samples * (self.saved - (num_ranks > 1) * self.repeated_inputs)
        saved = max(0.0, saved - inputs) / num_ranks
        if experts is not None:  # memory must do for any choice of experts
            saved += samples * (experts.most_saved(mesh) - experts.saved / num_ranks)
        return RankBlock(
            parameters=held,
            trained=held * trained,
            whole=whole,
            updated=(held - whole * (1 - 1 / num_ranks)) * trained,
            gathered=sum(one.saved_weights for one in stored),
            gathered_shards=sum(one.weights for one in stored if one.saved_weights),
            cast=sum(one.weights for one in stored if not one.saved_weights),
            first_sums=sum(sums[:2]),
            last_sums=sum(sums[-2:]),
            saved=saved + element * sum(one.saved_inputs + one.saved_weights for one in stored),
            saved_by_batch=saved + element * sum(one.saved_inputs for one in stored),
        )


class RankBlock(NamedTuple):
    """A rank's part of a block in a cube. Elements, but for what it saves."""

    parameters: float
    """that it holds while a batch runs"""
    trained: float
    """of them"""
    whole: float
    """of them, those that a generic block has whole, gathered for the batch: between batches they are sharded"""
    updated: float
    """that it trains, between batches"""
    gathered: float
    """of the weights that it gathers"""
    gathered_shards: float
    """of its shards of these weights"""
    cast: float
    """of the weights that autocast casts for each micro-batch: those that a cube doesn't gather"""
    first_sums: float
    """of the gradients of the first two products' weights, before ranks add them up"""
    last_sums: float
    """of the last two"""
    saved: float
    """bytes that it keeps for the backward of a micro-batch"""
    saved_by_batch: float
    """the same if weights are gathered once a batch"""


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

    @property
    def outside_trained(self) -> int:
        """The parameters outside the stack that are trained."""
        return self.outside_parameters - self.outside_frozen

    @property
    def flops(self) -> float:
        """Of a forward and a backward of one sample."""
        return 3 * (self.outside.flops + self.loss.flops + sum(block.flops for block in self.blocks))

    @cached_property
    def kinds(self) -> tuple[tuple[BlockFacts, float], ...]:
        """The different blocks, and the part that each is of all blocks."""
        return tuple((kind, count / len(self.blocks)) for kind, count in Counter(self.blocks).items())

    @cached_property
    def has_experts(self) -> bool:
        """Whether a cube's ranks can share experts."""
        return any(block.experts is not None for block, _ in self.kinds)

    @cached_property
    def of_a_rank(self) -> Callable[[int, MeshSizes, Experts], RankBlock]:
        """A rank's part of the mean block, by the samples of a micro-batch, the cube, and where experts are."""

        @cache
        def mean(samples: int, mesh: MeshSizes, where: Experts = "whole") -> RankBlock:
            parts = ((kind.of_a_rank(samples, mesh, where, self.element), part) for kind, part in self.kinds)
            of_kinds = ([part * one for one in block] for block, part in parts)
            return RankBlock(*map(sum, zip(*of_kinds, strict=True)))

        return mean

    def mean(self, of: Callable[[BlockFacts], float]) -> float:
        """The mean over the blocks of what `of` says of each."""
        return sum(part * of(kind) for kind, part in self.kinds)
