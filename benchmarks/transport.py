"""Collectives against gloo: shared memory on one host (2 and 4 workers), messages between emulated hosts (4).

Keys: gloo_over_ours_* are gloo's time over ours, in the same processes, in turn (small_asleep: our ranks sleep at once,
without looking for a while before); hosts_*_of_bound are shares of
the bandwidth bound between hosts with links of --mbit Mbit/s (needs root and iproute2; null otherwise).
gloo_over_sockets_* are gloo's time over that of our sockets, over loopback as between hosts; `encrypted`: all-reduce
with UNISONO_ENCRYPT=1; also beside other programs (--sockets --busy). ours_us_small_*, ours_ms_allreduce_*: our time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved, keep_busy, on_hosts, tell

MB = 1_000_000


def on_one_host(megabytes: int, repeats: int) -> dict[str, float]:
    """In each worker: every operation on both sides. Our tensors lie in `world.empty`, gloo's are its own."""
    import torch
    import torch.distributed as dist

    import unisono as un
    from unisono.world.transports import meeting_page

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    n = megabytes * MB // 4 // world.size * world.size
    ours, theirs = world.empty(n), torch.empty(n)
    ours.fill_(world.rank + 1.0)
    theirs.fill_(world.rank + 1.0)
    private = theirs.clone()
    part, their_part = torch.empty(n // world.size), torch.empty(n // world.size)
    my_share, their_share = ours[: n // world.size], theirs[: n // world.size]
    outs = [torch.zeros(n // world.size) for _ in range(world.size)]
    their_outs = [torch.zeros(n // world.size) for _ in range(world.size)]
    their_pieces = list(theirs.chunk(world.size))
    small, their_small = torch.ones(1024), torch.ones(1024)
    group: Any = dist.group.WORLD

    def many(run: Any) -> Any:
        return lambda: [run() for _ in range(200)]

    def asleep(run: Any) -> Any:
        """Ranks that wait sleep at once, without looking for a while before."""

        def without_looking() -> None:
            spins, meeting_page.SPINS = meeting_page.SPINS, 0
            run()
            meeting_page.SPINS = spins

        return without_looking

    pairs = {
        "allreduce": (
            lambda: group.allreduce([theirs]).wait(),
            lambda: world.all_reduce(ours, "mean").wait(),
        ),
        "allreduce_private": (
            lambda: group.allreduce([theirs]).wait(),
            lambda: world.all_reduce(private, "mean").wait(),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(their_part, their_pieces),
            lambda: world.reduce_scatter(ours, "sum", out=part).wait(),
        ),
        "all_gather": (
            lambda: group.allgather([their_outs], [their_share]).wait(),
            lambda: world.all_gather(my_share, even=True, out=outs).wait(),
        ),
        "broadcast": (
            lambda: dist.broadcast(theirs, 0),
            lambda: world.broadcast(private, 0).wait(),
        ),
        "small": (
            many(lambda: group.allreduce([their_small]).wait()),
            many(lambda: world.all_reduce(small, "mean").wait()),
        ),
        "small_asleep": (
            many(lambda: group.allreduce([their_small]).wait()),
            asleep(many(lambda: world.all_reduce(small, "mean").wait())),
        ),
    }
    results: dict[str, float] = {}
    for name, (gloo, mine) in pairs.items():
        for _ in range(3):
            theirs.fill_(1.0)  # sums must not grow without bound
        seconds = interleaved({"gloo": gloo, "ours": mine}, repeats=repeats, before=world.barrier)
        results |= {f"{name}_gloo_s": seconds["gloo"], f"{name}_ours_s": seconds["ours"]}
    dist.destroy_process_group()
    return results


def over_sockets(megabytes: int, repeats: int, names: list[str]) -> dict[str, float]:
    """In each worker, as if each had a host of its own: operations on both sides, in turn."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    import unisono as un
    from unisono.world.transports.sockets import SocketTransport

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("sockets", _get_default_store())
    world = un.World(SocketTransport(store, rank, size, timeout_s=120), hosts=[f"host{r}" for r in range(size)])
    n = megabytes * MB // 4 // world.size * world.size
    ours, theirs, small, their_small = torch.ones(n), torch.ones(n), torch.ones(1024), torch.ones(1024)
    part, their_part = torch.empty(n // world.size), torch.empty(n // world.size)
    outs, their_outs = list(torch.zeros(n).chunk(world.size)), list(torch.zeros(n).chunk(world.size))
    pieces, their_pieces = list(ours.chunk(world.size)), list(theirs.chunk(world.size))
    group: Any = dist.group.WORLD
    gathered = torch.empty(n)

    def many(run: Any) -> Any:
        return lambda: [run() for _ in range(200)]

    pairs = {
        "": (lambda: group.allreduce([theirs]).wait(), lambda: world.all_reduce(ours, "sum").wait()),
        "small": (
            many(lambda: group.allreduce([their_small]).wait()),
            many(lambda: world.all_reduce(small, "mean").wait()),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(their_part, their_pieces),
            lambda: world.reduce_scatter(ours, "sum", out=part).wait(),
        ),
        "all_gather": (
            lambda: group.allgather([their_outs], [their_pieces[0]]).wait(),
            lambda: world.all_gather(pieces[0], even=True, out=outs).wait(),
        ),
        "broadcast": (
            _together(lambda: dist.broadcast(theirs, 0), world),
            _together(lambda: world.broadcast(ours, 0).wait(), world),
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(gathered, theirs),
            lambda: world.all_to_all(pieces, out=outs).wait(),
        ),
    }
    results: dict[str, float] = {}
    for name in names:
        gloo, mine = pairs[name]
        ours.fill_(1.0)
        theirs.fill_(1.0)  # sums must not grow without bound
        seconds = interleaved({"gloo": gloo, "ours": mine}, repeats=repeats, before=world.barrier)
        results |= {f"{name}_gloo_s": seconds["gloo"], f"{name}_ours_s": seconds["ours"]}
    world.close()
    dist.destroy_process_group()
    return results


def compare_sockets(megabytes: int, repeats: int) -> dict[str, Any]:
    """Gloo's time over ours, for 2 and 4 workers."""
    import unisono as un

    results: dict[str, Any] = {}
    names = ["", "small", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    for workers in (2, 4):
        for kind, asked in (("", names), ("encrypted", [""])):
            os.environ["UNISONO_ENCRYPT"] = "1" if kind else "0"
            seconds = un.launch(over_sockets, workers=workers, args=(megabytes, repeats, asked), threads=1)[0]
            for name in asked:
                gloo, ours = seconds[f"{name}_gloo_s"], seconds[f"{name}_ours_s"]
                key = "_".join(filter(None, ["gloo_over_sockets", kind, name, str(workers)]))
                print(f"{key:>38}: gloo {gloo * 1e3:8.2f} ms, ours {ours * 1e3:8.2f} ms, {gloo / ours:.2f}", flush=True)
                results[key] = gloo / ours
    del os.environ["UNISONO_ENCRYPT"]
    return results


def between_hosts(megabytes: int, repeats: int) -> None:
    """In each worker of an emulated host: seconds of ours and gloo's; rank 0 prints them."""
    import torch
    import torch.distributed as dist

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    n = megabytes * MB // 4 // world.size * world.size
    x, part = torch.ones(n), torch.empty(n // world.size)
    pieces = list(x.chunk(world.size))
    ops = {
        "broadcast": (lambda: dist.broadcast(x, 0), lambda: world.broadcast(x, 0).wait()),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(part, pieces),
            lambda: world.reduce_scatter(x, "sum", out=part).wait(),
        ),
    }
    found: dict[str, float] = {}
    for name, (gloo, mine) in ops.items():
        sides = {"gloo": _together(gloo, world), "ours": _together(mine, world)}
        for side, seconds in interleaved(sides, repeats=repeats, warmup=1, before=world.barrier).items():
            found[f"{name}_{side}_s"] = seconds
    if world.rank == 0:
        tell({"bytes": n * 4, **found})
    world.barrier()


def _together(run: Any, world: Any) -> Any:
    """Until the last rank has it: a chain's end is its time, not its beginning."""

    def both() -> None:
        run()
        world.barrier()

    return both


def emulate(hosts: int, mbit: float, megabytes: int, repeats: int) -> dict[str, Any]:
    """Shares of the bandwidth bound: broadcast x/B, reduce-scatter (N-1)/N x/B."""
    from unisono.launchers.lab.hosts import find_obstacle

    keys = [f"hosts_{op}_of_bound{side}" for op in ("broadcast", "reduce_scatter") for side in ("", "_gloo")]
    if reason := find_obstacle():
        return {**dict.fromkeys(keys), "hosts_skipped": reason}
    sizes = ["--megabytes", str(megabytes), "--repeats", str(repeats)]
    found = on_hosts(["--worker", *sizes], hosts=hosts, mbit=mbit)
    bound = {"broadcast": found["bytes"] * 8 / mbit / 1e6}
    bound["reduce_scatter"] = bound["broadcast"] * (hosts - 1) / hosts
    shares = {}
    for op, seconds in bound.items():
        shares[f"hosts_{op}_of_bound"] = seconds / found[f"{op}_ours_s"]
        shares[f"hosts_{op}_of_bound_gloo"] = seconds / found[f"{op}_gloo_s"]
    return {**shares, "hosts_mbit": mbit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the large messages")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mbit", type=float, default=1000.0, help="speed of a link between emulated hosts")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--busy",
        type=int,
        nargs="?",
        const=2,
        default=0,
        help="so many other processes compute meanwhile; no emulated hosts",
    )
    parser.add_argument("--sockets", action="store_true", help="only our sockets against gloo")
    parser.add_argument("--one-host", action="store_true", help="only shared memory against gloo")
    asked = parser.parse_args()
    if asked.sockets:
        with keep_busy(asked.busy):
            results = compare_sockets(asked.megabytes, asked.repeats)
        finish(results | ({"busy": asked.busy} if asked.busy else {}))
        return
    if asked.worker:
        between_hosts(asked.megabytes, asked.repeats)
        return
    import unisono as un

    results = {}
    for workers in (2, 4):
        start = time.perf_counter()
        with keep_busy(asked.busy):
            seconds = un.launch(on_one_host, workers=workers, args=(asked.megabytes, asked.repeats), threads=1)[0]
        for name in [key.removesuffix("_gloo_s") for key in seconds if key.endswith("_gloo_s")]:
            gloo, ours = seconds[f"{name}_gloo_s"], seconds[f"{name}_ours_s"]
            scale, unit = (1e6 / 200, "us") if name.startswith("small") else (1e3, "ms")
            print(f"{workers} workers {name:>18}: gloo {gloo * scale:8.2f} {unit}, ours {ours * scale:8.2f} {unit}")
            results[f"gloo_over_ours_{name}_{workers}"] = gloo / ours
            if name in ("small", "allreduce"):
                results[f"ours_{unit}_{name}_{workers}"] = ours * scale
        print(f"({time.perf_counter() - start:.0f} s)")
    if asked.busy:
        results["busy"] = asked.busy
    elif not asked.one_host:
        results |= compare_sockets(asked.megabytes, asked.repeats) | emulate(4, asked.mbit, asked.megabytes, 9)
    finish(results)


if __name__ == "__main__":
    main()
