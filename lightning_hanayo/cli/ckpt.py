"""Runs `hanayo ckpt`: lists, shows, verifies, compares, converts and removes checkpoints.

`ls`, `show`, `verify` and `rm` import no torch.
"""

import json
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from lightning_hanayo.cli.common import CommandGroup, fail, print_table, quantity
from lightning_hanayo.dist_checkpointing.folder import (
    CheckpointFolder,
    Found,
    existing,
    layout_text,
    look_at,
    look_into,
    verify_file,
)
from lightning_hanayo.dist_checkpointing.target import UNITS, Storage, remove_checkpoint, size_text
from lightning_hanayo.errors import CheckpointError, HanayoError
from lightning_hanayo.plotting.terminal_status import showing

SUBCOMMANDS = {
    "ls": "list the checkpoints in a folder, and what interrupted saves have left",
    "show": "show what is in a checkpoint: sizes, layout, versions, the largest tensors",
    "verify": "read every byte of a checkpoint, and compare the hashes",
    "diff": "compare two checkpoints: names, shapes, dtypes and values",
    "export": "write a Lightning file, safetensors, or a folder for from_pretrained",
    "rm": "remove checkpoints",
}
_GROUP = CommandGroup("ckpt", "List, check, compare, convert and remove checkpoints.", SUBCOMMANDS, "verify last.ckpt")


def run(argv: list[str]) -> int:
    """Run the subcommand that `argv` names, and return the exit code: 1 for a checkpoint that isn't whole."""
    try:
        return _GROUP.run(argv, Namespace())
    except CheckpointError as error:
        fail(str(error))
        return 1


def diff_options(parser: ArgumentParser) -> None:
    """Add the checkpoints, and how much to show."""
    parser.add_argument("first", metavar="A", help="a checkpoint folder or a plain file")
    parser.add_argument("second", metavar="B", help="another one")
    parser.add_argument("-n", "--rows", type=int, default=20, metavar="N", help="differences to show (default: 20)")
    parser.add_argument("--model", action="store_true", help="compare the model's tensors alone")


def run_diff(options: Namespace) -> int:
    """Compare two checkpoints: names, shapes, dtypes and values of tensors, and all other values.

    Each is a checkpoint folder or a plain file, of any layout. The largest difference of each tensor is shown, and
    which one differs first. A plain file numbers the parameters of optimizers: the names of the other checkpoint are
    used.

    Exit codes: 0 equal, 1 different or not whole, 2 if there is no such path.
    """
    # imports torch: seconds, which --help needn't wait for
    from lightning_hanayo.dist_checkpointing.compare import compare

    first, second = existing(options.first), existing(options.second)
    with showing(f"comparing {first} with {second}"):
        found = compare(first, second, model_only=options.model)
    differences = [one for one in found if one.what]
    if options.json:
        listed = list(map(asdict, differences))
        print(json.dumps({"equal": not differences, "compared": len(found), "differences": listed}))
        return int(bool(differences))
    if not differences:
        print(f"equal: {len(found)} tensors and values")
        return 0
    print(f"{len(differences)} of {len(found)} tensors and values differ, first {differences[0].name}")
    rows = [[one.name, one.what, "" if one.largest is None else f"{one.largest:.3g}"] for one in differences]
    print_table(["name", "difference", "largest"], rows[: max(0, options.rows)])
    if len(rows) > options.rows:
        print(f"and {len(rows) - options.rows} more (--rows)")
    return 1


