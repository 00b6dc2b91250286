"""How a process finds the others: `join` reads what its launcher left and picks the transports that fit."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.launchers.runtime import debugger
from unisono.launchers.runtime.frames import hide_frames_of_uncaught, warn_user
from unisono.launchers.runtime.launch_env import Place, number, read_place
from unisono.launchers.runtime.machine import read_boot_id
from unisono.launchers.runtime.membership import Assignment, HostsMembership, Membership, find_membership
from unisono.launchers.runtime.variables import may_share_memory, read_attempt, read_host, read_timeout_s
from unisono.world.elastic import Elastic
from unisono.world.ledger import Ledger
from unisono.world.stores import MEETING_S, agree_on_attempt, open_engine_store, open_store, open_torch_store
from unisono.world.transports import PeerLost, Transport
from unisono.world.transports.liveness import identify_machine
from unisono.world.transports.mapped import PEER_MEMORY
from unisono.world.transports.meeting_page import PAGE_NAME
from unisono.world.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["accelerate", "enter", "find_joined", "join", "meet", "meet_in_store"]

_meetings = itertools.count()
_process: list[World] = []


class _Thread(threading.local):
    world: World | None = None


_thread = _Thread()


def join(device: str | torch.device | None = None) -> World:
    """The world that this process was started in; a world of one if it was started alone.

    Reads what the launcher left (`unisono run`, `torchrun`, or an initialised torch.distributed), meets the
    other ranks, and returns the same world each time. `device` is "cpu" or "cuda"; by default CUDA if
    there is one for every worker of this host.
    """
    if _thread.world is not None:
        return _thread.world
    if not _process:
        _process.append(meet(device))
        _process[0].on_close = _process.clear
        _follow_debugger(_process[0])
    elif device is not None and torch.device(device).type != _process[0].device.type:
        raise ValueError(
            f"this process already joined with device {str(_process[0].device)!r}, got device={str(device)!r}: "
            "give the device at the first un.join()"
        )
    return _process[0]


def _follow_debugger(world: World) -> None:
    transport = world.transport
    if threading.current_thread() is threading.main_thread():
        debugger.follow(
            world.rank,
            world.size,
            lambda mine: [] if transport is None else transport.exchange(mine),
            is_one_host=len(set(world.hosts)) == 1,
        )


def find_joined(*, of_process: bool = False) -> World | None:
    """What `join()` has returned in this thread (`of_process`: in any other than those of `un.run_threads`)."""
    if _thread.world is not None and not of_process:
        return _thread.world
    return _process[0] if _process else None


def enter(world: World | None) -> None:
    """Make `world` what `join()` returns in this thread (None: back to the process's)."""
    _thread.world = world


def meet(device: str | torch.device | None = None) -> World:
    """The world that the environment describes."""
    place = _find_place()
    membership = find_membership()
    if membership is not None:
        return _meet_elastic(membership, place, device)
    rank, size = place.rank, place.size
    local_size = place.local_size or (1 if size == 1 else 0)
    chosen = _choose_device(device, place.local_rank, local_size or 1)
    if size == 1:
        return World(None, device=chosen, hosts=[socket.gethostname()])
    if "UNISONO_REPORT_FD" not in os.environ:  # else the launcher prints the error
        hide_frames_of_uncaught()
    timeout_s = read_timeout_s()
    fd = _take_inherited_page()
    if fd is not None and local_size == size and may_share_memory():
        from unisono.world.transports.shared import SharedTransport

        transport: Transport = SharedTransport.from_inherited(fd, rank, size, timeout_s=timeout_s)
        hosts = [socket.gethostname()] * size
    else:
        from unisono.world.transports.two_level import connect

        transport, hosts = connect(_open_store(place, timeout_s), rank, size, timeout_s=timeout_s)
    return _make_world(transport, hosts, chosen, ledger=_find_ledger())


def _make_world(
    transport: Transport,
    hosts: list[str],
    device: torch.device,
    *,
    name: str = "world",
    ledger: Ledger | None = None,
    check: Callable[[], None] | None = None,
) -> World:
    """The world over a transport, and how its CUDA tensors travel."""
    accelerated = _connect_devices(transport, device, hosts, check)
    return World(transport, device=device, hosts=hosts, accelerated=accelerated, name=name, ledger=ledger)


def _find_ledger() -> Ledger | None:
    """The ledger of the default process group, if that is of our backend: then both write to one."""
    import torch.distributed as dist

    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return getattr(group, "ledger", None)


def _meet_elastic(membership: Membership, place: Place, device: str | torch.device | None) -> World:
    """The first generation of an elastic world; a world of one in a worker that joins later."""
    chosen = _choose_device(device, place.local_rank, place.local_size)
    solo = World(None, device=chosen, hosts=[socket.gethostname()])
    fd = _take_inherited_page()
    form = _form_on_host
    if isinstance(membership, HostsMembership):
        store = _open_store(place, read_timeout_s())
        form = partial(_form_over_hosts, membership, store)
    if membership.joining:
        world = World(None, device=chosen, hosts=[socket.gethostname()])
        world.rank = world.local_rank = place.rank
        world.size = world.local_size = place.size
        world.hosts = (world.host,) * place.size
    else:
        world = form(Assignment(0, place.rank, place.size, page_fd=-1 if fd is None else fd), chosen)
    world.elastic = Elastic(world, membership, solo, form)
    return world


def _form_on_host(given: Assignment, device: torch.device) -> World:
    """The world of a generation whose workers are all on this host."""
    hosts = [socket.gethostname()] * given.size
    name = "world" if given.generation == 0 else f"world.{given.generation}"
    if given.size == 1:
        if given.page_fd >= 0:
            os.close(given.page_fd)
        return World(None, device=device, hosts=hosts, name=name)
    from unisono.world.transports.shared import SharedTransport

    transport = SharedTransport.from_inherited(
        given.page_fd, given.rank, given.size, timeout_s=read_timeout_s(), pids=given.pids
    )
    return _make_world(transport, hosts, device, name=name)


def _form_over_hosts(membership: HostsMembership, store: Store, given: Assignment, device: torch.device) -> World:
    """The world of a generation over several hosts, whose workers meet in the launcher's store."""
    name = "world" if given.generation == 0 else f"world.{given.generation}"
    if given.size == 1:
        return World(None, device=device, hosts=[read_host()], name=name)
    from torch.distributed import PrefixStore

    from unisono.world.transports.interruption import InterruptibleStore, Interruption
    from unisono.world.transports.two_level import connect

    interruption = Interruption()
    membership.watch(given.generation, interruption.end)
    meeting = InterruptibleStore(PrefixStore(f"generation/{given.generation}", store), interruption)
    options: dict[str, Any] = {"timeout_s": read_timeout_s(), "interruption": interruption, "pids": given.pids}
    transport, hosts = connect(meeting, given.rank, given.size, **options)
    return _make_world(transport, hosts, device, name=name, check=interruption.check)


def _take_inherited_page() -> int | None:
    """The descriptor of the page that the launcher left open for its workers, if it is really that.

    Only the first world meets there: it closes the descriptor, whose number may then be that of another world's page.
    """
    text = os.environ.pop("UNISONO_SHM_FD", "")
    try:  # a program that a worker starts inherits the variable, but not the descriptor
        return int(text) if PAGE_NAME in os.readlink(f"/proc/self/fd/{int(text)}") else None
    except (ValueError, OSError):
        return None


def _find_place() -> Place:
    """This process's rank, the size of the world, and the same within its host."""
    import torch.distributed as dist

    place = read_place() or _find_mpi_place() or Place("", 0, 1)
    if dist.is_available() and dist.is_initialized():
        same = (place.rank, place.size) == (dist.get_rank(), dist.get_world_size())
        near = (place.local_rank, place.local_size) if same else (0, 0)
        return Place("torch.distributed", dist.get_rank(), dist.get_world_size(), *near)
    return place


def _find_mpi_place() -> Place | None:
    """The world of mpi4py, if the program uses it and the engine left no variables that we know."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if not MPI.Is_initialized() or world.size == 1:
        return None
    near = world.Split_type(MPI.COMM_TYPE_SHARED)
    place = Place("MPI", world.rank, world.size, near.rank, near.size)
    near.Free()
    return place


def _choose_device(asked: str | torch.device | None, local_rank: int, local_size: int) -> torch.device:
    if asked is None:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found >= local_size:
            return torch.device("cuda", local_rank)
        if found and local_rank == 0:
            warn_user(
                f"this host has {found} CUDA device(s) for {local_size} workers, so all of them train on the CPU: "
                f"start {found} worker(s) here, let them share it by un.join(device='cuda'), or ask for device='cpu'"
            )
        return torch.device("cpu")
    device = torch.device(asked)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device {str(asked)!r} was asked for, but PyTorch sees no CUDA device here "
                f"(torch {torch.__version__}): use device='cpu', or install a CUDA build and driver"
            )
        index = device.index if device.index is not None else local_rank % torch.cuda.device_count()
        if index >= torch.cuda.device_count():
            raise ValueError(f"device {str(asked)!r}: this host has {torch.cuda.device_count()} CUDA device(s)")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {str(asked)!r}")
    return device


def _open_store(place: Place, timeout_s: float) -> Store:
    """The store that the launcher hosts; with a prefix of this attempt, so a restart meets only itself.

    A world that is joined after another was closed is a meeting of its own.
    """
    import torch.distributed as dist

    meeting, patience_s = next(_meetings), min(MEETING_S, timeout_s)
    attempt = read_attempt()
    if dist.is_initialized():
        from torch.distributed.distributed_c10d import _get_default_store

        return dist.PrefixStore(f"unisono/{attempt}/{meeting}", _get_default_store())
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and place.engine == "torchrun":
        raise ValueError(
            f"WORLD_SIZE={os.environ.get('WORLD_SIZE')} but {missing[0]} is not set, so the other ranks cannot be "
            "found: start the program with `unisono run -n N` or torchrun"
        )
    if missing:
        return dist.PrefixStore(f"unisono/{meeting}", open_engine_store(place, meeting, timeout_s=patience_s))
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = not hosted and place.rank == 0
    address = os.environ["MASTER_ADDR"], number("MASTER_PORT")
    store = open_store(*address, serve=serve, hosted=hosted, timeout_s=patience_s)
    if hosted and "UNISONO_ATTEMPT" not in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's own store
        meeting_place = dist.PrefixStore(f"unisono/{meeting}", store)
        attempt = agree_on_attempt(meeting_place, place.rank, place.size, timeout_s=patience_s)
    return dist.PrefixStore(f"unisono/{attempt}/{meeting}", store)


def meet_in_store(
    store: Store, rank: int, size: int, *, timeout_s: float, ledger: Ledger, name: str, inline: bool = True
) -> World:
    """The world of the ranks that meet in `store`: a process group of torch's, or a part of one.

    Each meeting has keys of its own: torch gives a group that is made anew in a process (`destroy_process_group`, then
    `init_process_group`) the names of the former one, whose addresses still lie there.
    """
    if size == 1:
        return World(None, hosts=[socket.gethostname()], ledger=ledger, name=name, inline=inline)
    from torch.distributed import PrefixStore

    from unisono.world.transports.two_level import connect

    former = store.add(f"unisono/met/{rank}", 0)
    meeting = PrefixStore(f"unisono/{former}", store)
    _await_all(meeting, rank, size, timeout_s)
    transport, hosts = connect(meeting, rank, size, timeout_s=timeout_s)
    store.add(f"unisono/met/{rank}", 1)
    return World(transport, hosts=hosts, ledger=ledger, name=name, inline=inline)


def _await_all(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Wait until every rank has come; the store's own timeout may be longer than the group's."""
    keys = [f"here/{r}" for r in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:  # torch's stores have several kinds of it
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        raise PeerLost(
            f"rank {rank} has waited {timeout_s:g} s for {'rank' if len(missing) == 1 else 'ranks'} "
            f"{', '.join(map(str, missing))} of {size}, which did not come to make the group: every rank of it calls "
            "init_process_group or new_group"
        ) from None


def accelerate(world: World, device: torch.device) -> None:
    """Send CUDA tensors of `world` from device to device, if each rank has one of its own, or all the same one.

    Decided once: with the first CUDA tensor, when every rank has chosen its device. Every rank calls it alike.
    """
    if world.transport is not None and not world.is_device_known:
        world.is_device_known = True
        world.use_for_cuda(_connect_devices(world.transport, device, world.hosts))


def _connect_devices(
    transport: Transport, device: torch.device, hosts: Sequence[str], check: Callable[[], None] | None = None
) -> Transport | None:
    """NCCL if every rank has a CUDA device of its own (it refuses two ranks on one), the device's memory if all share
    one; None: through host memory."""
    import torch.distributed as dist

    mine = ["", ""]
    if device.type == "cuda":
        mine = [
            f"{read_boot_id()} {torch.cuda.get_device_properties(device).uuid}",
            f"{identify_machine()} {os.getpid()}",
        ]
    told = [item.decode().split("\n") for item in transport.exchange("\n".join(mine).encode())]
    devices, processes = {one for one, _ in told}, {other for _, other in told}
    if "" in devices:
        return None
    if len(devices) == transport.size:
        return _connect_nccl(transport, device) if dist.is_nccl_available() else None
    one_place = len(devices) == len(set(hosts)) == 1 and len(processes) == transport.size
    return _map_device(transport, device, check) if one_place else None


def _map_device(transport: Transport, device: torch.device, check: Callable[[], None] | None) -> Transport | None:
    """Ranks that share a device map each other's memory, where the system allows that."""
    from unisono.world.transports.cuda_memory import CudaMemory, NotShareable
    from unisono.world.transports.cuda_shared import CudaSharedTransport

    try:
        return CudaSharedTransport.connect(
            transport, lambda: CudaMemory(device), timeout_s=transport.timeout_s, check=check
        )
    except NotShareable as error:
        if transport.rank == 0 and os.environ.get(PEER_MEMORY) != "0":
            warn_user(
                f"CUDA tensors of the workers that share {device} pass through host memory, as they cannot map each "
                f"other's device memory ({error}): `unisono doctor` tries it too, docs/transports.md says what it needs"
            )
        return None


def _connect_nccl(transport: Transport, device: torch.device) -> Transport:
    """Meet over `transport`: rank 0 keeps the store in which NCCL's first key is passed on."""
    from torch.distributed import PrefixStore

    from unisono.world.transports.nccl import NcclTransport

    if transport.is_encrypted and transport.rank == 0:
        warn_user(
            "what hosts send to each other is encrypted, but CUDA tensors travel by NCCL, which does not encrypt: join "
            "the hosts by a VPN (docs/networks.md), or train on the CPU; --no-encrypt says that the network is safe"
        )

    def share(text: str) -> str:
        return transport.exchange(text.encode())[0].decode()

    rank, address, timeout_s = transport.rank, os.environ.get("MASTER_ADDR", "127.0.0.1"), read_timeout_s()
    store = open_torch_store(share, rank, towards=address, timeout_s=min(MEETING_S, timeout_s))
    return NcclTransport(PrefixStore("nccl", store), rank, transport.size, device, timeout_s=timeout_s)
