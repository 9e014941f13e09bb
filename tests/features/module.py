"""Features: what a module, its hooks and a script use of Lightning."""

import io
from contextlib import redirect_stdout
from typing import Any

import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from tests.features.feature import AsDDP, Differs, Equal, Feature, Refused, on
from tests.features.hooks import CallbackHooks, NotesHooks, order_of_hooks
from tests.features.net import Data, Net
from tests.features.trial import Trial, fit, predict
from tests.harness.models import Batch, Block


class Configured(Net):
    """Built in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            torch.manual_seed(5)
            self.blocks = nn.ModuleList(Block() for _ in range(8))


class Gathers(Net):
    """`self.all_gather` in a hook: rank r of DDP is data rank r here."""

    def on_train_epoch_end(self) -> None:
        mean = self.all_gather(torch.tensor(float(self.current_epoch))).mean()
        self.log("gathered", mean)


class Prints(Net):
    def on_train_epoch_end(self) -> None:
        self.print("epoch", self.current_epoch)


def printed(trial: Trial) -> None:
    with redirect_stdout(io.StringIO()) as out:
        fit(trial)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("epoch")]
    assert bool(lines) == trial.trainer.is_global_zero
    if lines:
        trial.record(lines=lines)


class Dropped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class ReturnsDictionary(Net):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch["x"])}


class ReturnsNone(Net):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Transfers(Net):
    """Changes batches on their way."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch | {"x": batch["x"] + 1}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch | {"x": batch["x"] * 0.5}


