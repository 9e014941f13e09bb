"""The figures and tables of `docs/concepts/cube.md`, and a model built of 3-D layers.

volumes     what a rank receives for a Transformer layer, on every mesh and in 1-D, 2-D and 2.5-D
memory      what it stores
model       a language model of the layers that `lightning_hanayo.tensor_parallel` exports, trained without Lightning

`python -m recipes.cube` makes figures and tables in seconds, without torch.
"""
