"""Show what is in a checkpoint folder: step, layout, versions, files, the largest tensors, and what else was saved.
Of a plain file, its size, step and epoch.

Names, shapes and sizes come from its manifest; no tensor is read.

Exit codes: 0, 1 if the folder isn't a whole checkpoint, 2 if there is no such folder.
"""

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_hanayo.checkpoint.found import Found, layout_text, look_at_one
from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.checkpoint.save.problems import size_text
from lightning_hanayo.cli.error_messages import fail
from lightning_hanayo.cli.tables import print_table
from lightning_hanayo.errors import CheckpointError

_KINDS = {"model": "parameters and buffers", "optimizer": "optimizer states", "gradient": "accumulated gradients"}
_KINDS |= {"random": "random generators", "state": "tensors of other values"}


def add_options(parser: ArgumentParser) -> None:
    """Add the checkpoint, and how much to show of it."""
    parser.add_argument("checkpoint", metavar="FOLDER", help="a checkpoint folder, local or an fsspec URL")
    parser.add_argument("-n", "--tensors", type=int, default=10, metavar="N", help="largest tensors (default: 10)")


def run(options: Namespace) -> int:
    """Show the checkpoint."""
    found = look_at_one(options.checkpoint)
    if found is not None and found.kind == "file":
        _print_file(found, as_json=options.json)
        return 0
    try:
        folder = CheckpointFolder(options.checkpoint)
        facts = _facts(folder, options.tensors)
    except CheckpointError as error:
        fail(str(error))
        return 1
    if options.json:
        print(json.dumps(facts))
    else:
        _print(facts)
    return 0


def _print_file(found: Found, *, as_json: bool) -> None:
    """What is known of a plain file without reading its values."""
    if as_json:
        print(json.dumps(asdict(found)))
        return
    numbers = {"step": found.step, "epoch": found.epoch}
    known = [f"{name} {number}" for name, number in numbers.items() if number is not None]
    print(f"{found.path}: {', '.join(['a plain file', size_text(found.num_bytes), *known])}")
    print("Its tensors are listed once it is a folder: hanayo ckpt import")


def _facts(folder: CheckpointFolder, num_tensors: int) -> dict[str, Any]:
    manifest = folder.manifest
    num_bytes: Counter[str] = Counter()
    for name, tensor in manifest.tensors.items():
        num_bytes[name.partition("/")[0]] += tensor.num_bytes
    largest = sorted(manifest.tensors.items(), key=lambda item: -item[1].num_bytes)[: max(0, num_tensors)]
    return {
        "path": folder.path,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "created": manifest.created,
        "save_id": manifest.save_id,
        "layout": dict(manifest.layout),
        "num_bytes": manifest.num_bytes,
        "num_files": len(manifest.files),
        "bytes_by_kind": dict(num_bytes),
        "about": dict(manifest.about),
        "state": _sections(folder),
        "num_tensors": len(manifest.tensors),
        "largest": [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "num_bytes": tensor.num_bytes,
                "num_parts": len(tensor.parts),
            }
            for name, tensor in largest
        ],
    }


def _sections(folder: CheckpointFolder) -> dict[str, list[str]]:
    """The keys of Lightning's checkpoint besides tensors, and of each the keys in it, such as names of callbacks."""
    if "state" not in folder.manifest.texts:
        return {}
    checkpoint = _items(_items(folder.text("state")).get("checkpoint"))
    return {key: [str(inner) for inner in _items(value)] for key, value in checkpoint.items()}


def _items(document: Any) -> Mapping[str, Any]:
    """The entries of an encoded dictionary whose keys are texts; none for other values."""
    content = document.get("dict") if isinstance(document, dict) else None
    return content if isinstance(content, dict) else {}


def _print(facts: Mapping[str, Any]) -> None:
    about = facts["about"]
    versions = about.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    rows = {
        "saved": f"{facts['created']}, save {facts['save_id']}",
        "step, epoch": f"{facts['step']}, {facts['epoch']}",
        "module": f"{about.get('module', 'unknown')}, {_thousands(about.get('num_parameters'))} parameters",
        "layout": layout_text(facts["layout"]) or "one process",
        "versions": ", ".join(f"{name} {text}" for name, text in versions.items()),
        "size": f"{size_text(facts['num_bytes'])} in {facts['num_files']} files",
    }
    for kind, num_bytes in facts["bytes_by_kind"].items():
        rows[f"  {_KINDS.get(kind, kind)}"] = size_text(num_bytes)
    for key, inner in facts["state"].items():
        if inner:  # not a number, such as the step
            rows[key] = ", ".join(name.partition("{")[0] for name in inner)
    print(facts["path"])
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}")
    if facts["largest"]:
        print_table(
            [f"largest of {facts['num_tensors']} tensors", "shape", "dtype", "size", "parts"],
            [
                [one["name"], str(one["shape"]), one["dtype"], size_text(one["num_bytes"]), str(one["num_parts"])]
                for one in facts["largest"]
            ],
        )


def _thousands(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else "unknown"
