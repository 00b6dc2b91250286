"""`unisono demo`: one worker, then two, on the same digits; what it gains and where the time of a step goes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.training.trainer import SPLIT

if TYPE_CHECKING:
    from torch import Tensor

COLOURS = dict(zip(SPLIT, ("#2f6db3", "#e08a1e", "#c23b50", "#7a9a3b"), strict=True))
BATCH_SIZE = 128
FONT = (  # the digits 0 to 9, in five rows of three dots
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001010010010",
    "111101111101111",
    "111101111001111",
)


@dataclass(frozen=True)
class Result:
    """One run: accuracy on held-out digits, samples a second, and per worker the seconds of its steps."""

    workers: int
    accuracy: float
    samples_per_s: float
    steps: int
    ranks: list[dict[str, float]]

    def step_ms(self, kind: str) -> list[float]:
        """Milliseconds of `kind` in an average step, one value a worker."""
        return [1e3 * rank[kind] / max(self.steps, 1) for rank in self.ranks]

    def mean_ms(self, *kinds: str) -> float:
        """Milliseconds of `kinds` (default: all) in an average step, over all workers."""
        return sum(sum(self.step_ms(kind)) for kind in kinds or SPLIT) / self.workers


def load_digits() -> tuple[Tensor, Tensor]:
    """1,797 images of 8 × 8 and what they show: scikit-learn's digits, written by hand, or else digits drawn by us."""
    import torch

    if importlib.util.find_spec("sklearn") is None:
        return draw_digits(1797)
    from sklearn.datasets import load_digits as load

    raw = load()
    return torch.tensor(raw.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(raw.target)


def draw_digits(count: int) -> tuple[Tensor, Tensor]:
    """Digits of a font of 3 × 5, each somewhere in its image, fainter or stronger, and under noise."""
    import torch

    random = torch.Generator().manual_seed(0)
    shapes = torch.tensor([[int(dot) for dot in shape] for shape in FONT], dtype=torch.float32).view(10, 5, 3)
    labels = torch.randperm(count, generator=random) % 10  # each sixth is held out: of all ten digits
    images = 0.15 * torch.randn(count, 1, 8, 8, generator=random, dtype=torch.float32)
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = (int(torch.randint(most, (), generator=random)) for most in (3, 4))
        image[0, top : top + 5, left : left + 3] += shapes[label] * (
            0.75 + torch.rand((), generator=random, dtype=torch.float32)
        )
    return images, labels


def train(epochs: int, width: int) -> Result:
    """Train the model; every worker runs this, however many there are."""
    import torch
    from torch import nn

    import unisono as un

    world = un.join("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits()
    test = torch.arange(len(labels)) % 6 == 0
    model = nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    accuracy = {"accuracy": lambda scores, target: (scores.argmax(1) == target).float().mean()}
    trainer = un.Trainer(model, optimizer, "allreduce", loss=nn.CrossEntropyLoss(), metrics=accuracy)
    digits = (images[~test], labels[~test])
    history = trainer.fit(digits, epochs=epochs, batch_size=BATCH_SIZE, stratify=labels[~test], seed=0)
    report = world.ledger.gather(world)
    score = trainer.evaluate((images[test], labels[test]), BATCH_SIZE)
    rates = sorted(history["samples/s"][1:] or history["samples/s"])  # the first epoch warms up
    return Result(
        workers=world.size,
        accuracy=score["accuracy"],
        samples_per_s=rates[len(rates) // 2],
        steps=report.ranks[0].steps,
        ranks=[asdict(totals) for totals in report.ranks],
    )


def measure(workers: int, epochs: int, width: int) -> Result | int:
    """Train with `workers` local processes, one thread each; an exit status if that failed or was interrupted."""
    from unisono.launchers.job import Job
    from unisono.launchers.terminal import run_in_terminal

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        program = ["-m", "unisono.demo", "--epochs", str(epochs), "--width", str(width), "--result", str(file)]
        status = run_in_terminal(Job(program, workers, threads=1, output="rank0"))
        return status or Result(**json.loads(file.read_text()))


def make_comparison(one: Result, many: Result) -> Any:
    """The comparison as a rich table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("")
    for result in (one, many):
        grid.add_column(f"{result.workers} worker{'s' * (result.workers > 1)}", justify="right")
    both = (one, many)
    grid.add_row("accuracy on held-out digits", *(f"{r.accuracy:.1%}" for r in both))
    grid.add_row("samples/s", *(f"{r.samples_per_s:,.0f}" for r in both))
    grid.add_row("speed-up", *(f"{r.samples_per_s / one.samples_per_s:.2f} ×" for r in both))
    grid.add_row("[bold]time per step, mean over workers", *(f"[bold]{r.mean_ms():.2f} ms" for r in both))
    for kind in SPLIT:
        shares = ((r.mean_ms(kind), r.mean_ms(kind) / r.mean_ms()) for r in both)
        grid.add_row(f"  {kind}", *(f"{ms:.2f} ms {share:>4.0%}" for ms, share in shares))
    return grid


def draw(one: Result, many: Result, path: Path) -> None:
    """Throughput on the left, the split of a step of every worker on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    speed, split = figure.subplots(1, 2, width_ratios=[1, 2.2])
    rates = [one.samples_per_s, many.samples_per_s]
    bars = speed.bar(["1 worker", f"{many.workers} workers"], rates, width=0.6, color=["#86a8cf", "#2f6db3"])
    words = [f"{rate:,.0f}\n{rate / rates[0]:.2f} ×" for rate in rates]
    speed.bar_label(bars, words, label_type="center", color="white", weight="bold", linespacing=1.5)
    ideal = many.workers * one.samples_per_s
    speed.hlines(ideal, 0.62, 1.38, color="#555555", linestyles="dashed", linewidth=1)
    speed.annotate(f"{many.workers} ×", (0.58, ideal), ha="right", va="center", color="#555555", fontsize=9)
    speed.set(title="samples per second", ylim=(0, 1.15 * max(ideal, *rates)))

    runs = [(result, rank) for result in (one, many) for rank in range(result.workers)]
    names = [f"{r.workers} worker{'s' * (r.workers > 1)}, rank {rank}" for r, rank in runs]
    left = [0.0] * len(runs)
    for kind, colour in COLOURS.items():
        widths = [result.step_ms(kind)[rank] for result, rank in runs]
        split.barh(names, widths, left=left, color=colour, label=kind, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        split.annotate(f"{total:.1f} ms", (total, row), xytext=(5, 0), textcoords="offset points", va="center")
    split.invert_yaxis()
    split.set(title="mean time per step, by worker", xlabel="milliseconds", xlim=(0, 1.15 * max(left)))
    split.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(SPLIT), frameon=False)
    for axes in (speed, split):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"Digits CNN, the same {BATCH_SIZE}-sample global batches: {many.accuracy:.1%} of held-out digits recognised",
        fontsize=12,
    )
    figure.savefig(path, dpi=130)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser."""
    parser.add_argument("-n", "--workers", type=int, default=2, help="local workers of the second run; default: 2")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each run; default: 20")
    parser.add_argument("--width", type=int, default=48, help="channels of the first layer; default: 48")
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, default=Path("demo.png"), help="where to draw; default: demo.png"
    )
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # given to workers only


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run both, print the table and write the picture; in a worker, train. Returns the exit status."""
    if options.result is not None:
        result = train(options.epochs, options.width)
        if os.environ["RANK"] == "0":
            options.result.write_text(json.dumps(asdict(result)))
        return 0
    if options.workers < 2:
        parser.error(f"got --workers {options.workers}, expected at least 2: one worker is always run first")
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if importlib.util.find_spec("sklearn") is None:
        console.print(
            "the demo draws its own digits; for handwritten ones: pip install 'unisono[examples]'",
            markup=False,
        )
    results: list[Result] = []
    for workers in (1, options.workers):
        console.print(f"[bold]{workers} worker{'s' * (workers > 1)}[/bold], {options.epochs} epochs of 1,497 digits")
        outcome = measure(workers, options.epochs, options.width)
        if isinstance(outcome, int):
            return outcome
        results.append(outcome)
    console.print()
    one, many = results
    console.print(make_comparison(one, many))
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: matplotlib is missing: pip install 'unisono[plots]'", markup=False)
        return 0
    draw(one, many, options.picture)
    console.print(f"picture: {options.picture}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="unisono demo", description=__doc__)
    add_options(parser)
    return run(parser.parse_args(arguments), parser)


if __name__ == "__main__":
    raise SystemExit(main())
