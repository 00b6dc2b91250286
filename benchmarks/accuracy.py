"""What sending less costs: the digits CNN and the character transformer, to a fixed number of samples, on 4 workers.

Every method starts from the same weights and sees the same batches in the same order (the same seeds); the learning
rate falls to a fifth at 60 % and at 85 % of the steps. Losses and accuracies are those on held-out data after the last
step: the mean over the seeds, and half the distance between the best and the worst (±). Bytes are what one rank sent in
the whole run, by the ledger; for `hierarchical`, on two hosts of two workers, what a host's leader sent to the other;
for strategies the mean over the ranks, as servers send more. Strategies are judged by `replica.consolidate()`.
The optimizer is SGD with momentum 0.9; where a method brings its own momentum or needs another optimizer or learning
rate, METHODS below says so. The asynchronous methods do not repeat bit by bit: their results depend on who was when.

Keys: TASK_METHOD_loss, TASK_METHOD_accuracy, TASK_METHOD_bytes_over_dense (TASK is cnn or transformer).
--only strategies runs these instead of the reducers. --table and --plot write the results as Markdown and as a picture
of loss against bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from measure import finish

WORKERS = 4
DECAYS = (0.6, 0.85)


class Method(NamedTuple):
    """A spec, in which {tenth} is a tenth of the run's steps; and what else it changes."""

    spec: str
    lr: tuple[float, float] = (1.0, 1.0)  # times the CNN's, times the transformer's
    momentum: float = 0.9  # of the optimizer
    hosts: int = 1  # that the workers count as being on
    adam: bool = False  # Adam instead of SGD


REDUCERS = {
    "dense": Method("dense"),
    "bf16": Method("bf16"),
    "fp16": Method("fp16"),
    "bytegrad": Method("bytegrad"),
    "qsgd_4": Method("qsgd(bits=4)"),
    "qsgd_8": Method("qsgd(bits=8)"),
    "nuqsgd": Method("nuqsgd(bits=4)"),
    "ef_nuqsgd": Method("error_feedback(nuqsgd(bits=4))"),
    "signsgd": Method("signsgd", lr=(0.003, 0.003)),  # its step is the learning rate itself
    "onebit": Method("onebit", lr=(0.5, 0.1)),  # at the transformer's own it diverges
    "powersgd_r4": Method("powersgd(rank=4)"),
    "powersgd_r1": Method("powersgd(rank=1)"),
    "accordion_powersgd": Method("accordion(powersgd(rank=4), powersgd(rank=1), every=8)"),
    "topk_10": Method("topk(k=0.1)"),
    "topk_1": Method("topk(k=0.01)"),
    "topk_01": Method("topk(k=0.001)"),
    "warmup_topk_01": Method("warmup(topk(k=0.001), steps={tenth})"),
    "dgc_topk_1": Method("topk(k=0.01, momentum=0.9, ramp={tenth})", momentum=0.0),
    "hierarchical_topk_1": Method("hierarchical(topk(k=0.01))", hosts=2),
    "masked_topk_1": Method("masked(topk(k=0.01), min_size=10000)"),
    "accordion_topk": Method("accordion(topk(k=0.01), topk(k=0.001), every=8)"),
    "randomk_10": Method("randomk(k=0.1)"),
    "randomk_1": Method("randomk(k=0.01)"),
}
ADAM = (0.02, 0.015)  # learning rates 0.001 and 0.003
STRATEGIES = {
    "dense": REDUCERS["dense"],  # under allreduce: what the others are measured against
    "adam": Method("allreduce", lr=ADAM, adam=True),  # what qadam is measured against
    "qadam": Method("qadam(warmup=100)", lr=ADAM, adam=True),  # with {tenth} it diverged on one seed of the CNN
    "local_sgd": Method("local_sgd(every=8, start={tenth})"),
    "post_local_sgd": Method("local_sgd(every=8, start='decay')"),
    "diloco": Method("diloco(every=12)"),
    "diloco_streaming": Method("diloco(every=12, fragments=3, delay=2)"),
    "crossbow": Method("crossbow"),
    "crossbow_4": Method("crossbow(every=4)"),
    "gossip_ring": Method("gossip(ring)"),
    "gossip_exponential": Method("gossip(exponential)"),
    "gossip_8bit": Method("gossip(ring, bits=8)"),
    "async_average": Method("async_average(every_s=0.02)"),
    "server_0": Method("parameter_server(staleness=0)"),
    "server_4": Method("parameter_server(staleness=4)", lr=(1.0, 0.5)),  # at the transformer's own both diverge
    "server_async": Method("parameter_server(staleness=None)", lr=(1.0, 0.5)),
    "hogwild": Method("hogwild", lr=(0.25, 0.25)),  # each worker's step has it in full
}
METHODS = {**REDUCERS, **STRATEGIES}
FAMILIES = {
    "dense, casts": ("dense", "bf16", "fp16"),
    "quantised": ("bytegrad", "qsgd_4", "qsgd_8", "nuqsgd", "ef_nuqsgd", "signsgd", "onebit"),
    "low rank": ("powersgd_r4", "powersgd_r1"),
    "sparse": (
        "topk_10",
        "topk_1",
        "topk_01",
        "warmup_topk_01",
        "dgc_topk_1",
        "hierarchical_topk_1",
        "masked_topk_1",
        "randomk_10",
        "randomk_1",
    ),
    "Accordion": ("accordion_powersgd", "accordion_topk"),
    "now and then": ("local_sgd", "post_local_sgd", "diloco", "diloco_streaming", "crossbow", "crossbow_4"),
    "with neighbours": ("gossip_ring", "gossip_exponential", "gossip_8bit"),
    "parameter server": ("server_0", "server_4", "server_async"),
    "without waiting": ("async_average", "hogwild"),
    "Adam": ("adam", "qadam"),
}
COLOURS = dict(
    zip(FAMILIES, ("black", *("tab:orange", "tab:green", "tab:blue", "tab:red") * 2, "tab:purple"), strict=True)
)


