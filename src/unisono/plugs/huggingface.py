"""Unisono below the Hugging Face Trainer and Accelerate.

    Trainer(..., callbacks=[unisono.huggingface.Callback("powersgd(rank=4)")])
    accelerator = unisono.huggingface.Accelerator(strategy="powersgd(rank=4)")

The workers are started by `unisono run -n 4 train.py`, torchrun, or any other engine. Needs the extra `huggingface`
(for Accelerate alone, `accelerate`).
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from unisono.methods.spec import build, describe
from unisono.methods.strategy import Replica, parallel
from unisono.methods.strategy import Strategy as Method
from unisono.methods.strategy.changing import Agreed, save_own
from unisono.training.checkpoint import load
from unisono.world import join

_NEEDED = "unisono.huggingface needs Accelerate: pip install 'unisono[huggingface]'"
try:
    import accelerate
    from accelerate.state import GradientState
    from accelerate.utils import GradientAccumulationPlugin
except ImportError as error:
    raise ImportError(_NEEDED) from error

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
else:
    try:
        from transformers import TrainerCallback
        from transformers.trainer_callback import ExportableState
    except ImportError:  # Accelerate by itself

        class TrainerCallback:
            """Stands in for that of transformers."""

        class ExportableState:
            """Stands in for that of transformers."""


__all__ = ["Accelerator", "Callback"]

FOLDER = "unisono"  # in the library's checkpoint, for the state of our methods
_left_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models around which Accelerate puts nothing


class _Bound:
    """A model and its optimizer, bound to a strategy, in a loop that the library runs."""

    def __init__(self, model: nn.Module, optimizer: Any, spec: str | Method, settings: dict[str, Any]) -> None:
        self.model, inner = model, optimizer
        while isinstance(inner, accelerate.optimizer.AcceleratedOptimizer):
            inner = inner.optimizer
        self.optimizer: Optimizer = inner
        self.replica: Replica = parallel(model, inner, spec, **settings)
        if getattr(optimizer, "scaler", None) is not None:
            self.replica.watch(optimizer.scaler)
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
        if args.world_size != world.size:
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
        bound = self._bound = _Bound(model, kwargs["optimizer"], self._spec, self._settings)
        model.no_sync = lambda: bound.replica.no_sync()  # Accelerate asks the model; a method would be copied with it
        if state.global_step > 0 and (folder := self._find_saved(args, state)) is not None:
            load(folder, bound.replica)

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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the agreed model in place if the Trainer is about to evaluate or save."""
        if self._bound is None:
            return
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
            save_own(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER, self._bound.replica)
            self.on_step_end(args, state, control, **kwargs)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's own class, with one of our methods in place of DistributedDataParallel.

    strategy: as for `un.parallel`, with `strategy_settings`; all else as for `accelerate.Accelerator`. A model is bound
    when it and its optimizer have been prepared. `get_state_dict`, `save_model` and `save_state` give the model that
    the ranks agree on; every rank calls them.
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
        if self.num_processes != join().size:
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

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        prepared = super().prepare(*args, device_placement=device_placement)
        self._bind()
        return prepared

    def _bind(self) -> None:
        """Bind every optimizer whose model is there, once."""
        known = {bound.optimizer for bound in self._bounds}
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        for optimizer in self._optimizers:
            if optimizer.optimizer not in known:
                held = {p for group in optimizer.param_groups for p in group["params"]}
                for model in models:
                    if held <= set(model.parameters()):
                        self._bounds.append(_Bound(model, optimizer, self._spec, self._settings))
                        break

    def _find(self, model: nn.Module) -> _Bound | None:
        inner = self.unwrap_model(model, keep_torch_compile=False)
        return next((bound for bound in self._bounds if bound.model is inner), None)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        if len(self._bounds) < len(self._optimizers):
            raise ValueError(
                f"{len(self._optimizers) - len(self._bounds)} optimizer(s) were prepared without the model whose "
                "parameters they hold: nothing would be exchanged. Give accelerator.prepare the model too"
            )
        super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None, None, None]:
        bound = self._find(model)
        with nullcontext() if bound is None else bound.replica.no_sync():
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Refuse: it is for DistributedDataParallel."""
        raise NotImplementedError(
            "join_uneven_inputs is for DistributedDataParallel: keep even_batches=True, or let un.shard deal the data"
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        bound = self._find(model)
        if bound is None:
            return super().get_state_dict(model, unwrap)
        return bound.replica.consolidate().state_dict()

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
        self._bounds = []
        return super().free_memory(*objects)
