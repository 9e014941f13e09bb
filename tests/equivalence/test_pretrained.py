"""Training from a folder of safetensors equals one process that starts from `from_pretrained` of the same folder.

one process      net = from_pretrained(folder)                                    reads everything
a layout         net = from_config(config), on meta; init_from=folder             each rank reads its own
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_hanayo.dist_checkpointing.huggingface import SafetensorsFolder
from lightning_hanayo.errors import CheckpointError, PeerFailed
from lightning_hanayo.strategy.setup import build_pipeline
from tests.harness import models
from tests.harness.checkpoints import write
from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

LAYOUTS = [
    Layout(2, 1, 1),
    Layout(2, 2, 1),
    Layout(1, 1, 1, cube=(2, 2, 1)),
    Layout(2, 1, 1, cube=(1, 2, 1)),
    Layout(2, 1, 2),
]
CASES = [*((kind, layout) for kind in ("gpt2", "llama") for layout in LAYOUTS), ("mixtral", LAYOUTS[0])]
COVER = [("llama", LAYOUTS[1])]
TOLERANCES = {"gpt2": 1e-9, "llama": 1e-7, "mixtral": 1e-7}
"""norms of Llama and Mixtral compute in fp32: their rounding depends on the last bits of the input"""


class Tuned(models.Trained):
    """What users write: with the strategy the line is `from_config`, in one process `from_pretrained`."""

    def __init__(self, folder: Path, *, reads: bool) -> None:
        super().__init__()
        self.folder = folder
        self.reads = reads

    def configure_model(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # its thread would outlive the test
        if hasattr(self, "net"):
            return
        config = AutoConfig.from_pretrained(self.folder, experts_implementation="eager")  # in fp64, too
        if self.reads:
            self.net: Any = AutoModelForCausalLM.from_pretrained(self.folder, config=config).train()
        else:
            self.net = AutoModelForCausalLM.from_config(config)

    def loss(self, batch: Batch) -> Tensor:
        """In fp64; that of transformers is in fp32."""
        tokens = batch["input_ids"]
        return cross_entropy(self.net(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Classifier(Tuned):
    """The folder's base model with a new head."""

    def configure_model(self) -> None:
        from transformers import AutoConfig, GPT2ForSequenceClassification

        if not hasattr(self, "net"):
            config = AutoConfig.from_pretrained(self.folder, num_labels=3, pad_token_id=0)
            self.net = GPT2ForSequenceClassification(config)

    def loss(self, batch: Batch) -> Tensor:
        tokens = batch["input_ids"]
        return cross_entropy(self.net(tokens).logits, tokens[:, 0] % 3)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return models.HuggingFace(MixtralForCausalLM(config))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that were trained elsewhere; GPT-2 in several files, with its head tied to the embedding."""
    root = tmp_path_factory.mktemp("pretrained")
    made: dict[str, Any] = {"gpt2": models.gpt2(4), "llama": models.llama(4, 4), "mixtral": mixtral()}
    for kind, module in made.items():
        torch.manual_seed(7)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
        module.model.save_pretrained(root / kind, max_shard_size="20KB" if kind == "gpt2" else "5GB")
    assert len(list((root / "gpt2").glob("*.safetensors"))) > 2
    return {kind: root / kind for kind in made}


def batches(layout: Layout) -> list[Batch]:
    return [
        {name: value[data_rank(layout) :: layout.data] for name, value in batch.items()}
        for batch in models.texts((8, 8, 8))
    ]


def fit(module: LightningModule, layout: Layout, **options: Any) -> Outcome:
    """Train three steps in fp64."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    callback = OutcomeCallback()
    strategy = make_strategy(layout, **options) if options else "auto"
    trainer = make_trainer(layout, strategy=strategy, callbacks=[callback], max_steps=3, precision="64-true")
    trainer.fit(module, make_loader(batches(layout)))
    return callback.outcome


