"""Unisono below Keras 3 on its torch backend: a model that is compiled in a scope trains on all workers.

    with unisono.keras.scope("powersgd(rank=4)"):
        model.compile(optimizer="adam", loss="mse")
    model.fit(x, y, batch_size=64)  # that of all workers together

or `unisono.keras.parallel(model, "powersgd(rank=4)")`. The workers are started by `unisono run -n 4 train.py`, or any
other engine. Needs the extra `keras`.
"""

from __future__ import annotations

import inspect
import os
import secrets
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from unisono.methods.spec import build, describe
from unisono.methods.strategy import Strategy as Method
from unisono.methods.strategy import parallel as bind
from unisono.methods.strategy.changing import Agreed
from unisono.methods.strategy.healing import Healing, follow
from unisono.plugs.elastic_batches import ElasticBatches, name_shard
from unisono.training.data import Shard
from unisono.training.data.settings import ShardSettings
from unisono.world import World, join

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported
try:
    import keras
    from keras.src.trainers.data_adapters import array_slicing
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
    from keras.src.trainers.trainer import Trainer
except ImportError as error:
    raise ImportError("unisono.keras needs Keras 3: pip install 'unisono[keras]'") from error

__all__ = ["parallel", "scope"]

_ATTRIBUTE = "_unisono"  # of a model, for its `_Training`


@contextmanager
def scope(strategy: str | Method = "allreduce", **settings: Any) -> Generator[World, None, None]:
    """Models that are compiled inside train on all workers, wherever `fit` is called. Gives the world.

    strategy: as for `un.parallel`: "allreduce", "powersgd(rank=4)", "local_sgd(every=8)"; `settings` override its
    fields.
    """
    compile_alone = Trainer.compile

    def compile_for_all(model: Any, *args: Any, **kwargs: Any) -> None:
        compile_alone(model, *args, **kwargs)
        parallel(model, strategy, **settings)

    Trainer.compile = compile_for_all
    try:
        yield join()
    finally:
        Trainer.compile = compile_alone


def parallel(model: Any, strategy: str | Method = "allreduce", **settings: Any) -> Any:
    """Let a Keras model train on all workers; returns the same model.

    `fit` deals every batch among the workers, so that `batch_size` is that of all together; every sample counts once.
    `evaluate` and `predict` divide arrays and give the whole answer on every worker. Metrics are those of all samples.
    Callbacks that write files (ModelCheckpoint, CSVLogger, TensorBoard) and the progress bar are on rank 0 alone. After
    `fit` all workers have the same model. Every worker calls these methods.
    """
    if keras.backend.backend() != "torch":
        raise ValueError(
            f"unisono.keras needs Keras on torch, and it was imported on {keras.backend.backend()}: set "
            "KERAS_BACKEND=torch, or import unisono.keras before keras"
        )
    built: Method = build(strategy, kind="strategy")
    if reason := built.why_torch_optimizer():
        raise ValueError(
            f"{describe(built)} does not go with Keras' optimizers, as {reason}: use allreduce with any reducer, "
            "local_sgd, diloco, gossip or async_average; or torch's optimizer in a loop with un.parallel"
        )
    known = model.__dict__.get(_ATTRIBUTE)
    if known is None:
        model.__dict__[_ATTRIBUTE] = known = _Training(model)
    known.spec, known.settings = built, settings
    return model


