"""Checkpoints in other formats: plain Trainers read the file, and transformers its folder."""

import io
import json
import weakref
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hanayo.dist_checkpointing.commit import RankPart, SavingRanks, TensorPart
from lightning_hanayo.dist_checkpointing.export import Format, export_checkpoint, write_weights
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.state import RUN, StateDocument
from lightning_hanayo.errors import CheckpointError, HanayoError
from tests.harness.checkpoints import write
from tests.harness.pretrained_models import MODELS, SIZES
from tests.harness.pretrained_models import trained as trained_model
from tests.harness.thorough import covered

GROUPED = SIZES | {"num_key_value_heads": 2, "num_experts_per_tok": 2}
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen2MoeForCausalLM": GROUPED
    | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Qwen3MoeForCausalLM": GROUPED | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    "OlmoeForCausalLM": GROUPED | {"num_experts": 4},
    "DeepseekV3ForCausalLM": GROUPED
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    | {"n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1},
    "GptOssForCausalLM": GROUPED | {"head_dim": 8, "num_local_experts": 4},
    "JambaForCausalLM": SIZES | {"num_key_value_heads": 2, "num_experts": 2},
    "Dinov2Model": {key: size for key, size in SIZES.items() if key != "vocab_size"} | {"use_swiglu_ffn": True},
}
"""models whose names or tensors on the disk are others than in memory"""


class Model(LightningModule):
    """A small model with a buffer, and an optimizer with states."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])]

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(32.0).reshape(8, 4), batch_size=4)


def trainer(folder: Path, epochs: int) -> Trainer:
    return Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def trained(folder: Path) -> tuple[Path, Model]:
    """A plain file after two epochs, and the model after three."""
    torch.manual_seed(0)
    model = Model()
    first = trainer(folder, 2)
    first.fit(model)
    first.save_checkpoint(folder / "plain.ckpt")
    trainer(folder, 3).fit(model, ckpt_path=folder / "plain.ckpt")
    return folder / "plain.ckpt", model


def same(one: Any, other: Any) -> bool:
    """Whether two values of a checkpoint are equal, tensors to the bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_folder_becomes_the_file_that_a_plain_trainer_writes(tmp_path: Path) -> None:
    plain, model = trained(tmp_path)
    write(tmp_path / "folder.ckpt", torch.load(plain, weights_only=True))
    folder = CheckpointFolder(tmp_path / "folder.ckpt")
    folder.verify()
    assert "optimizer/0/net.2.bias/exp_avg" in folder.manifest.tensors
    written = export_checkpoint(folder.path, str(tmp_path / "again.ckpt"), to="file")
    assert (written.num_tensors, written.left_out, written.notes) == (9, (), [])
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert same(torch.load(plain, weights_only=True), again)

    resumed = Model()
    trainer(tmp_path, 3).fit(resumed, ckpt_path=tmp_path / "again.ckpt")
    assert same(dict(resumed.state_dict()), dict(model.state_dict()))
    loaded = Model.load_from_checkpoint(tmp_path / "again.ckpt")
    assert same(dict(loaded.state_dict()), again["state_dict"])


def test_what_a_resume_needs_goes_through_files_and_folders(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path)
    tensors = {"random/0/now/torch": torch.arange(3, dtype=torch.uint8), "gradient/0/net.0.bias": torch.ones(4)}
    loaders = {1: {"loaders": [{"position": 2, "order": torch.tensor([1, 0])}]}}
    entry = {"run": {"seed": 5}, "data": loaders, "tensors": tensors}
    torch.save({**torch.load(plain, weights_only=True), RUN: entry}, plain)

    write(tmp_path / "folder.ckpt", torch.load(plain, weights_only=True))
    folder = CheckpointFolder(tmp_path / "folder.ckpt")
    assert tensors.keys() <= folder.manifest.tensors.keys() and "state-data-00001" in folder.manifest.texts
    export_checkpoint(folder.path, str(tmp_path / "again.ckpt"), to="file")
    assert same(torch.load(tmp_path / "again.ckpt", weights_only=True)[RUN], entry)


