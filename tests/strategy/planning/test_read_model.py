"""What the planner knows of a model is what it computes, whatever the model is made of."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.communication_volume import LinearLayer
from lightning_hanayo.strategy.planning.read_model import formats_of, read_model
from recipes.gpt.module import GPT
from tests.strategy.planning.counted import counted

WIDTH, CONTEXT, SAMPLES = 32, 16, 4


class Block(nn.Module):
    """Not registered."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] to the same."""
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Module(L.LightningModule):
    """A stack between two linear layers."""

    def __init__(self, blocks: int = 4, *, on_meta: bool = False, needs_values: bool = False) -> None:
        super().__init__()
        self.needs_values = needs_values
        self.num_blocks = blocks
        self.blocks: nn.ModuleList | None = None
        self.ends = nn.ModuleDict({"first": nn.Linear(8, WIDTH), "last": nn.Linear(WIDTH, 8)})
        if not on_meta:
            self.configure_model()

    def configure_model(self) -> None:
        """Build the stack once."""
        if self.blocks is None:
            self.blocks = nn.ModuleList(Block() for _ in range(self.num_blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Logs, as steps do."""
        x = self.ends["first"](batch)
        assert self.blocks is not None
        for block in self.blocks:
            x = block(x)
        if self.needs_values and float(x.detach().sum()) > 1e9:
            return x.sum()
        loss: Tensor = self.ends["last"](x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """With momentum, so one state."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_a_gpt() -> None:
    model = GPT(vocab_size=64, context=CONTEXT, num_layers=3, width=WIDTH, num_heads=4)
    ids = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    facts = read_model(model, {"input_ids": ids, "labels": ids}, SAMPLES)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert facts.stack == "blocks"
    assert facts.parameters == sum(one.numel() for one in model.parameters())
    assert facts.outside_parameters == 64 * WIDTH + CONTEXT * WIDTH + 2 * WIDTH
    assert facts.message == 4 * CONTEXT * WIDTH
    assert facts.tokens == CONTEXT
    assert facts.optimizer_bytes == 8
    assert len(set(facts.blocks)) == 1
    assert [one.layer for one in facts.blocks[0].products] == [
        LinearLayer(CONTEXT, WIDTH, 3 * WIDTH),
        LinearLayer(CONTEXT, WIDTH, WIDTH, row_parallel=True),
        LinearLayer(CONTEXT, WIDTH, 4 * WIDTH),
        LinearLayer(CONTEXT, 4 * WIDTH, WIDTH, row_parallel=True),
    ]
    with FlopCounterMode(display=False) as counter:
        model(ids)
    attention = 3 * 4 * CONTEXT * CONTEXT * WIDTH  # which torch doesn't count on CPUs
    assert facts.flops / 3 == pytest.approx(counter.get_total_flops() / SAMPLES + attention)
    assert {(one.what, one.size, one.axes) for one in facts.required} >= {("heads", 4, "yz"), ("features", 128, "yz")}


def test_a_llama_shares_the_inputs_of_q_k_v_and_of_gate_and_up() -> None:
    pytest.importorskip("transformers")
    facts = counted("llama")
    sizes = [
        (one.layer.in_features, one.layer.out_features, one.layer.row_parallel) for one in facts.mean_block.products
    ]
    assert sizes == [(128, 384, False), (128, 128, True), (128, 672, False), (336, 128, True)]
    assert facts.outside_parameters - facts.computing_parameters == 1024 * 128, "the embedding's table"
    assert facts.largest_outside == 4 * 256 * 1024, "the logits"


def test_other_blocks_are_generic() -> None:
    facts = read_model(Module(), torch.zeros(SAMPLES, 8), SAMPLES)
    assert [one.is_generic for one in facts.blocks[0].products] == [True, True]
    assert facts.blocks[0].attention_flops == 0
    assert facts.required == ()
    assert facts.optimizer_bytes == 4


def test_a_model_without_values() -> None:
    module = Module(on_meta=True)
    facts = read_model(module, torch.zeros(SAMPLES, 8), SAMPLES)
    assert facts == read_model(Module(), torch.zeros(SAMPLES, 8), SAMPLES)
    assert module.blocks is None, "the module itself isn't built"


def test_a_step_that_needs_values() -> None:
    facts = read_model(Module(needs_values=True), torch.zeros(SAMPLES, 8), SAMPLES)
    plain = read_model(Module(), torch.zeros(SAMPLES, 8), SAMPLES)
    assert facts.flops == plain.flops
    with pytest.raises(HanayoError, match="Module.training_step can't run on the meta device, without values"):
        read_model(Module(needs_values=True).to("meta"), torch.zeros(SAMPLES, 8), SAMPLES)


def test_without_a_stack() -> None:
    with pytest.raises(HanayoError, match="stack"):
        read_model(Module(blocks=1), torch.zeros(SAMPLES, 8), SAMPLES)


@pytest.mark.parametrize(
    ("precision", "masters", "expected"),
    [
        ("32-true", False, (torch.float32, 4, 4, 0)),
        ("bf16-mixed", False, (torch.bfloat16, 4, 4, 0)),
        ("bf16-true", False, (torch.bfloat16, 2, 2, 0)),
        ("bf16-true", True, (torch.bfloat16, 2, 4, 4)),
        ("64-true", False, (torch.float64, 8, 8, 0)),
    ],
)
def test_formats(precision: str, masters: bool, expected: tuple[Any, ...]) -> None:
    assert formats_of(precision, master_weights=masters) == expected


def test_half_precision_halves_what_is_kept() -> None:
    module = Module()
    whole, half = (read_model(module, torch.zeros(SAMPLES, 8), SAMPLES, precision=one) for one in ("32", "bf16-true"))
    assert half.blocks[0].saved == whole.blocks[0].saved / 2
    assert half.message == whole.message / 2
    assert half.optimizer_bytes == 2
