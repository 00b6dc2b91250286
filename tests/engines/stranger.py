"""Somebody who reaches the ports of a run and has no token: writes a pickle that would make a file into every store.

As a program: `python stranger.py FILE ADDRESS:PORT...`, one line for each store that was found.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from engine_commands import Ended, environment

# Its first attempt waits for the stranger, then all are started again, so that whatever lies in a store is read.
VISITED = """
import os, pathlib, sys, time, unisono as un
world = un.join(device="cpu")
world.barrier()
here = pathlib.Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    (here / f"running-{world.rank}").touch()
    while not (here / "visited").exists():
        time.sleep(0.05)
    sys.exit(3)
"""


class _Marker:
    """Unpickled, it makes a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.file, "w")


def write_pickles(file: str, address: str, port: int) -> list[str]:
    """Put the pickle under every key of the store at an address; the keys. Raises if it is no store."""
    from torch.distributed import TCPStore

    socket.create_connection((address, port), 10).close()  # torch would try a refused connection for ever
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    text = base64.b64encode(pickle.dumps(_Marker(file))).decode()
    keys = list(store.list_keys())
    for key in keys:
        store.set(key.removeprefix("/"), text)
    store.wait([key.removeprefix("/") for key in keys])  # answered: so all have been written
    return keys


def listening(there: Sequence[str]) -> list[int]:
    """The ports on which something listens, where a command runs with these words in front."""
    table = subprocess.run(
        [*there, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split() for line in table.splitlines()]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"})


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave nothing that runs behind."""
    try:
        yield
    finally:
        process.kill()


def visit(
    command: Sequence[str],
    folder: Path,
    stranger: Sequence[str],
    hosts: Sequence[tuple[Sequence[str], Sequence[str]]],
) -> Ended:
    """Run a command whose program is VISITED (in `folder`), and visit it from a host while it runs.

    `stranger`: the words that run a command on that host; `hosts`: the same of each host, and the addresses to try for
    its ports. Fails if the pickle was unpickled.
    """
    (folder / "script.py").write_text(VISITED)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {"cwd": folder, "env": environment(), "text": True, "start_new_session": True}
    with subprocess.Popen(command, **options, **pipes) as process, ending(process):
        while process.poll() is None and len(list(folder.glob("running-*"))) < 2:
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        places = [f"{each}:{port}" for there, near in hosts for port in listening(there) for each in near]
        assert places, "nothing listens: this would show nothing"
        words = [*stranger, sys.executable, __file__, str(folder / "marker"), *places]
        print(subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=True).stdout)
        (folder / "visited").touch()
        out, err = process.communicate(timeout=120)
    assert not (folder / "marker").exists(), f"a stranger ran code in this run: {err}"
    return Ended(process.returncode, out, err)


def _try(file: str, place: str) -> None:
    host, _, number = place.rpartition(":")
    try:
        print(place, write_pickles(file, host, int(number)), flush=True)
    except (RuntimeError, OSError) as error:
        print(place, "is no store:", str(error)[:80], flush=True)


if __name__ == "__main__":
    import torch.distributed  # noqa: F401  # not in several threads at once

    tries = [threading.Thread(target=_try, args=(sys.argv[1], place), daemon=True) for place in sys.argv[2:]]
    for each in tries:
        each.start()
    end = time.monotonic() + 6.0  # what is no store may not answer at all
    for each in tries:
        each.join(max(0.0, end - time.monotonic()))
    os._exit(0)
