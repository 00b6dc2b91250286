"""The host's step of AdamW, as `zero(optimizer_on="cpu")` takes it: by compiled code, by torch's fused kernel in tiles,
and by that kernel over the whole at once.

Gradients come and new values leave in bf16, the state is in fp32. In place, and into a second copy of the state as
`step_ahead` needs it; and in place with moments in bf16. The sides take turns. Where others use the machine too,
`--processor-time` counts the seconds that processors spent.

Keys, with 1 and with 2 threads:
  tiles_over_compiled_1, _2          seconds of the tiles over those of compiled code, in place
  tiles_over_compiled_copy_1, _2     the same into a second copy
  tiles_over_compiled_bf16_1, _2     the same in place with moments in bf16
  compiled_over_compiled_bf16_1, _2  compiled code with moments in fp32 over the same with moments in bf16
  whole_over_compiled_1, _2          the kernel over the whole at once, with its casts, over compiled code in place
  compiled_mparam_s_1, ...           millions of parameters per second of each: compiled, tiles, compiled_copy,
                                     tiles_copy, compiled_bf16, tiles_bf16, whole
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

from unisono.methods.offload import native
from unisono.methods.offload.stepper import Block, Run, Stepper

RATES = {"lr": 1e-3, "weight_decay": 0.1}


def ours(
    n: int, threads: int, *, compiled: bool, ahead: bool = False, moments: torch.dtype = torch.float32
) -> Callable[[], None]:
    """A step by compiled code or in tiles."""
    os.environ[native.SWITCH] = "1" if compiled else "0"
    native.load.cache_clear()
    blocks = [Block(torch.randn(n), [Run(0, n, 0)])]
    optimizer = torch.optim.AdamW([torch.zeros(1)], **RATES)
    stepper = Stepper(optimizer, blocks, moments=moments, threads=threads, ahead=ahead)
    gradient, out = torch.randn(n).bfloat16(), torch.zeros(n, dtype=torch.bfloat16)

    def step() -> None:
        settings = stepper.begin()
        if not ahead:
            stepper.step(0, gradient, out)
            return
        wait, take = stepper.start_ahead(0, gradient, out, (), settings=settings)
        wait()
        take()

    return step


def whole(n: int) -> Callable[[], None]:
    """torch's fused kernel, with a cast before and one after it."""
    param = torch.nn.Parameter(torch.randn(n))
    optimizer = torch.optim.AdamW([param], fused=True, **RATES)
    param.grad = torch.zeros(n)
    gradient, out = torch.randn(n).bfloat16(), torch.zeros(n, dtype=torch.bfloat16)

    def step() -> None:
        assert param.grad is not None
        param.grad.copy_(gradient)
        optimizer.step()
        out.copy_(param.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=8_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--processor-time", action="store_true", help="count it instead of the time that passes")
    asked = parser.parse_args()
    if native.load() is None:
        sys.exit("no compiled step here: `unisono doctor` says why")
    results: dict[str, Any] = {"elements": asked.elements, "processor_time": asked.processor_time}
    clock = time.process_time if asked.processor_time else time.perf_counter
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sides = {
            "compiled": ours(asked.elements, threads, compiled=True),
            "tiles": ours(asked.elements, threads, compiled=False),
            "compiled_copy": ours(asked.elements, threads, compiled=True, ahead=True),
            "tiles_copy": ours(asked.elements, threads, compiled=False, ahead=True),
            "compiled_bf16": ours(asked.elements, threads, compiled=True, moments=torch.bfloat16),
            "tiles_bf16": ours(asked.elements, threads, compiled=False, moments=torch.bfloat16),
            "whole": whole(asked.elements),
        }
        seconds = interleaved(sides, repeats=asked.repeats, clock=clock)
        results[f"tiles_over_compiled_{threads}"] = seconds["tiles"] / seconds["compiled"]
        results[f"tiles_over_compiled_copy_{threads}"] = seconds["tiles_copy"] / seconds["compiled_copy"]
        results[f"tiles_over_compiled_bf16_{threads}"] = seconds["tiles_bf16"] / seconds["compiled_bf16"]
        results[f"compiled_over_compiled_bf16_{threads}"] = seconds["compiled"] / seconds["compiled_bf16"]
        results[f"whole_over_compiled_{threads}"] = seconds["whole"] / seconds["compiled"]
        for name, taken in seconds.items():
            results[f"{name}_mparam_s_{threads}"] = asked.elements / taken / 1e6
    finish(results)


if __name__ == "__main__":
    main()
