"""Workers that are killed while they train: 100 times in one run of 4, at every moment of a step, and what it costs.

The model is trained in double precision, once undisturbed and once with the kills. One parameter counts how often each
sample is part of a step: its gradient is the sample's share of the batch. Recovery is the time from a worker's end to
the first step that was made after it, in a world that was formed anew; the start of a replacement, a fork here, is part
of it where the world waits for it (--least 4).

Keys: kills, recovered, weights_equal (to 1e-9 of the largest; `difference` is the largest difference), samples_lost,
samples_repeated, median_recovery_s, worst_recovery_s, kills_by_phase; hung_recovered (a worker stands still),
two_at_once_recovered; checkpoint_runs, checkpoint_right (loops that load and save, kills in every phase: the epochs and
the weights of an undisturbed run), last_step_runs, last_step_right (parameter_server, a kill in the last steps: the
run ends well), rate_runs, rate_right (diloco, several kills: all workers end with the same steps and rate),
slow_exit_right (a process that takes longer to end than the heartbeat); with --soak S: soak_s, soak_kills, and growth
of launcher and of a worker that is never killed from the first fifth to the last tenth, medians: launcher_mb,
launcher_handles, launcher_threads, worker_mb, worker_handles, worker_threads (the ledger fills up to its bound in the
first 10,000 steps); and hostile_sent, hostile_refused: messages of strangers to every control port of a run while it
trains (--messages); hostile_data_sent, hostile_data_refused: so many to every rank's data port, hostile_sealed_sent,
hostile_sealed_refused: the same in an encrypted run; hostile_training_went_on: all of these trained to the right
weights. outages, outages_healed: links between two emulated hosts cut for --cut seconds in mid-step, half of them in an
encrypted run, after which training went on; outages_steps_repeated: steps that replicas count beside those of the loop,
outages_weights_equal: as plain PyTorch's after as many steps. --only names the parts to run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish

PHASES = ("forward", "backward", "exchange", "step", "save", "healing")
SAMPLES, BATCH = 240, 24
Loss = tuple[float, int]  # when, and in which generation of the world


def train(folder: str, steps: int, saves_every: int, sleep_s: float) -> dict[str, Any]:
    """In each worker: the model at the end, and when this worker made which step."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = un.join(device="cpu")
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    net.register_parameter("uses", torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64)))
    groups = [{"params": [*net[0].parameters(), *net[2].parameters()], "lr": 0.05, "momentum": 0.9}]
    optimizer = torch.optim.SGD([*groups, {"params": [net.uses], "lr": 1.0}])
    replica = un.parallel(net, optimizer, "allreduce")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 16, generator=generator, dtype=torch.float64)
    shard = un.shard((x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES)), BATCH)
    log = open(Path(folder) / f"{os.getpid()}.log", "w", buffering=1)  # noqa: SIM115 - until the worker is killed
    for inputs, target, which in shard.steps(steps):
        optimizer.zero_grad()
        loss = (net(inputs) - target).square().mean()
        (loss - net.uses[which].mean()).backward()
        optimizer.step()
        log.write(f"{time.monotonic()} {world.elastic.membership.generation}\n")
        if replica.step % saves_every == 0:
            un.save(Path(folder) / "checkpoint", replica, keep=1)
        time.sleep(sleep_s)
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return {"state": state, "steps": replica.step, "size": world.size}


