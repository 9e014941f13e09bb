"""The points of a save, by which its order of writes is told, tested and stopped.

rank 0        BEGUN  FOLDER_MADE  HALF_WRITTEN  WRITTEN  SYNCED  GATHERED  MANIFEST_READY  COMMITTED  CLEANED
other ranks   BEGUN  FOLDER_MADE  HALF_WRITTEN  WRITTEN  SYNCED  GATHERED  - once rank 0 is at the end: -  CLEANED
"""

from collections.abc import Callable
from enum import IntEnum


class Point(IntEnum):
    """What a rank has just done. A process that ends at any of them leaves the checkpoint of before, or the new one."""

    BEGUN = 1
    FOLDER_MADE = 2
    """and this rank sees it"""
    HALF_WRITTEN = 3
    """half of its bytes, the last of them perhaps half a tensor"""
    WRITTEN = 4
    SYNCED = 5
    """its files are on the disk"""
    GATHERED = 6
    """rank 0 knows that all ranks' files are there"""
    MANIFEST_READY = 7
    """it is on the disk, under another name"""
    COMMITTED = 8
    """the new checkpoint is the one that is read"""
    CLEANED = 9
    """what it replaces is gone"""


AtPoint = Callable[[Point], object]


def go_on(point: Point) -> None:
    """Do nothing at a point."""
