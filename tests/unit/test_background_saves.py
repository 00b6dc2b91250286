"""Background saves: what is written is the state at the call, whatever follows; errors and losses are heard of."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from test_checkpoint import batches, bits, interrupt, make, steps, train

import unisono as un
from preloaded import Program
from unisono.methods.offload import chunks
from unisono.methods.offload.disk import DiskError
from unisono.training.checkpoint import CheckpointError, behind, checkpoint, folder, safetensors
from unisono.training.checkpoint.remote import find_place
from unisono.training.checkpoint.save_clock import SaveClock
from unisono.training.checkpoint.slices import Piece, Span
from unisono.training.checkpoint.snapshot import Snapshot
from unisono.world import World
from unisono.world.virtual import run_threads

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until the gate is set."""
    opened, write = threading.Event(), checkpoint._Saving.write_behind

    def wait_first(self, reports):
        assert opened.wait(60)
        return write(self, reports)

    monkeypatch.setattr(checkpoint._Saving, "write_behind", wait_first)
    yield opened
    opened.set()


@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd(every=2)", "topk(k=0.5)", "zero(stage=3)", "shared"])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_written_is_the_state_at_the_call_whatever_follows(tmp_path, gate, strategy, size):
    """A blocking save is the reference, and what plain PyTorch reads is compared too."""

    def work(world: World) -> None:
        replica = make(world, strategy, norm=True)
        train(replica, batches(3, seed=world.rank))
        un.save(tmp_path / "now", replica, extra={"mine": world.rank})
        un.save(tmp_path / "behind", replica, extra={"mine": world.rank}, background=True)
        train(replica, batches(2, seed=9))  # while nothing has been written yet
        world.gather_objects(None)
        gate.set()
        un.wait_saved(replica)
        replica.close()

    def load(world: World, path: Path) -> tuple[dict[str, bytes], object]:
        replica = make(world, strategy, norm=True)
        loaded = un.load(path, replica)
        train(replica, batches(1, seed=4))  # residuals and moments count, too
        state = {name: x.numpy().tobytes() for name, x in replica.consolidate().state_dict().items()}
        replica.close()
        return state, loaded.extra

    run_threads(work, size)
    assert steps(tmp_path / "behind") == ["step-0000000003"]
    assert steps(tmp_path / "behind" / "step-0000000003") == steps(tmp_path / "now" / "step-0000000003")
    there, here = (run_threads(lambda world, path=tmp_path / p: load(world, path), size) for p in ("now", "behind"))
    assert there == here
    assert [extra["mine"] for _, extra in here] == list(range(size))


@pytest.mark.parametrize("size", [1, 3])
def test_one_is_in_flight_and_the_next_is_skipped_or_waits(tmp_path, gate, size):
    def work(world: World) -> list[str]:
        replica = make(world)
        train(replica, batches(1))
        first = un.save(tmp_path, replica, background=True)
        train(replica, batches(1))
        skipped = un.save(tmp_path, replica, background=True, if_busy="skip")
        world.gather_objects(None)
        gate.set()
        last = un.save(tmp_path, replica, background=True)
        un.wait_saved(replica)
        return [first, skipped, last]

    expected = [str(tmp_path / "step-0000000001"), "", str(tmp_path / "step-0000000002")]
    assert run_threads(work, size) == [expected] * size
    assert steps(tmp_path) == ["step-0000000001", "step-0000000002"]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("then", ["save", "wait_saved", "load", "close", "blocking save"])
