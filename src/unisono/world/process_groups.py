"""Worlds of ranks that torch has grouped: a process group, or a dimension of a device mesh, as a World."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.launchers.runtime.variables import read_timeout_s
from unisono.world.ledger import Ledger
from unisono.world.rendezvous import meet_in_store
from unisono.world.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["as_world"]

_worlds: weakref.WeakKeyDictionary[Any, World] = weakref.WeakKeyDictionary()
_meetings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # each has keys of its own in the store


def as_world(given: Any) -> World:
    """`given` if it is a world; of a process group, or of a mesh of one dimension, the world of its ranks.

    Ranks of one group call it alike; the same group gives the same world again, until that is closed.
    """
    if isinstance(given, World):
        return given
    group = _find_group(given)
    world = _worlds.get(group)
    if world is None:
        world = _worlds[group] = _meet(group, given)
        world.on_close = partial(_worlds.pop, group, None)
    return world


def _find_group(given: Any) -> ProcessGroup:
    import torch.distributed as dist

    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(given, dist.ProcessGroup):
            return given
        if isinstance(given, DeviceMesh):
            if given.ndim != 1:
                names = given.mesh_dim_names or ()
                how = f'mesh["{names[0]}"]' if names else 'init_device_mesh(…, mesh_dim_names=("data", …))["data"]'
                raise ValueError(
                    f"world must be one dimension of a mesh, got one of {given.ndim} of shape {tuple(given.shape)}: "
                    f"give the one whose ranks train together, such as {how}"
                )
            return given.get_group()
    raise TypeError(
        "world must be a World such as un.join() gives, a torch.distributed process group, or a DeviceMesh of one "
        f"dimension, got {given!r}"
    )


def _meet(group: Any, given: Any) -> World:
    """A world of the group's ranks; its collectives do not mix with the group's own."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_process_group_store

    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the process group that un.parallel was given: only its ranks call it")
    ledger = getattr(group, "ledger", None)  # of our backend: one for all
    rank, size = group.rank(), group.size()
    number = _meetings[group] = _meetings.get(group, 0) + 1
    named = f"{group.group_desc} " if group.group_desc != "undefined" else "group "
    world = meet_in_store(
        dist.PrefixStore(f"unisono/world/{number}", _get_process_group_store(group)),
        rank,
        size,
        timeout_s=read_timeout_s(),
        ledger=ledger if ledger is not None else Ledger(rank),
        name=f"world of {named}{group.group_name}",
        inline=False,
    )
    if getattr(given, "device_type", "cpu") == "cuda":
        world.device = torch.device("cuda", torch.cuda.current_device())
    return world
