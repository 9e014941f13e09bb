"""Converts the layers of a block stack to 3-D parallel ones."""
