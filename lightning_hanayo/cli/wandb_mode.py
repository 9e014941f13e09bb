"""Sets Weights & Biases to offline mode if the user has no account, so that a run doesn't ask for a key."""

from collections.abc import MutableMapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

SERVER = "https://api.wandb.ai"


def default_to_offline(environment: MutableMapping[str, str]) -> None:
    """Set `WANDB_MODE=offline` if the user has chosen no mode and has no API key."""
    if "WANDB_MODE" in environment or environment.get("WANDB_API_KEY") or _has_login(environment):
        return
    environment["WANDB_MODE"] = "offline"
    environment.setdefault("WANDB_SILENT", "true")


def _has_login(environment: MutableMapping[str, str]) -> bool:
    """Whether the user's netrc file has a key for the server; `wandb login` stores it there."""
    server = urlsplit(environment.get("WANDB_BASE_URL", SERVER)).hostname or ""
    home = Path(environment.get("HOME", "~")).expanduser()
    for path in (environment.get("NETRC"), home / ".netrc", home / "_netrc"):
        if path is not None and Path(path).is_file():
            try:
                return netrc(str(path)).authenticators(server) is not None
            except (NetrcParseError, OSError):
                return False
    return False
