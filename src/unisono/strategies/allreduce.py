"""Synchronous all-reduce: after backward, every gradient is the mean over the workers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.batch_norm import move_batch_norm
from unisono.buckets import BUCKET_BYTES, LARGE_BUCKET_BYTES
from unisono.exchange.overlap import Exchange
from unisono.exchange.reduction import Reduction, check_real, overlap_pays
from unisono.exchange.windows import Counter
from unisono.reducer import Reducer
from unisono.reducers.dense import dense
from unisono.strategy import Replica, Strategy, share, share_buffers
from unisono.world import World


@dataclass(frozen=True)
class allreduce(Strategy):
    """Exchange gradients in every window: g = (1/N) sum of all g_i, while backward goes on.

    reducer: how the mean is taken (None: exactly).
    accumulate: backward passes a window; gradients add up locally and are exchanged with the last one.
    buffers: "broadcast" rank 0's after every exchange, "average" them, or leave them "local".
    overlap: exchange a bucket as soon as it is full, or all after backward. None: as soon as it is full, but
        where workers share memory and leave no core free, an exchange would only take compute's place: after.
    bucket_bytes: how much travels together. None: 25 MiB, or 100 MiB where a GPU compresses.
    """

    reducer: Reducer | None = None
    accumulate: int = 1
    buffers: Literal["broadcast", "average", "local"] = "broadcast"
    overlap: bool | None = None
    bucket_bytes: int | None = None

    def bind(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        for name, meaning in (("accumulate", "backward passes a window"), ("bucket_bytes", "bytes a bucket")):
            value = getattr(self, name)
            if name == "bucket_bytes" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} counts {meaning}: expected a whole number of at least 1, got {value!r}")
        if self.buffers not in ("broadcast", "average", "local"):
            raise ValueError(f"buffers must be 'broadcast', 'average' or 'local', got {self.buffers!r}")
        if self.overlap not in (True, False, None):
            raise ValueError(f"overlap must be True, False or None (as it pays), got {self.overlap!r}")
        if self.reducer is not None and not isinstance(self.reducer, Reducer):
            raise TypeError(
                f"reducer must be a Reducer such as unisono.reducers.dense.dense(), got {self.reducer!r}; for a text, "
                f"write it into the spec: 'allreduce(reducer={self.reducer})'"
            )
        return AllReduceReplica(model, optimizer, world, self)


class AllReduceReplica(Replica):
    """Gradients through buckets and a reducer; in a world of one there is only counting to do."""

    strategy: allreduce

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: allreduce) -> None:
        super().__init__(model, optimizer, world, strategy)
        self.reducer = strategy.reducer if strategy.reducer is not None else dense()
        if self.reducer.check is not None:
            self.reducer.check(optimizer, world)
        self._reduction = Reduction(self.reducer, optimizer, self._share_buffers)
        self._exchange: Exchange | Counter | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        if self.world.size == 1 and self.reducer.exact:
            last = [p for p in self.model.parameters() if p.requires_grad][-1]  # the first that backward reaches
            self._exchange = Counter(last, accumulate=self.strategy.accumulate, advance=self.advance)
            return
        dense_ones, sparse_ones = _by_kind(self.model)
        check_real(self.reducer, dense_ones)
        pays = overlap_pays(self.world)
        self._exchange = Exchange(
            dense_ones,
            sparse_ones,
            self.world,
            self._reduction,
            bucket_bytes=self._bucket_bytes(),
            overlap=pays if self.strategy.overlap is None else self.strategy.overlap,
            inline=self.reducer.stages is None or not pays,
            accumulate=self.strategy.accumulate,
            advance=self.advance,
        )
        self._reduction.warn_if_more_than_dense(self.world)

    def _bucket_bytes(self) -> int:
        if self.strategy.bucket_bytes is not None:
            return self.strategy.bucket_bytes
        on_gpu = any(p.is_cuda for p in self.model.parameters())
        return LARGE_BUCKET_BYTES if on_gpu and not self.reducer.exact else BUCKET_BYTES

    def _share_buffers(self, world: World) -> None:
        share_buffers([b.detach() for b in self.model.buffers()], self.strategy.buffers, world)

    def before_step(self) -> None:
        if self._exchange is not None:
            self._exchange.before_step()

    def after_step(self) -> None:
        if self._exchange is not None:
            self._exchange.after_step()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._exchange.no_sync() if self._exchange is not None else super().no_sync()

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        super().watch(scaler)
        self._reduction.scale = scaler.get_scale

    def state_dict(self) -> dict[str, Any]:
        kept = self._reduction.state_dict()
        return {"shared": {"step": self.step, "reducer": kept["shared"]}, "local": {"reducer": kept["local"]}}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        self.step = state["shared"]["step"]
        if "each" not in state["shared"].get("reducer", ()):  # another strategy's checkpoint
            return
        parts = [state["local"]] if same_world else state["locals"]
        self._reduction.load_state_dict(state["shared"]["reducer"], [part["reducer"] for part in parts])

    def rebind(self, world: World, *, source: int = 0) -> str:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        mine = {"size": self.world.size, "step": self.step, "own": self._reduction.keeps_own}
        self.world = world
        self.model.zero_grad()  # those of the former world: a rank that comes has none
        told = self._carry(mine, source)
        if world.size > 1:
            share(self.model, world, source)
            packed = world.broadcast_object(
                {"optimizer": self.optimizer.state_dict(), "step": self.step, "steps": world.ledger.step_count}, source
            )
            if world.rank != source:
                self.optimizer.load_state_dict(packed["optimizer"])
                self.step = packed["step"]
                world.ledger.resume(packed["steps"])
        move_batch_norm(self.model, world)
        self._start()
        return (
            f"model, optimizer and step {self.step} from rank {source} of {world.size}; "
            f"gradients that were not stepped are dropped{told}"
        )

    def _carry(self, mine: dict[str, Any], source: int) -> str:
        """Bring the reducer's state into the new world; says what became of the ranks' own parts of it."""
        every = self.world.gather_objects(mine)
        former, shared = every[source], self.world.broadcast_object(self._reduction.state_dict()["shared"], source)
        stayed = [
            r for r, other in enumerate(every) if (other["size"], other["step"]) == (former["size"], former["step"])
        ]
        keep = self.world.rank in stayed
        self._reduction.move(shared, keep=keep, factor=self.world.size / former["size"])
        if not former["own"]:
            return ""
        lost = former["size"] - len(stayed)
        told = f"; what {len(stayed)} of the {former['size']} former ranks had still to send stays with them"
        if self.world.size != former["size"]:
            told += f", times {self.world.size}/{former['size']}"
        return told + (f"; that of {lost} lost rank(s) is gone" if lost > 0 else "")

    def close(self) -> None:
        super().close()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None


def _by_kind(model: nn.Module) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Parameter]]]:
    """The parameters with dense gradients, and those of embeddings with sparse ones."""
    sparse: set[Tensor] = {
        m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
    }
    named = list(model.named_parameters())
    return [(n, p) for n, p in named if p not in sparse], [(n, p) for n, p in named if p in sparse]
