"""What the planner knows of a model is what it computes, whatever the model is made of."""

from collections import Counter
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.block_time import time_block
from lightning_hanayo.planner.candidates import Candidate, candidates
from lightning_hanayo.planner.communication_volume import ExpertLayer, LinearLayer
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.planner.model_facts import Code
from lightning_hanayo.strategy.model_facts import formats_of, read_model
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


class HuggingFace(L.LightningModule):
    """A model that computes its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss: Tensor = self.net(**batch).loss
        return loss


class AttentiveModule(GPT):
    """A GPT whose step may look at a value."""

    def __init__(self, *, needs_values: bool) -> None:
        super().__init__(vocab_size=64, context=CONTEXT, num_layers=2, width=WIDTH, num_heads=4)
        self.needs_values = needs_values

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The GPT's."""
        loss = super().training_step(batch, batch_idx)
        return loss if not self.needs_values or float(loss.detach()) >= 0 else -loss


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
    assert list(facts.blocks[0].products) == [
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


def test_a_vocabulary_that_stays_sharded() -> None:
    pytest.importorskip("transformers")
    facts = counted("llama")
    table = 2 * 1024 * 128  # embedding and head
    assert (facts.vocabulary_bytes, facts.vocabulary_gradients) == (4 * table, 4 * table)
    assert facts.by_rows is not None, "a causal model of transformers computes its loss in chunks then"
    outside, loss = facts.by_rows
    assert facts.loss == Code()
    assert loss.flops == facts.outside.flops
    assert outside.flops == 0
    assert outside.saved < facts.outside.saved
    for mesh, saved in [((1, 1, 1), 0), ((1, 2, 1), 8 * table)]:
        whole, sharded = (Candidate(1, 1, mesh, samples=2, cube_outside=one) for one in ("share", "tokens"))
        model = StepModel(facts, machine("h100"))
        assert model.memory(whole).gathered - model.memory(sharded).gathered == saved


def test_a_loss_from_whole_logits_of_another_model_needs_them_all() -> None:
    model = GPT(vocab_size=1000, context=CONTEXT, num_layers=3, width=WIDTH, num_heads=4)
    ids = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
    assert read_model(model, {"input_ids": ids, "labels": ids}, SAMPLES).by_rows is None


def test_a_llama_shares_the_inputs_of_q_k_v_and_of_gate_and_up() -> None:
    pytest.importorskip("transformers")
    facts = counted("llama")
    sizes = [(one.in_features, one.out_features, one.row_parallel) for one in facts.blocks[0].products]
    assert sizes == [(128, 384, False), (128, 128, True), (128, 672, False), (336, 128, True)]
    assert facts.outside_parameters - facts.computing_parameters == 1024 * 128, "the embedding's table"
    assert facts.blocks[0].calls == 34, "kernels alone, without questions about devices"
    assert facts.outside.workspace == 2 * 4 * 256 * 1024, "logits and their gradient"


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
    for module in (Module(needs_values=True).to("meta"), Module(needs_values=True, on_meta=True)):
        assert read_model(module, torch.zeros(SAMPLES, 8), SAMPLES).parameters == plain.parameters


def test_a_large_model_whose_step_needs_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hanayo.strategy.uncut_step._MOST_REAL", 1000)
    with pytest.raises(HanayoError, match="Module.training_step can't run on the meta device, without values"):
        read_model(Module(needs_values=True), torch.zeros(SAMPLES, 8), SAMPLES)


def test_a_step_with_values_counts_as_without() -> None:
    """In the format of the run; attention, too."""
    ids = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
    for precision in ("32-true", "bf16-true"):
        found = []
        for needs_values in (False, True):
            model = AttentiveModule(needs_values=needs_values)
            found.append(read_model(model, {"input_ids": ids, "labels": ids}, SAMPLES, precision=precision))
        without, real = found
        assert real.flops == without.flops > 0
        assert real.message == without.message
        assert real.blocks[0].calls == without.blocks[0].calls
        assert real.blocks[0].traffic == pytest.approx(without.blocks[0].traffic, rel=0.1)
        assert real.blocks[0].saved == pytest.approx(without.blocks[0].saved, rel=0.1)


def test_a_step_that_needs_a_trainer() -> None:
    class NeedsTrainer(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.trainer.max_epochs

    with pytest.raises(HanayoError, match=r"NeedsTrainer.training_step can't run by itself, without a Trainer .*: "):
        read_model(NeedsTrainer(), torch.zeros(SAMPLES, 8), SAMPLES)


def test_the_module_stays_as_it_is() -> None:
    class Remembers(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.losses.append(loss)
            return loss

    module = Remembers()
    module.losses: list[Tensor] = []  # type: ignore[misc]
    read_model(module, torch.zeros(SAMPLES, 8), SAMPLES)
    assert module.losses == []


@pytest.mark.parametrize("masked", [False, True])
def test_a_mask_of_transformers_needs_no_values(masked: bool) -> None:
    """Which asks whether the mask is all ones."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=2, use_cache=False)
    with torch.device("meta"):
        model = HuggingFace(transformers.LlamaForCausalLM(config))
    ids = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    facts = read_model(model, batch | {"attention_mask": torch.ones_like(ids)} if masked else batch, SAMPLES)
    assert facts.blocks[0].attention_flops == 4 * CONTEXT * CONTEXT * 32


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_experts_count_for_the_tokens_that_they_get(precision: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = HuggingFace(transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts)))
    ids = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
    facts = read_model(model, {"input_ids": ids, "labels": ids}, SAMPLES, precision=precision)
    block = facts.blocks[0]
    of_experts = 2 * CONTEXT * 2 * 3 * 32 * 64  # two experts of three products for each token
    router = 2 * CONTEXT * 32 * 4
    assert block.attention_flops == pytest.approx(4 * CONTEXT * CONTEXT * 32 + of_experts, abs=router)
    element = 2 if precision == "bf16-true" else 4
    kept = block.experts and block.experts.saved / CONTEXT / element  # 2 experts: their input, 5 values per feature
    dtype = "bfloat16" if precision == "bf16-true" else "float32"  # autocast leaves grouped products as they are
    assert block.experts == ExpertLayer(CONTEXT, 32, 4, 2, 4 * 3 * 32 * 64, of_experts, block.experts.saved, dtype)
    assert kept == pytest.approx(2 * (32 + 5 * 64), rel=0.5)
    halves, whole = (
        time_block(one, (1, 1, 1), SAMPLES, replace(machine("h200"), host_call=0.0), facts.dtype, 2).alone.forward
        for one in (replace(block, experts=replace(block.experts, dtype="")), block)
    )
    assert (whole > halves) == (precision == "bf16-mixed")


def test_shared_experts_take_less_memory_and_are_planned_for_the_worst_choice() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2}
    model = HuggingFace(transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts)))
    ids = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
    facts = read_model(model, {"input_ids": ids, "labels": ids}, SAMPLES)
    layer = facts.blocks[0].experts
    assert layer is not None and facts.has_experts
    step_model = StepModel(replace(facts, optimizer_bytes=8.0), machine("h100"))
    whole = Candidate(mesh=(2, 2, 2), samples=16)
    shared = replace(whole, experts="cube")
    before, after = step_model.memory(whole), step_model.memory(shared)
    others = 2 * layer.parameters * 3 / 5  # of five experts the first two ranks of y and z have two each
    assert before.weights - after.weights == pytest.approx(4 * others)
    assert before.gradients - after.gradients == pytest.approx(4 * others)
    assert after.optimizer - before.optimizer == pytest.approx(8 * 2 * layer.parameters * (2 / 5 - 1 / 8))
    assert after.activations - before.activations == pytest.approx(2 * 16 * layer.saved * (1 / 2 - 1 / 8))
    assert step_model.closed_form(shared).seconds != step_model.closed_form(whole).seconds
    found = {one.experts for one in candidates(facts, 8, 64, Counter()) if one.mesh == (2, 2, 2)}
    assert found == {"whole", "cube"}
    assert {one.experts for one in candidates(facts, 8, 64, Counter()) if one.mesh[1:] == (1, 1)} == {"whole"}


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    """As with adapters: on one rank, each trained parameter has 4 bytes of gradients and 4 of momentum."""
    module = Module()
    module.ends["last"].requires_grad_(False)
    assert module.blocks is not None
    for block in module.blocks:
        block.up.requires_grad_(False)  # type: ignore[union-attr]
    facts = read_model(module, torch.zeros(SAMPLES, 8), SAMPLES)
    model = StepModel(facts, machine("cpu"))
    trained = sum(one.numel() for one in module.parameters() if one.requires_grad)
    for estimate in (model.closed_form(Candidate()), model.simulated(Candidate(schedule="1f1b"))):
        memory = estimate.memory
        sizes = memory.weights, memory.gradients, memory.optimizer
        assert sizes == pytest.approx((4 * facts.parameters, 4 * trained, 4 * trained))


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


def test_mixed_precision_keeps_what_autocast_makes() -> None:
    """The residual stream and norms in fp32, operands of products in bf16, and the weights' copies."""
    model = AttentiveModule(needs_values=False)
    ids = torch.randint(64, (SAMPLES, CONTEXT))
    facts = read_model(model, {"input_ids": ids, "labels": ids}, SAMPLES, precision="bf16-mixed")
    block, parameters = model.blocks[0], {one.untyped_storage()._cdata for one in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in parameters:
            kept[storage] = tensor
        return tensor

    x = torch.randn(SAMPLES, CONTEXT, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), saved_tensors_hooks(keep, lambda one: one):
        block(x)
    own = facts.blocks[0]
    counted = SAMPLES * own.saved + 2 * own.of_a_rank(SAMPLES, (1, 1, 1)).cast
    assert counted == pytest.approx(sum(one.untyped_storage().nbytes() for one in kept.values()), rel=0.02)
    assert facts.message == 4 * CONTEXT * WIDTH
    assert facts.dtype == "bfloat16"
