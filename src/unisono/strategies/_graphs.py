"""Replicas whose models differ from rank to rank: parameters as lines to send, whom to send them to, and the mean.

What decentralised and asynchronous averaging share. A graph says who hears whom in each exchange; its weights make
a doubly stochastic matrix, so the mean over the ranks stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.batch_norm import move_batch_norm
from unisono.strategies._periodic import PeriodicReplica
from unisono.strategy import Strategy, share
from unisono.world import World

Graph = Literal["all", "shift_one", "ring", "exponential"]


class Neighbours(NamedTuple):
    """Whom a rank sends to, whom it hears, and how much each of those counts; it counts the rest itself."""

    to: tuple[int, ...]
    heard: tuple[int, ...]
    weight: float

    @property
    def own(self) -> float:
        """What my own values count."""
        return 1.0 - self.weight * len(self.heard)


def neighbours(graph: Graph, t: int, rank: int, size: int) -> Neighbours:
    """The neighbours in exchange `t`.

    >>> neighbours("ring", 0, 0, 4).heard, neighbours("exponential", 1, 0, 8).to
    ((3, 1), (2,))
    """
    if size == 1:
        return Neighbours((), (), 0.0)
    if graph == "all":
        others = tuple(r for r in range(size) if r != rank)
        return Neighbours(others, others, 1.0 / size)
    if graph == "shift_one":
        half = size // 2
        peer = (t + rank) % half + half if rank < half else (rank - half - t) % half
        return Neighbours((peer,), (peer,), 0.5)
    if graph == "exponential":
        hop = 1 << t % (size - 1).bit_length()
        return Neighbours(((rank + hop) % size,), ((rank - hop) % size,), 0.5)
    both = tuple(dict.fromkeys([(rank - 1) % size, (rank + 1) % size]))
    return Neighbours(both, both, 1.0 / (1 + len(both)))


class Lines:
    """Parameters as lines of memory without gaps, one for each dtype and device.

    `wide`: 16-bit numbers in lines of float32.
    """

    def __init__(self, params: Sequence[Tensor], *, wide: bool = False) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for param in params:
            groups.setdefault((param.dtype, param.device), []).append(param)
        self.params = [p for group in groups.values() for p in group]
        self._groups = list(groups.values())
        self._wide = wide

    def new(self) -> list[Tensor]:
        """Lines of unset memory."""
        made = []
        for group in self._groups:
            small = self._wide and group[0].is_floating_point() and group[0].element_size() < 4
            dtype = torch.float32 if small else group[0].dtype
            made.append(torch.empty(sum(p.numel() for p in group), dtype=dtype, device=group[0].device))
        return made

    def filled(self) -> list[Tensor]:
        """Lines with the parameters' values."""
        made = self.new()
        self.fill(made)
        return made

    def fill(self, lines: Sequence[Tensor]) -> None:
        """Copy the parameters' values into lines."""
        torch._foreach_copy_(self.views(lines), [p.detach() for p in self.params])

    def put(self, lines: Sequence[Tensor]) -> None:
        """Make the lines' values the parameters'."""
        torch._foreach_copy_([p.detach() for p in self.params], self.views(lines))

    def views(self, lines: Sequence[Tensor]) -> list[Tensor]:
        """Views of lines in the shapes of `params`, and in their order."""
        views: list[Tensor] = []
        for line, group in zip(lines, self._groups, strict=True):
            parts = line.split([p.numel() for p in group])
            views += [part.view(p.shape) for part, p in zip(parts, group, strict=True)]
        return views


Received = list[list[Tensor]]  # by the rank heard: its lines


