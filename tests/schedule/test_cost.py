"""Costs of actions."""

from typing import Any

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, CostModel, build, simulate, with_loss_stage

COSTS = CostModel(forward=1.0, backward_input=2.0, backward_weight=3.0, message=0.5, gradient_reduce=8.0)


@pytest.mark.parametrize(
    ("action", "cost"),
    [
        ("0F0", 0.25),
        ("0I0", 0.5),
        ("0W0", 0.75),
        ("0B0", 1.25),
        ("0REDUCE_GRAD", 2.0),
        ("0SEND_F0", 0.5),
        ("1RECV_F0", 0.5),
    ],
)
def test_a_stage_takes_its_part_of_a_ranks_share(action: str, cost: float) -> None:
    schedule = build("hanayo", num_ranks=2, num_microbatches=2, num_waves=2)
    assert COSTS.of(schedule, Action.parse(action)) == cost


def test_a_tuple_gives_each_stages_own_time() -> None:
    schedule = build("hanayo", num_ranks=1, num_microbatches=1)
    costs = CostModel(forward=(1.0, 3.0), backward_input=(2.0, 0.0), backward_weight=0.5, message=(0.1,) * 2)
    assert [costs.of(schedule, Action.parse(cell)) for cell in ("0F0", "1F0", "0B0", "1B0", "1SEND_B0")] == [
        1,
        3,
        2.25,
        0.25,
        0.1,
    ]


def test_the_loss_stage_is_free_by_default() -> None:
    schedule = with_loss_stage(build("1f1b", num_ranks=2, num_microbatches=2))
    loss = Action.parse("2F0")
    assert COSTS.of(schedule, Action.parse("0F0")) == 1.0
    assert COSTS.of(schedule, loss) == 0.0
    assert CostModel(forward=(1.0, 1.0)).of(schedule, loss) == 0.0
    assert CostModel(forward=(1.0, 1.0, 0.5)).of(schedule, loss) == 0.5


def test_a_hop_between_nodes() -> None:
    r"""Two ranks per node, a zig-zag, and a loop that jumps back from rank 3 to rank 0.

    node 0   0 1           6 7        0 1 | 4 5
    node 1       2 3   4 5            2 3 | 6 7
    """
    costs = CostModel(message=0.1, message_between_nodes=0.5, ranks_per_node=2)
    wave = build("hanayo", num_ranks=4, num_microbatches=4)
    assert [costs.hop(wave, stage) for stage in range(7)] == [0.1, 0.5, 0.1, 0.1, 0.1, 0.5, 0.1]
    loop = build("interleaved", num_ranks=4, num_microbatches=4, num_stages_per_rank=2)
    assert [costs.hop(loop, stage) for stage in range(7)] == [0.1, 0.5, 0.1, 0.5, 0.1, 0.5, 0.1]
    assert costs.of(loop, Action.parse("4RECV_F0")) == costs.of(loop, Action.parse("4SEND_B0")) == 0.5


@pytest.mark.parametrize(
    "costs",
    [
        {"message_between_nodes": 0.5},
        {"ranks_per_node": 2},
        {"message_between_nodes": 0.5, "ranks_per_node": 0},
        {"message_between_nodes": 0.5, "ranks_per_node": 2.0},
        {"message_between_nodes": (0.5,), "ranks_per_node": 2},
        {"message_between_nodes": 0.5, "ranks_per_node": 2, "message": (0.1, 0.1)},
    ],
)
def test_hops_by_node_need_all_three_numbers(costs: dict[str, Any]) -> None:
    with pytest.raises(HanayoError, match=r"message_between_nodes=.* hops by node need all three, as numbers"):
        CostModel(**costs)


def test_each_action_takes_the_hosts_time_besides() -> None:
    """A whole backward is one action; a message and a reduction are none."""
    costs = CostModel(1.0, 2.0, 3.0, message=0.5, per_action=0.25)
    wave = build("hanayo", num_ranks=2, num_microbatches=2, num_waves=2)  # four stages per rank
    kinds = [costs.of(wave, Action.parse(cell)) for cell in ("1F0", "1I0", "1W0", "1B0", "1SEND_F0")]
    assert kinds == [0.25 + 0.25, 0.5 + 0.25, 0.75 + 0.25, 1.25 + 0.25, 0.5]
    assert costs.of(wave, Action.parse("1REDUCE_GRAD")) == 0.0
    assert costs.scaled(2.0).per_action == 0.5 and costs.merged(4).per_action == 0.25
    with pytest.raises(HanayoError, match=r"per_action=\(0.1, 0.2\); expected one number"):
        CostModel(per_action=(0.1, 0.2))  # type: ignore[arg-type]


@pytest.mark.parametrize(("per_action", "waves"), [(0.0, 2), (0.02, 1)])
def test_fewer_waves_are_faster_where_actions_take_the_hosts_time(per_action: float, waves: int) -> None:
    """With the costs of the benchmark on two cores: 20 ms forwards, messages of 0.8 ms, 0.4 ms per action."""
    costs = CostModel(message=0.04, per_action=per_action)
    chosen = build("hanayo-zb", num_ranks=4, num_microbatches=8, num_waves="auto", costs=costs)
    assert chosen.num_stages == 8 * waves


@pytest.mark.parametrize(
    "value", [-1.0, (), (1.0, -1.0), float("nan"), None, float("inf"), (1.0, float("inf")), "1", ("1", "2"), "12", True]
)
def test_a_cost_is_no_negative_number(value: object) -> None:
    with pytest.raises(HanayoError, match="a cost is a finite number of at least 0, or one per stage"):
        CostModel(forward=value)  # type: ignore[arg-type]


def test_a_list_becomes_a_tuple() -> None:
    costs = CostModel(forward=[1.0, 3.0], message=[0.5])  # type: ignore[arg-type]
    assert costs == CostModel(forward=(1.0, 3.0), message=(0.5,))
    assert hash(costs)
    assert simulate(build("gpipe", num_ranks=2, num_microbatches=1), costs).makespan == 4 + 4 + 2 * 0.5


@pytest.mark.parametrize("name", ["1f1b", "hanayo"])
def test_messages_may_be_one_per_pair_of_neighbouring_stages(name: str) -> None:
    schedule = build(name, num_ranks=2, num_microbatches=2)
    borders = tuple(0.1 * (1 + stage) for stage in range(schedule.num_stages - 1))
    assert simulate(schedule, CostModel(message=borders)) == simulate(schedule, CostModel(message=(*borders, 9.0)))
    assert build(name, num_ranks=2, num_microbatches=2, costs=CostModel(message=borders)).num_ranks == 2


def test_the_message_to_the_loss_stage() -> None:
    schedule = with_loss_stage(build("1f1b", num_ranks=3, num_microbatches=2))
    hops = [[CostModel(message=given).hop(schedule, s) for s in range(3)] for given in ((1.0, 2.0), (1.0, 2.0, 3.0))]
    assert hops == [[1, 2, 0], [1, 2, 3]]


def test_a_tuple_of_the_wrong_length() -> None:
    with pytest.raises(HanayoError, match="forward has 3 values, schedule '1f1b' 2 stages"):
        simulate(build("1f1b", num_ranks=2, num_microbatches=2), CostModel(forward=(1.0, 1.0, 1.0)))
