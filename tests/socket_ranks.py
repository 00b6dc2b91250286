"""Ranks that are threads of the test and reach each other by sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import HashStore

from unisono.world.transports.sockets import SocketTransport


def run_ranks(
    work: Callable[[SocketTransport], Any], size: int = 2, *, timeout_s: float = 30.0, names: Sequence[str] = ()
) -> list[Any]:
    """`work` on every rank, each a thread, with a name if there are `names`; its result, or its error."""
    results: list[Any] = [None] * size
    store = HashStore()

    def run(rank: int) -> None:
        try:
            transport = SocketTransport(store, rank, size, timeout_s=timeout_s)
            results[rank] = work(transport)
            transport.close()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), name=names[r] if names else None) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
