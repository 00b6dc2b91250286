"""Groups that a program makes itself, by `torch.distributed.init_process_group`: they meet in the run's store, each
under keys of its own, as those of a former group or attempt still lie there.

torch would speak to it without the run's secret. So `open_group_store` stands in for the function by which torch opens
the store at MASTER_ADDR and MASTER_PORT (worker/program.py does that under our launcher, `install` elsewhere).
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.launchers.runtime.channel import read_store_secret
from unisono.launchers.runtime.variables import read_attempt
from unisono.world.stores import open_locked_store, open_torch_store

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["install", "open_group_store"]

_opened = itertools.count()  # all ranks make their groups in one order


def install() -> None:
    """Have torch open the store at MASTER_ADDR and MASTER_PORT with the secret from now on."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name
    if not isinstance(rendezvous._create_c10d_store, partial):
        rendezvous._create_c10d_store = partial(open_group_store, rendezvous._create_c10d_store)


def open_group_store(
    torchs: Callable[..., Store], hostname: str, port: int, rank: int, size: int, timeout: timedelta, *more: Any
) -> Store:
    """The store for one of torch's groups; `torchs` is torch's own way, for any address but that of the run."""
    from torch.distributed import PrefixStore

    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    secret = read_store_secret(hostname, port, hosted=hosted)
    if secret is None or (hostname, str(port)) != (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")):
        return torchs(hostname, port, rank, size, timeout, *more)
    seconds = timeout.total_seconds()
    store = open_locked_store(hostname, port, secret, serve=not hosted and rank == 0, timeout_s=seconds)
    key = f"unisono/torch/{read_attempt()}/{next(_opened)}"
    if not torch.cuda.is_available():
        return PrefixStore(key, store)

    def share(text: str) -> str:
        if rank == 0:
            store.set(key, text)
        return store.get(key).decode()

    return open_torch_store(share, rank, towards=hostname, timeout_s=seconds)
