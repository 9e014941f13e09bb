"""Converts checkpoints, in one process and one tensor at a time.

a checkpoint folder, or a plain file    export_checkpoint    a Lightning file, safetensors, or Hugging Face's folder

Example:
    >>> from lightning_hanayo.dist_checkpointing.convert import export_checkpoint
    >>> export_checkpoint("checkpoints/last.ckpt", "gpt2-tuned", to="huggingface")
"""

from lightning_hanayo.dist_checkpointing.export import Exported, export_checkpoint

__all__ = ["Exported", "export_checkpoint"]