def make_net() -> Any:
    """A small model in double precision, the same in every worker, and its data."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return net, (x, x.sum(1, keepdim=True).sin())


def train_from_checkpoint(folder: str, epochs: int, saves: str) -> dict[str, Any]:
    """The loop of the quickstart: the epoch to begin with is that of the newest checkpoint."""
    import torch

    import unisono as un

    un.join(device="cpu")
    net, data = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    replica = un.parallel(net, optimizer, "allreduce")
    try:
        start = un.load(folder, replica).epoch
    except FileNotFoundError:
        start = 0
    shard = un.shard(data, BATCH)
    for _ in range(start, epochs):
        for inputs, target in shard:
            optimizer.zero_grad()
            (net(inputs) - target).square().mean().backward()
            optimizer.step()
            time.sleep(0.01)
        if saves == "epoch":
            un.save(folder, replica, keep=2)
    if saves == "end":
        un.save(folder, replica)
    return {"start": start, "steps": replica.step, "state": [p.detach() for p in net.parameters()]}


def train_steps(strategy: str, folder: str, steps: int) -> dict[str, Any]:
    """Nothing is asked of the other workers but the save at the end; the rate falls with every step."""
    import torch

    import unisono as un

    un.join(device="cpu")
    net, data = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    replica = un.parallel(net, optimizer, strategy)
    for inputs, target in un.shard(data, BATCH).steps(steps):
        optimizer.zero_grad()
        (net(inputs) - target).square().mean().backward()
        optimizer.step()
        schedule.step()
        time.sleep(0.005)
    un.save(folder, replica)
    return {"steps": replica.step, "rate": optimizer.param_groups[0]["lr"]}


def leave_slowly(folder: str) -> int:
    """A library holds the interpreter as the process ends: no thread of it runs, nor does its heartbeat."""
    import atexit
    import ctypes

    atexit.register(ctypes.PyDLL(None).sleep, 5)
    return int(train_steps("allreduce", folder, 20)["steps"])


def try_launch(function: Any, faults: str, *, workers: int, least: int) -> list[Any]:
    """The results; none where the run failed."""
    import unisono as un

    try:
        return un.launch(function, workers=workers, least=least, faults=faults, threads=1, output="rank0")
    except un.WorkerError as error:
        print(error, flush=True)
        return []


def loops(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Loops as people write them, with checkpoints, at the end of a run, and with ranks that train apart."""
    import torch

    draw, epochs, each = random.Random(asked.seed), 6, SAMPLES // BATCH
    (alone,) = try_launch(partial(train_from_checkpoint, f"{folder}/alone", epochs, ""), "", workers=1, least=1)
    found = dict.fromkeys(
        ("checkpoint_runs", "checkpoint_right", "last_step_runs", "last_step_right", "rate_runs", "rate_right"), 0
    )
    for number in range(asked.loops):
        at = sorted(draw.sample(range(3, epochs * each - 2), 3))
        phases = draw.sample(PHASES[:-1], 3)
        faults = "; ".join(
            f"kill {draw.randrange(3)}@{step}" + ("" if phase == "step" else f" in {phase}")
            for step, phase in zip(at, phases, strict=True)
        )
        program = partial(train_from_checkpoint, f"{folder}/loop{number}", epochs, ("epoch", "end")[number % 2])
        results = try_launch(program, faults, workers=3, least=3)  # so that there is one for each kill
        same = [
            result["start"] == 0
            and result["steps"] == epochs * each
            and all(torch.allclose(a, b, atol=1e-9) for a, b in zip(result["state"], alone["state"], strict=True))
            for result in results
        ]
        found["checkpoint_runs"] += 1
        found["checkpoint_right"] += bool(same) and all(same)
        steps = 30
        last = f"kill {draw.randrange(1, 3)}@{draw.randrange(steps - 2, steps + 1)}"
        results = try_launch(
            partial(train_steps, "parameter_server", f"{folder}/last{number}", steps), last, workers=3, least=2
        )
        found["last_step_runs"] += 1
        found["last_step_right"] += bool(results) and all(result["steps"] == steps for result in results)
        # Not one after the other: who trains apart notices a loss with the next exchange, and some have to be left.
        several = "; ".join(f"kill {draw.randrange(3)}@{6 * k + draw.randrange(3)}" for k in range(1, 5))
        results = try_launch(
            partial(train_steps, "diloco(every=5)", f"{folder}/rate{number}", steps), several, workers=3, least=3
        )
        expected = {"steps": steps, "rate": 0.05 / (1 + steps)}
        found["rate_runs"] += 1
        found["rate_right"] += bool(results) and all(
            result["steps"] == steps and abs(result["rate"] - expected["rate"]) < 1e-12 for result in results
        )
    os.environ["UNISONO_HEARTBEAT_S"] = "3"
    try:
        slow = try_launch(partial(leave_slowly, f"{folder}/slow"), "", workers=2, least=2)
    finally:
        del os.environ["UNISONO_HEARTBEAT_S"]
    return found | {"slow_exit_right": slow == [20, 20]}


def write_script(kills: int, steps: int, workers: int, seed: int) -> str:
    """So many kills, spread over the run, of all ranks and in all phases."""
    draw = random.Random(seed)
    at = sorted(draw.sample(range(3, steps - 12), kills))
    faults: list[str] = []
    for number, step in enumerate(at):
        phase = PHASES[number % len(PHASES)] if number < kills - 3 else "step"  # so that there is healing after all
        faults.append(f"kill {draw.randrange(workers)}@{step}" + ("" if phase == "step" else f" in {phase}"))
    return "; ".join(dict.fromkeys(faults))


