"""What rules count, and which ones a batch tells of."""

import torch

from lightning_hanayo.strategy.probing.comparison import (
    EACH,
    SAMPLES,
    Rule,
    Weighed,
    are_close,
    named_tensors,
    possible_rules,
)
from lightning_hanayo.strategy.probing.step_choice import REFUTED, Candidates

LABELS = torch.tensor([[3, 7, -100, -100], [5, 2, 9, 4]])
PIECES = [{"labels": one, "mask": (one > 0).float()} for one in LABELS.split(1)]
NAMED = [named_tensors(piece) for piece in PIECES]


def test_weights() -> None:
    assert SAMPLES.weights(NAMED, [1, 3]) == [0.25, 0.75]
    assert EACH.weights(NAMED, [1, 3]) == [1, 1]
    assert Rule("labels", "batch['labels']").weights(NAMED, [1, 1]) == [2 / 6, 4 / 6]
    assert Rule("labels", "batch['labels']", is_shifted=True).weights(NAMED, [1, 1]) == [1 / 4, 3 / 4]
    assert Rule("sum", "batch['mask']").weights(NAMED, [1, 1]) == [2 / 6, 4 / 6]


def test_what_a_piece_lacks_weighs_nothing() -> None:
    assert Rule("sum", "batch['weights']").weights(NAMED, [1, 1]) is None
    nothing = [{"batch['labels']": torch.full((1, 4), -100)}] * 2
    assert Rule("labels", "batch['labels']").weights(nothing, [1, 1]) is None


def test_values_at_the_ends_of_sequences_may_be_padding() -> None:
    tokens = torch.tensor([[4, 4, 5, 6], [7, 5, 0, 0]])
    values = {rule.ignored for rule in possible_rules([{"batch": tokens}]) if rule.kind == "labels"}
    assert values == {-100, 4, 0}


def test_each_class_may_be_ignored_unless_there_are_many() -> None:
    few, many = torch.arange(3), torch.arange(100)
    assert {rule.ignored for rule in possible_rules([{"y": few}]) if rule.kind == "labels"} == {-100, 0, 1, 2}
    assert {rule.ignored for rule in possible_rules([{"y": many}]) if rule.kind == "labels"} == {-100}


def test_a_rule_that_was_wrong_once_is_excluded() -> None:
    labels, shifted = (Rule("labels", "batch['labels']", is_shifted=shifted) for shifted in (False, True))
    rules = Candidates()
    assert rules.take([SAMPLES, labels, shifted], tried=[SAMPLES, EACH, labels, shifted])
    assert rules.rules[0] == SAMPLES and rules.differ(Weighed(NAMED, [1, 1]))
    assert rules.take([shifted], tried=[SAMPLES, EACH, labels, shifted])
    assert rules.rules == (shifted,)
    assert not rules.take([SAMPLES], tried=[SAMPLES, labels, shifted])


def test_after_some_repeated_tokens_that_counted_others_are_no_candidates() -> None:
    rules = Candidates()
    fitting = [SAMPLES, *(Rule("labels", "y", is_shifted=shifted) for shifted in (False, True))]
    for token in range(REFUTED + 2):
        pieces = [{"y": torch.tensor([[1 + token, 99, token, token]])}, {"y": torch.tensor([[1, 2, 3, 4]])}]
        batch = Weighed(pieces, [1, 1])
        assert rules.differ(batch) is (token < REFUTED)
        assert rules.take(fitting, tried=batch.possible)
    padded = [{"y": torch.tensor([[1, 2, -100, -100]])}, {"y": torch.tensor([[1, 2, 3, 4]])}]
    assert rules.differ(Weighed(padded, [1, 1]))


def test_a_value_that_was_not_there_is_a_candidate_when_it_comes() -> None:
    rules = Candidates()
    first = [{"y": torch.tensor([1, 2])}, {"y": torch.tensor([2, 3])}]
    assert rules.take([SAMPLES], tried=list(possible_rules(first)))
    assert not rules.differ(Weighed(first, [2, 2]))
    assert rules.differ(Weighed([{"y": torch.tensor([1, 0])}, {"y": torch.tensor([2, 3])}], [2, 2]))


def test_close_weights_are_the_same() -> None:
    assert are_close([0.5, 0.5], [0.5 + 1e-9, 0.5]) and not are_close([0.5, 0.5], [0.501, 0.499])
    assert are_close([0.5, 0.5], [None, 0.5]) and not are_close(None, [1.0])


def test_rules_that_a_probe_could_not_tell_apart_are_tried_again_where_they_differ_more() -> None:
    labels, rules = Rule("labels", "batch['labels']"), Candidates()
    little = [{"batch['labels']": torch.arange(1, 101)}, {"batch['labels']": torch.tensor([-100, *range(1, 100)])}]
    assert rules.take([SAMPLES, labels], tried=list(possible_rules([*little, *NAMED])))
    assert rules.differ(Weighed(little, [1, 1]))
    rules.leave(Weighed(little, [1, 1]))
    assert not rules.differ(Weighed(little, [1, 1])) and rules.differ(Weighed(NAMED, [1, 1]))
