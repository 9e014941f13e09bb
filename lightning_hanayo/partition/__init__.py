"""Finds a model's stack of blocks, cuts it into stages, and gives each rank the parameters of its own stages only."""
