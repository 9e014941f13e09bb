"""Hooks that Hatchling runs in a build: they add the recipes to the wheel, and the README to its metadata."""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class RecipesHook(BuildHookInterface):
    """Puts the recipes into the wheel, for `hanayo init`. An editable install reads those of the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add each recipe, which is a folder with a `wave.yaml`."""
        if version != "editable":
            for config in Path(self.root, "recipes").glob("*/wave.yaml"):
                recipe = config.parent
                build_data["force_include"][str(recipe)] = f"lightning_hanayo/_recipes/{recipe.name}"


class ReadmeHook(MetadataHookInterface):
    """Sets the long description: the README with links that work on a package index."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README, and the project's address if it is known."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        project = tomllib.loads(Path(self.root, "pyproject.toml").read_text(encoding="utf-8"))
        repository = project["tool"]["lightning-hanayo"]["repository"]
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_addresses(text, repository) if repository else without_files(text),
        }


def with_addresses(readme: str, repository: str) -> str:
    """The text of `readme` with the repository's addresses in links to files, and of pictures.

    Example:
        >>> with_addresses("![A wave](wave.png) [guide](guide.md#start)", "https://example.org/wave")
        '![A wave](https://example.org/wave/raw/HEAD/wave.png) [guide](https://example.org/wave/blob/HEAD/guide.md#start)'
    """

    def replaced(link: re.Match[str]) -> str:
        return f"{link[1]}({repository}/{'raw' if link[1].startswith('!') else 'blob'}/HEAD/{link[2]})"

    return re.sub(r"(!?\[[^]]*\])\((?!http|#)([^)]+)\)", replaced, readme)


def without_files(readme: str) -> str:
    """The text of `readme` without links to files, and without pictures from files and their captions in italics.

    Example:
        >>> without_files("![A wave](wave.png)\\n\\n*One step.*\\n\\nSee [the guide](guide.md) and [torch](https://pytorch.org).")
        'See the guide and [torch](https://pytorch.org).'
    """
    readme = re.sub(r"^!\[[^]]*\]\((?!http)[^)]*\)\n\n(\*[^*]+\*\n\n)?", "", readme, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^]]+)\]\((?!http)[^)]*\)", r"\1", readme)
