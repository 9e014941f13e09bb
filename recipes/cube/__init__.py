"""Cube: the figures and tables of `docs/concepts/cube.md`, made by `python -m recipes.cube` in seconds, without torch.

volumes     what a rank receives for a Transformer layer, grid by grid, beside 1-D, 2-D and 2.5-D
memory      what it holds
"""
