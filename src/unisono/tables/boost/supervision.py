"""Runs a library's distributed training in a thread of its own while the ranks tell each other that all is well.

The libraries' own collectives wait for ever, or for minutes, for a rank that has died or failed. Here the ranks meet
every quarter of a second beside them: a rank that died, failed or does not answer is an error on all the others. The
libraries keep their network by thread, so a thread that is left waiting disturbs no later fit.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from unisono.launchers.runtime.addresses import find_address_for_others
from unisono.world import World

T = TypeVar("T")
BEAT_S = 0.25
GRACE_S = 2.0  # for a thread to end after a rank failed, before it is left alone
_RUNNING, _DONE, _FAILED = 0, 1, 2


class BoostingFailed(RuntimeError):
    """Another rank failed, or does not answer."""


class _LibraryCall(threading.Thread):
    """One call of the library."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__(name="boosting", daemon=True)
        self._fn = fn
        self.ended = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended_at = 0.0

    def run(self) -> None:
        try:
            self.value = self._fn()
        except BaseException as error:
            self.error = error
        finally:
            self.ended_at = time.time()
            self.ended.set()


def run_supervised(fn: Callable[[], T], world: World, *, timeout_s: float) -> T:
    """Run `fn()` on every rank; if one of them fails, dies, or is silent for `timeout_s`, every rank raises."""
    if world.size == 1:
        return fn()
    call = _LibraryCall(fn)
    call.start()
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    beat = threading.Thread(target=_exchange_beats, args=(call, world, reports), name="boosting-beat", daemon=True)
    beat.start()
    while True:
        try:
            news = reports.get(timeout=timeout_s + BEAT_S)
        except queue.Empty:
            raise BoostingFailed(
                f"rank {world.rank} has heard nothing from some other rank for {timeout_s:g} s, so that boosting "
                "cannot continue: is a worker stopped, or its host overloaded? timeout_s= sets how long to wait"
            ) from None
        if news is None:
            continue
        beat.join(GRACE_S)  # a thread of the program's last moments must not be inside native code
        call.join(GRACE_S)
        if isinstance(news, BaseException):
            raise news
        return cast(T, _take_outcome(call, world, news))


def _exchange_beats(call: _LibraryCall, world: World, reports: queue.SimpleQueue[Any]) -> None:
    """Meet the other ranks at every beat, and put news into `reports`: None while all goes well; at the end, of every
    rank [when it failed, its error, whether that is a user's mistake], empty if it did not fail; or what broke the
    world."""
    try:
        while True:
            call.ended.wait(BEAT_S)
            mine = _RUNNING if not call.ended.is_set() else _DONE if call.error is None else _FAILED
            worst, least = torch.tensor([mine]), torch.tensor([mine])
            handles = [world.all_reduce(worst, "max", tag="boost"), world.all_reduce(least, "min", tag="boost")]
            for handle in handles:
                handle.wait()
            if worst.item() == _FAILED or least.item() == _DONE:
                failed = call.ended.is_set() and call.error is not None
                news = (
                    [call.ended_at, _take_first_line(call.error), isinstance(call.error, ValueError)] if failed else []
                )
                reports.put(world.gather_objects(news))
                return
            reports.put(None)
    except BaseException as error:
        reports.put(error)


def _take_outcome(call: _LibraryCall, world: World, every: list[list[Any]]) -> Any:
    failed = {rank: news for rank, news in enumerate(every) if news}
    if not failed:
        return call.value
    first = min(failed, key=lambda rank: failed[rank][0])  # the others fail because of it
    if first == world.rank and call.error is not None:
        raise call.error
    kind = ValueError if failed[first][2] else BoostingFailed
    raise kind(f"boosting failed on rank {first}: {failed[first][1]}")


def _take_first_line(error: BaseException | None) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def find_own_address(world: World) -> str:
    """The address at which other ranks reach this rank's host; 127.0.0.1 if all are on one host."""
    if len(set(world.hosts)) == 1:
        return "127.0.0.1"
    found = find_address_for_others([os.environ.get("MASTER_ADDR", "")])
    if found:
        return found
    raise OSError(
        f"no address of {socket.gethostname()} is known at which other hosts reach it: set UNISONO_INTERFACE to "
        "the name of its network interface"
    )


@contextmanager
def reserve_port() -> Iterator[tuple[int, socket.socket]]:
    """A free port, held until the socket is closed: close it just before the library takes the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1], held
