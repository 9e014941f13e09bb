"""The stage input: all that a stage gets for one micro-batch, and the message that carries it between ranks.

    output_skeleton    the output of the block before                       a tree
    calls              the distinct calls of the blocks still to come       (args, kwargs), with proxies for that output
    call_of_block      for each block still to come, and each function between them, the index of its call
    sequence_lengths   of the whole sequences; none if no block uses them
    returned           where the step finds values in the outputs of the blocks still to come, and not None
    carried            values that the step and earlier blocks leave for others: a tree for each carrier

A mask that all blocks get is one tensor in one call. Gemma's two kinds of masks are two calls. A skip connection is a
proxy for the output of an earlier block, and becomes that output once the block's stage has run:

    block 3's call      (proxy 0, proxy 2)   proxies by the number of blocks in between: the outputs of 2 and 0
    after block 1       (proxy 0, tensor 5)
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel import pytree
from lightning_hanayo.pipeline_parallel.capture import code_between_blocks
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, BlockRun, Carriers
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import subtree
from lightning_hanayo.pipeline_parallel.capture.forward_patch import begin_code_before
from lightning_hanayo.pipeline_parallel.p2p import Message

NO_OUTPUT: pytree.Skeleton = pytree.NONE
_UNCHECKED = nullcontext()


class StageInput(NamedTuple):
    """The output of the block before, and the calls of the blocks still to come; all share one list of tensors."""

    output_skeleton: pytree.Skeleton
    calls: tuple[pytree.Skeleton, ...]
    call_of_block: tuple[int, ...]
    sequence_lengths: tuple[int, ...] = ()
    returned: pytree.Paths = pytree.ANYWHERE
    carried: pytree.Skeleton = ("tuple",)
    tensors: tuple[Tensor, ...] = ()

    @staticmethod
    def from_message(message: Message) -> "StageInput":
        """Read the stage input in `message`."""
        return StageInput._make((*message.skeleton, message.tensors))

    @property
    def message(self) -> Message:
        """The stage input as a message, with the tensors that are still used, each once."""
        skeleton, used = _used(*self[:-1])
        return Message(skeleton, tuple([self.tensors[index] for index in used]))

    @property
    def output(self) -> Any:
        """The output of the block before, as a tree; after the last block, the output of the stack."""
        return pytree.unflatten(self.output_skeleton, self.tensors)

    @property
    def trees(self) -> tuple[Any, ...]:
        """The carried trees."""
        return pytree.unflatten(self.carried, self.tensors)  # type: ignore[no-any-return]

    @property
    def num_blocks(self) -> int:
        """The number of blocks still to come."""
        blocks = [is_block(call) for call in self.calls]
        return sum([blocks[call] for call in self.call_of_block])

    def run(
        self, blocks: Sequence[nn.Module], carriers: Carriers = NO_CARRIERS, *, is_last: bool | None = None
    ) -> "StageInput":
        """Run the next `blocks` of the stack, and return the input of the stage after them.

        `is_last` says whether the stack ends with them; None: it does if there are no further calls.

        Raises:
            UnsupportedError: a block returns a value that the step would miss, or changes one of its arguments.
        """
        if not blocks:
            return self
        waiting = [self.calls[call] for call in self.call_of_block]
        run = BlockRun(blocks, len(blocks) == self.num_blocks if is_last is None else is_last)
        trees, outputs, shared = self.trees, [self.output], _SharedDictionaries(self.calls, run)
        begun = [carrier.begin_blocks(tree, run) for carrier, tree in zip(carriers, trees, strict=True)]
        calls = iter(waiting)
        try:
            for block in blocks:
                call = next(calls)
                if not is_block(call):
                    begin_code_before(block)
                    while not is_block(call):
                        outputs.append(self._run_function(call, outputs))
                        call = next(calls)
                args, kwargs = pytree.unflatten(call, self.tensors, partial(_output, outputs), shared)
                watch = shared.watch(block, (*args, *kwargs.values()), outputs) if _changeable(call) else None
                with watch or _UNCHECKED:
                    outputs.append(block(*args, **kwargs))
                if self.returned == pytree.ANYWHERE or run.is_last and block is blocks[-1]:
                    continue
                if part := pytree.hidden_part(self.returned, outputs[-1], "output"):
                    raise UnsupportedError(
                        f"a {type(block).__name__} of the stack returns a value ({part}) where the first stage's last "
                        f"block returns None. Return a tensor always, or set an attribute (self.value = ...)."
                    )
        except BaseException:
            for carrier, own in zip(carriers, begun, strict=True):
                carrier.abandon_blocks(own)
            raise
        run.output = outputs[-1]
        outputs += [self._run_function(call, outputs) for call in calls if run.is_last]
        rows = zip(carriers, trees, begun, strict=True)
        trees = tuple([carrier.end_blocks(tree, run, own) for carrier, tree, own in rows])
        return self.after(outputs, len(outputs) - 1, trees)

    def _run_function(self, call: pytree.Skeleton, outputs: Sequence[Any]) -> Any:
        return code_between_blocks.run(*pytree.unflatten(call, self.tensors, partial(_output, outputs)))

    def after(self, outputs: Sequence[Any], num_calls: int, trees: tuple[Any, ...]) -> "StageInput":
        """The input of the stage after the next `num_calls`, which have returned the last of these `outputs`."""
        flattener = pytree.Flattener()
        skeleton = flattener.flatten(outputs[-1], "the output of a block")
        carried = flattener.flatten(trees, "what a block stores")
        remaining = self.call_of_block[num_calls:]
        skipping = {
            leaf: flattener.flatten(_output(outputs, leaf[2], leaf[1]), "the output of a block")
            for leaf in _ending(self.calls, remaining)
        }
        calls, call_of_block = _remaining(self.calls, remaining, len(flattener.tensors), tuple(skipping.items()))
        tensors = (*flattener.tensors, *self.tensors)
        return StageInput(skeleton, calls, call_of_block, self.sequence_lengths, self.returned, carried, tensors)


def _output(outputs: Sequence[Any], path: tuple[Any, ...], distance: int) -> Any:
    """The part at `path` of an output, by the number of outputs after it."""
    return subtree(outputs[-1 - distance], path)


def is_block(call: pytree.Skeleton) -> bool:
    """Whether it is the call of a block: that of a function has its name, too."""
    return len(call) == 3


class _SharedDictionaries:
    """The dictionaries that the blocks of a stage get, each one object for all blocks, with what blocks put into them.

    A dictionary that the step has changed from call to call is made anew for each, as are lists, and blocks must leave
    it as it is. `run` has what blocks of earlier stages have put in, by number, and takes what these blocks do.
    """

    def __init__(self, calls: tuple[pytree.Skeleton, ...], run: BlockRun) -> None:
        self._calls = calls
        self._run = run
        self._made: dict[int, dict[Any, Any]] = {}

    def __call__(self, number: int, make: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        """The dictionary of this number."""
        if number not in _same_in_all(self._calls):
            return make()
        if number not in self._made:
            self._made[number] = make() | self._run.filled.get(number, {})
        return self._made[number]

    @contextmanager
    def watch(self, block: nn.Module, arguments: tuple[Any, ...], outputs: Sequence[Any]) -> Iterator[None]:
        """Note what the block puts into these dictionaries. It may change outputs of other blocks among its arguments.

        Raises:
            UnsupportedError: it changes others, takes something out, or changes a list or a variable of a function.
        """
        of_blocks = {id(found) for found in pytree.containers(outputs)}
        given = [found for value in arguments for found in pytree.containers(value) if id(found) not in of_blocks]
        before = [(found, _contents(found)) for found in given]
        yield
        numbers = {id(made): number for number, made in self._made.items()}
        for found, old in before:
            now = _contents(found)
            new = {key: value for key, value in now.items() if key not in old or old[key] is not value}
            if id(found) in numbers and old.keys() <= now.keys():
                if new:
                    self._run.filled.setdefault(numbers[id(found)], {}).update(new)
            elif new or len(now) != len(old):
                shown = f"variable of {found.__qualname__}" if isinstance(found, FunctionType) else type(found).__name__
                raise UnsupportedError(
                    f"a {type(block).__name__} of the stack changes a {shown} that it gets as an argument, which other "
                    f"ranks wouldn't see. It may add to a dictionary that the step leaves as it is (in a cube or with "
                    f"step='batch' not the first block), return what it adds, or set an attribute of the block."
                )


@lru_cache(maxsize=256)
def _same_in_all(calls: tuple[pytree.Skeleton, ...]) -> frozenset[int]:
    """The numbers of the dictionaries that have the same content in all calls."""
    found = {node for call in calls for node in pytree.nodes(call) if node[0] == "shared"}
    times = Counter(number for _, number, _ in found)
    return frozenset(number for number in times if times[number] == 1)


@lru_cache(maxsize=256)
def _changeable(call: pytree.Skeleton) -> bool:
    """Whether a block gets something that it might change."""
    _, (_, *args), (_, *kwargs) = call
    parts = [*args, *(value for _, value in kwargs)]
    return any(node[0] in ("list", "dict") for part in parts for node in pytree.nodes(part))


def _contents(found: Any) -> dict[Any, Any]:
    """The objects in a container, or that a function refers to."""
    if isinstance(found, FunctionType):
        return dict(enumerate(pytree.values_of(found)))
    return dict(found) if isinstance(found, dict) else dict(enumerate(found))


def carried_of(message: Message) -> pytree.Skeleton:
    """The carried trees in a stage input's message."""
    return message.skeleton[-1]  # type: ignore[no-any-return]


