"""Carrying attributes between a step on rank 0, with block 0, and blocks 1 and 2 on rank 1.

rank 0    step 0 |leave|  step 1 |leave|     |deliver| step 0 |end|     |deliver| step 1 |end|
rank 1                           running 0                   running 1
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.carriers import BlockRun
from lightning_hanayo.pipeline_parallel.capture.state import ModuleState
from lightning_hanayo.pipeline_parallel.capture.state_carrier import StateCarrier
from lightning_hanayo.pipeline_parallel.pytree import Flattener, unflatten


class Box:
    level: Any = 0.0


class Block(nn.Module):
    def __init__(self, box: Box) -> None:
        super().__init__()
        self.box = box
        self.calls = 0
        self.activation = nn.Identity()
        self.register_buffer("sigma", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.aux = x.mean() * self.box.level
        return x


class Keeper(Block):
    """Keeps its weight in a dictionary beside a number, and what can't be sent in each forward."""

    def __init__(self, box: Box) -> None:
        super().__init__(box)
        self.weight = nn.Parameter(torch.ones(2))
        self.kept = {"weight": self.weight, "factor": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        self.last = [self.weight]
        self.function = print
        self.seen = float((self.kept["factor"] * self.kept["weight"]).detach()[0])
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.box = Box()
        self.layers = nn.ModuleList(kind(self.box) for _ in range(3))
        self.phase = 0
        self.results: list[Any] = []


class Rank:
    """One rank's model and carrier."""

    def __init__(self, own: set[int], num_local: int | None, kind: type[Block] = Block, **options: Any) -> None:
        self.model = Model(kind)
        self.blocks = list(self.model.layers)
        state = ModuleState(self.model, self.blocks, "layers")
        self.carrier = StateCarrier(state, self.blocks, own, **options)
        if num_local is not None:
            self.carrier.begin_batch(num_local)

    def leave(self) -> tuple[Any, Any]:
        tree, left = self.carrier.leave(None)
        return sent(tree), left

    def run(self, tree: Any, *indices: int) -> Any:
        with self.running(tree, *indices) as result:
            for index in indices:
                self.blocks[index](torch.ones(2))
        return sent(result[0])

    @contextmanager
    def running(self, tree: Any, *indices: int) -> Iterator[list[Any]]:
        """These blocks run; the list holds the tree for the next stage at the end."""
        run, result = BlockRun([self.blocks[i] for i in indices], is_last=True), []
        begun = self.carrier.begin_blocks(tree, run)
        yield result
        result.append(self.carrier.end_blocks(tree, run, begun))


def sent(tree: Any) -> Any:
    """What arrives."""
    flattener = Flattener()
    skeleton = flattener.flatten(tree)
    return unflatten(skeleton, [tensor.clone() for tensor in flattener.tensors])


@pytest.fixture
def ranks() -> SimpleNamespace:
    made = SimpleNamespace(first=Rank({0}, 1), second=Rank({1, 2}, None))
    made.first.carrier.begin_batch(1)
    return made


def test_nothing_travels_where_nothing_is_set(ranks: SimpleNamespace) -> None:
    assert ranks.first.leave()[0] is None


def test_the_step_sets_what_blocks_elsewhere_read(ranks: SimpleNamespace) -> None:
    ranks.first.model.box.level = 0.5
    tree, _ = ranks.first.leave()
    ranks.second.run(tree, 1)
    assert ranks.second.blocks[1].aux == 0.5


def test_the_step_reads_what_blocks_elsewhere_have_set(ranks: SimpleNamespace) -> None:
    ranks.first.model.box.level = 2.0
    tree, left = ranks.first.leave()
    tree = ranks.second.run(tree, 1, 2)
    ranks.first.carrier.deliver(tree, left)
    assert [block.aux for block in ranks.first.blocks[1:]] == [2, 2]
    assert [block.calls for block in ranks.first.blocks] == [0, 1, 1]


def test_each_micro_batch_has_its_own_values(ranks: SimpleNamespace) -> None:
    model, carrier, suspended = ranks.first.model, ranks.first.carrier, []
    for level in (1.0, 2.0, 3.0):
        carrier.enter()
        model.box.level = level
        suspended.append(ranks.first.leave())
    for number, (tree, left) in enumerate(suspended):
        tree = ranks.second.run(tree, 1, 2)
        carrier.enter()
        delivered = carrier.deliver(tree, left)
        assert model.box.level == model.layers[2].aux == number + 1
        carrier.end(delivered)
        assert model.box.level == 3.0, "the latest step's value is restored"


def test_a_value_that_later_steps_only_read_is_theirs_too(ranks: SimpleNamespace) -> None:
    model, carrier = ranks.first.model, ranks.first.carrier
    model.box.level = 1.0
    second = ranks.first.leave()
    carrier.enter()
    third = ranks.first.leave()
    levels = [ranks.second.run(tree, 1) and ranks.second.blocks[1].aux for tree, _ in (second, third)]
    assert levels == [1.0, 1.0]


def test_a_blocks_own_parameters_travel_by_name_and_are_no_state() -> None:
    ranks = SimpleNamespace(first=Rank({0, 2}, 1, Keeper), second=Rank({1}, None, Keeper))
    carrier, own = ranks.first.carrier, ranks.second.blocks[1]
    with torch.no_grad():
        own.weight.fill_(3.0)  # another rank's values
        ranks.first.blocks[1].weight.mul_(2.0)  # what an optimizer does
    carrier.begin_batch(1)
    assert ranks.first.leave()[0] is None
    carrier.enter()
    for block in ranks.first.blocks:
        block.kept["factor"] = 0.5
    tree, left = ranks.first.leave()
    tree = ranks.first.run(ranks.second.run(tree, 1), 2)
    assert own.seen == 1.5 and own.kept["weight"] is own.weight and own.last[0] is own.weight
    delivered = carrier.deliver(tree, left)
    assert all(block.last[0] is block.weight for block in ranks.first.blocks[1:])
    with pytest.raises(UnsupportedError, match="function was set by a block"):
        ranks.first.blocks[2].function()
    carrier.end(delivered)
    assert ranks.first.blocks[2].function is print, "the step got copies; the block goes on with its own"


def test_a_later_stage_leaves_what_blocks_of_an_earlier_one_have_set() -> None:
    first, second = Rank({0}, 1, Keeper), Rank({1, 2}, None, Keeper)
    first.carrier.begin_batch(1)
    trees = [second.run(first.leave()[0], 1) for _ in range(2)]
    for tree in trees:
        second.run(tree, 2)
        assert second.blocks[1].calls == 2 and second.blocks[1].function is print


def test_what_a_step_sets_at_its_end_stays_and_travels_with_the_next(ranks: SimpleNamespace) -> None:
    model, carrier = ranks.first.model, ranks.first.carrier
    delivered = carrier.deliver(*ranks.first.leave())
    model.layers[2].train(False)
    carrier.end(delivered)
    carrier.begin_batch(1)
    ranks.second.run(ranks.first.leave()[0], 2)
    assert not ranks.second.blocks[2].training


def test_counters_of_blocks_go_on(ranks: SimpleNamespace) -> None:
    for expected in (1, 2, 3):
        ranks.first.carrier.enter()
        tree, left = ranks.first.leave()
        tree = ranks.second.run(tree, 1)
        ranks.first.carrier.end(ranks.first.carrier.deliver(tree, left))
        assert ranks.second.blocks[1].calls == ranks.first.blocks[1].calls == expected


def test_what_steps_collect_after_the_blocks_is_not_lost(ranks: SimpleNamespace) -> None:
    model, carrier = ranks.first.model, ranks.first.carrier
    first, second = ranks.first.leave(), ranks.first.leave()
    for number, suspended in enumerate((first, second)):
        carrier.enter()
        delivered = carrier.deliver(*suspended)
        model.results.append(number)
        carrier.end(delivered)
        if number == 0:
            third = ranks.first.leave()
    carrier.deliver(*third)
    assert model.results == [0, 1]


def test_what_is_collected_before_and_after_the_blocks_is_rejected(ranks: SimpleNamespace) -> None:
    model, carrier = ranks.first.model, ranks.first.carrier
    model.results.append("before")
    first, _ = ranks.first.leave(), ranks.first.leave()
    delivered = carrier.deliver(*first)
    model.results.append("after")
    with pytest.raises(UnsupportedError, match="Model.results is changed in the step before the blocks"):
        carrier.end(delivered)


def test_a_counter_that_is_changed_before_and_after_the_blocks_is_rejected(ranks: SimpleNamespace) -> None:
    model, carrier, suspended = ranks.first.model, ranks.first.carrier, []
    for _ in range(2):
        model.phase += 1
        suspended.append(ranks.first.leave())
    delivered = carrier.deliver(*suspended[0])
    model.phase += 1
    with pytest.raises(UnsupportedError, match="Model.phase is changed in the step before the blocks"):
        carrier.end(delivered)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.layers[1], "function", torch.relu), r"layers\[1\].function .* can't be sent"),
        (lambda model: model.layers[1].sigma.fill_(2), r"layers\[1\].sigma was set in the step to other values in pl"),
        (lambda model: setattr(model.box, "level", torch.empty((), device="meta")), "is on another pipeline rank"),
    ],
    ids=["a function", "a buffer in place", "a placeholder"],
)
def test_what_cannot_travel_to_a_block_is_rejected(ranks: SimpleNamespace, change: Any, message: str) -> None:
    change(ranks.first.model)
    with pytest.raises(UnsupportedError, match=message):
        ranks.first.leave()


