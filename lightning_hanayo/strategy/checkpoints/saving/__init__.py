"""Saves checkpoints: what each rank holds, what of it a rank writes, and what is checked before training."""
