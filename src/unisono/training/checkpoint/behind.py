"""Saves in the background: the thread that writes, how ranks hear of each other meanwhile, and what becomes of errors.

The ranks that write one checkpoint tell each other by files in its folder, as collectives belong to the training:

.digests      rank 0: a digest of every tensor, so that the others write only what differs
.part-00001   rank 1: the files that it has written, or why it could not
.failed       rank 0: why there will be no checkpoint (else the folder gets its manifest, and on a disk its name)
.lock-00001   locked by rank 1 as long as it lives (rank 0: .lock)
"""

from __future__ import annotations

import atexit
import fcntl
import io
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unisono.launchers.runtime.frames import warn_user
from unisono.training.checkpoint.folder import SharedByRuns, find_candidates, take_lock
from unisono.training.checkpoint.remote import Place, RemotePath
from unisono.training.checkpoint.savable import Savable
from unisono.training.checkpoint.snapshot import Snapshot
from unisono.training.checkpoint.together import CheckpointError, shorten
from unisono.world import World

_NICE = 15  # of the writing thread: where all cores are busy it gets 3 % of one
_MORE_BYTES = 1 << 20  # random numbers and other small things
_POLL_S, _POLL_REMOTE_S = 0.2, 2.0
_EXIT_S = 600.0  # at the end of the program, for what other ranks are to do, if no lock tells whether they live


class Lost(Exception):
    """A rank that had a part to write is gone: this checkpoint will not be, and earlier checkpoints are intact."""


# Telling each other ---------------------------------------------------------------------------------------


