"""The disk tier: how much of the disk's own bandwidth an optimizer step reaches whose whole state lies on disk.

Raw: threads that read a file in large direct requests and write each back to its place, with nothing between, in the
best of a few numbers of threads and sizes. The step: `Stepper` with AdamW over blocks of 32 Mi parameters, gradients in
memory in bf16, new values cast to bf16, until the last write is on the disk. Both move the same bytes of the same file,
and take turns. Everything runs on this machine's cores: what else runs on them is in the result.

Keys:
  disk_share, disk_share_16bit       bytes/s of the step over those of the raw run (target 0.8); with 16-bit moments
  raw_gbyte_s, step_gbyte_s          bytes/s read and written, both counted (and raw_16bit_, step_16bit_)
  step_mparam_s, step_16bit_mparam_s parameters stepped in a second
  memory_mparam_s                    the same with everything in memory
  read_gbyte_s, write_gbyte_s        reading alone and writing alone, by `measure_bandwidth`
  direct                             whether the folder takes direct I/O
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

ALIGNMENT = 4096
WAYS = [{"threads": n, "request_bytes": m << 20} for n, m in ((2, 8), (4, 4), (8, 4), (16, 4), (8, 1))]
BYTES = {"32bit": 12, "16bit": 8}  # bytes of state for each parameter


def raw(fd: int, nbytes: int, *, threads: int, request_bytes: int) -> None:
    """Read the first `nbytes` of a file and write them back, by the bare system calls."""
    places = iter(range(0, nbytes, request_bytes))

    def work(memory: memoryview) -> None:
        for at in places:  # each place goes to one thread
            view = memory[: min(request_bytes, nbytes - at)]
            assert os.preadv(fd, [view], at) == view.nbytes
            assert os.pwritev(fd, [view], at) == view.nbytes

    with ThreadPoolExecutor(threads) as crew:
        list(crew.map(work, (memory(request_bytes, i) for i in range(threads))))


@functools.cache
def memory(nbytes: int, _: int) -> memoryview:
    """Memory for one thread, kept for all runs."""
    from unisono.methods.offload.disk import make_buffer

    return make_buffer(nbytes).numpy().data


def best_way(fd: int, nbytes: int, repeats: int) -> dict[str, int]:
    """The threads and the size of a request with which the raw run is fastest."""
    sides = {str(i): functools.partial(raw, fd, nbytes, **way) for i, way in enumerate(WAYS)}
    seconds = interleaved(sides, repeats=repeats, warmup=1)
    for i, way in enumerate(WAYS):
        print(f"raw, {way}: {2 * nbytes / seconds[str(i)] / 1e9:.2f} GB/s read and written", flush=True)
    return WAYS[int(min(seconds, key=seconds.__getitem__))]


def stepper_on(home: str, moments: str, asked: argparse.Namespace) -> tuple[Callable[[], None], Any]:
    """One optimizer step over all blocks, as a function; and the disk."""
    import torch

    from unisono.methods.offload.disk import Disk
    from unisono.methods.offload.stepper import Block, Run, Stepper

    dtype = {"32bit": torch.float32, "16bit": torch.bfloat16}[moments]
    blocks, elements = asked.blocks, asked.elements
    disk = Disk(asked.folder, blocks * (elements * BYTES[moments] + (1 << 20))) if home == "disk" else None
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(elements, generator=generator).to(torch.bfloat16)
    out = torch.empty(elements, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1e-3)
    stepper = Stepper(optimizer, moments=dtype, disk=disk)
    for _ in range(blocks):
        stepper.add(Block(torch.randn(elements, generator=generator), [Run(0, elements, 0)], home=home))  # type: ignore[arg-type]

    def step() -> None:
        stepper.begin()
        stepper.prefetch(0)
        for i in range(blocks):
            if i + 1 < blocks:
                stepper.prefetch(i + 1)
            stepper.step(i, gradient, out)
        stepper.flush()

    for _ in range(2):  # the first makes the state, and all blocks are on the disk
        step()
    return step, disk


def measured(moments: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The step and the raw run in turn, on one file, and how they compare."""
    step, disk = stepper_on("disk", moments, asked)
    before = sum(disk.moved.values())
    step()
    moved = sum(disk.moved.values()) - before
    fd, nbytes = disk._requests.fd, moved // 2 // ALIGNMENT * ALIGNMENT
    way = best_way(fd, nbytes, 1 if asked.smoke else 3)
    bare = functools.partial(raw, fd, nbytes, **way)
    seconds = interleaved({"raw": bare, "step": step}, repeats=asked.repeats, warmup=1)
    disk.close()
    raw_rate, rate = 2 * nbytes / seconds["raw"], moved / seconds["step"]
    speed = asked.blocks * asked.elements / seconds["step"]
    print(
        f"{moments} moments: {moved / 1e9:.2f} GB moved in {seconds['step']:.3f} s, {rate / 1e9:.2f} GB/s; raw "
        f"{raw_rate / 1e9:.2f} GB/s; {speed / 1e6:.0f} Mparam/s",
        flush=True,
    )
    end = "" if moments == "32bit" else "_16bit"
    return {
        "direct": disk.direct,
        f"disk_share{end}": rate / raw_rate,
        f"raw{end}_gbyte_s": raw_rate / 1e9,
        f"step{end}_gbyte_s": rate / 1e9,
        f"step{end}_mparam_s": speed / 1e6,
    }


def measure_bandwidth(folder: str, nbytes: int) -> tuple[float, float]:
    """Bytes that the disk under `folder` reads and writes in a second, on a scratch file of `nbytes`."""
    from unisono.methods.offload.disk import Disk

    block = min(32 << 20, max(ALIGNMENT, nbytes // 4 // ALIGNMENT * ALIGNMENT))
    count = max(1, nbytes // block)
    disk = Disk(folder, count * block)
    regions = [disk.place(block) for _ in range(count)]
    buffers = [disk.make_buffer(block) for _ in range(min(4, count))]

    def measure(move: Callable[..., Any]) -> float:
        """Read or write all regions, as many at a time as there are buffers."""
        start = time.perf_counter()
        handles: list[Any] = []
        for i, region in enumerate(regions):
            if i >= len(buffers):
                handles[i - len(buffers)].wait()
            handles.append(move(region, buffers[i % len(buffers)]))
        for handle in handles:
            handle.wait()
        return count * block / (time.perf_counter() - start)

    for line in buffers:
        line.random_(256)  # a disk may compress
    measure(disk.write)  # the first write of a block also takes it up in the file system
    write = measure(disk.write)
    if not disk.direct:
        os.posix_fadvise(disk._requests.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    read = measure(disk.read)
    disk.close()
    return read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="a folder on the disk to be measured")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--elements", type=int, default=32 << 20, help="of each block")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="small and quick: only to see that it runs")
    asked = parser.parse_args()
    if asked.smoke:
        asked.blocks, asked.elements, asked.repeats = 2, 1 << 20, 1
    read, write = measure_bandwidth(asked.folder, asked.blocks * asked.elements * BYTES["32bit"])
    print(f"read alone {read / 1e9:.2f} GB/s, written alone {write / 1e9:.2f} GB/s", flush=True)
    results: dict[str, Any] = {"read_gbyte_s": read / 1e9, "write_gbyte_s": write / 1e9}
    for moments in BYTES:
        results |= measured(moments, asked)
    step, _ = stepper_on("cpu", "32bit", asked)
    seconds = interleaved({"memory": step}, repeats=asked.repeats)
    results["memory_mparam_s"] = asked.blocks * asked.elements / seconds["memory"] / 1e6
    finish(results)


if __name__ == "__main__":
    main()
