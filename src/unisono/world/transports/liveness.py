"""Who is still there, after a connection broke: asked of the store that the ranks met in."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING

from unisono.launchers.runtime.machine import read_boot_id, read_namespaces
from unisono.launchers.runtime.variables import read_host
from unisono.world.transports import CallDescription, Mismatch, PeerLost, tell_at_exit
from unisono.world.transports.connections import find_address, has_ended, limit_silence, probe
from unisono.world.transports.process_watch import ProcessWatch

if TYPE_CHECKING:
    from torch.distributed import Store

DYING_S = 0.5  # a process that was killed may outlive its connections by a moment
PATIENCE_S = 2.0  # for ranks to answer; the processes of this machine are looked up
_TO_TELL_S = 1.0  # that ranks which disagree wait for each other's calls
_SILENCE_S = 2.0  # of the store's host, when who is missing is asked for


class Liveness:
    """Each rank leaves its process at the start; after a failure each answers, and those that do not are named.

    A rank that leaves for another reason, or ends its program, says so here too: the others only see its connections
    close.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._host = read_host()
        store.set(f"who/{rank}", json.dumps([self._host, identify_machine(), os.getpid()]))
        self._pid, self._address = os.getpid(), find_address(store)
        tell_at_exit(self)

    def end(self, how: str) -> None:
        """Tell the others that my program has ended: "has ended its program with status 0"."""
        if self._pid != os.getpid() or self._address in _silent or has_ended(self._store):
            return
        try:
            self._store.set(f"ended/{self._rank}", how)
        except RuntimeError:
            return  # the store went with a rank

    def report(self, why: Exception) -> None:
        """Tell the other ranks why this one leaves."""
        try:
            calls = why.calls if isinstance(why, Mismatch) else ()
            self._store.set("wrong", json.dumps([isinstance(why, Mismatch), str(why), calls]))
        except RuntimeError:
            return  # the store went with a rank

    def read_report(self) -> Exception | None:
        """Why another rank left, if it said so."""
        limit_silence(self._store, _SILENCE_S)
        try:
            if not self._store.check(["wrong"]):
                return None
            is_mismatch, text, calls = json.loads(self._store.get("wrong"))
        except RuntimeError:
            _silent.add(self._address)
            return None
        return Mismatch(text, calls=[CallDescription(*call) for call in calls]) if is_mismatch else PeerLost(text)

    def exchange_descriptions(self, mine: CallDescription) -> list[CallDescription]:
        """Tell the others what I have called, and hear it from those that tell it within a moment."""
        found: dict[int, CallDescription] = {}
        deadline = time.monotonic() + _TO_TELL_S
        try:
            self._store.set(f"call/{self._rank}", json.dumps(mine))
            while len(found) < self._size:
                told = [r for r in range(self._size) if r not in found and self._store.check([f"call/{r}"])]
                found |= {r: CallDescription(*json.loads(self._store.get(f"call/{r}"))) for r in told}
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        except RuntimeError:
            _silent.add(self._address)
        return list(found.values())

    def describe_missing(self) -> tuple[str, bool]:
        """The ranks that ended, died or do not answer, in words; and whether they said so themselves."""
        try:
            self._store.set(f"alive/{self._rank}", "1")
            who = [json.loads(self._store.get(f"who/{r}")) for r in range(self._size)]
            names = [f"rank {r} (process {pid} on {host})" for r, (host, _, pid) in enumerate(who)]
            near = [r for r in range(self._size) if who[r][1] == identify_machine()]
            others = [r for r in range(self._size) if r != self._rank]
            began = time.monotonic()
            deadline = began + PATIENCE_S
            while True:
                ended = [r for r in others if self._store.check([f"ended/{r}"])]
                gone = [f"{names[r]} {self._store.get(f'ended/{r}').decode()}" for r in ended] or [
                    f"{names[r]} has died" for r in near if _has_died(who[r][2])
                ]
                silent = [r for r in others if not self._store.check([f"alive/{r}"])]
                now = time.monotonic()
                if gone or (not silent and now > began + DYING_S) or now > deadline:
                    break
                time.sleep(0.05)
        except RuntimeError:
            _silent.add(self._address)
            return self._explain_store(), False
        found = gone or [f"{names[r]} does not answer" for r in silent]
        away = [r for r in others if who[r][0] != self._host]
        if not gone and away and set(away) <= set(silent):
            found[0] = f"host {self._host} cannot reach any other host, and may be cut off: {found[0]}"
        return " and ".join(found) or "every rank is alive, but a connection broke", bool(ended)

    def _explain_store(self) -> str:
        """Why the store does not answer: its process is gone, or its host cannot be reached from here."""
        address = self._address
        why = probe(address, _SILENCE_S) if address is not None else None
        if address is None or why is None or isinstance(why, ConnectionError):
            return "the store in which the ranks met is gone, perhaps with the rank that kept it"
        return (
            f"host {self._host} cannot reach {address[0]}, where the ranks met ({why.strerror or why}): it is cut off "
            "from the others, or that host is down"
        )


_silent: set[tuple[str, int] | None] = set()  # servers of stores that did not answer


def identify_machine() -> str:
    """A key that two processes share if and only if they see each other by process id."""
    try:
        return " ".join([read_boot_id(), *read_namespaces("pid")])
    except OSError:
        return socket.gethostname()


def _has_died(pid: int) -> bool:
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        watch = ProcessWatch([pid])
    except PeerLost:
        return True
    try:
        return watch.has_died(0)
    finally:
        watch.close()
