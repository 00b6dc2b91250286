"""Unisono below the Hugging Face Trainer and Accelerate.

    Trainer(..., callbacks=[unisono.huggingface.Callback("powersgd(rank=4)")])
    accelerator = unisono.huggingface.Accelerator(strategy="powersgd(rank=4)")

The workers are started by `unisono run -n 4 train.py`, torchrun, or any other engine. Needs the extra `huggingface`
(for Accelerate alone, `accelerate`).
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch import nn
from torch.optim import Optimizer

from unisono.launchers.runtime import membership
from unisono.methods.spec import build, describe
from unisono.methods.strategy import Replica, parallel
from unisono.methods.strategy import Strategy as Method
from unisono.methods.strategy.changing import Agreed, save_own, separate
from unisono.methods.strategy.healing import follow
from unisono.plugs.elastic_batches import ElasticBatches, deal_loader
from unisono.training.checkpoint import load
from unisono.training.data import Shard
from unisono.world import World, join

_NEEDED = "unisono.huggingface needs Accelerate: pip install 'unisono[huggingface]'"
try:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import GradientAccumulationPlugin
except ImportError as error:
    raise ImportError(_NEEDED) from error

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
else:
    try:
        from transformers import Trainer, TrainerCallback
        from transformers.trainer_callback import ExportableState
    except ImportError:  # Accelerate by itself

        class TrainerCallback:
            """Stands in for that of transformers."""

        class ExportableState:
            """Stands in for that of transformers."""

        class Trainer:
            """Stands in for that of transformers."""


__all__ = ["Accelerator", "Callback"]

FOLDER = "unisono"  # in the library's checkpoint, for the state of our methods
_IN_ONE_CALL = "in one call with the model: model, optimizer = accelerator.prepare(model, optimizer)"
_left_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models around which Accelerate puts nothing


def _unwrap(optimizer: Any) -> Any:
    """The program's own optimizer, without what Accelerate puts around it."""
    while isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _refuse_local_sgd() -> NoReturn:
    raise NotImplementedError("LocalSGD is for DDP: leave it out, with Accelerator(strategy='local_sgd(every=8)')")


class _Bound:
    """A model, or several with an optimizer in common, and their optimizers, in a loop that the library runs."""

    def __init__(
        self, models: list[nn.Module], optimizers: list[Any], spec: str | Method, settings: dict[str, Any]
    ) -> None:
        self.models = models
        self.model = model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.optimizers: list[Optimizer] = [_unwrap(optimizer) for optimizer in optimizers]
        self.replica: Replica = parallel(model, self.optimizers, spec, **settings)
        for one in models:
            one.no_sync = _refuse_local_sgd  # type: ignore[assignment]
        if (scaler := getattr(optimizers[0], "scaler", None)) is not None:
            self.replica.watch(scaler)
        self.agreed = Agreed(self.replica)


