"""The one ledger of all groups of a process. Each optimizer step ends a step of it, so that a program that knows
nothing of this package still has its table and trace: UNISONO_LEDGER=trace.json writes them at the end.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from unisono.launchers.runtime import status
from unisono.world.ledger import Ledger
from unisono.world.timeline import Report, gather
from unisono.world.world import World

if TYPE_CHECKING:
    from unisono.world.backend.group import Group
    from unisono.world.backend.works import Work

__all__ = ["close_default", "find_ledger", "gather_report", "note_work", "open_ledger", "share_ledger"]

VARIABLE = "UNISONO_LEDGER"


class _Accounts:
    """What there is of a process's groups."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ledger: Ledger | None = None
        self.shared: Ledger | None = None  # that of a world which the program has beside its groups
        self.default: Group | None = None
        self.last: Work | None = None  # the newest that is waited for through a future
        self.hook: Any = None
        self.is_written = False


_accounts = _Accounts()


def open_ledger(group: Group, *, is_default: bool, rank: int) -> Ledger:
    """The ledger for a group: one for all of this process, begun anew with each default group."""
    with _accounts.lock:
        if is_default or _accounts.ledger is None:
            mine = _accounts.shared if _accounts.shared is not None else Ledger(rank)
            _accounts.ledger, _accounts.last, _accounts.is_written = mine, None, False
            if _accounts.hook is None:
                _accounts.hook = register_optimizer_step_post_hook(_end_step)
                atexit.register(_write_mine)
        if is_default:
            _accounts.default = group
        return _accounts.ledger


def share_ledger(ledger: Ledger) -> None:
    """Let the groups that are made from now on write into a world's ledger; whoever trains in it ends its steps."""
    with _accounts.lock:
        _accounts.shared = ledger


def find_ledger() -> Ledger:
    """The ledger of this process's groups."""
    if _accounts.ledger is None:
        raise RuntimeError(
            "this process has no process group over unisono, so there is no ledger of one: call "
            'torch.distributed.init_process_group("unisono") first'
        )
    return _accounts.ledger


def gather_report() -> Report:
    """Every rank's ledger; all ranks call it."""
    ledger = find_ledger()
    if _accounts.default is None:
        raise RuntimeError("the default process group is gone: call un.backend.report() before it is destroyed")
    return _accounts.default.in_order(lambda world: gather(ledger, world))


def note_work(work: Work) -> None:
    """Remember the newest operation that torch's C++ may wait for."""
    _accounts.last = work


def close_default(group: Group) -> None:
    """Called at the end of the default group: write the table and the trace if the environment asks for them."""
    if _accounts.default is not group:
        return
    path = os.environ.get(VARIABLE)
    if path and _accounts.ledger is not None and not _accounts.is_written:
        _accounts.is_written = True
        found = gather_report()
        if group.world.rank == 0:
            found.trace(path)
            print(f"{found.table()}\nunisono: trace written to {path}", file=sys.stderr)
    _accounts.default = None


def _end_step(optimizer: Optimizer, *_: Any) -> None:
    """An optimizer has stepped: the first one that does so is the one that counts."""
    ledger, last = _accounts.ledger, _accounts.last
    if ledger is None or _accounts.default is None:
        return
    if last is not None and last.by_future and last.is_completed():  # DDP waits for its last bucket in C++
        ledger.close_span("blocked", last.submitted, last.ended)
    _accounts.last = None
    if ledger is _accounts.shared:
        return
    ledger.step(optimizer)
    status.note(step=ledger.step_count)


def _write_mine() -> None:
    """At the end of a program that did not destroy its groups: each rank writes what it has."""
    path = os.environ.get(VARIABLE)
    ledger = _accounts.ledger
    if not path or ledger is None or _accounts.is_written:
        return
    _accounts.is_written = True
    whole = Path(path)
    mine = whole.with_name(f"{whole.stem}-rank{ledger.rank}{whole.suffix}")
    alone = World(None, ledger=ledger)
    gather(ledger, alone).trace(mine)
    print(f"{ledger.table()}\nunisono: rank {ledger.rank} wrote its trace to {mine}", file=sys.stderr)
