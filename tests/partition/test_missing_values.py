"""What is computed from another rank's parameter has no values here: it may go back into that parameter alone."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.guards import MissingValues, ParameterGuard, Scope
from lightning_hanayo.partition.ownership import Placeholder, replace_with_placeholders

Loop = Callable[[nn.Module], Any]


class Two(nn.Module):
    """`own` is on this rank, 0, `other` on rank 2; both have gradients on their owners."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        replace_with_placeholders(self, set(self.own.parameters()))
        for parameter in self.own.parameters():
            parameter.grad = torch.ones_like(parameter)


@pytest.fixture
def model() -> Two:
    return Two()


def guarded(model: nn.Module) -> ParameterGuard:
    parameters = dict(model.named_parameters())
    guard = ParameterGuard(torch.device("cpu"))
    guard.watch(parameters, {name: 2 if "other" in name else 0 for name in parameters}, {}, set())
    return guard


@pytest.fixture
def hook(model: Two) -> Iterator[None]:
    with guarded(model).during("hook"):
        yield


def each(change: Callable[[nn.Parameter], Any]) -> Loop:
    return lambda model: [change(parameter) for parameter in model.parameters()]


def centralise(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad - parameter.grad.mean()


def renormalise(parameter: nn.Parameter) -> None:
    for row in parameter.data:
        row.div_(row.norm() + 1)


LOOPS: dict[str, Loop] = {
    "clamped": each(lambda p: p.data.clamp_(-0.1, 0.1)),
    "on a sphere": each(lambda p: p.data.div_(p.norm())),
    "rows on a sphere": each(renormalise),
    "gradient centralised": each(centralise),
    "gradient noise": each(lambda p: p.grad.add_(torch.randn(p.shape, device=p.device))),
    "gradient noise of its shape": each(lambda p: p.grad.add_(torch.randn_like(p))),
    "gradient noise in place": each(lambda p: p.grad.add_(p.grad.clone().normal_(0, 0.1))),
    "initialised with kaiming_uniform_": each(lambda p: p.dim() > 1 and nn.init.kaiming_uniform_(p)),
    "initialised with trunc_normal_": each(lambda p: nn.init.trunc_normal_(p.data, std=1.5)),
    "initialised with orthogonal_": each(lambda p: p.dim() > 1 and nn.init.orthogonal_(p)),
    "masked at random": each(lambda p: p.mul_(torch.bernoulli(p.sigmoid()))),
    "filled, and divided by its norm": each(lambda p: p.normal_().div_(p.norm())),
    "gradient zeroed": each(lambda p: setattr(p, "grad", torch.zeros_like(p))),
    "on the CPU and back": each(lambda p: p.data.copy_(p.detach().cpu().to(torch.float64) * 2)),
    "as a list": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_over_parameters_changes_the_own_ones_alone(loop: Loop) -> None:
    """It does to them what it does in one process; the numbers that it draws go on alike."""
    alone, model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Two()
    alone[0].load_state_dict(model.own.state_dict())
    for parameter in alone.parameters():
        parameter.grad = torch.ones_like(parameter)
    states = []
    for part, scope in ((alone, "off"), (model, "hook")):
        torch.manual_seed(0)
        with guarded(model).during(scope), torch.no_grad():
            loop(part)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    for own, expected in zip(model.own.parameters(), alone[0].parameters(), strict=True):
        assert torch.equal(own, expected) and torch.equal(own.grad, expected.grad)  # type: ignore[arg-type]
    assert all(type(p) is Placeholder and p.grad is None for p in model.other.parameters())


NEEDS_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda value: float(value.sum()),
    "item": lambda value: value.sum().item(),
    "decision": lambda value: bool(value.isnan().any()),
    "text": lambda value: f"{value.norm():.3f}",
    "list": lambda value: value.tolist(),
    "array": lambda value: value.detach().numpy(),
    "own tensor changed": lambda value: torch.ones(2, 2).mul_(value),
    "assigned": lambda value: torch.ones(2, 2).__setitem__(0, value[0]),
    "out": lambda value: torch.add(value, 1, out=torch.ones(2, 2)),
    "sum over all": lambda value: float(torch.ones(()) + value.norm() + 1),
    "equality": lambda value: torch.equal(value, torch.ones(2, 2)),
    "closeness": lambda value: torch.allclose(value, torch.ones(2, 2)),
    "mask": lambda value: torch.ones(2, 2)[value > 0],
    "backward": lambda value: value.sum().backward(),
    "saved": lambda value: pickle.dumps(value.detach()),
    "number of random draws": lambda value: torch.poisson(torch.stack([value.abs()] * 50)),
    "printed number": lambda value: f"{value.max():.1f}",
}


@pytest.mark.parametrize("compute", NEEDS_VALUES.values(), ids=NEEDS_VALUES)
@pytest.mark.parametrize("attribute", ["weight", "grad"])
@pytest.mark.usefixtures("hook")
def test_what_needs_values_is_refused_by_name_and_rank(
    model: Two, compute: Callable[[Tensor], Any], attribute: str
) -> None:
    value = model.other.weight if attribute == "weight" else model.other.weight.grad
    with pytest.raises(UnsupportedError, match="other.weight is on pipeline rank 2, but .*full_parameter"):
        compute(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("scope", ["step", "alone"])
def test_what_only_one_rank_runs_may_not_change_a_placeholder(model: Two, scope: Scope) -> None:
    with guarded(model).during(scope):
        assert model.other.weight.shape == (2, 2) and model.other.weight.requires_grad
        with pytest.raises(UnsupportedError, match="other.weight is on pipeline rank 2, but this code runs on pipe"):
            model.other.weight.data.clamp_(-1, 1)


class Method(nn.Linear):
    def penalty(self) -> Tensor:
        return self.weight.square().sum()


@pytest.mark.parametrize("call", [lambda model: model.other(torch.ones(2)), lambda model: model.other.penalty()])
def test_code_of_a_module_elsewhere_points_to_the_block(model: Two, call: Callable[[Two], Any]) -> None:
    model.other.__class__ = Method
    with (
        guarded(model).during("step"),
        pytest.raises(UnsupportedError, match="code of Method, .*Call the block, and do the rest in its forward"),
    ):
        call(model)


@pytest.mark.usefixtures("hook")
def test_a_gradient_exists_where_the_owner_has_one(model: Two) -> None:
    assert model.other.weight.grad is not None
    for parameter in model.own.parameters():
        parameter.grad = None
    assert model.other.weight.grad is None


@pytest.mark.usefixtures("hook")
def test_metadata_and_the_users_mistakes_are_as_always(model: Two) -> None:
    weight = model.other.weight
    assert weight.device.type == "cpu" and weight.is_cpu and weight.is_meta and weight.numel() == 4
    assert weight.type() == "torch.FloatTensor" and isinstance(weight.type(torch.float64), MissingValues)
    assert repr(weight) == "<parameter other.weight (2, 2), on pipeline rank 2>"
    with pytest.raises(RuntimeError, match="broadcast"):
        weight.data + torch.ones(3, 3)
    with pytest.raises(TypeError):
        weight.norm(wrong=1)


def test_results_are_refused_later_too(model: Two) -> None:
    with guarded(model).during("hook"):
        norm = model.other.weight.norm()
    assert isinstance(norm, MissingValues) and repr(norm) == "<() from other.weight on pipeline rank 2>"
    with pytest.raises(UnsupportedError, match="other.weight is on pipeline rank 2"):
        norm.item()


def test_copies_have_no_values_either(model: Two) -> None:
    with guarded(model).during("hook"):
        average = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.lerp_(parameter.detach(), 0.1)
    with pytest.raises(UnsupportedError, match="other.weight is on pipeline rank 2"):
        average.other.weight.sum().item()
    assert type(pickled.other.weight) is Placeholder
