"""Measures checkpoints: ours, torch's distributed checkpoint, and one file through rank 0."""
