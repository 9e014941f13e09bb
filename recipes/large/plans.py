"""The layouts of the large models: each is written by `hanayo plan`, and kept with its predictions.

layouts/llama3-8b-8xh100.yaml     for `hanayo fit`, on top of llama3-8b.yaml
layouts/plans.json                by name: what the plan predicts, and the next best layout
"""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from lightning_hanayo import cli
from lightning_hanayo.errors import HanayoError
from recipes.paper.page import fill, markdown

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "guides" / "large-models.md"
PLANS = FOLDER / "layouts" / "plans.json"


@dataclass(frozen=True)
class Case:
    """A model on a machine."""

    model: str
    devices: int
    device: str
    global_batch: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.model}-{self.devices}x{self.device}"

    @property
    def options(self) -> list[str]:
        """Of `hanayo plan`."""
        config = f"--config={FOLDER}/{self.model}.yaml"
        sizes = f"--devices={self.devices}", f"--nodes={self.devices // 8}", f"--global-batch={self.global_batch}"
        return [config, f"--device={self.device}", *sizes]


CASES = {
    one.name: one
    for one in (
        Case("llama3-8b", 8, "h100", 128),
        Case("llama3-8b", 8, "b200", 128),
        Case("llama3-70b", 64, "h100", 1024),
        Case("llama3-70b", 64, "b200", 1024),
        Case("llama3-405b", 512, "h100", 2048),
        Case("llama3-405b", 4096, "h100", 2048),
        Case("gpt-175b", 128, "h100", 1536),
        Case("qwen3-30b-a3b", 64, "h100", 1024),
        Case("qwen3-235b-a22b", 512, "h100", 2048),
    )
}


class Numbers(NamedTuple):
    """How a model's configuration stores and computes numbers: arguments of `read_model`."""

    precision: str
    master_weights: bool

    @property
    def options(self) -> dict[str, Any]:
        """Of the strategy."""
        return {"master_weights": "fp32"} if self.master_weights else {}


def numbers_of(model: str) -> Numbers:
    """Those of one of the models."""
    trainer = yaml.safe_load((FOLDER / f"{model}.yaml").read_text(encoding="utf-8"))["trainer"]
    return Numbers(trainer["precision"], "master_weights" in trainer["strategy"].get("init_args", {}))


def rebuild(names: list[str]) -> None:
    """Plan these again, write their files, and rewrite the page's table of all."""
    found = json.loads(PLANS.read_text()) if PLANS.exists() else {}
    found |= {name: planned(CASES[name], FOLDER / "layouts") for name in names}
    PLANS.write_text(json.dumps({name: found[name] for name in CASES if name in found}, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), {"large-models": table(found)}), encoding="utf-8")


def planned(case: Case, folder: Path) -> dict[str, Any]:
    """Plan one, write its layout into the folder, and return its predictions.

    Raises:
        HanayoError: nothing fits.
    """
    output = io.StringIO()
    with TemporaryDirectory() as pictures, redirect_stdout(output):
        files = [f"--output={folder}/{case.name}.yaml", f"--picture={pictures}/plan.png"]
        code = cli.run(["plan", *case.options, *files, "--top=2", "--json"])
    if code:
        raise HanayoError(f"{case.name}: hanayo plan ended with exit code {code}")
    found = json.loads(output.getvalue())
    chosen = ("parameters", "num_blocks", "tokens_per_sample", "global_batch", "memory_limit")
    return {key: found[key] for key in chosen} | {"layouts": [_rounded(one) for one in found["layouts"]]}


def _rounded(value: Any) -> Any:
    """To six digits, which another version of a library doesn't change."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


HEAD = ("model", "devices", "P", "W", "D", "cube", "batch", "step s", "tokens/s per device", "MFU", "bubble", "memory")


def table(found: dict[str, Any]) -> str:
    """A row for each layout."""
    return markdown(HEAD, [_row(CASES[name], found[name]) for name in CASES if name in found])


def _row(case: Case, plan: dict[str, Any]) -> tuple[str, ...]:
    own = plan["layouts"][0]
    batch = f"{own['num_microbatches']} x {own['samples']}"
    rate = plan["global_batch"] * plan["tokens_per_sample"] / own["seconds"] / case.devices
    return (
        f"`{case.model}`",
        f"{case.devices} {case.device.upper()}",
        str(own["pipe"]),
        str(own["num_waves"]) if own["pipe"] > 1 else "-",
        str(own["data"]),
        "x".join(map(str, own["mesh"])) if own["mesh"] != [1, 1, 1] else "-",
        batch if own["accumulate"] == 1 else f"{own['accumulate']} x ({batch})",
        f"{own['seconds']:.3g}",
        f"{rate:,.0f}",
        f"{own['mfu']:.0%}".replace("%", " %"),
        f"{own['bubble']:.1%}".replace("%", " %"),
        f"{own['memory']['total'] / 1e9:.1f} GB",
    )
