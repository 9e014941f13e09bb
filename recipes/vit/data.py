"""Images of coloured shapes, drawn from their number: nothing is downloaded or stored."""

import warnings

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SHAPES = ("disc", "square", "ring", "cross")

# Drawing an image takes less time than sending it from a worker process.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """`count` images [3, size, size] with values around 0, and the index of each one's shape in SHAPES.

    Colour, place and size of a shape, and the noise around it, are random numbers of `seed` and the image's number.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = int(torch.randint(len(SHAPES), (), generator=random))
        radius, x, y = torch.rand(3, generator=random).tolist()
        radius = self.size * (0.15 + 0.15 * radius)
        centre = [radius + place * (self.size - 2 * radius) for place in (x, y)]
        away = torch.stack([torch.arange(self.size) - place for place in centre])
        rows, columns = away[0, :, None], away[1, None, :]
        inside = _inside(SHAPES[label], rows, columns, radius)
        colour = torch.rand(3, generator=random)[:, None, None] + 0.5
        return torch.where(inside, colour, 0.3 * torch.randn(3, self.size, self.size, generator=random)), torch.tensor(
            label
        )


def _inside(shape: str, rows: Tensor, columns: Tensor, radius: float) -> Tensor:
    """Which pixels [size, size] belong to the shape around the origin."""
    distance, farther = (rows**2 + columns**2).sqrt(), torch.maximum(rows.abs(), columns.abs())
    nearer = torch.minimum(rows.abs(), columns.abs())
    return {
        "disc": distance <= radius,
        "square": farther <= 0.85 * radius,
        "ring": (distance <= radius) & (distance >= 0.6 * radius),
        "cross": (farther <= radius) & (nearer <= 0.3 * radius),
    }[shape]


class ShapeData(L.LightningDataModule):
    """Images to train on, and others to validate with.

    Args:
        image_size: Pixels along each side.
        num_train: Images to train on.
        num_val: Images to validate with.
        batch_size: Images per batch and data-parallel rank.
    """

    def __init__(self, image_size: int = 32, num_train: int = 8192, num_val: int = 512, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train, self.val = Shapes(num_train, image_size, seed=1), Shapes(num_val, image_size, seed=2)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled each epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """In order."""
        return DataLoader(self.val, self.batch_size)