class ReadsTrainer(Net):
    """Reads the Trainer in its step, and rates and optimizers in a hook."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.log("where", float(self.global_step + 10 * self.current_epoch + 100 * batch_idx))
        self.log("last", float(self.trainer.is_last_batch))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        optimizer = self.optimizers()
        self.log("rate", optimizer.param_groups[0]["lr"])  # type: ignore[union-attr]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class CompiledBlocks(Net):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(backend="eager")


class OwnCallback(Net):
    def configure_callbacks(self) -> Any:
        return [LambdaCallback(on_validation_epoch_end=lambda trainer, module: module.log("of callback", 2.0))]


class Freezes(Net):
    """Trains the head alone."""

    def on_fit_start(self) -> None:
        self.freeze()
        self.head.requires_grad_(True)


class Normalised(Net):
    """BatchNorm in front of the stack, in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16).eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class TracksBatches(Net):
    """Normalises by each batch, and subtracts an average that its step tracks, and one that a hook tracks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.blocks[3].norm = nn.BatchNorm1d(16, momentum=None)
        self.register_buffer("center", torch.zeros(16))
        self.register_buffer("mean_loss", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.norm(x) - self.center)
        return x * (1 - 0.1 * self.mean_loss)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.center = 0.9 * self.center + 0.1 * batch["x"].mean(0)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.mean_loss.mul_(0.5).add_(outputs["loss"].double(), alpha=0.5)


def tracked_buffers(trial: Trial) -> None:
    """The buffers of all data ranks, and predictions with them."""
    fit(trial)
    own = {name: b for name, b in trial.module.named_buffers() if not b.is_meta and name.split(".")[0] != "blocks"}
    trial.record(**{name: buffer.clone() for name, buffer in own.items()})
    trial.record_samples("mean of data ranks", own["norm.running_mean"][None])
    predict(trial)


class SeesModes(Net):
    """Notes whether steps are in training mode, with gradients, in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        stage = str(self.trainer.state.stage)
        self.modes[stage] = (self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        return super().forward(x)


def modes(trial: Trial) -> None:
    fit(trial)
    trial.trainer.test(trial.module, datamodule=trial.data, verbose=False)
    predict(trial)
    if trial.trainer.is_global_zero:
        trial.record(modes=trial.module.modes)


class Frozen(Net):
    """Its embedding is frozen in the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.embedding.requires_grad_(self.current_epoch > 0)


class PreparedData(Data):
    """Prepares and sets up its data, and notes it."""

    def __init__(self, data_rank: int = 0, data_size: int = 1) -> None:
        super().__init__(data_rank, data_size)
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch | {"x": batch["x"] * 0.5}


def with_data_hooks(trial: Trial) -> None:
    fit(trial)
    trial.trainer.validate(trial.module, datamodule=trial.data, verbose=False)
    if trial.trainer.is_global_zero:
        trial.record(calls=trial.data.calls)  # type: ignore[attr-defined]


def seeded(trial: Trial) -> None:
    seed_everything(7, workers=True, verbose=False)
    fit(trial)


def by_cli(trial: Trial) -> None:
    """`LightningCLI` builds Trainer, module and data from arguments."""
    layout, strategy = trial.layout, "--trainer.strategy"
    arguments = [f"{strategy}={trial.kind}"]
    if trial.kind == "hanayo":
        sizes = {"pipeline": layout.pipe, "data": layout.data}
        arguments = [f"{strategy}=lightning_hanayo.HanayoStrategy"]
        arguments += [f"{strategy}.{axis}_parallel_size={size}" for axis, size in sizes.items()]
    arguments += [f"--trainer.devices={layout.world_size}", f"--data.data_rank={trial.data_rank}"]
    arguments += ["--trainer.accelerator=cpu", "--trainer.max_epochs=2", f"--data.data_size={layout.data}"]
    arguments += [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "use_distributed_sampler")]
    cli = LightningCLI(Net, Data, save_config_callback=None, run=False, seed_everything_default=0, args=arguments)
    cli.trainer.callbacks += trial.trainer.callbacks[-1:]
    trial.trainer, trial.module = cli.trainer, cli.model
    trial.trainer.fit(trial.module, cli.datamodule)


def scripted(trial: Trial) -> None:
    """What is exported after training."""
    fit(trial)
    if hasattr(trial.trainer.strategy, "gather_model"):
        whole = trial.trainer.strategy.gather_model()
    else:
        whole = trial.module.cpu().eval()
    if whole is not None and trial.trainer.is_global_zero:
        trial.record(output=whole.eval()(torch.ones(2, 16)).detach())


FEATURES = [
    Feature(
        "the order of all hooks",
        lambda _: {"callbacks": CallbackHooks()},
        NotesHooks,
        script=order_of_hooks,
        note="of module and callback; steps run once per micro-batch",
    ),
    Feature("`configure_model`", module=Configured),
    Feature("`LightningDataModule` with all its hooks", data=PreparedData, script=with_data_hooks),
    Feature("`self.all_gather` in a hook", module=Gathers),
    Feature("`self.print`", module=Prints, script=printed, note="rank 0 prints"),
    Feature("`training_step` returns a dictionary", module=ReturnsDictionary),
    Feature("`training_step` returns None", module=ReturnsNone, outcomes=on(Refused("returned NoneType"))),
    Feature("`on_before_batch_transfer`, `on_after_batch_transfer`", module=Transfers),
    Feature("`self.global_step`, `self.optimizers()`, `trainer.is_last_batch`", module=ReadsTrainer),
    Feature("`seed_everything(workers=True)`", script=seeded),
    Feature("`deterministic=True`", lambda _: {"deterministic": True}),
    Feature("blocks that are compiled", module=CompiledBlocks),
    Feature("parameters frozen in a hook", module=Frozen),
    Feature("`self.freeze()` in `on_fit_start`", module=Freezes),
    Feature("`configure_callbacks`", module=OwnCallback),
    Feature("BatchNorm in evaluation mode", module=Normalised),
    Feature(
        "BatchNorm and buffers that steps and hooks change",
        module=TracksBatches,
        script=tracked_buffers,
        strategy={"num_microbatches": 1},
        outcomes=on(Equal(), AsDDP()),
        note="with one micro-batch; data ranks take the buffers of data rank 0",
    ),
    Feature("training, gradient and inference mode in all steps", module=SeesModes, script=modes),
    Feature("`inference_mode=False`", lambda _: {"inference_mode": False}, SeesModes, script=modes),
    Feature("manual optimization", module=Manual, outcomes=on(Refused("manual optimization"))),
    Feature(
        "dropout",
        module=Dropped,
        outcomes=on(Differs(("callback metrics", "logger", "losses", "weights"))),
        note="each micro-batch has [its own random numbers](../guides/random.md); with DDP each data rank has",
    ),
    Feature("`LightningCLI`", script=by_cli),
    Feature("the whole model after `fit`", script=scripted, note="`gather_model`"),
]
