"""Entry point of the drill:  python -m recipes.resume_drill [--seed N] [--kills N] [--torchrun] [--picture FILE]

Trains twice: once undisturbed, once with kills and resumes, and compares the ends bit by bit. It takes 2 to 3 minutes.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from recipes.resume_drill.compare import Comparison, compare_runs
from recipes.resume_drill.drill import Drill
from recipes.resume_drill.train import DATA, PIPE
from recipes.resume_drill.victims import Launcher, plan
from recipes.resume_drill.watch import Watch, draw


def main() -> int:
    """Run the drill; 1 if the ends differ."""
    options = _parser().parse_args()
    console = Console()
    launcher: Launcher = "torchrun" if options.torchrun else "lightning"
    kills = plan(options.seed, options.kills, options.steps, PIPE * DATA, launcher)
    console.print(f"{options.steps} steps on {PIPE * DATA} ranks; {len(kills)} kills, seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="resume-drill-") as name:
        undisturbed, disturbed = Path(name, "undisturbed"), Path(name, "disturbed")
        with Watch("undisturbed", options.steps, console) as watch:
            Drill(undisturbed, options.steps, (), launcher, watch).run()
        with Watch("disturbed", options.steps, console) as watch:
            events = Drill(disturbed, options.steps, kills, launcher, watch).run()
        found = compare_runs(undisturbed, disturbed)
    if options.picture:
        draw(events, options.picture)
    console.print(summary(found))
    return 1 if found.different else 0


def summary(found: Comparison) -> str:
    """The result, in a sentence or two."""
    compared = f"{found.num_tensors} values of the model and its optimizer, and {found.num_batches} batches"
    if found.different:
        return f"{len(found.different)} of {compared} differ, first {found.different[0]}"
    return f"{compared}: all equal to the last bit. {found.repeated} batches were trained on again after a resume."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.resume_drill", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="chooses who is killed and when")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--torchrun", action="store_true", help="torchrun restarts the ranks; its agent is killed, too")
    parser.add_argument("--picture", type=Path, help="draw steps against time into this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
