"""Optimizers are accepted where a rank has all that their updates depend on; unknown ones are tried out."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.setup.optimizers import check_optimizers, looks_across_parameters
from lightning_hanayo.topology import Topology
from tests.habits.whole_model import DeclaredSGD, LayerwiseSGD, NormalizedSGD

PIPELINE, CUBE, ALONE = Topology(pipe=2), Topology(cube=(1, 2, 1)), Topology(data=2)
ELEMENTWISE = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Rprop", "Adadelta", "ASGD"]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 5, dtype=torch.float64)) for _ in range(4)]


def named(name: str, base: Any = NormalizedSGD, **defaults: Any) -> Optimizer:
    """An optimizer of another package, whose class has this name."""
    optimizer: Optimizer = type(name, (base,), {})(parameters(), lr=0.1)
    optimizer.defaults.update(defaults)
    return optimizer


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_of_torch_work_everywhere(name: str) -> None:
    check_optimizers([getattr(optim, name)(parameters())], CUBE)


def test_lbfgs_works_without_pipeline_and_cube_with_a_warning_for_data_ranks() -> None:
    check_optimizers([optim.LBFGS(parameters())], Topology())
    with pytest.warns(UserWarning, match="LBFGS decides by the loss"):
        check_optimizers([optim.LBFGS(parameters())], ALONE)


def test_a_subclass_with_the_same_step_is_as_good() -> None:
    class Own(optim.AdamW):
        pass

    check_optimizers([Own(parameters())], CUBE)


@pytest.mark.parametrize(
    "optimizer",
    [named("Prodigy"), named("SAM"), named("Muon"), named("Lamb", max_grad_norm=1.0), optim.LBFGS(parameters())],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_those_with_a_statistic_over_all_parameters_are_refused(optimizer: Optimizer) -> None:
    for topology in (PIPELINE, CUBE):
        with pytest.raises(
            UnsupportedError,
            match="computes with all parameters .*pipeline_parallel_size=1",
        ):
            check_optimizers([optimizer], topology)
    check_optimizers([optimizer], Topology())


@pytest.mark.parametrize("optimizer", [named("Lamb", max_grad_norm=None), named("SOAP"), optim.Muon(parameters())])
def test_those_that_need_whole_parameters_work_everywhere(optimizer: Optimizer) -> None:
    for topology in (PIPELINE, CUBE):
        check_optimizers([optimizer], topology)
    check_optimizers([optimizer], ALONE, is_sharded=True)


def test_what_needs_whole_parameters_or_not_has_to_be_known_in_cubes() -> None:
    for topology, is_sharded in ((CUBE, False), (ALONE, True)):
        with pytest.raises(UnsupportedError, match=r"declare .*`is_elementwise = True` or `is_parameterwise = True`"):
            check_optimizers([LayerwiseSGD(parameters(), 0.1)], topology, is_sharded=is_sharded)


def test_a_clipping_optimizer_is_told_the_other_way() -> None:
    with pytest.raises(UnsupportedError, match="Leave its max_grad_norm out"):
        check_optimizers([named("Lamb", max_grad_norm=1.0)], PIPELINE)


def test_an_unknown_one_is_tried_out() -> None:
    with pytest.warns(UserWarning, match="LayerwiseSGD isn't known .*hanayo check"):
        check_optimizers([LayerwiseSGD(parameters(), 0.1)], PIPELINE)
    with pytest.raises(UnsupportedError, match="NormalizedSGD computes with all parameters"):
        check_optimizers([NormalizedSGD(parameters(), 0.1)], PIPELINE)


def test_one_that_declares_it_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizers([DeclaredSGD(parameters(), 0.1)], PIPELINE)


@pytest.mark.parametrize("name", [*ELEMENTWISE, "Adafactor", "Muon"])
def test_the_trial_finds_nothing_in_torchs_own(name: str) -> None:
    assert not looks_across_parameters(getattr(optim, name)(parameters()))


def test_a_trial_leaves_no_trace() -> None:
    found = parameters()
    optimizer = NormalizedSGD(found, 0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    random = torch.get_rng_state()
    assert looks_across_parameters(optimizer)
    assert not optimizer.state and all(parameter.grad is None and parameter.eq(1).all() for parameter in found)
    assert torch.equal(torch.get_rng_state(), random)


def test_what_cannot_be_tried_out_is_only_warned_of() -> None:
    class NeedsClosure(LayerwiseSGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step(closure)

    with pytest.warns(UserWarning, match="NeedsClosure"):
        check_optimizers([NeedsClosure(parameters(), 0.1)], PIPELINE)
