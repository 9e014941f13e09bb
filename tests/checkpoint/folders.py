"""Writes small checkpoint folders for tests, with each tensor cut as a test asks for."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.format import (
    FORMAT,
    MANIFEST,
    VERSION,
    Manifest,
    StoredFile,
    StoredPart,
    WholeTensor,
)
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.dist_checkpointing.tensor_file import dtype_name, write_tensors

Cut = Mapping[str, Sequence[Region]]
"""the regions of a tensor by its name; the i-th one is written by rank i"""
SAVE_ID = "5f2c9a1b"


def part_of(whole: Tensor, region: Region) -> Tensor:
    """The entries of a region, by an index array for each dimension."""
    for dim, runs in enumerate(region.runs):
        indices = [i for start, stop in runs for i in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return whole


def write_folder(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    cut: Cut | None = None,
    *,
    texts: Mapping[str, bytes] | None = None,
    save_id: str = SAVE_ID,
) -> Manifest:
    """Write a checkpoint folder; tensors that aren't in `cut` are written by rank 0 in one part."""
    storage = Storage(str(path))
    storage.make_folder()
    by_file: dict[str, dict[str, Tensor]] = defaultdict(dict)
    regions: dict[str, Any] = {}
    for name, whole in tensors.items():
        regions[name] = (cut or {}).get(name, [Region.whole(whole.shape)])
        for rank, region in enumerate(regions[name]):
            by_file[f"{name.split('/')[0]}-{rank:05}-{save_id}.safetensors"][name] = part_of(whole, region)
    files, hashes = {}, {}
    for file, own in by_file.items():
        with storage.create(file) as opened:
            files[file], hashes[file] = write_tensors(opened, own, metadata={"save_id": save_id})
    for stem, data in (texts or {}).items():
        with storage.create(f"{stem}-{save_id}.json") as opened:
            opened.write(data)
        files[f"{stem}-{save_id}.json"] = StoredFile(len(data), xxh3_128(data).hexdigest())
    stored = {}
    for name, whole in tensors.items():
        parts = []
        for rank, region in enumerate(regions[name]):
            file = f"{name.split('/')[0]}-{rank:05}-{save_id}.safetensors"
            parts.append(StoredPart(file, name, region, hashes[file][name]))
        stored[name] = WholeTensor(tuple(whole.shape), dtype_name(whole, name), tuple(parts))
    manifest = Manifest(
        save_id,
        10,
        1,
        "2026-01-01T00:00:00",
        {"pipe": 2},
        files,
        stored,
        {stem: f"{stem}-{save_id}.json" for stem in texts or {}},
    )
    with storage.create(MANIFEST) as opened:
        opened.write(manifest.to_bytes())
    return manifest


def sealed(document: Any) -> bytes:
    """A manifest with this content, and with the right hash."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    first = {"format": FORMAT, "version": VERSION, "xxh3_128": xxh3_128(body).hexdigest()}
    return json.dumps(first).encode() + b"\n" + body


def document_of(data: bytes) -> Any:
    return json.loads(data.partition(b"\n")[2])