def export_options(parser: ArgumentParser) -> None:
    """Add the checkpoint, the format and the target."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder or a plain file")
    parser.add_argument("target", metavar="TARGET", help="a path where nothing is yet")
    formats = ("file", "safetensors", "huggingface")
    parser.add_argument("--to", choices=formats, required=True, help="the format")
    meaning = "name of the model of transformers in the LightningModule (default: the one that fits)"
    parser.add_argument("--module", metavar="NAME", help=meaning)
    meaning = "a folder with config.json (default: the configuration in the checkpoint)"
    parser.add_argument("--config", metavar="DIR", help=meaning)
    meaning = "bytes of weights in one file (default: 5GB)"
    parser.add_argument("--max-shard-size", type=size, default=size("5GB"), metavar="SIZE", help=meaning)


def run_export(options: Namespace) -> int:
    """Write a checkpoint in a format that other tools read, one tensor at a time. It is verified first.

    file           one file of Lightning, for a plain Trainer (ckpt_path) and load_from_checkpoint
    safetensors    a folder with the weights, under the names that they have in the LightningModule
    huggingface    a folder for from_pretrained of transformers: its names, config.json, and an index above
    --max-shard-size

    The checkpoint is a folder of HanayoStrategy or a plain file. A plain file doesn't say which model of transformers
    it has: give the folder of its config.json with --config.

    Exit codes: 0, 1 if the checkpoint isn't whole, 2 if it doesn't fit the format, or the target exists.
    """
    # imports torch: seconds, which --help needn't wait for
    from lightning_hanayo.dist_checkpointing.export import export_checkpoint

    source = existing(options.checkpoint)
    with showing(f"exporting {source}"):
        settings = {name: getattr(options, name) for name in ("to", "module", "config", "max_shard_size")}
        written = export_checkpoint(source, options.target, **settings)
    if options.json:
        print(json.dumps(asdict(written)))
        return 0
    print(f"wrote {written.path}: {written.num_tensors} tensors of the model")
    for what, names in (("files", written.files), ("left out", written.left_out), ("note", written.notes)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 0


def size(text: str) -> int:
    """The bytes of a size such as "5GB" or "500 MB"."""
    units = {name.upper(): float(num_bytes) for name, num_bytes in UNITS.items()}
    return int(quantity(text, units, "a size such as 5GB"))


def ls_options(parser: ArgumentParser) -> None:
    """Add the folder."""
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="a path or an fsspec URL (default: .)")


def run_ls(options: Namespace) -> int:
    """List the checkpoints in a folder and below it: step, epoch, size, layout, and whether they are whole.

    Only names, sizes and manifests are read; `hanayo ckpt verify` reads every byte. What interrupted saves have left is
    listed, too.

    Exit codes: 0, 1 if a checkpoint isn't whole, 2 if there is no such folder.
    """
    found = look_into(options.folder)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
    elif found:
        columns = ["checkpoint", "step", "epoch", "size", "kind", "layout"]
        rows = []
        for one in found:
            numbers = ["" if number is None else str(number) for number in (one.step, one.epoch)]
            rows.append([one.path, *numbers, size_text(one.num_bytes), one.kind, one.layout])
        print_table(columns, rows, [bool(one.problem) for one in found])
        for one in found:
            if one.problem:
                print(f"{one.path}: {one.problem}")
    else:
        print(f"no checkpoints in {options.folder}")
    return int(any(one.kind == "incomplete" for one in found))


def rm_options(parser: ArgumentParser) -> None:
    """Add the checkpoints, and whether to ask."""
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoint folders or plain files")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run_rm(options: Namespace) -> int:
    """Remove checkpoints: folders, plain files, and what interrupted saves have left.

    Asks before it removes anything, unless --yes is given. What isn't a checkpoint is refused, and other files in a
    checkpoint's folder are kept.

    Exit codes: 0, 1 if the answer was no or something was kept, 2 if a path isn't a checkpoint; then nothing is
    removed.
    """
    found = []
    for path in dict.fromkeys(options.checkpoints):
        if (one := look_at(existing(path))) is None:
            raise HanayoError(f"{path} is no checkpoint, so it isn't removed")
        found.append(one)
    if not options.yes and not _agreed(found):
        return 1
    kept = [problem for one in found for problem in _remove(one)]
    for problem in kept:
        fail(problem)
    if options.json:
        print(json.dumps({"removed": [one.path for one in found], "kept": kept}))
    elif not kept:
        print(f"removed {size_text(sum(one.num_bytes for one in found))}")
    return int(bool(kept))


def _agreed(found: list[Found]) -> bool:
    if not sys.stdin.isatty():
        raise HanayoError("there is no terminal to ask in: give --yes to remove without a question")
    for one in found:
        print(f"{one.path}  {one.kind}, {size_text(one.num_bytes)}", file=sys.stderr)
    print(f"remove {'it' if len(found) == 1 else 'them'}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(one: Found) -> list[str]:
    """Remove it, and return why something of it was kept."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        remove_checkpoint(one.path)
    return [str(warning.message) for warning in caught]


_KINDS = {"model": "parameters and buffers", "optimizer": "optimizer states", "gradient": "accumulated gradients"}
_KINDS |= {"random": "random generators", "state": "tensors of other values"}
_OF_TENSORS = ("shape", "dtype", "num_bytes")


def show_options(parser: ArgumentParser) -> None:
    """Add the checkpoint, and how much to show of it."""
    parser.add_argument("checkpoint", metavar="FOLDER", help="a checkpoint folder, local or an fsspec URL")
    parser.add_argument("-n", "--tensors", type=int, default=10, metavar="N", help="largest tensors (default: 10)")


