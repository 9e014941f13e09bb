"""Lists the faults of the battery: each kind at each site, the ranks and layouts taking turns.

kind        exception exception exception exception ...
site        import    setup     loader    forward
layout      P=4       P=2 D=2   P=2 cube  P=4            so that each kind meets each layout and each rank
rank        0         1         2         3
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from tests.faults.battery.fault import Kind
from tests.faults.battery.script import LAYOUTS

START = ("import", "configure_model", "setup", "on_fit_start")
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end")
FIRST_ONLY = ("training_step", "loader", "validation_step")
"""sites that only pipeline rank 0 reaches"""
INSIDE = ("forward", "backward", *FIRST_ONLY)
LATER = ("on_validation_start", "save", "on_fit_end", "after fit")
SITES = (*START, *HOOKS, *INSIDE, *LATER)
SIGNALLED = tuple(site for site in SITES if site not in ("import", "on_fit_end", "after fit"))
"""where a handler of signals is to be expected: Lightning calls on_fit_end once it has restored those before it"""
PLACES: dict[Kind, tuple[str, ...]] = {
    "kill": SITES,
    "stop": SITES,
    "sigterm": SIGNALLED,
    "sigint": SIGNALLED,
    "exception": SITES,
    "hang": tuple(site for site in SITES if site != "after fit"),  # there a script may do what it wants
    "gil": ("setup", "training_step", "forward", "on_train_batch_start", "save"),
    "nan": ("training_step", "forward", "backward", "on_before_optimizer_step"),
}
FIRST_RANKS = {"P=4": (0,), "P=2 D=2": (0, 2), "P=2 cube": (0, 1)}
"""the ranks with pipeline rank 0, of each layout"""
PEERS = ("ddp", "model_parallel")
PEERS_SITES = ("setup", "on_train_batch_start", "forward", "save")
"""what is compared with Lightning's own strategies"""


@dataclass(frozen=True)
class Case:
    """One fault of one run."""

    layout: str
    kind: Kind
    site: str
    rank: int
    launcher: str = "lightning"

    @property
    def name(self) -> str:
        """Identifies it on the command line and in the file of results."""
        return f"{self.layout}-{self.kind}-{self.site}-{self.rank}" + ("-torchrun" * (self.launcher == "torchrun"))


def _ranks_at(kind: Kind, site: str, layout: str) -> Sequence[int]:
    """The ranks that reach a site, of which one fails there."""
    if site == "import":  # before rank 0 has started the others, there is nobody else to name it
        return range(1, 4)
    if (kind, site) == ("hang", "on_fit_end"):  # if rank 0 hangs there it holds up nobody: it's reported, and goes on
        return range(1, 4)
    if site == "loader" and layout == "P=2 cube":  # rank 0 reads for its cube
        return (0,)
    return FIRST_RANKS[layout] if site in FIRST_ONLY else range(4)


def ours() -> Iterator[Case]:
    """Each kind at each site, and four under torchrun."""
    for shift, (kind, sites) in enumerate(PLACES.items()):
        for turn, site in enumerate(sites, start=shift):
            layout = list(LAYOUTS)[turn % 3]
            ranks = _ranks_at(kind, site, layout)
            yield Case(layout, kind, site, ranks[(turn // 3 + turn % 3) % len(ranks)])
    for rank, kind in zip(count(), ("kill", "exception", "sigterm", "nan")):
        yield Case("P=2 D=2", kind, "forward", rank, "torchrun")


def peers() -> Iterator[Case]:
    """The same kinds with Lightning's strategies."""
    for layout in PEERS:
        for turn, kind in enumerate(PLACES):
            sites = ("training_step", "forward", "backward") if kind == "nan" else PEERS_SITES
            yield from (Case(layout, kind, site, (turn + step) % 4) for step, site in enumerate(sites))
