"""Layers whose weights and activations are sharded over a 3-D mesh."""
