"""Descriptions of the blocks and layers that can be parallelized whole, and the registry that users add to."""
