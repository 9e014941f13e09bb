"""Says which pipeline rank owns which parameters, and replaces those of other ranks by placeholders on the meta device.

rank 0    embedding, head   block 0  .  .  block 3  block 4  .  .  block 7          a dot is a block of
rank 1          .           .  block 1  block 2  .  .  block 5  block 6  .          placeholders
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.packed_values import is_tensor_subclass
from lightning_hanayo.partial_values import restore
from lightning_hanayo.partition.stack import Stack, modules_outside


@dataclass(frozen=True)
class Ownership:
    """The blocks of each stage, and the pipeline rank of each stage. Parameters outside the stack belong to stage 0."""

    stack: Stack
    stages: tuple[range, ...]
    """the indices of each stage's blocks"""
    stage_ranks: tuple[int, ...]
    kept: tuple[tuple[nn.Parameter, int, str], ...] = ()
    """parameters that a block uses without having registered them, with its index, and where it keeps them"""

    def blocks(self, stage: int) -> list[nn.Module]:
        """The blocks of `stage`; none for a loss stage."""
        return [self.stack.blocks[i] for i in self.stages[stage]]

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def stage_parameters(self, model: nn.Module, stages: Iterable[int]) -> dict[int, list[nn.Parameter]]:
        """The parameters of each of `stages`, in the model's order. One of several stages belongs to the lowest.

        Its gradient is complete after that stage's backward. A parameter used outside the stack, or on several ranks,
        belongs to stage 0.
        """
        users, shared = self._users(model, self.kept), set(self.shared_parameters(model))
        found: dict[int, list[nn.Parameter]] = {stage: [] for stage in stages}
        for parameter in model.parameters():
            found.get(0 if parameter in shared else max(0, min(users[parameter])), []).append(parameter)
        return found

    def shared_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that code on several pipeline ranks uses. They belong to rank 0, and are lent to others."""
        ranks = {-1: 0, **dict(enumerate(self.stage_ranks))}
        return [one for one, users in self._users(model).items() if len({ranks[stage] for stage in users}) > 1]

    def tied_parameters(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters that two stages use, or a block and the code outside the stack."""
        return {parameter for parameter, users in self._users(model, self.kept).items() if len(users) > 1}

    def _users(
        self, model: nn.Module, kept: Iterable[tuple[nn.Parameter, int, str]] = ()
    ) -> dict[nn.Parameter, set[int]]:
        """The stages that have registered each parameter, or keep it; -1 stands for the code outside the stack."""
        users: dict[nn.Parameter, set[int]] = defaultdict(set)
        for stage in range(len(self.stages)):
            for block in self.blocks(stage):
                for parameter in block.parameters():
                    users[parameter].add(stage)
        for module in modules_outside(model, self.stack):
            for own in module._parameters.values():
                if own is not None:
                    users[own].add(-1)
        for parameter, index, _ in kept:
            users[parameter].add(self._stage_of(index))
        return users

    def _stage_of(self, block: int) -> int:
        return next(stage for stage, blocks in enumerate(self.stages) if block in blocks)

    def rank_by_name(self, model: nn.Module) -> dict[str, int]:
        """The pipeline rank that owns each entry of `model.state_dict()`, also of those that hooks have left out."""
        rank_of_block = {i: self.stage_ranks[stage] for stage, blocks in enumerate(self.stages) for i in blocks}
        rank_by_prefix = {f"{name}.": rank_of_block[i] for i, name in enumerate(self.stack.block_names)}
        parameters, buffers = (dict(of(remove_duplicate=False)) for of in (model.named_parameters, model.named_buffers))
        own_names = {tensor: name for name, tensor in {**parameters, **buffers}.items()}
        names = {name: name for name in (*parameters, *buffers)}
        for name, value in state_of_own_tensors(model).items():
            names.setdefault(name, own_names.get(value, name) if isinstance(value, Tensor) else name)
        shared = set(self.shared_parameters(model))
        rank_by_prefix = {name: 0 for name, one in parameters.items() if one in shared} | rank_by_prefix  # first
        return {
            name: next((rank for prefix, rank in rank_by_prefix.items() if own.startswith(prefix)), 0)
            for name, own in names.items()
        }

    def check(self, model: nn.Module) -> None:
        """Check that blocks register what they use of other ranks.

        Raises:
            UnsupportedError: a block keeps a parameter of another rank in a list.
        """
        names, ranks = {one: name for name, one in model.named_parameters()}, self.rank_by_name(model)
        for parameter, index, place in self.kept:
            name = names.get(parameter, "")
            if name and self.stage_ranks[self._stage_of(index)] != ranks[name]:
                raise UnsupportedError(
                    f"{place} is {name}, which belongs to pipeline rank {ranks[name]}, but the block runs on another "
                    f"one. Pass it to the block as an argument, or register it in the block."
                )

    def check_cube(self, model: nn.Module) -> None:
        """Check that no rank of a cube uses a parameter inside blocks of which others may hold a part.

        Raises:
            UnsupportedError: a block uses another one's parameter, or blocks on several pipeline ranks share one.
        """
        users, names = self._users(model, self.kept), {parameter: name for name, parameter in model.named_parameters()}
        for parameter in self.shared_parameters(model):
            raise UnsupportedError(
                f"{names[parameter]} belongs to blocks on several pipeline ranks, and each rank of a cube may hold a "
                f"part of it. Set cube=1, or pipeline_parallel_size=1."
            )
        for parameter, _, place in self.kept:
            if parameter in names and -1 not in users[parameter]:
                raise UnsupportedError(
                    f"{place} is {names[parameter]} of another block, and each rank of a cube may hold a part of it. "
                    f"Give the block a parameter of its own."
                )


