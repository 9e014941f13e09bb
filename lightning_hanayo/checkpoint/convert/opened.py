"""Opens a checkpoint of any kind as the dictionary that Lightning knows. Its tensors are read when they are used."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_hanayo.checkpoint.convert.run_state import as_in_a_file
from lightning_hanayo.checkpoint.format.state_document import RUN
from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.checkpoint.load.folder_content import folder_content
from lightning_hanayo.checkpoint.load.plain_file import is_zip, load_mapped, verify
from lightning_hanayo.errors import CheckpointError


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that was verified."""

    path: str
    content: dict[str, Any]
    """as Lightning knows it; of a folder, states of optimizers have names of parameters in place of numbers"""
    folder: CheckpointFolder | None = None
    """None for a plain file"""

    @property
    def about(self) -> Mapping[str, Any]:
        """What the manifest of a folder says."""
        return {} if self.folder is None else self.folder.manifest.about

    @property
    def state_dict(self) -> dict[str, Any]:
        """The module's."""
        state: dict[str, Any] = self.content["state_dict"]
        return state

    @property
    def tied(self) -> dict[str, str]:
        """Entries of the state dict that are the same tensor as an earlier one: that one's name."""
        if self.folder is None:
            return tied_in_memory(self.state_dict)
        tied = self.about.get("tied")
        names = set(self.state_dict)
        items = tied.items() if isinstance(tied, dict) else ()
        return {name: other for name, other in items if isinstance(other, str) and {name, other} <= names}


def tied_in_memory(state: Mapping[str, Any]) -> dict[str, str]:
    """Names of tensors that share the memory of an earlier one of the same shape: that one's name."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            other = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), name)
            if other != name:
                tied[name] = other
    return tied


def open_checkpoint(path: str) -> OpenedCheckpoint:
    """Verify a checkpoint, and open it.

    Args:
        path: of a checkpoint folder (local or an fsspec URL) or of a plain, local file.

    Raises:
        CheckpointError: it isn't a checkpoint, isn't whole, or can't be read without running code.
    """
    storage = Storage.of(path)
    if not (storage.is_local and storage.is_file()):
        folder = CheckpointFolder(path)
        folder.verify()
        content = folder_content(folder)
        if RUN in content:
            content[RUN] = as_in_a_file(folder, content[RUN])
        return OpenedCheckpoint(path, content, folder)
    if not is_zip(Path(storage.path)):
        raise CheckpointError(f"{path} is no checkpoint: neither a folder of this package nor a file of torch.save")
    verify(storage.path)
    content = load_mapped(storage.path, weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no 'state_dict'")
    return OpenedCheckpoint(path, content)
