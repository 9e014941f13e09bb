"""The image of a cube shows each rank's shard of W where the paper draws it, with labels that match."""

from pathlib import Path

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.topology import Topology
from recipes.cube.picture import _Matrix, _Mesh, save_cube

W = """
    y=0  y=0  y=1  y=1
    x=0  x=1  x=0  x=1
z=0  0    4    2    6
z=1  1    5    3    7
"""
X = """
          z=0  z=1
x=0 y=0    0    1
x=0 y=1    2    3
x=1 y=0    4    5
x=1 y=1    6    7
"""
Y = """
    y=0  y=0  y=1  y=1
    z=0  z=1  z=0  z=1
x=0  0    1    2    3
x=1  4    5    6    7
"""


@pytest.mark.parametrize(("drawing", "row_axes", "column_axes"), [(W, "z", "yx"), (X, "xy", "z"), (Y, "x", "yz")])
def test_parts_lie_where_the_drawing_has_them(drawing: str, row_axes: str, column_axes: str) -> None:
    rows = [[int(cell) for cell in line.split() if cell.isdigit()] for line in drawing.splitlines() if line]
    rows = [row for row in rows if row]
    expected = {rank: (float(i), float(j)) for i, row in enumerate(rows) for j, rank in enumerate(row)}
    matrix, box = _Matrix("", "", row_axes, column_axes, "x"), (0.0, 0.0, float(len(rows[0])), float(len(rows)))
    cells = dict(matrix.cells(_Mesh(Topology(cube=(2, 2, 2)), 0), box))
    assert {rank: (top, left) for rank, (left, top, _, _) in cells.items()} == expected


@pytest.mark.parametrize(
    ("sizes", "rank", "texts"),
    [
        ((2, 2, 2), 5, ("gathered along y by 5, 7", "gathered along x by 1, 5", "summed along z by 4, 5")),
        ((1, 2, 1), 0, ("gathered along y by 0, 1", "gathered along x: nothing to do", "what rank 0 holds")),
    ],
)
def test_it_says_who_meets_whom(sizes: tuple[int, int, int], rank: int, texts: tuple[str, ...], tmp_path: Path) -> None:
    save_cube(tmp_path / "cube.svg", sizes, rank)
    picture = (tmp_path / "cube.svg").read_text()
    assert all(text in picture for text in texts)


def test_it_is_a_picture_of_a_rank_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match=r"rank 4 isn't in the cube \(1, 2, 2\), which has the ranks 0 to 3"):
        save_cube(tmp_path / "cube.png", (1, 2, 2), 4)
    with pytest.raises(HanayoError, match="must be one of png, svg, pdf"):
        save_cube(tmp_path / "cube.gif")
