"""Names and texts use the field's words, not private ones.

    python -m tests.test_words [PATH ...]     lists violations as file:line

Two tables say what is refused: `NAMES`, whole words of identifiers (snake_case and CamelCase are split), and `PROSE`,
regular expressions for text. Their keys say what to write instead. A word that is also plain English is refused in
names alone, or in text with the context that makes it private.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tokenize import COMMENT, tokenize
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

NAMES = {
    "message, send buffer, point-to-point channel, message key": "packet parcel mail route",
    "stage input, proxy, forward patch, block tracer": "cargo hole bridge recorder",
    "deferred gradients, relay, message timing, trace gather": "handover chain crossing collection",
    "reshard, stage context, hooks, NoHooks": "gate passage surroundings setting nothing",
    "mesh, collectives, parallelize, convert, parameters outside the stack": "grid grids moves spread swap dense",
    "padding sample, dry run, placeholder loader, self-contained": "ghost rehearsal rehearse shadow standalone",
    "list scheduler, fill policy, tolerance or timeout": "follower manner manners patience",
    "run": "play plays played player playing",
}
TENSOR3D_NAMES = {
    "shared input, gathered forward": "entry inside",
    "block specs; registered, generic; eligibility": "kinds known unknown ordinary",
}
"""Refused in `lightning_hanayo/tensor_parallel` alone: elsewhere these are plain English, as the kinds of actions."""

PROSE = {
    "rejected, with an error that names it": r"(refused|rejected) by (its |that )?name",
    "message, send buffer, channel, message key": r"packets?|parcels?|mail|routes?",
    "stage input, proxy, gap, forward patch, block tracer": r"cargos?|holes?|bridges?|recorders?",
    "deferred gradients, relay, message timing, trace gather": (
        r"handovers?|crossings?|(?<!garbage\s)collection|(the|its) chain(?! rule)"
    ),
    "reshard, admission, hooks": r"gates?|passages?|surroundings|Nothing\(\)",
    "stage context": r"(the|its|this) setting(?! of)",  # "no setting helps" is plain English
    "column-parallel, row-parallel": r"(first|second) layouts?",
    "block specs": r"(block|layer)s?'? kinds?|kinds of (blocks|layers)",
    "registered, generic": r"(un)?known\W{0,4} (block|stack)s?|(block|stack)s? (is|are) (un)?known|treated as unknown",
    "mesh, shard, parallelize, convert, outside the stack": (
        r"grids?|(?<!evenly\s)spread(s|ing)?(?! evenly)|swap(s|ped|ping)?|dense"
    ),
    "padding sample, dry run, placeholder loader, self-contained": (
        r"ghosts?|rehears(al|als|e|es|ed)|shadow loaders?|standalone"
    ),
    "list scheduler, fill policy, tolerance or timeout": r"followers?|manners?|patience",
    "run": r"play(s|ed|ing|er|ers)?",
    "is stored on": r"(lie|lies|lay|lying) on",
    "compared with, next to, during, while": r"beside",
    "available": r"at hand",
}

ALLOWED = {
    ("lightning_hanayo/tensor_parallel/layers/linear.py", "gate"),  # SwiGLU's third matrix, as Llama names it
    ("recipes/benchmarks/cluster.py", "bridge"),  # Linux's virtual switch
    ("recipes/benchmarks/cluster.py", "packet"),  # on a network link
    ("recipes/bert/module.py", "dense"),  # BERT's own name of the head's linear layer, and a checkpoint key
}
"""(file, word): the field has the same word for something else."""

_PROSE = {
    instead: re.compile(rf"\b({words})\b".replace(" ", r"\s+"), re.IGNORECASE)  # a line may end between two words
    for instead, words in PROSE.items()
}
_NAMES, _TENSOR3D_NAMES = (
    {word: instead for instead, words in table.items() for word in words.split()} for table in (NAMES, TENSOR3D_NAMES)
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Violation(NamedTuple):
    """One refused word."""

    path: str
    line: int
    word: str
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r} in {self.text!r}; write {self.instead}"


@cache
def words_of(name: str) -> tuple[str, ...]:
    """`TorchPlayer` -> torch, player; `num_moves` -> num, moves."""
    return tuple(word.lower() for word in _WORD.findall(name))


def refused_in_name(path: str, line: int, name: str) -> Iterator[Violation]:
    """The refused words of one identifier."""
    refused = _NAMES | _TENSOR3D_NAMES if path.startswith("lightning_hanayo/tensor_parallel/") else _NAMES
    for word in words_of(name):
        if word in refused and (path, word) not in ALLOWED:
            yield Violation(path, line, word, name, refused[word])


def refused_in_text(path: str, line: int, text: str) -> Iterator[Violation]:
    """The refused words of a text whose first line is the file's `line`; code between ``` or ` counts, too."""
    for instead, pattern in _PROSE.items():
        for match in pattern.finditer(text):
            if (path, match[0].lower().removesuffix("s")) in ALLOWED:
                continue
            before = text[: match.start()]
            begin = before.rfind("\n") + 1
            line_of_text = text[begin : text.find("\n", match.end()) % (len(text) + 1)].strip()
            yield Violation(path, line + before.count("\n"), " ".join(match[0].split()), line_of_text, instead)


