"""Puts together what all ranks have written, and checks that it is a whole checkpoint."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lightning_hanayo.checkpoint.format.manifest import Manifest
from lightning_hanayo.checkpoint.format.region import partition_problem
from lightning_hanayo.checkpoint.format.stored import WholeTensor
from lightning_hanayo.checkpoint.save.folder.rank_files import Written, WrittenPart
from lightning_hanayo.errors import CheckpointError


def manifest_of(save_id: str, written: Sequence[Written], about: Mapping[str, Any]) -> Manifest:
    """Returns the manifest.

    Args:
        save_id: of this save.
        written: by each rank.
        about: what the manifest says of the whole: step, epoch, layout, and anything else.

    Raises:
        CheckpointError: ranks have saved different parts of a tensor than make it up.
    """
    parts: dict[str, list[WrittenPart]] = defaultdict(list)
    for part in (part for one in written for part in one.parts):
        parts[part.name].append(part)
    rest = dict(about)
    return Manifest(
        save_id=save_id,
        step=rest.pop("step", 0),
        epoch=rest.pop("epoch", 0),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        layout=rest.pop("layout", {}),
        files={name: file for one in written for name, file in one.files.items()},
        tensors={name: _whole(name, parts[name]) for name in sorted(parts)},
        texts={stem: file for one in written for stem, file in one.texts.items()},
        about=rest,
    )


def _whole(name: str, parts: Sequence[WrittenPart]) -> WholeTensor:
    """The tensor that ranks have written parts of."""
    kinds = {(part.shape, part.dtype) for part in parts}
    (shape, dtype), *others = sorted(kinds)
    problem = f"also {others[0]}" if others else partition_problem(shape, [part.stored.region for part in parts])
    if problem:
        raise CheckpointError(f"the ranks' parts of {name} {shape}, {dtype}, do not make up the whole: {problem}")
    return WholeTensor(shape, dtype, tuple(part.stored for part in parts))
