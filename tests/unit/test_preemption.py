"""Ranks that learn of SIGTERM at different steps, or not at all, leave after the same one."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unisono.launchers.runtime import sigterm
from unisono.training.trainer import Callback, Trainer
from unisono.world import World, join, preempted
from unisono.world import preemption as module
from unisono.world.virtual import run_threads

NEVER = 10**6
X = torch.randn(48, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
MODEL = nn.Linear(5, 1).double()
EPOCH = 6  # steps, of 8 samples each


class Word:
    """Stands for SIGTERM in worlds of threads: each rank learns of it at a call of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, size: int) -> None:
        self.told = [False] * size
        patch.setattr(sigterm, "told", lambda: self.told[join().rank])
        patch.setattr(sigterm, "note_agreement", lambda: None)


def leave_at(size: int, word: Word, at: list[int], *, in_step: bool) -> list[int]:
    """The call at which each rank is told to leave; rank r learns of it before its call number `at[r]`."""

    def loop(world: World) -> int:
        for call in range(1, 1000):
            if in_step:  # as with a method that exchanges something in every step
                world.barrier()
            word.told[world.rank] |= call >= at[world.rank]
            if preempted(world):
                assert preempted(world), "once so, always so"
                return call
        return NEVER

    return run_threads(loop, size)


@pytest.mark.parametrize("in_step", [True, False], ids=["in step", "each at its own pace"])
@pytest.mark.parametrize("at", [[NEVER, 5, NEVER], [90, 20, 140], [1, 1, 1]], ids=str)
def test_ranks_that_learn_of_it_at_different_steps_leave_at_the_same(
    monkeypatch: pytest.MonkeyPatch, at: list[int], in_step: bool
) -> None:
    first, *others = leave_at(3, Word(monkeypatch, 3), at, in_step=in_step)
    assert others == [first, first]
    assert min(at) < first <= min(at) + 2 * module.MOST_CALLS


def test_long_steps_are_left_after_the_one_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)  # so that every step is a long one
    assert leave_at(2, Word(monkeypatch, 2), [NEVER, 7], in_step=True) == [8, 8]


def test_asked_now_the_answer_is_of_this_call(monkeypatch: pytest.MonkeyPatch) -> None:
    word = Word(monkeypatch, 2)

    def loop(world: World) -> list[bool]:
        agreement, found = module.Agreement.of(world), []
        for call in range(1, 8):
            word.told[world.rank] |= world.rank == 1 and call == 5
            found.append(agreement.ask(now=call % 5 == 0))
        return found

    assert run_threads(loop, 2) == [[False] * 4 + [True] * 3] * 2


def test_alone_the_word_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigterm, "watch", lambda: False)
    world = World()
    assert not preempted(world)
    monkeypatch.setattr(sigterm, "told", lambda: True)
    monkeypatch.setattr(sigterm, "note_agreement", lambda: None)
    assert preempted(world)


# -- the trainer -------------------------------------------------------------------------------------------------------


class Tell(Callback):
    """Rank 1 learns of SIGTERM in one step."""

    def __init__(self, word: Word, step: int) -> None:
        self.word, self.step = word, step

    def on_step_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        self.word.told[1] |= trainer.world.rank == 1 and logs["step"] == self.step


def fit(world: World, folder: Path | None, *callbacks: Callback, **options: Any) -> tuple[torch.Tensor, Any, int]:
    net = copy.deepcopy(MODEL)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    work = Trainer(
        net,
        optimizer,
        loss=nn.MSELoss(),
        checkpoint=folder,
        callbacks=callbacks,
        progress=False,
        world=world,
        **options,
    )
    history = work.fit((X, Y), epochs=3, batch_size=8, validation=(X[:9], Y[:9]))
    return net.weight.detach().clone(), [history["loss"], history["val_loss"]], work.replica.step


@pytest.mark.parametrize(("step", "save_every"), [(2, None), (EPOCH, None), (EPOCH + 2, 1), (3 * EPOCH, None)])
def test_a_preempted_trainer_saves_leaves_and_goes_on_as_if_it_had_not_stopped(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step: int,
    save_every: int | None,
) -> None:
    straight = run_threads(lambda world: fit(world, None), 2)
    word = Word(monkeypatch, 2)
    with pytest.raises(SystemExit) as left:
        run_threads(lambda world: fit(world, tmp_path, Tell(word, step), save_every=save_every), 2)
    assert left.value.code == 143
    at = max(int(path.name.removeprefix("step-")) for path in tmp_path.iterdir())
    assert step <= at <= -(-step // EPOCH) * EPOCH, "at the end of an epoch at the latest, before validation"
    assert f"preempted at step {at}, saved to {tmp_path}; run the same command to resume" in capsys.readouterr().err
    word.told[1] = False
    resumed = run_threads(lambda world: fit(world, tmp_path), 2)
    for (weight, scores, steps), (right, right_scores, _) in zip(resumed, straight, strict=True):
        assert steps == 3 * EPOCH
        assert torch.equal(weight, right)
        assert scores == [pytest.approx(column, rel=1e-12) for column in right_scores]


def test_a_trainer_without_a_folder_does_not_take_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    word = Word(monkeypatch, 2)
    assert [steps for _, _, steps in run_threads(lambda world: fit(world, None, Tell(word, 2)), 2)] == [3 * EPOCH] * 2


# -- the signal --------------------------------------------------------------------------------------------------------

NOTED = """
import os, signal, time
from unisono.launchers.runtime import sigterm
before = signal.signal(signal.SIGTERM, lambda *_: print("the program's own")) if OWN else signal.SIG_DFL
after = signal.getsignal(signal.SIGTERM)
with sigterm.noting():
    assert not sigterm.watch()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert sigterm.told() and not sigterm.has_agreed()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert signal.getsignal(signal.SIGTERM) is after
"""


def run_alone(text: str) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-u", "-c", text], env=env, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_sigterm_is_noted_and_forked_children_end_as_before() -> None:
    assert run_alone(NOTED.replace("OWN", "False")) == (0, "-15\n")


def test_the_programs_own_handler_is_still_called() -> None:
    own = "the program's own\n"
    assert run_alone(NOTED.replace("OWN", "True")) == (0, own * 3 + "0\n"), "twice here, once in the child"


def test_a_later_sigterm_ends_the_process() -> None:
    text = (
        "import os, signal\nfrom unisono.launchers.runtime import sigterm\nsigterm.watch()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(sigterm.told(), flush=True)\nsigterm._told_at -= 60\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('still here')"
    )
    assert run_alone(text) == (-signal.SIGTERM, "True\n")
