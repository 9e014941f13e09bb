"""The figures and tables of `docs/concepts/cube.md`.

volumes     what a rank receives for a Transformer layer, on every mesh and in 1-D, 2-D and 2.5-D
memory      what it stores

`python -m recipes.cube` makes figures and tables in seconds, without torch.
"""