class Job(NamedTuple):
    task: str
    method: str
    seed: int
    steps: int
    text: str | None = None


class Task(NamedTuple):
    """A model, its training set (inputs, targets) and its held-out set."""

    model: Any
    train: tuple[Any, Any]
    held_out: tuple[Any, Any]
    lr: float
    batch_size: int


def cnn(job: Job) -> Task:
    """0.12 M parameters, 1497 digits of 8 x 8."""
    import torch
    from digits_cnn import cnn, digits

    x, y = digits()
    test = torch.arange(len(y)) % 6 == 0
    return Task(cnn(32), (x[~test], y[~test]), (x[test], y[test]), lr=0.05, batch_size=64)


def transformer(job: Job) -> Task:
    """0.11 M parameters, sequences of 32 characters."""
    import torch
    from char_transformer import CharTransformer, read

    length = 32
    letters, text = torch.tensor(list(read(job.text))).unique(return_inverse=True)
    rows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
    test = torch.arange(len(rows)) % 100 == 0
    model = CharTransformer(len(letters), 64, length, layers=2)
    kept = (rows[~test][:, :-1], rows[~test][:, 1:])
    return Task(model, kept, (rows[test][:, :-1], rows[test][:, 1:]), lr=0.2, batch_size=32)


TASKS: dict[str, tuple[Callable[[Job], Task], int, int]] = {  # with steps and seeds of the default run
    "cnn": (cnn, 240, 3),
    "transformer": (transformer, 240, 1),
}


