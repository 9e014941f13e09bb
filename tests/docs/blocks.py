"""Finds the code blocks of a page, and the comments above them that say how a test runs them.

<!-- thorough -->                          takes long: run by `tox -e thorough`
<!-- script -->                            run as a script, as what starts processes must be; thorough, too
<!-- file: train.py -->                    written to this file, not run: what follows runs it
<!-- before: from recipes.gpt.module import GPT -->     what the reader has: run first, in Python
<!-- with: --trainer.max_steps=2 -->       added to each `hanayo fit` of the block, to make it short
<!-- continues -->                         the block before it is run first: what it defines or writes is there
<!-- exits: 1 -->                          with this exit code
<!-- not run: needs a GPU -->              skipped, with this reason
```python
...
```
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("python", "bash", "console")
_COMMENT = re.compile(r"<!-- (thorough|script|file|before|with|continues|exits|not run)(?:: (.*?))? -->\n", re.DOTALL)
_BLOCK = re.compile(
    rf"(?P<comments>(?:{_COMMENT.pattern.replace('(.*?)', '.*?')})*)"
    rf"^(?P<indent> *)```(?P<language>{'|'.join(LANGUAGES)})\n(?P<code>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A code block: `line` is that of its first line of code, `first` the block that it continues."""

    page: Path
    line: int
    language: str
    code: str
    comments: dict[str, str]
    first: "Block | None" = None

    @property
    def is_thorough(self) -> bool:
        """Whether only the thorough tests run it."""
        if self.first is not None and self.first.is_thorough:
            return True
        return not self.comments.keys().isdisjoint(("thorough", "script"))

    @property
    def commands(self) -> list[str]:
        """The command lines: all of a `bash` block, those with a prompt of a `console` block. No comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [command for line in lines if (command := re.split(r"(?:^|\s)# ", line)[0].strip())]


def blocks_of(page: Path) -> list[Block]:
    """The blocks of Python and of commands, in the order of the page."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n") + 1
        comments = {name: value or "" for name, value in _COMMENT.findall(match["comments"])}
        first = found[-1] if "continues" in comments else None
        found.append(Block(page, line, match["language"], textwrap.dedent(match["code"]), comments, first))
    return found
