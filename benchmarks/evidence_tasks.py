"""Part of evidence.py: the tasks, and one run of a variant on a task in each worker.

digits: a CNN of 0.12 M parameters on scikit-learn's digits (1497 of 8 x 8; without scikit-learn on digits that are made
    here), 64 a step; judged by accuracy on 300 others.
text: a transformer of 0.11 M parameters on the characters of Python's standard library, 32 sequences of 32 a step;
    judged by the loss on a hundredth of them.
long: the same text, a transformer of 0.2 M parameters, 8 sequences of 64 a step, 1,000 steps, by one worker: for what
    changes a step behind the program, which depends on no other worker.
sparse: logistic regression on 8 of 4000 features a sample (made), 64 samples a step; judged by the loss.
noise: no training: |sent - v|^2 / |v|^2 of a quantiser on 65,536 Gaussian numbers.
slow: no training result: windows a second of all workers, one of them 4 times as slow (compute is a sleep).

All variants of a task begin with the same weights and see the same batches (the seed decides both); the learning rate
falls to a fifth at 60 and at 85 % of the steps.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

WORKERS = 4
DECAYS = (0.6, 0.85)
TRAINED = ("digits", "text", "sparse", "long")
ALONE_ON = ("long",)  # tasks of one worker
STEPS = {"digits": 240, "text": 240, "sparse": 240, "long": 1000, "noise": 20, "slow": 30}
BATCH = {"digits": 64, "text": 32, "sparse": 64, "long": 8}
SGD = {"digits": 0.05, "text": 0.2, "sparse": 16.0}  # learning rates
ADAM = {"digits": 0.001, "text": 0.003, "sparse": 0.03, "long": 0.003}
LIKE = dict.fromkeys(("long", "text3", "text25", "text25_128", "text125"), "text") | {"images": "digits"}
MUON = 0.02
LONG_WIDTH = 64
RATES = (0.1, 0.3, 1.0, 3.0)  # times a variant's own learning rates: what a search tries
FINE = (0.35, 0.5, 0.7, 1.0, 1.4)  # of `long`, where half a per cent of the loss is to be seen
TUNED = 100  # the seed of a search: none of those that results are made with
ALONE = "one process"  # plain PyTorch, without unisono.parallel


class Variant(NamedTuple):
    """A spec, in which {tenth} and {quarter} are shares of the run's steps; and what else differs from allreduce."""

    spec: str
    lr: tuple[float, float, float] = (1.0, 1.0, 1.0)  # times that of digits, text, sparse
    momentum: float = 0.9
    adam: bool = False
    muon: bool = False  # for matrices, of the text those of its blocks; AdamW for the rest
    hosts: int = 1  # that the workers count as being on
    fused: bool = False  # the optimizer by torch's fused kernels
    outer: float = 0.0  # the outer learning rate, where the spec has a place for it: {outer}

    def at(self, rate: float) -> Variant:
        """The same at so many times its learning rates."""
        return self._replace(lr=tuple(rate * share for share in self.lr))

    def told(self, steps: int) -> str:
        """The spec as it is run."""
        return self.spec.format(tenth=max(1, steps // 10), quarter=max(1, steps // 4), outer=self.outer)


class Run(NamedTuple):
    task: str
    variant: Variant
    seed: int
    steps: int
    workers: int = WORKERS

    @property
    def share(self) -> float:
        """How many times the task's learning rate it is trained with."""
        like = LIKE.get(self.task, self.task)
        return self.variant.lr[TRAINED.index(like)] if like in TRAINED else 1.0

    @property
    def key(self) -> str:
        """What decides the result."""
        v, lr = self.variant, self.share
        optimizer = (
            "muon + adam" if v.muon else "adam" if v.adam else f"sgd {v.momentum:g}{' fused' if v.fused else ''}"
        )
        how = f"{optimizer}, lr x {lr:g}, {v.hosts} host(s)"
        count = f", {self.workers} workers" if self.workers != WORKERS else ""
        return f"{self.task} | {v.told(self.steps)} | {how}{count} | {self.steps} steps | seed {self.seed}"


class Data(NamedTuple):
    """A model, its training set (inputs, targets), its held-out set, and where the data come from."""

    model: Any
    train: tuple[Any, Any]
    held_out: tuple[Any, Any]
    source: str


# Data --------------------------------------------------------------------------------------------------------


def digits() -> Data:
    import torch
    from torch import nn

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        (x, y), source = made_digits(), "made digits (scikit-learn is missing)"
    else:
        raw, source = load_digits(), "scikit-learn's digits"
        x, y = torch.tensor(raw.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(raw.target)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    test = torch.arange(len(y)) % 6 == 0
    return Data(model, (x[~test], y[~test]), (x[test], y[test]), source)


def made_digits(samples: int = 1797) -> tuple[Any, Any]:
    """Ten blurred drawings of 8 x 8, each sample one of them, moved by up to a pixel and with noise."""
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(0)
    drawings = F.avg_pool2d(torch.randn(10, 1, 10, 10, generator=generator), 3, 1)
    drawings = drawings / drawings.amax((1, 2, 3), keepdim=True)
    y = torch.randint(10, (samples,), generator=generator)
    moves = torch.randint(-1, 2, (samples, 2), generator=generator).tolist()
    moved = torch.stack([drawings[c].roll(m, (1, 2)) for c, m in zip(y.tolist(), moves, strict=True)])
    return moved + 0.35 * torch.randn(moved.shape, generator=generator), y


def text(length: int = 32, width: int = 64, layers: int = 2) -> Data:
    import torch

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    read = b"".join(file.read_bytes() for file in files)[:1_000_000]
    letters, codes = torch.tensor(list(read)).unique(return_inverse=True)
    rows = codes[: len(codes) // (length + 1) * (length + 1)].view(-1, length + 1)
    test = torch.arange(len(rows)) % 100 == 0
    model, kept = make_transformer(len(letters), width, layers, 4, length), (rows[~test][:, :-1], rows[~test][:, 1:])
    source = "the standard library's sources"
    return Data(model, kept, (rows[test][:, :-1], rows[test][:, 1:]), source)


def make_transformer(letters: int, width: int, layers: int, heads: int, length: int) -> Any:
    """A decoder that predicts the next letter."""
    import torch
    from torch import nn

    class CharTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(letters, width)
            self.position = nn.Parameter(0.02 * torch.randn(length, width))
            block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
            self.head = nn.Linear(width, letters)

        def forward(self, x: Any) -> Any:
            past = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.head(self.blocks(self.embed(x) + self.position, past, is_causal=True))

    return CharTransformer()


def sparse() -> Data:
    import torch
    from torch import nn

    features, each, samples = 4000, 8, 20_000
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(features, generator=generator)
    x = torch.randint(features, (samples, each), generator=generator)
    y = (truth[x].sum(1) + 0.5 * torch.randn(samples, generator=generator) > 0).long()

    class Logistic(nn.Module):
        """Rows of an embedding are the weights, so that a gradient has only the features of its batch."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Embedding(features, 2, sparse=True)
            nn.init.zeros_(self.weights.weight)

        def forward(self, x: Any) -> Any:
            return self.weights(x).sum(1)

    test = torch.arange(samples) % 20 == 0
    return Data(Logistic(), (x[~test], y[~test]), (x[test], y[test]), "made: 8 of 4000 features a sample")


DATA = {"digits": digits, "text": text, "sparse": sparse, "long": partial(text, 64, LONG_WIDTH, 4)}


# A run, in each worker ---------------------------------------------------------------------------------------


def train(run: Run, world: Any) -> dict[str, Any]:
    """One run to its end: what was reached, and what was sent."""
    import torch
    from torch.nn import functional as F

    import unisono as un

    torch.manual_seed(run.seed)
    data, variant = DATA[run.task](), run.variant
    if run.task == "long":  # tiles of 16 rows, as in a model of width 2,048
        from unisono.methods.offload.deferred import Deferred

        (Deferred.__init__.__kwdefaults__ or {})["tile"] = 16 * LONG_WIDTH
    if variant.hosts > 1:
        hosts = [f"host{rank * variant.hosts // world.size}" for rank in range(world.size)]
        world = un.World(world.transport, hosts=hosts, name=f"{variant.hosts} hosts")
    optimizers = make_optimizers(run, data.model)
    decays = [round(run.steps * d) for d in DECAYS]
    schedules = [torch.optim.lr_scheduler.MultiStepLR(optimizer, decays, 0.2) for optimizer in optimizers]
    alone = variant.spec == ALONE
    replica: Any = None if alone else un.parallel(data.model, optimizers, variant.told(run.steps), world=world)
    # The name is its own: otherwise the next run would go on in this one's epoch.
    shard = un.shard(data.train, batch_size=BATCH[run.task], seed=run.seed, name=run.key, world=world)
    start = time.perf_counter()
    for x, y in islice(chain.from_iterable(repeat(shard)), run.steps):  # epoch after epoch
        if alone:
            x, y = (torch.cat(parts) for parts in zip(*world.gather_objects((x, y)), strict=True))
            if world.rank > 0:
                continue  # the first trains on what all have
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(data.model(x).flatten(0, -2), y.flatten()).backward()
        for step in (*optimizers, *schedules):
            step.step()
    seconds = time.perf_counter() - start
    world.barrier()  # a server sends for others
    sizes = None if alone else kept_bytes(data.model, optimizers)
    nbytes = 0.0 if alone else sent(world, start)
    found: dict[str, Any] = {"seconds": seconds, "bytes": statistics.mean(world.gather_objects(nbytes))}
    found |= {"data": data.source, "parameters": sum(p.numel() for p in data.model.parameters())}
    if sizes is not None:
        found["kept_bytes"] = max(world.gather_objects(sizes))
    if hasattr(replica, "staleness") and "ahead" in replica.staleness():
        found["ahead"] = max(world.gather_objects(max(replica.staleness()["ahead"], default=0)))
    model = data.model if alone else replica.consolidate()
    with torch.no_grad():
        scores, y = model.eval()(data.held_out[0]).flatten(0, -2), data.held_out[1].flatten()
    if replica is not None:
        replica.close()
    found["loss"] = F.cross_entropy(scores, y).item()
    found["accuracy"] = (scores.argmax(1) == y).double().mean().item()
    return found


def make_optimizers(run: Run, model: Any) -> list[Any]:
    import torch

    share = run.share
    if run.variant.muon:
        hidden = [p for p in getattr(model, "blocks", model).parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if not any(p is x for x in hidden)]
        return [torch.optim.Muon(hidden, lr=share * MUON), torch.optim.AdamW(rest, lr=share * ADAM[run.task])]
    if run.variant.adam:
        return [torch.optim.AdamW(model.parameters(), lr=share * ADAM[run.task])]
    momentum = 0.0 if run.task == "sparse" else run.variant.momentum
    how = {"fused": True} if run.variant.fused else {}
    return [torch.optim.SGD(model.parameters(), lr=share * SGD[run.task], momentum=momentum, **how)]


def kept_bytes(model: Any, optimizers: Sequence[Any]) -> int:
    """What this rank holds of parameters and optimizer state, in memory of its own or of all."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    stepped = [p for group in groups for p in group["params"]]  # of a split model: this rank's parts
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    tensors = [*model.parameters(), *stepped, *(x for state in states for x in state.values())]
    places = []  # from an address to an address; parts of a parameter lie inside it
    for x in tensors:
        if hasattr(x, "untyped_storage") and x.dim() > 0:  # a step count is no matter of the model's size
            size = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            places.append((x.data_ptr(), x.data_ptr() + size))
    total, reached = 0, 0
    for first, end in sorted(places):
        total += max(0, end - max(first, reached))
        reached = max(reached, end)
    return total


def sent(world: Any, since: float) -> float:
    """Bytes this rank has sent since then; with several hosts, only those of gradients from host to host."""
    records = [r for r in list(world.ledger.records) if r.start >= since and r.tag != "barrier"]
    if len(set(world.hosts)) == 1:
        return float(sum(r.bytes_sent for r in records))
    total = 0
    for record in records:  # of channels named as in world/1[0,1,2,3]/2[0,2]
        ranks = record.channel.rpartition("[")[2].rstrip("]").split(",")
        across = len({world.hosts[int(r)] for r in ranks if r}) > 1 or "[" not in record.channel
        total += record.bytes_sent if record.tag.startswith("gradients") and across else 0
    return float(total)


def noise(run: Run, world: Any) -> dict[str, Any]:
    """What a quantiser's rounding does to Gaussian numbers, on this rank alone; `steps` draws."""
    import torch

    from unisono.methods.kernels.noise import noise
    from unisono.methods.spec import build

    codec = build(run.variant.spec, kind="reducer").codec
    generator = torch.Generator().manual_seed(run.seed)
    shares, sum_, whole = [], torch.zeros(65536), torch.randn(65536, generator=generator)
    for step in range(run.steps):
        rounded = codec.decode(codec.encode(whole, noise(run.seed, step)), whole.numel())
        sum_ += rounded
        shares.append(((rounded - whole).square().sum() / whole.square().sum()).item())
    bias = ((sum_ / run.steps - whole).square().sum() / whole.square().sum()).item()
    return {"noise": statistics.mean(shares), "bias": bias, "bytes": 0.0, "data": "Gaussian numbers"}


def slow(run: Run, world: Any) -> dict[str, Any]:
    """Windows a second of all workers, the last one 4 times as slow; those who need not wait go on for a given time."""
    import torch

    import unisono as un

    compute = 0.02 * (4 if world.rank == world.size - 1 else 1)
    torch.manual_seed(run.seed)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    replica: Any = un.parallel(model, optimizer, run.variant.told(run.steps), world=world)
    torch.manual_seed(100 * run.seed + world.rank)  # each has samples of its own
    waits = not any(s in run.variant.spec for s in ("staleness=64", "staleness=None", "async_average", "hogwild"))
    windows, start = 0, time.perf_counter()
    until = start + run.steps * 0.08
    while windows < run.steps if waits else time.perf_counter() < until:
        time.sleep(compute)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        windows += 1
    speed = windows / (time.perf_counter() - start)
    replica.close()  # not after a barrier: those that wait for a slow one go on when it has left
    return {"windows_s": sum(world.gather_objects(speed)), "bytes": 0.0, "data": "none: compute is a sleep"}


KINDS = {"noise": noise, "slow": slow}


def work(runs: list[Run], path: str, session: str) -> None:
    """In each worker: the runs one after the other; rank 0 appends each result to the file."""
    import unisono as un

    warnings.filterwarnings("ignore", message="Sparse invariant checks")  # torch's, of sparse gradients
    world = un.join(device="cpu")
    for run in runs:
        found = KINDS.get(run.task, train)(run, world)
        if world.rank == 0:
            append(path, {"kind": "run", "key": run.key, "task": run.task, "spec": run.variant.told(run.steps)}
                   | {"seed": run.seed, "steps": run.steps, "session": session} | found)  # fmt: skip


def append(path: str | Path, line: dict[str, Any]) -> None:
    """One line in one write, so that several processes may append; numbers that are not finite become null."""
    kept = {k: None if isinstance(v, float) and not math.isfinite(v) else rounded(v) for k, v in line.items()}
    data = (json.dumps(kept) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def rounded(value: Any) -> Any:
    """Six digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
