"""Schedules as text: CSV tables, and drawings for a terminal."""
