"""Tiny random models of the architectures of transformers, timm and diffusers, each trained on layouts and by itself.

models    the mappings; an architecture, cut to a few small blocks
inputs    its batches
trial     its training, in processes of its own
page      what came of all of them: `docs/supported/models.md`
"""