def test_a_damaged_checkpoint_is_not_exported_and_nothing_is_overwritten(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path)
    write(tmp_path / "folder.ckpt", torch.load(plain, weights_only=True))
    with pytest.raises(HanayoError, match="plain.ckpt exists"):
        export_checkpoint(str(tmp_path / "folder.ckpt"), str(plain), to="file")
    [file] = (tmp_path / "folder.ckpt").glob("model-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="model-00000"):
        export_checkpoint(str(tmp_path / "folder.ckpt"), str(tmp_path / "whole.ckpt"), to="file")
    assert not (tmp_path / "whole.ckpt").exists()


def test_safetensors_have_the_names_of_the_module(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path)
    written = export_checkpoint(str(plain), str(tmp_path / "weights"), to="safetensors")
    assert written.files == ["model.safetensors"]
    expected = torch.load(plain, weights_only=True)["state_dict"]
    assert same(load_file(tmp_path / "weights" / "model.safetensors"), dict(expected))


def test_folders_and_files_may_be_remote(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path)
    write("memory://convert/folder.ckpt", torch.load(plain, weights_only=True))
    export_checkpoint("memory://convert/folder.ckpt", "memory://convert/whole.ckpt", to="file")
    read = torch.load(io.BytesIO(fsspec.filesystem("memory").cat("/convert/whole.ckpt")), weights_only=True)
    assert same(read, torch.load(plain, weights_only=True))


def test_large_weights_are_sharded_with_an_index(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.full((10,), float(number)) for number in range(5)}
    files = write_weights(tmp_path, tensors, max_shard_size=80)
    assert files[:3] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


# models of transformers


def tiny(name: str) -> Any:
    """A small model of transformers, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": 40, "max_position_embeddings": 32}
    match name:
        case "gpt2":
            config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)
            return transformers.GPT2LMHeadModel(config).eval()
        case "llama":
            config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=False)
            return transformers.LlamaForCausalLM(config).eval()
        case "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
        case _:
            config = transformers.MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2)
            return transformers.MixtralForCausalLM(config).eval()


def save(path: Path, module: nn.Module, prefix: str = "net") -> str:
    """Save a module that holds a model of transformers, in two halves of each tensor where it has rows."""
    model: Any = module.get_submodule(prefix)
    first: dict[int, str] = {}
    state = module.state_dict()
    tied = {name: one for name in state if (one := first.setdefault(state[name].data_ptr(), name)) != name}
    parts = []
    for name in state.keys() - tied.keys():
        value, shape = state[name], tuple(state[name].shape)
        rows = [range(0, shape[0], 2), range(1, shape[0], 2)] if shape and shape[0] > 1 else []
        for some in rows:
            region = Region.of_entries([some, *map(range, shape[1:])])
            parts.append(TensorPart(f"model/{name}", value[list(some)], shape, region, "model"))
        if not rows:
            parts.append(TensorPart(f"model/{name}", value, shape, Region.whole(shape), "model"))
    text, _ = StateDocument({"epoch": 1, "global_step": 2}, list(state), tied).encode()
    config = json.loads(model.config.to_json_string(use_diff=False))
    about = {"step": 2, "epoch": 1, "layout": {}, "tied": tied}
    about["huggingface"] = [{"prefix": prefix, "class": type(model).__name__, "config": config}]
    Saver(SavingRanks()).save(str(path), RankPart(parts, {"state": text}, about))
    return str(path)


def around(model: nn.Module, **others: nn.Module) -> nn.Module:
    return nn.ModuleDict({"net": model, **others})


def same_logits(one: Any, other: Any) -> bool:
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        return torch.equal(one(tokens).logits, other(tokens).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mixtral"])
def test_from_pretrained_gives_equal_logits(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    path = save(tmp_path / "last.ckpt", around(model, probe=nn.Linear(2, 2)))
    written = export_checkpoint(path, str(tmp_path / "out"), to="huggingface", max_shard_size=20_000)
    assert written.left_out == ["probe.weight", "probe.bias"]
    assert "config.json" in written.files and "model.safetensors.index.json" in written.files
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert same_logits(loaded.eval(), model)
    model.save_pretrained(tmp_path / "own", max_shard_size="1GB")
    stored = load_file(tmp_path / "own" / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()


@pytest.mark.parametrize("name", covered([*MODELS, *EXPERTS], by=["T5ForConditionalGeneration", "GptOssForCausalLM"]))
def test_a_folder_has_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model = trained_model(name, {**MODELS, **EXPERTS}[name])
    model.save_pretrained(tmp_path / "own")
    path = save(tmp_path / "last.ckpt", around(model))
    export_checkpoint(path, str(tmp_path / "out"), to="huggingface")
    assert same(load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "own/model.safetensors"))
    exported, own = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("out", "own"))
    assert exported == own


@pytest.mark.parametrize("to", ["file", "safetensors", "huggingface"])
def test_one_tensor_at_a_time_is_in_memory(to: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "last.ckpt", around(tiny("mixtral")))
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    read = CheckpointFolder.read

    def counted(folder: CheckpointFolder, name: str, region: Region | None = None) -> Tensor:
        nonlocal most
        tensor = read(folder, name, region)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in alive))
        return tensor

    monkeypatch.setattr(CheckpointFolder, "read", counted)
    export_checkpoint(path, str(tmp_path / "out"), to=to)
    assert len(alive) == len(CheckpointFolder(path).manifest.tensors)
    assert most == (2 if to == "huggingface" else 1)  # of a layer of Mixtral two are converted


def test_a_plain_file_needs_a_configuration(tmp_path: Path) -> None:
    model = tiny("gpt2")
    torch.save({"state_dict": around(model).state_dict()}, tmp_path / "plain.ckpt")
    with pytest.raises(HanayoError, match="doesn't say that it has a model of transformers.*--config"):
        export_checkpoint(str(tmp_path / "plain.ckpt"), str(tmp_path / "out"), to="huggingface")
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path / "config")
    export_checkpoint(
        str(tmp_path / "plain.ckpt"), str(tmp_path / "out"), to="huggingface", config=str(tmp_path / "config")
    )
    assert same_logits(type(model).from_pretrained(tmp_path / "out").eval(), model)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny("gpt2")
    path = save(tmp_path / "last.ckpt", around(model))
    larger = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=40, architectures=["GPT2LMHeadModel"])
    larger.save_pretrained(tmp_path / "config")
    with pytest.raises(HanayoError, match=r"of this configuration: .* Missing key.*transformer\.h\.2\."):
        export_checkpoint(path, str(tmp_path / "out"), to="huggingface", config=str(tmp_path / "config"))
    larger.n_layer, larger.vocab_size = 2, 50
    larger.save_pretrained(tmp_path / "config")
    with pytest.raises(HanayoError, match=r"mismatch for transformer\.wte\.weight: .*\[40, 16\].*\[50, 16\]"):
        export_checkpoint(path, str(tmp_path / "out"), to="huggingface", config=str(tmp_path / "config"))
    with pytest.raises(HanayoError, match="there is no format 'hugginface': did you mean 'huggingface'"):
        export_checkpoint(path, str(tmp_path / "out"), to="hugginface")  # type: ignore[arg-type]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config", "last.ckpt"]


def test_weights_that_were_untied_are_not_exported_as_tied(tmp_path: Path) -> None:
    model = tiny("gpt2")
    model.lm_head.weight = nn.Parameter(torch.zeros(40, 16))
    path = save(tmp_path / "last.ckpt", around(model))
    with pytest.raises(HanayoError, match="different values.*tie_word_embeddings=false"):
        export_checkpoint(path, str(tmp_path / "out"), to="huggingface")
