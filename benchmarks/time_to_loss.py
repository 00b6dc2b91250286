"""Part of network.py: how long each method takes to the loss that DDP reaches, on a character transformer.

The model has 5.0 M parameters; a step is 2 sequences of 32 characters a worker, with AdamW. Every method starts from
the same weights and sees the same batches. They take turns of 8 steps; after each turn the loss on held-out text is
taken, outside of the time. Losses are means of two in a row; the target is DDP's last.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

WIDTH, LAYERS, LENGTH, BATCH = 320, 4, 32, 2
HELD_OUT = 64  # sequences
TURN = 8  # steps: after them all ranks hold the same model, with every method below
SMOOTHED = 2  # losses
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)  # that each method was tried with (--only tune)


class Method(NamedTuple):
    """How the workers agree, and the learning rate of RATES that gave the least loss."""

    spec: str
    lr: float


METHODS = {
    "ddp": Method("torch:ddp", 5e-4),
    "torch_powersgd_r1": Method("torch:ddp_powersgd 1", 5e-4),
    "torch_powersgd_r2": Method("torch:ddp_powersgd 2", 5e-4),
    "torch_powersgd_r4": Method("torch:ddp_powersgd 4", 5e-4),
    "torch_powersgd_r8": Method("torch:ddp_powersgd 8", 5e-4),
    "powersgd_r1": Method("powersgd(rank=1)", 5e-4),
    "powersgd_r2": Method("powersgd(rank=2)", 5e-4),
    "powersgd_r4": Method("powersgd(rank=4)", 5e-4),
    "topk_1pct": Method("topk(k=0.01)", 5e-4),
    "local_sgd_4_powersgd_r4": Method("local_sgd(every=4, start=0, reducer=powersgd(rank=4))", 1e-3),
    "local_sgd_4_powersgd_r8": Method("local_sgd(every=4, start=0, reducer=powersgd(rank=8))", 1e-3),
    "local_sgd_8_powersgd_r8": Method("local_sgd(every=8, start=0, reducer=powersgd(rank=8))", 1e-3),
    "diloco_8_powersgd_r8": Method("diloco(every=8, reducer=powersgd(rank=8))", 5e-4),
    "diloco_8_topk": Method(  # these three were tried with 1e-3, the first two with a second rate
        "diloco(every=8, outer_lr=1.0, outer_momentum=0.5, reducer=topk(chunk=4096, k=256, bits=4))", 1e-3
    ),
    "sparseloco_8": Method("sparseloco(every=8, k=256, bits=4)", 1e-3),
    # its outer rate was tried at 1, 1.2 and 1.5; torch_powersgd_r4 also with a rate of 7e-4
    "sparseloco_8_outer": Method("sparseloco(every=8, k=64, chunk=1024, bits=2, outer_lr=1.5)", 1e-3),
    "local_sgd_8_topk": Method("local_sgd(every=8, start=0, reducer=topk(chunk=4096, k=512, bits=4))", 1e-3),
}
DEFAULT = (
    "ddp",
    "torch_powersgd_r2",
    "torch_powersgd_r4",
    "torch_powersgd_r8",
    "powersgd_r4",
    "local_sgd_8_powersgd_r8",
    "local_sgd_8_topk",
    "sparseloco_8",
    "sparseloco_8_outer",
)


class Text(NamedTuple):
    """Sequences to learn from, in the order of the steps, and some that are held out."""

    letters: int
    rows: Any
    held_out: Any


def read_text(path: str | None) -> Text:
    import torch
    from char_transformer import read

    letters, text = torch.tensor(list(read(path))).unique(return_inverse=True)
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return Text(len(letters), rows[HELD_OUT:], rows[:HELD_OUT])


class Runner:
    """One method on its way."""

    def __init__(self, method: Method, text: Text, world: Any) -> None:
        import torch
        from char_transformer import CharTransformer

        torch.manual_seed(0)
        model = CharTransformer(text.letters, WIDTH, LENGTH, LAYERS)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=method.lr, fused=True)
        self._text, self._world, self.steps = text, world, 0
        self._model, self._called = model, wrap(method.spec, model, self._optimizer)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def take_turn(self) -> None:
        """Some steps, timed until all ranks have done them; then the loss."""
        self._world.barrier()
        start = time.perf_counter()
        for _ in range(TURN):
            self._step()
        self._world.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(self._held_out_loss())

    def _step(self) -> None:
        from char_transformer import loss_of

        at = (self.steps * self._world.size + self._world.rank) * BATCH
        self._optimizer.zero_grad()
        loss_of(self._called, self._text.rows[at : at + BATCH]).backward()
        self._optimizer.step()
        self.steps += 1

    def _held_out_loss(self) -> float:
        """Each rank takes some of the sequences."""
        import torch
        from char_transformer import loss_of

        with torch.no_grad():
            loss = loss_of(self._model, self._text.held_out[self._world.rank :: self._world.size])
        return float(self._world.all_reduce(loss.double().view(1), "mean").wait())

    @property
    def curve(self) -> list[float]:
        """The loss after each turn, smoothed."""
        return [sum(last := self.losses[max(0, i - SMOOTHED) : i]) / len(last) for i in range(1, len(self.losses) + 1)]

    def reached(self, target: float) -> tuple[float, float] | None:
        """Seconds and steps until the smoothed loss was `target`, in proportion between two turns; None: not yet."""
        before = float("nan")
        for turn, loss in enumerate(self.curve):
            if loss <= target:
                share = 1.0 if turn == 0 else (before - target) / (before - loss)
                return sum(self.seconds[:turn]) + share * self.seconds[turn], (turn + share) * TURN
            before = loss
        return None

    def may_reach(self, target: float, steps: int) -> bool:
        """Whether it has not, and may yet: in so many steps, and without having diverged."""
        return self.reached(target) is None and self.steps < steps and self.losses[-1] < 1.5 * self.losses[0]


def wrap(spec: str, model: Any, optimizer: Any) -> Any:
    """What is called instead of the model."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    import unisono as un

    if spec == "torch:ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if spec.startswith("torch:ddp_powersgd"):
        called = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000)  # on gloo it needs one bucket
        rank = int(spec.split()[1])
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)  # the least that it takes
        called.register_comm_hook(state, powerSGD_hook)
        return called
    un.parallel(model, optimizer, spec)
    return model


