"""Part of evidence.py: tasks of a size that means something, for a machine with a GPU, in pieces of some minutes.

text25, text125: a GPT of 25 M parameters (one of 125 M) on the bytes of 52 MB of Python source and documentation,
    64 sequences of 256 a step; judged by the loss on a hundredth of them.
images: a ResNet of 0.7 M parameters on Fashion-MNIST, images moved and mirrored; judged by accuracy on its test set.
text3: a GPT of 2.7 M parameters on the same text, for CPUs.

    python benchmarks/evidence_large.py prepare --data DATA      # text.bin, images.npz: from WHEELS and FASHION
    python benchmarks/evidence_large.py text25 --data DATA --workers 8 --minutes 8 --device cuda --jobs 6
    python benchmarks/evidence_large.py draw --out large.jsonl   # the picture beside it: loss over bytes, all methods

The second is called again until nothing is left: a line stands for each run that has ended; those that the time cut
are made anew. A run is one process, whose threads are the ranks (evidence_ranks.py): what is learnt does not depend on
where ranks run. `--jobs` runs share the GPU.

First the search, for a quarter of the steps and with a seed of its own: every variant at three learning rates, then,
where it has an outer rate, at the best of these with two more outer rates. Then each at its best, over the seeds; the
variants of FIRST before the others. The rate rises over the first twentieth of the steps and falls as a cosine to a
tenth. A line has the held-out loss and the bytes that a rank had sent, at twenty places of the run: exchanges of
`consolidate` for that are not counted.

A course in time is predicted: what the steps took where a worker had the device to itself (`step_s`), and the bytes at
the speed of the link, one after the other: methods that send behind the program are better than that.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import hashlib
import itertools
import math
import multiprocessing
import statistics
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from evidence_rules import read
from evidence_tasks import ADAM, MUON, SGD, TUNED, Data, Run, Variant, append, sent
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
    score: Callable[..., tuple[Any, Any]]  # of a model and a batch: what the model says, and what is right

    def loss(self, model: Any, *batch: Any) -> Any:
        from torch.nn import functional as F

        return F.cross_entropy(*self.score(model, *batch))


FIRST = ("adam", "sparseloco", "diloco", "muloco")  # of which all is made before the others
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
    return Data(make_gpt(width, layers), (rows[~test],), (held_out,), f"text {found[:12]}")


def make_gpt(width: int, layers: int, letters: int = 256) -> Any:
    """A decoder that predicts the next byte: blocks as in GPT-2, heads of 64, without biases."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    def linear(before: int, after: int, scale: float = 1.0) -> Any:
        made = nn.Linear(before, after, bias=False)
        nn.init.normal_(made.weight, std=0.02 * scale)
        return made

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.LayerNorm(width, bias=False) for _ in range(2))
            self.qkv, self.out = linear(width, 3 * width), linear(width, width, (2 * layers) ** -0.5)
            self.up, self.down = linear(width, 4 * width), linear(4 * width, width, (2 * layers) ** -0.5)

        def forward(self, x: Any) -> Any:
            heads = self.qkv(self.first(x)).unflatten(-1, (3, width // 64, 64))
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.second(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(letters, width)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(width, bias=False), linear(width, letters)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.blocks(self.embed(x) + self.position)))

    return GPT()


def score_text(model: Any, rows: Any) -> tuple[Any, Any]:
    """The next byte, for each but the last of a sequence."""
    return model(rows[:, :-1].long()).flatten(0, -2).float(), rows[:, 1:].long().flatten()


def score_images(model: Any, x: Any, y: Any, *moves: Any) -> tuple[Any, Any]:
    """`moves`: in training."""
    return model(augment(x, *moves) if moves else x[:, None].float() / 255).float(), y


def images(folder: Path) -> Data:
    import numpy as np
    import torch

    with np.load(folder / "images.npz") as kept:
        x, y, test_x, test_y = (torch.from_numpy(kept[name]) for name in ("x", "y", "test_x", "test_y"))
    return Data(make_resnet(), (x, y.long()), (test_x, test_y.long()), "Fashion-MNIST")


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


def augment(x: Any, moves: Any) -> Any:
    """Images of this batch moved and mirrored, each in its own way, as `draw_moves` has it."""
    import torch
    from torch.nn import functional as F

    padded, n, here = F.pad(x[:, None].float() / 255, (2, 2, 2, 2)), len(x), torch.arange(28, device=x.device)
    down, right = (each[:, None] + here for each in moves[:2])
    moved = padded[torch.arange(n, device=x.device)[:, None, None], 0, down[:, :, None], right[:, None, :]][:, None]
    return torch.where(moves[2][:, None, None, None] > 0, moved.flip(3), moved)


def draw_moves(n: int, seed: int) -> Any:
    """For each image: from 0 to 4 pixels down and to the right, 2 being none, and whether it is mirrored."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(5, (2, n), generator=generator)
    return torch.cat([both, torch.randint(2, (1, n), generator=generator)])


TASKS = {
    "text3": Large("text", 300, 16, 1e-3, 0.2, partial(gpt, 192, 6, 64), score_text),
    "text25": Large("text", 2000, 64, 1e-3, 0.2, partial(gpt, 512, 8, 512), score_text),
    "text125": Large("text", 2000, 64, 6e-4, 0.2, partial(gpt, 896, 13, 512), score_text),
    "images": Large("digits", 2000, 256, 1e-3, 0.1, images, score_images),
}
for _name, _task in TASKS.items():
    ADAM[_name], SGD[_name] = _task.adam, _task.sgd


# What there is to do -----------------------------------------------------------------------------------------


def search(task: str, name: str, steps: int, workers: int, lines: dict[str, Any]) -> tuple[list[Run], list[Run]]:
    """The runs of a variant's search that are known so far, a quarter of the steps each: all, and those still to be
    made. Outer rates are tried at the best of the learning rates."""
    variant, count = VARIANTS[name], max(1, steps // 4)
    runs = [Run(task, variant.at(rate), TUNED, count, workers) for rate in RATES]
    if variant.outer and (found := best(runs, lines)) is not None:
        others = [found._replace(outer=outer) for outer in OUTERS if outer != variant.outer]
        runs += [Run(task, other, TUNED, count, workers) for other in others]
    return runs, [run for run in runs if run.key not in lines]


def best(runs: Sequence[Run], lines: dict[str, dict[str, Any]]) -> Variant | None:
    """The variant of a search with the least held-out loss; None while one of its runs is still to be made."""
    if any(run.key not in lines for run in runs):
        return None
    losses = [lines[run.key].get("loss") for run in runs]
    return runs[min(range(len(runs)), key=lambda i: math.inf if losses[i] is None else losses[i])].variant


def left(task: str, names: Sequence[str], seeds: int, steps: int, workers: int, lines: dict[str, Any]) -> list[Run]:
    """What can be made now and is not: searches and the runs of those whose search has ended; of FIRST all before the
    others, searches before runs, of the others a seed before the next."""
    todo: list[tuple[tuple[int, ...], Run]] = []
    for name in names:
        tried, missing = search(task, name, steps, workers, lines)
        rank = 0 if name in FIRST else 1
        todo += [((rank, 0), run) for run in missing]
        if not missing and (chosen := best(tried, lines)) is not None:
            runs = [Run(task, chosen, seed, steps, workers) for seed in range(seeds)]
            todo += [((rank, run.seed if rank else 1), run) for run in runs if run.key not in lines]
    return [run for _, run in sorted(todo, key=lambda one: one[0])]


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


def train(run: Run, folder: Path, device: str, until: float) -> dict[str, Any] | None:
    """One run to its end; None: the time was over before."""
    import torch
    from evidence_ranks import Ranks

    import unisono as un

    torch.manual_seed(run.seed)
    data = load(run.task, folder, device)
    ranks = Ranks(run.workers, TASKS[run.task].loss, torch.device(device))
    bodies = [data.model, *(copy.deepcopy(data.model) for _ in range(run.workers - 1))]

    def work(world: Any) -> dict[str, Any] | None:
        try:
            return learn(run, world, data, ranks, bodies[world.rank], until)
        except BaseException:
            ranks.give_up()
            raise

    start = time.perf_counter()
    found = un.run_threads(work, run.workers, device=device, timeout_s=120.0)[0]
    return None if found is None else found | {"seconds": time.perf_counter() - start}


def learn(run: Run, world: Any, data: Data, ranks: Any, body: Any, until: float) -> dict[str, Any] | None:
    """A rank's part of it."""
    from evidence_ranks import Rank

    import unisono as un

    task, model = TASKS[run.task], Rank(body, ranks, world.rank)
    optimizers = make_optimizers(run, body)
    schedules = [make_schedule(one, run.steps) for one in optimizers]
    replica: Any = un.parallel(model, optimizers, run.variant.told(run.steps), world=world)
    shard = un.shard(data.train, batch_size=task.batch, seed=run.seed, name=run.key, world=world)
    course: list[list[float]] = []  # step, loss, accuracy, bytes
    places = sorted({max(1, round(run.steps * i / PLACES)) for i in range(1, PLACES + 1)})
    batches, at, nbytes = chain.from_iterable(repeat(shard)), 0, 0.0
    for place in places:
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
            return None
    replica.close()
    _, loss, accuracy, _ = course[-1]
    means = world.gather_objects([row[3] for row in course])
    rows = [[*row[:3], statistics.mean(each)] for row, each in zip(course, zip(*means, strict=True), strict=True)]
    sizes = {"parameters": sum(p.numel() for p in body.parameters()), "workers": world.size, "data": data.source}
    return {"loss": loss, "accuracy": accuracy, "bytes": rows[-1][3], "course": rows, **sizes}


def make_optimizers(run: Run, body: Any) -> list[Any]:
    """As in evidence_tasks.py, in fused kernels where there are such."""
    import torch
    from evidence_ranks import BatchedMuon

    fused = next(body.parameters()).is_cuda
    if run.variant.muon:
        hidden = [p for p in getattr(body, "blocks", body).parameters() if p.dim() == 2]
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
        for batch in zip(*(part.split(256) for part in data.held_out), strict=True):
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
    model = Rank(loaded.model, Ranks(1, TASKS[task].loss, torch.device(device)), 0)
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

    torch.set_num_threads(2)
    sys.setswitchinterval(0.0005)
    while (asked := pipe.recv()) is not None:
        run, alone = asked
        try:
            if alone:
                found: Any = {"step_s": time_alone(run.task, run.workers, data, device)}
            else:
                found = train(run, Path(data), device, until)
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
                if not workers.is_full and time.time() < until:
                    workers.begin(run)
            if not workers.running or time.time() > until + 20:
                return todo
            for each in workers.hear(1.0):
                note(*each)
    finally:
        workers.close()


# What came of it ---------------------------------------------------------------------------------------------


def chosen(task: str, names: Sequence[str], steps: int, workers: int, lines: dict[str, Any]) -> dict[str, list[Any]]:
    """By variant: the lines of its runs over the seeds, at its best rates."""
    found: dict[str, list[Any]] = {}
    for name in names:
        variant = best(search(task, name, steps, workers, lines)[0], lines)
        if variant is not None:
            keys = [Run(task, variant, seed, steps, workers).key for seed in range(20)]
            found[name] = [lines[key] | {"variant": variant} for key in keys if key in lines]
    return {name: each for name, each in found.items() if each}


def seconds_to(course: Sequence[Sequence[float]], target: float, compute_s: float, mbit: float) -> float | None:
    """Until the held-out loss is at most `target`, on a link of this speed: compute, then bytes."""
    for step, loss, _, nbytes, *_ in course:
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

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "draw", *TASKS))
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of wheels, text.bin and images.npz")
    parser.add_argument("--fashion", type=Path, default=FASHION, help=f"Fashion-MNIST's files (default {FASHION})")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
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
    todo = make_all(asked, steps, begin_session(asked.out, task))
    lines = read([asked.out])
    made = {line["key"]: line for line in lines if line["kind"] == "run"}
    found = chosen(task, asked.variants, steps, asked.workers, made)
    compute = [line["step_s"] for line in lines if line["kind"] == "compute" and line["task"] == task]
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
