"""Cross entropy of a head without its logits: they are made for some tokens at a time, and again in the backward."""

from lightning_hanayo.chunked_loss.cross_entropy import chunk_loss, chunked_cross_entropy

__all__ = ["chunk_loss", "chunked_cross_entropy"]