def swap(
    channel: World, sent: Sequence[Tensor], who: Neighbours, into: Sequence[Sequence[Tensor]], tag: str
) -> Callable[[], Received]:
    """Begin to send lines to neighbours and to receive theirs into memory; the function waits for them."""
    if channel.has_nccl and sent and sent[0].is_cuda:  # sends and receives of one stream must come as one call
        parts = [[line if r in who.to else line[:0] for r in range(channel.size)] for line in sent]
        came = [channel.all_to_all(part, tag=tag) for part in parts]
        return lambda: [[handle.wait()[r] for handle in came] for r in who.heard]
    sending = [channel.send(line, peer, tag=tag) for peer in who.to for line in sent]
    hearing = [channel.recv(line, peer, tag=tag) for peer, lines in zip(who.heard, into, strict=True) for line in lines]

    def finish() -> Received:
        for handle in (*hearing, *sending):
            handle.wait()
        return [list(lines) for lines in into]

    return finish


class ApartReplica(PeriodicReplica):
    """A replica whose parameters are this rank's own. The model to evaluate is the mean over the ranks.

    A method says how it starts and stops its exchange. In a checkpoint every rank's model is kept where it differs.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy, *, accumulate: int
    ) -> None:
        super().__init__(model, optimizer, world, strategy, accumulate=accumulate)
        self.lines = self._lay_out()

    def start(self) -> None:
        """Begin to talk to the ranks of `self.world`; their models are the same now."""
        raise NotImplementedError

    def stop(self) -> None:
        """Talk no more."""
        raise NotImplementedError

    def _lay_out(self) -> Lines:
        self._exchanged = {p for p in self.model.parameters() if p.requires_grad}
        return Lines([p for p in self.model.parameters() if p in self._exchanged])

    def check_parameters(self) -> None:
        """Refuse parameters that were unfrozen since."""
        for name, param in self.model.named_parameters():
            if param.requires_grad and param not in self._exchanged:
                raise RuntimeError(
                    f"{name!r} was frozen when the exchange began and learns now: ranks would drift apart in it. "
                    "Call replica.rebind(replica.world) on every rank after unfreezing"
                )

    @torch.no_grad()
    def consolidate(self) -> nn.Module:
        """A copy that holds the mean over the ranks, with the same bits on each; training goes on undisturbed."""
        self.meet_if_due()
        made = self.copied()
        _become_mean(made, self.world)
        return made

    def rebind(self, world: World, *, source: int = 0) -> str:
        self.stop()
        mine = [self.world.size, self.step]
        self.move_to(world)
        every = world.gather_objects(mine)
        same = [r for r, other in enumerate(every) if other == every[source]]
        stayed = same if every[source][0] > 1 else [source]
        with torch.no_grad():
            if len(stayed) == 1:
                share(self.model, world, source)
            else:
                _become_mean(self.model, world, stayed, source)
        packed = world.broadcast_object(
            {"optimizer": self.optimizer.state_dict(), "step": self.step, "steps": world.ledger.step_count}, source
        )
        if world.rank not in stayed:
            self.optimizer.load_state_dict(packed["optimizer"])
            self.step = packed["step"]
            world.ledger.resume(packed["steps"])
        move_batch_norm(self.model, world)
        self.lines = self._lay_out()
        self.start()
        return (
            f"every rank goes on at step {self.step} with the mean of the models of {len(stayed)} rank(s) that stayed; "
            f"these keep their optimizers, {world.size - len(stayed)} other(s) have rank {source}'s; gradients that "
            "were not stepped are dropped"
        )

    def close(self) -> None:
        super().close()
        self.stop()


def _become_mean(model: nn.Module, world: World, ranks: Sequence[int] | None = None, source: int = 0) -> None:
    """Numbers with a fraction become the mean over the ranks (or over some of them), others rank `source`'s."""
    if world.size == 1:
        return
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    means = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    if ranks is not None:
        for t in means:
            t.mul_(1.0 / len(ranks)) if world.rank in ranks else t.zero_()
    world.all_reduce(means, "mean" if ranks is None else "sum", tag="consolidate").wait()
    world.broadcast([t for t in tensors if not (t.is_floating_point() or t.is_complex())], source).wait()
