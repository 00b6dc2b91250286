"""Unisono below skorch: `from unisono.skorch import NeuralNetClassifier` in the place of skorch's own.

    net = NeuralNetClassifier(Module, max_epochs=10, lr=0.1, strategy="powersgd(rank=4)")

or `class Net(ParallelMixin, skorch.NeuralNet)`. The workers are started by `unisono run -n 4 train.py`, or any other
engine; alone it is skorch's. Needs the extra `skorch`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono.methods.strategy import Replica, parallel
from unisono.methods.strategy import Strategy as Method
from unisono.methods.strategy.changing import Agreed
from unisono.training.data import Shard
from unisono.training.data.settings import ShardSettings
from unisono.world import World, join

try:
    import skorch
    from skorch.callbacks import BatchScoring, EpochScoring
    from skorch.dataset import get_len
except ImportError as error:
    raise ImportError("unisono.skorch needs skorch: pip install 'unisono[skorch]'") from error

__all__ = ["NeuralNet", "NeuralNetBinaryClassifier", "NeuralNetClassifier", "NeuralNetRegressor", "ParallelMixin"]

# Callbacks for rank 0 alone. Checkpoint is kept on all ranks, as it also loads, but does not write on the others.
_SHOWING = ("ProgressBar", "TensorBoard", "WandbLogger", "MlflowLogger", "NeptuneLogger", "SacredLogger")


class ParallelMixin:
    """In front of a net of skorch's: `fit` trains on all workers.

    strategy: as for `un.parallel`: "allreduce", "powersgd(rank=4)", "local_sgd(every=8)". A parameter like any other:
    `set_params(strategy=...)`, and a column of GridSearchCV.

    `batch_size` is that of all workers together; every worker gets its part of each batch. The validation set is read
    whole by every worker, and all see the same scores. Lines are printed and files written on rank 0 alone. After `fit`
    all workers have the same module. Every worker calls `fit`, with the same data and the same split.
    """

    agreed_: Agreed | None = None  # during `fit`

    def __init__(self, *args: Any, strategy: str | Method = "allreduce", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strategy = strategy

    @property
    def replica_(self) -> Replica | None:
        """The replica, during `fit`."""
        return None if self.agreed_ is None else self.agreed_.replica

    # Before and after training ---------------------------------------------------------------------------------------

    def fit_loop(self, X: Any, y: Any = None, epochs: int | None = None, **fit_params: Any) -> Any:
        """skorch's own, on a module that is bound meanwhile."""
        world = join()
        replica = parallel(self._find_module(), self._find_optimizers(), self.strategy, world=world)
        self.agreed_ = Agreed(replica)
        try:
            done = super().fit_loop(X, y, epochs=epochs, **fit_params)  # type: ignore[misc]
            self.agreed_.finish()
            world.barrier(tag="skorch")  # what rank 0 has written is there
        finally:
            if not replica.is_closed:  # after an error or an interrupt
                replica.close()
            self.agreed_ = None
        return done

    def _find_module(self) -> nn.Module:
        """The module; if others have parameters too (further modules, a criterion), all of them in one."""
        names: list[str] = self._modules + self._criteria  # type: ignore[attr-defined]
        found = {name: getattr(self, f"{name}_") for name in names}
        having = {
            name: x for name, x in found.items() if isinstance(x, nn.Module) and any(True for _ in x.parameters())
        }
        return next(iter(having.values())) if len(having) == 1 else nn.ModuleDict(having)

    def _find_optimizers(self) -> list[torch.optim.Optimizer]:
        names: list[str] = self._optimizers  # type: ignore[attr-defined]
        return [getattr(self, f"{name}_") for name in names]

    def initialize_callbacks(self) -> Any:
        """skorch's own; those that show or write something do it on rank 0."""
        done = super().initialize_callbacks()  # type: ignore[misc]
        if join().rank != 0:
            kept = []
            for name, callback in self.callbacks_:  # type: ignore[has-type]
                if isinstance(callback, skorch.callbacks.PrintLog):
                    callback.sink = _show_nothing
                elif isinstance(callback, skorch.callbacks.Checkpoint):
                    callback.save_model = _show_nothing
                if type(callback).__name__ not in _SHOWING:
                    kept.append((name, callback))
            self.callbacks_ = kept
        return done

    # While it trains -------------------------------------------------------------------------------------------------

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """skorch's own; of batches to train on, this worker's part."""
        loader = super().get_iterator(dataset, training=training)  # type: ignore[misc]
        if self.agreed_ is None or not training:
            return loader
        return Shard(loader, ShardSettings(None), world=join(), name="skorch")

    def run_single_epoch(self, iterator: Any, training: bool, prefix: str, step_fn: Any, **fit_params: Any) -> None:
        """skorch's own. After an epoch of training the module is the one that all workers agree on."""
        if self.agreed_ is None or not training or iterator is None:
            super().run_single_epoch(iterator, training, prefix, step_fn, **fit_params)  # type: ignore[misc]
            return
        world, counted = join(), []

        def step_and_count(batch: Any, **params: Any) -> Any:
            weight = world.weight  # 0: the batch stands in for one that is missing
            step = step_fn(batch, **params)
            rows = get_len(batch[0] if isinstance(batch, list | tuple) else batch) if weight else 0
            counted.append(float(rows))
            return step

        self.agreed_.take_back()
        super().run_single_epoch(iterator, training, prefix, step_and_count, **fit_params)  # type: ignore[misc]
        self.agreed_.put()
        if world.size > 1 and counted:
            self._join_batches(counted, prefix, world)
            self._join_predictions(counted, world)

    def _join_batches(self, counted: list[float], prefix: str, world: World) -> None:
        """In the history: each batch's size, loss and scores, over all workers."""
        names = [f"{prefix}_loss", *(one.name_ for one in self._list_scores(BatchScoring))]
        rows = self.history[-1]["batches"]  # type: ignore[attr-defined]
        values = torch.tensor([[float(row[name]) for name in names] for row in rows], dtype=torch.float64)
        counts = torch.tensor(counted, dtype=torch.float64)[:, None]
        values = torch.where(counts > 0, values, 0.0) * counts
        sums: Tensor = world.all_reduce(torch.cat([counts, values], 1), "sum", tag="losses").wait()
        for row, (count, *found) in zip(rows, sums.tolist(), strict=True):
            row.update({name: value / count for name, value in zip(names, found, strict=True)})
            row[f"{prefix}_batch_size"] = int(count)

    def _join_predictions(self, counted: list[float], world: World) -> None:
        """Scores of an epoch of training, which are found from what was predicted in it, are those of all samples."""
        for score in self._list_scores(EpochScoring):
            for name in ("y_trues_", "y_preds_"):
                parts = getattr(score, name)
                if not all(isinstance(part, Tensor) for part in parts):  # several outputs, say: predict them anew
                    score.use_caching = False
                elif parts:
                    mine = torch.cat([x if rows else x[:0] for x, rows in zip(parts, counted, strict=True)])
                    setattr(score, name, world.all_gather(mine.detach(), tag="predictions").wait())

    def _list_scores(self, kind: type) -> list[Any]:
        """The callbacks of this kind that score what is trained on."""
        return [one for _, one in self.callbacks_ if isinstance(one, kind) and getattr(one, "on_train", False)]


def _show_nothing(*_: Any) -> None:
    """Replaces methods that print or write, on other ranks than 0."""


class NeuralNet(ParallelMixin, skorch.NeuralNet):  # type: ignore[misc]
    """skorch's, on all workers."""


class NeuralNetClassifier(ParallelMixin, skorch.NeuralNetClassifier):  # type: ignore[misc]
    """skorch's, on all workers."""


class NeuralNetBinaryClassifier(ParallelMixin, skorch.NeuralNetBinaryClassifier):  # type: ignore[misc]
    """skorch's, on all workers."""


class NeuralNetRegressor(ParallelMixin, skorch.NeuralNetRegressor):  # type: ignore[misc]
    """skorch's, on all workers."""
