"""`un.Trainer` against plain one-process PyTorch loops, in worlds of threads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.observe.runs.reading import RunReader
from unisono.observe.runs.recorder import Recorder as RunRecorder
from unisono.observe.runs.recording import FileWriter
from unisono.training.checkpoint import save
from unisono.training.trainer import Callback, EarlyStopping, History, Trainer, format_logs
from unisono.world import World
from unisono.world.virtual import run_threads

X = torch.randn(53, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.arange(6.0, dtype=torch.float64) > 0).long()
LOSS = nn.CrossEntropyLoss()
BATCH = 10  # 53 samples: the last batch has 3, so in a world of 4 one rank has none


def accuracy(scores: Tensor, target: Tensor) -> Tensor:
    return (scores.argmax(1) == target).double().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


MODEL = model()  # copied by each rank: the global generator is not for threads


def trainer(world: World, *, lr: float = 0.1, schedulers: Callable[..., Any] | None = None, **options: Any) -> Trainer:
    net = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    options.setdefault("loss", LOSS)
    scheduler = schedulers(optimizer) if schedulers else None
    return Trainer(net, optimizer, scheduler=scheduler, progress=False, world=world, **options)


def in_world(size: int, fn: Callable[[World], Any]) -> list[Any]:
    return run_threads(fn, size)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def plain_loop(epochs: int, *, accumulate: int = 1, clip_norm: float | None = None, lr: float = 0.1) -> nn.Module:
    """The reference: one process, no shuffling, the mean over each window of batches."""
    net = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    batches = list(zip(X.split(BATCH), Y.split(BATCH), strict=True))
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            optimizer.zero_grad()
            sum(LOSS(net(x), y) for x, y in window).div(len(window)).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            optimizer.step()
    return net


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"accumulate": 4}, {"clip_norm": 0.05}, {"accumulate": 3, "clip_norm": 0.05}])
def test_fit_equals_the_plain_loop_at_any_world_size(size: int, options: dict[str, Any]) -> None:
    def fit(world: World) -> Tensor:
        work = trainer(world, **options)
        work.fit((X, Y), epochs=3, batch_size=BATCH, shuffle=False)
        return flat(work.model)

    expected = flat(plain_loop(3, **options))
    for got in in_world(size, fit):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_evaluate_is_the_mean_over_all_samples_each_counted_once(size: int) -> None:
    def score(world: World) -> dict[str, float]:
        work = trainer(world, metrics={"accuracy": accuracy})
        work.model.train()
        got = work.evaluate((X, Y), BATCH)
        assert work.model.training
        assert not world.shards, "a validation shard is not part of the run's state"
        return got

    with torch.no_grad():
        scores = MODEL(X)
    for got in in_world(size, score):
        assert got["loss"] == pytest.approx(LOSS(scores, Y).item(), rel=1e-12)
        assert got["accuracy"] == pytest.approx(accuracy(scores, Y).item(), rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_history_holds_world_wide_means(size: int) -> None:
    """With a learning rate of zero the training loss of an epoch is the loss over all samples."""

    def fit(world: World) -> History:
        work = trainer(world, lr=0.0, metrics={"accuracy": accuracy})
        return work.fit((X, Y), epochs=2, batch_size=BATCH, validation=(X[:7], Y[:7]))

    with torch.no_grad():
        scores = MODEL(X)
    for history in in_world(size, fit):
        assert history["loss"] == pytest.approx([LOSS(scores, Y).item()] * 2, rel=1e-12)
        assert history["accuracy"] == pytest.approx([accuracy(scores, Y).item()] * 2, rel=1e-12)
        assert history["val_loss"] == pytest.approx([LOSS(scores[:7], Y[:7]).item()] * 2, rel=1e-12)
        assert history["samples/s"][0] > 0
        shares = [history[name][0] for name in ("compute", "communication", "waiting", "data")]
        assert sum(shares) == pytest.approx(1)


def test_schedulers_step_per_epoch_or_per_optimizer_step() -> None:
    def rates(world: World) -> tuple[float, float, float]:
        def halve(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

        def plateau(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.1, patience=0, threshold=1e9, threshold_mode="abs"
            )

        results = []
        for schedulers, schedule in ((halve, "epoch"), (halve, "step"), (plateau, "epoch")):
            work = trainer(world, schedulers=schedulers, schedule=schedule, accumulate=2)
            work.fit((X, Y), epochs=2, batch_size=BATCH)
            results.append(work.optimizer.param_groups[0]["lr"])
        return tuple(results)

    for per_epoch, per_step, on_plateau in in_world(2, rates):
        assert per_epoch == pytest.approx(0.1 / 2**2)
        assert per_step == pytest.approx(0.1 / 2**6)  # 6 batches are 3 windows an epoch
        assert on_plateau == pytest.approx(0.01)


class Recorder(Callback):
    def __init__(self, stop_on: int | None = None) -> None:
        self.calls: list[str] = []
        self.stop_on = stop_on

    def on_step_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        assert math.isfinite(logs["loss"])
        self.calls.append("step")

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        self.calls.append("epoch")
        if self.stop_on == trainer.world.rank:
            trainer.stop()

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        self.calls.append(f"fit {len(history)}")


def test_callbacks_are_called_in_order() -> None:
    def fit(world: World) -> list[str]:
        recorder = Recorder()
        trainer(world, callbacks=[recorder], accumulate=3).fit((X, Y), epochs=2, batch_size=BATCH)
        return recorder.calls

    for calls in in_world(2, fit):
        assert calls == ["step", "step", "epoch"] * 2 + ["fit 2"]


def test_one_rank_that_asks_to_stop_stops_all_after_the_same_epoch() -> None:
    def fit(world: World) -> History:
        return trainer(world, callbacks=[Recorder(stop_on=1)]).fit((X, Y), epochs=9, batch_size=BATCH)

    for history in in_world(3, fit):
        assert len(history) == 1
        assert history.stopped_early


def test_early_stopping_ends_a_run_that_does_not_improve() -> None:
    def fit(world: World) -> int:
        work = trainer(world, lr=0.0, early_stopping=2)
        return len(work.fit((X, Y), epochs=50, batch_size=BATCH, validation=(X, Y)))

    assert in_world(2, fit) == [3, 3]


@pytest.mark.parametrize(
    ("options", "values", "stops_after"),
    [
        ({"patience": 2}, [3, 2, 2.5, 2.4, 1], 4),
        ({"patience": 1, "monitor": "accuracy"}, [0.1, 0.2, 0.15], 3),
        ({"patience": 1, "monitor": "accuracy", "mode": "min"}, [0.1, 0.2], 2),
        ({"patience": 1, "min_delta": 0.5}, [3, 2, 1.8], 3),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2}, [3, 2, 1, 0], None),
    ],
)
def test_early_stopping_counts_epochs_without_improvement(
    options: dict[str, Any], values: list[float], stops_after: int | None
) -> None:
    rule = EarlyStopping(**options)
    name = options.get("monitor", "loss")
    stopped = [i for i, value in enumerate(values, 1) if rule.should_stop({name: value})]
    assert stopped[:1] == ([stops_after] if stops_after else [])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_close_to_full_precision(precision: str) -> None:
    def fit(world: World, precision: str) -> float:
        net = copy.deepcopy(MODEL).float()
        work = Trainer(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            loss=LOSS,
            precision=precision,  # type: ignore[arg-type]
            clip_norm=1.0,
            progress=False,
            world=world,
        )
        return work.fit((X.float(), Y), epochs=4, batch_size=BATCH, shuffle=False)["loss"][-1]

    full = in_world(2, lambda world: fit(world, "fp32"))
    low = in_world(2, lambda world: fit(world, precision))
    assert low == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize("size", [1, 3])
def test_clipping_takes_the_mean_gradient_where_the_strategy_accumulates_too(size: int) -> None:
    def fit(world: World) -> Tensor:
        net = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        work = Trainer(
            net, optimizer, "allreduce(accumulate=4)", loss=LOSS, clip_norm=0.05, progress=False, world=world
        )
        work.fit((X, Y), epochs=3, batch_size=BATCH, shuffle=False)
        return flat(net)

    expected = flat(plain_loop(3, clip_norm=0.05))
    for got in in_world(size, fit):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("spec", ["local_sgd(every=2, start=0)", "hogwild", "allreduce"])
def test_an_overflow_on_one_rank_leaves_all_ranks_with_the_same_schedule(spec: str) -> None:
    def fit(world: World) -> tuple[float, float]:
        net = copy.deepcopy(MODEL).float()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        calls: list[int] = []

        def loss(scores: Tensor, target: Tensor) -> Tensor:
            calls.append(1)
            overflows = world.rank == 1 and len(calls) in (1, 4)
            return LOSS(scores, target) * (float("inf") if overflows else 1e-3)

        work = Trainer(
            net,
            optimizer,
            spec,
            loss=loss,
            scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
            schedule="step",
            precision="fp16",
            progress=False,
            world=world,
        )
        work.fit((X.float(), Y), epochs=2, batch_size=BATCH, shuffle=False)
        return optimizer.param_groups[0]["lr"], work.scaler.get_scale()

    (first, scale), (second, other) = in_world(2, fit)
    assert other == 2.0**14, "two steps of rank 1 were skipped"
    assert scale == (2.0**14 if spec == "allreduce" else 2.0**16)
    assert first == second == 0.5 ** (10 if spec == "allreduce" else 12)


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_fp16_overflow_skipped_does_not_move_the_schedule(size: int) -> None:
    def fit(world: World) -> tuple[int, float]:
        net = copy.deepcopy(MODEL).float()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        work = Trainer(
            net,
            optimizer,
            loss=lambda scores, target: 100 * LOSS(scores, target),  # the first scale of 65536 is too large for it
            scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
            schedule="step",
            precision="fp16",
            progress=False,
            world=world,
        )
        work.fit((X.float(), Y), epochs=3, batch_size=BATCH, shuffle=False)
        return len(steps), optimizer.param_groups[0]["lr"]

    for steps, rate in in_world(size, fit):
        assert 0 < steps < 18, "some of the 3 * 6 steps were skipped, not all"
        assert rate == 0.5**steps


@pytest.mark.parametrize("size", [1, 2])
def test_evaluating_on_the_training_data_in_mid_epoch_leaves_training_as_it_is(size: int) -> None:
    class Evaluate(Callback):
        def on_step_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
            trainer.evaluate((X, Y), BATCH)

    def fit(world: World) -> Tensor:
        work = trainer(world, callbacks=[Evaluate()])
        work.fit((X, Y), epochs=2, batch_size=BATCH, shuffle=False, validation=(X, Y))
        assert world.shards["shard0"].epoch == 2
        return flat(work.model)

    expected = flat(plain_loop(2))
    for got in in_world(size, fit):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_a_loader_with_its_own_sampler_can_be_evaluated() -> None:
    data = torch.utils.data.TensorDataset(X, Y)
    chosen = torch.utils.data.SubsetRandomSampler(range(0, 53, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=chosen)
    with torch.no_grad():
        expected = LOSS(MODEL(X[::2]), Y[::2]).item()
    for got in in_world(2, lambda world: trainer(world).evaluate(loader, BATCH)):
        assert got["loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mine", "named"), [({"samples": 40}, "the data"), ({"seed": 1}, "the seed"), ({"epochs": 2}, "epochs")]
)
def test_ranks_that_were_given_different_things_all_say_so(mine: dict[str, int], named: str) -> None:
    def fit(world: World) -> str:
        own = {"samples": 53, "seed": 0, "epochs": 1, **(mine if world.rank == 1 else {})}
        n = own.pop("samples")
        with pytest.raises(ValueError, match=f"the ranks differ in {named}: rank 0 has .*; rank 1 has ") as caught:
            trainer(world).fit((X[:n], Y[:n]), batch_size=BATCH, **own)
        return str(caught.value)

    assert len(set(in_world(2, fit))) == 1


@pytest.mark.parametrize("data", [X, {"x": X, "y": Y}])
def test_batches_without_a_target_are_refused(data: Any) -> None:
    with pytest.raises(TypeError, match="as batch, expected a tuple or list: inputs, then the target"):
        trainer(World()).fit(data, epochs=1, batch_size=BATCH)


@pytest.mark.parametrize("save_every", [None, 2])
def test_a_resumed_run_equals_one_that_did_not_stop(tmp_path: Path, save_every: int | None) -> None:
    class Crash(Callback):
        def on_step_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
            if logs["step"] == 9:  # in the middle of the second epoch of six steps
                raise InterruptedError

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def fit(world: World, folder: Path | None, *callbacks: Callback) -> tuple[Tensor, list[float], float]:
        options = {"checkpoint": folder, "save_every": save_every, "callbacks": callbacks, "early_stopping": 50}
        work = trainer(world, schedulers=halve, schedule="step", metrics={"accuracy": accuracy}, **options)
        history = work.fit((X, Y), epochs=4, batch_size=BATCH)
        return flat(work.model), history["accuracy"], work.optimizer.param_groups[0]["lr"]

    straight = in_world(2, lambda world: fit(world, None))
    with pytest.raises(InterruptedError):
        in_world(2, lambda world: fit(world, tmp_path, Crash()))
    resumed = in_world(2, lambda world: fit(world, tmp_path))
    for (weights, scores, rate), (expected, expected_scores, expected_rate) in zip(resumed, straight, strict=True):
        assert torch.equal(weights, expected)
        assert scores == pytest.approx(expected_scores, rel=1e-12)
        assert rate == expected_rate


def test_resume_can_be_turned_off(tmp_path: Path) -> None:
    def fit(world: World, resume: bool) -> int:
        steps = Recorder()
        work = trainer(world, checkpoint=tmp_path, resume=resume, callbacks=[steps])
        work.fit((X, Y), epochs=1, batch_size=BATCH)
        return steps.calls.count("step")

    assert in_world(1, lambda world: fit(world, True)) == [6]
    assert in_world(1, lambda world: fit(world, True)) == [0]
    assert in_world(1, lambda world: fit(world, False)) == [6]


def test_a_run_resumes_with_a_metric_and_early_stopping_that_are_new(tmp_path: Path) -> None:
    trainer(World(), checkpoint=tmp_path).fit((X, Y), epochs=1, batch_size=BATCH)
    work = trainer(World(), checkpoint=tmp_path, metrics={"accuracy": accuracy}, early_stopping=5)
    with pytest.warns(UserWarning, match="saved without early_stopping: it starts from the beginning"):
        history = work.fit((X, Y), epochs=2, batch_size=BATCH)
    assert math.isnan(history["accuracy"][0])
    assert 0 <= history["accuracy"][1] <= 1


def test_a_metric_that_is_new_in_mid_epoch_is_unknown_for_that_epoch(tmp_path: Path) -> None:
    class Crash(Callback):
        def on_step_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
            if logs["step"] == 4:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        trainer(World(), checkpoint=tmp_path, save_every=3, callbacks=[Crash()]).fit((X, Y), epochs=1, batch_size=BATCH)
    work = trainer(World(), checkpoint=tmp_path, metrics={"accuracy": accuracy})
    history = work.fit((X, Y), epochs=2, batch_size=BATCH)
    assert math.isfinite(history["loss"][0])
    assert math.isnan(history["accuracy"][0])
    assert 0 <= history["accuracy"][1] <= 1


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    save(tmp_path, trainer(World()).replica)
    with pytest.raises(ValueError, match="no Trainer wrote"):
        trainer(World(), checkpoint=tmp_path).fit((X, Y), epochs=1, batch_size=BATCH)


def test_rank_zero_alone_prints_one_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    def fit(world: World) -> None:
        net = copy.deepcopy(MODEL)
        work = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=LOSS, world=world)
        work.fit((X, Y), epochs=2, batch_size=BATCH)

    in_world(2, fit)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line[:9] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert "samples/s" in lines[0]
    assert "compute" in lines[0]


def test_an_interrupted_bar_is_closed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupt(Callback):
        def on_step_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
            if logs["step"] == 3:
                raise KeyboardInterrupt

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then behaves as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    work = trainer(World(), callbacks=[Interrupt()])
    work.progress = True
    with pytest.raises(KeyboardInterrupt):
        work.fit((X, Y), epochs=1, batch_size=BATCH)
    printed = capsys.readouterr().out
    assert "epoch 1/1" in printed
    assert printed.rfind("\x1b[?25h") > printed.rfind("\x1b[?25l"), "the cursor is shown again"


def test_bad_settings_say_what_was_expected() -> None:
    for options, words in (
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
        ({"accumulate": 0}, "accumulate=0, expected 1 or more"),
        ({"schedule": "day"}, 'expected "epoch" or "step"'),
        ({"early_stopping": 0}, "patience=0"),
        ({"metrics": {"loss": accuracy}}, "metrics named loss"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer(World(), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="watches 'bleu'; this run has loss"):
        EarlyStopping(1, monitor="bleu").should_stop({"loss": 1.0})
    with pytest.raises(KeyError, match="no 'bleu' in this history"):
        History([{"loss": 1.0}])["bleu"]


def test_accumulation_over_a_stream_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    with pytest.raises(ValueError, match="accumulate needs data with a length"):
        trainer(World(), accumulate=2).fit(Stream(), epochs=1, batch_size=BATCH)
    assert len(trainer(World()).fit(Stream(), epochs=2, batch_size=BATCH)) == 2


def test_rows_are_shown_for_people() -> None:
    assert format_logs({"loss": 0.25, "samples/s": 1234.5, "compute": 0.9, "waiting": 0.1}).split("   ") == [
        "loss 0.2500",
        "1,234 samples/s",
        "compute 90% · waiting 10%",
    ]


def test_where_ranks_differ_the_model_they_agree_on_is_evaluated() -> None:
    def work(world: World) -> tuple[list[Tensor], float, float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = "local_sgd(every=100, start=0)"
        trainer = Trainer(model, optimizer, strategy, loss=nn.functional.mse_loss, progress=False, world=world)
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        trainer.fit(data, epochs=1, batch_size=4)
        parameters = [p.detach().clone() for p in model.parameters()]
        logs = trainer.evaluate(data, batch_size=4)
        agreed = trainer.replica.consolidate()
        with torch.no_grad():
            expected = torch.nn.functional.mse_loss(agreed(x), x.sum(1, keepdim=True))
        assert all(map(torch.equal, parameters, model.parameters())), "evaluation leaves each rank's own as it is"
        return parameters, logs["loss"], float(expected)

    (first, loss, expected), (second, other, _) = run_threads(work, 2)
    assert not torch.equal(first[0], second[0])
    assert loss == pytest.approx(expected)
    assert loss == other


def test_what_a_trainer_computes_is_recorded(tmp_path: Path) -> None:
    """Its losses by step, as a plain loop has them, and each epoch's numbers."""

    def work(world: World) -> History:
        recorder = RunRecorder(world, FileWriter(tmp_path, world.rank))
        found = trainer(world, metrics={"accuracy": accuracy}).fit(
            (X[:40], Y[:40]), epochs=2, batch_size=BATCH, shuffle=False, validation=(X[40:], Y[40:])
        )
        recorder.close("ok")
        return found

    (tmp_path / "ranks").mkdir()
    history = run_threads(work, 2)[0]
    reader = RunReader(tmp_path)
    reader.poll()
    losses = reader.join_metric("loss")
    net = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for x, y in list(zip(X[:40].split(BATCH), Y[:40].split(BATCH), strict=True)) * 2:
        optimizer.zero_grad()
        loss = LOSS(net(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses is not None
    assert losses.values.tolist() == pytest.approx(expected)
    for name in ("epoch_loss", "accuracy", "val_loss", "val_accuracy"):
        joined = reader.join_metric(name)
        assert joined is not None
        assert joined.values.tolist() == pytest.approx(history[name.removeprefix("epoch_")])