def tuned(folder: Path, layout: Layout) -> tuple[Outcome, int]:
    """This rank's outcome, and how many bytes of tensors it has read."""
    read: list[int] = []
    load = build_pipeline.load_pretrained

    def counted(*arguments: Any) -> Any:
        reading = load(*arguments)
        read.append(reading.num_bytes)
        return reading

    build_pipeline.load_pretrained = counted  # type: ignore[assignment]
    try:
        outcome = fit(Tuned(folder, reads=False), layout, init_from=str(folder))
    finally:
        build_pipeline.load_pretrained = load
    return outcome, read[0]


@pytest.mark.parametrize(("kind", "layout"), covered(CASES, by=COVER), ids=str)
def test_trains_as_one_process_that_starts_from_pretrained(
    pool: Pool, folders: dict[str, Path], kind: str, layout: Layout
) -> None:
    (expected,) = pool.run(1, whole, folders[kind])
    ranks = pool.run(layout.world_size, tuned, folders[kind], layout)
    outcome = merge([rank[0] for rank in ranks], layout)
    assert_close(outcome.weights, expected.weights, TOLERANCES[kind])
    assert_close(outcome.gradients, expected.gradients, TOLERANCES[kind])
    assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCES[kind])
    stored = sum(tensor.nbytes for _, tensor in everything(folders[kind]))
    for replica in layout.topology.groups("pipe", "x", "y", "z"):
        total = sum(ranks[rank][1] for rank in replica)
        assert total == stored if layout.cube == (1, 1, 1) else stored <= total < 1.2 * stored
        assert max(ranks[rank][1] for rank in replica) < stored


def classified(folder: Path, layout: Layout) -> tuple[Outcome, list[str]]:
    """This rank's outcome, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = fit(Classifier(folder, reads=False), layout, init_from=folder)
    return outcome, [str(one.message) for one in caught]


def test_a_new_head_has_the_same_initial_values_on_every_layout(pool: Pool, folders: dict[str, Path]) -> None:
    (alone,) = pool.run(1, classified, folders["gpt2"], Layout())
    ranks = pool.run(2, classified, folders["gpt2"], LAYOUTS[0])
    outcome = merge([rank[0] for rank in ranks], LAYOUTS[0])
    assert_close(outcome.weights, alone[0].weights, 1e-9)
    assert outcome.weights["net.score.weight"].abs().max() > 0
    for said in (alone[1], ranks[0][1]):
        assert any("has no values for net.score.weight: initial values are kept" in one for one in said)


def save_folder(folder: Path, checkpoint: Path) -> None:
    module = Tuned(folder, reads=True)
    module.configure_model()
    write(checkpoint, {"state_dict": module.state_dict(), "epoch": 0, "global_step": 0})


def from_checkpoint(folder: Path, checkpoint: Path, layout: Layout) -> Outcome:
    return fit(Tuned(folder, reads=False), layout, init_from=checkpoint)


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=[]), ids=str)
def test_a_checkpoint_folder_gives_its_weights(
    pool: Pool, folders: dict[str, Path], layout: Layout, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "gpt2.ckpt"
    save_folder(folders["gpt2"], checkpoint)
    (expected,) = pool.run(1, whole, folders["gpt2"])
    outcome = merge(pool.run(layout.world_size, from_checkpoint, folders["gpt2"], checkpoint, layout), layout)
    assert_close(outcome.weights, expected.weights, TOLERANCES["gpt2"])
    assert_close(outcome.gradients, expected.gradients, TOLERANCES["gpt2"])


def test_a_flipped_bit_in_a_checkpoint_folder_is_found_before_training(
    pool: Pool, folders: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "gpt2.ckpt"
    save_folder(folders["gpt2"], checkpoint)
    [file] = checkpoint.glob("model-*")
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    messages = pool.run(2, refused, folders["gpt2"], checkpoint)
    assert all(file.name in one and "the values of model/net.transformer.ln_f.bias" in one for one in messages)


def refused(folder: Path, checkpoint: Path) -> str:
    with pytest.raises((CheckpointError, PeerFailed)) as raised:
        from_checkpoint(folder, checkpoint, LAYOUTS[0])
    return str(raised.value)


def whole(folder: Path) -> Outcome:
    return fit(Tuned(folder, reads=True), Layout())


def everything(folder: Path) -> Any:
    opened = SafetensorsFolder(folder)
    return ((name, opened.read(name)) for name in opened.manifest.tensors)
