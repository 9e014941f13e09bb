"""Passes over a schedule: validation, communication, loss stage."""
