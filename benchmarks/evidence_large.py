"""Part of evidence.py: tasks of a size that means something, for a machine with a GPU, in pieces of some minutes.

text25_128, text25, text125: a GPT of 25 M parameters (one of 125 M) on the bytes of 52 MB of Python source and
    documentation, 128 (the others: 32) sequences of 256 a step; judged by the loss on a hundredth of them.
images: a ResNet of 0.7 M parameters on Fashion-MNIST, images moved and mirrored; judged by accuracy on its test set.
    Without Muon, which is for matrices.
text3: a GPT of 2.7 M parameters on the same text, for CPUs.

    python benchmarks/evidence_large.py prepare --data DATA      # text.bin, images.npz: from WHEELS and FASHION
    python benchmarks/evidence_large.py text25 --data DATA --workers 8 --minutes 8 --device cuda --jobs 6
    python benchmarks/evidence_large.py draw --out large.jsonl   # the picture beside it: loss over bytes, all methods

The second is called again until nothing is left: a line stands for each run that has ended; those that the time cut
are made anew. A run is one process, whose threads are the ranks (evidence_ranks.py): what is learnt does not depend on
where ranks run. `--jobs` runs share the GPU.

First the search, for a quarter of the steps and with a seed of its own: every variant at three learning rates, then,
where it has an outer rate, at the best of these with two more outer rates; beyond the edge where the best one is there.
Then each at its best, over the seeds; the variants of FIRST before the others. The rate rises over the first twentieth
of the steps and falls as a cosine to a tenth. A line has the held-out loss and the bytes that a rank had sent, at
twenty places of the run, at the ends of rounds: exchanges of `consolidate` for that are not counted.

A course in time is predicted: what the steps took where a worker had the device to itself (`step_s`), and the bytes at
the speed of the link, one after the other: methods that send behind the program are better than that.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from evidence_large_results import TITLES, chosen, draw, searched, sizes, tell
from evidence_large_tasks import FASHION, TASKS, VARIANTS, Large, draw_moves, find_places, left, prepare, variants_of
from evidence_rules import read
from evidence_tasks import ADAM, MUON, SGD, TUNED, Data, Run, append, sent
from measure import finish

# A run, in one process --------------------------------------------------------------------------------------


_loaded: dict[tuple[str, str], Data] = {}


def load(task: str, folder: Path, device: str) -> Data:
    """A task's data, on the device; the model as the seed has made it is there too."""
    data = TASKS[task].make(folder)
    if (task, device) in _loaded:
        data = data._replace(train=_loaded[task, device].train, held_out=_loaded[task, device].held_out)
    else:
        data = data._replace(**{k: tuple(x.to(device) for x in getattr(data, k)) for k in ("train", "held_out")})
        _loaded[task, device] = data
    return data._replace(model=data.model.to(device))


def train(run: Run, folder: Path, device: str, until: float, turns: Any = None) -> dict[str, Any] | None:
    """One run to its end; None: the time was over before."""
    import torch
    from evidence_ranks import Ranks

    import unisono as un

    torch.manual_seed(run.seed)
    data = load(run.task, folder, device)
    bodies = [data.model, *(copy.deepcopy(data.model) for _ in range(run.workers - 1))]
    ranks = Ranks(bodies, TASKS[run.task].loss, torch.device(device))

    def work(world: Any) -> dict[str, Any] | None:
        try:
            with turns or nullcontext():
                found, replica = learn(run, world, data, ranks, bodies[world.rank], until)
            replica.close()  # threads end: none may wait for its turn
            return found
        except BaseException:
            ranks.give_up()
            raise

    start = time.perf_counter()
    found = un.run_threads(work, run.workers, device=device, timeout_s=120.0)[0]
    return None if found is None else found | {"seconds": time.perf_counter() - start}


def learn(run: Run, world: Any, data: Data, ranks: Any, body: Any, until: float) -> tuple[dict[str, Any] | None, Any]:
    """A rank's part of it."""
    from evidence_ranks import Rank

    import unisono as un

    task, model = TASKS[run.task], Rank(body, ranks, world.rank)
    optimizers = make_optimizers(run, body)
    schedules = [make_schedule(one, run.steps) for one in optimizers]
    replica: Any = un.parallel(model, optimizers, run.variant.told(run.steps), world=world)
    shard = un.shard(data.train, batch_size=task.batch, seed=run.seed, name=run.key, world=world)
    course: list[list[float]] = []  # step, loss, accuracy, bytes
    batches, at, nbytes = chain.from_iterable(repeat(shard)), 0, 0.0
    for place in find_places(run.steps):
        start = time.perf_counter()
        for step, batch in enumerate(islice(batches, place - at), at):
            if run.task == "images":
                moves = draw_moves(len(batch[0]), 1_000_003 * run.seed + 1009 * step + world.rank)
                batch = (*batch, moves.to(world.device))
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(*batch).backward()
            for one in (*optimizers, *schedules):
                one.step()
        world.barrier()
        nbytes, at = nbytes + sent(world, start), place
        if run.seed != TUNED or at == run.steps:
            course.append([at, *judge(replica, task, data, world), nbytes])
        if world.broadcast_object(time.time() > until) and at < run.steps:
            return None, replica
    _, loss, accuracy, _ = course[-1]
    means = world.gather_objects([row[3] for row in course])
    rows = [[*row[:3], statistics.mean(each)] for row, each in zip(course, zip(*means, strict=True), strict=True)]
    sizes = {"parameters": sum(p.numel() for p in body.parameters()), "workers": world.size, "data": data.source}
    return {"loss": loss, "accuracy": accuracy, "bytes": rows[-1][3], "course": rows, **sizes}, replica


