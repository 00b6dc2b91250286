"""What the tests of strangers' programs share: small models in fp64, the same on ranks that are threads of one process.

Each test is a loop as people write it for one process or for DDP, with `un.parallel` added and nothing else changed. It
is compared with that loop run by plain PyTorch in one process on all the samples, or it must be refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

SEEDING = threading.Lock()  # torch.manual_seed is the process's, and ranks are threads of it
T = TypeVar("T")


def seeded(make: Callable[[], T], seed: int = 0) -> T:
    """What `make` gives from this seed, whichever ranks make theirs at the same time."""
    with SEEDING:
        torch.manual_seed(seed)
        return make()


def mlp(norm: bool = False) -> nn.Module:
    """A small model in fp64, the same on every rank."""
    middle: Callable[[], nn.Module] = (lambda: nn.BatchNorm1d(8)) if norm else nn.Tanh
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), middle(), nn.Linear(8, 1)).double())


def values(model: nn.Module) -> list[Tensor]:
    """Copies of its parameters and buffers."""
    return [x.detach().clone() for x in model.state_dict().values()]


def furthest(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest difference between two lists of tensors."""
    return max(float((x - y).abs().max()) for x, y in zip(found, expected, strict=True))
