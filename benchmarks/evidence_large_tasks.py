"""Part of evidence_large.py: the tasks with their data and models, the variants, and which runs are to be made."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from evidence_tasks import ADAM, SGD, TUNED, Data, Run, Variant

# `pip download --only-binary=:all: --no-deps NAME==VERSION`: wheels are the same everywhere, and so is the text.
WHEELS = ("sympy==1.13.3", "Django==5.1.4", "networkx==3.4.2", "ansible==11.1.0")
TEXT_BYTES = 52_000_000
TEXT_SHA256 = "4ee80e076e236f0c47e418e8ec690b55da4fe8bdd486b79d46da16dd59186473"
KINDS = (".py", ".rst", ".txt", ".md", ".html", ".yml")
FASHION = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the samples, of which exact training's curve has points
CURVED = ("text25_128", "text25")  # tasks of which there is such a curve; the last counts
PLACES, ROUND = 20, 30  # of a run, where it is judged; steps from one exchange of most local methods to the next
RATES, LOWER, OUTERS, HIGHER = (0.3, 1.0, 3.0), 0.1, (0.4, 0.7, 1.0), (1.5, 2.2)
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


FIRST = ("adam", "sparseloco", "diloco", "muloco", "muon")  # of which all is made before the others
VARIANTS = {
    "allreduce": Variant("allreduce"),
    "adam": Variant("allreduce", adam=True),
    "muon": Variant("allreduce", muon=True),
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
    folder.mkdir(parents=True, exist_ok=True)
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
    """A decoder that predicts the next byte: GPT-2 with heads of 64, without biases and gains."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Linear(torch.autograd.Function):
        """For each rank x W^T; the gradient of W lies as W does."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            weight = weight.to(x.dtype)
            ctx.save_for_backward(x, weight)
            return torch.bmm(x, weight.transpose(1, 2))

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            x, weight = ctx.saved_tensors
            return torch.bmm(gradients[0], weight), torch.bmm(gradients[0].transpose(1, 2), x).float()

    class GPT(nn.Module):
        """Its parameters in one module: walking through many takes time in each step."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Parameter(0.02 * torch.randn(letters, width))
            self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
            for i in range(layers):
                for name, rows, columns, scale in (
                    ("qkv", 3 * width, width, 1.0),
                    ("out", width, width, (2 * layers) ** -0.5),
                    ("up", 4 * width, width, 1.0),
                    ("down", width, 4 * width, (2 * layers) ** -0.5),
                ):
                    weight = nn.Parameter(0.02 * scale * torch.randn(rows, columns))
                    self.register_parameter(f"{name}_{i}", weight)
            self.head = nn.Parameter(0.02 * torch.randn(letters, width))

        @property
        def hidden(self) -> list[Any]:
            return [p for name, p in self.named_parameters() if "_" in name]

        def forward(self, x: Any) -> Any:
            return self.run_all([p[None] for p in self.parameters()], x[None])[0]

        def run_all(self, weights: Any, x: Any) -> Any:
            """For several models, of which `weights` are the parameters stacked; x: (models, sequences, length)."""
            embed, position, *hidden, head = weights
            models, sequences, length = x.shape
            dtype = torch.bfloat16 if x.is_cuda else torch.float32
            letter = (x.flatten(1)[..., None] == torch.arange(letters, device=x.device)).to(dtype)
            h = torch.bmm(letter, embed.to(dtype)) + position[:, :length].to(dtype).repeat(1, sequences, 1)
            for qkv, out, up, down in zip(*[iter(hidden)] * 4, strict=True):
                heads = Linear.apply(F.layer_norm(h, (width,)), qkv).view(-1, length, 3, width // 64, 64)
                q, k, v = heads.permute(2, 0, 3, 1, 4)
                seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
                h = h + Linear.apply(seen.reshape(models, -1, width), out)
                h = h + Linear.apply(F.gelu(Linear.apply(F.layer_norm(h, (width,)), up)), down)
            return Linear.apply(F.layer_norm(h, (width,)), head).view(models, sequences, length, letters)

        def losses_of_all(self, weights: Any, rows: Any) -> Any:
            scores = self.run_all(weights, rows[..., :-1].long()).float()
            losses = F.cross_entropy(scores.flatten(0, -2), rows[..., 1:].long().flatten(), reduction="none")
            return losses.view(len(rows), -1).mean(1)

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
    "text25_128": Large("text", 2040, 128, 1e-3, 0.2, partial(gpt, 512, 8, 512), score_text),
    "text25": Large("text", 2000, 32, 1e-3, 0.2, partial(gpt, 512, 8, 512), score_text),
    "text125": Large("text", 2000, 32, 6e-4, 0.2, partial(gpt, 896, 13, 512), score_text),
    "images": Large("digits", 2000, 256, 1e-3, 0.1, images, score_images),
}
for _name, _task in TASKS.items():
    ADAM[_name], SGD[_name] = _task.adam, _task.sgd


