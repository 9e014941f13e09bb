"""Weights & Biases without an account: a run is kept offline, quietly, instead of asking for a key."""

from collections.abc import MutableMapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

SERVER = "https://api.wandb.ai"


def default_to_offline(environment: MutableMapping[str, str]) -> None:
    """Set `WANDB_MODE=offline` where the user has chosen no mode and there is no key to be found."""
    if "WANDB_MODE" in environment or environment.get("WANDB_API_KEY") or _has_login(environment):
        return
    environment["WANDB_MODE"] = "offline"
    environment.setdefault("WANDB_SILENT", "true")


def _has_login(environment: MutableMapping[str, str]) -> bool:
    """Whether the user's netrc file has an entry for the server, which is where `wandb login` puts the key."""
    server = urlsplit(environment.get("WANDB_BASE_URL", SERVER)).hostname or ""
    home = Path(environment.get("HOME", "~")).expanduser()
    for place in (environment.get("NETRC"), home / ".netrc", home / "_netrc"):
        if place is not None and Path(place).is_file():
            try:
                return netrc(str(place)).authenticators(server) is not None
            except (NetrcParseError, OSError):
                return False
    return False
