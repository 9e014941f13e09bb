"""Fills the template of a page with its title and its data, and writes it."""

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_hanayo.errors import writing


def save_filled(path: str | Path, template: str, title: str, data: Any) -> None:
    """Write the page: `template` of this package, with a title and with data for its script.

    Raises:
        HanayoError: the file can't be written.
    """
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = Template((files(__package__) / template).read_text(encoding="utf-8"))
    with writing(path):
        Path(path).write_text(page.substitute(title=escape(title), data=text), encoding="utf-8")
