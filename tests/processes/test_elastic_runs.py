"""Runs whose workers are lost and replaced: the model is that of one process that saw the same batches, each sample is
part of it once, and the program is the one that trains on one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.world import World

SAMPLES, BATCH, EPOCHS = 36, 6, 4


class Net(nn.Module):
    """`uses` counts: the gradient of an element is the share of its sample in the batch, with a minus."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        self.uses = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.uses[which].mean()


def make(world: World) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = un.sync_batch_norm(Net().double(), world=world)
    groups: list[dict[str, Any]] = [{"params": [*model.body.parameters()], "lr": 0.1}]
    optimizer = torch.optim.SGD([*groups, {"params": [model.uses], "lr": 1.0}], momentum=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (1 + n / 10), lambda n: 1.0])
    return model, optimizer, schedule


def read() -> tuple[torch.Tensor, ...]:
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES)


def train(strategy: str = "allreduce", folder: str = "", pause_s: float = 0.005) -> dict[str, Any]:
    """As it would be on one process; schedule, counters, checkpoints and sums of metrics are part of it."""
    import time

    world = un.join(device="cpu")
    torch.set_default_dtype(torch.float64)
    model, optimizer, schedule = make(world)
    replica = un.parallel(model, optimizer, strategy)
    shard = un.shard(read(), BATCH)
    counters = un.follow({"batches": 0})
    sums = []
    for _ in range(EPOCHS):
        total = torch.zeros(1)
        for x, y, which in shard:
            optimizer.zero_grad()
            out, uses = model(x, which)
            (nn.functional.mse_loss(out, y) - uses).backward()
            optimizer.step()
            if folder and replica.step % 5 == 0:  # also in a step that is given up, before what has to be set back
                un.save(folder, replica)
            schedule.step()
            counters["batches"] += 1
            total += world.weight / world.size * BATCH  # so many samples of this batch are mine
            time.sleep(pause_s)
        sums.append(float(world.all_reduce(total, "sum").wait()))
    model.eval()
    return {
        "state": {name: value.clone() for name, value in replica.consolidate().state_dict().items()},
        "step": replica.step,
        "counters": dict(counters),
        "lr": optimizer.param_groups[0]["lr"],
        "epochs": len(sums),
        "size": world.size,
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    """Plain PyTorch on the same batches, in one process."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = Net()
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(
            [{"params": [*model.body.parameters()], "lr": 0.1}, {"params": [model.uses], "lr": 1.0}]
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (1 + n / 10), lambda n: 1.0])
        shard = un.shard(read(), BATCH, world=World())
        for _ in range(EPOCHS):
            for x, y, which in shard:
                optimizer.zero_grad()
                out, uses = model(x, which)
                (nn.functional.mse_loss(out, y) - uses).backward()
                optimizer.step()
                schedule.step()
        assert torch.allclose(model.uses * BATCH, torch.full((SAMPLES,), float(EPOCHS)))
        return {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        torch.set_default_dtype(torch.float32)


STEPS = EPOCHS * SAMPLES // BATCH
MOMENTS = (
    "kill 1@3 in forward; kill 0@6 in backward; kill 2@9 in exchange; kill 0@13 in healing; kill 2@14; "
    "kill 1@17 in update; kill 0@20 in save"
)


def check(results: list[dict[str, Any]], alone: dict[str, torch.Tensor], *, atol: float = 1e-12) -> None:
    for result in results:
        assert (result["step"], result["epochs"], result["counters"]) == (STEPS, EPOCHS, {"batches": STEPS})
        assert result["lr"] == pytest.approx(0.1 / (1 + STEPS / 10))
        for name, value in alone.items():
            torch.testing.assert_close(
                result["state"][name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_the_model_is_that_of_one_process_after_kills_at_every_moment(
    tmp_path: Path, alone: dict[str, torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    results = un.launch(train, workers=3, kwargs={"folder": folder}, faults=MOMENTS, least=3, threads=1, timeout_s=120)
    check(results, alone)
    said = capfd.readouterr().err
    assert said.count("was lost: killed by SIGKILL") == 7, said


def test_the_others_go_on_meanwhile(alone: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """With fewer workers, each has more of a batch; the batches stay as they are."""
    results = un.launch(
        train,
        workers=3,
        kwargs={"folder": str(tmp_path / "run")},
        faults="kill 1@4; kill 2@6 in backward",
        least=1,
        threads=1,
        timeout_s=120,
    )
    check(results, alone)


def test_with_as_many_as_at_first_the_result_has_the_same_bits() -> None:
    """The world waits for each replacement, so that a batch is always divided in the same way."""
    undisturbed = un.launch(train, workers=2, threads=1, timeout_s=120)
    killed = un.launch(
        train, workers=2, faults="kill 1@5 in backward; kill 0@9; kill 1@15", least=2, threads=1, timeout_s=120
    )
    for name, value in undisturbed[0]["state"].items():
        assert torch.equal(killed[0]["state"][name], value), name
        assert torch.equal(killed[1]["state"][name], value), name


def test_a_worker_that_stands_still_is_replaced(
    alone: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNISONO_HEARTBEAT_S", "2")
    results = un.launch(train, workers=2, faults="stop 1@7 for 600s", least=2, threads=1, timeout_s=120)
    check(results, alone)
    assert "sent no heartbeat for 2 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    "strategy",
    ["powersgd(rank=1)", "zero(stage=2, spare=True)", "zero(stage=3, spare=True)", "zero(stage=3, within=1)"],
)
def test_other_synchronous_methods_lose_no_sample(strategy: str, alone: dict[str, torch.Tensor]) -> None:
    results = un.launch(
        train, workers=3, args=(strategy,), faults="kill 0@6 in backward; kill 2@13", least=3, threads=1, timeout_s=120
    )
    uses = results[0]["state"]["uses"]
    assert torch.allclose(uses * BATCH, torch.full_like(uses, EPOCHS))
    for result in results:
        for name, value in results[0]["state"].items():
            assert torch.equal(result["state"][name], value), name
    if strategy.startswith("zero"):
        check(results, alone)


def train_in_large_batches(strategy: str) -> dict[str, Any]:
    """So that each of four workers has samples enough for batch normalisation."""
    global BATCH
    BATCH = 12
    return train(strategy)


def test_groups_go_on_from_each_others_parts() -> None:
    """Two groups of two; what is left of them is one group, until all have come again."""
    alone = un.launch(train_in_large_batches, workers=1, args=("allreduce",), threads=1)[0]["state"]
    script, strategy = "kill 3@4 in backward; kill 0@9 in update", "zero(stage=3, within=2)"
    results = un.launch(
        train_in_large_batches, workers=4, args=(strategy,), faults=script, least=3, threads=1, timeout_s=120
    )
    for result in results:
        for name, value in alone.items():
            torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-12, msg=name)


def test_a_step_of_a_model_that_all_share_is_ended_by_those_left(alone: dict[str, torch.Tensor]) -> None:
    """Each is killed with half of a tile stepped: it is stepped anew from what was kept, and the rest of the part."""
    script = "kill 1@4 in update; kill 0@9 in update; kill 2@14 in backward; kill 0@20"
    results = un.launch(train, workers=3, args=("shared",), faults=script, least=3, threads=1, timeout_s=120)
    check(results, alone)


@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd(every=2)",
        "diloco(every=3)",
        "gossip",
        "async_average",
        "hogwild",
        "crossbow",
        "parameter_server",
        "async_diloco(every=2)",
    ],
)
def test_every_method_goes_on_and_grows_back(strategy: str) -> None:
    results = un.launch(
        train, workers=2, args=(strategy,), faults="kill 1@6; kill 0@14", least=2, threads=1, timeout_s=120
    )
    for result in results:
        assert (result["epochs"], result["step"], result["size"]) == (EPOCHS, STEPS, 2)
        assert all(torch.isfinite(value).all() for value in result["state"].values())
        for name, value in results[0]["state"].items():  # of `consolidate()`, which all ranks agree on
            if strategy != "hogwild":  # others step while one copies
                torch.testing.assert_close(result["state"][name], value, msg=lambda m, n=name: f"{n}: {m}")


# Windows of two batches, with a loss scale ----------------------------------------------------------------------


def accumulate(world: World, model: nn.Module, bind: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    shard = un.shard(read()[:2], BATCH, world=world)
    if bind:
        un.parallel(model, optimizer, "allreduce(accumulate=2)", world=world).watch(scaler)
    for _ in range(EPOCHS):
        for x, y in shard:
            scaler.scale(nn.functional.mse_loss(model(x), y) / 2).backward()
            if shard.batch % 2 == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert scaler.get_scale() == 4.0 * 2 ** (STEPS // 2 // 3)


def make_small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def train_accumulating() -> list[torch.Tensor]:
    model = make_small()
    accumulate(un.join(device="cpu"), model, bind=True)
    return [p.detach() for p in model.parameters()]


def test_a_window_of_several_batches_is_repeated_from_its_first() -> None:
    """The loss scale, which grows every third step, and the clipped norm are those of one process too."""
    alone = make_small()
    accumulate(World(), alone, bind=False)
    script = "kill 1@3 in backward; kill 0@5 in forward; kill 1@8"
    for result in un.launch(train_accumulating, workers=2, faults=script, least=2, threads=1, timeout_s=120):
        for mine, theirs in zip(result, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-12)


# A worker that cannot join --------------------------------------------------------------------------------------


def train_another(folder: str) -> int:
    """A replacement has a wider model. The others train until three have come."""
    world = un.join(device="cpu")
    if "UNISONO_JOINING" in os.environ:
        (Path(folder) / str(os.getpid())).touch()
    model = nn.Linear(4, 2 if "UNISONO_JOINING" in os.environ else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer)
    for x in un.shard(torch.randn(64, 4), 4).steps(1_000_000):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if replica.step > 8 and len(os.listdir(folder)) == 3:
            break
    return world.size


def test_a_worker_with_another_model_is_refused_and_the_others_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = un.launch(
        train_another, workers=2, args=(str(tmp_path),), faults="kill 1@8", least=1, threads=1, timeout_s=120
    )
    assert sizes == [1]
    said = capfd.readouterr().err
    assert "it has parameter weight: float32 [2, 4], the others have parameter weight: float32 [1, 4]" in said


def train_alone_only(save_to: str) -> None:
    """A replacement fails at once."""
    if "UNISONO_JOINING" in os.environ:
        raise ValueError("no room here")
    un.join(device="cpu")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer)
    for x in un.shard(torch.randn(64, 4), 4).steps(100_000):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if save_to and un.preempted():
            un.save(save_to, replica)
            raise SystemExit(143)


@pytest.mark.parametrize("saves", [True, False])
def test_fewer_than_the_least_save_and_leave(saves: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(un.WorkerError) as failed:
        un.launch(
            train_alone_only,
            workers=3,
            args=(str(folder) if saves else "",),
            faults="kill 1@8",
            least=3,
            threads=1,
            timeout_s=120,
        )
    if saves:
        assert failed.value.exit_status == 143
        assert any(folder.glob("step-*"))
    else:
        assert "only 2 of at least 3 workers remain" in str(failed.value)
        assert "un.preempted" in str(failed.value)


def fail_before_training() -> None:
    un.join(device="cpu")
    raise KeyError("wrong from the beginning")


def test_a_program_that_fails_before_its_first_step_ends_the_run() -> None:
    with pytest.raises(un.WorkerError, match="wrong from the beginning"):
        un.launch(fail_before_training, workers=2, least=1, threads=1, timeout_s=60)


# The trainer ---------------------------------------------------------------------------------------------------


def fit(folder: str, kills: str = "") -> dict[str, Any]:
    """`kills`: pairs of a rank and a step; after that step it is lost in the middle of the trainer's evaluation."""
    world = un.join(device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = un.Trainer(model, optimizer, loss=nn.MSELoss(), checkpoint=folder, resume=False, progress=False)
    batches = 0

    def lose(*_: Any) -> None:
        nonlocal batches
        batches = 0 if model.training else batches + 1
        told = f"{world.rank}@{trainer.replica.step}"
        if batches == 3 and told in kills.split() and not Path(f"{folder} {told}").exists():
            Path(f"{folder} {told}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(lose)
    x, y, _ = read()
    history = trainer.fit((x, y), epochs=EPOCHS, batch_size=BATCH, validation=(x, y))
    return {"state": model.state_dict(), "val_loss": history["val_loss"], "size": world.size}


@pytest.mark.parametrize(
    ("faults", "kills"), [("kill 1@4; kill 1@9 in forward; kill 0@10 in save", ""), (None, "0@6 1@18")]
)
def test_the_trainer_goes_on(tmp_path: Path, faults: str | None, kills: str) -> None:
    def start(name: str, *args: Any, **how: Any) -> list[Any]:
        return un.launch(fit, workers=2, args=(str(tmp_path / name), *args), threads=1, timeout_s=120, **how)

    plain, killed = start("a"), start("b", kills, faults=faults, least=2)
    assert len(list(tmp_path.glob("b *"))) == len(kills.split())
    for result in killed:
        for name, value in plain[0]["state"].items():
            torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-12)
        torch.testing.assert_close(result["val_loss"], plain[0]["val_loss"], rtol=0, atol=1e-12)


# The end of a run -----------------------------------------------------------------------------------------------


def train_and_leave_slowly() -> int:
    """At its end a library holds the interpreter for long: no thread of the process runs, nor does its heartbeat."""
    import atexit
    import ctypes

    atexit.register(ctypes.PyDLL(None).sleep, 5)
    return int(train()["step"])


def test_a_process_that_ends_slowly_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNISONO_HEARTBEAT_S", "3")
    assert un.launch(train_and_leave_slowly, workers=2, least=2, threads=1, timeout_s=120) == [STEPS, STEPS]
    assert "sent no heartbeat" not in capfd.readouterr().err


def train_with_servers(folder: str) -> int:
    """Nothing is asked of all others but the save at the end, which those that live do."""
    un.join(device="cpu")
    model = make_small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer, "parameter_server")
    for x, y in un.shard(read()[:2], BATCH).steps(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    un.save(folder, replica)
    return int(replica.step)


def test_a_run_whose_worker_is_lost_in_the_last_step_has_ended_well(tmp_path: Path) -> None:
    """Under parameter_server the others need not notice before they have saved."""
    for at in (STEPS - 1, STEPS):
        folder = tmp_path / str(at)
        results = un.launch(
            train_with_servers,
            workers=3,
            args=(str(folder),),
            faults=f"kill 2@{at}",
            least=2,
            threads=1,
            timeout_s=120,
        )
        assert set(results) == {STEPS}
        assert any(folder.glob("step-*"))


# Checkpoints ------------------------------------------------------------------------------------------------------


def train_from_checkpoint(folder: str, pause_s: float) -> dict[str, Any]:
    """The loop of docs/quickstart.md."""
    import time

    un.join(device="cpu")
    model = make_small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = un.parallel(model, optimizer)
    try:
        start = un.load(folder, replica).epoch
    except FileNotFoundError:
        start = 0
    for _ in range(start, EPOCHS):
        for x, y in un.shard(read()[:2], BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(pause_s)
        un.save(folder, replica, keep=2)
    return {"start": start, "step": replica.step, "state": [p.detach() for p in model.parameters()]}


def test_the_loop_of_the_quickstart_goes_on_after_kills(tmp_path: Path) -> None:
    """A replacement begins with the epoch that the first workers began with, not with that of the newest checkpoint."""
    script = "kill 1@9; kill 0@14 in save; kill 2@20 in exchange"
    results = un.launch(
        train_from_checkpoint,
        workers=3,
        args=(str(tmp_path / "run"), 0.01),
        faults=script,
        least=2,
        threads=1,
        timeout_s=120,
    )
    alone = train_from_checkpoint(str(tmp_path / "alone"), 0.0)
    for result in results:
        assert (result["start"], result["step"]) == (0, STEPS)
        for mine, theirs in zip(result["state"], alone["state"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
