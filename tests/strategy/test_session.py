"""What doesn't exist yet is refused with the condition from when on it does; a failed set-up leaves nothing behind."""

from collections.abc import Callable

import pytest

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import NotAvailableError
from lightning_hanayo.strategy.setup import build_pipeline
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer

LAYOUT = Layout(1, 1, 1)


@pytest.mark.parametrize(
    ("read", "condition"),
    [
        (lambda strategy: strategy.topology, "once the Trainer is constructed"),
        (lambda strategy: strategy.groups, "once the Trainer has started the processes"),
        (lambda strategy: strategy.module, "once the Trainer runs it"),
        (lambda strategy: strategy.session, "once the Trainer has started a run"),
        (lambda strategy: strategy.pipeline, "once the Trainer has started a run"),
        (lambda strategy: strategy.root_device, "once the Trainer is constructed"),
    ],
)
def test_state_before_its_time(read: Callable[[HanayoStrategy], object], condition: str) -> None:
    with pytest.raises(NotAvailableError, match=condition):
        read(HanayoStrategy())


def failing_setup() -> object:
    """Whether anything of a set-up that failed is kept for the next run of the same Trainer."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no stages")

    trainer, module = make_trainer(LAYOUT, strategy=make_strategy(LAYOUT), max_steps=1), models.build(models.MLP)
    builder = build_pipeline.RankBuilder
    build, builder.build_stages = builder.build_stages, fail  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="no stages"):
            trainer.fit(module, make_loader(models.vectors((8,))))
    finally:
        builder.build_stages = build  # type: ignore[method-assign]
    strategy = trainer.strategy
    assert isinstance(strategy, HanayoStrategy)
    return strategy._prepared_module.stage_blocks


def test_a_failed_setup_leaves_no_cut_behind(pool: Pool) -> None:
    assert pool.run(1, failing_setup) == [None]