class _Training:
    """Replaces `fit`, `evaluate`, `predict` and `train_step` of one model by versions that run on all workers."""

    def __init__(self, model: Any) -> None:
        self.model, self.world = model, join()
        self.spec: Method
        self.settings: dict[str, Any] = {}
        self.agreed: Agreed | None = None  # during `fit`
        self.dealt: _Dealt | None = None  # as well
        self._sums = False  # whether metrics must be summed over the workers
        self._evaluates = self._validation_is_part = False
        self._alone = {name: getattr(model, name) for name in ("fit", "evaluate", "predict", "train_step")}
        self._alone["results"] = model._get_metrics_result_or_logs
        ours = {"fit": self.fit, "evaluate": self.evaluate, "predict": self.predict, "train_step": self.train_step}
        for name, method in {**ours, "_get_metrics_result_or_logs": self.get_results}.items():
            model.__dict__[name] = method

    # What a program calls --------------------------------------------------------------------------------------------

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' own, on this worker's part of every batch."""
        asked = self._read_arguments("fit", args, kwargs)
        if asked["validation_split"] and asked["validation_data"] is None:
            arrays = asked["x"], asked["y"], asked["sample_weight"]
            rest, asked["validation_data"] = array_slicing.train_validation_split(arrays, asked["validation_split"])
            asked["x"], asked["y"], asked["sample_weight"] = rest
            asked["validation_split"] = 0.0
        dealt = _deal(asked, self.world)
        self._validation_is_part = False
        if isinstance(asked["validation_data"], tuple | list):
            given, steps = tuple(asked["validation_data"]), asked["validation_steps"]
            asked["validation_data"], self._validation_is_part = self._take_part(given, steps)
        asked["batch_size"] = asked["batch_size"] or 32
        asked |= {"x": dealt, "y": None, "sample_weight": None, "class_weight": None}
        asked["callbacks"] = _choose_callbacks(asked["callbacks"], self, dealt)
        before, self._sums = self._sums, True
        self.dealt = dealt
        try:
            return self._alone["fit"](**asked)
        finally:
            self._sums, self.dealt = before, None
            dealt.close()
            if self.agreed is not None:  # an error
                self.agreed.replica.close()
                self.end()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' own, of this worker's part; metrics count all parts."""
        asked = self._read_arguments("evaluate", args, kwargs)
        more = asked.pop("kwargs", {})
        if more.get("_use_cached_eval_dataset"):  # called by fit
            is_part = self._validation_is_part
        else:
            arrays = asked["x"], asked["y"], asked["sample_weight"]
            given, is_part = self._take_part(arrays, asked["steps"])
            asked["x"], asked["y"], asked["sample_weight"] = given
        before, self._sums, self._evaluates = self._sums, is_part, True
        try:
            return self._alone["evaluate"](**asked, **more)
        finally:
            self._sums, self._evaluates = before, False

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' own, of this worker's part; then all parts one after the other."""
        asked = self._read_arguments("predict", args, kwargs)
        (asked["x"],), is_part = self._take_part((asked["x"],), asked["steps"])
        mine = self._alone["predict"](**asked)
        if not is_part:
            return mine

        def join_parts(part: Any) -> Any:
            found = self.world.all_gather(torch.from_numpy(part).contiguous(), tag="predictions").wait()
            return torch.cat(found).numpy()

        return keras.tree.map_structure(join_parts, mine)

    def _read_arguments(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        bound = inspect.signature(self._alone[name]).bind(*args, **kwargs)
        bound.apply_defaults()
        if self.world.rank != 0 or _is_joining(self.world):
            bound.arguments["verbose"] = 0
        return dict(bound.arguments)

    def _take_part(self, arrays: tuple[Any, ...], steps: int | None) -> tuple[tuple[Any, ...], bool]:
        """This worker's rows of arrays, and True; or all rows, and False, if the data cannot be cut, is read for some
        steps only, has fewer rows than there are workers, or if workers come and go."""
        fixed = self.world.elastic is None
        if self.world.size == 1 or steps is not None or not fixed or not can_convert_arrays(arrays):
            return arrays, False
        count = len(next(x for x in keras.tree.flatten(arrays) if x is not None))
        if count < self.world.size:
            return arrays, False
        cuts = [count * r // self.world.size for r in (self.world.rank, self.world.rank + 1)]
        cut = array_slicing.convert_to_sliceable(arrays)
        return keras.tree.map_structure(lambda x: x if x is None else x[cuts[0] : cuts[1]], cut), True

    # While it trains -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Bind the model, after Keras has built it and callbacks have loaded into it."""
        model, world = self.model, self.world
        self._shim = _Optimizer(model, carries_state=world.elastic is not None)
        replica = bind(_Weights(model), self._shim, self.spec, world=world, **self.settings)
        self.agreed = Agreed(replica)
        # What is not trained and has no fraction are the seeds that random numbers are drawn from.
        seeds = [v._value.data for v in model.non_trainable_variables if not v._value.is_floating_point()]
        offset = secrets.randbelow(1 << 16) if _is_joining(world) else world.rank
        if world.size > 1:
            states = [v._value.data for v in model.optimizer.variables]
            # Not as a call of the program: a worker that comes later is given what these are by then.
            with nullcontext() if world.elastic is None else world.elastic.inside():
                world.broadcast([*states, *seeds], tag="initial state").wait()
        for seed in seeds:
            seed.view(-1)[0] += offset  # dropout's masks differ between workers
        model.optimizer.__dict__["apply"] = self._shim.apply

    def arrive(self, dealt: _Dealt) -> None:
        """Where workers come and go, let metrics follow; one that comes later begins with the epoch of the others."""
        healing = Healing.of(self.world)
        if healing is None or dealt.elastic is None:
            return
        if self.model.steps_per_execution > 1:
            raise ValueError(
                f"compile(steps_per_execution={self.model.steps_per_execution}) in an elastic run (-n MIN:MAX): a step "
                "in which a worker is lost is repeated, and its batch must be the last that was drawn. Leave it out"
            )
        dealt.close()
        dealt.elastic.restart()
        follow(_Metrics(self.model, dealt.elastic), world=self.world)
        if _is_joining(self.world):
            healing.heal(is_open=True)
            healing.elastic.end_replay()  # it makes none of the calls of the epochs before
            self.model._initial_epoch = healing.find_epoch(dealt.elastic.shard.name)
            # Keras expects a whole epoch, and this one begins in the middle of one.
            warnings.filterwarnings("ignore", message="Your input ran out of data", category=UserWarning)

    def end(self) -> None:
        """Give the model its plain Keras optimizer back."""
        self.agreed = None
        self.model.optimizer.__dict__.pop("apply", None)

    def note_learning_rate(self) -> None:
        """Pass Keras' learning rate on to reducers, which rescale what they keep back by it."""
        self._shim.param_groups[0]["lr"] = float(self.model.optimizer.learning_rate)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' own, and once more for as long as a worker is lost in it."""
        logs = self._train_once(*args, **kwargs)
        while self.dealt is not None and (data := self.dealt.redraw()) is not None:
            logs = self._train_once(data)
        return logs

    def _train_once(self, *args: Any, **kwargs: Any) -> Any:
        """A batch of weight 0, which stands in for a missing one, does not count in metrics."""
        if self.world.weight:
            return self._alone["train_step"](*args, **kwargs)
        states = [(v._value, v._value.detach().clone()) for v in self.model.metrics_variables]
        logs = self._alone["train_step"](*args, **kwargs)
        with torch.no_grad():
            for state, before in states:
                state.copy_(before)
        return logs

    def get_results(self, logs: Any) -> Any:
        """An epoch of training, or of evaluation, has ended: metrics become those of all workers."""
        if self.agreed is not None and not self._evaluates:
            self.agreed.put()  # what is evaluated and saved until the next epoch
        if not self._sums or self.world.size == 1:
            return self._alone["results"](logs)
        states = [v._value.data for v in self.model.metrics_variables]
        self.world.all_reduce(states, "sum", tag="metrics").wait()
        found = self._alone["results"](logs)
        if found is logs and logs:  # from a train_step that the program has overridden
            names = sorted(logs)
            row = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
            mean = self.world.all_reduce(row, "mean", tag="metrics").wait()
            found = dict(zip(names, mean.tolist(), strict=True))
        return found


