"""Gradients: the boundary of a stage's graph, split backward, tied weights, and the all-reduce over data ranks."""
