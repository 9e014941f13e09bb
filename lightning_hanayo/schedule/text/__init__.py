"""Schedules as text: CSV files, and drawings for a terminal."""
