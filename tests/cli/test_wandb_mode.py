"""wandb is set to offline only if the user has chosen no mode and has no API key."""

import os
from pathlib import Path

import pytest

from lightning_hanayo.cli.trainer import default_to_offline


def mode(given: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What is set for these variables and this home."""
    for name in ("WANDB_MODE", "WANDB_SILENT", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(home), **given}.items():
        monkeypatch.setenv(name, value)
    default_to_offline()
    return os.environ.get("WANDB_MODE")


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_API_KEY": "k"}, None),
        ({"WANDB_MODE": "online"}, "online"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_mode_by_environment(
    given: dict[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mode(given, tmp_path, monkeypatch) == expected


@pytest.mark.parametrize(
    "entry, server, expected",
    [
        ("machine api.wandb.ai\n  login user\n  password k\n", None, None),
        ("machine example.org\n  login user\n  password k\n", None, "offline"),
        ("machine example.org\n  login user\n  password k\n", "https://example.org", None),
        ("not a netrc file", None, "offline"),
    ],
)
def test_a_login_counts_only_for_its_server(
    entry: str, server: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text(entry)
    (tmp_path / ".netrc").chmod(0o600)
    given = {"WANDB_BASE_URL": server} if server else {}
    assert mode(given, tmp_path, monkeypatch) == expected
