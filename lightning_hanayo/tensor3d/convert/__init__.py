"""Replaces the layers of a block stack by 3-D parallel ones."""
