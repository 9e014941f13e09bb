"""Plans a GPT on 8, 64 and 512 H100s by `hanayo plan`, and shows the layouts that are worth comparing.

fastest of all              | P W D cube ...
the fastest of others       | ...               with another pipeline or cube, two rows
the least memory            | ...
"""

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_hanayo import cli
from lightning_hanayo.errors import HanayoError
from recipes.paper.page import fill, markdown

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "plan.md"
PICTURE = ROOT / "docs" / "figures" / "plan-64.png"
MODEL = [f"--config={ROOT}/recipes/gpt/wave.yaml", f"--config={ROOT}/recipes/cluster/gpus64.yaml", "--device=h100"]
LARGER = ["--model.width=8192", "--model.num_layers=80", "--model.num_heads=64"]
CASES = {
    "plan-8": ["--devices=8", "--nodes=1", "--global-batch=128"],
    "plan-64": ["--devices=64", "--nodes=8", "--global-batch=512"],
    "plan-512": ["--devices=512", "--nodes=64", "--global-batch=2048", *LARGER],
}
"""name of the block -> options of the command above it"""
KINDS = ("weights", "gradients", "optimizer", "gathered", "activations", "suspended", "messages", "workspace")
HEAD = (
    "P",
    "W",
    "D",
    "cube",
    "weights per",
    "pairs",
    "B x samples",
    "sharded",
    "step s",
    "bubble",
    "waits",
    "memory GB",
    "MFU",
)

Layout = dict[str, Any]


def rebuild(page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Replace the tables of the page, and draw the picture of 64 devices."""
    page.write_text(fill(page.read_text(encoding="utf-8"), tables(picture)), encoding="utf-8")


def tables(picture: Path) -> dict[str, str]:
    """All tables, by the names of their blocks. The picture of 64 devices is drawn."""
    plans = {name: planned(options, picture) for name, options in CASES.items() if name != "plan-64"}
    plans["plan-64"] = planned(CASES["plan-64"], picture)  # the last one to draw
    return {name: table(found) for name, found in plans.items()} | {"plan-memory": memory_table(plans)}


def memory_table(plans: Mapping[str, Any]) -> str:
    """What the fullest device holds in the fastest layout of each example, by what it is for."""
    rows = []
    for name in CASES:
        memory = plans[name]["layouts"][0]["memory"]
        rows.append((name.removeprefix("plan-"), *(f"{memory[kind] / 1e9:.1f}" for kind in (*KINDS, "total"))))
    return markdown(("GPUs", *KINDS, "all, GB"), rows)


def table(found: Any) -> str:
    """The table of one example, and how many layouts there were."""
    limit = f"{found['memory_limit'] / 1e9:g} GB"
    count = f"{found['considered']:,} layouts were considered, {found['fit']:,} fit into {limit}."
    return f"{markdown(HEAD, map(_row, chosen(found['layouts'])))}\n\n{count}"


def planned(options: Sequence[str], picture: Path) -> Any:
    """What `hanayo plan --json` prints. It draws the picture.

    Raises:
        HanayoError: it found no layout.
    """
    output = io.StringIO()
    with TemporaryDirectory() as folder, redirect_stdout(output):
        files = [f"--output={folder}/plan.yaml", f"--picture={picture}"]
        code = cli.run(["plan", *MODEL, *options, *files, "--json"])
    if code:
        raise HanayoError(f"hanayo plan {' '.join(options)}: exit code {code}")
    return json.loads(output.getvalue())


def chosen(layouts: Sequence[Layout], num_others: int = 2) -> list[Layout]:
    """The fastest ones, each with another pipeline or cube, and the one with the least memory."""
    picked = list(layouts[: 1 + num_others])
    least = min(layouts, key=lambda layout: layout["memory"]["total"])
    return picked if least in picked else [*picked, least]


def _row(layout: Layout) -> tuple[str, ...]:
    pipe, mesh = layout["pipe"], layout["mesh"]
    batch = f"{layout['num_microbatches']} x {layout['samples']}"
    return (
        str(pipe),
        str(layout["num_waves"]) if pipe > 1 else "-",
        str(layout["data"]),
        "x".join(map(str, mesh)) if mesh != [1, 1, 1] else "-",
        layout["cube_weights"] if mesh[0] > 1 else "-",
        "yes" if layout["pairs"] else "-",
        batch if layout["accumulate"] == 1 else f"{layout['accumulate']} x ({batch})",
        "yes" if layout["shard_optimizer"] else "-",
        f"{layout['seconds']:.2f}",
        f"{layout['bubble']:.1%}".replace("%", " %"),
        f"{layout['exposed'] / layout['seconds']:.1%}".replace("%", " %"),
        f"{layout['memory']['total'] / 1e9:.1f}",
        f"{layout['mfu']:.0%}".replace("%", " %"),
    )
