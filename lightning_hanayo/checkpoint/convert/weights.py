"""Reads the weights of a checkpoint folder as those of a folder of safetensors: for `init_from`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from lightning_hanayo.checkpoint.format.manifest import MANIFEST
from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.checkpoint.load.folder_content import folder_content
from lightning_hanayo.checkpoint.load.stored_tensor import StoredTensor
from lightning_hanayo.checkpoint.pretrained.safetensors_folder import SafetensorsFolder, TensorHeader


class CheckpointWeights:
    """The model's tensors in a checkpoint folder, by their names in the LightningModule.

    It has the attributes and methods of a `SafetensorsFolder`.

    Raises:
        CheckpointError: it isn't a whole checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = CheckpointFolder(path)
        state = folder_content(self._folder)["state_dict"]
        self._values = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
        self.tensors = {
            name: TensorHeader(path, tuple(value.shape), value.dtype, str(value.dtype))
            for name, value in self._values.items()
        }

    @property
    def signature(self) -> str:
        """The same on all ranks that see the same save."""
        return self._folder.manifest.save_id

    def mapped(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, each in memory of its own.

        Raises:
            CheckpointError: a file can't be read any more.
        """
        for name in names:
            yield name, self._values[name].read()

    def verify(self, rank: int, num_ranks: int) -> None:
        """Read this rank's share of the model's bytes, and compare the hashes.

        Raises:
            CheckpointError: a byte isn't what was saved. The message names the file and the tensor.
        """
        tensors = self._folder.manifest.tensors
        parts = [part for name in tensors if name.startswith("model/") for part in tensors[name].parts]
        for part in parts[rank::num_ranks]:
            self._folder.verify_file(part.file, {part.key})


def open_weights(path: Path) -> SafetensorsFolder | CheckpointWeights:
    """Open a checkpoint folder, or a folder of safetensors.

    Raises:
        HanayoError: it is neither, or can't be read.
    """
    return CheckpointWeights(path) if (path / MANIFEST).is_file() else SafetensorsFolder(path)
