"""Tensor-parallel schemes side by side: the same Transformer layer, spread in one, two and three dimensions."""
