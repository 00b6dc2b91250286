"""Large operations between ranks by sockets: any number of ranks, parts of any size, over one lane or several."""

from __future__ import annotations

import socket
import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from socket_ranks import run_ranks
from unisono.world.transports import socket_links
from unisono.world.transports.flows import Flow, Piece
from unisono.world.transports.rings import PIECE
from unisono.world.transports.sockets import SocketTransport
from unisono.world.transports.streams import InStream, OutStream, Patience

pytestmark = pytest.mark.timeout(60)


def draw(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize(("size", "n"), [(16, 40_000), (3, 40_001), (3, 2_000_003), (2, 900_000)])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_reduce_scatter_ends_with_parts_of_any_size(
    size: int, n: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 ranks each part has 20 KB: all are on their way before the first rank would be told that one has come."""
    monkeypatch.setattr(socket_links, "_count_lanes", lambda: lanes)
    inputs = [draw(r, n) for r in range(size)]
    counts = [n // size + (r < n % size) for r in range(size)]
    wanted = torch.stack(inputs).sum(0).split(counts)

    def work(transport: SocketTransport) -> torch.Tensor:
        out = torch.empty(counts[transport.rank], dtype=torch.float64)
        transport.reduce_scatter(inputs[transport.rank], counts, "sum", out)
        return out

    for found, part in zip(run_ranks(work, size), wanted, strict=True):
        assert not isinstance(found, Exception), found
        torch.testing.assert_close(found, part)


@pytest.mark.parametrize("lanes", [1, 3])
def test_an_all_to_all_gives_each_rank_its_part_its_own_included(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_links, "_count_lanes", lambda: lanes)
    sizes = [[10, 0, 700_000], [90_000, 1_300_000, 3], [0, 5, 600_000]]  # [from][to]

    def work(transport: SocketTransport) -> list[torch.Tensor]:
        r = transport.rank
        outs = [torch.full((sizes[s][r],), -1.0, dtype=torch.float64) for s in range(3)]
        transport.all_to_all([draw(3 * r + to, sizes[r][to]) for to in range(3)], outs)
        return outs

    for r, outs in enumerate(run_ranks(work, 3)):
        assert not isinstance(outs, Exception), outs
        for source, out in enumerate(outs):
            assert torch.equal(out, draw(3 * source + r, sizes[source][r]))


def test_a_long_piece_is_passed_on_before_it_is_whole() -> None:
    (before, near), (far, after) = socket.socketpair(), socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    before.settimeout(20.0)
    after.settimeout(20.0)
    source, out = InStream(lambda: None), OutStream(lambda: (far, b""))
    source.hand(near)
    data = bytes(range(256)) * (3 * PIECE // 256)
    room = memoryview(bytearray(len(data)))
    flow = Flow(out, source, [], [Piece(room, None, room, passed=PIECE)])
    thread = threading.Thread(target=flow.run, args=(Patience(20.0, lambda: None, lambda: None),))
    thread.start()
    with before, after, after.makefile("rb") as came:
        before.sendall(data[:PIECE])
        early = came.read(PIECE)
        before.sendall(data[PIECE:])
        assert early + came.read(len(data) - PIECE) == data
        after.sendall(len(data).to_bytes(8, "little"))  # it has all
        thread.join()
        source.close()
        out.close()


def test_large_gradients_are_exchanged_where_they_are_and_small_ones_in_a_line() -> None:
    first = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 3)).double()

    def work(transport: SocketTransport) -> list[torch.Tensor]:
        world, model = un.World(transport, hosts=["a", "b"]), deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        replica: Any = un.parallel(model, optimizer, "allreduce", world=world)
        for step in range(3):
            optimizer.zero_grad()
            model(draw(10 * step + world.rank, 5 * 300).view(5, 300)).square().sum().backward()
            optimizer.step()
        (bucket,) = replica.windows.buckets
        assert [bucket.names[k] for k in bucket.apart] == ["0.weight"]
        return [p.detach().clone() for p in model.parameters()]

    found = run_ranks(work, 2)
    model = deepcopy(first)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(3):
        optimizer.zero_grad()
        (sum(model(draw(10 * step + r, 5 * 300).view(5, 300)).square().sum() for r in range(2)) / 2).backward()
        optimizer.step()
    for each in found:
        assert not isinstance(each, Exception), each
        for p, wanted in zip(each, model.parameters(), strict=True):
            torch.testing.assert_close(p, wanted.detach())
