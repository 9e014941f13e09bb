"""A bad option is named with its value and what would do, when the strategy is constructed."""

from datetime import timedelta
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import HanayoError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_wave": 2}, "HanayoStrategy has no option 'num_wave': did you mean 'num_waves'?"),
    ({"measure_memory": True}, "HanayoStrategy has no option 'measure_memory': hanayo plan --given predicts"),
    ({"sharding_strategy": "FULL_SHARD"}, "'sharding_strategy': use cube=(n, 1, 1)"),
    ({"pipeline_model_parallel_size": 2}, "use pipeline_parallel_size=n"),
    ({"find_unused_parameters": True}, "leave it out: it isn't needed"),
    ({"num_waves": 0}, "num_waves=0: expected 'auto' or a whole number"),
    ({"num_waves": True}, "num_waves=True"),
    ({"pipeline_parallel_size": "two"}, "pipeline_parallel_size='two'"),
    ({"data_parallel_size": 1.5}, "data_parallel_size=1.5"),
    ({"num_microbatches": -1}, "num_microbatches=-1"),
    ({"loss_weight": "sample"}, "loss_weight='sample' is unknown; did you mean 'samples'"),
    ({"step": "batches"}, "step='batches' is unknown; did you mean 'batch'"),
    ({"step": "batch", "pairs": True}, "step='batch' and pairs=True"),
    ({"balance": "times"}, "balance='times' is unknown; did you mean 'time'"),
    ({"cube": 0}, "cube=0: expected p"),
    ({"cube": (2, 2)}, "cube=(2, 2)"),
    ({"cube_memory": "shard"}, "did you mean 'shards'"),
    ({"cube_pieces": 0}, "cube_pieces=0"),
    ({"cube_outside": "shared"}, "did you mean 'share'"),
    ({"activation_budget": 0}, "activation_budget=0: expected a positive number"),
    ({"schedule": "1f1bb"}, "did you mean '1f1b'"),
    ({"batch_dim": -1}, "batch_dim=-1: expected a whole number of at least 0"),
    ({"batch_dim": True}, "batch_dim=True"),
    ({"batch_dim": 1, "loss_weight": "shifted_tokens"}, "loss_weight='shifted_tokens' needs labels [batch, seq]"),
    ({"split_batch": 4}, "split_batch=4: expected a function (batch, n)"),
    ({"whole": "weights"}, "whole='weights': expected a sequence of names, as in ('weights',)"),
    ({"whole": [1]}, "whole=[1]"),
    ({"whole": None}, "whole=None"),
    ({"init_from": 3}, "init_from=3: expected a folder with model.safetensors"),
    ({"init_from": {"net": None, 2: "folder"}}, "init_from={'net': None, 2: 'folder'}"),
    ({"save_full": "yes"}, "save_full='yes': expected True or False"),
    ({"save_full": True, "save_async": True}, "Leave out save_async=True"),
    ({"load_anyway": "nan"}, "load_anyway='nan': expected a sequence of names"),
    ({"load_anyway": ("nans",)}, "did you mean 'nan'"),
    ({"costs": "nowhere.json"}, "nowhere.json can't be read"),
    ({"costs": {"forward": nan}}, "CostModel: forward=nan"),
    ({"costs": {"forward": 1e300}}, "CostModel: forward=1e+300"),
    ({"num_waves": 1e10}, "num_waves=10000000000.0: expected 'auto' or a whole number"),
    ({"num_waves": 10**10}, "num_waves=10000000000: 1 ranks, 1 micro-batches and 20000000000 stages per rank"),
    ({"num_microbatches": 10**6}, "num_microbatches=1000000: "),
    ({"num_microbatches": 10**6}, "more than 1,000,000; 333,333 micro-batches would do"),
    ({"pipeline_parallel_size": 10**9}, "more than 1,000,000; fewer stages would do"),
    ({"cube": None}, "cube=None"),
    ({"cube": True}, "cube=True"),
    ({"cube": 1.0}, "cube=1.0"),
    ({"cube_pieces": 1.5}, "cube_pieces=1.5: expected a whole number of at least 1"),
    ({"cube_pieces": True}, "cube_pieces=True"),
    ({"cube_pieces": 10**6}, "cube_pieces=1000000: expected a whole number of at least 1, and at most 1,024"),
    ({"cube_tokens": -5}, "cube_tokens=-5: expected a whole number of at least 1, or None"),
    ({"cube_tokens": 1.5}, "cube_tokens=1.5"),
    ({"cube_exclude": "experts"}, "cube_exclude='experts': expected a sequence of names"),
    ({"balance": [1, nan]}, "balance=[1, nan]: expected 'parameters', 'time', or one finite number"),
    ({"balance": [1, -1]}, "balance=[1, -1]"),
    ({"balance": ["a"]}, "balance=['a']"),
    ({"balance": []}, "balance=[]"),
    ({"balance": 5}, "balance=5"),
    ({"timeout": "30"}, "timeout='30': expected a timedelta or a number of seconds, above 0"),
    ({"timeout": 0}, "timeout=0"),
    ({"timeout": timedelta(seconds=-1)}, "at most 365 days"),
    ({"timeout": inf}, "timeout=inf"),
    (
        {"blocks": 5},
        "blocks=5: expected the name of the block stack, 'model.layers', names of lists",
    ),
    ({"blocks": ""}, "blocks=''"),
    ({"schedule": None}, "schedule=None: expected a name, the path of a CSV table, or 'auto'"),
    ({"schedule": Path("nowhere.csv")}, "schedule='nowhere.csv': there is no such file"),
    ({"activation_budget": nan}, "activation_budget=nan"),
    ({"loss_weight": None}, "loss_weight=None: expected 'samples'"),
    ({"init_from": ""}, "init_from=''"),
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
        {"num_waves": np.int64(2), "cube": np.int32(1), "batch_dim": np.int8(1), "cube_tokens": np.uint8(5)},
        {"balance": np.ones(4)},
        {"timeout": 30},
        {"save_async": True, "verify_checkpoints": False, "load_anyway": {"nan", "dtype"}},
    ],
)
def test_good_ones(options: dict[str, Any]) -> None:
    HanayoStrategy(**options)


def test_what_is_given_in_another_form_is_the_same_option() -> None:
    options = HanayoStrategy(timeout=90, num_waves=np.int64(2), cube=[1, np.int8(2), 1], balance=np.ones(2)).options
    assert options == HanayoStrategy(timeout=timedelta(seconds=90), num_waves=2, cube=(1, 2, 1), balance=[1, 1]).options
    assert type(options.num_waves) is int
