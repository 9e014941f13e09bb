"""Configures Sphinx: the pages of this folder as a site. `tox -e docs` builds it.

The pages are Markdown that also reads well in a checkout: links lead from file to file. Where one leads out of this
folder (`../../recipes/gpt/README.md`), the site links to the repository, or shows the link's text alone while the
repository's address is unset.
"""

import re
import sys
import tomllib
from pathlib import Path
from posixpath import join, normpath

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for autodoc

from lightning_hanayo import __version__ as release  # noqa: E402
from recipes.paper import explorer  # noqa: E402

REPOSITORY: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["lightning-hanayo"]["repository"]

project = "lightning_hanayo"
author = copyright = "the lightning_hanayo contributors"
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False  # "$2 and $3" is no formula
myst_heading_anchors = 4  # `page.md#a-heading`, as in a checkout
suppress_warnings = ["myst.header"]  # the benchmarks' pages are the output of commands, which begin with a list

default_role = "code"  # docstrings have `code` in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_use_rtype = False

copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor output

html_theme = "furo"
html_math_renderer = "mathml"
html_title = f"lightning_hanayo {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Let Sphinx call the functions below for each page that it reads."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("source-read", _with_title)
    app.connect("source-read", _link_to_explorer)
    app.connect("build-finished", _write_explorer)
    app.connect("source-read", _links_out_of_the_site)
    app.connect("autodoc-process-docstring", _drawings, priority=100)  # before napoleon reads the sections


def _formula(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def _with_title(app: Sphinx, page: str, source: list[str]) -> None:
    """Give a benchmark's page without a title, as some print it, the name of its file."""
    if page.startswith("benchmarks/") and not re.search(r"^# ", source[0], re.MULTILINE):
        source[0] = f"# Benchmark: {page.rpartition('/')[2]}\n\n{source[0]}"


def _link_to_explorer(app: Sphinx, page: str, source: list[str]) -> None:
    """Link to the page of `recipes.paper.explorer`, which the site alone has."""
    link = '<a href="../explore.html">Choose P, B and W</a>, and see the schedules side by side.'
    source[0] = source[0].replace("<!-- explorer -->", link)


def _write_explorer(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        explorer.draw(Path(app.outdir, "explore.html"))


def _links_out_of_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """`[the recipe](../recipes/gpt/README.md)` -> a link to the repository, or "the recipe"."""

    def replaced(match: re.Match[str]) -> str:
        target = normpath(join("docs", page, "..", match["target"]))
        if target.startswith("docs/"):
            return match[0]
        return f"[{match['text']}]({REPOSITORY}/blob/HEAD/{target})" if REPOSITORY else match["text"]

    source[0] = re.sub(r"(?<!!)\[(?P<text>[^]]+)\]\((?P<target>(?!\w+:|#)[^)\s]+)\)", replaced, source[0])


def _drawings(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep a docstring's drawings as they are: paragraphs, not sections, that have gaps within their lines."""
    paragraphs = "\n".join(lines).split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        if re.search(r"\S {2,}\S", paragraph) and not re.match(r"\s*(\w+:$|\s)", paragraph, re.MULTILINE):
            paragraphs[i] = "::\n\n" + "\n".join(f"    {line}" for line in paragraph.splitlines())
    lines[:] = "\n\n".join(paragraphs).splitlines()