def test_a_failure_in_the_background_is_raised_on_every_rank_by_what_comes_next(tmp_path, monkeypatch, size, then):
    def fails(path, _):
        return path.name.startswith(f"rank-{size - 1:05d}")

    def work(world: World) -> None:
        replica = make(world)
        un.save(tmp_path, replica)
        train(replica, batches(1))
        if world.rank == 0:
            fired.extend(interrupt(patch, safetensors, "write", FULL, when=fails) or [1])
        world.gather_objects(None)
        un.save(tmp_path, replica, background=True)
        calls = {
            "save": lambda: un.save(tmp_path, replica, background=True),
            "blocking save": lambda: un.save(tmp_path, replica),
            "wait_saved": lambda: un.wait_saved(replica),
            "load": lambda: un.load(tmp_path, replica),
            "close": replica.close,
        }
        with pytest.raises(
            CheckpointError, match=rf"step 1 in {tmp_path} could not be written in the background.*No sp"
        ):
            calls[then]()
        world.gather_objects(None)
        if world.rank == 0:
            patch.undo()
        world.gather_objects(None)
        un.wait_saved(replica)  # it was raised, and is over
        if then != "close":
            un.save(tmp_path, replica, background=True)
            un.wait_saved(replica)

    fired: list[int] = []
    with monkeypatch.context() as patch:
        run_threads(work, size)
    assert fired
    whole = [name for name in steps(tmp_path) if not name.startswith(".")]
    assert whole == (["step-0000000000"] if then == "close" else ["step-0000000000", "step-0000000001"])


def test_a_failed_save_gives_its_space_back_and_the_next_removes_its_folder(tmp_path, monkeypatch):
    replica = make()
    with monkeypatch.context() as patch:
        interrupt(patch, safetensors, "write", FULL, when=lambda path, _: path.name.startswith("rank"))
        un.save(tmp_path, replica, background=True)
        with pytest.raises(CheckpointError, match="No space left"):
            un.wait_saved()
    [left] = steps(tmp_path)
    assert left.startswith(".writing-")
    assert all(name.startswith(".") for name in steps(tmp_path / left))
    un.save(tmp_path, replica, background=True)
    un.wait_saved()
    assert steps(tmp_path) == ["step-0000000000"]


def test_a_rank_that_is_lost_meanwhile_costs_this_checkpoint_alone(tmp_path, monkeypatch):
    """As where ranks come and go: the others are told by their world, the save is given up with a warning."""
    monkeypatch.setattr(behind, "_POLL_S", 0.01)

    def work(world: World) -> None:
        replica = make(world)
        if world.rank == 1:
            monkeypatch.setattr(behind.Parts, "give", lambda *_: time.sleep(0.3))  # a part that never comes
        world.gather_objects(None)
        un.save(tmp_path, replica, background=True)
        time.sleep(0.05)
        world.tell_followers()
        un.wait_saved(replica)

    with pytest.warns(UserWarning, match="was given up, earlier checkpoints are intact: ranks have joined or left"):
        run_threads(work, 2)
    assert not [name for name in steps(tmp_path) if not name.startswith(".")]


def test_a_rank_that_ended_is_known_by_its_lock(tmp_path, monkeypatch):
    """And one that lives is waited for, also at the end of the program; without locks for some minutes."""
    lock = folder.begin_folder(tmp_path, 1)[1]
    [writing] = tmp_path.iterdir()
    zero, one = (behind.Parts(writing, rank, 2) for rank in (0, 1))
    one.enter()
    monkeypatch.setattr(behind, "_EXIT_S", -1e9)
    monkeypatch.setattr(behind, "_ending", ended := threading.Event())
    for _ in range(2):
        assert zero._find_loss(1) == one._find_loss(0) == ""
        ended.set()
    assert "end of the program" in behind.Parts(find_place("memory://ending"), 0, 2)._find_loss(1)
    one.leave()
    with pytest.raises(behind.Lost, match="rank 1 ended before it had written its part"):
        zero.take(".part-00001", 1)
    lock.close()
    with pytest.raises(behind.Lost, match="rank 0 ended"):
        one.take_outcome()


def test_ranks_that_wait_for_rank_0_hear_why_it_failed(tmp_path, monkeypatch):
    """Also at an address, where there are no locks."""
    monkeypatch.setattr(behind, "_POLL_REMOTE_S", 0.01)
    give = behind.Parts.give

    def fail_first(self, name, value):
        if name == ".digests":
            raise FULL
        give(self, name, value)

    monkeypatch.setattr(behind.Parts, "give", fail_first)

    def work(world: World, path: object) -> None:
        replica = make(world)
        un.save(path, replica, background=True)
        with pytest.raises(CheckpointError, match="No space left"):
            un.wait_saved(replica)

    for path in (tmp_path, "memory://waiting"):
        run_threads(lambda world, path=path: work(world, path), 2)


