"""Gradients: where a stage's graph begins, split backward, tied weights, and the all-reduce over data ranks."""