class Callback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Any of our methods under an unchanged `transformers.Trainer`.

    strategy: as for `un.parallel`: "allreduce", "powersgd(rank=4)", "local_sgd(every=8)"; `settings` override its
    fields.

    The Trainer splits the data, accumulates, clips, scales, evaluates, logs and writes its checkpoints as ever. If
    ranks have models of their own, it evaluates and saves the one that they agree on. What only this rank knows (what a
    reducer has kept back, say) lies in the folder `unisono` of a checkpoint, and is taken up again when training is
    resumed.
    """

    def __init__(self, strategy: str | Method = "allreduce", **settings: Any) -> None:
        if TrainerCallback.__module__ == __name__:
            raise ImportError("unisono.huggingface.Callback needs transformers: pip install 'unisono[huggingface]'")
        self._spec, self._settings = strategy, settings
        self._bound: _Bound | None = None
        self._elastic: _ElasticTrainer | None = None
        self.saved_to = ""

    @property
    def replica(self) -> Replica | None:
        """The replica, while the Trainer trains."""
        return None if self._bound is None else self._bound.replica

    def state(self) -> dict[str, Any]:
        """What the Trainer's checkpoint notes of this callback: the folder of ours, which is written after it."""
        built = self._spec if isinstance(self._spec, str) else describe(build(self._spec, kind="strategy"))
        return {"args": {"strategy": built, **self._settings}, "attributes": {"saved_to": self.saved_to}}

    # Before and after training ---------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the model as Accelerate would, without DistributedDataParallel around it."""
        model, world = kwargs["model"], join()
        if world.elastic is not None:
            self._elastic = _ElasticTrainer(_find_trainer(), world)
        elif args.world_size != world.size:
            raise ValueError(
                f"the Trainer knows {args.world_size} process(es), the world has {world.size}: start all of them by "
                "`unisono run -n N` or torchrun, and make TrainingArguments before anything else joins"
            )
        if args.torch_compile:
            raise ValueError("torch_compile=True makes another module: call model.compile() instead, which does not")
        if args.deepspeed is not None or args.fsdp:
            raise ValueError("unisono.huggingface.Callback takes the place of DeepSpeed and FSDP: leave them out")
        plugin = GradientAccumulationPlugin(**GradientState().plugin_kwargs)
        accelerate.Accelerator(gradient_accumulation_plugin=plugin).prepare_model(model, evaluation_mode=True)
        _left_alone.add(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bind the model, after the Trainer has loaded its own part of a checkpoint."""
        model = kwargs["model"]
        if model not in _left_alone:
            raise ValueError(
                "this model was made after the Trainer (model_init=), so that it is within DistributedDataParallel by "
                "now: give the Trainer model= instead"
            )
        if self._bound is not None:  # an error, or the user, ended the last training
            self._bound.replica.close()
        self.saved_to = str(Path(args.output_dir).absolute())
        bound = self._bound = _Bound([model], [kwargs["optimizer"]], self._spec, self._settings)
        model.no_sync = lambda: bound.replica.no_sync()  # Accelerate asks the model; a method would be copied with it
        saved = self._find_saved(args, state) if state.global_step > 0 else None
        if self._elastic is not None:
            saved = self._elastic.begin(bound.replica, saved)
        if saved is not None:
            load(saved, bound.replica)

    def _find_saved(self, args: Any, state: Any) -> Path | None:
        """Our folder in the checkpoint that training is resumed from; None if it has none."""
        if type(self).__name__ not in state.stateful_callbacks:
            return None  # it was written without us, perhaps over one of ours
        noted = state.stateful_callbacks[type(self).__name__]
        noted = noted[0] if isinstance(noted, list) else noted
        saved_to = noted.get("attributes", {}).get("saved_to", "")
        name = f"checkpoint-{state.global_step}"
        found = [p for p in (Path(saved_to) / name, Path(args.output_dir) / name) if (p / FOLDER).is_dir()]
        return found[0] / FOLDER if found else None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Unbind: the model is an ordinary one again, with the same values on every rank."""
        if self._bound is not None:
            best = args.load_best_model_at_end and state.best_model_checkpoint is not None  # has just been loaded
            self._bound.agreed.finish(keep=best)
            del self._bound.model.no_sync
            self._bound = None

    # While it trains -------------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bound is not None:
            self._bound.agreed.take_back()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Repeat the step if a worker was lost in it, before the Trainer counts it."""
        if self._bound is not None and self._elastic is not None:
            self._elastic.end_step(self._bound.replica)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the agreed model in place if the Trainer is about to evaluate or save."""
        if self._bound is None:
            return
        if self._elastic is not None:
            self._elastic.tell_epoch()
        best = args.save_strategy == "best" and control.should_evaluate
        if control.should_save or best or control.should_training_stop:
            self._bound.agreed.put()
        elif control.should_evaluate:
            self._bound.agreed.put(whole=False)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """If the evaluation ends the training, the Trainer loads the best model: into one with all its values."""
        if self._bound is not None and control.should_training_stop:
            self._bound.agreed.put()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what ranks keep for themselves into the Trainer's checkpoint."""
        if self._bound is not None and not args.save_only_model:
            self._bound.agreed.take_back()
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if self._elastic is not None:
                self._elastic.end_save(folder)
            save_own(folder / FOLDER, self._bound.replica)
            self.on_step_end(args, state, control, **kwargs)


# Workers that come and go --------------------------------------------------------------------------------------------


def _stand_alone() -> None:
    """In an elastic run Accelerate knows one process, this one: the group of torch's that it would make of all has a
    fixed number of ranks. The plug deals the data and exchanges gradients; only rank 0 writes, as ever."""
    make = PartialState.__init__

    def make_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
        try:
            make(self, *args, **kwargs)
        finally:
            os.environ.update(hidden)
        _tell_rank(join())

    PartialState.__init__ = make_alone


def _tell_rank(world: World) -> None:
    for kind in (PartialState, AcceleratorState):
        if "process_index" in kind._shared_state:
            kind._shared_state.update(process_index=world.rank, local_process_index=world.local_rank)


if membership.VARIABLE in os.environ:
    _stand_alone()

_TOO_LATE = (
    "in an elastic run (-n MIN:MAX) import unisono.huggingface before TrainingArguments or an Accelerator are made: "
    "now Accelerate has {} processes in a group of torch's, which cannot change"
)


class _Ranks:
    """Tells Accelerate this worker's rank when that has changed. The world holds it weakly, so it is kept here."""

    _kept: ClassVar[dict[int, _Ranks]] = {}

    @classmethod
    def of(cls, world: World) -> _Ranks:
        return cls._kept.setdefault(id(world), cls())

    def world_changed(self, world: World) -> None:
        _tell_rank(world)


def _find_trainer() -> Any:
    """The Trainer that calls its callbacks now: it does not tell them who it is."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
    raise ValueError("unisono.huggingface.Callback: no Trainer has called it; pass it as Trainer(callbacks=[...])")


class _ElasticTrainer:
    """What a Trainer needs in an elastic run."""

    def __init__(self, trainer: Any, world: World) -> None:
        self._trainer, self._world = trainer, world
        args = trainer.args
        if args.world_size != 1:
            raise ValueError(_TOO_LATE.format(args.world_size))
        if args.n_gpu > 1:
            raise ValueError(
                f"this worker sees {args.n_gpu} GPUs, and the Trainer would use all of them in one process: in an "
                "elastic run start each worker with one (CUDA_VISIBLE_DEVICES)"
            )
        self._batches: ElasticBatches | None = None
        self._first_step = 0  # the Trainer's, when the replica's was 0
        self._make_loader = trainer.get_train_dataloader
        trainer.get_train_dataloader = self._deal
        world.follow(_Ranks.of(world))
        world.follow(self)

    def world_changed(self, world: World) -> None:
        """Only rank 0 logs and writes, and that may be another worker now."""
        state = self._trainer.state
        state.is_world_process_zero, state.is_local_process_zero = world.rank == 0, world.local_rank == 0

    def _deal(self) -> ElasticBatches:
        """In place of `Trainer.get_train_dataloader`: batches that are dealt anew when workers come and go."""
        self._batches = ElasticBatches(
            deal_loader(self._make_loader(), self._world, name="huggingface"),
            window=self._trainer.args.gradient_accumulation_steps,
            read=self._read,
            load=self._load,
            whole_windows=True,
        )
        return self._batches

    _FIELDS = ("best_metric", "best_global_step", "best_model_checkpoint", "total_flos", "num_input_tokens_seen")

    def _list_callbacks(self) -> list[Any]:
        every = self._trainer.callback_handler.callbacks
        return [one for one in every if isinstance(one, ExportableState) and not isinstance(one, Callback)]

    def _read(self) -> dict[str, Any]:
        state = self._trainer.state
        fields = {name: getattr(state, name) for name in self._FIELDS if hasattr(state, name)}
        return {"fields": fields, "callbacks": [one.state()["attributes"] for one in self._list_callbacks()]}

    def _load(self, state: dict[str, Any]) -> None:
        for name, value in state["fields"].items():
            setattr(self._trainer.state, name, value)
        for one, attributes in zip(self._list_callbacks(), state["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(one, name, value)

    def begin(self, replica: Replica, saved: Path | None) -> Path | None:
        """Training begins: go to where a checkpoint was made. Gives the folder of ours in it that the first workers
        loaded: a worker that comes later may find a newer one."""
        trainer, state = self._trainer, self._trainer.state
        assert self._batches is not None
        trainer.accelerator.no_sync = lambda model=None: replica.no_sync()  # which asks for that in a group alone
        self._first_step = self._world.broadcast_object(state.global_step)
        found = self._world.broadcast_object(None if saved is None else str(saved))
        if self._first_step:
            trainer.args.ignore_data_skip = True  # the Trainer would read what was read
            each = len(self._batches) // trainer.args.gradient_accumulation_steps
            epoch, step = divmod(self._first_step, each)
            self._batches.move_to(epoch, step * trainer.args.gradient_accumulation_steps)
        self._first_step -= replica.step
        return None if found is None else Path(found)

    def end_step(self, replica: Replica) -> None:
        """The optimizer has stepped, or has not, as a worker was lost: then all of it once more."""
        assert self._batches is not None
        while (window := self._batches.redraw()) is not None:
            self._repeat(window)
        self._trainer.state.global_step = self._first_step + replica.step - 1  # the Trainer is about to count this one

    def tell_epoch(self) -> None:
        """Correct the Trainer's epoch: in a worker that came later it counts from its start."""
        assert self._batches is not None
        self._trainer.state.epoch = self._batches.epoch

    def _repeat(self, window: Sequence[Any]) -> None:
        trainer, args = self._trainer, self._trainer.args
        samples, items = trainer.get_batch_samples(iter(window), len(window), args.device)
        model = trainer.model_wrapped
        for number, inputs in enumerate(samples, 1):
            is_last = number == len(samples)
            around: AbstractContextManager[Any] = nullcontext() if is_last else trainer.accelerator.no_sync(model=model)
            with around:
                trainer.training_step(model, inputs, items)
        if args.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        trainer.optimizer.step()

    def end_save(self, folder: Path) -> None:
        """Every worker has written its random state to one file, as each thinks it is alone: rank 0's is to stay.
        Nobody goes on before the checkpoint is whole."""
        self._world.barrier(tag="checkpoint")
        if self._world.rank == 0:
            self._trainer._save_rng_state(str(folder))
        self._world.barrier(tag="checkpoint")


class _ElasticLoader:
    """A prepared DataLoader in an elastic run. A pass that begins while the models train is dealt among the workers, as
    `un.shard` would; any other is read whole by every worker."""

    def __init__(self, loader: Any, accelerator: Accelerator, world: World) -> None:
        self._loader, self._accelerator, self._world = loader, accelerator, world
        self._shard: Shard | None = None
        self.end_of_dataloader, self.remainder = False, -1  # asked by Accelerate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._deal()) if self._accelerator.is_training else len(self._loader)

    def _deal(self) -> Shard:
        if self._shard is None:
            self._shard = deal_loader(self._loader, self._world, name="huggingface")
        return self._shard

    def __iter__(self) -> Iterator[Any]:
        if not self._accelerator.is_training:
            yield from self._loader
            return
        shard, state = self._deal(), GradientState()
        self.end_of_dataloader = False
        state._add_dataloader(self)
        try:
            for batch in shard:
                self.end_of_dataloader = shard.batch == len(shard)
                yield batch
        finally:
            state._remove_dataloader(self)


class _Passes:
    """Accelerate's count of backward passes in a window: set back with a step that is repeated."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's own class, with one of our methods in place of DistributedDataParallel.

    strategy: as for `un.parallel`, with `strategy_settings`; all else as for `accelerate.Accelerator`. A model is bound
    when it and its optimizers have been prepared, in one call. `get_state_dict`, `save_model` and `save_state` give the
    model that the ranks agree on; every rank calls them.
    """

    def __init__(
        self,
        *args: Any,
        strategy: str | Method = "allreduce",
        strategy_settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._spec, self._settings = strategy, strategy_settings or {}
        self._bounds: list[_Bound] = []
        super().__init__(*args, **kwargs)
        self._world = join()
        if self._world.elastic is not None:
            self._world.follow(_Ranks.of(self._world))
            follow(_Passes(self), world=self._world)
            if self.num_processes != 1:
                raise ValueError(_TOO_LATE.format(self.num_processes))
        elif self.num_processes != join().size:
            raise ValueError(
                f"Accelerate knows {self.num_processes} process(es), the world has {join().size}: start all of them by "
                "`unisono run -n N`, torchrun or accelerate launch"
            )

    @property
    def replicas(self) -> list[Replica]:
        """One for each model that is trained, in the order of their optimizers."""
        return [bound.replica for bound in self._bounds]

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Mixed precision, device, torch.compile; no DistributedDataParallel."""
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's own. In an elastic run its batches are dealt anew when workers come and go."""
        prepared = super().prepare_data_loader(*args, **kwargs)
        if self._world.elastic is None or isinstance(prepared, _ElasticLoader):
            return prepared
        return _ElasticLoader(prepared, self, self._world)

    @property
    def is_training(self) -> bool:
        """Whether a model that is bound trains now; so it is before one is."""
        return all(model.training for bound in self._bounds for model in bound.models)

    def wait_for_everyone(self) -> None:
        if self._world.elastic is None:
            super().wait_for_everyone()
        else:
            self._world.barrier(tag="accelerate")

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        prepared = super().prepare(*args, device_placement=device_placement)
        self._bind()
        return prepared

    def _bind(self) -> None:
        """Bind every optimizer whose models are there, once; those that have a model in common, together."""
        known = {optimizer for bound in self._bounds for optimizer in bound.optimizers}
        params = {model: set(model.parameters()) for model in self._list_models()}
        found: list[tuple[list[nn.Module], list[Any]]] = []
        for optimizer in (one for one in self._optimizers if _unwrap(one) not in known):
            held = {p for group in optimizer.param_groups for p in group["params"]}
            whole = [model for model in params if held <= params[model]]
            mine = whole[:1] or [model for model in params if held & params[model]]
            if not held <= {p for model in mine for p in params[model]}:
                continue  # `backward` refuses it
            if any(model in bound.models for bound in self._bounds for model in mine):
                raise ValueError(
                    f"{type(_unwrap(optimizer)).__name__} is a model's second optimizer: prepare both {_IN_ONE_CALL}"
                )
            together = [one for one in found if set(one[0]) & set(mine)]
            found = [one for one in found if one not in together]
            mine = list(dict.fromkeys([model for one in [*together, (mine, [])] for model in one[0]]))
            found.append((mine, [*(other for one in together for other in one[1]), optimizer]))
        self._bounds += [_Bound(models, some, self._spec, self._settings) for models, some in found]

    def _list_models(self) -> list[nn.Module]:
        return [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]

    def _find(self, model: nn.Module) -> _Bound | None:
        inner = self.unwrap_model(model, keep_torch_compile=False)
        return next((bound for bound in self._bounds if inner in bound.models), None)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        bound = sum(len(bound.optimizers) for bound in self._bounds)
        if bound < len(self._optimizers):
            raise ValueError(
                f"{len(self._optimizers) - bound} optimizer(s) were prepared without the model whose "
                "parameters they hold: nothing would be exchanged. Give accelerator.prepare the model too"
            )
        super().backward(loss, **kwargs)
        for model in (one for one in self._list_models() if self._find(one) is None):
            trained = {p for bound in self._bounds for p in bound.model.parameters()}
            if any(p.grad is not None and p not in trained for p in model.parameters()):
                raise ValueError(
                    f"{type(model).__name__} was prepared without an optimizer, and gets gradients: nothing would be "
                    f"exchanged. Prepare its optimizer {_IN_ONE_CALL}. If it is not trained, requires_grad_(False)"
                )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None, None, None]:
        with nullcontext() if (bound := self._find(model)) is None else bound.replica.no_sync():
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Refuse: it is for DistributedDataParallel."""
        raise NotImplementedError("join_uneven_inputs is for DDP: keep even_batches=True, or use un.shard")

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        bound = self._find(model)
        if bound is None:
            return super().get_state_dict(model, unwrap)
        agreed: Any = bound.replica.consolidate()
        inner = self.unwrap_model(model, keep_torch_compile=False)
        return separate((agreed if inner is bound.model else agreed[bound.models.index(inner)]).state_dict())

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        super().save(separate(obj) if safe_serialization else obj, f, safe_serialization)

    @contextmanager
    def _whole(self) -> Generator[None, None, None]:
        """Models and optimizers have all their values inside the block, also those that are split over the ranks."""
        for bound in self._bounds:
            bound.replica.restore()
        try:
            yield
        finally:
            for bound in self._bounds:
                bound.replica.split_again()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Write Accelerate's own files, and what ranks keep for themselves."""
        with self._whole():
            where = super().save_state(output_dir, *args, **kwargs)
        self.wait_for_everyone()
        for i, bound in enumerate(self._bounds):
            save_own(Path(where) / f"{FOLDER}_{i}", bound.replica)
        return where

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load Accelerate's own files (by default the newest), and what each rank kept for itself."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            input_dir = str(max(folders, key=lambda folder: int(folder.name.rpartition("_")[2])))
        with self._whole():
            super().load_state(input_dir, *args, **kwargs)
        for i, bound in enumerate(self._bounds):
            if input_dir is not None and (folder := Path(input_dir) / f"{FOLDER}_{i}").is_dir():
                load(folder, bound.replica)

    def free_memory(self, *objects: Any) -> Any:
        """Unbind: the models are ordinary ones again. Every rank calls it."""
        for bound in self._bounds:
            bound.agreed.finish()
            for model in bound.models:
                del model.no_sync
        self._bounds = []
        return super().free_memory(*objects)
