"""Several learners of `crossbow` on one worker: side by side in threads (`replica.learn`), or batched (torch.func).

One worker, batches of 16 a learner, SGD with momentum. Batched: the parameters of all learners are stacked, and one
`vmap` of the loss's gradient computes all of them; the optimizer and the corrections work on the stacked tensors. Both
sides make the same steps: `apart_M_K` is how far the central models are from each other after some, over how far they
went.

For the models M (mlp: 3 layers of width 256, cnn: 3 convolutions on 8 x 8, text: a transformer of 2 layers of width 64
on 32 characters) and K learners, samples a second over those of the bare loop with one learner on all cores:
threads_over_bare_M_K, batched_over_bare_M_K; and batched_over_threads_M_K. bare_M: samples a second.
workers_over_bare_M: as many processes as there are cores, with a learner and a thread each, under `crossbow`.
--cpu: the same ratios (without workers) of processor time, of all threads together, with one thread for the
mathematics: what a sample costs, also on a machine that others use. Of keys with `over`, above 1 the first is better.

--gpu: learners at the same time on one GPU, a ResNet of 17 convolutions on 32 x 32 images, batches of 16 a learner:
bare_samples_s (the eager loop), graph1_samples_s (one learner's step as a CUDA graph by plain PyTorch),
learners_K_samples_s (`crossbow(learners=K)` by `replica.learn`), learners_auto and auto_samples_s (what the tuner
found), threads_8_samples_s (capture=False), learners_over_bare_8, learners_over_own_graph_8; replay_ms_8 and
round_ms_8: how long the graph takes, and a whole round.
With --data FOLDER instead Fashion-MNIST (images.npz, by `evidence_large.py prepare`), with augmentation: seconds of
training until 90 % of the held-out images are right, of the bare loop with batches of 128 and of 8 learners with 16
each, with one drop of the learning rate: seconds_to_90_bare, seconds_to_90_crossbow, samples_to_90_bare,
samples_to_90_crossbow; each with the best of RATES, which the keys lr_bare and lr_crossbow name.
bare_over_crossbow_to_90: their ratio.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

BATCH, LR, ROUNDS = 16, 0.01, 20
FEW = 3  # rounds at once, of processor time
MODELS = ("mlp", "cnn", "text")
RATES = (0.01, 0.03, 0.1)
CHANNELS_LAST = False
GOAL, DROP, EPOCHS = 0.9, 10, 16  # the learning rate falls to a tenth after DROP epochs


def make(name: str) -> tuple[Any, Callable[[int], tuple[Any, Any]]]:
    """The model, and batches of n samples."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        return model, lambda n: (torch.randn(n, 64), torch.randint(10, (n,)))
    if name == "cnn":
        model = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10)),
        )
        return model, lambda n: (torch.randn(n, 1, 8, 8), torch.randint(10, (n,)))
    return Text(), lambda n: (torch.randint(100, (n, 32)), torch.randint(100, (n, 32)))