def run_show(options: Namespace) -> int:
    """Show what is in a checkpoint folder: step, layout, versions, files, the largest tensors, and what else was saved.
    Of a plain file, its size.

    Names, shapes and sizes come from its manifest; no tensor is read.

    Exit codes: 0, 1 if the folder isn't a whole checkpoint, 2 if there is no such folder.
    """
    found = look_at(existing(options.checkpoint))
    plain = found if found is not None and found.kind == "file" else None
    facts = asdict(plain) if plain else _facts(CheckpointFolder(options.checkpoint), options.tensors)
    if options.json:
        print(json.dumps(facts))
    elif plain:
        print(f"{plain.path}: a plain file, {size_text(plain.num_bytes)}")
    else:
        _print(facts)
    return 0


def _facts(folder: CheckpointFolder, num_tensors: int) -> dict[str, Any]:
    manifest = folder.manifest
    num_bytes: Counter[str] = Counter()
    for name, tensor in manifest.tensors.items():
        num_bytes[name.partition("/")[0]] += tensor.num_bytes
    # the keys of Lightning's checkpoint besides tensors, and of each the keys in it, such as names of callbacks
    state = _items(folder.text("state")) if "state" in manifest.texts else {}
    sections = {key: [*map(str, _items(value))] for key, value in _items(state.get("checkpoint")).items()}
    largest = sorted(manifest.tensors.items(), key=lambda item: -item[1].num_bytes)[: max(0, num_tensors)]
    plain = ("step", "epoch", "created", "save_id", "layout", "num_bytes", "about")
    return {
        "path": folder.path,
        **{name: getattr(manifest, name) for name in plain},
        "num_files": len(manifest.files),
        "bytes_by_kind": dict(num_bytes),
        "state": sections,
        "num_tensors": len(manifest.tensors),
        "largest": [
            {"name": name, "num_parts": len(one.parts)} | {key: getattr(one, key) for key in _OF_TENSORS}
            for name, one in largest
        ],
    }


def _items(document: Any) -> Mapping[str, Any]:
    """The entries of an encoded dictionary whose keys are texts; none for other values."""
    content = document.get("dict") if isinstance(document, dict) else None
    return content if isinstance(content, dict) else {}


def _print(facts: Mapping[str, Any]) -> None:
    about = facts["about"]
    versions = given if isinstance(given := about.get("versions"), dict) else {}
    count = about.get("num_parameters")
    parameters = f"{count:,}" if isinstance(count, int) else "unknown"
    rows = {
        "saved": f"{facts['created']}, save {facts['save_id']}",
        "step, epoch": f"{facts['step']}, {facts['epoch']}",
        "module": f"{about.get('module', 'unknown')}, {parameters} parameters",
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
        columns = [f"largest of {facts['num_tensors']} tensors", "shape", "dtype", "size", "parts"]
        shown: Mapping[str, Callable[[Any], object]] = {"shape": list, "num_bytes": size_text}
        keys = ("name", *_OF_TENSORS, "num_parts")
        print_table(columns, [[str(shown.get(key, str)(one[key])) for key in keys] for one in facts["largest"]])


def verify_options(parser: ArgumentParser) -> None:
    """Add the checkpoints."""
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoint folders or plain files")


def run_verify(options: Namespace) -> int:
    """Read every byte of checkpoints, and compare them with the hashes that were saved.

    Of a checkpoint folder the file and the tensor of a changed byte are named. A plain file of Lightning has a checksum
    for each of its parts; no code in it is run.

    Exit codes: 0 all whole, 1 one isn't, 2 if there is no such path.
    """
    problems = {}
    for path in map(existing, options.checkpoints):
        problems[path] = problem = _problem(path)
        if problem and not options.json:
            fail(problem)
        elif not options.json:
            print(f"{path}: whole")
    if options.json:
        results = [{"path": path, "whole": not problem, "problem": problem} for path, problem in problems.items()]
        print(json.dumps(results))
    return int(any(problems.values()))


def _problem(path: str) -> str:
    """What is wrong with a checkpoint; "" if nothing."""
    storage = Storage(path)
    try:
        with showing(f"verifying {path}"):
            if storage.is_local and storage.is_file():
                verify_file(storage.path)
            else:
                CheckpointFolder(path).verify()
    except CheckpointError as error:
        return str(error)
    return ""
