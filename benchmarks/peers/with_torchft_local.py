"""torchft's Local SGD and DiLoCo beside ours at equal settings, both in one run.

    pip install torchft==0.2.0    in an environment of its own, beside this package
    python benchmarks/peers/with_torchft_local.py

2 workers of one thread train a character transformer of 5 M parameters by SGD with momentum, each on its own rows; all
sides begin with the same weights, see the same rows and exchange every 10 steps, in the same processes, in turn. Ours
sends messages over loopback, as between hosts, because torchft's gloo does.
Keys, METHOD is local_sgd or diloco, SIDE is torchft or ours: SIDE_METHOD_loss (on held-out text after the last
exchange), loss_difference_METHOD (torchft's less ours, as a share of ours), SIDE_METHOD_round_s (median seconds of 10
steps and an exchange), SIDE_METHOD_exchange_s (of these, what is more than 10 steps of a worker by itself),
torchft_over_ours_METHOD (rounds), torchft_over_ours_METHOD_exchange, SIDE_METHOD_bytes (what a worker sends in an
exchange: ours by the ledger, torchft's by what it hands to its all-reduce).
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from measure import finish
from with_torchft import make_manager

WORKERS = 2
EVERY = 10
LENGTH, ROWS = 32, 8  # of a sequence, and a worker's in a step
METHODS = {  # ours, as torchft's are set below
    "local_sgd": f"local_sgd(every={EVERY}, start=0)",
    "diloco": f"diloco(every={EVERY}, outer_lr=0.7, outer_momentum=0.9, nesterov=True)",
}
# Its own default would copy the first worker's model over the others' after their first ten steps.
_AS_OURS = {"init_sync": False, "use_async_quorum": False, "min_replica_size": WORKERS}


def make_task() -> tuple[Any, Any, Any]:
    """The model, and rows of text to train on and to judge by."""
    import torch
    from char_transformer import CharTransformer, read

    torch.manual_seed(0)
    letters, text = torch.tensor(list(read(None))).unique(return_inverse=True)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = rows[torch.randperm(len(rows))]
    return CharTransformer(len(letters), 256, LENGTH, layers=6), rows[256:], rows[:256]


def sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrap_in_torchft(method: str, model: Any, lighthouse: str, rank: int) -> tuple[Any, Any, list[float]]:
    """The optimizer of a loop as torchft's documentation writes it, the manager, and bytes that it comes to send."""
    import torch
    from torchft.local_sgd import DiLoCo, LocalSGD

    state = {"load": model.load_state_dict, "save": model.state_dict}
    manager = make_manager(f"{method}{rank}", lighthouse, **state, **_AS_OURS)
    sent: list[float] = []
    reduce = manager.allreduce

    def allreduce(tensor: Any, *args: Any, **settings: Any) -> Any:
        sent.append(2 * (WORKERS - 1) / WORKERS * tensor.nbytes)
        return reduce(tensor, *args, **settings)

    manager.allreduce = allreduce
    optimizer = sgd(model)
    if method == "local_sgd":
        LocalSGD(manager, model, optimizer, sync_every=EVERY).__enter__()
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        DiLoCo(manager, [model], optimizer, outer, sync_every=EVERY).__enter__()
    return optimizer, manager, sent


def compare(method: str, lighthouse: str, rounds: int) -> dict[str, float]:
    """In each worker: both sides, and a worker by itself, in turn, a round at a time."""
    import torch
    from char_transformer import loss_of

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    model, rows, held_out = make_task()
    models = {side: copy.deepcopy(model) for side in ("torchft", "ours", "alone")}
    optimizers = {side: sgd(trained) for side, trained in models.items()}
    un.parallel(models["ours"], optimizers["ours"], METHODS[method])
    optimizers["torchft"], manager, sent = wrap_in_torchft(method, models["torchft"], lighthouse, world.rank)
    taken: dict[str, list[float]] = {side: [] for side in models}
    begun = find_sent(world)
    for number in range(rounds):
        for side, trained in models.items():
            world.barrier()
            began = time.perf_counter()
            for step in range(number * EVERY, (number + 1) * EVERY):
                at = (step * WORKERS + world.rank) * ROWS % (len(rows) - ROWS)
                optimizers[side].zero_grad()
                loss_of(trained, rows[at : at + ROWS]).backward()
                optimizers[side].step()
            taken[side].append(time.perf_counter() - began)
    found = {"ours_bytes": (find_sent(world) - begun) / rounds, "torchft_bytes": sum(sent) / rounds}
    assert manager.current_step() == rounds, f"{manager.current_step()} of torchft's {rounds} exchanges counted"
    with torch.no_grad():
        found |= {f"{side}_loss": loss_of(models[side].eval(), held_out).item() for side in ("torchft", "ours")}
    manager.shutdown(wait=False)
    return found | {f"{side}_round_s": statistics.median(seconds[1:]) for side, seconds in taken.items()}


def find_sent(world: Any) -> float:
    """Bytes that this rank has sent of the model, by the ledger."""
    return float(sum(count for tag, count in world.ledger.sent().by_tag.items() if tag != "barrier"))


def compare_method(method: str, rounds: int) -> dict[str, float]:
    """In workers of their own; of two times the slower worker's."""
    from torchft.coordination import LighthouseServer

    import unisono as un

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=WORKERS, join_timeout_ms=10_000, quorum_tick_ms=50)
    ask = partial(compare, method, server.address(), rounds)
    by_rank = un.launch(ask, workers=WORKERS, threads=1, output="rank0")
    server.shutdown()
    found = {key: max(one[key] for one in by_rank) for key in by_rank[0]}
    for side in ("torchft", "ours"):
        found[f"{side}_exchange_s"] = found[f"{side}_round_s"] - found["alone_round_s"]
    results = {key.replace("_", f"_{method}_", 1): value for key, value in found.items()}
    results[f"torchft_over_ours_{method}"] = found["torchft_round_s"] / found["ours_round_s"]
    results[f"torchft_over_ours_{method}_exchange"] = found["torchft_exchange_s"] / found["ours_exchange_s"]
    results[f"loss_difference_{method}"] = found["torchft_loss"] / found["ours_loss"] - 1
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    asked = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        print("skipped: torchft is not installed here; pip install torchft==0.2.0, in an environment of its own")
        return
    from importlib.metadata import version

    os.environ["UNISONO_SHARED_MEMORY"] = "0"
    results: dict[str, Any] = {"rounds": asked.rounds}
    for method in asked.only:
        results |= compare_method(method, asked.rounds)
    finish(results | {"torchft": version("torchft")})


if __name__ == "__main__":
    main()
