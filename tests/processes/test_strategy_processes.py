"""Every strategy between real workers, in one program: it trains, saves, and leaves nothing behind, even dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from unisono.methods.spec import names

SPECS = {
    "allreduce": "allreduce",
    "local_sgd": "local_sgd(every=2, start=1)",
    "diloco": "diloco(every=4, fragments=2, delay=1)",
    "sparseloco": "sparseloco(every=4, chunk=16, k=4, fragments=2, delay=1)",
    "sparta": "sparta(share=0.2)",
    "async_diloco": "async_diloco(every=2)",
    "gossip": "gossip(bits=8)",
    "async_average": "async_average(every_s=0.01, warmup=1)",
    "qadam": "qadam(warmup=2)",
    "zero_one_adam": "zero_one_adam(warmup=1, start=2, every=2)",
    "crossbow": "crossbow(learners=2, every=2)",
    "parameter_server": "parameter_server(servers=2, staleness=1)",
    "hogwild": "hogwild",
    "shared": "shared",
    "auto": "auto(among=[allreduce, topk(k=0.5)], check_every=2, trial_steps=2)",
    "zero": "zero(stage=3, optimizer_on=disk, params_on=disk)",
}

PROGRAM = """
    import gc, os, sys, threading, time, torch, unisono as un
    from torch import nn

    world = un.join(device="cpu")

    def started(spec):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, un.parallel(model, optimizer, spec)

    def train(model, optimizer, steps):
        for t in steps:
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * t + world.rank))
            optimizer.zero_grad()
            (model(x) - x[:, :2].sin()).square().mean().backward()
            optimizer.step()

    def held():
        "Threads, descriptors and shared memory of this process."
        gc.collect()
        with open("/proc/self/maps") as file:
            mapped = sum("memfd:unisono" in line for line in file)
        threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("unisono"))
        return threads, len(os.listdir("/proc/self/fd")), mapped

    def tried(spec, folder):
        model, optimizer, replica = started(spec)
        train(model, optimizer, range(5))
        whole = replica.consolidate()
        sums = [x.double().sum().item() for x in whole.state_dict().values()]
        every = world.gather_objects(sums)
        assert every[0] == every[1], (spec, every)
        un.save(folder, replica)
        replica.close()
        model, optimizer, replica = started(spec)
        assert un.load(folder, replica).step == 5, spec
        train(model, optimizer, range(5, 8))
        assert replica.step == 8, (spec, replica.step)
        assert all(x.isfinite().all() for x in replica.consolidate().state_dict().values()), spec
        replica.close()

    first = started("allreduce")
    train(*first[:2], range(25))  # the ranks have looked for stragglers, and keep a channel for it
    first[2].close()
    del first
    tried("allreduce", "warm-up")  # the world has its threads from here on
    for spec in sys.argv[1:]:
        before = held()
        tried(spec, "checkpoint-" + spec.partition("(")[0])
        after = held()
        assert after == before, (spec, before, after)
    for spec in sys.argv[1:]:
        before = held()
        for _ in range(4):  # dropped without a close
            train(*started(spec)[:2], range(2))
            gc.collect()
        end = time.monotonic() + 20
        while held() != before and time.monotonic() < end:  # a server stays until all have left
            time.sleep(0.01)
        assert held() == before, (spec, "dropped", before, held())
        world.barrier()
    left = [started(spec) for spec in sys.argv[1:]]  # the program ends without a close
    for model, optimizer, _ in left:
        train(model, optimizer, range(2))
    if world.rank == 1:
        print("served", flush=True)
    served = started("parameter_server(place=own)")  # rank 1 serves until the other has ended
    train(*served[:2], range(2))
    print("trained", world.rank, world.size)
"""


@pytest.mark.timeout(150)
def test_every_strategy_trains_saves_and_ends_cleanly(run_script: Callable[..., Any]) -> None:
    status, out, err = run_script(PROGRAM, "-n", "2", args=list(SPECS.values())).finish(timeout_s=120)
    wrong = [line for line in err.splitlines() if "unisono auto, step" not in line]
    assert (status, wrong) == (0, [])
    assert sorted(line.partition("] ")[2] or line for line in out.splitlines()) == ["served", "trained 0 1"]


def test_every_strategy_is_among_them() -> None:
    assert set(SPECS) == set(names("strategy"))
