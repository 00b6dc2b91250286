"""The backend `unisono` of torch.distributed against gloo, in the same processes; programs of PyTorch's over both."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from typing import Any

import backend_cases
import pytest
import torch

import unisono as un

PATIENCE = timedelta(seconds=60)


def compare(names: list[str], *, shared_memory: bool = True) -> list[str]:
    """In each worker: every case over both backends; what differs, and from which rank."""
    import torch.distributed as dist

    os.environ["UNISONO_SHARED_MEMORY"] = str(int(shared_memory))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    theirs, ours = (dist.new_group(backend=backend, timeout=PATIENCE) for backend in ("gloo", "unisono"))
    problems = []
    for name in names:
        run = backend_cases.CASES[name]
        expected = run(theirs) if name not in backend_cases.OURS_ALONE else None
        try:
            expect_same(run(ours), expected)
        except Exception:
            problems.append(f"{name}, rank {dist.get_rank()}: {traceback.format_exc()}")
        went_well: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(went_well, not problems)
        if not all(went_well):
            break
    dist.destroy_process_group()
    return problems


def expect_same(found: Any, expected: Any) -> None:
    """The same bits; None: the case has checked it itself."""
    if expected is not None and all(isinstance(each, torch.Tensor) for each in found):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif expected is not None:
        assert found == expected


@pytest.mark.parametrize("workers", [2, 3])
def test_every_operation_gives_gloos_numbers(workers: int) -> None:
    names = list(backend_cases.CASES) if workers == 2 else [n for n in backend_cases.CASES if n != "compiled"]
    problems = [p for rank in un.launch(compare, workers, args=[names], threads=1, timeout_s=100) for p in rank]
    assert problems == [], "\n".join(problems)


def test_operations_by_messages_give_gloos_numbers() -> None:
    """Where ranks cannot share memory, as on two hosts."""
    left_out = ("messages_from_anyone", "compiled", "subgroups")
    names = [name for name in backend_cases.CASES if name not in left_out]
    found = un.launch(compare, 2, args=[names], kwargs={"shared_memory": False}, threads=1, timeout_s=100)
    problems = [p for rank in found for p in rank]
    assert problems == [], "\n".join(problems)
