"""Checkpoints of a run: what is saved, loaded and resumed."""
