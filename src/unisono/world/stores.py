"""Stores for workers that an engine started without a launcher of ours: plain mpirun, srun or torchrun.

- mpi4py's world, where the program has it already: rank 0 opens a store and MPI carries its address and secret.
- All on one host: rank 0 tells the others the store's port and secret through a local socket named after the job.
- Slurm on several hosts: the first host of the step, at a port that follows from the job's number.
- torchrun's own store, in which an attempt agrees on a name of its own: the count of restarts that torchrun gives to
  workers differs between hosts, and stands still when a host joins or leaves.

A store asks for a secret where one can reach the workers unseen, or the user gives one (UNISONO_SECRET). Else it is
torch's own, which knows none.
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
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from unisono.launchers.runtime.addresses import address_towards, find_address_for_others, is_loopback, open_listener
from unisono.launchers.runtime.channel import read_store_secret
from unisono.launchers.runtime.launch_env import Place
from unisono.launchers.runtime.store_server import StoreServer
from unisono.world.transports import PeerLost
from unisono.world.transports.connections import StorePatience, probe

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

    from unisono.world.locked_store import LockedStore

MEETING_S = 300.0
_SECRET_BYTES = 32


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


def open_store(host: str, port: int, *, serve: bool, hosted: bool = False, timeout_s: float = MEETING_S) -> Store:
    """The store at an address: one that asks for the secret in the environment, if there is any, else torch's.

    `hosted`: whoever started the workers keeps it; `serve`: this process does.
    """
    secret = read_store_secret(host, port, hosted=hosted)
    if secret is None:
        return open_tcp_store(host, port, serve=serve, timeout_s=timeout_s)
    if not hosted:
        from unisono.world.torch_groups import install

        install()  # a later init_process_group of the program may use the same address
    return open_locked_store(host, port, secret, serve=serve, timeout_s=timeout_s)


def open_locked_store(host: str, port: int, secret: bytes, *, serve: bool, timeout_s: float = MEETING_S) -> LockedStore:
    """The store at an address that asks for `secret`; `serve`: this process keeps it, as in `open_tcp_store`."""
    from unisono.world.locked_store import LockedStore

    server = _served.get((host, port)) if serve and port else None  # as a later group of this program finds it
    if serve and server is None:
        from unisono.launchers.runtime.encryption import is_control_encrypted

        listener = _listen(host, port) or open_listener("", ports=str(port or ""))
        is_encrypted = is_control_encrypted(is_one_host=is_loopback(host))
        server = StoreServer(listener, secret, is_encrypted=is_encrypted)
        server.start()
        _served[host, server.address[1]] = server
    address = host, server.address[1] if server is not None else port
    key = (*address, secret)
    store = _opened.get(key)
    if store is None or store.is_broken:
        store = _opened[key] = LockedStore(*address, secret, timeout_s=timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


# Of this process, to its end: each world that is joined after another was closed meets in the same.
_opened: dict[tuple[str, int, bytes], LockedStore] = {}
_served: dict[tuple[str, int], StoreServer] = {}


def open_tcp_store(host: str, port: int, *, serve: bool, timeout_s: float = MEETING_S) -> TCPStore:
    """torch's store at an address; `serve`: this process keeps it, and listens only there if possible.

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


def open_torch_store(share: Callable[[str], str], rank: int, *, towards: str, timeout_s: float = MEETING_S) -> TCPStore:
    """torch's own store, kept by rank 0, for NCCL: that asks it from threads of its own, which may outlive Python.

    It knows no secret, as NCCL knows none, and listens at one address: that from which rank 0 speaks to `towards`.
    `share` gives every rank the text of rank 0.
    """
    if rank == 0:
        store = open_tcp_store(address_towards(towards) or "127.0.0.1", 0, serve=True, timeout_s=timeout_s)
        share(f"{store.host} {store.port}")
        return store
    host, port = share("").split()
    return open_tcp_store(host, int(port), serve=False, timeout_s=timeout_s)


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens at an address of this host; None for a name, and for what is no address of this host."""
    host = "127.0.0.1" if host == "localhost" else host
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (ValueError, OSError):
        return None  # torch listens, or says why it cannot


def _await_server(host: str, port: int, timeout_s: float) -> None:
    """Wait until the store's process listens: torch itself retries a refused connection for longer than its timeout."""
    patience = StorePatience(host, port, timeout_s)
    while (why := probe((host, port), patience.limit(3.0))) is not None:
        patience.check(why)
        time.sleep(0.02)


def _open_mpi_store(timeout_s: float) -> Store:
    from mpi4py import MPI

    world, store, found = MPI.COMM_WORLD, None, None
    near = world.Split_type(MPI.COMM_TYPE_SHARED)
    is_one_host = near.size == world.size
    near.Free()
    if world.rank == 0:
        host = "127.0.0.1" if is_one_host else find_address_for_others() or "127.0.0.1"
        secret = secrets.token_bytes(32)
        store = open_locked_store(host, 0, secret, serve=True, timeout_s=timeout_s)
        found = (host, store.port, secret)
    host, port, secret = world.bcast(found, root=0)
    return store if store is not None else open_locked_store(host, port, secret, serve=False, timeout_s=timeout_s)


def _open_one_host_store(place: Place, meeting: int, timeout_s: float) -> Store:
    name = f"\0unisono {os.getuid()} {place.engine} {place.job} {meeting}"
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as sock:
        if place.rank == 0:
            sock.bind(name)
            sock.listen(place.size)
            secret = secrets.token_bytes(_SECRET_BYTES)
            store = open_locked_store("127.0.0.1", 0, secret, serve=True, timeout_s=timeout_s)
            told = 0
            while told < place.size - 1:
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                other, _ = sock.accept()
                with other:
                    if _is_mine(other):
                        other.sendall(struct.pack("<I", store.port) + secret)
                        told += 1
            return store
        while True:
            try:
                sock.connect(name)
                break
            except ConnectionRefusedError:  # rank 0 is not there yet
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank 0 did not come to the meeting within {timeout_s:.0f} s") from None
                time.sleep(0.01)
        if not _is_mine(sock):
            raise PermissionError(f"another user's process listens at the local socket {name[1:]!r}, where ranks meet")
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        told_bytes = sock.recv(4 + _SECRET_BYTES, socket.MSG_WAITALL)
    if len(told_bytes) != 4 + _SECRET_BYTES:
        raise PeerLost("rank 0 ended before it had said where the ranks meet")
    port, secret = struct.unpack("<I", told_bytes[:4])[0], told_bytes[4:]
    return open_locked_store("127.0.0.1", port, secret, serve=False, timeout_s=timeout_s)


def _is_mine(sock: socket.socket) -> bool:
    """Whether the other end of a local socket is a process of my user: anybody may find its name."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def _open_slurm_store(place: Place, meeting: int, timeout_s: float) -> Store:
    host = place.first_host
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # nodes need not have names that resolve; srun usually runs on the first of them
        host = place.launch_address
    port = 15_000 + zlib.crc32(f"{place.job} {meeting}".encode()) % 15_000
    try:
        return open_store(host, port, serve=place.rank == 0, timeout_s=timeout_s)
    except (RuntimeError, OSError) as error:
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