def names_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Classes, functions, parameters, and the attributes and variables that are set."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def texts_in(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, help texts, messages (all strings with a space), and comments."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    with path.open("rb") as file:
        yield from ((token.start[0], token.string) for token in tokenize(file.readline) if token.type == COMMENT)


def python_files() -> list[Path]:
    """All modules of the package and of the recipes."""
    return sorted(path for folder in ("lightning_hanayo", "recipes") for path in (ROOT / folder).rglob("*.py"))


def documents() -> list[Path]:
    """The README and the pages next to it, and all others."""
    folders = ("docs", "recipes", ".github")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    return sorted(pages)


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of the module's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def refused_names() -> Iterator[Violation]:
    """In file names, and in what they define."""
    for path in python_files():
        where = path.relative_to(ROOT).as_posix()
        for part in Path(where).with_suffix("").parts:
            yield from refused_in_name(where, 1, part)
        for line, name in names_in(nodes_of(path)):
            yield from refused_in_name(where, line, name)


def refused_texts() -> Iterator[Violation]:
    """In docstrings, messages, help texts, comments and pages."""
    for path in python_files():
        for line, text in texts_in(path):
            yield from refused_in_text(path.relative_to(ROOT).as_posix(), line, text)
    for path in documents():
        yield from refused_in_text(path.relative_to(ROOT).as_posix(), 1, path.read_text(encoding="utf-8"))


def listed(violations: Iterable[Violation]) -> str:
    """One per line, in the order of the files."""
    return "\n".join(map(str, sorted(set(violations))))


def test_names_use_the_fields_words() -> None:
    assert listed(refused_names()) == ""


def test_texts_use_the_fields_words() -> None:
    assert listed(refused_texts()) == ""


def test_exceptions_are_still_needed() -> None:
    for path, word in ALLOWED:
        assert re.search(rf"\b{word}s?\b", (ROOT / path).read_text()), f"{path} no longer has the word {word!r}"


def test_names_are_split_into_words() -> None:
    assert words_of("GPTMailRoute") == ("gpt", "mail", "route")
    assert words_of("_num_moves") == ("num", "moves")
    assert words_of("display_holepunch") == ("display", "holepunch")


def test_each_private_word_is_found() -> None:
    for words in NAMES.values():
        for word in words.split():
            assert [one.word for one in refused_in_name("a.py", 1, f"new_{word}")] == [word]
    private = "It plays a table.\nStage 0 lies\non rank 0.\nunknown blocks; the first layout"
    found = [(one.line, one.word) for one in refused_in_text("a.md", 5, private)]
    assert sorted(found) == [(5, "plays"), (6, "lies on"), (8, "first layout"), (8, "unknown blocks")]


def test_plain_english_is_not_refused() -> None:
    plain = (
        "inside the stack; no setting; collections.abc; an unknown option; garbage collection; display; evenly spread"
    )
    assert list(refused_in_text("a.md", 1, plain)) == []


if __name__ == "__main__":
    only = tuple(sys.argv[1:]) or ("",)
    print(listed(one for one in (*refused_names(), *refused_texts()) if one.path.startswith(only)))
