"""What the pages' code takes from its reader: a module, its data, a Trainer, a folder of weights, a checkpoint.

python -m tests.docs.parts runs/last.ckpt     trains on two processes, and saves there
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2, pad_token_id=0
)
prompt = torch.arange(1, 5)[None]
batch = {name: torch.arange(32).reshape(2, 16) for name in ("input_ids", "labels", "chosen", "rejected")}
x = torch.randn(2, 16, 16)
step = SimpleNamespace(norm=nn.LayerNorm(16), token=nn.Embedding(64, 16))


class CausalLM(L.LightningModule):
    """A tiny GPT-2 of transformers, as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 8, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=0, bos_token_id=0))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_loader() -> DataLoader[dict[str, Tensor]]:
    tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": one, "labels": one} for one in tokens], batch_size=8)  # type: ignore[arg-type]


class Data(L.LightningDataModule):
    """The same samples."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return make_loader()


def make_module() -> CausalLM:
    """A module that brings its own data."""
    module = CausalLM()
    module.train_dataloader = make_loader  # type: ignore[method-assign]
    return module


def make_trainer(devices: int = 1) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=devices, strategy="hanayo", max_steps=2, **quiet)  # type: ignore[arg-type]


def save_llama(folder: str) -> None:
    """A folder of weights; the Trainer's other processes find it."""
    if "LOCAL_RANK" not in os.environ:
        LlamaForCausalLM(config).save_pretrained(folder)


def save_checkpoint(path: str) -> None:
    """A checkpoint of two ranks, trained in processes of their own."""
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    subprocess.run([sys.executable, "-m", "tests.docs.parts", path], check=True, env=environment)


if __name__ == "__main__":
    trainer = make_trainer(devices=2)
    trainer.fit(make_module())
    trainer.save_checkpoint(sys.argv[1])
