"""Where workers meet that an engine started without a launcher of ours: plain mpirun, srun or torchrun.

- mpi4py's world, where the program has it already: rank 0 opens a store and MPI carries its address.
- All on one host: rank 0 tells the others the store's port through a local socket named after the job.
- Slurm on several hosts: the first host of the step, at a port that follows from the job's number.
- torchrun's own store, in which an attempt agrees on a name of its own: the count of restarts that torchrun gives to
  workers differs between hosts, and stands still when a host joins or leaves.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
import sys
import time
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING

from unisono.runtime.machine import address_towards
from unisono.runtime.place import Place
from unisono.world.transports import PeerLost
from unisono.world.transports.silence import probe

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

MEETING_S = 300.0


def open_engine_store(place: Place, meeting: int, *, timeout_s: float = MEETING_S) -> Store:
    """A store for the workers of an MPI or Slurm job that have nothing but the engine's variables."""
    if "mpi4py.MPI" in sys.modules:
        return _open_mpi_store(timeout_s)
    if place.local_size == place.size and place.job and sys.platform == "linux":
        return _open_one_host_store(place, meeting, timeout_s)
    if place.engine == "Slurm":
        return _open_slurm_store(place, meeting, timeout_s)
    try:
        import mpi4py.MPI  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{place.engine} started this program in {place.size} workers on several hosts, but not how they reach "
            "each other: install mpi4py (pip install 'unisono[mpi]'), start with `unisono run --on mpi -n N`, or set "
            "MASTER_ADDR (a host's address) and MASTER_PORT (a free port there)"
        ) from error
    return _open_mpi_store(timeout_s)


def open_tcp_store(host: str, port: int, *, serve: bool, timeout_s: float = MEETING_S) -> TCPStore:
    """The store at an address; `serve`: this process keeps it, and listens only there where that can be.

    A name may mean another address here than on other hosts: then all addresses of this host are listened to.
    """
    from torch.distributed import TCPStore

    listener = _listen(host, port) if serve else None
    if not serve:
        _await_server(host, port, timeout_s)
    return TCPStore(
        host,
        port if listener is None else listener.getsockname()[1],
        is_master=serve,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # a later init_process_group of the program may use the same address
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens at an address of this host; None for a name, and for what is no address of this host."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (ValueError, OSError):
        return None  # torch listens, or says why it cannot


def _await_server(host: str, port: int, timeout_s: float) -> None:
    """Until the store's process listens: torch itself tries a refused connection for longer than it is told to."""
    deadline = time.monotonic() + timeout_s
    while (why := probe((host, port), max(0.1, min(3.0, deadline - time.monotonic())))) is not None:
        if time.monotonic() > deadline:
            raise PeerLost(
                f"no store answers at {host}:{port} within {timeout_s:g} s ({why}): the process that keeps it, rank 0 "
                f"or the launcher, has not started or cannot be reached from host {socket.gethostname()}"
            )
        time.sleep(0.02)


def _open_mpi_store(timeout_s: float) -> Store:
    from mpi4py import MPI

    world, store, found = MPI.COMM_WORLD, None, None
    if world.rank == 0:
        store = open_tcp_store("0.0.0.0", 0, serve=True, timeout_s=timeout_s)
        found = ((address_towards("192.0.2.1") or "127.0.0.1"), store.port)
    host, port = world.bcast(found, root=0)
    return store if store is not None else open_tcp_store(host, port, serve=False, timeout_s=timeout_s)


def _open_one_host_store(place: Place, meeting: int, timeout_s: float) -> Store:
    name = f"\0unisono {os.getuid()} {place.engine} {place.job} {meeting}"
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as sock:
        if place.rank == 0:
            sock.bind(name)
            sock.listen(place.size)
            store = open_tcp_store("127.0.0.1", 0, serve=True, timeout_s=timeout_s)
            for _ in range(place.size - 1):
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                other, _ = sock.accept()
                with other:
                    other.sendall(struct.pack("<I", store.port))
            return store
        while True:
            try:
                sock.connect(name)
                break
            except ConnectionRefusedError:  # rank 0 is not there yet
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank 0 did not come to the meeting within {timeout_s:.0f} s") from None
                time.sleep(0.01)
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        port = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))[0]
    return open_tcp_store("127.0.0.1", port, serve=False, timeout_s=timeout_s)


def _open_slurm_store(place: Place, meeting: int, timeout_s: float) -> Store:
    host = place.first_host
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # nodes need not have names that resolve; srun usually runs on the first of them
        host = place.launch_address
    port = 15_000 + zlib.crc32(f"{place.job} {meeting}".encode()) % 15_000
    try:
        return open_tcp_store(host, port, serve=place.rank == 0, timeout_s=timeout_s)
    except RuntimeError as error:
        raise RuntimeError(
            f"the workers of Slurm job {place.job} were to meet at {host}:{port} ({error}): start with `unisono run "
            "--on slurm`, or set MASTER_ADDR and MASTER_PORT to the first node's address and a free port there"
        ) from error


def agree_on_attempt(store: Store, rank: int, size: int, *, timeout_s: float = MEETING_S) -> str:
    """A name that exactly the workers of this attempt agree on, in a store where earlier attempts left theirs.

    Each rank writes a fresh number of its own and waits for an answer to just that number. Rank 0 answers all numbers
    that it sees with the attempt's name until every rank has confirmed it: what an earlier attempt wrote is answered
    too, but nobody reads that, and it is overwritten.
    """
    mine = secrets.token_hex(8)
    if rank != 0:
        store.set(f"hello/{rank}", mine)
        store.wait([f"answer/{mine}"], timedelta(seconds=timeout_s))
        name = store.get(f"answer/{mine}").decode()
        store.set(f"confirmed/{name}/{rank}", "1")
        return name
    deadline, answered = time.monotonic() + timeout_s, set()
    missing = list(range(1, size))
    while missing:
        for other in list(missing):
            if store.check([f"confirmed/{mine}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]) and (number := store.get(f"hello/{other}").decode()) not in answered:
                store.set(f"answer/{number}", mine)
                answered.add(number)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {missing} did not come to the meeting within {timeout_s:.0f} s")
        time.sleep(0.002)
    return mine
