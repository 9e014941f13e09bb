"""Watches the tensors that training steps change in place: buffers, such as a queue of old features, and parameters.

    buffer       a pipeline changes it once per micro-batch, not once per batch        a warning names it
    counter      a whole number that each micro-batch advances                         a warning names it
                 a cube's ranks run the step on samples of their own: copies differ    an error names it
    parameter    other micro-batches under way would see the change or not             an error names it

Counters and averages of weights are equal on all ranks of a cube. Data ranks take the buffers of data rank 0, as with
DDP. Hooks run on all pipeline ranks, so those above 0 get the buffers that the step on rank 0 has changed.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.module_hooks import check_parameter_hooks
from lightning_hanayo.pipeline_parallel.object_collectives import ReplicatedTensors, broadcast_object
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.versions import hashes_of, identity_of, versions_of


@dataclass(eq=False, repr=False)
class StepState:
    """The buffers and parameters of one rank."""

    modules: Mapping[str, nn.Module]
    """all that run here, by qualified name"""
    parameters: Mapping[str, nn.Parameter]
    """all that this rank holds, by qualified name"""
    compared: Set[nn.Module]
    """the modules whose code runs on samples of each rank's own, on a cube"""
    mesh: Mesh | None
    """the cube; None without one"""
    outside: Mapping[str, nn.Module]
    """the modules outside the stack, which run on pipeline rank 0 alone, by qualified name"""
    pipe_group: dist.ProcessGroup | None
    """the ranks of the pipeline, for CPU tensors; None if there is one"""
    over_data: ReplicatedTensors | None = None
    """gives the buffers to all data ranks; None if there is one"""

    def __post_init__(self) -> None:
        self._places = _places(self.modules)
        self._shareable = _places(self.outside)  # the same on all ranks: some may have them on meta
        self._shared: list[str] | None = None
        """those of them that rank 0 sends after each batch; None before the first one"""
        places = self._places.items()
        self._compared = [name for name, (module, _) in places if self.mesh is not None and module in self.compared]
        self._steps_change = True
        """whether the steps of any data rank change buffers; known after the first batch"""
        self._changing: Set[str] | None = None
        """the buffers that the first batch has changed; None before it"""
        self._versions: dict[str, Any] = {}
        """of the buffers at the end of the last pass through the stack"""
        self._kept_alive: list[Any] = []
        """so that no other tensor takes the id of one that was replaced"""
        self._pass_of: dict[str, int] = {}
        """by buffer: the number of the pass that has changed it"""
        self.warned_of: Set[str] = frozenset()
        """buffers and counters that a warning has named"""

    @contextmanager
    def watched(self, num_microbatches: int, *, is_whole: bool = False) -> Iterator[None]:
        """While a training batch runs. Called by all ranks of the cube, and all data ranks.

        `is_whole`: code outside the stack runs once, on the whole batch.

        Raises:
            UnsupportedError: a parameter has a hook; afterwards a parameter has changed, or a buffer isn't the same on
                all ranks of the cube, or hasn't the same shape on all data ranks.
        """
        if num_microbatches == 1 and self.mesh is None and self.over_data is None and self.pipe_group is None:
            yield  # it may change what it likes, as in one process
            return
        self.update_over_data()
        if num_microbatches > 1 or self.mesh is not None:
            check_parameter_hooks(self.parameters)
        is_first = self._changing is None
        before = self._states(by_value=is_first)
        self._kept_alive = self._buffers()
        self._pass_of.clear()
        self._versions = {name: identity_of(buffer) for name, buffer in self._kept_alive}
        numbers = self._counters() if is_first else {}
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):  # autograd has noticed it, but doesn't name it
                self._check_parameters(self._changed_since(before, by_value=is_first))
            raise
        changed = self._changed_since(before, by_value=is_first)
        self._kept_alive.clear()
        if num_microbatches > 1 or self.mesh is not None:
            may_change = is_whole and self.mesh is None  # a cube shards the parameters outside between batches
            self._check_parameters({name for name in changed if not (may_change and self._is_outside(name))})
        if is_first:
            self._changing = changed
            announced = {name for name, (module, _) in self._places.items() if isinstance(module, _BatchNorm)}
            steps = {name: value - numbers[name] for name, value in self._counters().items() if name in numbers}
            counters = [name for name, step in sorted(steps.items()) if step and step % num_microbatches == 0]
            named = [
                name for name in sorted(changed - announced) + counters if not (is_whole and self._is_outside(name))
            ]
            if num_microbatches > 1 and named:
                self.warned_of = set(named)
                warnings.warn(
                    f"{', '.join(named[:3])}{' ...' if len(named) > 3 else ''}: buffers or counters that training "
                    f"changes in each of a batch's {num_microbatches} micro-batches, and so depends on their number.",
                    stacklevel=2,
                )
        changing = changed | (self._changing or set())
        self._check_alike(changing)
        if self._steps_change:
            self._steps_change = self.update_over_data(changing)
        self._share(changed)

    def update_over_data(self, changed: Set[str] = frozenset()) -> bool:
        """Give all data ranks the buffers of data rank 0 that any of them has changed. Called by all of them.

        `changed` names some that are known to have changed on this rank.

        Returns:
            Whether there are any; False if there is one data rank.
        """
        return self.over_data is not None and self.over_data.update(dict(self._buffers()), changed)

    def end_pass(self, number: int) -> None:
        """Called after each of several passes through the stack, which all micro-batches make one after another.

        Raises:
            UnsupportedError: it has changed a buffer that another pass has changed, too.
        """
        buffers = self._buffers()
        self._kept_alive += buffers
        versions = {name: identity_of(buffer) for name, buffer in buffers}
        changed = [name for name, version in versions.items() if version != self._versions[name]]
        self._versions = versions
        for name in changed:
            if self._pass_of.setdefault(name, number) != number:
                raise UnsupportedError(
                    f"{name} is a buffer that several passes of a step through the stack change, in another order "
                    "than in one process. Call eval() on its module for one, or make one pass."
                )

    def forget(self) -> None:
        """Drop the process groups, after a failure."""
        self.pipe_group = self.over_data = None

    def _share(self, changed: Set[str]) -> None:
        """Give the other pipeline ranks those of rank 0's buffers that the first batch has changed."""
        group = self.pipe_group
        if group is None or not self._shareable or self._shared == []:
            return
        names = self._shared if self._shared is not None else sorted(changed & self._shareable.keys())
        own = {name: module._buffers[key] for name, (module, key) in self._shareable.items() if name in names}
        message = broadcast_object(own, group)
        self._shared = list(message)
        for name, buffer in message.items() if group.rank() > 0 else ():
            module, key = self._shareable[name]
            before = module._buffers[key]
            if buffer is not None and before is not None and not before.is_meta:
                buffer = buffer.to(before.device)
            module._buffers[key] = buffer

    def _is_outside(self, name: str) -> bool:
        """Whether the parameter, buffer or attribute belongs to a module outside the stack."""
        return name.rpartition(".")[0] in self.outside

    def _changed_since(self, before: Mapping[str, Any], *, by_value: bool) -> set[str]:
        return {name for name, state in self._states(by_value=by_value).items() if state != before[name]}

    def _states(self, *, by_value: bool) -> dict[str, Any]:
        """Versions of all tensors; at first checksums of values, too: a change of `.data` makes no new version."""
        states: dict[str, Any] = {name: identity_of(buffer) for name, buffer in self._buffers()}
        states.update(zip(self.parameters, versions_of(self.parameters.values()), strict=True))
        if by_value:
            hashes = self._hashes(states)
            states = {name: (version, hashes[name]) for name, version in states.items()}
        return states

    def _hashes(self, names: Collection[str]) -> dict[str, int]:
        """The hashes of the values of some buffers and parameters; 0 for a buffer that has none here."""
        tensors = {**dict(self._buffers()), **self.parameters}
        found = {name: tensors[name] for name in names}
        here = {name: one for name, one in found.items() if one is not None and not one.is_meta}
        return dict.fromkeys(names, 0) | dict(zip(here, hashes_of(here.values()), strict=True))

    def _counters(self) -> dict[str, int]:
        """Whole numbers that modules have as attributes."""
        return {
            f"{path}.{name}".lstrip("."): value
            for path, module in self.modules.items()
            for name, value in vars(module).items()
            if type(value) is int and not name.startswith("_")
        }

    def _buffers(self) -> list[tuple[str, Tensor | None]]:
        return [(name, module._buffers.get(key)) for name, (module, key) in self._places.items()]

    def _check_parameters(self, changed: Set[str]) -> None:
        for name in self.parameters:
            if name in changed:
                raise UnsupportedError(
                    f"{name} is a parameter that the training step changes in place, while other micro-batches are "
                    f"under way. Change it once per batch, in on_train_batch_start or on_train_batch_end."
                )

    def _check_alike(self, names: Set[str]) -> None:
        if self.mesh is None or not self._compared:
            return
        hashes = self._hashes([name for name in self._compared if name in names])
        own = [hashes.get(name, 0) for name in self._compared]
        largest = self.mesh.largest([*own, *(-one for one in own)])
        negated_smallest = largest[len(own) :]
        rows = zip(self._compared, largest, negated_smallest, strict=False)
        differing = [name for name, highest, negated_lowest in rows if highest != -negated_lowest]
        inside = [name for name in differing if name not in self._shareable]
        way_out = (
            "Set HanayoStrategy(cube_outside='replicate'), where all ranks run code outside the stack on all samples"
        )
        if inside:
            way_out = "Blocks in a cube can't change buffers by their samples: leave that out, or the cube"
        for name in inside or differing:
            raise UnsupportedError(
                f"{name} is a buffer that the training step changes, and each rank of the cube runs it on its own "
                f"samples, so that the ranks' values differ now. {way_out}."
            )


def _places(modules: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Module, str]]:
    """Where each buffer is, by its qualified name."""
    return {
        f"{path}.{name}".lstrip("."): (module, name)
        for path, module in modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
