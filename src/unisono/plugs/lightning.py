"""Unisono below PyTorch Lightning: `Trainer(strategy=unisono.lightning.Strategy("powersgd(rank=4)"))`.

The workers are started by `unisono run -n 4 train.py`, or any other engine; Lightning starts none. Needs the extra
`lightning` (or `pytorch-lightning`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from unisono.launchers.runtime.frames import warn_user
from unisono.methods import autograd
from unisono.methods.strategy import Replica, parallel
from unisono.methods.strategy import Strategy as Method
from unisono.methods.strategy.changing import Agreed, save_own
from unisono.plugs.elastic_batches import ElasticBatches, deal_loader
from unisono.training.batch_norm import sync_batch_norm
from unisono.training.checkpoint import load
from unisono.world import World, join

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.strategies import ParallelStrategy
    from torchmetrics import Metric
else:
    try:
        import lightning.pytorch as pl
        from lightning.fabric.plugins import ClusterEnvironment
        from lightning.fabric.utilities.rank_zero import rank_zero_only
        from lightning.pytorch.strategies import ParallelStrategy
    except ImportError:
        try:
            import pytorch_lightning as pl
            from lightning_fabric.plugins import ClusterEnvironment
            from lightning_fabric.utilities.rank_zero import rank_zero_only
            from pytorch_lightning.strategies import ParallelStrategy
        except ImportError as error:
            raise ImportError("unisono.lightning needs PyTorch Lightning: pip install 'unisono[lightning]'") from error
    from torchmetrics import Metric  # comes with either

__all__ = ["Strategy"]

T = TypeVar("T")
_MARK = "unisono"  # key in Lightning's checkpoint, and name of a file in the folder beside it, with the same value
_OPS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


class Strategy(ParallelStrategy):
    """Any of our methods below Lightning's Trainer; the module and its optimizer stay as they are.

    spec: as for `un.parallel`: "allreduce", "powersgd(rank=4)", "local_sgd(every=8)"; `settings` override its fields.

    Lightning counts accumulation, clips, scales and writes checkpoints, which hold the model that the ranks agree on
    and the optimizer's state. That model is the one that is validated, too, and after `fit` every rank has it. What
    ranks keep for themselves lies in a folder beside a checkpoint, `last.ckpt.unisono`. A module that optimizes by hand
    may have several optimizers, in which every trainable parameter is once.
    """

    strategy_name = "unisono"

    def __init__(self, spec: str | Method = "allreduce", **settings: Any) -> None:
        super().__init__(cluster_environment=_Place())
        self._spec, self._settings = spec, settings
        self._agreed: Agreed | None = None  # during fit
        self._resumed_from: Path | None = None
        self._failed = False
        self._batches: ElasticBatches | None = None  # of training, in an elastic run
        self._again: Any = None  # a batch of a step that is repeated, as a worker was lost in it

    @property
    def replica(self) -> Replica | None:
        """The replica, during `fit`."""
        return None if self._agreed is None else self._agreed.replica

    @property
    def world(self) -> World:
        """All workers."""
        return join()

    @property
    def root_device(self) -> torch.device:
        return self.world.device

    @property
    def is_distributed(self) -> bool:
        """Asked by Lightning, which then gives each worker its part of the data. In an elastic run the plug does."""
        return self.world.elastic is None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world.size, "rank": self.world.rank}

    # Before and after training ---------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        world, devices = self.world, self.parallel_devices or []
        if self.root_device.type == "cpu" and len(devices) > 1 and len(devices) != world.local_size:
            raise ValueError(
                f"Trainer(devices={len(devices)}), and this machine has {world.local_size} worker(s): Lightning starts "
                f"none below this strategy. Leave devices out, and start them by `unisono run -n {len(devices)}`"
            )
        rank_zero_only.rank = world.rank  # type: ignore[attr-defined]
        self._failed = False
        super().setup_environment()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert isinstance(self.model, nn.Module)
        _join_metrics(self.model)
        if trainer.state.fn != "fit":
            return
        if not self.optimizers:
            raise ValueError("unisono.lightning.Strategy got no optimizer: configure_optimizers returns one or several")
        if self._layer_sync is not None:  # Trainer(sync_batchnorm=True)
            sync_batch_norm(self.model, self.world)
        replica = parallel(self.model, self.optimizers, self._spec, world=self.world, **self._settings)
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            replica.watch(scaler)
        self._agreed = Agreed(replica)
        if self.world.elastic is not None:
            self.world.follow(self)
            if not self.lightning_module.automatic_optimization:  # type: ignore[union-attr]
                raise ValueError(
                    "unisono.lightning: automatic_optimization=False in an elastic run (-n MIN:MAX): a step in which a "
                    "worker is lost is repeated, and Lightning does not know where yours begins. Use a fixed number of "
                    "workers (-n N), or write the loop with un.parallel"
                )

    def on_exception(self, exception: BaseException) -> None:
        """Note the failure: other ranks may be anywhere, so `teardown` must not communicate."""
        self._failed = True

    def teardown(self) -> None:
        """Unbind: the model is an ordinary one again, with the same values on every rank."""
        if self._agreed is not None:
            if self._failed:
                self._agreed.replica.close()
            else:
                self._agreed.finish()
            self._agreed = None
        self._batches = None
        super().teardown()

    # Workers that come and go ----------------------------------------------------------------------------------------

    def world_changed(self, world: World) -> None:
        """Only rank 0 logs and writes, and that may be another worker now."""
        rank_zero_only.rank = world.rank  # type: ignore[attr-defined]

    def process_dataloader(self, dataloader: Any) -> Any:
        """In an elastic run, deal training data anew when workers come and go; every worker reads all other data."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        if self.world.elastic is None or trainer is None or not trainer.training:
            return dataloader
        if self._batches is not None:
            raise ValueError(
                "unisono.lightning: several training loaders, or reload_dataloaders_every_n_epochs, in an elastic run "
                "(-n MIN:MAX): give one loader, or use a fixed number of workers (-n N)"
            )
        counters = _Counters(trainer)
        self._batches = ElasticBatches(
            deal_loader(dataloader, self.world, name="lightning"),
            window=trainer.accumulate_grad_batches,
            read=counters.read,
            load=counters.load,
        )
        return self._batches

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Lightning's own, and once more for as long as a worker is lost in it."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        while self._batches is not None and (window := self._batches.redraw()) is not None:
            *others, last = [self.batch_to_device(batch) for batch in window]
            try:
                for self._again in others:
                    with self.block_backward_sync():
                        closure()
                self._again = last
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
            finally:
                self._again = None
        return result

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model that the ranks agree on. Lightning calls it on every rank."""
        if self._agreed is not None:
            self._agreed.put()  # until the next batch
        return dict(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._agreed is not None:
            self._agreed.put()
        return dict(super().optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's own file, and beside it what only the ranks themselves know."""
        checkpoint[_MARK] = self.broadcast(time.time_ns())  # tells which folder belongs to this file
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self._agreed is None or "optimizer_states" not in checkpoint:
            return
        if "://" in str(filepath):
            if self.is_global_zero:
                warn_user(f"what ranks keep for themselves is not saved with {filepath}: only on a disk that all see")
            return
        self._agreed.take_back()
        if save_own(_beside(filepath), self._agreed.replica) and self.is_global_zero:
            (_beside(filepath) / _MARK).write_text(str(checkpoint[_MARK]))
        self._agreed.put(whole=False)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero and "://" not in str(filepath):
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._resumed_from = None if "://" in str(checkpoint_path) else _beside(checkpoint_path)
        return dict(super().load_checkpoint(checkpoint_path, *args, **kwargs))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state, and what each rank kept for itself."""
        if self._agreed is None:
            return
        replica = self._agreed.replica
        replica.restore()
        super().load_optimizer_state_dict(checkpoint)
        replica.split_again()
        if self.broadcast(self._resumed_from is not None and _belongs(self._resumed_from, checkpoint)):
            assert self._resumed_from is not None
            load(self._resumed_from, replica)

    # While it trains -------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Validate the model that the ranks agree on."""
        if self._agreed is not None:
            self._agreed.put(whole=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Train on with this rank's own model."""
        if self._agreed is not None:
            self._agreed.take_back()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            if self._again is not None:
                args = (self._again, *args[1:])
            return self._call("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        """Call a step through the module, so that hooks of our methods run (`zero(stage=3)` gathers values)."""
        module = self.lightning_module
        assert module is not None
        if self._agreed is None:
            return getattr(module, name)(*args, **kwargs)

        def step(*args: Any, **kwargs: Any) -> Any:
            del module.forward  # its own again, which the step may call
            return getattr(module, name)(*args, **kwargs)

        module.forward = step  # type: ignore[method-assign]
        try:
            return module(*args, **kwargs)
        finally:
            module.__dict__.pop("forward", None)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around all passes of an accumulation but the last."""
        with self.replica.no_sync() if self.replica is not None else nullcontext():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor's mean over all workers, or another `reduce_op`; other objects are returned as they are."""
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPS:
            raise ValueError(f"reduce_op must be one of {', '.join(_OPS)}, got {reduce_op!r}")
        wide = tensor.detach().clone() if tensor.is_floating_point() else tensor.detach().to(torch.float64)
        found: Tensor = self.world.all_reduce(wide, _OPS[name], tag="lightning").wait()  # type: ignore[arg-type]
        return found if tensor.is_floating_point() or _OPS[name] == "mean" else found.to(tensor.dtype)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Every worker's tensor, in a new first dimension; of one worker as it is."""
        if self.world.size == 1:
            return tensor
        if sync_grads:
            return autograd.all_gather(tensor[None], self.world, "sum", tag="lightning")
        return torch.stack(self.world.all_gather(tensor.detach(), tag="lightning").wait())

    def barrier(self, name: str | None = None) -> None:
        """Wait until all workers are here."""
        self.world.barrier(tag=name or "lightning")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of worker `src`: plain values and tensors."""
        found: T = self.world.broadcast_object(obj, src)
        return found


class _Counters:
    """How far Lightning's loops and callbacks are, for a worker that comes later."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def _list_parts(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop
        batches = loop.epoch_loop
        return {
            "epochs": loop.epoch_progress,
            "batches": batches.batch_progress,
            "schedulers": batches.scheduler_progress,
            "optimizer": batches.automatic_optimization.optim_progress,
            **{f"callback {callback.state_key}": callback for callback in self._trainer.callbacks},  # type: ignore[attr-defined]
        }

    def read(self) -> dict[str, Any]:
        """Before a batch is drawn."""
        loop = self._trainer.fit_loop
        fetched = 0 if loop._data_fetcher is None else loop._data_fetcher.fetched
        parts = {name: part.state_dict() for name, part in self._list_parts().items()}
        return {"parts": parts, "fetched": fetched, "stepped": loop.epoch_loop._batches_that_stepped}

    def load(self, state: dict[str, Any]) -> None:
        """Before the first batch is given out."""
        loop = self._trainer.fit_loop
        for name, part in self._list_parts().items():
            if state["parts"].get(name):
                part.load_state_dict(state["parts"][name])
        loop.epoch_loop._batches_that_stepped = state["stepped"]
        assert loop._data_fetcher is not None
        loop._data_fetcher.fetched = state["fetched"]


def _beside(checkpoint: Any) -> Path:
    """The folder beside a checkpoint of Lightning's, for what ranks keep for themselves."""
    path = Path(checkpoint).resolve()  # `last.ckpt` may be a link
    return path.with_name(f"{path.name}.unisono")


def _belongs(folder: Path, checkpoint: Mapping[str, Any]) -> bool:
    """Whether the folder was written with this checkpoint, and not with an earlier one of the same name."""
    mark = folder / _MARK
    return mark.is_file() and mark.read_text() == str(checkpoint.get(_MARK))


def _join_metrics(model: nn.Module) -> None:
    """Make metrics of torchmetrics count what all workers have seen; by default they want a process group."""
    for module in model.modules():
        if isinstance(module, Metric) and module.dist_sync_fn is None:
            module.dist_sync_fn, module.distributed_available_fn = _gather_for_metric, _has_others


def _gather_for_metric(x: Tensor, group: Any = None) -> list[Tensor]:
    return join().all_gather(x, tag="metrics").wait()


def _has_others() -> bool:
    return join().size > 1


class _Place(ClusterEnvironment):
    """Lightning's view of the world: rank, size and host of this worker."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return join().host

    @property
    def main_port(self) -> int:
        return 0  # not used: the workers are connected already

    @staticmethod
    def detect() -> bool:
        return False  # never chosen by itself

    def world_size(self) -> int:
        return join().size

    def set_world_size(self, size: int) -> None:
        """Ignored: the world decides."""

    def global_rank(self) -> int:
        return join().rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the world decides."""

    def local_rank(self) -> int:
        return join().local_rank

    def node_rank(self) -> int:
        world = join()
        return list(dict.fromkeys(world.hosts)).index(world.host)