def test_what_cannot_travel_to_the_step_is_rejected_when_it_is_read(ranks: SimpleNamespace) -> None:
    with ranks.second.running(None, 1) as result:
        ranks.second.blocks[1].cache = object()
    ranks.first.carrier.deliver(sent(result[0]), ranks.first.leave()[1])
    with pytest.raises(UnsupportedError, match=r"layers\[1\].cache was set by a block to a builtins.object"):
        _ = ranks.first.blocks[1].cache + 1


def test_tensors_do_not_cross_where_ranks_of_a_cube_see_other_parts() -> None:
    rank = Rank({0}, 0, has_tensors=False)
    rank.model.box.level = 0.5
    assert list(rank.leave()[0].values()) == [("value", 0.5)]
    rank.model.box.level = torch.ones(())
    with pytest.raises(UnsupportedError, match="other parts of the samples"):
        rank.leave()


def test_numbers_travel_as_tensors_so_that_messages_keep_their_structure(ranks: SimpleNamespace) -> None:
    skeletons = []
    for level in (0.1, 0.2):
        ranks.first.model.box.level = level
        flattener = Flattener()
        skeletons.append(flattener.flatten(ranks.first.leave()[0]))
    assert skeletons[0] == skeletons[1]


def test_gradients_flow_through_what_is_carried(ranks: SimpleNamespace) -> None:
    level = torch.ones((), requires_grad=True)
    ranks.first.model.box.level = level * 3
    tree, left = ranks.first.carrier.leave(None)
    with ranks.second.running(tree, 2) as result:
        ranks.second.blocks[2](torch.ones(2))
    ranks.first.carrier.deliver(result[0], left)
    ranks.first.blocks[2].aux.backward()
    assert level.grad == 3