class _Weights(nn.Module):
    """A Keras model's variables, as torch knows them: parameters to train, and as buffers the other numbers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        for i, v in enumerate(model.trainable_variables):
            self.register_parameter(_name(i, v), v._value)
        for i, v in enumerate(model.non_trainable_variables):
            if v._value.is_floating_point():
                self.register_buffer(_name(i, v), v._value.data)


def _name(number: int, variable: Any) -> str:
    return f"{number} {variable.path.replace('.', '_')}"


class _Optimizer(torch.optim.Optimizer):
    """Keras' optimizer as one of torch's: it has its learning rate, and steps when Keras would.

    carries_state: its state is that of Keras' optimizer, which a worker that comes later is given.
    """

    def __init__(self, model: Any, *, carries_state: bool = False) -> None:
        self._variables = list(model.trainable_variables)
        self._apply = model.optimizer.apply
        self._states = list(model.optimizer.variables) if carries_state else []
        params = [v._value for v in self._variables]
        super().__init__(params, {"lr": float(model.optimizer.learning_rate)})

    def apply(self, gradients: Any, trainable_variables: Any = None) -> None:
        """Replaces the method `apply` of Keras' optimizer."""
        if trainable_variables is not None:
            self._variables = list(trainable_variables)
        self.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [v._value.grad for v in self._variables]
        if any(gradient is not None for gradient in gradients):  # else the window was given up, as a worker was lost
            self._apply(gradients, self._variables)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "keras": [v._value.detach().clone() for v in self._states]} if self._states else found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for variable, value in zip(self._states, state_dict.get("keras", ()), strict=False):
            variable._value.data.copy_(value)
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "keras"})


