"""The report: what became of each layer of a stack, and why.

model.layers.0..11.mlp.up_proj      nn.Linear 768->3072     3-D, first
model.layers.0..11.norm             nn.LayerNorm            dense         an unknown block's
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from lightning_hanayo.tensor3d.convert.specs.spec import class_name


@dataclass(frozen=True)
class Row:
    """One module.

    Args:
        block: its block's number in the stack.
        path: in the block.
        kind: what it is, with its size.
        what: became of it.
        why: where it isn't what one would wish.
    """

    block: int
    path: str
    kind: str
    what: str
    why: str = ""


@dataclass(frozen=True)
class Report:
    """Of all blocks. As text it is short: what is the same in several blocks is one line.

    Args:
        stack: its qualified name.
        headline: what holds for all of it.
        rows: block by block.
    """

    stack: str
    headline: str
    rows: tuple[Row, ...] = ()

    def name(self, row: Row) -> str:
        """The module's qualified name."""
        return _joined(self.stack, str(row.block), row.path)

    @property
    def dense(self) -> tuple[Row, ...]:
        """What isn't spread."""
        return tuple(row for row in self.rows if row.what == "dense")

    def __str__(self) -> str:
        lines = [(_joined(self.stack, blocks, row.path), row.kind, row.what, row.why) for blocks, row in self._folded()]
        widths = [max((len(line[i]) for line in lines), default=0) for i in range(4)]
        table = ("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.headline, *(f"  {line.rstrip()}" for line in table)])

    def _folded(self) -> Iterator[tuple[str, Row]]:
        blocks: dict[Row, list[int]] = {}
        for row in self.rows:
            blocks.setdefault(replace(row, block=0), []).append(row.block)
        for row, numbers in blocks.items():
            yield _ranges(numbers), row


def kind_of(module: nn.Module) -> str:
    """What a report calls a module: "nn.Linear 768->3072", "peft.tuners.lora.layer.Linear"."""
    name = class_name(type(module))
    if name == class_name(nn.Linear) or name == "transformers.pytorch_utils.Conv1D":
        weight = module._parameters.get("weight")
        out, in_ = (0, 0) if weight is None else weight.shape if type(module) is nn.Linear else weight.shape[::-1]
        return f"{called(type(module))} {in_}->{out}" if weight is not None else called(type(module))
    return called(type(module))


def called(kind: type) -> str:
    """torch's classes by their usual names, all others by where they come from."""
    if kind.__module__.startswith("torch.nn.modules.") and getattr(nn, kind.__name__, None) is kind:
        return f"nn.{kind.__name__}"
    return kind.__name__ if kind.__module__.startswith("transformers.") else class_name(kind)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] to "0..2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