def find_recoveries(folder: str, losses: list[Loss]) -> list[float]:
    """Of each loss, the seconds to the first step that was made in a generation of the world after it, if any was."""
    made: dict[int, float] = {}  # generation: its first step
    for file in Path(folder).glob("*.log"):
        for line in file.read_text().splitlines():
            words = line.split()
            if len(words) == 2:  # else the worker was killed as it wrote
                made[int(words[1])] = min(float(words[0]), made.get(int(words[1]), float("inf")))
    found = []
    for when, generation in losses:
        later = [at for number, at in made.items() if number > generation]
        found += [min(later) - when] if later else []
    return found


def run(
    folder: str, *, workers: int, least: int, steps: int, faults: str, saves_every: int = 10, sleep_s: float = 0.0
) -> tuple[list[dict[str, Any]], list[Loss]]:
    """The workers' results, and when workers were lost."""
    from unisono.launchers import elastic

    losses: list[Loss] = []
    note = elastic.ElasticSupervisor._note_loss

    def watch(self: elastic.ElasticSupervisor[Any], worker: Any, failure: Any, was_member: bool) -> None:
        losses.append((failure.time, self.coordinator.generation))
        note(self, worker, failure, was_member)

    import unisono as un

    Path(folder).mkdir(parents=True, exist_ok=True)
    elastic.ElasticSupervisor._note_loss = watch  # type: ignore[method-assign]
    try:
        results = un.launch(
            partial(train, folder, steps, saves_every, sleep_s),
            workers=workers,
            threads=1,
            output="rank0",
            faults=faults,
            least=least,
        )
    finally:
        elastic.ElasticSupervisor._note_loss = note  # type: ignore[method-assign]
    return results, losses


def compare(results: list[dict[str, Any]], undisturbed: dict[str, Any], steps: int) -> dict[str, Any]:
    """Weights, and how often each sample was used."""
    import torch

    expected = undisturbed["state"]
    scale = max(float(value.abs().max()) for value in expected.values())
    apart = max(
        float((result["state"][name] - value).abs().max()) for result in results for name, value in expected.items()
    )
    uses = results[0]["state"]["uses"] * BATCH  # the learning rate of that parameter is 1
    due = expected["uses"] * BATCH
    assert torch.allclose(due.round(), due, atol=1e-6), "the undisturbed run itself counts whole uses"
    off = (uses - due).round()
    return {
        "weights_equal": apart <= 1e-9 * scale and all(result["steps"] == steps for result in results),
        "difference": apart,
        "samples_lost": int(-off[off < 0].sum()),
        "samples_repeated": int(off[off > 0].sum()),
    }


