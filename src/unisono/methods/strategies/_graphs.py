"""Models that differ from rank to rank: parameters as lines to send, and whom to send them to.

What decentralised and asynchronous averaging share. A graph says who hears whom in each exchange; its weights make
a doubly stochastic matrix, so the mean over the ranks stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from unisono.methods.buckets import FlatLayout, find_wide_dtype
from unisono.world import World

Graph = Literal["all", "shift_one", "ring", "exponential"]


class Neighbours(NamedTuple):
    """Whom a rank sends to, whom it hears, and how much each of those counts; it counts the rest itself."""

    to: tuple[int, ...]
    heard: tuple[int, ...]
    weight: float

    @property
    def own(self) -> float:
        """The weight of this rank's own values in the mean."""
        return 1.0 - self.weight * len(self.heard)


def neighbours(graph: Graph, t: int, rank: int, size: int) -> Neighbours:
    """The neighbours in exchange `t`; of an array of ranks, an array for each neighbour (but for "all").

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
        upper = rank // half  # 0 in the lower half, 1 in the upper
        peer = (rank + t * (1 - 2 * upper)) % half + half * (1 - upper)
        return Neighbours((peer,), (peer,), 0.5)
    if graph == "exponential":
        hop = 1 << t % (size - 1).bit_length()
        return Neighbours(((rank + hop) % size,), ((rank - hop) % size,), 0.5)
    both = ((rank - 1) % size, (rank + 1) % size) if size > 2 else ((rank - 1) % size,)
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
        # Contiguous: a line is mixed with other ranks' lines, number by number.
        self._layouts = [FlatLayout(group, align_bytes=0, contiguous=True) for group in groups.values()]
        self._kinds = [(find_wide_dtype(dtype) if wide else dtype, device) for dtype, device in groups]

    def new(self) -> list[Tensor]:
        """Lines of unset memory."""
        pairs = zip(self._layouts, self._kinds, strict=True)
        return [torch.empty(layout.numel, dtype=dtype, device=device) for layout, (dtype, device) in pairs]

    def copy(self) -> list[Tensor]:
        """Lines with the parameters' values."""
        made = self.new()
        self.fill(made)
        return made

    def fill(self, lines: Sequence[Tensor]) -> None:
        """Copy the parameters' values into lines."""
        torch._foreach_copy_(self.views(lines), [p.detach() for p in self.params])

    def put(self, lines: Sequence[Tensor]) -> None:
        """Copy the lines' values into the parameters."""
        torch._foreach_copy_([p.detach() for p in self.params], self.views(lines))

    def views(self, lines: Sequence[Tensor]) -> list[Tensor]:
        """Views of lines in the shapes of `params`, and in their order."""
        pairs = zip(self._layouts, lines, strict=True)
        return [view for layout, line in pairs for view in layout.views(line)]


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


class ExchangedParameters:
    """The parameters that ranks average, as lines; none may become trainable while ranks exchange them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.params = [p for p in model.parameters() if p.requires_grad]
        self._known = set(self.params)

    def check(self) -> None:
        """Refuse parameters that were unfrozen since the exchange began."""
        for name, param in self._model.named_parameters():
            if param.requires_grad and param not in self._known:
                raise RuntimeError(
                    f"{name!r} was frozen when the exchange began and learns now: ranks would drift apart in it. "
                    "Call replica.rebind(replica.world) on every rank after unfreezing"
                )
