"""A model that was built on the meta device gets the same kind of values as one that was built on the CPU.

cpu       no device context            Linear.weight ~ U(-1/4, 1/4), GPT-2's c_proj ~ N(0, 0.02 / 2 sqrt(layers)), ...
meta      with torch.device("meta")    the same for each, seeded by module name
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.deferred_init import DeferredInit, is_deferred
from lightning_hanayo.partition.ownership import Placeholder, replace_with_placeholders


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, bos_token_id=0, eos_token_id=0, **sizes))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=61, max_position_embeddings=32, **sizes))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, pad_token_id=3, **sizes))


def torch_transformer() -> nn.Module:
    return nn.Transformer(64, 4, 2, 2, 128, batch_first=True)


class Layers(nn.Module):
    """Layers of torch with different `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16, padding_idx=2)
        self.attention = nn.MultiheadAttention(32, 4)
        self.lstm = nn.LSTM(16, 32)
        self.norm = nn.BatchNorm1d(16)
        self.convolution = nn.Conv1d(16, 16, 3)


class Recipe(nn.Module):
    """A recipe's model, whose initial values are set by one method that loops over all parameters."""

    def __init__(self, model: Callable[[], Any]) -> None:
        super().__init__()
        self.model = model()
        del self.model.perplexity

    def reset_parameters(self) -> None:
        self.model._initialize(*[len(self.model.blocks)] * (type(self.model).__name__ == "GPT"))


def recipes_gpt() -> nn.Module:
    from recipes.gpt.module import GPT

    return Recipe(lambda: GPT(61, 32, 3, 64, 4))


def recipes_bert() -> nn.Module:
    from recipes.bert.module import BERT

    return Recipe(lambda: BERT(61, 32, 3, 64, 4))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def initialized(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Built on meta, then initialized module by module."""
    model = on_meta(make)
    deferred_init = DeferredInit(model, seed)
    for module in deferred_init.deferred_modules(model.modules()):
        deferred_init.assign(module, deferred_init.initial_values(module))
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All names, also those that share a tensor, and buffers that no state dict contains."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.parametrize("make", [gpt2, bert, llama, torch_transformer, Layers, recipes_gpt, recipes_bert])
def test_values_match_a_model_built_on_the_cpu(make: Callable[[], nn.Module]) -> None:
    """Constants are bit-equal; of random values, mean and standard deviation agree within their standard error."""
    torch.manual_seed(1)
    real, model = tensors_of(make()), tensors_of(initialized(make))
    assert list(model) == list(real)
    for name, value in model.items():
        wanted = real[name]
        assert (value.shape, value.dtype, value.requires_grad, type(value)) == (
            (wanted.shape, wanted.dtype, wanted.requires_grad, type(wanted))
        )
        if not wanted.is_floating_point() or wanted.std(correction=0) == 0 or "inv_freq" in name:
            assert torch.equal(value, wanted), name
        else:
            apart = 5 * wanted.std(correction=0).item() * (2 / wanted.numel()) ** 0.5
            assert abs(value.mean() - wanted.mean()) < apart, name
            assert abs(value.std(correction=0) - wanted.std(correction=0)) < apart, name
            assert not torch.equal(value, wanted), name


def test_gpt2_has_scaled_residual_projections_and_tied_weights() -> None:
    """Where `transformers` scales them: some versions of it do not."""
    model: Any = initialized(gpt2)
    real: Any = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    for block, other in zip(model.transformer.h, real.transformer.h, strict=True):
        for name in ("mlp.c_fc", "attn.c_proj", "mlp.c_proj"):
            wanted = other.get_submodule(name).weight.std().item()
            assert block.get_submodule(name).weight.std().item() == pytest.approx(wanted, rel=0.05)


def test_values_of_a_module_do_not_depend_on_which_others_are_initialized() -> None:
    model = on_meta(gpt2)
    deferred_init, whole = DeferredInit(model, 0), tensors_of(initialized(gpt2))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for module in reversed(deferred_init.deferred_modules(model.modules())):
        own = {
            id(tensor): value
            for tensor, value in zip(module.tensors, deferred_init.initial_values(module), strict=True)
        }
        for name, tensor in tensors_of(model).items():
            assert tensor.is_meta and (id(tensor) not in own or torch.equal(own[id(tensor)], whole[name])), name
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (whole[f"transformer.h.{i}.mlp.c_fc.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, tensors_of(initialized(gpt2, seed=1))["transformer.h.0.mlp.c_fc.weight"])


def test_later_changes_to_the_model_do_not_change_its_values() -> None:
    """A cube shards parameters and replaces classes and attributes before values are computed."""
    model: Any = on_meta(gpt2)
    deferred_init = DeferredInit(model, 0)
    layer = model.transformer.h[0].mlp.c_proj
    layer.weight.data = layer.weight.data[:3]
    layer.__class__, layer.nf = nn.Identity, None
    (module,) = deferred_init.deferred_modules([layer])
    wanted = tensors_of(initialized(gpt2))
    weight, bias = deferred_init.initial_values(module)
    assert torch.equal(weight, wanted["transformer.h.0.mlp.c_proj.weight"]) and not bias.any()


def test_parts_that_were_not_built_on_meta_keep_their_values() -> None:
    """Even if a module around them sets the values of all parameters."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Linear(4, 4)
            self.late = on_meta(lambda: nn.Linear(4, 4))

        def reset_parameters(self) -> None:
            for parameter in self.parameters():
                nn.init.constant_(parameter, 3.0)

    model = Mixed()
    before = model.real.weight.clone()
    deferred_init = DeferredInit(model, 0)
    (module,) = deferred_init.deferred_modules(model.modules())
    assert module.name == "late" and all((value == 3).all() for value in deferred_init.initial_values(module))
    assert torch.equal(model.real.weight, before)


def test_placeholders_are_not_deferred() -> None:
    """Nor are copies of them: a model that was trained must not be initialized again."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.mark = "kept"  # type: ignore[assignment]
    assert is_deferred(on_meta(lambda: nn.Linear(3, 3))) and not is_deferred(model)
    replace_with_placeholders(model, set(model[0].parameters()))
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied[1].weight, Placeholder) and copied[1].weight.is_meta and not is_deferred(copied)
    assert pickle.loads(pickle.dumps(model))[1].weight.mark == "kept"


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.empty(3))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("positions", torch.arange(3), persistent=False)


class Partly(Bare):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inner.scale[:2] = 1.0


class Special(nn.Module):
    """Sets values in its constructor, in addition to `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)
        nn.init.normal_(self.up.weight)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight)


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.total = torch.zeros(())


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.weight.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Bare, r"inner\.scale of a Module was built on the meta device, and nothing gives it values"),
        (Table, r"positions of a Table was built on the meta device, and nothing gives it values"),
        (Partly, r"inner\.scale of a Module .* nothing gives it values"),
        (Special, r"up\.weight of a Linear was given values 2 times .* 1 times by"),
        (Reader, r"b can't be initialized by itself: reset_parameters of the whole model failed"),
        (Attribute, r"total of a Attribute .* neither a parameter nor a buffer"),
        (Hooked, r"linear\.weight was built on the meta device, and would lose its hooks"),
    ],
)
def test_error_names_what_cannot_be_initialized(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        initialized(make)
