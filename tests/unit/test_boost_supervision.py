"""The watch beside a library's training: a rank that fails, dies or is silent is an error on every rank."""

from __future__ import annotations

import threading
import time

import pytest

from unisono.boost import supervision
from unisono.tables.boost.supervision import BoostingFailed, run_supervised
from unisono.world import World
from unisono.world.transports import PeerLost
from unisono.world.virtual import run_threads


def test_each_rank_gets_its_own_result():
    assert run_threads(lambda world: run_supervised(lambda: world.rank * 10, world, timeout_s=5.0), 3) == [0, 10, 20]


def test_a_world_of_one_calls_in_its_own_thread():
    assert run_supervised(threading.get_ident, World(), timeout_s=1.0) == threading.get_ident()


def stuck_but_for(world, broken, error):
    """Rank `broken` fails; the others would wait for it for ever."""
    never = threading.Event()

    def call():
        if world.rank == broken:
            raise error
        never.wait()

    try:
        run_supervised(call, world, timeout_s=30.0)
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "others"), [(MemoryError("no room"), BoostingFailed), (ValueError("bad"), ValueError)]
)
def test_a_rank_that_fails_is_an_error_on_all_who_wait_for_it(monkeypatch, error, others):
    monkeypatch.setattr(supervision, "GRACE_S", 0.05)
    zero, one, two = run_threads(lambda world: stuck_but_for(world, 1, error), 3)
    assert one is error
    for raised in (zero, two):
        assert type(raised) is others
        assert f"rank 1: {type(error).__name__}: {error}" in str(raised)


def test_a_silent_rank_is_an_error_after_the_deadline():
    heard = threading.Event()

    def rank(world):
        if world.rank == 1:
            heard.wait(30.0)  # never comes to a beat
            return None
        began = time.monotonic()
        with pytest.raises(BoostingFailed, match=r"heard nothing .* for 0.5 s"):
            run_supervised(lambda: time.sleep(0.1), world, timeout_s=0.5)
        heard.set()
        return time.monotonic() - began

    assert run_threads(rank, 2, timeout_s=30.0)[0] >= 0.5


def test_a_lost_rank_is_an_error_although_the_call_never_ends(monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_S", 0.05)
    raised = []

    def rank(world):
        if world.rank == 1:
            raise RuntimeError("this rank dies")
        try:
            run_supervised(threading.Event().wait, world, timeout_s=30.0)
        except PeerLost as error:
            raised.append(error)

    with pytest.raises(RuntimeError, match="this rank dies"):
        run_threads(rank, 2)
    assert len(raised) == 1
