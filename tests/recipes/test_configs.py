"""Every recipe's YAML files are parsed by the command line, build their objects, and are consistent."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_hanayo.cli.trainer import WaveCLI
from tests.harness.thorough import covered

RECIPES = Path(__file__).parents[2] / "recipes"
TOO_LARGE = ("cluster", "large", "layouts")
"""folders of models that no machine of tests holds"""
CONFIGS = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent.name not in TOO_LARGE)


class Built(WaveCLI):
    """The command line, stopped just before training starts."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Stop here."""


def layers(config: Path) -> list[Path]:
    """The arguments for `config`: if it defines no model, the configuration that it extends comes first."""
    own = yaml.safe_load(config.read_text())
    return [config] if "class_path" in own.get("model", {}) else [config.parent / "wave.yaml", config]


def test_there_are_recipes() -> None:
    assert CONFIGS


@pytest.mark.parametrize(
    "config", covered(CONFIGS, by=CONFIGS[5::5]), ids=lambda config: str(config.relative_to(RECIPES))
)
def test_config_builds(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configs = (part for layer in layers(config) for part in ("--config", str(layer)))
    built = Built(["fit", *configs, "--trainer.accelerator=cpu"])
    options: dict[str, Any] = dict(built.config["fit"]["trainer"])

    for name in ("context", "vocab_size"):
        assert getattr(built.datamodule, name, 0) <= built.model.hparams.get(name, 0)
    assert options["max_steps"] % options["val_check_interval"] == 0, "the last step is followed by a validation"
    assert built.model.hparams.get("decay_steps", 1000) in (1000, options["max_steps"]), (
        "the cosine ends where training does"
    )
    assert str(options["default_root_dir"]).startswith("runs/")


@pytest.mark.parametrize("recipe", ["bert", "dpo", "gpt", "smollm2", "vit"])
def test_the_single_process_sees_the_same_batch_as_the_wave(recipe: str) -> None:
    wave, single = (yaml.safe_load((RECIPES / recipe / f"{name}.yaml").read_text()) for name in ("wave", "single"))
    ranks = wave["trainer"]["strategy"]["init_args"]["data_parallel_size"]
    assert single["data"]["init_args"]["batch_size"] == ranks * wave["data"]["init_args"]["batch_size"]
