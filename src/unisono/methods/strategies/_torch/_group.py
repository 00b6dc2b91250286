"""What the methods of torch's own share: a process group of torch's, and windows that end with the backward pass."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer

from unisono.methods.exchange.windows import if_alive
from unisono.methods.strategy import Replica, Strategy
from unisono.world import World
from unisono.world.ledger import Record

_TIMEOUT = timedelta(minutes=10)


class TorchReplica(Replica):
    """Counts a window for each backward pass, after all that torch does at its end.

    The ledger has an exchange from the end of backward on; what torch does before is hidden, or part of compute.
    """

    slow_ranks = "ignore"
    bytes_by_formula = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy) -> None:
        super().__init__(model, optimizer, world, strategy)
        join_group(world)
        self._passes_begun = -1  # the backward pass that is under way
        self._ended_at = 0.0  # when backward itself was over
        self._window_ended = False

    def watch_backward(self, params: Iterable[torch.Tensor]) -> None:
        """Follow backward passes, by hooks on these parameters."""
        ready = weakref.WeakMethod(self._ready)
        self._hooks += [
            p.register_post_accumulate_grad_hook(partial(if_alive, ready, "")) for p in params if p.requires_grad
        ]

    def _ready(self, _name: str, _param: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._passes_begun:
            self._passes_begun = task
            Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        """Backward is over; what torch still waits for comes with a callback of its own, after this one."""
        self._ended_at = self.world.ledger.clock()
        Variable._execution_engine.queue_callback(self._end_exchange)

    def _end_exchange(self) -> None:
        if self.is_syncing():
            self.note_exchange(self._ended_at, self.world.ledger.clock())
            self._window_ended = True
            self.advance()

    def is_syncing(self) -> bool:
        """Whether this backward pass ends a window."""
        return True

    def note_exchange(self, start: float, end: float) -> None:
        """Enter a window's exchange in the ledger: the program waited for it from `start` to `end`."""
        ledger = self.world.ledger
        record = Record("torch", "gradients", self.bytes_a_window(), "torch", self.step, 0, start, end=end)
        ledger.close_span("blocked", start, end)
        ledger.close_record(record)

    def bytes_a_window(self) -> int:
        """What a rank sends in a window, by formula."""
        raise NotImplementedError

    def before_step(self) -> None:
        if not self._window_ended:  # a step without a backward pass
            self.advance()

    def after_step(self) -> None:
        self._window_ended = False

    def switch(self, strategy: str | Strategy) -> Replica:
        raise ValueError("a method of torch's own is there to compare with: it cannot be switched in mid-run")


def join_group(world: World) -> None:
    """Make torch's default process group of the world's ranks, unless the program has made one."""
    if net := os.environ.get("UNISONO_NET", "") if world.size > 1 else "":
        raise ValueError(
            f"the workers' own transport emulates the link ({net}), and what torch sends does not pass through it: its "
            "times would be those of the machine. The kernel can hold torch back too: as root, with --net without a "
            "latency"
        )
    if dist.is_initialized():
        return
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if world.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=_TIMEOUT)
