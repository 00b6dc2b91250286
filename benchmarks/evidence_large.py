"""Part of evidence.py: tasks of a size that means something, for a machine with a GPU, in pieces of some minutes.

text25, text125: a GPT of 25 M parameters (one of 125 M) on the bytes of 52 MB of Python source and documentation,
    sequences of 256; judged by the loss on a hundredth of them.
images: a ResNet of 0.7 M parameters on Fashion-MNIST, images moved and mirrored; judged by accuracy on its test set.
text3: a GPT of 2.7 M parameters on the same text, for CPUs.

    python benchmarks/evidence_large.py prepare --data DATA      # text.bin, images.npz: from WHEELS and FASHION
    python benchmarks/evidence_large.py text25 --data DATA --workers 8 --minutes 8 --device cuda --out large.jsonl
    python benchmarks/evidence_large.py draw --out large.jsonl   # the picture beside it: loss over bytes, all methods

The second is called again until nothing is left: a line stands for each run that has ended, and a run that was cut goes
on from its checkpoint beside the file.

First the search: every variant at three learning rates, and with each of three outer rates where it has one, for a
quarter of the steps and with a seed of its own. Then each at its best, over the seeds. The rate rises over the first
twentieth of the steps and falls as a cosine to a tenth. A line has the held-out loss, the bytes that a rank had sent
and the seconds so far, at twenty places of the run: exchanges of `consolidate` for that are not counted.

Where there is no network, a course in time is predicted: what the steps took where a worker had the device to itself
(`compute_s`), and the bytes at the speed of the link, one after the other: methods that send behind the program are
better than that.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import math
import shutil
import statistics
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from evidence_rules import read
from evidence_tasks import ADAM, SGD, TUNED, Data, Run, Variant, append, make_optimizers, make_transformer, sent
from measure import finish

# `pip download --only-binary=:all: --no-deps NAME==VERSION`: wheels are the same everywhere, and so is the text.
WHEELS = ("sympy==1.13.3", "Django==5.1.4", "networkx==3.4.2", "ansible==11.1.0")
TEXT_BYTES = 52_000_000
TEXT_SHA256 = "4ee80e076e236f0c47e418e8ec690b55da4fe8bdd486b79d46da16dd59186473"
KINDS = (".py", ".rst", ".txt", ".md", ".html", ".yml")
FASHION = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
PLACES = 20  # of a run, where it is judged
RATES, OUTERS = (0.3, 1.0, 3.0), (0.4, 0.7, 1.0)
LINKS = (100.0, 1000.0, 10_000.0)  # Mbit/s
LENGTH = 256


class Large(NamedTuple):
    """A task: of which small one it is a larger kind, and how long and wide it is."""

    like: str
    steps: int
    batch: int  # of all workers together
    adam: float
    sgd: float
    make: Callable[[Path], Data]


VARIANTS = {
    "allreduce": Variant("allreduce"),
    "adam": Variant("allreduce", adam=True),
    "bf16": Variant("bf16", adam=True),
    "bytegrad": Variant("bytegrad", adam=True),
    "fp8": Variant("fp8", adam=True),
    "loco": Variant("loco", adam=True),
    "powersgd": Variant("warmup(powersgd(rank=4), steps={tenth})", adam=True),
    "topk": Variant("warmup(topk(k=0.01), steps={tenth})", adam=True),
    "cocktail": Variant("warmup(cocktail, steps={tenth})", adam=True),
    "ef21": Variant("ef21(topk(k=0.01, feedback=False))", momentum=0.0),
    "demo": Variant("demo", momentum=0.0),
    "qadam": Variant("qadam(warmup={tenth})", adam=True),
    "zero_one_adam": Variant("zero_one_adam(warmup={tenth}, start={quarter}, double=32, every=16)", adam=True),
    "local_sgd": Variant("local_sgd(every=16, start={tenth})", adam=True),
    "diloco": Variant("diloco(every=30, outer_lr={outer})", adam=True, outer=0.7),
    "diloco_streaming": Variant("diloco(every=30, fragments=4, delay=2, outer_lr={outer})", adam=True, outer=0.7),
    "muloco": Variant("diloco(every=30, outer_lr={outer})", muon=True, outer=0.7),
    "sparseloco": Variant("sparseloco(every=30, outer_lr={outer})", adam=True, outer=1.0),
    "async_diloco": Variant("async_diloco(every=30, outer_lr={outer})", adam=True, outer=0.7),
    "sparta": Variant("sparta(share=0.005)", adam=True),
    "gossip": Variant("gossip(exponential)", adam=True),
}


# Data --------------------------------------------------------------------------------------------------------


def prepare(folder: Path, fashion: Path = FASHION) -> dict[str, Any]:
    """`text.bin` from the wheels in the folder, and `images.npz` from Debian's files, as far as these are there."""
    import numpy as np

    made: dict[str, Any] = {}
    wheels = [next(folder.glob(f"{name.split('==')[0]}-{name.split('==')[1]}-*.whl"), None) for name in WHEELS]
    if all(wheels):
        text = b"".join(islice(read_texts([path for path in wheels if path is not None]), TEXT_BYTES))[:TEXT_BYTES]
        (folder / "text.bin").write_bytes(text)
        made |= {"text_bytes": len(text), "text_sha256": hashlib.sha256(text).hexdigest()}
    if fashion.exists():
        names = {"x": "train-images-idx3", "y": "train-labels-idx1", "test_x": "t10k-images-idx3"}
        arrays = {key: read_idx(fashion / f"{name}-ubyte.gz") for key, name in names.items()}
        np.savez_compressed(folder / "images.npz", **arrays, test_y=read_idx(fashion / "t10k-labels-idx1-ubyte.gz"))
        made["images"] = len(arrays["x"])
    return made


