"""Builders: one file per family of schedules. Importing this package registers them all."""

from lightning_hanayo.schedule.builders import (  # noqa: F401 - each registers its schedules
    dualpipev,
    gpipe,
    hanayo,
    hanayo_zb,
    interleaved,
    one_f_one_b,
    v_half_v_min,
    zbv,
)