# What there is to do -----------------------------------------------------------------------------------------


def variants_of(task: str) -> list[str]:
    """Muon steps matrices, of which a network of convolutions has one."""
    return [name for name, variant in VARIANTS.items() if not (variant.muon and TASKS[task].like == "digits")]


def find_places(steps: int) -> list[int]:
    """The steps after which a run is judged: at the ends of rounds if it has more of these than places."""
    unit = ROUND if steps > PLACES * ROUND else 1
    found = (unit * round(steps * i / PLACES / unit) for i in range(1, PLACES))
    return sorted({steps, *(min(steps, max(1, place)) for place in found)})


def search(task: str, name: str, steps: int, workers: int, lines: dict[str, Any]) -> tuple[list[Run], list[Run]]:
    """The runs of a variant's search that are known so far, a quarter of the steps each: all, and those still to be
    made. Where the lowest learning rate is the best, one below it is tried too; outer rates are tried at the best, and
    those above them while the highest is the best."""
    variant, count = VARIANTS[name], max(1, steps // 4)
    runs = [Run(task, variant.at(rate), TUNED, count, workers) for rate in RATES]
    if (found := best(runs, lines)) is not None and found.lr == variant.at(min(RATES)).lr:
        runs.append(Run(task, variant.at(LOWER), TUNED, count, workers))
    if variant.outer and (found := best(runs, lines)) is not None:
        others = [found._replace(outer=outer) for outer in OUTERS if outer != variant.outer]
        runs += [Run(task, other, TUNED, count, workers) for other in others]
        for last, higher in itertools.pairwise((max(OUTERS), *HIGHER)):
            if (found := best(runs, lines)) is not None and found.outer == last:
                runs.append(Run(task, found._replace(outer=higher), TUNED, count, workers))
    return runs, [run for run in runs if run.key not in lines]


def best(runs: Sequence[Run], lines: dict[str, dict[str, Any]]) -> Variant | None:
    """The variant of a search with the least held-out loss; None while one of its runs is still to be made."""
    if any(run.key not in lines for run in runs):
        return None
    losses = [lines[run.key].get("loss") for run in runs]
    return runs[min(range(len(runs)), key=lambda i: math.inf if losses[i] is None else losses[i])].variant


def curve(task: str, chosen: Variant, steps: int, workers: int) -> list[Run]:
    """Exact training with fewer samples, whose losses others' are compared with: see evidence_learning.py."""
    return [Run(task, chosen, seed, round(share * steps), workers) for seed in (0, 1) for share in SHARES[:-1]]


def left(task: str, names: Sequence[str], seeds: int, steps: int, workers: int, lines: dict[str, Any]) -> list[Run]:
    """What can be made now and is not: searches and the runs of those whose search has ended; of FIRST all before the
    others, searches before runs, of the others a seed before the next."""
    todo: list[tuple[tuple[int, ...], Run]] = []
    for name in sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        tried, missing = search(task, name, steps, workers, lines)
        rank = 0 if name in FIRST else 1
        todo += [((rank, 0), run) for run in missing]
        if not missing and (chosen := best(tried, lines)) is not None:
            runs = [Run(task, chosen, seed, steps, workers) for seed in range(seeds)]
            todo += [((rank, run.seed + (1 - rank)), run) for run in runs if run.key not in lines]
            runs = curve(task, chosen, steps, workers) if name == "adam" and task in CURVED else []
            todo += [((0, seeds + 1), run) for run in runs if run.key not in lines]
    return [run for _, run in sorted(todo, key=lambda one: one[0])]
