"""Trains all models of a mapping on two ranks, and writes the verdicts: `python -m recipes.zoo --mapping causal-lm`.

Takes half an hour for the largest mapping on two cores. The page is rebuilt at the end, and by `--page` alone. Verdicts
of the other layout stay as they are.
"""

import argparse
import json
import os
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version

from rich.console import Console
from rich.progress import track

from recipes.zoo.models import MAPPINGS
from recipes.zoo.page import FOLDER, rebuild

LIBRARIES = ("torch", "lightning")


def main() -> None:
    """Train, and write the mapping's JSON after each model."""
    parser = argparse.ArgumentParser(prog="python -m recipes.zoo", description=__doc__)
    parser.add_argument("--mapping", choices=tuple(MAPPINGS), help="whose models to train")
    parser.add_argument("--cube", action="store_true", help="on a cube (1, 2, 1) in place of two pipeline ranks")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="keep the rows that the JSON has")
    parser.add_argument("--only", nargs="+", default=(), help="types of models, whose rows are made anew")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each model (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="only rebuild the page")
    arguments = parser.parse_args()
    if arguments.mapping is None and not arguments.page:
        parser.error("expected --mapping or --page")
    if arguments.mapping is not None:
        train(arguments)
    rebuild()


def train(arguments: argparse.Namespace) -> None:
    """Train the models of a mapping, each in a fork of this process, which has imported all that they share."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    mapping = MAPPINGS[arguments.mapping]
    import_module(
        {"transformers": "transformers.modeling_utils"}.get(mapping.library, mapping.library)
    )  # for all forks
    from recipes.zoo import trial

    path, console = FOLDER / f"{arguments.mapping}.json", Console()
    known = json.loads(path.read_text("utf-8"))["models"] if path.exists() else []
    names, layout = mapping.names(), "cube" if arguments.cube else "P=2"
    rows = {key: row for row in known if (key := (row["model"], row["class"])) in names}
    wanted = [one for one in names if not arguments.only or one[0] in arguments.only]
    wanted = [one for one in wanted if not (arguments.goes_on and layout in rows.get(one, {"layouts": ()})["layouts"])]
    for kind, name in track(wanted, arguments.mapping, console=console):
        row = trial.run(arguments.mapping, kind, name, layout, arguments.timeout)
        before = rows.get((kind, name), row)["layouts"]
        rows[kind, name] = row | {"layouts": before | row["layouts"]}
        console.print(f"{kind} {name}: {layout}: {row['layouts'][layout]['verdict']}", highlight=False)
        told = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {library: version(library) for library in (*LIBRARIES, mapping.library)},
            "models": [rows[key] for key in sorted(rows)],
        }
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