@pytest.mark.parametrize("strategy", ["allreduce", "zero(stage=2)"])
def test_the_copy_keeps_its_memory_and_training_afterwards_is_the_same(tmp_path, strategy):
    def work(world: World) -> None:
        plain, saved = make(world, strategy), make(world, strategy)
        for i, batch in enumerate(batches(4)):
            train(plain, [batch])
            train(saved, [batch])
            un.save(tmp_path, saved, background=True, keep=2)
            places.append(behind.find_saves(saved).snapshot._line.data_ptr()) if i else None
        un.wait_saved(saved)
        assert bits(saved) == bits(plain)

    places: list[int] = []
    run_threads(work, 1)
    assert len(set(places)) == 1
    assert steps(tmp_path) == ["step-0000000003", "step-0000000004"]


def test_a_snapshot_copies_tensors_of_every_kind_and_pieces():
    line = torch.arange(10.0)
    piece = Piece(
        (4, 5), torch.float32, [Span(0, 5, lambda a, b: line[a:b]), Span(15, 20, lambda a, b: line[a - 10 : b - 10])]
    )
    held = Piece.of(line[2:6], 4, shape=(2, 5))
    tensors = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "half": torch.arange(5).half(),
        "p": piece,
        "h": held,
    }
    found, other = (snapshot := Snapshot()).take([tensors, {"b": torch.tensor([True, False])}])
    line.zero_()
    snapshot.wait()
    assert found["empty"].shape == (0, 3)
    assert found["scalar"].item() == 3
    assert found["half"].tolist() == [0, 1, 2, 3, 4]
    assert other["b"].tolist() == [True, False]
    assert [read(a, b).tolist() for a, b, read in found["p"].spans] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [read(a, b).tolist() for a, b, read in found["h"].spans] == [[2, 3, 4, 5]]
    assert found["p"].describe() == piece.describe()


# When -----------------------------------------------------------------------------------------------------


def test_every_is_judged_by_rank_0s_clock_on_all_ranks_alike(tmp_path, monkeypatch):
    clock = threading.local()
    monkeypatch.setattr("unisono.training.checkpoint.save_clock.time", type("T", (), {"monotonic": lambda: clock.now}))

    def work(world: World) -> list[bool]:
        clock.now = 0.0
        replica, saved = make(world), []
        for _ in range(400):  # ranks ask each other at least every 64 calls
            clock.now += 1.0 if world.rank == 0 else 100.0  # the other clocks run fast
            replica.step += 1
            saved.append(bool(un.save(tmp_path / str(world.size), replica, every="80s", keep=None)))
        return saved

    for size in (1, 3):
        first, *others = run_threads(work, size)
        assert all(other == first for other in others)
        assert 1 <= sum(first) <= 5
        assert not any(first[:79])


def test_the_memory_of_the_copy_is_got_ready_before_the_first_save_is_due(tmp_path):
    replica = make()
    train(replica, batches(1))
    assert un.save(tmp_path, replica, background=True, every="1h") == ""
    saves = behind.find_saves(replica)
    saves.finish()
    place, nbytes = saves.snapshot._line.data_ptr(), saves.snapshot.nbytes
    assert nbytes > sum(p.nbytes for p in replica.model.parameters()) * 3
    un.save(tmp_path, replica, background=True)
    un.wait_saved(replica)
    assert (saves.snapshot._line.data_ptr(), saves.snapshot.nbytes) == (place, nbytes)


@pytest.mark.parametrize("every", ["soon", "0s", 0, -1.0, "10"])
def test_a_time_that_is_none_is_refused(tmp_path, every):
    with pytest.raises(ValueError, match="every"):
        un.save(tmp_path, make(), every=every)
    with pytest.raises(ValueError, match="if_busy is 'later'"):
        un.save(tmp_path, make(), if_busy="later")


# The end of a program, and kills ----------------------------------------------------------------------------

SCRIPT = """
import sys, torch, unisono as un
from unisono.training.checkpoint import safetensors
model = torch.nn.Linear(300, 300)
replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1), world=un.World())
"""


def run(tmp_path: Path, text: str) -> tuple[int, str, str]:
    program = tmp_path.with_suffix(".py")
    program.write_text(SCRIPT + text)
    process = Program(program, tmp_path, env=os.environ)
    out, err = process.communicate(60)
    return process.returncode, out, err


