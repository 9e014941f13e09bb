"""Adds LoRA to pretrained weights:  python -m recipes.smollm2.add_lora FOLDER NEW_FOLDER [RANK]

`init_from` reads all parameters of the blocks from its folder, and those that LoRA adds aren't in the pretrained one.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_model
from transformers import LlamaForCausalLM

from recipes.smollm2.module import add_lora


def main(source: Path, target: Path, rank: int = 8) -> None:
    """Write the weights of both and the tokenizer to a new folder."""
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(source)
    add_lora(model, rank)
    target.mkdir(parents=True)
    save_model(model, str(target / "model.safetensors"))
    for name in ("config.json", "tokenizer.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target)
    print(f"wrote {target}: give it to --trainer.strategy.init_from, with --config lora.yaml")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
