"""A bad option is named with its value and what would do, when the strategy is constructed."""

from typing import Any

import pytest

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import HanayoError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_waves": 0}, "num_waves=0: expected 'auto' or a whole number"),
    ({"num_waves": True}, "num_waves=True"),
    ({"pipeline_parallel_size": "two"}, "pipeline_parallel_size='two'"),
    ({"data_parallel_size": 1.5}, "data_parallel_size=1.5"),
    ({"num_microbatches": -1}, "num_microbatches=-1"),
    ({"loss_weight": "sample"}, "loss_weight='sample' is unknown; did you mean 'samples'"),
    ({"balance": "times"}, "balance='times' is unknown; did you mean 'time'"),
    ({"cube": 0}, "cube=0: expected p"),
    ({"cube": (2, 2)}, "cube=(2, 2)"),
    ({"cube_memory": "shard"}, "did you mean 'shards'"),
    ({"cube_pieces": 0}, "cube_pieces=0"),
    ({"cube_outside": "shared"}, "did you mean 'share'"),
    ({"activation_budget": 0}, "activation_budget=0: expected a positive number"),
    ({"schedule": "1f1bb"}, "did you mean '1f1b'"),
    ({"batch_dim": -1}, "batch_dim=-1: expected a whole number from 0 on"),
    ({"batch_dim": True}, "batch_dim=True"),
    ({"batch_dim": 1, "loss_weight": "shifted_tokens"}, "loss_weight='shifted_tokens' needs labels [batch, seq]"),
    ({"split_batch": 4}, "split_batch=4: expected a function (batch, n)"),
    ({"whole": "weights"}, "whole='weights': expected a sequence of names, such as ('weights',)"),
    ({"whole": [1]}, "whole=[1]"),
    ({"whole": None}, "whole=None"),
    ({"init_from": 3}, "init_from=3: expected a folder with model.safetensors"),
    ({"init_from": {"net": None, 2: "folder"}}, "init_from={'net': None, 2: 'folder'}"),
    ({"save_full": "yes"}, "save_full='yes': expected True or False"),
    ({"save_full": True, "save_async": True}, "Leave out save_async=True"),
    ({"load_anyway": "nan"}, "load_anyway='nan': expected a sequence of names"),
    ({"load_anyway": ("nans",)}, "did you mean 'nan'"),
    ({"costs": "nowhere.json"}, "nowhere.json can't be read"),
]


@pytest.mark.parametrize(("options", "named"), BAD, ids=lambda value: str(value)[:40])
def test_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(HanayoError) as caught:
        HanayoStrategy(**options)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cube": (1, 1, 1)},
        {"loss_weight": len},
        {"balance": [1, 2]},
        {"num_waves": "auto"},
        {"whole": ["a"], "split_batch": max},
        {"init_from": {"net": "folder"}},
        {"save_async": True, "verify_checkpoints": False, "load_anyway": {"nan", "dtype"}},
    ],
)
def test_good_ones(options: dict[str, Any]) -> None:
    HanayoStrategy(**options)
