"""Unisono below PyTorch Lightning: `Trainer(strategy=unisono.lightning.Strategy("powersgd(rank=4)"))`.

The workers are started by `unisono run -n 4 train.py`, or any other engine; Lightning starts none. Needs the extra
`lightning` (or `pytorch-lightning`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from unisono.strategy import Replica, parallel
from unisono.strategy import Strategy as Method
from unisono.world import World, join

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.strategies import ParallelStrategy
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

__all__ = ["Strategy"]

T = TypeVar("T")
_OPS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


class Strategy(ParallelStrategy):
    """Any of our methods below Lightning's Trainer; the module and its optimizer stay as they are.

    spec: as for `un.parallel`: "allreduce", "powersgd(rank=4)", "local_sgd(every=8)"; `settings` override its fields.

    Lightning counts accumulation, clips, scales and writes checkpoints. They hold the model that the ranks agree on and
    the optimizer's state, not what a reducer has kept back. One optimizer a module.
    """

    strategy_name = "unisono"

    def __init__(self, spec: str | Method = "allreduce", **settings: Any) -> None:
        super().__init__(cluster_environment=_Place())
        self._spec, self._settings = spec, settings
        self.replica: Replica | None = None

    @property
    def world(self) -> World:
        """All workers."""
        return join()

    @property
    def root_device(self) -> torch.device:
        return self.world.device

    @property
    def is_distributed(self) -> bool:
        """Lightning asks: it then gives each worker its part of the data."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world.size, "rank": self.world.rank}

    # Before and after training ---------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        rank_zero_only.rank = self.world.rank  # type: ignore[attr-defined]
        super().setup_environment()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if not self.optimizers:
            return
        if len(self.optimizers) > 1:
            raise ValueError(
                f"unisono.lightning.Strategy takes one optimizer, got {len(self.optimizers)}: give one optimizer with "
                "several parameter groups, or write the loop with un.parallel for each part of the model"
            )
        assert isinstance(self.model, nn.Module)
        self.replica = parallel(self.model, self.optimizers[0], self._spec, world=self.world, **self._settings)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model that the ranks agree on. Lightning calls it on every rank."""
        if self.replica is None:
            return dict(super().lightning_module_state_dict())
        return dict(self.replica.consolidate().state_dict())

    def teardown(self) -> None:
        if self.replica is not None:
            self.replica.close()
            self.replica = None
        super().teardown()

    # While it trains -------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around all passes of an accumulation but the last."""
        with self.replica.no_sync() if self.replica is not None else nullcontext():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor's mean over all workers, or what `reduce_op` says; what is no tensor stays."""
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
        if sync_grads:
            raise NotImplementedError("all_gather(sync_grads=True) is not offered below unisono.lightning.Strategy")
        if self.world.size == 1:
            return tensor
        return torch.stack(self.world.all_gather(tensor.detach(), tag="lightning").wait())

    def barrier(self, name: str | None = None) -> None:
        """Wait until all workers are here."""
        self.world.barrier(tag=name or "lightning")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of worker `src`: plain values and tensors."""
        found: T = self.world.broadcast_object(obj, src)
        return found


class _Place(ClusterEnvironment):
    """Who this worker is, as the world says."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return join().host

    @property
    def main_port(self) -> int:
        return 0  # nobody listens: the workers have met

    @staticmethod
    def detect() -> bool:
        return False  # never chosen by itself

    def world_size(self) -> int:
        return join().size

    def set_world_size(self, size: int) -> None:
        """Lightning may say so; the world knows."""

    def global_rank(self) -> int:
        return join().rank

    def set_global_rank(self, rank: int) -> None:
        """Lightning may say so; the world knows."""

    def local_rank(self) -> int:
        world = join()
        return [r for r in range(world.size) if world.hosts[r] == world.host].index(world.rank)

    def node_rank(self) -> int:
        world = join()
        return list(dict.fromkeys(world.hosts)).index(world.host)
