"""Simulates schedules: when each action runs, how much memory each rank holds, how large the bubble is."""
