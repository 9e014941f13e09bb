"""Reads a checkpoint, of whatever layout and format, as the dictionary that Lightning and its hooks know.

a folder        manifest, hashes of all bytes, values without pickle; tensors are read when they are used
a plain file    its CRCs, then torch.load: only tensors and plain values, of which only the pages used are read
anything else   the Trainer's CheckpointIO: old files, remote ones

Gives the optimizers of a run the states of a checkpoint: checked on all ranks, then each rank reads its part.

Refuses a checkpoint to start from that isn't there, or can't be read, before any process starts.

`KeptValues` keeps what a checkpoint has for a model until the model is cut; then each rank reads its part.

Lightning         resume_start   on_load_checkpoint   load_model_state_dict   strategy.setup
this package      headers read   may change entries   entries are kept        checked, cut, each rank reads its part
"""

import os
from collections.abc import Collection, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing import load_state, plain_file
from lightning_hanayo.dist_checkpointing.compare import folder_content
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder, verify_file
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.load_state import OptimizerState, Sharding, Source, check_fit, tensors_of
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.errors import CheckpointError, CheckpointNotFoundError, listed, nearest
from lightning_hanayo.strategy.checkpoints.resume import saved_run
from lightning_hanayo.strategy.joining import on_all_ranks, place_in_world, with_common_errors
from lightning_hanayo.strategy.lightning.state import unwrapped
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.setup.optimizers import is_elementwise
from lightning_hanayo.versions import identity_of

if TYPE_CHECKING:
    from lightning_hanayo.strategy.optimizer_steps import OptimizerSteps


_NEEDED = ("state_dict", "pytorch-lightning_version")


class Checkpoint(dict[str, Any]):
    """A checkpoint as Lightning knows it, and where it comes from."""

    source: Source

    @staticmethod
    def of(content: Any, source: Source) -> "Checkpoint":
        """What a file of any origin holds.

        Raises:
            CheckpointError: it is no checkpoint.
        """
        missing = [name for name in _NEEDED if not isinstance(content, dict) or name not in content]
        if missing:
            raise CheckpointError(
                f"{source} is no Lightning checkpoint: it has no {missing[0]!r}. Weights alone are loaded before "
                f"training: module.load_state_dict(torch.load(path))."
            )
        checkpoint = Checkpoint(content)
        checkpoint.source = source
        return checkpoint

    @staticmethod
    def source_of(checkpoint: Any) -> Source:
        """Where it comes from; user code may have made it."""
        return getattr(checkpoint, "source", Source("The checkpoint"))


def read_checkpoint(path: str | Path, io: CheckpointIO, *, weights_only: bool | None, verify: bool) -> Checkpoint:
    """Check a checkpoint and return it. Called by all ranks of the world.

    Args:
        path: of a folder or file, local or remote.
        io: the Trainer's, for what is neither a folder of this package nor a file in torch's format.
        weights_only: as for `torch.load`.
        verify: whether all bytes are checked.

    Raises:
        CheckpointNotFoundError: no rank finds it.
        CheckpointError: on all ranks, if it is damaged, incomplete, no checkpoint, or would run code.
    """
    storage = Storage(str(path).rstrip("/"))
    seen = on_all_ranks(lambda: storage.is_folder() or storage.is_file())
    if not any(seen):
        raise CheckpointNotFoundError(f"Checkpoint file not found: {path}")
    if not all(seen):
        raise CheckpointError(
            f"rank {seen.index(False)} finds no {path}, which rank {seen.index(True)} does. Give a path on a file "
            f"system that all ranks see."
        )
    # other CheckpointIOs have folders of their own
    is_ours = type(io) is TorchCheckpointIO
    if storage.is_folder() and (is_ours or storage.sizes([MANIFEST])):
        return _read_folder(path, verify)
    local = storage.path if storage.is_local else path  # without file://, ~ and a slash at the end
    if not is_ours:
        content = io.load_checkpoint(path, weights_only=weights_only)
        return with_common_errors(lambda: Checkpoint.of(content, Source(str(path))))

    def read() -> Checkpoint:
        if storage.is_local and plain_file.is_zip(local):
            if verify:
                verify_file(str(local), *place_in_world())
            content = plain_file.load_mapped(local, weights_only=weights_only)
        else:
            with plain_file.reading(local):
                content = io.load_checkpoint(local, weights_only=weights_only)
        return Checkpoint.of(content, Source(str(local)))

    return with_common_errors(read)