def test_a_program_ends_when_its_checkpoint_is_written(tmp_path):
    code, _, err = run(tmp_path, "un.save(sys.argv[1], replica, background=True)\n")
    assert (code, err) == (0, "")
    assert steps(tmp_path) == ["step-0000000000"]


def test_a_program_whose_last_checkpoint_could_not_be_written_says_so_and_fails(tmp_path):
    text = """
def fail(*args):
    raise OSError(28, "No space left on device")
safetensors.write = fail
un.save(sys.argv[1], replica, background=True)
"""
    code, _, err = run(tmp_path, text)
    assert code == 1
    assert f"step 0 in {tmp_path} could not be written in the background, earlier checkpoints are intact" in err
    assert "No space left on device" in err


@pytest.mark.parametrize("first", ["", "un.save(sys.argv[1], replica, background=True)\n"], ids=["first", "later"])
@pytest.mark.parametrize("disk", ["", "safetensors.write = fail\n"], ids=["room", "full"])
def test_what_an_exit_handler_saves_is_written_or_its_error_raised_there(tmp_path, first, disk):
    """No thread starts any more, and nobody asks for errors later."""
    text = f"""
import atexit
def fail(*args):
    raise OSError(28, "No space left on device")
{first}un.wait_saved()
{disk}replica.step = 1
def save():
    print(un.save(sys.argv[1], replica, background=True), flush=True)
atexit.register(save)
"""
    _, out, err = run(tmp_path, text)
    before = ["step-0000000000"] if first else []
    if disk:
        assert (out, steps(tmp_path) if tmp_path.exists() else []) == ("", before)
        assert f"CheckpointError: the checkpoint of step 1 in {tmp_path} could not be written" in err
    else:
        assert (out, err) == (f"{tmp_path / 'step-0000000001'}\n", "")
        assert steps(tmp_path) == [*before, "step-0000000001"]


def test_a_process_killed_during_background_saves_never_leaves_one_in_part(tmp_path):
    program = tmp_path.with_suffix(".py")
    program.write_text(
        SCRIPT
        + """
while True:
    replica.step += 1
    with torch.no_grad():
        model.weight.fill_(replica.step)
    un.save(sys.argv[1], replica, keep=2, background=True)
    if replica.step == 3:
        print("ready", flush=True)
"""
    )
    for delay_s in (0.0, 0.03, 0.07):
        process = Program(program, tmp_path, env=os.environ)
        process.stdout.readline()
        time.sleep(delay_s)
        process.kill()
        process.communicate()
        model = torch.nn.Linear(300, 300)
        replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1), world=World())
        loaded = un.load(tmp_path, replica)
        assert loaded.skipped == []
        assert model.weight.unique().tolist() == [loaded.step]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        un.save(tmp_path, replica)
    assert not [name for name in steps(tmp_path) if name.startswith(".")]


# Two runs, and a later version --------------------------------------------------------------------------------