def spec_of(job: Job) -> str:
    return METHODS[job.method].spec.format(tenth=max(1, job.steps // 10))


def train(job: Job, world: Any) -> dict[str, float]:
    """One run to its end, in each worker."""
    import torch
    from torch.nn import functional as F

    import unisono as un

    torch.manual_seed(job.seed)
    method, task = METHODS[job.method], TASKS[job.task][0](job)
    if method.hosts > 1:
        hosts = [f"host{rank * method.hosts // world.size}" for rank in range(world.size)]
        world = un.World(world.transport, hosts=hosts, name=f"{method.hosts} hosts")
    lr = task.lr * method.lr[list(TASKS).index(job.task)]
    optimizer: Any
    if method.adam:
        optimizer = torch.optim.Adam(task.model.parameters(), lr=lr)
    else:
        optimizer = torch.optim.SGD(task.model.parameters(), lr=lr, momentum=method.momentum)
    falls = [round(job.steps * share) for share in DECAYS]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, 0.2)
    replica = un.parallel(task.model, optimizer, spec_of(job), world=world)
    name = f"{job.task}, {job.method}, {job.seed}"  # of its own: otherwise the next run would go on in this one's epoch
    shard = un.shard(task.train, batch_size=task.batch_size, seed=job.seed, name=name, world=world)
    start = time.perf_counter()
    for x, y in islice(chain.from_iterable(repeat(shard)), job.steps):  # epoch after epoch
        optimizer.zero_grad()
        F.cross_entropy(task.model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    if job.method in STRATEGIES:
        world.barrier()  # a server sends for others
    nbytes = sent(world, start)
    if job.method in STRATEGIES:
        nbytes = statistics.mean(world.gather_objects(nbytes))
    model = replica.consolidate().eval()
    with torch.no_grad():
        scores, y = model(task.held_out[0]).flatten(0, -2), task.held_out[1].flatten()
    replica.close()
    loss, right = F.cross_entropy(scores, y).item(), (scores.argmax(1) == y).double().mean().item()
    return {"loss": loss, "accuracy": right, "bytes": nbytes, "seconds": seconds}


def sent(world: Any, since: float) -> float:
    """Bytes this rank has sent since then; with several hosts, only those of gradients from host to host."""
    records = [r for r in list(world.ledger.records) if r.start >= since and r.tag != "barrier"]
    if len(set(world.hosts)) == 1:
        return float(sum(r.bytes_sent for r in records))
    total = 0
    for record in records:  # of channels named as in world/1[0,1,2,3]/2[0,2]
        ranks = record.channel.rpartition("[")[2].rstrip("]").split(",")
        if record.tag.startswith("gradients") and len({world.hosts[int(r)] for r in ranks}) > 1:
            total += record.bytes_sent
    return float(total)


def work(jobs: list[Job], path: str, done: int) -> None:
    """In each worker: the jobs one after the other; rank 0 appends each result to the file."""
    import unisono as un

    world = un.join(device="cpu")
    for i, job in enumerate(jobs):
        found = train(job, world)
        if world.rank == 0:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps([*job[:3], found]) + "\n")
            told = f"loss {found['loss']:.4f}, accuracy {found['accuracy']:.4f}, {found['bytes'] / 1e6:.2f} MB"
            count = f"[{done + i + 1}/{done + len(jobs)}]"
            print(f"{count} {job.task} {job.method} seed {job.seed}: {told} ({found['seconds']:.1f} s)", flush=True)


def attempt(jobs: list[Job], path: Path, done: int) -> str:
    """The jobs in one set of workers; why the first that failed did, or nothing."""
    import unisono as un

    try:
        un.launch(work, workers=WORKERS, args=(jobs, str(path), done), threads=1)
    except un.WorkerError as error:
        return str(error).splitlines()[0]
    return ""


def run(jobs: list[Job]) -> dict[tuple[str, str], list[dict[str, float]]]:
    """All jobs; one that fails is told about and left out, and the rest goes on in new workers."""
    with tempfile.TemporaryDirectory() as folder:
        path, at, failed = Path(folder) / "results.jsonl", 0, 0
        path.touch()
        while at < len(jobs):
            why = attempt(jobs[at:], path, at)
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            at = len(rows) + failed
            if why:
                print(f"{jobs[at].task} {jobs[at].method} seed {jobs[at].seed}: left out ({why})", flush=True)
                failed, at = failed + 1, at + 1
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for task, method, _, result in rows:
        found.setdefault((task, method), []).append(result)
    return found


class Line(NamedTuple):
    """A method's results on a task over the seeds."""

    method: str
    loss: float
    accuracy: float
    loss_spread: float
    accuracy_spread: float
    megabytes: float
    bytes_over_dense: float


def summary(task: str, found: dict[tuple[str, str], list[dict[str, float]]]) -> list[Line]:
    dense = found.get((task, "dense"), [{"bytes": float("nan")}])[0]["bytes"]
    lines = []
    for (of, method), runs in found.items():
        if of != task:
            continue
        losses, rights = ([r[key] for r in runs] for key in ("loss", "accuracy"))
        sent = statistics.mean(r["bytes"] for r in runs)
        middle = (statistics.mean(losses), statistics.mean(rights))
        spread = (max(losses) - min(losses), max(rights) - min(rights))
        lines.append(Line(method, *middle, *spread, sent / 1e6, sent / dense))
    return lines


def table(task: str, job: Job, seeds: int, lines: list[Line]) -> str:
    """Markdown."""
    batch = TASKS[task][0](job).batch_size
    head = f"{task}: {job.steps} steps of {batch} ({job.steps * batch} samples), {WORKERS} workers, {seeds} seed(s)"
    rows = [head, "", "| method | spec | bytes / dense | MB sent | loss | ± | accuracy | ± |"]
    rows.append("|---|---|---:|---:|---:|---:|---:|---:|")
    for x in lines:
        spec = spec_of(job._replace(method=x.method))
        loss = f"{x.loss:.4f} | {x.loss_spread / 2:.4f}" if math.isfinite(x.loss) else "diverged |"
        numbers = f"{x.bytes_over_dense:.4f} | {x.megabytes:.2f} | {loss}"
        rows.append(f"| {x.method} | `{spec}` | {numbers} | {x.accuracy * 100:.2f} % | {x.accuracy_spread * 50:.2f} |")
    return "\n".join(rows)


def why_not(spec: str) -> str:
    """Why a spec cannot be built; nothing where it can."""
    from unisono.methods.spec import build

    try:
        build(spec, kind="strategy")
    except Exception as error:  # whatever it is, the others can still be measured
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def chosen_of(names: list[str]) -> list[str]:
    """The methods that names and groups of them stand for."""
    groups = {"reducers": list(REDUCERS), "strategies": list(STRATEGIES)}
    wanted = {method for name in names for method in groups.get(name, [name])}
    methods = [m for m in METHODS if m in wanted]
    for method in list(methods):
        if reason := why_not(spec_of(Job("cnn", method, 0, 240))):
            print(f"{method}: left out ({reason})", flush=True)
            methods.remove(method)
    if not methods:
        raise SystemExit("nothing to run")
    return methods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    told = f"reducers (the default), strategies, or some of {', '.join(METHODS)}"
    names = ["reducers", "strategies", *METHODS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="METHOD", default=["reducers"], help=told)
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, help="runs of each method (default: 3 of the CNN, 1 of the transformer)")
    parser.add_argument("--text", help="the text to learn (default: the standard library's sources)")
    parser.add_argument("--table", type=Path, help="write the results here, as Markdown")
    parser.add_argument("--plot", type=Path, help="write loss against bytes here, as a PNG")
    parser.add_argument("--quick", action="store_true", help="the CNN, 24 steps, one seed: does it run")
    asked = parser.parse_args()
    if asked.quick:
        asked.tasks, asked.steps, asked.seeds = ["cnn"], asked.steps or 24, asked.seeds or 1
    methods = chosen_of(asked.only)
    chosen = {t: (asked.steps or TASKS[t][1], asked.seeds or TASKS[t][2]) for t in asked.tasks}
    jobs = [
        Job(task, method, seed, steps, asked.text)
        for task, (steps, seeds) in chosen.items()
        for seed in range(seeds)
        for method in methods
    ]
    start = time.perf_counter()
    found = run(jobs)
    results: dict[str, Any] = {}
    lines = {task: summary(task, found) for task in asked.tasks}
    tables = [table(t, Job(t, "dense", 0, chosen[t][0], asked.text), chosen[t][1], lines[t]) for t in asked.tasks]
    print("\n" + "\n\n".join(tables) + f"\n\n({time.perf_counter() - start:.0f} s)")
    for task in asked.tasks:
        for x in lines[task]:
            results[f"{task}_{x.method}_loss"] = x.loss if math.isfinite(x.loss) else None  # diverged
            results[f"{task}_{x.method}_accuracy"] = x.accuracy
            results[f"{task}_{x.method}_bytes_over_dense"] = round(x.bytes_over_dense, 6)
    if asked.table:
        asked.table.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    if asked.plot:
        plot(lines, asked.plot)
    finish(results)