def kill_many(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The main figure."""
    steps = asked.steps
    undisturbed, _ = run(f"{folder}/plain", workers=asked.workers, least=asked.workers, steps=steps, faults="")
    script = write_script(asked.kills, steps, asked.workers, asked.seed)
    print(f"{script.count('kill')} kills over {steps} steps", flush=True)
    results, losses = run(
        f"{folder}/killed", workers=asked.workers, least=asked.least, steps=steps, faults=script, sleep_s=asked.sleep
    )
    known = find_recoveries(f"{folder}/killed", losses)
    phases = {phase: sum(fault.endswith(f"in {phase}") for fault in script.split("; ")) for phase in PHASES}
    phases["step"] = script.count("kill") - sum(phases.values())
    return {
        "workers": asked.workers,
        "least": asked.least,
        "steps": steps,
        "kills": len(losses),
        "recovered": len(known),
        **compare(results, undisturbed[0], steps),
        "median_recovery_s": statistics.median(known) if known else float("nan"),
        "worst_recovery_s": max(known, default=float("nan")),
        "kills_by_phase": phases,
    }


def other_faults(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A worker that stands still, and two that are killed at once."""
    steps = 60
    undisturbed, _ = run(f"{folder}/short", workers=asked.workers, least=1, steps=steps, faults="")
    os.environ["UNISONO_HEARTBEAT_S"] = "2"
    try:
        found: dict[str, Any] = {}
        for name, script in (("hung", "stop 1@20 for 600s"), ("two_at_once", "kill 1@20; kill 2@20")):
            results, losses = run(
                f"{folder}/{name}", workers=asked.workers, least=1, steps=steps, faults=script, sleep_s=0.01
            )
            same = compare(results, undisturbed[0], steps)
            whole = same["samples_lost"] == same["samples_repeated"] == 0
            known = find_recoveries(f"{folder}/{name}", losses)
            found[f"{name}_recovered"] = bool(same["weights_equal"] and whole and len(known) == len(losses) > 0)
            found[f"{name}_recovery_s"] = max(known, default=float("nan"))
    finally:
        del os.environ["UNISONO_HEARTBEAT_S"]
    return found


def strangers(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Messages to every port of a run while it trains, by those who do not know its secret."""
    if not asked.messages:
        return {}
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from hostile_ports import attack_training

    found: dict[str, Any] = {}
    went_on = []
    for name, data, encrypt in (("", False, False), ("data_", True, False), ("sealed_", True, True)):
        one = attack_training(asked.messages, seed=asked.seed, wait=True, data=data, encrypt=encrypt)
        print(name or "control_", one, flush=True)
        found |= {f"hostile_{name}{key}": one[f"hostile_{key}"] for key in ("sent", "refused")}
        went_on.append(one["training_went_on"] and one["weights_equal"])
    return found | {"hostile_training_went_on": all(went_on)}


# A link that is cut ---------------------------------------------------------------------------------------------------


WIDE, HEALED_S = 1000, 60.0


def make_wide() -> tuple[Any, Any]:
    """8 MB of gradients: a step takes a third of a second over the link, and most of that is on its way."""
    import torch

    torch.set_num_threads(1)
    net = torch.nn.Linear(WIDE, WIDE, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(net.weight, 0.01)
    return net, torch.optim.SGD(net.parameters(), lr=1e-5)


def make_rows(step: int, rank: int) -> Any:
    import torch

    return torch.full((2, WIDE), float(step % 7 + rank), dtype=torch.float64)


def train_through_outages(cuts: int, cut_s: float, seed: int) -> dict[str, Any]:
    """In each of two workers, each on a host of its own; rank 1 cuts its host's link while gradients are exchanged."""
    import subprocess

    import torch

    import unisono as un

    world = un.join(device="cpu")
    net, optimizer = make_wide()
    replica = un.parallel(net, optimizer, "allreduce")
    made, healed, exchanging, is_over = [0], [0], threading.Event(), threading.Event()

    def cut() -> None:
        draw = random.Random(seed)
        for _ in range(cuts):
            time.sleep(draw.uniform(0.5, 1.5))
            exchanging.wait()
            time.sleep(draw.uniform(0.0, 0.2))
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            time.sleep(cut_s)
            before = made[0]
            subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
            deadline = time.monotonic() + HEALED_S
            while made[0] < before + 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            healed[0] += made[0] >= before + 2
        is_over.set()

    if world.rank == 1:
        threading.Thread(target=cut, daemon=True).start()
    stop = False
    while not stop:
        optimizer.zero_grad()
        loss = net(make_rows(made[0], world.rank)).square().mean()
        exchanging.set()
        loss.backward()
        exchanging.clear()
        optimizer.step()
        made[0] += 1
        stop = bool(world.all_reduce(torch.tensor([float(is_over.is_set())]), "max").wait())
    assert world.transport is not None
    return {
        "made": made[0],
        "steps": replica.step,
        "healed": healed[0],
        "weights": net.weight.detach().clone(),
        "encrypted": world.transport.is_encrypted,
    }


def outages(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Two emulated hosts, a link of 200 Mbit/s, cut again and again in mid-step; half of them in an encrypted run."""
    import torch

    import unisono as un

    found = {"outages": 0, "outages_healed": 0, "outages_steps_repeated": 0, "outages_weights_equal": True}
    for encrypt, cuts in (("0", asked.outages - asked.outages // 2), ("1", asked.outages // 2)):
        if not cuts:
            continue
        os.environ["UNISONO_ENCRYPT"] = encrypt
        program = partial(train_through_outages, cuts, asked.cut, asked.seed)
        results = un.launch(program, workers=2, on=un.on.lab(hosts=2, net="200mbit", shaper="kernel"), threads=1)
        print([{name: value for name, value in one.items() if name != "weights"} for one in results], flush=True)
        net, optimizer = make_wide()
        for step in range(results[0]["made"]):
            optimizer.zero_grad()
            net(torch.cat([make_rows(step, rank) for rank in range(2)])).square().mean().backward()
            optimizer.step()
        found["outages"] += cuts
        found["outages_healed"] += results[1]["healed"]
        found["outages_steps_repeated"] += sum(abs(one["steps"] - results[0]["made"]) for one in results)
        right = all(torch.allclose(one["weights"], net.weight, rtol=1e-10, atol=0) for one in results)
        found["outages_weights_equal"] &= right and all(one["encrypted"] == (encrypt == "1") for one in results)
    os.environ.pop("UNISONO_ENCRYPT", None)
    return found


def measure_process(pid: int) -> tuple[float, int, int]:
    """Resident MB, open files, threads."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
    )


def soak(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A kill every few seconds, of any worker but one."""
    from unisono.launchers import elastic

    runs: list[elastic.ElasticSupervisor[Any]] = []
    act = elastic.ElasticSupervisor.act

    def watch(self: elastic.ElasticSupervisor[Any], now: float) -> None:
        act(self, now)
        runs[:] = [self]

    elastic.ElasticSupervisor.act = watch  # type: ignore[method-assign]
    seen: list[tuple[float, ...]] = []
    kills, stop = [0], threading.Event()

    def killer() -> None:
        draw, began = random.Random(asked.seed), time.monotonic()
        while not runs or not runs[0].connections:
            time.sleep(0.1)
        keeper = next(iter(runs[0].connections.values())).worker
        while not stop.wait(asked.every):
            workers = [connection.worker for connection in list(runs[0].connections.values())]
            victims = [worker for worker in workers if worker is not keeper]
            if victims:
                draw.choice(victims).send(signal.SIGKILL)
                kills[0] += 1
            if keeper.ended is None:
                seen.append(
                    (
                        time.monotonic() - began,
                        *measure_process(os.getpid()),
                        *measure_process(keeper.process.pid),
                    )
                )

    thread = threading.Thread(target=killer, daemon=True)
    thread.start()
    steps = int(asked.soak * asked.soak_rate)
    try:
        results, _ = run(
            f"{folder}/soak",
            workers=asked.workers,
            least=1,
            steps=steps,
            faults="",
            saves_every=200,
            sleep_s=1 / asked.soak_rate,
        )
    finally:
        stop.set()
        thread.join()
        elastic.ElasticSupervisor.act = act  # type: ignore[method-assign]
    whole = [row for row in seen if row[4] > 0]  # not as the worker ends
    parts = [whole[len(whole) * a // 20 : len(whole) * b // 20] for a, b in ((3, 5), (18, 20))]  # 15-25 %, 90-100 %
    before, after = ([statistics.median(column) for column in zip(*part, strict=True)] for part in parts)
    grown = [b - a for a, b in zip(before, after, strict=True)]
    names = (
        "soak_s",
        "launcher_mb",
        "launcher_handles",
        "launcher_threads",
        "worker_mb",
        "worker_handles",
        "worker_threads",
    )
    undisturbed, _ = run(
        f"{folder}/soakplain", workers=asked.workers, least=1, steps=steps, faults="", saves_every=10**9
    )
    same = compare(results, undisturbed[0], steps)
    return {**dict(zip(names, grown, strict=True)), "soak_s": seen[-1][0], "soak_kills": kills[0]} | {
        f"soak_{name}": value for name, value in same.items()
    }


PARTS = {
    "kills": kill_many,
    "others": other_faults,
    "loops": loops,
    "strangers": strangers,
    "outages": outages,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--least", type=int, default=2, help="go on with so many, while a replacement starts")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--sleep", type=float, default=0.02, help="seconds beside each step, so that there is time for kills"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--soak", type=float, default=0.0, metavar="S", help="instead: so many seconds with a kill now and then"
    )
    parser.add_argument("--messages", type=int, default=10_000, help="of strangers")
    parser.add_argument("--outages", type=int, default=20, help="of a link between two hosts")
    parser.add_argument("--cut", type=float, default=5.0, help="seconds that each of these lasts")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run; default: all of %(default)s")
    parser.add_argument("--loops", type=int, default=10, help="schedules of kills of each loop as people write them")
    parser.add_argument("--short", action="store_true", help="a tenth of all of it, without strangers: about a minute")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between the kills of --soak")
    parser.add_argument("--soak-rate", type=float, default=50.0, help="steps a second of --soak, at most")
    asked = parser.parse_args()
    if asked.short:
        asked.kills, asked.steps, asked.loops, asked.messages = 10, 120, 2, 0
        asked.outages, asked.cut = 2, 1.0
    import torch  # noqa: F401 - so that workers are forked

    with tempfile.TemporaryDirectory() as folder:
        if asked.soak:
            results = soak(asked, folder)
        else:
            results: dict[str, Any] = {}
            for name in asked.only.split(","):
                results |= PARTS[name](asked, folder)
    finish(results)


if __name__ == "__main__":
    main()