class _Metrics:
    """The metrics of an epoch so far, for a step that is repeated: its samples are to count once."""

    def __init__(self, model: Any, batches: ElasticBatches) -> None:
        self._model, self._batches = model, batches

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": [v._value.detach().clone() for v in self._model.metrics_variables]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not in a worker that has just come: what the others have counted is theirs."""
        if not self._batches.is_first:
            for variable, value in zip(self._model.metrics_variables, state["metrics"], strict=False):
                variable._value.data.copy_(value)


def _is_joining(world: World) -> bool:
    """Whether this worker comes to a run under way, and is alone until its first batch."""
    return world.elastic is not None and world.elastic.is_joining


# Data --------------------------------------------------------------------------------------------------------------


def _deal(asked: dict[str, Any], world: World) -> _Dealt:
    """The data of `fit`, dealt among the workers."""
    x, y, weight = asked["x"], asked["y"], asked["sample_weight"]
    endless = asked["steps_per_epoch"] is not None
    if isinstance(x, torch.utils.data.DataLoader):
        return _DealtLoader(x, world, endless)
    if not can_convert_arrays((x, y, weight)):
        raise TypeError(
            f"unisono.keras deals arrays and torch's DataLoader among the workers, got {type(x).__name__}: its samples "
            "cannot be told apart by number. Give arrays, or a DataLoader of a map-style dataset"
        )
    return _DealtArrays(x, y, weight, asked, world, endless)


