"""The page "Which models work", made of what the runs have written: `docs/supported/models.md`.

docs/supported/models/causal-lm.json, masked.json, ...  ->  totals by mapping, and a row for each model that isn't exact
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.paper.page import fill, markdown

FOLDER = Path(__file__).parents[2] / "docs" / "supported" / "models"
PAGE = FOLDER.with_suffix(".md")
VERDICTS = ("exact", "depends on micro-batches", "differs", "refused", "fails", "no answer", "one process can't")
_SHOWN = 200
"""characters of a reason"""


def rebuild(page: Path = PAGE) -> None:
    """Replace the tables of the page."""
    page.write_text(fill(page.read_text(encoding="utf-8"), blocks()), encoding="utf-8")


def blocks() -> dict[str, str]:
    """The tables, by the names of their blocks in the page."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
    return {"totals": _totals(found), "others": _others(found)}


def _totals(found: Mapping[str, Any]) -> str:
    rows = []
    for mapping, one in found.items():
        versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
        for layout in ("P=2", "cube"):
            counts = Counter(row["layouts"][layout]["verdict"] for row in one["models"] if layout in row["layouts"])
            if counts:
                numbers = [str(counts[verdict]) for verdict in VERDICTS]
                rows.append((mapping, layout, str(counts.total()), *numbers, f"{one['date']}: {versions}"))
    return markdown(("mapping", "layout", "models", *VERDICTS, "run"), rows)


def _others(found: Mapping[str, Any]) -> str:
    rows = []
    for mapping, one in found.items():
        for row in one["models"]:
            for layout, verdict in row["layouts"].items():
                is_known = layout != "P=2" and verdict["verdict"] == VERDICTS[-1]
                if verdict["verdict"] != "exact" and not is_known:
                    reason = ". ".join([*verdict.get("notes", ()), verdict["reason"]]).replace("|", "/")
                    reason = reason.replace("<", "&lt;").replace("](", "] (")  # no link
                    shown = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN].rstrip()} ..."
                    rows.append((f"{row['class']} ({row['model']})", f"{mapping}, {layout}", verdict["verdict"], shown))
    rows.sort(key=lambda row: (VERDICTS.index(row[2]), row[1], row[0]))
    return markdown(("model", "mapping, layout", "verdict", "reason"), rows)