def make_optimizers(run: Run, body: Any) -> list[Any]:
    """As in evidence_tasks.py, in fused kernels where there are such."""
    import torch
    from evidence_ranks import BatchedMuon

    fused = next(body.parameters()).is_cuda
    if run.variant.muon:
        hidden = getattr(body, "hidden", None) or [p for p in body.parameters() if p.dim() == 2]
        rest = [p for p in body.parameters() if not any(p is x for x in hidden)]
        muon = BatchedMuon(hidden, lr=run.share * MUON)
        return [muon, torch.optim.AdamW(rest, lr=run.share * ADAM[run.task], fused=fused)]
    if run.variant.adam:
        return [torch.optim.AdamW(body.parameters(), lr=run.share * ADAM[run.task], fused=fused)]
    rate = run.share * SGD[run.task]
    return [torch.optim.SGD(body.parameters(), lr=rate, momentum=run.variant.momentum, fused=fused)]


def make_schedule(optimizer: Any, steps: int) -> Any:
    import torch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_at, steps=steps))


def rate_at(step: int, steps: int) -> float:
    """Of the learning rate: up over a twentieth of the steps, then a cosine down to a tenth."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))


def judge(replica: Any, task: Large, data: Data, world: Any) -> list[float]:
    """Held-out loss and accuracy of the agreed model, by the first rank."""
    import torch
    from torch.nn import functional as F

    body = replica.consolidate().body
    if world.rank > 0:
        return [math.nan, math.nan]
    losses, right, count = 0.0, 0.0, 0
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=world.device.type == "cuda"):
        for batch in zip(*(part.split(128) for part in data.held_out), strict=True):
            scores, y = task.score(body, *batch)
            losses += F.cross_entropy(scores, y, reduction="sum").item()
            right, count = right + (scores.argmax(1) == y).sum().item(), count + len(y)
    return [losses / count, right / count]


def time_alone(task: str, workers: int, data: str, device: str) -> float:
    """Seconds of a step of one worker that has the device to itself, with its part of the batch."""
    import torch
    from evidence_ranks import Rank, Ranks

    import unisono as un

    loaded = load(task, Path(data), device)
    model = Rank(loaded.model, Ranks([loaded.model], TASKS[task].loss, torch.device(device)), 0)
    optimizers = make_optimizers(Run(task, VARIANTS["adam"], 0, 1), loaded.model)
    batch = [part[: TASKS[task].batch // workers] for part in loaded.train]
    batch += [draw_moves(len(batch[0]), 0).to(device)] if task == "images" else []

    def steps(world: Any) -> float:
        taken = []
        for _ in range(23):
            start = time.perf_counter()
            model(*batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if device != "cpu":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[3:])

    return un.run_threads(steps, 1)[0]


# Several runs at the same time -------------------------------------------------------------------------------


def work(pipe: Any, data: str, device: str, until: float) -> None:
    """In a process: one run after the other, as they are asked for. After one that failed another process goes on."""
    import torch
    from evidence_ranks import Turns

    torch.set_num_threads(2)
    turns = Turns()
    while (asked := pipe.recv()) is not None:
        run, alone = asked
        try:
            if alone:
                found: Any = {"step_s": time_alone(run.task, run.workers, data, device)}
            else:
                found = train(run, Path(data), device, until, turns)
        except BaseException:
            pipe.send({"error": traceback.format_exc()})
            return
        pipe.send(found)


class Workers:
    """Processes that make runs; each has one at a time."""

    def __init__(self, count: int, *given: Any) -> None:
        self._given = given
        self._context = multiprocessing.get_context("spawn")
        self._free = [self._start() for _ in range(count)]
        self._busy: dict[Any, tuple[Any, Run]] = {}

    def _start(self) -> tuple[Any, Any]:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs, *self._given), daemon=True)
        process.start()
        theirs.close()
        return process, mine

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def running(self) -> set[str]:
        return {run.key for _, run in self._busy.values()}

    def begin(self, run: Run, *, alone: bool = False) -> None:
        process, pipe = self._free.pop(0)
        pipe.send((run, alone))
        self._busy[pipe] = process, run

    def hear(self, timeout_s: float) -> Iterator[tuple[Run, Any]]:
        """What has ended: a run, and what it found."""
        for pipe in wait(list(self._busy), timeout_s):
            process, run = self._busy.pop(pipe)
            try:
                found = pipe.recv()
            except EOFError:
                found = {"error": f"its process has ended with {process.exitcode}"}
            if found is not None and "error" in found:
                process.kill()
                process, pipe = self._start()
            self._free.append((process, pipe))
            yield run, found

    def close(self) -> None:
        for process, _ in (*self._free, *((process, run) for process, run in self._busy.values())):
            process.kill()


def make_all(asked: argparse.Namespace, steps: int, session: str) -> list[Run]:
    """All runs that the time allows; gives those that are left."""
    task, until = asked.what, time.time() + 60 * asked.minutes
    workers = Workers(asked.jobs, str(asked.data.absolute()), asked.device, until)
    lines, failed = read([asked.out]), set()
    made = {line["key"]: line for line in lines if line["kind"] == "run"}
    todo = []
    step_s = {False: 0.04, True: 0.1}  # of the slowest of late, by whether it is Muon's

    def fits(run: Run) -> bool:
        return time.time() + run.steps * step_s[run.variant.muon] < until

    def note(run: Run, found: Any) -> None:
        if found is None:
            return
        kind = "error" if "error" in found else "compute" if "step_s" in found else "run"
        line = {"kind": kind, "key": run.key, "task": task, "workers": run.workers, "spec": run.variant.told(run.steps)}
        line |= {"seed": run.seed, "steps": run.steps, "session": session} | found
        append(asked.out, line)
        if kind == "error":
            failed.add(run.key)
            print(f"failed: {run.key}\n{found['error']}", flush=True)
        elif kind == "run":
            made[run.key] = line
            kind_s = step_s[run.variant.muon]
            step_s[run.variant.muon] = max(0.7 * kind_s, found["seconds"] / run.steps)
            print(f"{time.time() - until:.0f} s: {run.key}: {found['loss']:.4f}, {found['seconds']:.1f} s", flush=True)

    try:
        if not any(line["kind"] == "compute" and line["key"].startswith(f"{task} |") for line in lines):
            workers.begin(Run(task, VARIANTS["adam"], 0, steps, asked.workers), alone=True)
            for each in workers.hear(120.0):
                note(*each)
        while True:
            todo = left(task, asked.variants, asked.seeds, steps, asked.workers, made)
            todo = [run for run in todo if run.key not in failed]
            for run in [run for run in todo if run.key not in workers.running]:
                if not workers.is_full and fits(run):
                    workers.begin(run)
            if not workers.running or time.time() > until + 20:
                return todo
            for each in workers.hear(1.0):
                note(*each)
    finally:
        workers.close()


# The command -------------------------------------------------------------------------------------------------


def main() -> None:
    from evidence import begin_session

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "draw", *TASKS))
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of wheels, text.bin and images.npz")
    parser.add_argument("--fashion", type=Path, default=FASHION, help=f"Fashion-MNIST's files (default {FASHION})")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run (default: by the task)")
    parser.add_argument("--minutes", type=float, default=8.0, help="then runs that are under way are cut")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--device", default="cpu", help="that all workers share: cpu, cuda")
    parser.add_argument("--out", type=Path, default=Path("large.jsonl"))
    asked = parser.parse_args()
    asked.out = asked.out.absolute()
    if asked.what == "prepare":
        finish(prepare(asked.data, asked.fashion))
        return
    lines = read([asked.out]) if asked.out.exists() else []
    if asked.what == "draw":
        draw_all(lines, asked)
        return
    task, steps = asked.what, asked.steps or TASKS[asked.what].steps
    asked.variants = asked.variants or variants_of(task)
    todo = make_all(asked, steps, begin_session(asked.out, task))
    lines = read([asked.out])
    made = {line["key"]: line for line in lines if line["kind"] == "run"}
    found = chosen(task, asked.variants, steps, asked.workers, made)
    compute = [line["step_s"] for line in lines if line["kind"] == "compute" and line["task"] == task]
    told = tell(found, compute[-1])
    finish({f"{name}_{key}": value for name, each in told.items() for key, value in each.items()} | {"left": len(todo)})


def draw_all(lines: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    """A picture for each task and number of workers that the file has runs of."""
    names = []
    for one in sizes(lines):
        task, workers, steps, found = one if "adam" in one[3] else searched(one[0], one[1], lines)
        names.append(f"{asked.out.stem}-{task}-{workers}.png")
        each = {name: reached.lines for name, reached in found.items()}
        draw(each, f"{TITLES[task]}, {workers} workers, {steps:,} steps", asked.out.parent / names[-1])
    finish({"pictures": names})


if __name__ == "__main__":
    import evidence_large  # workers import it by this name

    evidence_large.main()
