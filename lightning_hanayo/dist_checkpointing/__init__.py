"""Saves and loads checkpoints in the single-process format (same names, full values), whatever the layout."""