class _Dealt:
    """This worker's part of every batch, in the place of Keras' own reader."""

    _shard: Any
    _endless: bool
    _open: Iterator[Any] | None = None
    elastic: ElasticBatches | None = None  # the shard's batches, where workers come and go

    def _take_shard(self, data: Any, settings: ShardSettings, world: World, endless: bool) -> None:
        name = "keras" if world.elastic is None else name_shard(world, "keras")
        self._shard, self._endless = Shard(data, settings, world=world, name=name), endless
        if world.elastic is None:
            return
        if endless:
            raise ValueError(
                "fit(steps_per_epoch=...) in an elastic run (-n MIN:MAX): a worker that comes later could not tell "
                "which epoch the others are in. Leave it out, or use a fixed number of workers (-n N)"
            )
        world.shards[name] = self._shard
        self.elastic = ElasticBatches(self._shard)

    def redraw(self) -> Any:
        """This worker's part of the batch in use once more, if another was lost in its step; else None."""
        window = None if self.elastic is None else self.elastic.redraw()
        return None if window is None else self._convert(window[0])

    def _convert(self, batch: Any) -> Any:
        """What the shard has given, as Keras takes it."""
        return batch

    @property
    def num_batches(self) -> int | None:
        return None if self._endless else len(self._shard)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch, which does not depend on the number of workers."""
        if not self._endless and (self.elastic is None or self.elastic.is_first):  # else it goes on by itself
            self.close()
            self._shard.set_epoch(epoch)

    def close(self) -> None:
        """End the pass: the batch in use has no weight any more."""
        if self._open is not None:
            self._open.close()  # type: ignore[attr-defined]
            self._open = None

    def get_torch_dataloader(self) -> Iterator[Any]:
        """The batches of a pass, as Keras asks for them."""
        self.close()
        self._open = reading = self._iterate()
        yield from reading

    def _iterate(self) -> Iterator[Any]:
        yield from map(self._convert, self._shard if self.elastic is None else self.elastic)
        while self._endless:
            yield from map(self._convert, self._shard)


class _DealtArrays(_Dealt, ArrayDataAdapter):  # type: ignore[misc]
    def __init__(self, x: Any, y: Any, weight: Any, asked: dict[str, Any], world: World, endless: bool) -> None:
        size = asked["batch_size"] or 32
        ArrayDataAdapter.__init__(self, x, y, weight, batch_size=size, class_weight=asked["class_weight"])
        rows = torch.arange(count := self._num_samples)
        asking = ShardSettings(min(size, count), shuffle=bool(asked["shuffle"]))
        self._take_shard(rows, asking, world, endless)
        self._sliceable: Any = None

    def _convert(self, batch: Any) -> Any:
        if self._sliceable is None:
            self._sliceable = array_slicing.convert_to_sliceable(self._inputs, target_backend="torch")
        rows = batch.cpu().numpy()

        def take(x: Any) -> Any:
            return keras.ops.convert_to_tensor(x.convert_to_torch_compatible(x[rows]))

        return keras.tree.map_structure(take, self._sliceable, none_is_leaf=False)


class _DealtLoader(_Dealt, TorchDataLoaderAdapter):  # type: ignore[misc]
    def __init__(self, loader: Any, world: World, endless: bool) -> None:
        TorchDataLoaderAdapter.__init__(self, loader)
        self._take_shard(loader, ShardSettings(None), world, endless)


# Callbacks ---------------------------------------------------------------------------------------------------------

_SAVERS = ("ModelCheckpoint", "OrbaxCheckpoint")  # that write on rank 0, whichever worker that is
_GATED = "_unisono_gated"
_WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint", "ProgbarLogger")


def _choose_callbacks(given: Any, training: _Training, dealt: _Dealt) -> list[Any]:
    """The callbacks for this worker, followed by our own."""
    if isinstance(given, keras.callbacks.CallbackList):
        raise TypeError("give fit a list of callbacks, got a CallbackList: it may hold some that write on every worker")
    every = list(keras.tree.flatten(given)) if given is not None else []
    asks = any(type(one).on_train_batch_end is not keras.callbacks.Callback.on_train_batch_end for one in every)
    if training.world.elastic is not None:
        for one in every:
            if isinstance(one, tuple(kind for name in _SAVERS if (kind := getattr(keras.callbacks, name, None)))):
                _let_first_rank_save(one, training.world)
    if training.world.rank != 0 or _is_joining(training.world):
        writers = tuple(kind for name in _WRITERS if (kind := getattr(keras.callbacks, name, None)) is not None)
        every = [one for one in every if not isinstance(one, writers) or hasattr(one, _GATED)]
        for one in every:
            if isinstance(one, keras.callbacks.BackupAndRestore):  # must load on every rank, but write on none of these
                one._save_model = lambda *_: None
                one.delete_checkpoint = False
    return [*every, _Follow(training, dealt, asks=asks)]


def _let_first_rank_save(callback: Any, world: World) -> None:
    """Have a callback write on rank 0 alone, whichever worker that is by then."""
    if hasattr(callback, _GATED):
        return
    setattr(callback, _GATED, True)
    save = callback._save_model
    callback._save_model = lambda *args, **kwargs: save(*args, **kwargs) if world.rank == 0 else None


class _Follow(keras.callbacks.Callback):  # type: ignore[misc]
    """Our callback, which runs after the program's own: binds, deals epochs, agrees on when to stop, unbinds."""

    def __init__(self, training: _Training, dealt: _Dealt, *, asks: bool) -> None:
        super().__init__()
        self._training, self._dealt, self._asks = training, dealt, asks

    def on_train_begin(self, logs: Any = None) -> None:
        self._training.begin()
        self._training.arrive(self._dealt)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        assert self._training.agreed is not None
        self._training.agreed.take_back()
        self._dealt.set_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._training.note_learning_rate()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._asks:  # a callback of the program may have asked to stop on this rank alone
            self._agree_to_stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        world = self._training.world
        if world.size > 1:
            asked = torch.tensor([float(self.model.stop_training)])
            self.model.stop_training = bool(world.all_reduce(asked, "max", tag="stop").wait())

    def on_train_end(self, logs: Any = None) -> None:
        training = self._training
        assert training.agreed is not None
        training.agreed.finish()
        training.end()