class Placeholder(nn.Parameter):
    """A parameter on the meta device in place of one that another pipeline rank owns.

    Its class tells it from a parameter that is on the meta device because it has no values yet.
    """

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take another dtype, but stay on the meta device: a copy of a module that is moved has no values either."""
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return self if dtype in (None, self.dtype) else super().to(dtype=dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make pickle and deepcopy return a Placeholder, not a plain Parameter."""
        return restore, (Placeholder, self.data, self.requires_grad, vars(self))


def state_of_own_tensors(model: nn.Module) -> Mapping[str, Any]:
    """The state dict with the model's parameters and buffers themselves, under the names that hooks give them."""
    with torch.no_grad():
        try:
            return model.state_dict(keep_vars=True)
        except TypeError:  # user code may have overridden it without arguments
            return model.state_dict()


def on_meta(tensor: Tensor) -> Tensor:
    """A plain tensor on the meta device: one of a tensor subclass has another memory layout than its shape says."""
    if is_tensor_subclass(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    with torch._C.DisableTorchFunctionSubclass():  # a copy of a 3-D layer's parameter, say
        return torch.empty_like(tensor, device="meta")


def attributes_on_meta(parameter: Tensor) -> dict[str, Any]:
    """The attributes of a parameter, without the memory of tensors, such as the values of an 8-bit weight."""
    return {name: on_meta(one) if isinstance(one, Tensor) else one for name, one in vars(parameter).items()}


def replace_with_placeholders(model: nn.Module, keep: set[nn.Parameter], buffers_of: Iterable[nn.Module] = ()) -> None:
    """Replace all parameters but those in `keep` by placeholders, and move the buffers of `buffers_of` to meta.

    Placeholders are the same Parameter objects, with their shape, dtype, requires_grad, attributes and ties, so that
    optimizers, parameter groups and state dicts keep the indices and names that they have in a single process.
    """
    placeholders = {
        parameter: restore(Placeholder, on_meta(parameter), parameter.requires_grad, attributes_on_meta(parameter))
        for parameter in model.parameters()
        if parameter not in keep and not isinstance(parameter, Placeholder)
    }
    for parameter, placeholder in placeholders.items():
        exchange(parameter, placeholder)
    for module in buffers_of:
        module._buffers.update({n: b.to("meta") for n, b in module._buffers.items() if b is not None})


def exchange(tensor: Tensor, other: Tensor) -> None:
    """Exchange class, values and attributes of both. So a parameter is replaced wherever code keeps it.

    torch.utils.swap_tensors refuses tensors with weak references, which recurrent layers have to their weights.
    """
    if tensor is not other:
        tensor.__class__, other.__class__ = other.__class__, tensor.__class__
        tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
        torch._C._swap_tensor_impl(tensor, other)
