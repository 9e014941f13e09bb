"""Estimates of what an optimizer step takes: its time, and its memory."""
