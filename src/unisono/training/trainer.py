"""`un.Trainer`: fit and evaluate over `parallel`, `shard`, `save` and `load`, for people who want no loop."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from unisono.launchers.runtime import sigterm
from unisono.methods.strategy import Strategy, parallel
from unisono.methods.strategy import average as keep_average
from unisono.observe.runs.recording import find_recorder
from unisono.training.checkpoint import load, save, wait_saved
from unisono.training.checkpoint.behind import find_saves
from unisono.training.checkpoint.remote import find_place
from unisono.training.checkpoint.save_clock import SaveClock
from unisono.training.data import Shard, shard
from unisono.training.data.settings import ShardSettings
from unisono.units import parse_duration
from unisono.world import World, join
from unisono.world.ledger import Totals
from unisono.world.preemption import Agreement

REFRESH_STEPS = 10  # live values cost a tiny all-reduce; every rank counts the same steps, so all take part
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Score = Callable[[Any, Any], "Tensor | float"]


class Callback:
    """Called on every rank; override what you need. `trainer.stop()` on any rank stops all after the same epoch."""

    def on_step_end(self, trainer: Trainer, logs: Logs) -> None:
        """After each optimizer step; `logs` has the `step` and this rank's own last `loss`."""

    def on_epoch_end(self, trainer: Trainer, logs: Logs) -> None:
        """After each epoch and its validation; `logs` is the world-wide row that went into the history."""

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """After the last epoch."""


