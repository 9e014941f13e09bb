"""Tiny random models of all architectures of transformers, each trained on layouts and in one process.

models    an architecture, cut to a few small blocks, and its batches
trial     its training, in processes of its own
page      what came of all of them: `docs/supported/models.md`
"""
