"""Simulates schedules: when each action runs, what each rank holds, and which schedule is fastest."""
