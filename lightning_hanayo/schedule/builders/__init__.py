"""Builders: one file per family of schedules. Importing this package registers them all."""

from lightning_hanayo.schedule.builders import classic, hanayo, v_schedules  # noqa: F401 - each registers its schedules