def test_the_later_of_two_runs_that_save_into_one_folder_is_told_and_nothing_is_removed(tmp_path, monkeypatch):
    def save_as(run: str, step: int, since: float) -> None:
        monkeypatch.setattr(folder, "_RUN", run)
        monkeypatch.setattr(folder, "_first_saves", firsts.setdefault(run, {}))
        replica.step = step
        un.save(tmp_path, replica, keep=1)

    firsts: dict[str, dict[str, tuple[int, float]]] = {}
    replica = make()
    save_as("first", 1, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_as("second", 2, 2.0)  # the first may have ended
    with pytest.warns(UserWarning, match=f"another run is saving into {tmp_path}: step-0000000002 is not of this one"):
        save_as("first", 3, 1.0)
    with pytest.raises(CheckpointError, match=r"another run is saving into .* step-0000000004 was written"):
        save_as("second", 4, 2.0)
    assert steps(tmp_path) == ["step-0000000003", "step-0000000004"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_of_a_later_version_is_named_and_not_passed_over(tmp_path, monkeypatch, size):
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_FORMAT", 3)
        replica = make()
        replica.step = 7
        un.save(tmp_path, replica)
    replica.step = 5
    un.save(tmp_path, replica, keep=1)  # leaves what it cannot judge
    assert steps(tmp_path) == ["step-0000000005", "step-0000000007"]
    with pytest.raises(CheckpointError, match=r"step-0000000007 is of a later version of Unisono \(format 3;"):
        run_threads(lambda world: un.load(tmp_path, make(world)), size)
    assert un.load(tmp_path / "step-0000000005", make()).step == 5


def test_the_clock_of_a_place_is_one(tmp_path):
    world = World()
    assert SaveClock.of(world, tmp_path, "1h") is SaveClock.of(world, tmp_path, 3600.0)


# State on a disk ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
@pytest.mark.parametrize(
    "strategy",
    [
        "zero(stage=1, optimizer_on=disk, unit_bytes=100)",
        "zero(stage=1, optimizer_on=disk, spill=0.5, unit_bytes=100)",
        "zero(stage=3, optimizer_on=disk, params_on=disk, unit_bytes=100)",
    ],
)
def test_state_on_a_disk_is_kept_there_and_not_read_by_the_call(tmp_path, monkeypatch, gate, strategy, room):
    """What the steps after it write goes elsewhere; without room for that the call itself writes the checkpoint."""
    if not room:
        monkeypatch.setattr(chunks.ChunkBuffers, "freeze", lambda self: (_ for _ in ()).throw(DiskError(28, "full")))

    def work(world: World) -> dict[str, bytes]:
        replica = make(world, strategy)
        train(replica, batches(2))
        for name in ("one", "two"):  # the second uses the places that the first has left
            train(replica, batches(1))
            un.save(tmp_path / name / "now", replica)
            moved = replica._offload.of(replica.units[0]).engine.stepper.buffers.disk.moved
            before = moved["read"]
            un.save(tmp_path / name / "behind", replica, background=True)
            calls.append((moved["read"] - before, behind.find_saves(replica).is_busy))
            train(replica, batches(2, seed=8))
            gate.set()
            un.wait_saved(replica)
        train(replica, batches(1))  # places may be swapped now, and the state is what it would have been
        final = {name: x.numpy().tobytes() for name, x in replica.consolidate().state_dict().items()}
        replica.close()
        return final

    calls: list[tuple[int, bool]] = []
    [final] = run_threads(work, 1)
    read, is_busy = calls[0]
    assert is_busy == room  # else the call has written it
    assert not (room and read)
    plain = make()
    for batch in [*batches(2), *batches(1), *batches(2, seed=8), *batches(1), *batches(2, seed=8), *batches(1)]:
        train(plain, [batch])
    for name, value in plain.model.state_dict().items():
        got = torch.frombuffer(bytearray(final[name]), dtype=value.dtype).reshape(value.shape)
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)
    for name in ("one", "two"):
        now, later = (un.read_checkpoint(tmp_path / name / kind) for kind in ("now", "behind"))
        assert now["step"] == later["step"]
        for key, value in now["model"].items():
            assert torch.equal(later["model"][key], value)
        for number, entry in now["optimizer"]["state"].items():
            for key, value in entry.items():
                assert torch.equal(torch.as_tensor(later["optimizer"]["state"][number][key]), torch.as_tensor(value)), (
                    key
                )


def test_a_forked_child_does_not_end_with_an_error_of_its_parents_saves(monkeypatch):
    """Nor does it wait: the worker of a DataLoader has none of the threads that write."""

    def fail() -> None:
        raise CheckpointError("the disk is full")

    behind._register()
    monkeypatch.setattr(behind, "wait_saved", fail)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_forked_child_does_not_keep_the_lock_of_a_save(tmp_path):
    """It would be taken for another run that saves there, as long as it lives."""
    context = multiprocessing.get_context("fork")
    began = context.Event()

    def stay() -> None:
        began.set()
        time.sleep(60)

    lock = folder.begin_folder(tmp_path, 1)[1]
    child = context.Process(target=stay)
    child.start()
    try:
        assert began.wait(30)
        with pytest.warns(UserWarning, match="another run is saving"):  # the child's end of it changes nothing here
            folder._remove_abandoned(next(tmp_path.iterdir()))
        assert len(steps(tmp_path)) == 1
        lock.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writing, lock = folder.begin_folder(tmp_path, 2)
        lock.close()
    finally:
        child.kill()
        child.join()
    assert steps(tmp_path) == [writing.name]
