"""The functions see the whole model while a run lasts, leave everything else alone, and are restored exactly."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy import norms
from lightning_hanayo.strategy.norms import GradientNorms
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, make_loader, make_trainer

FUNCTIONS = [clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm, grad_norm]


def codes() -> list[CodeType]:
    return [inspect.unwrap(function).__code__ for function in FUNCTIONS]


BEFORE = codes()


def model() -> nn.Linear:
    made = nn.Linear(3, 2)
    made(torch.ones(1, 3)).square().sum().backward()
    return made


@contextmanager
def running(*modules: nn.Module) -> Iterator[list[GradientNorms]]:
    """Runs of one rank each."""
    runs = [GradientNorms(list(one.parameters()), None, device=torch.device("cpu")) for one in modules]
    for run in runs:
        norms.PATCHES.start(run)
    try:
        yield runs
    finally:
        for run in runs:
            norms.PATCHES.stop(run)


def test_they_are_restored_after_the_last_run() -> None:
    with running(model(), model()) as (first, second):
        norms.PATCHES.stop(first)
        assert not set(codes()) & set(BEFORE)
        norms.PATCHES.stop(second)
        assert codes() == BEFORE
        norms.PATCHES.stop(second)
    assert codes() == BEFORE


def test_a_run_sees_its_own_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, other = model(), model(), model()
    expected = [get_total_norm([p.grad for p in made.parameters()]) for made in (one, two, other)]
    asked: list[GradientNorms] = []
    total = GradientNorms.total

    def total_and_note(run: GradientNorms, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(run)
        return total(run, *args, **kwargs)

    monkeypatch.setattr(GradientNorms, "total", total_and_note)
    with running(one, two) as (first, second):
        norms = [clip_grad_norm_(made.parameters(), max_norm=1e9, norm_type=2) for made in (one, two, other)]
        grads = [get_total_norm([p.grad.detach() for p in made.parameters()]) for made in (one, two, other)]
    assert norms == grads == expected
    assert asked == [first, second] * 2


def test_results_equal_torchs() -> None:
    made = model()
    alone = [grad_norm(made, 2), grad_norm(made, "inf", "."), clip_grad_norm_(made.weight, 1e9, "inf")]
    twice = get_total_norm([made.weight.grad, made.weight.grad, made.bias.grad], 3.0)
    with running(made):
        assert [grad_norm(made, 2), grad_norm(made, "inf", "."), clip_grad_norm_(made.weight, 1e9, "inf")] == alone
        assert get_total_norm([made.weight.grad, made.weight.grad, made.bias.grad], 3.0) == twice
        with pytest.raises(ValueError, match="positive number"):
            grad_norm(made, -1)
        made.bias.grad.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(made.parameters(), 1.0, error_if_nonfinite=True)


def test_no_call_in_a_step_and_no_mixture() -> None:
    made, other = model(), model()
    with running(made) as (run,):
        with pytest.raises(UnsupportedError, match="clip_grad_norm_ was called on 2 .* together with 1 other"):
            clip_grad_norm_([*made.parameters(), other.weight], 1.0)
        with pytest.raises(UnsupportedError, match="get_total_norm was called on 1 .* together with 1 other"):
            get_total_norm([made.weight.grad, made.bias.grad.clone()])
        with run.batch():
            for call in (
                lambda: clip_grad_norm_(made.parameters(), 1.0),
                lambda: clip_grad_value_(made.parameters(), 1.0),
                lambda: get_total_norm([made.weight.grad]),
                lambda: grad_norm(made, 2),
            ):
                with pytest.raises(UnsupportedError, match="Call it in on_before_optimizer_step"):
                    call()
            assert clip_grad_norm_(other.parameters(), 1.0) > 0


def test_a_function_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = object()

    @functools.cache
    def replaced(*_: Any) -> object:
        return owner

    monkeypatch.setitem(norms._FUNCTIONS, replaced, None)
    with pytest.raises(UnsupportedError, match="replaced isn't a plain function in torch"), running(model()):
        pass
    assert codes() == BEFORE


class Breaks(models.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise KeyError("broken")


class OnOneRank(models.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 0:
            clip_grad_norm_(self.parameters(), 1.0)


def fit(kind: type[models.MLP], layout: Layout) -> bool:
    """Whether the functions are restored after a run that fails."""
    trainer = make_trainer(layout, max_steps=2)
    try:
        trainer.fit(models.build(kind), make_loader(models.vectors((8, 8))))
    except BaseException:
        if kind is OnOneRank:
            raise
    return codes() == BEFORE


def test_they_are_restored_after_a_failure(pool: Pool) -> None:
    assert pool.run(2, fit, Breaks, Layout(2, 1, 1)) == [True, True]


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(cube=(1, 2, 1))], ids=str)
def test_a_call_on_one_rank_is_an_error(pool: Pool, layout: Layout) -> None:
    with pytest.raises(RunFailed, match=r"waits for a message of the kind 'vote', but .* 'norm'"):
        pool.run(2, fit, OnOneRank, layout)
