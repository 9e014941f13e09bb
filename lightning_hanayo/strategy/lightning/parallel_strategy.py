"""The strategy's base class: ranks, launcher, process group, collectives and precision plugin, as Lightning asks."""

import atexit
import os
import sys
import warnings
from abc import ABC, abstractmethod
from contextlib import nullcontext
from types import FrameType
from typing import Any, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.errors import ONE_PACKAGE, OtherPackageError, UnsupportedError, available
from lightning_hanayo.pipeline_parallel.object_collectives import broadcast_object
from lightning_hanayo.strategy.failure import Failures, leave_at_exit, leave_group, pause_at_exit, store_after_failure
from lightning_hanayo.strategy.groups import AllGather, ProcessGroups, backend_for, forget_groups, group_factory
from lightning_hanayo.strategy.joining import close_monitor, monitor_of_world, store_of_start
from lightning_hanayo.strategy.lightning.launcher import CheckingLauncher
from lightning_hanayo.strategy.options import Options, check_names
from lightning_hanayo.strategy.user_code.collectives import UserCollectives, world_size_watched
from lightning_hanayo.topology import Topology, resolve

_LIBRARIES = ("lightning.", "lightning_hanayo.", "torch.")


class _GivenModule:
    """The module that the Trainer was given. Lightning compiles the steps of one that is compiled as a whole.

    It has no `__get__`, as Lightning reads the attribute fifty times in a step.
    """

    def __set__(self, strategy: "MeshParallelStrategy", module: "pl.LightningModule | None") -> None:
        if module is not None and module._compiler_ctx is not None:
            if strategy.topology.replica_size == 1:  # hidden until Lightning has checked which strategies run one
                strategy._compiler_ctx, module._compiler_ctx = module._compiler_ctx, None
            else:
                to_uncompiled(module)
                name = f"torch.compile({type(module).__name__})"
                rank_zero_warn(f"{name} runs as written: steps are suspended at blocks. Use block.compile() instead")
        vars(strategy)["_lightning_module"] = module