def plot(lines: dict[str, list[Line]], path: Path) -> None:
    """Loss against bytes, a panel a task: left is cheap, low is good; a bar is the spread over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = {task: [x for x in found if math.isfinite(x.loss)] for task, found in lines.items()}
    least = min(x.megabytes for found in lines.values() for x in found if x.megabytes > 0.01)
    for found in lines.values():
        found[:] = [x if x.megabytes > 0.01 else _at_the_left(x, least / 2) for x in found]
    figure, panels = plt.subplots(1, len(lines), figsize=(7.2 * len(lines), 6.0), squeeze=False)
    for axes, (task, points) in zip(panels[0], lines.items(), strict=True):
        for family, names in FAMILIES.items():
            mine = [x for x in points if x.method.partition(" ")[0] in names]
            if mine:
                bars = [x.loss_spread / 2 for x in mine]
                places = ([x.megabytes for x in mine], [x.loss for x in mine])
                axes.errorbar(*places, yerr=bars, fmt="o", ms=6, lw=1, label=family, color=COLOURS[family])
        axes.set(xscale="log", yscale="log", xlabel="MB sent by one rank in the whole run")
        axes.set_ylabel("held-out loss after the last step")
        axes.set_title({"cnn": "digits CNN", "transformer": "character transformer"}[task])
        for x in points:
            if x.method == "dense":
                axes.axhline(x.loss, color="0.7", lw=1, zorder=0)
        axes.grid(alpha=0.25, which="both", lw=0.5)
        axes.margins(x=0.12, y=0.08)
        named(axes, points)
    panels[0][0].legend(loc="best", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _at_the_left(line: Line, megabytes: float) -> Line:
    """A method that sends nothing has no place on a logarithmic axis."""
    return line._replace(method=f"{line.method} (0 bytes)", megabytes=megabytes)


def named(axes: Any, points: list[Line]) -> None:
    """Write each point's name beside it, moved up or down where names would meet."""
    axes.figure.canvas.draw()
    taken: list[tuple[float, float, float]] = []  # left, right, height, in pixels
    for x in sorted(points, key=lambda x: x.loss):
        px, py = axes.transData.transform((x.megabytes, x.loss))
        left, right = px + 8, px + 14 + 6.0 * len(x.method)
        y, tried = py, 0
        while any(a < right and left < b and abs(y - h) < 13 for a, b, h in taken):
            tried += 1
            y = py + 13 * ((tried + 1) // 2) * (1 if tried % 2 else -1)
        taken.append((left, right, y))
        arrow = {"arrowstyle": "-", "color": "0.6", "lw": 0.5} if abs(y - py) > 13 else None
        offset = (8 * 72 / axes.figure.dpi, (y - py) * 72 / axes.figure.dpi)
        axes.annotate(
            x.method,
            (x.megabytes, x.loss),
            offset,
            textcoords="offset points",
            fontsize=8,
            va="center",
            arrowprops=arrow,
        )


if __name__ == "__main__":
    main()
