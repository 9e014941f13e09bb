"""The resume drill plans its kills from a seed, finds what was said, and finds what differs.

undisturbed   batches of steps   0 1 2 3 4 5
disturbed                        0 1 2 3   killed, from step 2 on   2 3 4 5       equal; 2 and 3 repeated
disturbed                        0 1 2 3   killed, from step 2 on   2 9 4 5       step 3 differs
"""

from pathlib import Path

import pytest
import torch

from recipes.resume_drill import compare
from recipes.resume_drill.data import NUM_SAMPLES, DrillData, Shuffled
from recipes.resume_drill.drill import said
from recipes.resume_drill.victims import plan


def test_a_seed_gives_the_same_kills_in_the_order_of_steps() -> None:
    kills = plan(5, 6, 200, 4, "torchrun")
    assert kills == plan(5, 6, 200, 4, "torchrun") != plan(6, 6, 200, 4, "torchrun")
    assert [kill.step for kill in kills] == sorted({kill.step for kill in kills})
    victims = {str(kill) for seed in range(20) for kill in plan(seed, 6, 200, 4, "torchrun")}
    assert victims == {"launcher", "rank 0", "rank 1", "rank 2", "rank 3"}


def test_data_ranks_see_all_samples_once_per_epoch_and_the_order_goes_on() -> None:
    tokens = DrillData().tokens
    ranks = [Shuffled(tokens, 8, rank, 2) for rank in range(2)]
    first = [[batch["input_ids"] for batch in rank] for rank in ranks]
    assert sum(len(batch) for rank in first for batch in rank) == NUM_SAMPLES
    iterator = iter(ranks[0])
    next(iterator)
    resumed = Shuffled(tokens, 8, 0, 2)
    resumed.load_state_dict(ranks[0].state_dict())
    assert torch.equal(next(iter(resumed))["input_ids"], next(iterator)["input_ids"])


def test_what_the_ranks_said_is_found() -> None:
    output = "GPU: no\nrank 2 (pipeline 0, data 1) was killed (signal 9)\nRestored all states from last.ckpt\nTraceback"
    assert list(said(output)) == [
        "rank 2 (pipeline 0, data 1) was killed (signal 9)",
        "Restored all states from last.ckpt",
    ]


@pytest.mark.parametrize(("again", "different"), [((2, 3, 4, 5), 0), ((2, 9, 4, 5), 2)])
def test_repeated_batches_are_equal_and_others_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: tuple[int, ...], different: int
) -> None:
    monkeypatch.setattr(compare, "compare", lambda *_: [])
    for name, contents in (("once", range(6)), ("often", (*range(4), *again))):
        (tmp_path / name).mkdir()
        steps = (*range(6),) if name == "once" else (*range(4), *range(2, 6))
        lines = "".join(f"{step} {content}\n" for step, content in zip(steps, contents, strict=True))
        for data_rank in range(2):
            (tmp_path / name / f"batches-{data_rank}").write_text(lines)
    found = compare.compare_runs(tmp_path / "once", tmp_path / "often")
    assert found.num_batches == 12 and len(found.different) == different
