"""wandb is set to offline only if the user has chosen no mode and has no API key."""

from pathlib import Path

import pytest

from lightning_hanayo.cli.trainer import default_to_offline


@pytest.mark.parametrize(
    "given, mode",
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_API_KEY": "k"}, None),
        ({"WANDB_MODE": "online"}, "online"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_mode_by_environment(given: dict[str, str], mode: str | None, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), **given}
    default_to_offline(environment)
    assert environment.get("WANDB_MODE") == mode


@pytest.mark.parametrize(
    "entry, server, mode",
    [
        ("machine api.wandb.ai\n  login user\n  password k\n", None, None),
        ("machine example.org\n  login user\n  password k\n", None, "offline"),
        ("machine example.org\n  login user\n  password k\n", "https://example.org", None),
        ("not a netrc file", None, "offline"),
    ],
)
def test_a_login_counts_only_for_its_server(entry: str, server: str | None, mode: str | None, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(entry)
    (tmp_path / ".netrc").chmod(0o600)
    environment = {"HOME": str(tmp_path)} | ({"WANDB_BASE_URL": server} if server else {})
    default_to_offline(environment)
    assert environment.get("WANDB_MODE") == mode
