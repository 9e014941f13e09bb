"""What works in one process and can't, or not so, in a pipeline: it works, or an error names it; it never hangs."""

import copy
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, ModelPruning
from torch import Tensor
from torch.distributed import get_world_size
from torch.utils.data import DataLoader, IterableDataset

from lightning_hanayo.errors import UnsupportedError
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, assert_close, make_loader, make_strategy, make_trainer, own_weights

WAVE = Layout(2, 1, 1)


def batches() -> list[Batch]:
    return models.vectors((8, 8, 8))


class Stops(models.MLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.trainer.should_stop = batch_idx == 1
        return super().training_step(batch, batch_idx)


class Unpacks(models.MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _, _ = batch

    def loss(self, batch: Any) -> Tensor:
        return super().loss({"x": batch[0], "y": batch[1]})


class Lies(IterableDataset[Batch]):
    """Says it has more batches than it has."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Batch]:
        yield from batches()


def fit(model: Callable[[], Any] = models.MLP, loader: Any = None, **options: Any) -> Trainer:
    trainer = make_trainer(WAVE, **{"max_epochs": 2, **options})
    trainer.fit(models.build(model), loader if loader is not None else make_loader(batches()))
    return trainer


def stops() -> None:
    fit(Stops)


def unpacks() -> None:
    fit(Unpacks, make_loader([tuple(batch.values()) for batch in batches()]))


def prunes() -> None:
    fit(callbacks=[ModelPruning("l1_unstructured", parameter_names=["weight"])])


def averages_rounded() -> None:
    strategy = make_strategy(WAVE, master_weights="fp32")
    fit(callbacks=[EMAWeightAveraging()], strategy=strategy, precision="bf16-true")


REFUSED = {
    "should_stop in a step": (stops, "should_stop"),
    "a batch unpacked where there is none": (unpacks, "until its step has ended, pipeline rank 0 alone has it"),
    "pruning": (prunes, "ModelPruning"),
    "averages of rounded weights": (averages_rounded, "EMAWeightAveraging"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(pool: Pool, case: str) -> None:
    function, named = REFUSED[case]
    with pytest.raises(RunFailed) as caught:
        pool.run(2, function, timeout=20.0)
    assert "UnsupportedError" in caught.value.first.bases and named in caught.value.first.message, str(caught.value)


def lies() -> int:
    warnings.filterwarnings("ignore", message=".*has `__len__` defined")
    return fit(loader=DataLoader(Lies(), batch_size=None)).global_step


def test_a_stream_that_is_shorter_than_it_says(pool: Pool) -> None:
    assert pool.run(2, lies) == [6, 6]


def reads_by_lambda() -> list[float]:
    read: list[float] = []
    reads = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: read.append(float(trainer.callback_metrics["train_loss"]))
    )
    fit(callbacks=[reads], max_epochs=1)
    return read


def test_a_lambda_callback_reads_metrics_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, reads_by_lambda)
    assert first == second and len(set(first)) == 3


def keeps_example() -> list[int]:
    module = models.build(models.MLP)
    module.example_input_array = (torch.zeros(2, models.WIDTH),)
    trainer = make_trainer(WAVE, max_steps=1, enable_model_summary=True)
    trainer.fit(module, make_loader(batches()))
    return list(module.example_input_array[0].shape)


def test_the_users_example_comes_back(pool: Pool) -> None:
    assert pool.run(2, keeps_example) == [[2, models.WIDTH]] * 2


HOOKS = (
    "on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end",
    "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device", "on_train_epoch_start",
)  # fmt: skip


def note(calls: list[int], *args: Any, **_: Any) -> Any:
    """A hook that is set on a module instead of a method: it is called without the module."""
    calls.append(len(args))
    return args[0] if args else None


class Pickles(Callback):
    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            assert vars(twin)["on_train_epoch_start"].args == ([0],), "it has been called before"


class Evaluates(models.MLP):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch["x"])


OF_RUNS = ("_hanayo_prepared_model", "load_state_dict")
"""what a module has of its runs"""


def instance_hooks(layout: Layout) -> tuple[dict[str, list[int]], dict[str, bool], list[list[str]]]:
    """What each hook was called for, whether it is still there, and what module and trainer hold in the end."""
    module, loader = models.build(Evaluates), make_loader(batches())
    calls: dict[str, list[int]] = {name: [] for name in HOOKS}
    hooks = {name: partial(note, calls[name]) for name in HOOKS}
    for name, hook in hooks.items():
        setattr(module, name, hook)
    trainer = make_trainer(layout, max_epochs=1, callbacks=[Pickles()])
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, verbose=False)
    trainer.predict(module, loader)
    kept = {name: vars(module).get(name) is hook for name, hook in hooks.items()}
    owners = (module, trainer._logger_connector, trainer._signal_connector, trainer.fit_loop.epoch_loop)
    names = [sorted(name for name in vars(owner) if name not in OF_RUNS) for owner in owners]
    return calls, kept, names


def test_hooks_set_on_the_instance_are_called_and_kept(pool: Pool) -> None:
    ((calls, kept, held),) = pool.run(1, instance_hooks, Layout())
    assert all(calls.values()) and all(kept.values())
    ranks = pool.run(2, instance_hooks, WAVE)
    assert ranks[0] == (calls, kept, held)
    assert ranks[1][1:] == (kept, held), "nothing of ours stays"
    assert ranks[1][0]["on_train_epoch_end"] == calls["on_train_epoch_end"]
    assert not ranks[1][0]["on_validation_epoch_end"] and not ranks[1][0]["on_predict_epoch_end"], "no data"


class Breaks(models.MLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise KeyError("broken")


def breaks() -> tuple[bool, list[str]]:
    module, hook = models.build(Breaks), partial(note, [])
    module.on_train_epoch_end = hook  # type: ignore[method-assign]
    trainer = make_trainer(Layout(), strategy="hanayo", devices=1, max_epochs=1)
    with pytest.raises(KeyError, match="broken"):
        trainer.fit(module, make_loader(batches()))
    return vars(module)["on_train_epoch_end"] is hook, sorted(vars(trainer._logger_connector))


def breaks_alone() -> list[str]:
    return sorted(vars(make_trainer(Layout())._logger_connector))


def test_hooks_are_kept_after_a_failure(pool: Pool) -> None:
    ((kept, held),) = pool.run(1, breaks)
    assert kept and held == pool.run(1, breaks_alone)[0]


class EndsEarly(DataLoader[Any]):
    """Its length is two too high."""

    def __len__(self) -> int:
        return super().__len__() + 2


class Evaluated(models.MLP):
    """Validates, and predicts."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("validated", self.loss(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch["x"])


class Watches(Callback):
    """What happens, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, trainer.global_step, trainer.fit_loop.total_batch_idx))

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.seen.append(("validated", trainer.global_step))

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.seen.append(("epoch", trainer.current_epoch))


def short(num_batches: int) -> DataLoader[Any]:
    return EndsEarly(models.vectors((8,) * num_batches, torch.float64), batch_size=None)  # type: ignore[arg-type]


def ends_early(layout: Layout, options: dict[str, Any], validated: int) -> tuple[list[Any], float | None]:
    """What Lightning makes of loaders that end before their length, and the sum of what is predicted."""
    warnings.filterwarnings("ignore", message=".*recommended to use `self.log")
    watch = Watches()
    strategy = make_strategy(layout) if layout.world_size > 1 else "auto"
    trainer = make_trainer(
        layout, strategy=strategy, max_epochs=2, num_sanity_val_steps=1, callbacks=[watch], **options
    )
    module = models.build(Evaluated, torch.float64)
    trainer.fit(module, short(6), [short(2) for _ in range(validated)])
    predicted = trainer.predict(module, short(2))
    return watch.seen, None if predicted is None else sum(p.sum().item() for p in predicted if isinstance(p, Tensor))


EARLY: dict[str, tuple[dict[str, Any], int]] = {
    "accumulating": ({"accumulate_grad_batches": 4}, 1),
    "validating by batches": ({"val_check_interval": 4, "check_val_every_n_epoch": None}, 1),
    "several validation loaders": ({"limit_val_batches": 3}, 2),
}


IN_A_CUBE = Layout(2, 1, 1, cube=(1, 2, 1))
ENDS = covered(product(EARLY, (WAVE, IN_A_CUBE)), by=[("validating by batches", WAVE)])


@pytest.mark.parametrize(("case", "layout"), ENDS, ids=str)
def test_a_loader_that_ends_before_its_length(pool: Pool, case: str, layout: Layout) -> None:
    ((seen, total),) = pool.run(1, ends_early, Layout(), *EARLY[case])
    for rank, (own, predicted) in enumerate(pool.run(layout.world_size, ends_early, layout, *EARLY[case])):
        assert own == seen, f"rank {rank}"
        assert rank > 0 or predicted == pytest.approx(total)


class Calls:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


def object_as_hook() -> int:
    module, hook = models.build(models.MLP), Calls()
    module.on_before_backward = hook  # type: ignore[method-assign]
    make_trainer(WAVE, max_epochs=1, accumulate_grad_batches=2).fit(module, make_loader(batches()))
    return hook.count


def test_a_hook_may_be_an_object(pool: Pool) -> None:
    assert pool.run(2, object_as_hook) == [3, 3]


class Sealed(models.Block):
    """Guards its forward."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise AttributeError("sealed")
        super().__setattr__(name, value)


class OfSealed(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = Sealed


def sealed(layout: Layout) -> int:
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_epochs=1)
    trainer.fit(models.build(OfSealed), make_loader(batches()))
    return trainer.global_step


@pytest.mark.parametrize("layout", [Layout(1, 1, 1, "1f1b"), WAVE], ids=str)
def test_blocks_may_guard_their_forward(pool: Pool, layout: Layout) -> None:
    assert pool.run(layout.world_size, sealed, layout) == [3] * layout.world_size


class ReadOnlyExample(models.MLP):
    example_input_array = property(lambda self: torch.zeros(2, models.WIDTH))


def summarized(layout: Layout) -> tuple[bool, tuple[int, ...]]:
    """Whether the module is as before, after a run with a summary."""
    module = models.build(ReadOnlyExample)
    make_trainer(layout, max_epochs=1, enable_model_summary=True).fit(module, make_loader(batches()))
    return type(module) is ReadOnlyExample, tuple(module.example_input_array.shape)


def test_an_example_input_array_may_be_read_only(pool: Pool) -> None:
    assert pool.run(2, summarized, WAVE) == [(True, (2, models.WIDTH))] * 2


class BreaksLate(models.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise KeyError("broken")


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hanayo")]


def breaks_late() -> tuple[str, list[str], bool]:
    """How it ends, the threads that are left, and whether a block has something of ours."""
    module = models.build(BreaksLate)
    try:
        make_trainer(WAVE, max_epochs=1).fit(module, make_loader(batches()))
    except BaseException as error:
        for thread in own_threads():
            thread.join(20.0)  # it ends when the other rank has ended, too
        return (
            type(error).__name__,
            [thread.name for thread in own_threads()],
            any("forward" in vars(block) for block in module.blocks),
        )
    raise AssertionError("it doesn't break")


class ReadsSizes(models.MLP):
    def setup(self, stage: str) -> None:
        assert get_world_size() == self.trainer.world_size == 2

    def configure_optimizers(self) -> Any:
        get_world_size(torch.distributed.new_group([0, 1]))
        return super().configure_optimizers()


class ScalesRate(models.MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * get_world_size())


def reads_sizes() -> list[str]:
    code = get_world_size.__code__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(ReadsSizes, max_epochs=1)
    assert get_world_size.__code__ is code
    return [str(one.message) for one in caught if "world_size" in str(one.message)]


def test_a_world_size_that_is_read_before_training_is_warned_of(pool: Pool) -> None:
    """It may scale a learning rate; the size of a group of one's own in `configure_optimizers` is no mistake."""
    (message,), others = pool.run(2, reads_sizes)
    assert re.match(r"test_surprises.py:\d+ reads trainer.world_size.*data_parallel_size, which is 1", message)
    assert not others


def test_a_world_size_that_torch_tells_is_refused_as_a_factor_of_the_rate(pool: Pool) -> None:
    with pytest.raises(RunFailed, match=r"test_surprises.py:\d+: configure_optimizers reads .*get_world_size\(\)"):
        pool.run(2, fit, ScalesRate)


class ByHand(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def fails_before_it_joins() -> list[threading.Thread]:
    """The threads that are left if a second Trainer is refused before it joins the processes of the first."""
    make_trainer(WAVE, max_epochs=1).fit(models.build(models.MLP), make_loader(batches()))
    with pytest.raises(UnsupportedError, match="manual"):
        make_trainer(WAVE, max_epochs=1).fit(ByHand(), make_loader(batches()))
    return own_threads()


def test_a_trainer_that_does_not_join_ends_the_monitor_of_the_one_before(pool: Pool) -> None:
    assert pool.run(2, fails_before_it_joins) == [[], []]


def test_a_failed_run_leaves_no_threads_and_no_patches(pool: Pool) -> None:
    for kind, threads, patched in pool.run(2, breaks_late):
        assert kind in ("KeyError", "PeerFailed") and not threads and not patched


class Expert(models.Block):
    """Returns a loss of its own if it is sparse, and None otherwise."""

    is_sparse = False

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, (x.square().mean() if self.is_sparse else None)


class Experts(models.MLP):
    """Adds the losses of its sparse blocks, where a block returns one."""

    sparse: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Expert() for _ in self.blocks)
        for index in self.sparse:
            self.blocks[index].is_sparse = True  # type: ignore[assignment]

    def loss(self, batch: Batch) -> Tensor:
        x, total = self.embedding(batch["x"]), torch.zeros(())
        for block in self.blocks:
            x, own = block(x)
            if own is not None:
                total = total + own
        return torch.nn.functional.cross_entropy(self.head(x), batch["y"]) + total


class SparseElsewhere(Experts):
    sparse = (5,)


class SparseLast(Experts):
    sparse = (7,)


def returns_none_on_rank_0() -> None:
    fit(SparseElsewhere)


def test_a_value_that_only_blocks_of_other_ranks_return_is_refused(pool: Pool) -> None:
    """The step sees None for all of them, as the last block of stage 0 returns."""
    with pytest.raises(RunFailed, match="a Expert of the stack returns a value \\(output\\[1\\]\\)") as caught:
        pool.run(2, returns_none_on_rank_0, timeout=20.0)
    assert "UnsupportedError" in caught.value.first.bases


def trained(model: Callable[[], Any], layout: Layout, epochs: int = 1) -> dict[str, Tensor]:
    trainer = make_trainer(layout, max_epochs=epochs)
    module = models.build(model, torch.float64)
    trainer.fit(module, make_loader(models.vectors((8, 8), torch.float64)))
    return own_weights(module)


def test_what_the_last_block_returns_is_seen(pool: Pool) -> None:
    (expected,) = pool.run(1, trained, SparseLast, Layout(num_microbatches=4))
    found = pool.run(2, trained, SparseLast, WAVE)
    assert_close({name: value for own in found for name, value in own.items()}, expected, 1e-10)


class FreezesLater(models.MLP):
    """The head's weight is the embedding's; from the second epoch on, only the head trains."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(models.WIDTH, models.WIDTH)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training and self.current_epoch == 0):
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def test_a_tied_weight_trains_where_only_the_head_has_a_gradient(pool: Pool) -> None:
    (expected,) = pool.run(1, trained, FreezesLater, Layout(num_microbatches=4), 2)
    found = pool.run(2, trained, FreezesLater, WAVE, 2)
    assert_close({name: value for own in found for name, value in own.items()}, expected, 1e-10)