class Trainer:
    """Train `model` on every worker of the world, with one progress bar and world-wide metrics.

    A batch is a sequence: the last item is the target, the others are the model's inputs. Reported losses and metrics
    are means over all samples of all workers, each counted once. After SIGTERM all ranks save at the same step and end
    their program with status 143.

    Args:
        model, optimizer, strategy, skip_outliers: As for `un.parallel`. Of a list of optimizers, all step.
        loss: `loss(output, target)`, the mean over a batch.
        metrics: More such functions, by name.
        scheduler: A learning-rate scheduler, or a list of them.
        schedule: When it steps: every "epoch", or every optimizer "step" (one that fp16 skips does not count, unless
            ranks may skip alone).
        clip_norm: Clip the norm of all gradients to this value.
        accumulate: Batches per optimizer step.
        precision: "bf16" and "fp16" run forward under autocast; "fp16" also scales the loss.
        checkpoint: A folder, or an address such as s3://bucket/run, to save into after every epoch.
        keep: How many checkpoints remain.
        save_every: Save also every so many steps, or after so much time: "10min".
        background: Training waits only for a copy in host memory, or for the previous save.
        resume: `fit` resumes from the newest intact checkpoint.
        early_stopping: A patience in epochs, or an `EarlyStopping`.
        average: A decay such as 0.999, or "equal": keep an average of the weights, `trainer.average`, and evaluate with
            it (see `un.average`).
        callbacks: `Callback` objects.
        progress: Show a progress bar on rank 0.
        world: The ranks that train together; default: `un.join()`.

    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> model = nn.Linear(3, 1)
    >>> trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss(), progress=False)
    >>> history = trainer.fit((x, x.sum(1, keepdim=True)), epochs=20, batch_size=16)
    >>> history["loss"][-1] < 0.01
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        strategy: str | Strategy = "allreduce",
        *,
        loss: Score,
        metrics: Mapping[str, Score] | None = None,
        scheduler: Any = None,
        schedule: Literal["epoch", "step"] = "epoch",
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        checkpoint: str | Path | None = None,
        keep: int = 3,
        save_every: int | str | None = None,
        background: bool = True,
        resume: bool = True,
        early_stopping: int | EarlyStopping | None = None,
        average: float | Literal["equal"] | None = None,
        skip_outliers: float | None = None,
        callbacks: Iterable[Callback] = (),
        progress: bool = True,
        world: World | None = None,
    ) -> None:
        if precision not in DTYPES:
            raise ValueError(f"got precision={precision!r}, expected one of {', '.join(DTYPES)}")
        if schedule not in ("epoch", "step"):
            raise ValueError(f'got schedule={schedule!r}, expected "epoch" or "step"')
        for name, value in (("accumulate", accumulate), ("save_every", save_every)):
            if isinstance(value, str):
                parse_duration(value, name)
            elif value is not None and value < 1:
                raise ValueError(f"got {name}={value}, expected 1 or more")
        if checkpoint is not None:
            find_place(checkpoint)
        taken = set(metrics or {}) & {"samples", "loss", "samples/s", *SPLIT}
        if taken:
            raise ValueError(f"got metrics named {', '.join(sorted(taken))}: these names are taken, choose others")
        self.world = world or join()
        self.model = model.to(self.world.device)
        self.replica = parallel(self.model, optimizer, strategy, world=self.world, skip_outliers=skip_outliers)
        self.optimizer = self.replica.optimizer  # of several, all as one
        self.average = None if average is None else keep_average(self.replica, average)
        self.loss, self.metrics, self.callbacks = loss, dict(metrics or {}), tuple(callbacks)
        self.scheduler, self.schedule, self.clip_norm = scheduler, schedule, clip_norm
        self.accumulate, self.precision, self.progress = accumulate, precision, progress
        self.checkpoint, self.keep, self.save_every, self.resume = checkpoint, keep, save_every, resume
        self.background = background
        self.early_stopping = EarlyStopping(early_stopping) if isinstance(early_stopping, int) else early_stopping
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=precision == "fp16")
        if self.scaler.is_enabled():
            self.replica.watch(self.scaler)
        self.history = History()
        self._stop = False
        self._preemption: Agreement | None = None  # with a folder to save to

    @property
    def _schedulers(self) -> list[Any]:
        if self.scheduler is None:
            return []
        return list(self.scheduler) if isinstance(self.scheduler, list | tuple) else [self.scheduler]

    def stop(self) -> None:
        """Ask, on any rank, that all ranks end `fit` after this epoch."""
        self._stop = True

    def fit(self, train: Any, *, epochs: int, batch_size: int, validation: Any = None, **options: Any) -> History:
        """Train until there are `epochs` in the history (a resumed checkpoint's count) and return it.

        `train` and `validation` are what `un.shard` takes, `batch_size` is that of the whole world, and `options`
        go to `un.shard` for the training data (`seed`, `stratify`, ...).
        """
        batches = train if isinstance(train, Shard) else shard(train, batch_size, world=self.world, **options)
        steps = None if batches.samples is None else len(batches)
        if steps is None and self.accumulate > 1:
            raise ValueError("accumulate needs data with a length, got a stream: use a larger batch_size instead")
        self._check_agreement(batches, epochs, validation)
        sums = self._resume()
        self._preemption = Agreement.of(self.world) if self.checkpoint is not None else None
        with (
            sigterm.noting() if self._preemption is not None else nullcontext(),
            Display(enabled=self.progress and self.world.rank == 0, epochs=epochs, steps=steps) as display,
        ):
            display.live = self.world.broadcast_object(display.live)
            while len(self.history) < epochs and not self.history.stopped_early:
                logs = self._train_epoch(batches, sums, display, steps)
                if validation is not None:
                    scores = self.evaluate(validation, batch_size)
                    logs |= {f"val_{name}": value for name, value in scores.items()}
                display.print_line(len(self.history), logs)
                self._end_epoch(logs)
                sums = self._make_sums()
                self._save(sums)
                ended = len(self.history) == epochs or self.history.stopped_early
                if not ended and self._is_preempted(now=True):
                    self._leave()
        wait_saved(self.replica)
        for callback in self.callbacks:
            callback.on_fit_end(self, self.history)
        return self.history

    @torch.no_grad()
    def evaluate(self, data: Any, batch_size: int) -> Logs:
        """The loss and the metrics over all samples of `data`, each counted once, whatever the world's size.

        If the ranks' models differ, it is the one that they agree on (`replica.consolidate()`). If the trainer keeps an
        average of the weights, it is evaluated. If ranks come or go meanwhile, all evaluate again.
        """
        while True:
            world = self._count_world()
            if self.average is None:
                sums = self._evaluate(self.replica.consolidate(), data, batch_size)
            else:
                with self.average.applied() as model:
                    sums = self._evaluate(model, data, batch_size)
            whole = self.world.all_reduce(torch.cat([sums, world]), "sum", tag="metrics").wait()
            counted, told = whole[: len(sums)], whole[len(sums) :].tolist()
            elastic = self.world.elastic
            # In the rest of a step that was given up ranks answer for themselves alone. And iterating over a shard of
            # the program's begins another pass, which a rank that has come is not in.
            if elastic is None or elastic.is_repeating or isinstance(data, Shard) or _were_in_one_world(*told):
                return self._compute_means(counted)

    # Inside ----------------------------------------------------------------------------------------------

    def _count_world(self) -> Tensor:
        """What `_were_in_one_world` is told, summed over the ranks; nothing where no rank comes or goes."""
        numbers: list[int] = []
        if self.world.elastic is not None:
            generation = self.world.elastic.membership.generation
            numbers = [1, self.world.size, generation, generation**2]
        return torch.tensor(numbers, dtype=torch.float64, device=self.world.device)

    def _evaluate(self, model: nn.Module, data: Any, batch_size: int) -> Tensor:
        """The sums over this rank's samples."""
        sums = self._make_sums()
        training = model.training
        batches = data if isinstance(data, Shard) else self._shard_for_evaluation(data, batch_size)
        model.eval()
        try:
            for batch in batches:
                self._forward(model, batch, sums)
        finally:
            model.train(training)
        return sums

    def _shard_for_evaluation(self, data: Any, batch_size: int) -> Shard:
        """A shard that is not registered in the world: checkpoints leave it out, and it is never the one trained on."""
        from torch.utils.data import DataLoader

        asked = ShardSettings(batch_size, shuffle=None if isinstance(data, DataLoader) else False)
        return Shard(data, asked, world=self.world, name="evaluation")

    def _check_agreement(self, batches: Shard, epochs: int, validation: Any) -> None:
        """Refuse, on every rank, what would leave some ranks waiting for others that have no batch left."""
        asked = {
            "the data": repr(batches),
            "the seed": batches.seed,
            "epochs": [epochs, len(self.history)],
            "validation data": validation is not None,
            "metrics": list(self.metrics),
            "accumulate": self.accumulate,
            "the average": None if self.average is None else list(self.average.settings),
            "checkpoint, save_every and resume": [self.checkpoint is not None, self.save_every, self.resume],
        }
        every = self.world.gather_objects(asked)
        for name in asked:
            if any(other[name] != asked[name] for other in every):
                differences = "; ".join(f"rank {rank} has {other[name]}" for rank, other in enumerate(every))
                raise ValueError(
                    f"the ranks differ in {name}: {differences}. Call fit alike on all, with the whole data"
                )

    def _train_epoch(self, batches: Shard, sums: Tensor, display: Display, total: int | None) -> Logs:
        """Train on what is left of this epoch; `sums` holds what was counted before a checkpoint."""
        self.model.train()
        counted = float(self.world.all_reduce(sums[:1].clone(), "sum", tag="metrics").wait())
        began, before, steps = time.perf_counter(), self.world.ledger.totals(), 0
        for batch in batches:
            opened = (batches.batch - 1) // self.accumulate * self.accumulate
            window = self.accumulate if total is None else min(self.accumulate, total - opened)
            ends, live = batches.batch == opened + window, None
            with nullcontext() if ends else self.replica.no_sync():
                loss = self._forward(self.model, batch, sums)
                torch.autograd.backward(self.scaler.scale(loss / window))
            if ends:
                self._step_optimizer()
                steps += 1
                if self.world.weight:
                    self._record({"loss": loss})
                for callback in self.callbacks:
                    callback.on_step_end(self, {"step": self.replica.step, "loss": loss.item()})
                preempted = self._is_preempted(now=batches.batch == total)  # then comes validation, which may be long
                if preempted or self._is_save_due():
                    self._save(sums)
                if preempted:
                    self._leave()
                if display.live and steps % REFRESH_STEPS == 0:
                    live = self._summarise(sums, before, counted, began)
            display.advance(len(self.history), batches.batch, live)
        return self._summarise(sums, before, counted, began)

    def _forward(self, model: nn.Module, batch: Sequence[Tensor], sums: Tensor) -> Tensor:
        """The loss of this rank's batch; adds loss and metrics to `sums`, times the number of samples."""
        if not isinstance(batch, Sequence) or len(batch) < 2:
            raise TypeError(f"got a {type(batch).__name__} as batch, expected a tuple or list: inputs, then the target")
        *inputs, target = batch
        dtype = DTYPES[self.precision]
        with torch.autocast(self.world.device.type, dtype, enabled=dtype is not None):
            output = model(*inputs)
            loss = torch.as_tensor(self.loss(output, target))
        if self.world.weight:  # 0: this batch is a stand-in, its samples are other ranks'
            with torch.no_grad():
                row = [1.0, loss, *(metric(output, target) for metric in self.metrics.values())]
                sums += len(target) * torch.stack(
                    [torch.as_tensor(v, dtype=sums.dtype, device=sums.device) for v in row]
                )
        return loss

    def _step_optimizer(self) -> None:
        self.replica.sync()  # a strategy that accumulates may still hold gradients back: clip and unscale the means
        if self.clip_norm is not None:
            for optimizer in self.replica.members:
                self.scaler.unscale_(optimizer)
            axes = self.world.axes
            clip = nn.utils.clip_grad_norm_ if axes is None else axes.clip
            clip(self.model.parameters(), self.clip_norm)
        scale = self.scaler.get_scale()
        for optimizer in self.replica.members:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        skipped = self.scaler.get_scale() < scale  # fp16 has overflowed: the optimizer was not called
        if self.schedule == "step":
            self._step_schedule(skipped=skipped)

    def _step_schedule(self, *, skipped: bool) -> None:
        """Step the schedule on all ranks or on none, without asking them.

        Ranks that share gradients skip the same steps, which do not count. If a rank may skip alone, every step counts.
        """
        if skipped:
            if not self.replica.own_gradients or self.world.size == 1:
                return
            for optimizer in self.replica.members:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns if it was the first
        for scheduler in self._schedulers:
            scheduler.step()

    def _end_epoch(self, logs: Logs) -> None:
        """Record the epoch, step the schedule, and agree with all ranks on whether to go on."""
        self.history.rows.append(logs)
        if self.world.rank == 0:  # the values are the same on all ranks
            known = {"epoch_loss" if name == "loss" else name: logs[name] for name in logs if name not in SPLIT}
            self._record({"epoch": len(self.history), **known})
        for scheduler in self._schedulers if self.schedule == "epoch" else ():
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([logs.get("val_loss", logs["loss"])] if plateau else []))
        for callback in self.callbacks:
            callback.on_epoch_end(self, logs)
        if self.early_stopping is not None and self.early_stopping.should_stop(logs):
            self.stop()
        asked = torch.tensor([float(self._stop)], device=self.world.device)
        self.history.stopped_early = bool(self.world.all_reduce(asked, "max", tag="stop").wait())
        self._stop = False

    def _record(self, values: Mapping[str, Any]) -> None:
        """Write values into the record of the run, if there is one."""
        if (recorder := find_recorder(self.world)) is not None:
            recorder.log(values)

    def _make_sums(self) -> Tensor:
        return torch.zeros(len(self._sum_names), dtype=torch.float64, device=self.world.device)

    @property
    def _sum_names(self) -> list[str]:
        return ["samples", "loss", *self.metrics]

    def _compute_means(self, sums: Tensor) -> Logs:
        samples, *totals = sums.tolist()
        return {name: total / max(samples, 1) for name, total in zip(self._sum_names[1:], totals, strict=True)}

    def _summarise(self, sums: Tensor, before: Totals, counted: float, began: float) -> Logs:
        """World-wide means so far, samples a second, and shares of the time (one small all-reduce)."""
        spent = self.world.ledger.totals() - before
        elapsed_s = time.perf_counter() - began
        times = [spent.compute, spent.communication, spent.waiting, spent.data, elapsed_s]  # as in SPLIT
        both = self.world.all_reduce(torch.cat([sums, sums.new_tensor(times)]), "sum", tag="metrics").wait()
        logs, (*split, seconds) = self._compute_means(both[: len(sums)]), both[len(sums) :].tolist()
        logs["samples/s"] = (float(both[0]) - counted) * self.world.size / seconds
        return logs | {name: part / max(sum(split), 1e-9) for name, part in zip(SPLIT, split, strict=True)}

    def _is_preempted(self, *, now: bool) -> bool:
        return self._preemption is not None and self._preemption.ask(now=now)

    def _leave(self) -> NoReturn:
        """End the program, after the save; all ranks come here after the same step."""
        wait_saved(self.replica)
        if self.world.rank == 0:
            print(
                f"unisono: preempted at step {self.replica.step}, saved to {self.checkpoint}; "
                "run the same command to resume",
                file=sys.stderr,
            )
        raise SystemExit(sigterm.PREEMPTED)

    def _find_stateful(self) -> dict[str, Any]:
        scaler = self.scaler if self.scaler.is_enabled() else None
        names = ["scheduler", *(f"scheduler {i}" for i in range(1, len(self._schedulers)))]
        parts: dict[str, Any] = dict(zip(names, self._schedulers, strict=False))
        parts |= {"scaler": scaler, "early_stopping": self.early_stopping}
        return {name: part for name, part in parts.items() if part is not None}

    def _save(self, sums: Tensor) -> None:
        if self.checkpoint is None:
            return
        extra = {name: part.state_dict() for name, part in self._find_stateful().items()}
        whole = self.world.all_reduce(sums.clone(), "sum", tag="metrics").wait().tolist()
        named = dict(zip(self._sum_names, whole, strict=True))
        extra |= {"rows": self.history.rows, "stopped": self.history.stopped_early, "sums": named}
        save(self.checkpoint, self.replica, keep=self.keep, extra={"trainer": extra}, background=self.background)

    def _is_save_due(self) -> bool:
        if self.checkpoint is None:
            return False
        if self.background:
            find_saves(self.replica).warm(self.replica)
        if self.save_every is None:
            return False
        if isinstance(self.save_every, str):
            return SaveClock.of(self.world, find_place(self.checkpoint), self.save_every).is_due()
        return self.replica.step % self.save_every == 0

    def _resume(self) -> Tensor:
        """Load the newest checkpoint, if there is one; returns the sums of an epoch that it cut through."""
        sums = self._make_sums()
        if self.checkpoint is None or not self.resume or len(self.history):
            return sums
        try:
            loaded = load(self.checkpoint, self.replica)
        except FileNotFoundError:
            return sums
        if not isinstance(loaded.extra, dict) or "trainer" not in loaded.extra:
            raise ValueError(f"no Trainer wrote {loaded.path}: give another checkpoint folder, or resume=False")
        extra = loaded.extra["trainer"]
        for name, part in self._find_stateful().items():
            if name in extra:
                part.load_state_dict(extra[name])
            elif self.world.rank == 0:
                warnings.warn(f"{loaded.path} was saved without {name}: it starts from the beginning", stacklevel=3)
        self.history = History(extra["rows"], stopped_early=extra["stopped"])
        unknown = math.nan if extra["sums"]["samples"] else 0.0  # of a metric that is new, in an epoch cut through
        counted = [extra["sums"].get(name, unknown) for name in self._sum_names]
        return sums.new_tensor(counted) if self.world.rank == 0 else sums