def Text() -> Any:
    """Written out, as torch's own encoder has a path that vmap cannot take."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            n, length, width = x.shape
            heads = self.qkv(self.first(x)).view(n, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
            return x + self.down(F.gelu(self.up(self.second(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(100, 64), nn.Parameter(0.02 * torch.randn(32, 64))
            self.blocks, self.head = nn.Sequential(Block(64), Block(64)), nn.Linear(64, 100)

        def forward(self, x: Any) -> Any:
            return self.head(self.blocks(self.embed(x) + self.position)).transpose(1, 2)

    return Model()


def loss_of(model: Any, batch: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(model(batch[0]), batch[1])


# The sides ---------------------------------------------------------------------------------------------------


def bare(name: str) -> Callable[[], Any]:
    """A round of one learner, without us."""
    import torch

    model, draw = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    batch = draw(BATCH)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    return step


class Threads:
    """As users have it today."""

    def __init__(self, name: str, learners: int) -> None:
        import torch

        import unisono as un

        model, draw = make(name)
        self.replica: Any = un.parallel(
            model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), f"crossbow(learners={learners})"
        )
        self.batches = [draw(BATCH) for _ in range(learners)]

    def __call__(self) -> None:
        self.replica.learn(loss_of, self.batches)

    def central(self) -> list[Any]:
        return [p.detach() for p in self.replica.consolidate().parameters()]


class Batched:
    """All learners' gradients by one vmap, and the method's update on stacked tensors."""

    def __init__(self, name: str, learners: int) -> None:
        import torch
        from torch.func import functional_call, grad, stack_module_state, vmap

        self.model, draw = make(name)
        params, self.buffers = stack_module_state([self.model] * learners)
        self.params = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
        self.z = {n: p.detach()[0].clone() for n, p in params.items()}
        self.velocity = {n: torch.zeros_like(z) for n, z in self.z.items()}
        self.optimizer = torch.optim.SGD(self.params.values(), lr=LR, momentum=0.9)
        batches = [draw(BATCH) for _ in range(learners)]
        self.batch = tuple(torch.stack(each) for each in zip(*batches, strict=True))
        self.alpha = 1 / learners

        def loss(params: Any, *batch: Any) -> Any:
            return loss_of(lambda x: functional_call(self.model, params, (x,)), batch)

        self.gradients = vmap(grad(loss), randomness="different")

    def __call__(self) -> None:
        import torch

        given = {name: p.detach() for name, p in self.params.items()}
        grads = self.gradients(given, *self.batch)
        with torch.no_grad():
            for name, param in self.params.items():
                param.grad = grads[name]
            kept = {n: self.alpha * (p - self.z[n]) for n, p in self.params.items()}
            self.optimizer.step()
            for name, param in self.params.items():
                param -= kept[name]
                self.velocity[name] = kept[name].sum(0) + 0.9 * self.velocity[name]
                self.z[name] += self.velocity[name]

    def central(self) -> list[Any]:
        return list(self.z.values())


# Measuring ---------------------------------------------------------------------------------------------------


def rounds(run: Callable[[], Any]) -> Callable[[], None]:
    def some() -> None:
        for _ in range(ROUNDS):
            run()

    return some


def how_far(name: str, learners: int) -> float:
    """The central models of both sides after 5 rounds: the largest difference over the largest way from the start."""
    sides: list[Any] = [Threads(name, learners), Batched(name, learners)]
    start = [x.clone() for x in sides[1].central()]
    for side in sides:
        for _ in range(5):
            side()
    pairs = list(zip(*(side.central() for side in sides), strict=True))
    sides[0].replica.close()
    way = max((b - x).abs().max().item() for (_, b), x in zip(pairs, start, strict=True))
    return max((a - b).abs().max().item() for a, b in pairs) / way


def side_by_side(name: str, counts: list[int], repeats: int) -> dict[str, float]:
    import torch

    cores = torch.get_num_threads()
    sides: dict[str, Any] = {"bare": rounds(bare(name))}
    found: dict[str, float] = {}
    for k in counts:
        found[f"apart_{name}_{k}"] = how_far(name, k)
        threads = rounds(Threads(name, k))

        def in_threads(run: Callable[[], None] = threads, k: int = k) -> None:
            torch.set_num_threads(max(1, cores // k))  # as many as there are cores, in all learners
            run()
            torch.set_num_threads(cores)

        sides[f"threads_{k}"], sides[f"batched_{k}"] = in_threads, rounds(Batched(name, k))
    taken = interleaved(sides, repeats=repeats)
    found[f"bare_{name}"] = ROUNDS * BATCH / taken["bare"]
    for k in counts:
        for side in ("threads", "batched"):
            found[f"{side}_over_bare_{name}_{k}"] = k * taken["bare"] / taken[f"{side}_{k}"]
        found[f"batched_over_threads_{name}_{k}"] = taken[f"threads_{k}"] / taken[f"batched_{k}"]
    return found


def processor_time(name: str, counts: list[int], repeats: int) -> dict[str, float]:
    sides: dict[str, Any] = {"bare": bare(name)}
    for k in counts:
        sides |= {f"threads_{k}": Threads(name, k), f"batched_{k}": Batched(name, k)}
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(2 + repeats):
        for side, run in sides.items():
            start = time.process_time()
            for _ in range(FEW):
                run()
            taken[side].append((time.process_time() - start) / FEW)
    cost = {side: statistics.median(times[2:]) for side, times in taken.items()}
    found = {f"bare_ms_{name}": cost["bare"] * 1e3}
    for k in counts:
        for side in ("threads", "batched"):
            found[f"{side}_over_bare_{name}_{k}"] = k * cost["bare"] / cost[f"{side}_{k}"]
        found[f"batched_over_threads_{name}_{k}"] = cost[f"threads_{k}"] / cost[f"batched_{k}"]
    return found


def worker(names: list[str], repeats: int) -> dict[str, float]:
    """One of several processes: samples a second of all of them."""
    import unisono as un

    world, found = un.join(device="cpu"), {}
    for name in names:
        run, times = rounds(Threads(name, 1)), []
        for _ in range(2 + repeats):
            world.barrier()
            start = time.perf_counter()
            run()
            world.barrier()
            times.append(time.perf_counter() - start)
        found[name] = world.size * ROUNDS * BATCH / statistics.median(times[2:])
    return found


# One GPU -----------------------------------------------------------------------------------------------------


def resnet(width: int, channels: int = 3) -> Any:
    """17 convolutions: one, and 8 blocks of two in three stages, whose shortcuts have no parameters."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.new, self.step = after - before, 2 if after > before else 1
            self.ways = nn.Sequential(
                *(nn.Conv2d(before, after, 3, self.step, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
                *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
            )

        def forward(self, x: Any) -> Any:
            short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new)) if self.new else x
            return (self.ways(x) + short).relu()

    torch.manual_seed(0)
    widths = [width] * 4 + [2 * width] * 3 + [4 * width] * 2
    stem = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [Block(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)).cuda()
    return model.to(memory_format=torch.channels_last if CHANNELS_LAST else torch.contiguous_format)