# The following depends on the structure alone, which is the same for all micro-batches: it is computed once.


@lru_cache(maxsize=256)
def _used(
    output: pytree.Skeleton,
    calls: tuple[pytree.Skeleton, ...],
    call_of_block: tuple[int, ...],
    sequence_lengths: tuple[int, ...],
    returned: pytree.Paths,
    carried: pytree.Skeleton,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The skeleton of a message with only the tensors that are used, and their indices."""
    trees = (output, *calls, carried)
    used = tuple(dict.fromkeys(index for tree in trees for index in pytree.tensor_indices(tree)))
    new = {index: i for i, index in enumerate(used)}
    output, *own_calls, carried = (pytree.renumber(tree, new) for tree in trees)
    return (output, tuple(own_calls), call_of_block, sequence_lengths, returned, carried), used


@lru_cache(maxsize=256)
def _remaining(
    calls: tuple[pytree.Skeleton, ...],
    call_of_block: tuple[int, ...],
    num_new: int,
    skipping: tuple[tuple[pytree.Skeleton, pytree.Skeleton], ...],
) -> tuple[tuple[pytree.Skeleton, ...], tuple[int, ...]]:
    """The calls of the blocks still to come, in a list of tensors that begins with `num_new` more.

    `skipping` are the outputs, by their proxies at the end of the stage, that these blocks get past others.
    """
    outputs = dict(skipping)

    def change(position: int, leaf: pytree.Skeleton) -> pytree.Skeleton:
        if leaf[0] == "tensor":
            return ("tensor", num_new + leaf[1])
        return outputs.get(_at_end(leaf, position), leaf)

    changed = [pytree.map_leaves(calls[call], partial(change, position)) for position, call in enumerate(call_of_block)]
    kept = list(dict.fromkeys(changed))
    return tuple(kept), tuple(kept.index(call) for call in changed)


@lru_cache(maxsize=256)
def _ending(calls: tuple[pytree.Skeleton, ...], call_of_block: tuple[int, ...]) -> tuple[pytree.Skeleton, ...]:
    """The proxies, as at the end of the stage, whose blocks have run, without the output that the next block gets."""
    return tuple(dict.fromkeys(
        _at_end(leaf, position)
        for position, call in enumerate(call_of_block)
        for leaf in pytree.nodes(calls[call])
        if leaf[0] == "proxy" and leaf[1] >= max(position, 1)
    ))  # fmt: skip


def _at_end(leaf: pytree.Skeleton, position: int) -> pytree.Skeleton:
    """A proxy in the call of the block at this `position` behind a stage, by its distance from the end of the stage."""
    return ("proxy", leaf[1] - position, leaf[2])