def race(names: Sequence[str], steps: int, text_path: str | None, world: Any, say: Callable[[str], None]) -> Any:
    """In each worker: all methods until they have reached DDP's loss, at most twice as many steps."""
    text = read_text(text_path)
    runners = {name: Runner(METHODS[name], text, world) for name in dict.fromkeys(["ddp", *names])}
    for turn in range(steps // TURN):
        for runner in runners.values():
            runner.take_turn()
        told = ", ".join(f"{name} {r.losses[-1]:.3f} ({sum(r.seconds):.0f} s)" for name, r in runners.items())
        say(f"  step {(turn + 1) * TURN}: {told}")
    target = runners["ddp"].curve[-1]
    while behind := {name: r for name, r in runners.items() if r.may_reach(target, 2 * steps)}:
        for runner in behind.values():
            runner.take_turn()
        say(f"  still above {target:.4f}: " + ", ".join(f"{name} {r.curve[-1]:.4f}" for name, r in behind.items()))
    found = {name: runner.reached(target) for name, runner in runners.items()}
    step_s = {name: statistics.median(runner.seconds) / TURN for name, runner in runners.items()}
    return {"target": target, "reached": found, "step_s": step_s}


def tune(names: Sequence[str], steps: int, text_path: str | None, rates: Sequence[float]) -> dict[str, Any]:
    """In each worker of one host: losses of each method at each learning rate, and the steps to each. What a method
    comes to does not depend on the network."""
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cpu")
    if any(METHODS[name].spec.startswith("torch:ddp_") for name in names):
        dist.init_process_group("gloo")
    text, found = read_text(text_path), {}
    for name in names:
        for lr in rates:
            spec = "allreduce" if name == "ddp" else METHODS[name].spec  # the same numbers
            runner = Runner(Method(spec, lr), text, world)
            for _ in range(steps // TURN):
                runner.take_turn()
            found[f"{name} {lr:g}"] = runner.curve
            if world.rank == 0:
                print(f"{name} {lr:g}: {' '.join(f'{loss:.3f}' for loss in runner.curve)}", flush=True)
    return found