def sgd(model: Any, lr: Any = LR, **how: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **how)


def learners_on_gpu(width: int, spec: str, lr: float = LR, channels: int = 3) -> Any:
    import torch

    import unisono as un

    model = resnet(width, channels)
    return un.parallel(model, sgd(model, lr), spec, world=un.World(device=torch.device("cuda")))


def eager_step(width: int, batch: Any) -> Callable[[], Any]:
    model = resnet(width)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    return step


def own_graph(width: int, batch: Any) -> Callable[[], Any]:
    """One learner's step as plain PyTorch captures it: nothing of ours."""
    import torch

    model = resnet(width)
    optimizer = sgd(model, torch.tensor(LR, device="cuda"), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    with torch.cuda.graph(graph):
        step()
    return graph.replay  # type: ignore[no-any-return]


def on_gpu(width: int, counts: list[int], repeats: int) -> dict[str, Any]:
    """Samples a second of all sides, in turn."""
    import torch

    batches = [(torch.randn(BATCH, 3, 32, 32).cuda(), torch.randint(10, (BATCH,)).cuda()) for _ in range(32)]
    found: dict[str, Any] = {"width": width}

    def some(step: Callable[[], Any], rounds: int = ROUNDS) -> Callable[[], None]:
        def run() -> None:
            for _ in range(rounds):
                step()
            torch.cuda.synchronize()

        return run

    sides = {"bare": some(eager_step(width, batches[0])), "graph1": some(own_graph(width, batches[0]))}
    replicas = {}
    for k in counts:
        replicas[k] = learners_on_gpu(width, f"crossbow(learners={k})")
        sides[f"learners_{k}"] = some(lambda k=k: replicas[k].learn(loss_of, batches[:k]))  # type: ignore[misc]
    most = max(counts)
    threads = learners_on_gpu(width, f"crossbow(learners={most})")
    few = some(lambda: threads.learn(loss_of, batches[:most], capture=False), FEW)
    taken = interleaved(sides, repeats=repeats, warmup=1)
    taken[f"threads_{most}"] = interleaved({"": few}, repeats=3, warmup=1)[""] * ROUNDS / FEW
    of = {"bare": 1, "graph1": 1, f"threads_{most}": most, **{f"learners_{k}": k for k in counts}}
    found |= {f"{side}_samples_s": of[side] * ROUNDS * BATCH / taken[side] for side in of}
    (recorded,) = replicas[most]._captured._rounds
    replay = interleaved({"replay": some(recorded.replay)}, repeats=repeats)["replay"]
    found |= {f"replay_ms_{most}": replay / ROUNDS * 1e3, f"round_ms_{most}": taken[f"learners_{most}"] / ROUNDS * 1e3}
    found[f"learners_over_bare_{most}"] = found[f"learners_{most}_samples_s"] / found["bare_samples_s"]
    found[f"learners_over_own_graph_{most}"] = found[f"learners_{most}_samples_s"] / found["graph1_samples_s"]
    for replica in (*replicas.values(), threads):
        replica.close()
    auto = learners_on_gpu(width, "crossbow(learners=auto)")
    while not auto.tuning._learners.settled:
        auto.learn(loss_of, batches[: auto.learners.count])
    found["learners_auto"] = k = auto.learners.count
    taken = interleaved({"auto": some(lambda: auto.learn(loss_of, batches[:k]))}, repeats=repeats)
    found["auto_samples_s"] = k * ROUNDS * BATCH / taken["auto"]
    auto.close()
    return found


def to_goal(side: str, lr: float, width: int, data: Path, limit_s: float) -> tuple[float, int, float]:
    """Seconds of training, and samples, until 90 % of the held-out images are right; and how many were in the end."""
    import numpy as np
    import torch
    from torch.nn import functional as F

    with np.load(data / "images.npz") as kept:
        x, y, test_x, test_y = (torch.from_numpy(kept[name]).cuda() for name in ("x", "y", "test_x", "test_y"))
    y = y.long()
    x, test_x = (F.pad(part[:, None].float() / 255 - 0.286, (2, 2, 2, 2)) / 0.353 for part in (x, test_x))
    padded, generator, size = F.pad(x, (2, 2, 2, 2)), torch.Generator("cuda").manual_seed(1), 8 * BATCH
    places = torch.arange(32, device="cuda")

    def draw(which: Any) -> tuple[Any, Any]:
        """Images moved by up to 2 pixels, half of them mirrored."""
        n = len(which)
        down, right = (torch.randint(5, (n, 1), generator=generator, device="cuda") + places for _ in range(2))
        mirrored = torch.rand(n, 1, generator=generator, device="cuda") < 0.5
        right = torch.where(mirrored, right.flip(1), right)
        return padded[which[:, None, None], 0, down[:, :, None], right[:, None, :]][:, None], y[which]

    replica = learners_on_gpu(width, "crossbow(learners=8)", lr, channels=1) if side == "crossbow" else None
    model = resnet(width, 1) if replica is None else replica.model
    optimizer = sgd(model, lr) if replica is None else replica.optimizer
    seconds, samples, right = 0.0, 0, 0.0
    for epoch in range(EPOCHS):
        if epoch == DROP:
            for group in optimizer.param_groups:
                group["lr"] /= 10
        torch.cuda.synchronize()
        start = time.perf_counter()
        order = torch.randperm(len(x), generator=generator, device="cuda")
        for which in order[: len(x) // size * size].split(size):
            batch = draw(which)
            if replica is None:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            else:
                replica.learn(loss_of, list(zip(*(part.split(BATCH) for part in batch), strict=True)))
        torch.cuda.synchronize()
        seconds, samples = seconds + time.perf_counter() - start, samples + len(x) // size * size
        judged = (model if replica is None else replica.consolidate()).eval()
        with torch.no_grad():
            answers = torch.cat([judged(part).argmax(1) for part in test_x.split(1000)])
        right = (answers == test_y).float().mean().item()
        model.train()
        if right >= GOAL or seconds >= limit_s:
            break
    if replica is not None:
        replica.close()
    print(f"{side}, {lr}: {right:.4f} after {samples} samples, {seconds:.2f} s", file=sys.stderr, flush=True)
    return seconds if right >= GOAL else float("inf"), samples, right


def to_90(width: int, data: Path, limit_s: float) -> dict[str, Any]:
    """Both sides with the best of some rates."""
    found: dict[str, Any] = {}
    for side in ("bare", "crossbow"):
        to_goal(side, RATES[0], width, data, 1e-9)  # an epoch: libraries choose their kernels
        tried = [(*to_goal(side, lr, width, data, limit_s), lr) for lr in RATES]
        best = min(tried, key=lambda one: (one[0], -one[2]))
        found |= {f"seconds_to_90_{side}": best[0] if best[2] >= GOAL else None, f"samples_to_90_{side}": best[1]}
        found |= {f"right_{side}": best[2], f"lr_{side}": best[3]}
    bare, ours = found["seconds_to_90_bare"], found["seconds_to_90_crossbow"]
    return found | ({"bare_over_crossbow_to_90": bare / ours} if bare and ours else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--learners", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cpu", action="store_true", help="processor time instead of time")
    parser.add_argument("--gpu", action="store_true", help="learners at the same time on one GPU")
    parser.add_argument("--width", type=int, default=16, help="of the ResNet's first stage (default 16)")
    parser.add_argument("--channels-last", action="store_true", help="the memory format of the ResNet, on all sides")
    parser.add_argument("--data", type=Path, help="where images.npz is: with --gpu, the time to 90 %%")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of training at most, until 90 %%")
    asked = parser.parse_args()
    if asked.gpu:
        import torch

        if not torch.cuda.is_available():
            finish({"skipped": "no CUDA device"})
            return
        global CHANNELS_LAST
        CHANNELS_LAST = asked.channels_last
        if asked.data:
            finish(to_90(asked.width, asked.data, asked.limit))
        else:
            finish(on_gpu(asked.width, asked.learners, asked.repeats))
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    import unisono as un

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(1 if asked.cpu else cores)
    found: dict[str, Any] = {"cores": cores, "of": "processor time" if asked.cpu else "time"}
    if asked.cpu:
        for name in asked.models:
            found |= processor_time(name, asked.learners, asked.repeats)
        finish(found)
        return
    for name in asked.models:
        found |= side_by_side(name, asked.learners, asked.repeats)
    speeds = un.launch(worker, workers=cores, args=(asked.models, asked.repeats), threads=1, timeout_s=600)[0]
    found |= {f"workers_over_bare_{name}": speeds[name] / found[f"bare_{name}"] for name in asked.models}
    finish(found)


if __name__ == "__main__":
    main()
