"""What every engine must run unchanged: one training loop with a known answer, and every strategy for a few steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.methods.spec import names

STRATEGIES = {
    "allreduce": "allreduce",
    "local_sgd": "local_sgd(every=2, start=1)",
    "diloco": "diloco(every=2)",
    "gossip": "gossip(bits=8)",
    "async_average": "async_average(every_s=0.01, warmup=1)",
    "qadam": "qadam(warmup=2)",
    "crossbow": "crossbow(learners=2, every=2)",
    "parameter_server": "parameter_server(staleness=1)",
    "hogwild": "hogwild",
    "shared": "shared",
}

COMMON = """
import json, os, signal, sys, torch, unisono as un

def train(spec="allreduce", *, dtype=torch.float64, make=torch.optim.SGD, steps=8, at_step=None):
    world = un.join(device="cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(dtype)
    optimizer = make(model.parameters(), lr=0.05)
    replica = un.parallel(model, optimizer, spec)
    x = torch.randn(64, 8, dtype=dtype)
    y = x.sum(1, keepdim=True)
    step = 0
    while step < steps:
        for a, b in un.shard((x, y), batch_size=16, shuffle=False):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
            if at_step is not None:
                at_step(world, step)
            step += 1
    with torch.no_grad():
        loss = float(torch.nn.functional.mse_loss(replica.consolidate()(x), y))
    replica.close()
    return loss
"""

# The whole catalog in one job; rank 0 prints {"loss": ..., "strategies": {name: loss}, ...}.
EVERYTHING = (
    COMMON
    + """
world = un.join(device="cpu")
found = {"loss": train(), "size": world.size, "how": world.transport.name}
specs = json.loads(sys.argv[1])
found["strategies"] = {
    name: train(spec, dtype=torch.float32, make=torch.optim.Adam, steps=4) for name, spec in specs.items()
}
every = world.gather_objects(found["loss"])
assert len(set(every)) == 1, every
if world.rank == 0:
    print(json.dumps(found))
"""
)

# Messages between workers, as between hosts: each prints where it listens, and whether that is encrypted.
NETWORK = ("--encrypt", "--interface", "{network}", "--ports", "43000-43029")
NETWORKED = (
    COMMON
    + """
world, loss = un.join(device="cpu"), train()
links = world.transport._links
places = [place for card in links._peers[world.rank]._cards for place, _ in card]
print(json.dumps({"loss": loss, "ports": links._door.ports, "at": places, "encrypted": world.transport.is_encrypted}))
"""
)


def network_options(network: str = "127.0.0.0/8") -> list[str]:
    return [word.format(network=network) for word in NETWORK]


def check_network(found: list[dict[str, Any]], begins: str = "127.") -> None:
    """That two workers listened where they were asked to, encrypted, and trained."""
    assert len(found) == 2, found
    for one in found:
        assert one["loss"] == pytest.approx(right_loss(), rel=1e-12)
        assert one["encrypted"]
        assert all(43000 <= port <= 43029 for port in one["ports"])
        assert all(place.startswith(begins) for place in one["at"])


# Rank 1 is killed at its sixth step, in the first attempt.
KILLED = (
    COMMON
    + """
def strike(world, step):
    if world.rank == 1 and step == 5 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)

loss = train(at_step=strike)
print(json.dumps({"loss": loss, "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT")}))
"""
)

# What an engine started without our launcher: its rank, the size, and a sum over all.
ITSELF = """
import json, torch, unisono as un
world = un.join(device="cpu")
total = world.all_reduce(torch.tensor(10.0 + world.rank), "sum").wait()
print(json.dumps([world.rank, world.size, total.item()]))
"""

# Trains until a worker that came later has made a step, whole passes; prints how many of them, and the weights.
REPLACED = """
import json, os, time, torch, unisono as un
world = un.join(device="cpu")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).to(torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
un.parallel(model, optimizer)
x = torch.randn(48, 8, dtype=torch.float64)
passes = 0
while not world.broadcast_object(os.path.exists("replaced")):
    for (a,) in un.shard((x,), batch_size=16, shuffle=False):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), a.sum(1, keepdim=True)).backward()
        optimizer.step()
        if "UNISONO_JOINING" in os.environ:
            open("replaced", "w").close()
        time.sleep(0.02)
    passes += 1
print(json.dumps({"passes": passes, "weights": model.weight.flatten().tolist()}))
"""


def right_weights(passes: int) -> list[float]:
    """The weights of REPLACED after so many passes, in one process without Unisono."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(48, 8, dtype=torch.float64)
    for start in [0, 16, 32] * passes:
        a = x[start : start + 16]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), a.sum(1, keepdim=True)).backward()
        optimizer.step()
    return [float(w) for w in model.weight.detach().flatten()]


def right_loss(steps: int = 8) -> float:
    """The same training in one process on whole batches, in plain PyTorch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 8, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    for step in range(steps):
        batch = slice(16 * (step % 4), 16 * (step % 4) + 16)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(x), y))


def specs() -> dict[str, str]:
    """A spec for every strategy of the catalog."""
    return {name: STRATEGIES.get(name, name) for name in names("strategy")}
