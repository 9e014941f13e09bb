"""A cube trains as one process does: full models, uneven shares of samples, padding samples, masks of some samples.

world = data x pipe x (x, y, z)            cube (2, 2, 2)   8 ranks hold each stage
                                           pipe 2 x (1, 2, 1) x data 2
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hanayo.partition import guards
from lightning_hanayo.tensor_parallel.mesh import MeshAxis
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, build, fit, make_loader, make_trainer, run

CUBE = (2, 2, 2)


def masked_bert() -> LightningModule:
    """The BERT of the recipe: separate q, k, v, a padding mask for each block, a tied head with its own bias."""
    from recipes.bert.module import BERT

    return BERT(models.VOCABULARY, 16, 2, models.WIDTH, 4, learning_rate=3e-3, decay_steps=20)


class Classifier(models.Trained):
    """`nn.TransformerEncoder` with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(models.WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(models.VOCABULARY, models.WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(models.WIDTH, models.CLASSES)

    def loss(self, batch: Batch) -> Tensor:
        hidden = self.encoder(self.embedding(batch["input_ids"]), src_key_padding_mask=batch["attention_mask"] == 0)
        return nn.functional.cross_entropy(self.head(hidden[:, 0]), batch["input_ids"][:, 1] % models.CLASSES)


class CausalEncoder(Classifier):
    """The same with a mask [seq, seq], which has as many rows as each rank has samples."""

    def loss(self, batch: Batch) -> Tensor:
        length = batch["input_ids"].shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.encoder(self.embedding(batch["input_ids"]), mask)
        return nn.functional.cross_entropy(self.head(hidden[:, -1]), batch["input_ids"][:, 1] % models.CLASSES)


class MixerBlock(nn.Module):
    """Mixes tokens, then features. It is not a registered block."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.WIDTH)
        self.tokens = nn.Linear(tokens, tokens)
        self.up = nn.Linear(models.WIDTH, 3 * models.WIDTH)
        self.down = nn.Linear(3 * models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Mixer(models.Trained):
    """An MLP-mixer over eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, models.WIDTH)
        self.blocks = nn.ModuleList(MixerBlock(8) for _ in range(2))
        self.head = nn.Linear(models.WIDTH, models.VOCABULARY)

    def loss(self, batch: Batch) -> Tensor:
        x = self.embedding(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=models.IGNORED)


class SharedLayer(models.MLP):
    """Two blocks have one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].up = self.blocks[1].up


MODELS: dict[str, tuple[Callable[[], LightningModule], Callable[..., list[Batch]], float]] = {
    "gpt": (partial(models.gpt, 4, 2), models.texts, 1e-10),
    "bert": (masked_bert, models.padded, 1e-10),
    "GPT-2": (
        partial(models.gpt2, 4, 2),
        models.padded,
        1e-7,
    ),  # its loss is computed in fp32, in a different order here
    "BERT": (partial(models.bert, 4, 2), models.padded, 1e-10),
    "Llama": (partial(models.llama, 4, 4, 2), models.padded, 1e-5),  # its norm computes in fp32
    "encoder": (Classifier, models.padded, 1e-10),
    "causal": (CausalEncoder, models.texts, 1e-10),
    "mixer": (Mixer, models.texts, 1e-10),
}
SINGLE_AXES = [Layout(cube=cube) for cube in ((1, 2, 1), (2, 1, 1), (1, 1, 2))]
EVEN, UNEVEN = ((8, 8, 8), (8,)), ((11, 3, 1), (7, 5, 8))
"""samples of each batch, and lengths of its sequences"""
CASES = [  # that don't depend on the kind of block
    # micro-batches of 11, 3 and 1; below of 6, 5, 2 and 1
    pytest.param("gpt", Layout(cube=CUBE, num_microbatches=1), UNEVEN, marks=pytest.mark.thorough),
    pytest.param("gpt", Layout(cube=(2, 1, 1)), UNEVEN, marks=pytest.mark.thorough),
    pytest.param("gpt", Layout(cube=(1, 2, 1), outside="replicate"), UNEVEN, marks=pytest.mark.thorough),
    pytest.param("bert", Layout(cube=CUBE, num_microbatches=2), UNEVEN, marks=pytest.mark.thorough),
    pytest.param("GPT-2", Layout(cube=(2, 2, 1), num_microbatches=2), EVEN, marks=pytest.mark.thorough),
    ("GPT-2", Layout(cube=(1, 2, 1)), UNEVEN),
    pytest.param("BERT", Layout(cube=(1, 1, 2), outside="replicate"), UNEVEN, marks=pytest.mark.thorough),
    ("Llama", Layout(cube=(1, 1, 2)), UNEVEN),
    pytest.param("encoder", Layout(cube=(2, 1, 2), num_microbatches=2), EVEN, marks=pytest.mark.thorough),
    pytest.param("causal", Layout(cube=(1, 1, 2), num_microbatches=1), ((8, 8, 8), (4,)), marks=pytest.mark.thorough),
    pytest.param(
        "causal",
        Layout(cube=(2, 1, 1), num_microbatches=1, outside="replicate"),
        ((2, 2, 2), (2,)),
        marks=pytest.mark.thorough,
    ),
    pytest.param("mixer", Layout(cube=CUBE, num_microbatches=2), ((11, 3, 1), (8,)), marks=pytest.mark.thorough),
    ("mixer", Layout(cube=(1, 1, 2), outside="replicate"), ((5, 3, 1), (8,))),
]


def training(kind: str, data: tuple[tuple[int, ...], tuple[int, ...]]) -> Training:
    """Three steps of AdamW with clipping."""
    model, batches, _ = MODELS[kind]
    key = kind, data
    if key not in TRAININGS:
        weight: Any = "samples" if kind in ("encoder", "causal") else "tokens"
        made = partial(batches, *data)
        TRAININGS[key] = Training(model, made, torch.float64, steps=3, clip=0.1, loss_weight=weight)
    return TRAININGS[key]


TRAININGS: dict[Any, Training] = {}


@pytest.mark.parametrize(("kind", "layout", "data"), CASES, ids=str)
def test_cube_trains_as_one_process_does(pool: Pool, kind: str, layout: Layout, data: Any) -> None:
    tolerance = MODELS[kind][2]
    outcome, expected = run(pool, training(kind, data), layout), plain(pool, training(kind, data))
    assert_close(outcome.gradients, expected.gradients, tolerance)
    assert_close(outcome.weights, expected.weights, tolerance)
    if layout.data == 1:  # otherwise each data rank logs the mean of its own samples
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.parametrize("layout", covered(SINGLE_AXES, by=SINGLE_AXES[:1]), ids=str)
def test_a_layer_of_two_blocks_trains(pool: Pool, layout: Layout) -> None:
    shared = Training(SharedLayer, partial(models.vectors, (8, 8, 8)), torch.float64, steps=3)
    outcome, expected = run(pool, shared, layout), plain(pool, shared)
    assert_close(outcome.gradients, expected.gradients, 1e-10)
    assert_close(outcome.weights, expected.weights, 1e-10)


EVERYWHERE = [
    *(Layout(cube=cube, num_microbatches=2) for cube in (CUBE, (2, 1, 1), (1, 2, 1), (1, 1, 2))),
    Layout(2, 1, 2, "1f1b", num_microbatches=2, cube=(1, 2, 1)),
]
COVER = [("encoder", EVERYWHERE[1])]
"""with the cases above: most kinds of blocks on some cube, and each shape with some kind of block"""


@pytest.mark.parametrize(("kind", "layout"), covered(product(MODELS, EVERYWHERE), by=COVER), ids=str)
def test_every_kind_of_block_trains_on_every_cube(pool: Pool, kind: str, layout: Layout) -> None:
    test_cube_trains_as_one_process_does(pool, kind, layout, EVEN)


WITH_WAVES = Layout(2, 2, 1, "hanayo-zb", cube=(1, 2, 1))


@pytest.mark.parametrize("layout", covered([Layout(2, 1, 2, cube=(1, 2, 1)), WITH_WAVES], by=[WITH_WAVES]), ids=str)
def test_cube_with_waves_data_ranks_and_accumulation(pool: Pool, layout: Layout) -> None:
    model, batches = partial(models.gpt, 4, 4 * layout.waves), partial(models.texts, (8, 8, 8, 8), (7,))
    single = Training(model, batches, torch.float64, steps=2, accumulate=2, clip=0.1, loss_weight="tokens")
    assert_close(run(pool, single, layout).weights, by_hand(pool, single, data=layout.data).weights, 1e-10)


def test_bf16_mixed_is_close_to_one_process(pool: Pool) -> None:
    single = Training(
        partial(models.gpt, 4, 2), partial(models.texts, (8, 8)), steps=2, precision="bf16-mixed", loss_weight="tokens"
    )
    assert run(pool, single, Layout(cube=(1, 2, 1))).losses == pytest.approx(plain(pool, single).losses, rel=2e-2)


class DroppingBlock(models.Block):
    """A block that randomly skips its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.rand(()) < 0.5 else x


class LayerDrop(models.MLP):
    """A model whose blocks are skipped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(4))


def threads_of_collectives(layout: Layout) -> tuple[set[str], float]:
    """The names of the threads that start collectives, and the last loss."""
    names: set[str] = set()
    started = {name: getattr(MeshAxis, name) for name in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")}

    def noted(start: Callable[..., Any], axis: MeshAxis, *args: Any) -> Any:
        names.add(threading.current_thread().name)
        return start(axis, *args)

    for name, start in started.items():
        setattr(MeshAxis, name, lambda *args, start=start: noted(start, *args))
    try:
        single = Training(LayerDrop, partial(models.vectors, (8, 8)), torch.float64, steps=2)
        return names, fit(single, layout).losses[-1]
    finally:
        for name, start in started.items():
            setattr(MeshAxis, name, start)


def test_all_ranks_skip_the_same_layers_and_collectives_run_in_the_main_thread(pool: Pool) -> None:
    """If ranks skipped different layers, or if several threads started collectives, these would not match."""
    seen = pool.run(4, threads_of_collectives, Layout(cube=(2, 2, 1)))
    assert [names for names, _ in seen] == [{"MainThread"}] * 4
    assert len({loss for _, loss in seen}) == 1


class Centred(models.MLP):
    """Samples depend on each other in blocks."""

    class Block(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) - 0.01 * x.mean(0)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (Layout(cube=(1, 2, 1), num_microbatches=2), 9),  # shares of 3 and 2
        (Layout(2, 1, 1, num_microbatches=2, cube=(1, 2, 1), outside="replicate"), 8),
        pytest.param(Layout(cube=(2, 2, 1), num_microbatches=2, step="batch"), 9, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_blocks_that_mix_samples_are_refused_whatever_ranks_share(pool: Pool, layout: Layout, size: int) -> None:
    training = Training(Centred, partial(models.vectors, (size,)), torch.float64, steps=1)
    with pytest.raises(RunFailed, match=r"Block \(block 0\).*on a cube each rank runs this code on its own samples"):
        run(pool, training, layout)


def without_labels(sizes: tuple[int, ...]) -> list[Batch]:
    """Batches without labels in the first half, so that some ranks have no valid token."""
    batches = models.texts(sizes)
    for batch in batches:
        batch["labels"][: len(batch["labels"]) // 2] = models.IGNORED
    return batches


def test_a_rank_without_a_valid_token(pool: Pool) -> None:
    """Its loss is NaN and has weight 0."""
    single = Training(
        partial(models.gpt, 4, 2), partial(without_labels, (8, 8)), torch.float64, steps=2, loss_weight="tokens"
    )
    outcome, expected = run(pool, single, Layout(cube=(2, 2, 1), num_microbatches=2)), plain(pool, single)
    assert_close(outcome.weights, expected.weights, 1e-10)
    assert outcome.losses == pytest.approx(expected.losses)


def predicted(layout: Layout) -> Tensor:
    module = build(partial(models.gpt, 4, 2))
    batches = [batch["input_ids"] for batch in models.texts((5, 2))]
    trainer = make_trainer(layout)
    module.predict_step = lambda batch, batch_idx: module(batch).argmax(-1)  # type: ignore[method-assign]
    return torch.cat(trainer.predict(module, make_loader(batches)))  # type: ignore[arg-type]


def test_predictions_are_gathered_over_the_cube(pool: Pool) -> None:
    (expected,) = pool.run(1, predicted, Layout())
    for own in pool.run(4, predicted, Layout(cube=(1, 2, 2))):
        assert torch.equal(own, expected)


class Stream(IterableDataset[Batch]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[Batch]:
        yield from models.texts((5, 3, 2))


def held(layout: Layout) -> dict[str, Any]:
    """The number of elements of each parameter, and of its optimizer state, on this rank."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    module = build(partial(models.gpt, 4, 4))
    trainer = make_trainer(layout, loss_weight="tokens", max_epochs=1)
    trainer.fit(module, DataLoader(Stream(), batch_size=None))
    state = trainer.optimizers[0].state
    with guards.released(module):
        return {
            "batches": trainer.global_step,
            "parameters": {name: p.numel() for name, p in module.named_parameters() if not p.is_meta},
            "moments": {name: state[p]["exp_avg"].numel() for name, p in module.named_parameters() if not p.is_meta},
        }


def test_a_rank_holds_its_shard_of_every_matrix(pool: Pool) -> None:
    """And all ranks agree where a dataset without a length ends."""
    whole = dict(build(partial(models.gpt, 4, 4)).named_parameters())
    found: dict[str, list[int]] = {}
    for rank in pool.run(8, held, Layout(2, cube=(2, 1, 2))):
        assert rank["batches"] == 3 and rank["moments"] == rank["parameters"]
        for name, count in rank["parameters"].items():
            found.setdefault(name, []).append(count)
    assert found.keys() == whole.keys()
    for name, parameter in whole.items():
        if name.startswith("blocks"):
            replicas = 1 if parameter.dim() > 1 else 2
            assert found[name] == [parameter.numel() * replicas // 4] * 4, name
        else:
            assert sum(found[name]) == parameter.numel(), name


@pytest.mark.parametrize(
    ("cube", "message"),
    [
        ((1, 3, 1), r"qkv has 4 heads, which don't divide over y \* z = 3"),
        ((4, 2, 1), "needs a multiple of 8 processes, but devices x num_nodes is 3"),
        ((0, 1, 1), "expected p, for a p x p x p cube"),
    ],
)
def test_cubes_that_do_not_fit_are_refused_before_a_process_starts(cube: tuple[int, int, int], message: str) -> None:
    from lightning_hanayo import HanayoStrategy
    from lightning_hanayo.errors import HanayoError

    with pytest.raises(HanayoError, match=message):
        trainer = make_trainer(Layout(), strategy=HanayoStrategy(cube=cube), devices=3)
        trainer.fit(build(partial(models.gpt, 4, 2)), make_loader(models.texts((4,))))