def _read_folder(path: str | Path, verify: bool) -> Checkpoint:
    folder = with_common_errors(lambda: CheckpointFolder(path))
    saves = on_all_ranks(lambda: folder.manifest.save_id)
    if len(set(saves)) > 1:
        raise CheckpointError(
            f"Ranks see different checkpoints in {path}: those of the saves {', '.join(sorted(set(saves)))}. Give a "
            f"path on a file system that all ranks share, or copy the folder to each node again."
        )

    def read() -> Checkpoint:
        if verify:
            folder.verify(*place_in_world())
        return Checkpoint(folder_content(folder))

    content = with_common_errors(read)
    content.source = Source(str(path), str(folder.manifest.about.get("module", "")).rpartition(".")[2] or None)
    saved_run(content)  # raises if that isn't in order
    return content


def load_optimizers(checkpoint: Mapping[str, Any], names: Mapping[Tensor, str], steps: "OptimizerSteps") -> None:
    """Load the states of the run's optimizers, by the `names` of their parameters. Called by all ranks of the world.

    Raises:
        CheckpointError: on all ranks, before any state changes: they are another optimizer's, of other parameters, or
            missing.
    """
    source, states, sharding = Checkpoint.source_of(checkpoint), checkpoint["optimizer_states"], steps.sharding
    run, optimizers = steps.run, steps.run.trainer.optimizers
    if len(states) != len(optimizers):
        raise CheckpointError(
            f"{source} has the states of {len(states)} optimizers, this {type(run.module).__name__} has "
            f"{len(optimizers)}. Configure the same ones, or load its weights alone, with init_from."
        )
    shapes: Mapping[Tensor, tuple[int, ...]] = {} if sharding is None else sharding.whole_shapes
    check = partial(OptimizerState, names=names, source=source, accept=run.options.load_anyway)
    checked = [
        check(unwrapped(one), state, shapes=shapes if is_elementwise(one) else None)
        for one, state in zip(optimizers, states, strict=True)
    ]
    for line in (line for one in checked for line in one.warnings):
        rank_zero_warn(line)
    for one in checked:
        with_common_errors(lambda one=one: one.load(sharding, steps.updates))  # type: ignore[misc]


_CHOSEN_LATER = ("last", "hpc")
"""Lightning finds them when the run starts, and starts anew if there is no last one."""
_FIRST_BYTES = (b"PK", b"\x80")
"""of a file in torch's format, and of its format before torch 1.6"""


def check_start(path: Any, trainer: "pl.Trainer", io: CheckpointIO) -> None:
    """Check the `ckpt_path` of a run. What is remote, or written by another CheckpointIO, is checked when it is read.

    Raises:
        CheckpointError: it is no path, there is nothing, or nothing that can be read.
    """
    if path is None or path in _CHOSEN_LATER or str(path).startswith("registry"):
        return
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise CheckpointError(f"ckpt_path={path!r}: expected the path of a checkpoint, 'last', 'best' or None")
    if path == "best":
        if not getattr(trainer.checkpoint_callback, "best_model_path", ""):
            raise CheckpointError(
                "ckpt_path='best': no ModelCheckpoint of this Trainer has saved a best one. Give the path of one."
            )
    elif (storage := Storage(str(path).rstrip("/"))).is_local:
        check_local(storage.path, io)


