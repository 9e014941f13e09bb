"""Builders: one file per family of schedules. Importing this package registers them all."""

from lightning_hanayo.schedule.builders import (
    chimera,
    gpipe,
    hanayo,
    hanayo_zb,
    interleaved,
    interleaved_zb,
    one_f_one_b,
    v_half_v_min,
    zb_h1,
    zbv,
)

__all__ = [
    "chimera",
    "gpipe",
    "hanayo",
    "hanayo_zb",
    "interleaved",
    "interleaved_zb",
    "one_f_one_b",
    "v_half_v_min",
    "zb_h1",
    "zbv",
]