def read_texts(wheels: Sequence[Path]) -> Iterator[bytes]:
    """Sources and documentation in wheels: in order of their names, each different text once, and a line between."""
    seen, total = set(), 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as files:
            for name in sorted(files.namelist()):
                if not name.endswith(KINDS) or total > TEXT_BYTES:
                    continue
                text = files.read(name)
                mark = hashlib.sha256(text).digest()
                if text and mark not in seen:
                    seen.add(mark)
                    total += len(text) + 1
                    yield text + b"\n"


def read_idx(path: Path) -> Any:
    """Fashion-MNIST's files: a head of 4 bytes a dimension, then bytes."""
    import numpy as np

    raw = gzip.decompress(path.read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def gpt(width: int, layers: int, judged: int, folder: Path) -> Data:
    """`judged`: sequences that are held out."""
    import numpy as np
    import torch

    raw = (folder / "text.bin").read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != TEXT_SHA256:
        raise SystemExit(f"{folder / 'text.bin'} has the hash {found}, not {TEXT_SHA256}: make it by --prepare")
    codes = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    rows = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    test = torch.arange(len(rows)) % 100 == 0
    held_out = rows[test][:: len(rows) // 100 // judged][:judged]
    model = make_transformer(256, width, layers, max(1, width // 64), LENGTH)
    kept = rows[~test]
    return Data(model, (kept[:, :-1], kept[:, 1:]), (held_out[:, :-1], held_out[:, 1:]), f"text {found[:12]}")


def images(folder: Path) -> Data:
    import numpy as np
    import torch

    with np.load(folder / "images.npz") as kept:
        x, y, test_x, test_y = (torch.from_numpy(kept[name]) for name in ("x", "y", "test_x", "test_y"))
    return Data(make_resnet(), (x, y), (test_x[:, None].float() / 255, test_y.long()), "Fashion-MNIST")


def make_resnet(width: int = 32) -> Any:
    """Three stages of two blocks, with group norms: nothing that workers would have to agree on."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, after: int, stride: int) -> None:
            super().__init__()
            self.ways = nn.Sequential(
                *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(8, after), nn.ReLU()),
                *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(8, after)),
            )
            self.short = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

        def forward(self, x: Any) -> Any:
            return (self.ways(x) + self.short(x)).relu()

    widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def augment(x: Any, seed: int) -> Any:
    """Images of this batch moved by up to 2 pixels and half of them mirrored, each in its own way."""
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(seed)
    padded, n = F.pad(x[:, None].float() / 255, (2, 2, 2, 2)), len(x)
    down, right = (torch.randint(5, (n, 1), generator=generator) + torch.arange(28) for _ in range(2))
    moved = padded[torch.arange(n)[:, None, None], 0, down[:, :, None], right[:, None, :]][:, None]
    mirrored = torch.rand(n, generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], moved.flip(3), moved)


TASKS = {
    "text3": Large("text", 300, 16, 1e-3, 0.2, partial(gpt, 192, 6, 64)),
    "text25": Large("text", 2000, 128, 1e-3, 0.2, partial(gpt, 512, 8, 512)),
    "text125": Large("text", 2000, 128, 6e-4, 0.2, partial(gpt, 896, 13, 512)),
    "images": Large("digits", 2000, 256, 1e-3, 0.1, images),
}
for _name, _task in TASKS.items():
    ADAM[_name], SGD[_name] = _task.adam, _task.sgd


# What there is to do -----------------------------------------------------------------------------------------


def search(task: str, names: Sequence[str], steps: int, workers: int) -> dict[str, list[Run]]:
    """By variant: the runs of the search, a quarter of the steps."""
    found = {}
    for name in names:
        variant = VARIANTS[name]
        outers = OUTERS if variant.outer else (0.0,)
        tried = [variant.at(rate)._replace(outer=outer) for rate in RATES for outer in outers]
        found[name] = [Run(task, one, TUNED, max(1, steps // 4), workers) for one in tried]
    return found


def best(runs: Sequence[Run], lines: dict[str, dict[str, Any]]) -> Variant | None:
    """The variant of a search with the least held-out loss; None while one of its runs is still to be made."""
    if any(run.key not in lines for run in runs):
        return None
    losses = [lines[run.key].get("loss") for run in runs]
    return runs[min(range(len(runs)), key=lambda i: math.inf if losses[i] is None else losses[i])].variant


def left(task: str, names: Sequence[str], seeds: int, steps: int, workers: int, lines: dict[str, Any]) -> list[Run]:
    """What is still to be made: searches, then the runs of those whose search has ended."""
    tried = search(task, names, steps, workers)
    todo = [run for runs in tried.values() for run in runs]
    for name in names:
        chosen = best(tried[name], lines)
        todo += [Run(task, chosen, seed, steps, workers) for seed in range(seeds) if chosen is not None]
    return [run for run in todo if run.key not in lines]


# A run, in each worker ---------------------------------------------------------------------------------------


def work(runs: list[Run], data: str, path: str, session: str, device: str, until: float) -> None:
    """In each worker: one run after the other until the time is over; rank 0 appends each result to the file."""
    import unisono as un

    world = un.join(device=device)
    for run in runs:
        found = train(run, world, Path(data), Path(path), until)
        if found is None:
            return
        if world.rank == 0:
            line = {"kind": "run", "key": run.key, "task": run.task, "spec": run.variant.told(run.steps)}
            append(path, line | {"seed": run.seed, "steps": run.steps, "session": session} | found)


def train(run: Run, world: Any, folder: Path, path: Path, until: float) -> dict[str, Any] | None:
    """One run to its end, or to a checkpoint when the time is over; then None."""
    import torch
    from torch.nn import functional as F

    import unisono as un

    torch.manual_seed(run.seed)
    data = TASKS[run.task].make(folder)
    model = data.model.to(world.device)
    optimizers = make_optimizers(run, model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, partial(rate_at, steps=run.steps)) for one in optimizers]
    replica: Any = un.parallel(model, optimizers, run.variant.told(run.steps), world=world)
    shard = un.shard(data.train, batch_size=TASKS[run.task].batch, seed=run.seed, name=run.key, world=world)
    kept = path.parent / f"{path.stem}-{hashlib.sha256(run.key.encode()).hexdigest()[:12]}"
    course: list[list[float]] = []  # step, loss, accuracy, bytes, seconds
    if kept.exists():
        extra: Any = un.load(kept, replica).extra
        course = extra["course"]
        for schedule, state in zip(schedules, extra["schedules"], strict=True):
            schedule.load_state_dict(state)
    at, nbytes, seconds = course[-1][0] if course else 0, *(course[-1][3:] if course else (0.0, 0.0))
    places = sorted({max(1, round(run.steps * i / PLACES)) for i in range(1, PLACES + 1)})
    batches = chain.from_iterable(repeat(shard))
    for place in [place for place in places if place > at]:
        start = time.perf_counter()
        for step, (x, y) in enumerate(islice(batches, int(place - at)), int(at)):
            if run.task == "images":
                x = augment(x, 1_000_003 * run.seed + 1009 * step + world.rank)
            for optimizer in optimizers:
                optimizer.zero_grad()
            x, y = (part.to(world.device) for part in (x, y))
            F.cross_entropy(
                model(x if x.is_floating_point() else x.long()).flatten(0, -2), y.long().flatten()
            ).backward()
            for one in (*optimizers, *schedules):
                one.step()
        world.barrier()
        seconds, nbytes, at = seconds + time.perf_counter() - start, nbytes + sent(world, start), place
        course.append([at, *judge(replica, data, world), nbytes, seconds])
        over = torch.tensor(float(time.time() > until))
        if world.all_reduce(over, "max", tag="barrier").wait().item() and at < run.steps:
            un.save(kept, replica, extra={"schedules": [one.state_dict() for one in schedules], "course": course})
            return None
    replica.close()
    if world.rank == 0:
        shutil.rmtree(kept, ignore_errors=True)
    _, loss, accuracy, *_ = course[-1]
    sizes = {"parameters": sum(p.numel() for p in model.parameters()), "workers": world.size}
    means = world.gather_objects([row[3] for row in course])
    rows = [
        [*row[:3], statistics.mean(each), row[4]] for row, each in zip(course, zip(*means, strict=True), strict=True)
    ]
    return {"loss": loss, "accuracy": accuracy, "bytes": rows[-1][3], "seconds": seconds, "course": rows, **sizes} | {
        "data": data.source
    }


def rate_at(step: int, steps: int) -> float:
    """Of the learning rate: up over a twentieth of the steps, then a cosine down to a tenth."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))


def judge(replica: Any, data: Data, world: Any) -> list[float]:
    """Held-out loss and accuracy of the agreed model."""
    import torch
    from torch.nn import functional as F

    model = replica.consolidate()
    training, losses, right, count = model.training, 0.0, 0.0, 0
    with torch.no_grad():
        model.eval()
        for x, y in zip(data.held_out[0].split(64), data.held_out[1].split(64), strict=True):
            x, y = x.to(world.device), y.to(world.device).long().flatten()
            scores = model(x if x.is_floating_point() else x.long()).flatten(0, -2)
            losses += F.cross_entropy(scores, y, reduction="sum").item()
            right += (scores.argmax(1) == y).sum().item()
            count += len(y)
        model.train(training)
    return [losses / count, right / count]


def time_alone(task: str, workers: int, data: str, device: str) -> float:
    """Seconds of a step of one worker that has the device to itself, with its part of the batch."""
    import torch
    from torch.nn import functional as F

    where, taken = torch.device(device), []
    loaded = TASKS[task].make(Path(data))
    model = loaded.model.to(where)
    [optimizer] = make_optimizers(Run(task, VARIANTS["adam"], 0, 1), model)
    n = TASKS[task].batch // workers
    x, y = (part[:n].to(where) for part in loaded.train)
    x = augment(x.cpu(), 0).to(where) if task == "images" else x.long()
    for _ in range(12):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.long().flatten())
        loss.backward()
        optimizer.step()
        loss.item()  # the device has finished
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


# What came of it ---------------------------------------------------------------------------------------------


def chosen(task: str, names: Sequence[str], steps: int, workers: int, lines: dict[str, Any]) -> dict[str, list[Any]]:
    """By variant: the lines of its runs over the seeds, at its best rates."""
    found: dict[str, list[Any]] = {}
    for name, runs in search(task, names, steps, workers).items():
        variant = best(runs, lines)
        if variant is not None:
            keys = [Run(task, variant, seed, steps, workers).key for seed in range(20)]
            found[name] = [lines[key] | {"variant": variant} for key in keys if key in lines]
    return {name: each for name, each in found.items() if each}


def seconds_to(course: Sequence[Sequence[float]], target: float, compute_s: float, mbit: float) -> float | None:
    """Until the held-out loss is at most `target`, on a link of this speed: compute, then bytes."""
    for step, loss, _, nbytes, _ in course:
        if loss <= target:
            return step * compute_s + nbytes * 8 / (mbit * 1e6)
    return None


def tell(found: dict[str, list[Any]], compute_s: float) -> dict[str, Any]:
    """Print a line for each variant, and give the numbers: loss, spread, effect size against AdamW's exact mean, bytes,
    and how many times as fast it comes to within 1 % of that one's loss on each link."""
    reference, told = found.get("adam"), {}
    for name, lines in found.items():
        losses = [math.inf if line["loss"] is None else line["loss"] for line in lines]
        mean, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
        said: dict[str, Any] = {"loss": mean, "spread": spread, "seeds": len(losses), "bytes": lines[0]["bytes"]}
        said |= {"lr": lines[0]["variant"].lr[1], "outer": lines[0]["variant"].outer}
        if reference is not None:
            theirs = [line["loss"] for line in reference]
            said["effect"] = (mean - statistics.mean(theirs)) / statistics.mean(theirs)
            target = 1.01 * statistics.mean(theirs)
            for mbit in LINKS:
                each = [seconds_to(run["course"], target, compute_s, mbit) for run in (lines[0], reference[0])]
                said[f"faster_{mbit:g}"] = each[1] / each[0] if each[0] and each[1] else None
        told[name] = said
        print(f"{name:<18}" + ", ".join(f"{k} {v:.4g}" if v is not None else f"{k} never" for k, v in said.items()))
    return told


def draw(found: dict[str, list[Any]], title: str, path: Path) -> None:
    """Held-out loss over the bytes that a worker has sent, a line a method: left is cheap, low is good."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    for i, (name, lines) in enumerate(found.items()):
        course = [row for row in lines[0]["course"] if row[3] > 0]
        exact = name in ("adam", "allreduce")
        if course:
            x, y = [row[3] / 1e6 for row in course], [row[1] for row in course]
            colour = "black" if exact else plt.get_cmap("tab20")(i % 20)
            axes.plot(x, y, color=colour, lw=2.2 if exact else 1.4, ls="--" if i >= 20 else "-")
            axes.annotate(
                name, (x[-1], y[-1]), (4, 0), textcoords="offset points", fontsize=8, color=colour, va="center"
            )
    axes.set(xscale="log", xlabel="MB that a worker has sent so far", ylabel="held-out loss", title=title)
    axes.grid(alpha=0.25, which="both", lw=0.5)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    from evidence import begin_session

    import unisono as un

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "draw", *TASKS))
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of wheels, text.bin and images.npz")
    parser.add_argument("--fashion", type=Path, default=FASHION, help=f"Fashion-MNIST's files (default {FASHION})")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run (default: by the task)")
    parser.add_argument("--minutes", type=float, default=8.0, help="then runs are cut, to go on from their checkpoints")
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
    task, steps, until = asked.what, asked.steps or TASKS[asked.what].steps, time.time() + 60 * asked.minutes
    session = begin_session(asked.out, task)
    if not any(
        line["kind"] == "compute" and (line["task"], line["workers"]) == (task, asked.workers) for line in lines
    ):
        how = (task, asked.workers, str(asked.data.absolute()), asked.device)
        [step_s] = un.launch(time_alone, workers=1, args=how, threads=1)
        append(asked.out, {"kind": "compute", "task": task, "workers": asked.workers, "step_s": step_s})
    while True:
        made = {line["key"]: line for line in read([asked.out]) if line["kind"] == "run"}
        todo = left(task, asked.variants, asked.seeds, steps, asked.workers, made)
        if not todo or time.time() > until:
            break
        given = (todo, str(asked.data.absolute()), str(asked.out), session, asked.device, until)
        un.launch(work, workers=asked.workers, args=given, threads=1, output="rank0", timeout_s=None)
    found = chosen(task, asked.variants, steps, asked.workers, made)
    compute = [line["step_s"] for line in read([asked.out]) if line["kind"] == "compute" and line["task"] == task]
    told = tell(found, compute[-1])
    finish({f"{name}_{key}": value for name, each in told.items() for key, value in each.items()} | {"left": len(todo)})


def draw_all(lines: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    """A picture for each task and number of workers that the file has runs of."""
    made = {line["key"]: line for line in lines if line["kind"] == "run"}
    kinds = {(line["task"], line["workers"]) for line in made.values()}
    names = []
    for task, workers in sorted(kinds):
        steps = asked.steps or max(line["steps"] for line in made.values() if line["task"] == task)
        found = chosen(task, asked.variants, steps, workers, made)
        names.append(f"{asked.out.stem}-{task}-{workers}.svg")
        draw(found, f"{task}, {workers} workers, {steps} steps", asked.out.parent / names[-1])
    finish({"pictures": names})


if __name__ == "__main__":
    import evidence_large  # workers import it by this name

    evidence_large.main()