def check_local(path: str, io: CheckpointIO | None = None) -> None:
    """Check a path in a local file system.

    Raises:
        CheckpointError: there is nothing, or nothing that can be read.
    """
    if not os.path.exists(path):
        raise CheckpointNotFoundError(
            f"Checkpoint file not found: ckpt_path={path}: there is no such file or folder{_others(Path(path))}"
        )
    if io is not None and type(io) is not TorchCheckpointIO:
        return
    if os.path.isdir(path):
        CheckpointFolder(path)
        return
    try:
        with open(path, "rb") as file:
            begin = file.read(2)
    except OSError as error:
        raise CheckpointError(f"ckpt_path={path} can't be read: {error.strerror}") from None
    if not begin.startswith(_FIRST_BYTES):
        what = "is no checkpoint: it is not in torch's format" if begin else "is empty"
        raise CheckpointError(f"ckpt_path={path} {what}. Give another one.")


def _others(path: Path) -> str:
    """What is there instead."""
    try:
        found = sorted(one.name for one in path.parent.iterdir() if one.suffix == path.suffix)
    except OSError:
        return f", nor a folder {path.parent}"
    return f"; {nearest(path.name, found[-5:])}" if found else ""


class KeptValues:
    """A state dict for a module, whole or cut.

    Args:
        module: its LightningModule.
        state: what a checkpoint has for it. It may be changed afterwards: this keeps the entries of now.
        source: where it comes from.
        options: those of the strategy.
        strict: whether all names must be the same.
    """

    def __init__(
        self, module: nn.Module, state: Mapping[str, Any], source: Source, options: Options, *, strict: bool
    ) -> None:
        self._state: Any = copy(state)  # with `_metadata`, the versions of modules' entries, which hooks ask for
        self._source = source
        self._options = options
        self._strict = strict
        self._versions = _versions(module)
        self._is_scanned = False

    @property
    def names(self) -> Collection[str]:
        """Of all entries."""
        return set(self._state)

    def drop_replaced(self, module: nn.Module) -> None:
        """Called before the module changes: leave out what user code has given other values since.

        A callback, such as one that averages weights, loads others in its `on_load_checkpoint`.
        """
        current = tensors_of(module)
        for name, version in _versions(module).items():
            if name in self._state and version != self._versions.get(name, version):
                self._state[name] = current[name]

    def check(self, module: nn.Module, cube: Sharding | None) -> None:
        """Compare names, shapes and dtypes. Called by all ranks, before a value changes.

        Raises:
            CheckpointError: on all ranks, what doesn't fit.
        """
        has_masters = self._options.master_weights is not None
        expected = load_state.entries(module, cube, has_masters=has_masters)
        accepted = check_fit(
            expected, self._state, self._source, module, strict=self._strict, accept=self._options.load_anyway
        )
        for line in accepted:
            rank_zero_warn(line)

    def put_in(self, module: nn.Module, cube: Sharding | None) -> None:
        """Read this rank's part of the values into the module. Called by all ranks of the world.

        Raises:
            CheckpointError: on all ranks, if one can't read its part, or would get weights that are no numbers.
        """
        if not self._is_scanned:
            found = on_all_ranks(lambda: load_state.not_finite(module, self._state, cube))
            names = sorted({name for names in found for name in names})
            message = f"{self._source} has NaN or infinite values in {listed(names)}"
            if names and "nan" not in self._options.load_anyway:
                raise CheckpointError(
                    f"{message}: the training had failed before it was saved. Load an earlier checkpoint, or accept "
                    f"them: HanayoStrategy(load_anyway=('nan',)). No value was changed."
                )
            if names:
                rank_zero_warn(f"{message}: accepted")
            self._is_scanned = True
        with_common_errors(lambda: load_state.load(module, self._state, cube, self._source, strict=self._strict))


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The tensor that each name of the module stands for, and how often it was written."""
    return {name: identity_of(tensor) for name, tensor in tensors_of(module).items()}
