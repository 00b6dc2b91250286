"""A world of one on a GPU, where gradients are seen to once a pass: it trains as plain PyTorch, and as on the CPU. Most
of that is Python, and is tried on the CPU too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.kernels.graphs import Graphs

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WHOLE = ("dense", "topk(k=1.0)", "powersgd(rank=16, min_saving=1.0)", "masked(topk(k=1.0), min_size=10)")
SPECS = (
    "dense",
    "bf16",
    "topk(k=0.2)",
    "powersgd(rank=1, min_saving=1.0)",
    "masked(topk(k=0.2), min_size=10)",
    "onebit",
)
Backward = Callable[..., None]


class Net(nn.Module):
    """Its last layer may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, short: bool = False) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        return x if short else self.last(x)


def plain(net: Net, optimizer: Any, replica: un.Replica, backward: Backward) -> None:
    for i in range(4):
        optimizer.zero_grad()
        backward(i)
        optimizer.step()


def clipped(net: Net, optimizer: Any, replica: un.Replica, backward: Backward) -> None:
    """By the norm of what the reducer gives, not of what autograd gave."""
    for i in range(4):
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        backward(i)
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()


def accumulated(net: Net, optimizer: Any, replica: un.Replica, backward: Backward) -> None:
    for i in range(4):
        with replica.no_sync():
            backward(i)
        backward(i + 10)
        optimizer.step()
        optimizer.zero_grad()


def partly(net: Net, optimizer: Any, replica: un.Replica, backward: Backward) -> None:
    """Without the last layer, without any backward pass, and with the first layer frozen."""
    for i in range(6):
        optimizer.zero_grad()
        net.first.requires_grad_(i < 4)
        if i != 2:
            backward(i, short=i == 1)
        optimizer.step()


def kept(net: Net, optimizer: Any, replica: un.Replica, backward: Backward) -> None:
    """The program holds the gradients of a window, and steps with them once more after the next."""
    for i in range(4):
        optimizer.zero_grad()
        backward(2 * i)
        held = [p.grad for p in net.parameters()]
        optimizer.zero_grad()
        backward(2 * i + 1)
        for p, grad in zip(net.parameters(), held, strict=True):
            p.grad += grad
        optimizer.step()


def failed(net: Net, optimizer: Any, replica: un.Replica, backward: Backward) -> None:
    """A backward pass that breaks off counts for nothing."""
    for i in range(4):
        optimizer.zero_grad()
        if i == 2:
            handle = net.first.weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backward(i)
            handle.remove()
            optimizer.zero_grad()
        backward(i)
        optimizer.step()


def overflowed(net: Net, optimizer: Any, replica: un.Replica, backward: Backward) -> None:
    """AMP does not step the window before the last, nor the last."""
    scaler = torch.amp.GradScaler(next(net.parameters()).device.type, init_scale=8.0)
    replica.watch(scaler)
    for i in range(5):
        optimizer.zero_grad()
        backward(i, scale=lambda loss, i=i: scaler.scale(loss) * (float("inf") if i in (2, 4) else 1.0))
        scaler.step(optimizer)
        scaler.update()


PROGRAMS = (plain, clipped, accumulated, partly, kept, failed, overflowed)


def train(program: Callable[..., None], spec: str, device: str) -> tuple[list[Tensor], int]:
    """Parameters and steps in the end; `spec`: "" is plain PyTorch."""
    torch.manual_seed(0)
    net = Net().double().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    replica: Any = SimpleNamespace(no_sync=nullcontext, watch=str, shared_state=str, step=0)
    if spec:
        world = un.World(device=torch.device(device))
        replica = un.parallel(net, optimizer, f"allreduce(reducer={spec})", world=world)

    def backward(seed: int, *, short: bool = False, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scale(net(x.to(device), short=short).square().mean()).backward()

    program(net, optimizer, replica, backward)
    replica.shared_state()  # counts what is still to be counted
    return [p.detach().cpu() for p in net.parameters()], replica.step


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_cuda)])
@pytest.mark.parametrize("spec", WHOLE)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_loses_nothing_trains_as_plain_pytorch(
    program: Callable[..., None], spec: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reducers that send all there is."""
    right, steps = train(program, "", "cpu")[0], train(program, spec, "cpu")[1]
    if device == "cpu":  # what looks at a parameter takes the GPU's way
        monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    found = train(program, spec, device)
    assert found[1] == steps
    for mine, theirs in zip(found[0], right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


@needs_cuda
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_world_of_one_trains_as_on_the_cpu(program: Callable[..., None], spec: str) -> None:
    right, found = (train(program, spec, device) for device in ("cpu", "cuda:0"))
    assert found[1] == right[1]
    for mine, theirs in zip(found[0], right[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


@needs_cuda
def test_a_graph_that_is_freed_while_another_is_recorded() -> None:
    """The collector does not run meanwhile: CUDA would refuse the recording."""
    x, thresholds = torch.zeros(4, device="cuda:0"), gc.get_threshold()
    former, graphs = [Graphs()], Graphs()
    for _ in range(3):
        former[0].run("add", [x], lambda: x.add_(1))

    def kernels() -> None:
        if torch.cuda.is_current_stream_capturing():
            cycle: list[Any] = [former.pop()]
            cycle.append(cycle)
        for _ in range(5):
            x.add_(1)
        assert [[i] for i in range(100)]  # enough for the collector to be called

    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(3):
            graphs.run("add", [x], kernels)
    finally:
        gc.set_threshold(*thresholds)
    assert not former
    assert x.tolist() == [18.0] * 4