class Parts:
    """What the ranks have written of one checkpoint so far, by files in its folder."""

    def __init__(self, folder: Place, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self._lock: io.FileIO | None = None
        self.ranks_changed = False

    def world_changed(self, world: World) -> None:
        """Ranks have come or gone: a part that is not there will not come."""
        self.ranks_changed = True

    def enter(self) -> None:
        """Show the others that this rank lives; rank 0 has a lock from the beginning."""
        if self.rank and isinstance(self.folder, Path):
            self._lock = take_lock(self.folder / _name_lock(self.rank))

    def leave(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.close()

    def give(self, name: str, value: Any) -> None:
        """Write a small file that others see when it is whole."""
        data = json.dumps(value).encode()
        if isinstance(self.folder, RemotePath):
            (self.folder / name).write_bytes(data)
            return
        writing = self.folder / f"{name}-{self.rank}"
        writing.write_bytes(data)
        os.replace(writing, self.folder / name)

    def take(self, name: str, rank: int) -> Any:
        """What another rank gives; raises `Lost` if it never will."""
        while (found := self._read(name)) is None:
            self._check_failed()
            if why := self._find_loss(rank):
                if (found := self._read(name)) is not None:  # given in the meantime
                    break
                raise Lost(why)
            self._pause()
        return json.loads(found)

    def take_outcome(self) -> None:
        """Wait until rank 0 has made a checkpoint of the folder; raises what kept it from that."""
        while not self._is_published():
            self._check_failed()
            if why := self._find_loss(0):
                if self._is_published():
                    return
                raise Lost(why)
            self._pause()

    def give_failure(self, error: BaseException) -> None:
        """Tell the others why this rank could not write its part; rank 0, why there will be no checkpoint."""
        is_lost = isinstance(error, Lost) or self.ranks_changed
        self.give(f".part-{self.rank:05d}" if self.rank else ".failed", {"error": shorten(error), "lost": is_lost})

    def take_files(self, rank: int) -> Any:
        """The files that another rank has written; raises what kept it from that."""
        given = self.take(f".part-{rank:05d}", rank)
        _raise_given(given, f"rank {rank}: ")
        return given["files"]

    def _check_failed(self) -> None:
        if self.rank and (failed := self._read(".failed")) is not None:
            _raise_given(json.loads(failed))

    def _is_published(self) -> bool:
        if isinstance(self.folder, RemotePath):
            return (self.folder / "manifest.json").exists()
        if self.folder.exists():
            return False
        # Renamed, or removed as rank 0 could not even say why it failed.
        return any(c.written_as == self.folder.name for c in find_candidates(self.folder.parent))

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _find_loss(self, rank: int) -> str:
        """Why nothing more will come from another rank, in words; "" if it may."""
        if self.ranks_changed:
            return "ranks have joined or left"
        if isinstance(self.folder, Path):
            try:
                with io.FileIO(self.folder / _name_lock(rank), "r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return f"rank {rank} ended before it had written its part"
            except BlockingIOError:  # it lives
                return ""
            except FileNotFoundError:
                if not self.folder.exists():
                    return "the folder that was being written is gone"
            except OSError:  # a disk without locks
                pass
        if _ending.is_set() and time.monotonic() > _ending_at + _EXIT_S:
            return f"rank {rank} was not ready within {_EXIT_S:.0f} s of the end of the program"
        return ""

    def _pause(self) -> None:
        time.sleep(_POLL_S if isinstance(self.folder, Path) else _POLL_REMOTE_S)


def _raise_given(given: Any, prefix: str = "") -> None:
    if "error" in given:
        raise (Lost if given["lost"] else OSError)(f"{prefix}{given['error']}")


def _name_lock(rank: int) -> str:
    return f".lock-{rank:05d}" if rank else ".lock"


# One at a time --------------------------------------------------------------------------------------------


class BackgroundSaves:
    """The background saves of one replica on this rank: one in flight at a time, with the memory of its copy."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._warming: threading.Thread | None = None
        self._root = self._what = ""
        self._error: BaseException | None = None
        self._lost = ""

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, root: Place, step: int, write: Callable[[], object]) -> None:
        """Have a thread write a checkpoint; `finish` must have been called for the one before."""
        assert self._thread is None
        self._root, self._what = str(root), f"the checkpoint of step {step} in {root}"
        self._thread = threading.Thread(target=self._run, args=(write,), name="unisono-save", daemon=True)
        _under_way.add(self)
        if _register():
            self._thread.start()
            return
        # Begun by what runs at the end of the program: no thread starts any more, and nobody asks for errors later.
        self._run(write)
        if (error := self.find_error()) is not None:
            raise CheckpointError(str(error)) from error

    def warm(self, replica: Savable) -> None:
        """Get the memory for the first copy ready, while training goes on: to be touched for the first time takes
        longer than the copy. Once; for a GPU's state not at all."""
        if self._warming is not None or self.snapshot.nbytes or replica.world.device.type != "cpu":
            return
        held = [one.state for one in getattr(replica.optimizer, "members", [replica.optimizer])]
        every = [state for one in held for state in getattr(one, "own", one).values()]  # of zero: this rank's part
        states = [x for state in every for x in state.values() if isinstance(x, Tensor)]
        tensors = [*replica.model.parameters(), *replica.model.buffers(), *states]
        nbytes = sum(x.nbytes + 64 for x in tensors if not nn.parameter.is_lazy(x)) + _MORE_BYTES
        self._warming = threading.Thread(target=self._warm, args=(nbytes,), name="unisono-save-memory", daemon=True)
        self._warming.start()

    def _warm(self, nbytes: int) -> None:
        _lower_priority()
        with suppress(MemoryError, OSError, RuntimeError):  # the save itself will say so
            self.snapshot.warm(nbytes)

    def _run(self, write: Callable[[], object]) -> None:
        _lower_priority()
        try:
            write()
        except Lost as error:
            self._lost = str(error)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the one in flight, if any; raises OSError if it could not be written."""
        if (error := self.find_error()) is not None:
            raise error

    def wait(self, root: Place | None = None) -> None:
        """Wait for the one in flight, if any (and if it is written into this folder)."""
        while self.is_busy and (root is None or self._root == str(root)):
            assert self._thread is not None
            self._thread.join(0.05)  # not for long: Ctrl-C is heard between two

    def find_error(self) -> OSError | None:
        """Wait for the one in flight, if any; why it could not be written, told once."""
        if self._warming is not None:
            self._warming.join()
        if self._thread is None:
            return None
        self.wait()
        self._thread = None
        _under_way.discard(self)
        error, self._error = self._error, None
        lost, self._lost = self._lost, ""
        if error is not None:
            text = (
                f"{self._what} could not be written in the background, earlier checkpoints are intact: {shorten(error)}"
            )
            told = OSError(str(error) if isinstance(error, SharedByRuns) else text)
            told.__cause__ = error
            return told
        if lost:
            warn_user(f"{self._what} was given up, earlier checkpoints are intact: {lost}")
        return None


def _lower_priority() -> None:
    """Of this thread alone, on Linux; its reads and writes follow. Not of the program's own."""
    if threading.current_thread() is threading.main_thread():
        return
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


_saves: weakref.WeakKeyDictionary[Any, BackgroundSaves] = weakref.WeakKeyDictionary()
_under_way: set[BackgroundSaves] = set()  # held until someone has heard how it ended
_ending = threading.Event()
_ending_at = 0.0
_registered = 0  # the process that waits at its end


def find_saves(replica: Any) -> BackgroundSaves:
    """The background saves of a replica."""
    if replica not in _saves:
        _saves[replica] = BackgroundSaves()
    return _saves[replica]


def finish_saves(mine: BackgroundSaves, root: Place) -> None:
    """Wait for the save in flight of one replica, and for others of this process into the same folder; raises OSError
    if the replica's own could not be written."""
    mine.finish()
    for saves in list(_under_way):
        saves.wait(root)


def wait_saved(replica: Any = None) -> None:
    """Wait until what `un.save(..., background=True)` began is on the disk (or at its address).

    Every rank calls it. Raises `CheckpointError` if it could not be written; earlier checkpoints are intact then.
    `un.save`, `un.load`, `replica.close()` and the end of the program wait too.

    Args:
        replica: That of which the save is. Default: all of this process.

    Example:
        >>> un.save("run/checkpoint", replica, background=True)  # doctest: +SKIP
        >>> un.wait_saved()  # doctest: +SKIP
    """
    chosen = list(_under_way) if replica is None else [_saves[replica]] if replica in _saves else []
    errors = [error for error in (saves.find_error() for saves in chosen) if error is not None]
    if errors:
        raise CheckpointError("; ".join(map(str, errors))) from errors[0]


def _register() -> bool:
    """See to it that a program does not end before what it began is written, nor with status 0 if it could not be;
    False if it is ending already."""
    global _registered
    if _registered != os.getpid():
        # Before the pools of threads end that drivers of addresses use; plain atexit comes after these.
        try:
            getattr(threading, "_register_atexit", atexit.register)(_end)
        except RuntimeError:
            return False
        _registered = os.getpid()
    return not _ending.is_set()


def end_saves() -> None:
    """The program has ended: wait for what it began. Raises `CheckpointError` as `wait_saved` does."""
    global _ending_at
    _ending_at = time.monotonic()
    _ending.set()
    wait_saved()


def _end() -> None:
    if _registered != os.getpid():  # a forked child (a DataLoader's worker) has none of the threads that write
        return
    try:
        end_saves()
    except Exception as error:
        print(f"unisono: {error}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        atexit._run_exitfuncs()
        os._exit(1)