class MeshParallelStrategy(ParallelStrategy, ABC):
    """A strategy whose ranks have a place on the axes of a topology (data, pipeline, cube).

    Decisions are agreed over all ranks; metrics are reduced over the data ranks.
    """

    _lightning_module: Any = _GivenModule()

    def __new__(cls, *_: Any, **named: Any) -> Self:
        """Answer unknown options before Python's bare TypeError does.

        Raises:
            HanayoError: there is no such option; the message names the most similar one, or what takes its place.
        """
        check_names(cls, named)
        return super().__new__(cls)

    def __init__(self, options: Options) -> None:
        super().__init__()
        _meet_other_package(type(self))
        self.options = options
        self.num_nodes = 1
        self._topology: Topology | None = None
        self._groups: ProcessGroups | None = None
        self._failures: Failures | None = None
        self._sizes_read: dict[str, str] = {}
        """by code outside of the libraries, since `configure_optimizers` was called: where each was read first"""
        self._processes_training_loaders = False
        self._compiler_ctx: Any = None
        """of a module that was given as `torch.compile(module)`, on one pipeline rank without a cube"""

    # ranks, module and devices

    @property
    def topology(self) -> Topology:
        """The place of every rank."""
        return available(self._topology, "the topology is known once the Trainer is constructed")

    @property
    def groups(self) -> ProcessGroups:
        """This rank's process groups."""
        return available(self._groups, "the process groups exist once the Trainer has started the processes")

    def show_compiled(self) -> None:
        """Let Lightning's `to_uncompiled` find again how the module is compiled."""
        if self._compiler_ctx is not None:
            self.module._compiler_ctx, self._compiler_ctx = self._compiler_ctx, None

    @property
    def module(self) -> "pl.LightningModule":
        """The user's module."""
        return available(self.lightning_module, "the LightningModule is known once the Trainer runs it")

    @property
    def failures(self) -> Failures:
        """Of the run under way."""
        return available(self._failures, "failures are known once the Trainer has started the processes")

    @property
    def environment(self) -> ClusterEnvironment:
        """Tells ranks and addresses."""
        return available(self.cluster_environment, "the cluster environment is set by the Trainer")

    @property
    def data_parallel_size(self) -> int:
        """D, the number of data ranks: ranks that see different batches. Known once the Trainer is constructed.

        The number by which to scale a learning rate; `trainer.world_size` counts the ranks of pipelines and cubes, too.

        Example:
            >>> def configure_optimizers(self):
            ...     return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.strategy.data_parallel_size)
        """
        self._sizes_read["data_parallel_size"] = "user code"
        return self.topology.data

    @property
    @override
    def world_size(self) -> int:
        self._note_world_size(sys._getframe(1))
        return 1 if self._is_alone else super().world_size

    @property
    def _is_alone(self) -> bool:
        """Whether there is one process: its rank needs no environment, such as all of SLURM's variables."""
        return self.num_nodes * self.num_processes == 1

    @property
    @override
    def global_rank(self) -> int:
        return 0 if self._is_alone else super().global_rank

    @property
    @override
    def local_rank(self) -> int:
        return 0 if self._is_alone else super().local_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0 if self._is_alone else super().node_rank

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        self._note_world_size(sys._getframe(1))  # by Trainer.num_devices
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Call `configure_optimizers`.

        Raises:
            UnsupportedError: it reads the world's size, and not the number of data ranks, which is another one.
        """
        can_differ, reads = self.topology.replica_size > 1, self._sizes_read
        if can_differ and reads.keys() == {"world_size"}:
            rank_zero_warn(f"{reads['world_size']} reads {self._about_sizes}")
        reads.clear()
        with world_size_watched(self._note_world_size) if can_differ else nullcontext():
            super().setup_optimizers(trainer)
        if can_differ and reads.keys() == {"world_size"}:
            raise UnsupportedError(f"{reads['world_size']}: configure_optimizers reads {self._about_sizes}")

    def _note_world_size(self, reader: FrameType) -> None:
        """Remember the line that reads a size, maybe through a property of the Trainer's, unless it is a library's."""
        while reader.f_code.co_name in ("world_size", "num_devices", "device_ids") and reader.f_back is not None:
            reader = reader.f_back
        if not str(reader.f_globals.get("__name__")).startswith(_LIBRARIES):
            place = f"{os.path.basename(reader.f_code.co_filename)}:{reader.f_lineno}"
            self._sizes_read.setdefault("world_size", place)

    @property
    def _about_sizes(self) -> str:
        return (
            f"trainer.world_size, num_devices or torch.distributed.get_world_size(): {super().world_size} ranks, with "
            f"those of pipelines and cubes. Learning rates and samples per step scale with the number of data ranks, "
            f"self.trainer.strategy.data_parallel_size, which is {self.topology.data}."
        )

    @property
    def data_rank(self) -> int:
        """This process's place on the data axis."""
        return self.topology.coordinates(self.global_rank)[0]

    @property
    def pipe_rank(self) -> int:
        """This process's place on the pipeline axis."""
        return self.topology.coordinates(self.global_rank)[1]

    @property
    @override
    def root_device(self) -> torch.device:
        return available(self.parallel_devices, "devices are known once the Trainer is constructed")[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on one node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shall give each data rank its own samples."""
        return self.topology.data > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.data, "rank": self.data_rank}

    def set_world_ranks(self) -> None:
        """Called when the Trainer is constructed, and again in each process."""
        accelerator: Any = self.accelerator
        if not isinstance(accelerator, Accelerator | None):
            raise OtherPackageError
        if self.cluster_environment is not None:
            self.num_nodes = _nodes_found(self.cluster_environment, self.num_nodes, self.num_processes)
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for function in (rank_zero_only, fabric_rank_zero_only):
            vars(function)["rank"] = self.global_rank
        sizes = ("pipeline_parallel_size", "data_parallel_size", "cube")
        self._topology = resolve(
            self.num_nodes * self.num_processes, **{name: getattr(self.options, name) for name in sizes}
        )

    # processes

    @abstractmethod
    def check_before_launch(self, trainer: "pl.Trainer", ckpt_path: Any = None) -> None:
        """Reject mistakes that show before any process starts."""

    def after_launch(self) -> None:
        """The Trainer's run has ended."""

    @override
    def _configure_launcher(self) -> None:
        self._launcher = CheckingLauncher(self)

    def tear_down_trainer(self) -> None:
        """End the run as Lightning does after `on_exception`: loggers end as failed, signal handlers are restored."""
        if self.lightning_module is not None:
            trainer = self.module.trainer
            for logger in trainer.loggers:
                logger.finalize("failed")
            trainer._teardown()
            trainer.state.stage = None

    def connect_processes(self) -> None:
        """Join the process group, and create those of the topology unless an earlier run of this Trainer did."""
        self.set_world_ranks()
        if self.global_rank > 0:  # Lightning runs alike on rank 0, which warns
            warnings.filterwarnings("ignore", module=r"lightning\.")
        if self.topology.data > 1:  # as DDP; one data rank goes on with the random numbers of one process
            reset_seed()
        joined_before, timeout = dist.is_initialized(), self.options.transfer_time
        options: dict[str, Any] = {} if self.root_device.type == "cpu" else {"device_id": self.root_device}
        store = store_after_failure(self._address)
        if store is None and not joined_before:
            store = store_of_start(*self._address, self.global_rank, self.world_size, timeout, os.environ)
        if store is not None:
            options["store"] = store
        backend = backend_for(self.root_device)
        place = (0, 1) if self._is_alone else (None, None)  # else the environment tells rank and size
        _init_dist_connection(self.environment, backend, *place, timeout=timeout, **options)
        monitor = monitor_of_world(self.topology, self.global_rank, self.environment.main_address)
        self._failures = Failures(self.global_rank, monitor, self.abort_transfers)
        if isinstance(self.environment, TorchElasticEnvironment):
            self._failures.watch_parent("torchrun's agent")
        if self._groups is None or not joined_before:
            factory = group_factory(self.root_device, timeout)
            self._groups = ProcessGroups.create(self.topology, self.global_rank, factory, pairs=self.options.pairs)
            if not joined_before:
                leave = leave_at_exit if factory.is_native else pause_at_exit
                atexit.unregister(leave)  # of an earlier group of this process
                atexit.register(leave)

    def abort_transfers(self) -> None:
        """After a failure: end the transfers that this rank's device waits for."""
        if self._groups is not None:
            self._groups.factory.abort()

    def disconnect_processes(self) -> None:
        """After a failure: leave the process group without waiting for other ranks."""
        self._groups = None
        forget_groups()
        if self._failures is None:  # it hasn't joined: the monitor is that of a run before
            close_monitor()
        leave_group(self._address)
        if self._failures is not None:
            self._failures.stop()
            self._failures.leave()
            self._failures = None

    @property
    def _address(self) -> tuple[str, int]:
        """Where the processes meet."""
        return self.environment.main_address, self.environment.main_port

    # collectives that Lightning and the user call

    @property
    @abstractmethod
    def user_collectives(self) -> UserCollectives | None:
        """The collectives of user code, while it runs."""

    @override
    def barrier(self, name: str | None = None) -> None:
        if name is not None and name.endswith("_dataloader()"):  # Lightning says which loaders it will process next
            self._processes_training_loaders = name.startswith("train")
        if self.user_collectives is not None:
            self.user_collectives.barrier()
        elif dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        user = self.user_collectives
        return broadcast_object(obj, source=src) if user is None else user.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks that see different samples. In hooks, and for `self.log`: over the data ranks.

        Only pipeline rank 0 has metrics, and the ranks of a cube have the same ones.
        """
        if self.topology.world_size == 1:  # also before a run has made groups
            return tensor
        if self.user_collectives is not None and group in (None, dist.group.WORLD):
            return self.user_collectives.reduce(tensor, reduce_op)
        group = group or self.groups.data
        if isinstance(tensor, Tensor) and group is not None:
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.world_size == 1:
            return decision
        if self.user_collectives is not None and not self.user_collectives.runs_on_all_ranks:
            return self.user_collectives.decide(decision, of_all=all)
        votes = torch.tensor(int(decision))  # in host memory: no host waits for a device
        for group in (self.groups.replica, self.groups.data_control):  # together they reach all ranks
            if group is not None:
                dist.all_reduce(votes, group=group)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the ranks that see other samples than this one. Called by all of them.

        `LightningModule.all_gather` passes the world if its caller named no group. The ranks above pipeline rank 0
        don't run the step that calls it, so a collective over the world would never complete there.

        Returns:
            [ranks, ...]; in a world of one rank the tensor as it is, as Lightning documents it.
        """
        if self.world_size == 1:
            return tensor
        if group is None or group is dist.group.WORLD:
            if self.user_collectives is not None:
                return self.user_collectives.all_gather(tensor, sync_grads=sync_grads)
            group = self.groups.metrics
        with nullcontext() if sync_grads else torch.no_grad():
            gathered: Tensor = AllGather.apply(tensor, group)
        return gathered

    @property
    def synchronizes_batchnorm(self) -> bool:
        """Whether the user asked for BatchNorm statistics over all processes."""
        return self._layer_sync is not None

    def synchronize_batchnorm(self, model: torch.nn.Module) -> None:
        """Let BatchNorm use statistics over all data ranks, if the user asked for it; ranks are single then."""
        if self._layer_sync is not None:
            self._layer_sync.apply(model)


def _nodes_found(environment: ClusterEnvironment, wanted: int, num_processes: int) -> int:
    """The number of nodes: fewer than the Trainer was given if torchrun goes on without some, as in --nnodes=1:2."""
    if not isinstance(environment, TorchElasticEnvironment):
        return wanted
    found, rest = divmod(environment.world_size(), max(1, num_processes))
    return found if not rest and 0 < found < wanted else wanted


def _meet_other_package(strategy: type) -> None:
    """If `pytorch_lightning` is loaded, let its Trainers reach `set_world_ranks`, and warn of its LightningModules."""
    other: Any = sys.modules.get("pytorch_lightning")
    if other is None or other is pl:
        return
    other.strategies.Strategy.register(strategy)  # otherwise they say that it is no strategy, and not why
    names = {cls.__module__: cls.__qualname__ for cls in other.LightningModule.__subclasses__()}
    if users := [name for module, name in names.items() if not module.startswith("pytorch_lightning.")]:
        rank_zero_warn(f"{users[0]} is a LightningModule of `pytorch_lightning`. To train it, {ONE_PACKAGE}")
