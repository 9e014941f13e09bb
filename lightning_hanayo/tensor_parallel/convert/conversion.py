"""The report of a conversion: what became of each layer of a stack, and why.

model.layers.0..11.mlp.up_proj      nn.Linear 768->3072     3-D, column-parallel
model.layers.0..11.norm             nn.LayerNorm            not converted           no linear layer
"""

from dataclasses import dataclass, replace

from torch import nn

from lightning_hanayo.tensor3d.convert.specs.spec import class_name, joined

NOT_CONVERTED = "not converted"


@dataclass(frozen=True)
class ReportRow:
    """What became of one module of block number `block`, and the reason why it couldn't be converted."""

    block: int
    path: str
    layer: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """The report of all blocks of a stack. As text, rows that are equal in several blocks are one line."""

    stack: str
    headline: str
    rows: tuple[ReportRow, ...] = ()

    def name(self, row: ReportRow) -> str:
        """Returns the module's qualified name."""
        return joined(self.stack, str(row.block), row.path)

    def __str__(self) -> str:
        blocks: dict[ReportRow, list[int]] = {}
        for row in self.rows:
            blocks.setdefault(replace(row, block=0), []).append(row.block)
        lines = [
            (joined(self.stack, _ranges(numbers), row.path), row.layer, row.outcome, row.reason)
            for row, numbers in blocks.items()
        ]
        widths = [max((len(line[i]) for line in lines), default=0) for i in range(4)]
        table = ("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.headline, *(f"  {line.rstrip()}" for line in table)])


def describe(module: nn.Module) -> str:
    """Returns how a report calls a module: "nn.Linear 768->3072", "peft.tuners.lora.layer.Linear"."""
    name, weight = class_name(type(module)), module._parameters.get("weight")
    if weight is None or name not in (class_name(nn.Linear), "transformers.pytorch_utils.Conv1D"):
        return short_class_name(type(module))
    out, in_ = weight.shape if type(module) is nn.Linear else weight.shape[::-1]
    return f"{short_class_name(type(module))} {in_}->{out}"


def short_class_name(cls: type) -> str:
    """Returns the usual name of a class of torch or `transformers`, and the qualified name of any other."""
    if cls.__module__.startswith("torch.nn.modules.") and getattr(nn, cls.__name__, None) is cls:
        return f"nn.{cls.__name__}"
    return cls.__name__ if cls.__module__.startswith("transformers.") else class_name(cls)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] to "0..2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