def _were_in_one_world(ranks: float, sizes: float, generations: float, squares: float) -> bool:
    """Whether all ranks began in one generation of the world, and none of it is missing. By sums, which are the same on
    all ranks, also on those that come later."""
    return sizes == ranks**2 and ranks * squares == generations**2


SPLIT = ("compute", "communication", "waiting", "data")
Logs = dict[str, float]


class History:
    """One row of world-wide values an epoch: `history["val_loss"]` is a column, `history.rows[-1]` a row."""

    def __init__(self, rows: list[Logs] | None = None, *, stopped_early: bool = False) -> None:
        self.rows: list[Logs] = rows or []
        self.stopped_early = stopped_early

    def __getitem__(self, name: str) -> list[float]:
        if not any(name in row for row in self.rows):
            raise KeyError(f"no {name!r} in this history of {', '.join(self.rows[-1]) if self.rows else 'no epochs'}")
        return [row.get(name, math.nan) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)


class EarlyStopping:
    """Stop after `patience` epochs in which `monitor` did not improve by more than `min_delta`.

    `monitor` is `val_loss` (`loss` without validation) unless given. `mode` says whether "min" or "max" is better:
    unless given, "min" for names that end in "loss".
    """

    def __init__(self, patience: int, *, monitor: str = "", min_delta: float = 0.0, mode: str = "") -> None:
        if patience < 1 or mode not in ("", "min", "max"):
            raise ValueError(f'got patience={patience}, mode={mode!r}; expected 1 or more epochs, and "min" or "max"')
        self.patience, self.monitor, self.min_delta, self.mode = patience, monitor, min_delta, mode
        self.best, self.waited = math.inf, 0

    def should_stop(self, logs: Logs) -> bool:
        """Take one epoch's row; true when patience is used up. NaN is never an improvement."""
        name = self.monitor or ("val_loss" if "val_loss" in logs else "loss")
        if name not in logs:
            raise ValueError(f"early stopping watches {name!r}; this run has {', '.join(logs)}")
        rising = self.mode == "max" or not (self.mode or name.endswith("loss"))
        value = -logs[name] if rising else logs[name]
        improved = value < self.best - self.min_delta
        self.best, self.waited = (value, 0) if improved else (self.best, self.waited + 1)
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class Display:
    """One progress bar for the whole world on a terminal, and a line an epoch; silent if not `enabled`."""

    def __init__(self, *, enabled: bool, epochs: int, steps: int | None) -> None:
        self.epochs, self.steps = epochs, steps
        self._console: Any = None
        self._bar: Any = None
        if enabled:
            from rich.console import Console

            self._console = Console(soft_wrap=True, highlight=False, markup=False)
        self.live: bool = enabled and self._console.is_terminal

    def __enter__(self) -> Display:
        if self.live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.table import Column

            live = TextColumn("{task.fields[live]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            columns = ("{task.description}", BarColumn(16), MofNCompleteColumn(), live)
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.steps, live="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, epoch: int, batch: int, live: Logs | None) -> None:
        if self._bar is not None:
            words = {"description": f"epoch {epoch + 1}/{self.epochs}", **({"live": format_logs(live)} if live else {})}
            self._bar.update(self._task, completed=batch, **words)

    def print_line(self, epoch: int, logs: Logs) -> None:
        if self._console is not None:
            self._console.print(f"epoch {epoch + 1:>{len(str(self.epochs))}}/{self.epochs}   {format_logs(logs)}")


def format_logs(logs: Logs) -> str:
    """One row for people.

    >>> format_logs({"loss": 0.25, "samples/s": 12345.6, "compute": 0.9, "communication": 0.06, "waiting": 0.04})
    'loss 0.2500   12,346 samples/s   compute 90% · communication 6% · waiting 4%'
    """
    plain = {name: value for name, value in logs.items() if name not in (*SPLIT, "samples/s")}
    words = [f"{name} {value:.4f}" if abs(value) < 1e4 else f"{name} {value:.3e}" for name, value in plain.items()]
    words += [f"{logs[name]:,.0f} {name}" for name in ("samples/s",) if name in logs]
    split = [f"{name} {logs[name]:.0%}" for name in SPLIT if name in logs]
    return "   ".join([*words, " · ".join(split)] if split else words)
