"""The block that docs/extend.md registers computes over a mesh of four ranks what it computes whole."""

from typing import Any

import torch

from tests.docs.blocks import blocks_of
from tests.harness.mesh import error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.test_words import ROOT

PAGE = ROOT / "docs" / "extend.md"


def run_registered(snippet: str) -> dict[str, Any]:
    """Run the page's block on this rank of a mesh, and whole."""
    from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
    from lightning_hanayo.tensor_parallel.stage_context import StageContext

    names: dict[str, Any] = {"__name__": "readers_module"}
    exec(snippet, names)
    with process_group():
        ranks = make_mesh((1, 2, 2))
        torch.manual_seed(0)
        whole = names["Block"]().double()
        block = names["Block"]().double()
        block.load_state_dict(whole.state_dict())
        plan = plan_parallelize([block], "blocks", ranks.sizes)
        plan.install([block], StageContext(ranks))
        x = torch.randn(2, 6, 16, dtype=torch.float64)
        y, own = whole(x), block(part(x, ranks, "x", "y", "z"))
        y.square().sum().backward()
        own.square().sum().backward()  # of each rank's part, so together the same
        norm = part(whole.norm_1.weight.grad, ranks, "z")
        gradient = ranks.axis("xy").all_reduce(block.norm_1.weight.grad).wait()
        return {
            "is_registered": plan.is_registered,
            "y": error(own, part(y.detach(), ranks, "x", "y", "z")),
            "norm": error(gradient, norm),
        }


def test_the_readers_own_block_runs_over_the_mesh(pool: Pool) -> None:
    files = {block.comments["file"]: block.code for block in blocks_of(PAGE) if "file" in block.comments}
    code = files["my_layers.py"] + files["my_model.py"].replace("from my_layers import Norm, Swish\n", "")
    for rank in pool.run(4, run_registered, code):
        assert rank["is_registered"] and rank["y"] < 1e-6 and rank["norm"] < 1e-6, "the norm computes in fp32"
