"""A folder's names are those of some module of the model; transformers' own rules are followed.

folder       h.0.attn.c_attn.weight          the base model, or one that was saved alone
model        net.transformer.h.0.attn.c_attn.weight
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.dist_checkpointing.huggingface import Merge, NameMatch, match_names, named_values, names_of
from lightning_hanayo.errors import HanayoError, UnsupportedError


class Wrapped(nn.Module):
    """As a LightningModule holds it, on meta."""

    def __init__(self, **modules: Callable[[], nn.Module]) -> None:
        super().__init__()
        with torch.device("meta"):
            for name, make in modules.items():
                self.add_module(name, make())


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=8, n_embd=8, n_layer=2, n_head=2, **options))


def gpt2_base() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(vocab_size=61, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=61, max_position_embeddings=8, **sizes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=61, num_key_value_heads=2, num_local_experts=2, **sizes))


def dinov2() -> nn.Module:
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    return Dinov2Model(Dinov2Config(use_swiglu_ffn=True, **sizes))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def names(make: Callable[[], nn.Module]) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in named_values(make())]


def matched(found: NameMatch, model: nn.Module) -> set[str]:
    """The qualified names of what gets no value."""
    values = {
        f"{found.prefix}.{name}".strip("."): tensor for name, tensor in named_values(model.get_submodule(found.prefix))
    }
    given = {values[f"{found.prefix}.{name}".strip(".")] for name in found.sources}
    return {name for name, tensor in values.items() if tensor not in given}


def renamed(folder: list[str], old: str, new: str) -> list[str]:
    assert any(old in name for name in folder)
    return [name.replace(old, new) for name in folder]


UNTIED = names(gpt2)
TIED = [name for name in UNTIED if name != "lm_head.weight"]
BASE = names(gpt2_base)
PLAIN = names(plain)
OLD_BERT = renamed(renamed(names(bert), "LayerNorm.weight", "LayerNorm.gamma"), "LayerNorm.bias", "LayerNorm.beta")


@pytest.mark.parametrize(
    ("model", "folder", "prefix", "missing"),
    [
        ({"net": gpt2}, UNTIED, "net", set()),
        ({"net": gpt2}, TIED, "net", set()),
        ({"net": lambda: gpt2(tie_word_embeddings=False)}, TIED, "net", {"net.lm_head.weight"}),
        ({"net": gpt2}, BASE, "net", set()),
        ({"net": gpt2_base}, TIED, "net", set()),
        ({"net": gpt2, "head": plain}, [f"net.{name}" for name in TIED], "", {f"head.{name}" for name in PLAIN}),
        ({"net": gpt2, "other": bert}, names(bert), "other", set()),
        ({"net": bert}, OLD_BERT, "net", set()),
        ({"encoder": plain, "head": lambda: nn.Linear(4, 2)}, PLAIN, "encoder", set()),
    ],
)  # fmt: skip
def test_the_module_is_found_by_its_names(model: Any, folder: list[str], prefix: str, missing: set[str]) -> None:
    wrapped = Wrapped(**model)
    found = match_names(wrapped, folder, "folder")
    assert (found.prefix, matched(found, wrapped), found.unused(folder)) == (prefix, missing, [])


def test_what_transformers_computes_may_be_left_over() -> None:
    old = [*TIED, "transformer.h.0.attn.bias", "transformer.h.0.rotary_emb.inv_freq", "transformer.old.weight"]
    found = match_names(Wrapped(net=gpt2), old, "folder")
    assert found.unused(old) == ["transformer.old.weight"]


@pytest.mark.parametrize(
    ("model", "folder", "message"),
    [
        (
            {"net": plain},
            ["conv.weight"],
            r"no tensor of folder \(conv\.weight\) has the name of .*net\.0\.weight",
        ),
        (
            {"left": plain, "right": plain},
            names(plain),
            r"equally well: left, right\. Say which: .*\{'left': 'folder'\}",
        ),
        ({"left": gpt2, "right": gpt2}, TIED, r"equally well: left, right"),
        ({"net": gpt2}, [*TIED, "wte.weight"], r"has transformer\.wte\.weight and wte\.weight, which are both"),
    ],
)
def test_no_module_or_several_are_an_error(model: Any, folder: list[str], message: str) -> None:
    with pytest.raises(HanayoError, match=message):
        match_names(Wrapped(**model), folder, "folder")


EXPERTS = [
    f"model.layers.{i}.block_sparse_moe.experts.{e}.w{w}.weight" for i in (0, 1) for e in (0, 1) for w in (1, 2, 3)
]


def test_experts_are_merged_by_transformers() -> None:
    stored = [name for name in names(mixtral) if ".experts." not in name] + EXPERTS
    found = match_names(Wrapped(net=mixtral), stored, "folder")
    merge = found.sources["model.layers.1.mlp.experts.gate_up_proj"]
    assert isinstance(merge, Merge) and found.unused(stored) == []
    assert merge.of({name: torch.ones(8, 8) for name in names_of(merge)}).shape == (2, 16, 8)
    with pytest.raises(HanayoError, match=r"can't merge model\.layers\.1.* to model\.layers\.1\.mlp\.experts"):
        merge.of({name: torch.ones(8, i) for i, name in enumerate(names_of(merge))})


def test_a_merged_and_a_single_expert_are_too_many() -> None:
    with pytest.raises(HanayoError, match=r"has model\..*experts\.\w+, and the tensors that are merged to it"):
        match_names(Wrapped(net=mixtral), [*names(mixtral), *EXPERTS], "folder")


def test_split_tensors_are_refused_by_name() -> None:
    if not any("gate_proj" in name for name in names(dinov2)):
        pytest.skip("this version of transformers doesn't split them")
    stored = [name for name in renamed(names(dinov2), "gate_proj", "weights_in") if "up_proj" not in name]
    with pytest.raises(UnsupportedError, match=r"splits encoder\.\S*weights_in\.bias.*save_model\(model"):
        match_names(Wrapped(net=dinov2), stored, "folder")