class Adding(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.box.level = self.box.level + 1
        return x


def test_blocks_elsewhere_add_to_what_each_step_has_reset(ranks: SimpleNamespace) -> None:
    model, carrier, suspended = ranks.first.model, ranks.first.carrier, []
    ranks.second.blocks[1].forward = Adding.forward.__get__(ranks.second.blocks[1])
    for _ in range(3):
        carrier.enter()
        model.box.level = 0.0  # as it is already: nothing changes
        suspended.append(ranks.first.leave())
    for tree, left in suspended:
        tree = ranks.second.run(tree, 1)
        carrier.enter()
        delivered = carrier.deliver(tree, left)
        assert model.box.level == 1.0
        carrier.end(delivered)


def test_a_value_of_shared_state_that_can_t_be_sent_fails_where_it_is_read(ranks: SimpleNamespace) -> None:
    carrier = ranks.first.carrier
    tree, left = ranks.first.leave()
    with ranks.second.running(tree, 1, 2) as result:
        ranks.second.model.box.level = object()
    carrier.end(carrier.deliver(sent(result[0]), left))
    tree, _ = ranks.first.leave()
    with pytest.raises(UnsupportedError, match="was set by a block to a builtins.object"):
        ranks.second.run(tree, 1)


def test_a_dictionary_made_once_and_filled_by_each_step_has_each_steps_values(ranks: SimpleNamespace) -> None:
    model, carrier, suspended = ranks.first.model, ranks.first.carrier, []
    model.state = None
    carrier.begin_batch(1)
    for number in range(3):
        carrier.enter()
        if model.state is None:
            model.state = {}
        model.state["aux"] = number
        suspended.append(ranks.first.leave())
    for number, (tree, left) in enumerate(suspended):
        delivered = carrier.deliver(tree, left)
        assert model.state == {"aux": number}
        carrier.end(delivered)
        assert model.state == {"aux": 2}


def test_a_list_that_each_step_makes_keeps_what_it_collects(ranks: SimpleNamespace) -> None:
    model, carrier, suspended = ranks.first.model, ranks.first.carrier, []
    for number in range(3):
        carrier.enter()
        model.parts = [number]
        suspended.append(ranks.first.leave())
    for number, (tree, left) in enumerate(suspended):
        delivered = carrier.deliver(tree, left)
        model.parts.append("late")
        assert model.parts == [number, "late"]
        carrier.end(delivered)
    assert model.parts == [2, "late"]


def test_a_module_that_the_step_replaces_in_a_block_is_rejected(ranks: SimpleNamespace) -> None:
    ranks.first.model.layers[1].activation = nn.Tanh()
    with pytest.raises(UnsupportedError, match=r"layers\[1\].children was set in the step to another module"):
        ranks.first.leave()


def test_one_value_that_cannot_travel_leaves_the_others_of_a_dictionary(ranks: SimpleNamespace) -> None:
    for rank in (ranks.first, ranks.second):
        rank.blocks[1].stats = {}
        rank.carrier.begin_batch(1)
    with ranks.second.running(None, 1) as result:
        ranks.second.blocks[1].stats.update(mean=0.5, cache=object())
    ranks.first.carrier.deliver(sent(result[0]), ranks.first.leave()[1])
    assert ranks.first.blocks[1].stats["mean"] == 0.5
    with pytest.raises(UnsupportedError, match="was set by a block to a builtins.object"):
        bool(ranks.first.blocks[1].stats["cache"])


def leave_again(rank: Rank, delivered: Any) -> tuple[Any, Any]:
    """The step is suspended in a further pass."""
    tree, left = rank.carrier.leave(delivered)
    return sent(tree), left


def test_a_further_pass_brings_what_was_set_before_the_first_one(ranks: SimpleNamespace) -> None:
    carrier = ranks.first.carrier
    ranks.first.model.box.level = 2.0
    tree, left = ranks.first.leave()
    delivered = carrier.deliver(ranks.second.run(tree, 1), left)
    tree, _ = leave_again(ranks.first, delivered)
    ranks.second.run(tree, 2)
    assert ranks.second.blocks[2].aux == 2.0


def test_the_training_mode_of_one_pass_is_seen_by_no_other_step(ranks: SimpleNamespace) -> None:
    """Two steps, of which each makes a pass in evaluation mode between `eval()` and `train()`, and then another one."""
    model, carrier, suspended = ranks.first.model, ranks.first.carrier, []
    for _ in range(2):
        carrier.enter()
        assert model.training and model.layers[1].training
        model.eval()
        suspended.append(ranks.first.leave())
    modes = []
    for number in range(4):
        tree, left = suspended.pop(0)
        modes.append(in_which_mode(ranks.second, tree))
        carrier.enter()
        delivered = carrier.deliver(tree, left)
        assert model.training is (number > 1)
        model.train()
        if number > 1:
            carrier.end(delivered)
        else:
            suspended.append(leave_again(ranks.first, delivered))
    assert modes == [False, False, True, True]
    assert model.training and ranks.second.blocks[1].training


def in_which_mode(rank: Rank, tree: Any) -> bool:
    with rank.running(tree, 1):
        return bool(rank.blocks[1].training)


@pytest.mark.parametrize("change", ["number", "flag", "buffer"])
def test_what_two_parts_of_a_step_with_several_passes_change_is_rejected(ranks: SimpleNamespace, change: str) -> None:
    model, carrier = ranks.first.model, ranks.first.carrier
    model.flag = False
    carrier.begin_batch(1)

    def changes() -> None:
        match change:
            case "number":
                model.phase += 1
            case "flag":
                model.flag = not model.flag
            case "buffer":
                ranks.first.blocks[0].sigma.add_(1)

    changes()
    first, _ = ranks.first.leave(), ranks.first.leave()
    delivered = carrier.deliver(*first)
    changes()
    with pytest.raises(UnsupportedError, match="is changed in the step before the blocks are called and again after"):
        carrier.leave(delivered)


def test_another_parameter_in_a_module_is_refused_while_the_stack_is_called() -> None:
    rank = Rank({0}, 1, Keeper)
    parameters = rank.blocks[0]._parameters
    parameters["weight"] = nn.Parameter(torch.zeros(2))  # a hook may do so between batches
    rank.carrier.begin_batch(1)
    assert rank.leave()[0] is None
    parameters["weight"] = torch.ones(2)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"layers\[0\].weight is replaced while the stack .*functional_call"):
        rank.leave()
