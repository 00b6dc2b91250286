"""Programs under `zero(step_ahead=True)`: bit by bit what they do without, and plain PyTorch's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.offload.ahead import StepsAhead
from unisono.world import World
from unisono.world.virtual import run_threads

SEED = threading.Lock()  # torch.manual_seed is the process's
AHEAD = "zero(stage={}, optimizer_on=cpu, step_ahead=True, unit_bytes=3000)"
PLAIN = "zero(stage={}, optimizer_on=cpu, unit_bytes=3000)"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is asked for when all units have had their turn: it can be counted which were stepped ahead."""
    claim = StepsAhead.claim

    def later(ahead: StepsAhead, *args: Any) -> Any:
        for guess in ahead._guesses.values():
            assert guess._started.wait(30)
        return claim(ahead, *args)

    monkeypatch.setattr(StepsAhead, "claim", later)


class Net(nn.Module):
    """Layers whose lines torch's kernels take in whole vectors, and one that not every batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
        self.seldom = nn.Linear(16, 16)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        y: Tensor = self.inner(x)
        return self.seldom(y) if seldom else y


def net(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Net:
    with SEED:
        torch.manual_seed(0)
        return Net().to(device, dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def batch(t: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1000 * t + rank), dtype=dtype)


class Program:
    """A loop as people write it: clipping, steps that are left out, a schedule, layers that a batch does not use."""

    def __init__(self, model: nn.Module, ranks: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        self.model, self.ranks, self.dtype = model, ranks, dtype
        self.optimizer = adamw(model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.999)
        self.clipped = self.left_out = 0
        self.limit, self.overflows = 3.0, True
        self.exact = False  # clip by a power of two, by a norm that one rank can tell

    def backward(self, t: int) -> None:
        x = torch.cat([batch(t, rank, self.dtype) for rank in self.ranks]).to(next(self.model.parameters()).device)
        found = self.model(x[:, :16], seldom=t % 5 in (1, 2)).to(x.dtype)
        loss = nn.functional.mse_loss(found, x[:, 16:])
        (loss * (30.0 if t % 7 == 4 else torch.inf if self.overflows and t % 19 == 9 else 1.0)).backward()

    def clip(self) -> float:
        if not self.exact:
            return float(nn.utils.clip_grad_norm_(self.model.parameters(), self.limit))
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        for gradient in gradients if norm > self.limit else ():
            gradient.mul_(0.25)
        return norm

    def step(self, t: int) -> None:
        self.optimizer.zero_grad()
        self.backward(t)
        norm = self.clip()
        self.clipped += self.limit < norm < torch.inf
        if t % 11 == 3:  # between backward and the step
            self.schedule.step()
        if not norm < torch.inf:
            self.left_out += 1
            return
        self.optimizer.step()
        if t % 11 == 5:
            self.schedule.step()

    def run(self, steps: range) -> None:
        for t in steps:
            self.step(t)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else bool(a == b)


def count(replica: Any) -> tuple[int, int]:
    engines = [replica._offload.of(unit).engine for unit in replica.units]
    found = {id(engine): engine.ahead for engine in engines}.values()
    return sum(one.claimed for one in found), sum(one.missed for one in found)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("stage", "size", "steps"), [(2, 1, 120), (2, 2, 120), (1, 2, 48), (3, 2, 48), (3, 1, 48)])
def test_a_program_that_clips_and_leaves_steps_out_trains_bit_by_bit_as_without(
    stage: int, size: int, steps: int
) -> None:
    def work(world: World, spec: str) -> Any:
        program = Program(net(), [world.rank])
        replica = un.parallel(program.model, program.optimizer, spec, world=world)
        program.run(range(steps))
        done = count(replica) if "ahead" in spec else None
        state = program.optimizer.state_dict()
        replica.restore()
        replica.close()
        return values_of(program.model), state, (program.clipped, program.left_out), done

    found = run_threads(lambda world: work(world, AHEAD.format(stage)), size)
    plain = run_threads(lambda world: work(world, PLAIN.format(stage)), size)
    for (*mine, done), (*without, _) in zip(found, plain, strict=True):
        assert same(mine, without)
        assert mine[2] == without[2]
        assert min(mine[2]) >= 2  # some were clipped, some left out
        assert min(done) > steps / 4  # and some guesses were right, some wrong


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("stage", "more"), [(2, ""), (2, ", precision=bf16"), (3, ", precision=bf16, moments=bf16")])
def test_on_a_gpu_500_steps_that_clip_and_leave_steps_out_are_bit_by_bit_those_without(
    stage: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.methods.offload.pipeline.staged_share", lambda threads: 0.0)  # all is small
    found = []
    for spec in (AHEAD, PLAIN):
        program = Program(net(device="cuda"), [0])
        asked = spec.format(stage)[:-1] + more + ")"
        replica = un.parallel(program.model, program.optimizer, asked, world=un.join(device="cuda"))
        program.run(range(500))
        if spec is AHEAD:
            assert min(count(replica)) > 100
        assert min(program.clipped, program.left_out) >= 20
        state = program.optimizer.state_dict()
        replica.restore()
        replica.close()
        found.append([values_of(program.model), state, program.clipped, program.left_out])
    assert same(*found)


@pytest.mark.usefixtures("patient")
def test_alone_it_trains_bit_by_bit_as_torchs_optimizer() -> None:
    found = []
    for spec in (None, AHEAD.format(2)):
        program = Program(net(), [0])
        program.exact = True
        replica = spec and un.parallel(program.model, program.optimizer, spec, world=World())
        program.run(range(200))
        if replica:
            assert min(count(replica)) > 50
            replica.restore()
            replica.close()
        found.append([values_of(program.model), program.clipped, program.left_out])
        assert min(found[-1][1:]) >= 8
    assert same(*found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_as_one_process_on_both_batches(stage: int) -> None:
    def work(world: World) -> dict[str, Tensor]:
        program = Program(net(torch.float64), [world.rank], torch.float64)
        replica = un.parallel(program.model, program.optimizer, AHEAD.format(stage), world=world)
        program.run(range(40))
        replica.restore()
        replica.close()
        return values_of(program.model)

    alone = Program(net(torch.float64), [0, 1], torch.float64)
    alone.run(range(40))
    for found in run_threads(work, 2):
        for name, value in values_of(alone.model).items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("stage", [2, 3])
def test_until_the_step_a_program_sees_and_saves_the_old_values(stage: int, tmp_path: Path) -> None:
    """A checkpoint between backward and step holds neither the values nor the state of the step."""

    def work(world: World, spec: str, folder: Path) -> Any:
        program = Program(net(), [world.rank])
        replica = un.parallel(program.model, program.optimizer, spec, world=world)
        program.run(range(3))
        before = values_of(program.model), program.optimizer.state_dict()
        program.optimizer.zero_grad()
        program.backward(3)
        assert same([values_of(program.model), program.optimizer.state_dict()], list(before))
        un.save(folder / "between", replica)
        program.optimizer.step()
        un.save(folder / "after", replica)
        program.optimizer.zero_grad()
        program.backward(5)
        un.load(folder / "between", replica)  # what was guessed was guessed for another state
        program.optimizer.step()
        replica.restore()
        return before, values_of(program.model)

    (before, ended), *_ = run_threads(lambda world: work(world, AHEAD.format(stage), tmp_path), 2)
    saved = [un.read_checkpoint(tmp_path / name) for name in ("between", "after")]
    assert same(saved[0]["model"], before[0])
    assert same(saved[0]["optimizer"]["state"], before[1]["state"])
    assert not same(saved[1]["model"], before[0])
    assert same(run_threads(lambda world: work(world, PLAIN.format(stage), tmp_path / "plain"), 2)[0][1], ended)


def test_a_run_that_is_saved_and_loaded_elsewhere_goes_on_bit_by_bit(tmp_path: Path) -> None:
    def work(world: World, spec: str, steps: range, at: Path | None = None) -> dict[str, Tensor]:
        program = Program(net(), [world.rank])
        replica = un.parallel(program.model, program.optimizer, spec, world=world)
        if at is not None:
            un.load(at, replica)
        program.run(steps)
        un.save(tmp_path / str(steps.stop), replica)
        replica.restore()
        return values_of(program.model)

    whole = run_threads(lambda world: work(world, PLAIN.format(2), range(30)), 2)[0]
    run_threads(lambda world: work(world, AHEAD.format(2), range(15)), 2)
    for spec in (AHEAD, PLAIN):
        ended = run_threads(lambda world, spec=spec: work(world, spec.format(2), range(15, 30), tmp_path / "15"), 2)
        assert same(ended[0], whole)


def test_gradients_are_scaled_by_hand_cleared_and_taken_away_as_without() -> None:
    """Each by itself, between backward and the step."""

    def halve(program: Program) -> None:
        for p in program.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def clear_in_place(program: Program) -> None:
        program.optimizer.zero_grad(set_to_none=False)

    def take_one_away(program: Program) -> None:
        next(iter(program.model.parameters())).grad = None

    def clear(program: Program) -> None:
        program.optimizer.zero_grad()

    def nothing(program: Program) -> None: ...

    changes: list[Callable[[Program], None]] = [nothing, halve, clear_in_place, take_one_away, clear, nothing, halve]

    def work(world: World, spec: str) -> Any:
        program = Program(net(), [world.rank])
        replica = un.parallel(program.model, program.optimizer, spec, world=world)
        for t, change in enumerate(changes):
            program.optimizer.zero_grad()
            program.backward(t)
            change(program)
            program.optimizer.step()
        replica.restore()
        return values_of(program.model), program.optimizer.state_dict()

    def plainly() -> Any:
        program = Program(net(), [0])
        for t, change in enumerate(changes):
            program.optimizer.zero_grad()
            program.backward(t)
            change(program)
            program.optimizer.step()
        return values_of(program.model), program.optimizer.state_dict()["state"]

    ended, state = work(World(), AHEAD.format(2))
    expected, counts = plainly()
    assert same(ended, expected)
    assert same({k: v["step"] for k, v in state["state"].items()}, {k: v["step"] for k, v in counts.items()})
    assert same([*run_threads(lambda world: work(world, AHEAD.format(2)), 2)[0]],
                [*run_threads(lambda world: work(world, PLAIN.format(2)), 2)[0]])  # fmt: skip


@pytest.mark.parametrize("what", ["replaced", "by different numbers", "written"])
def test_what_cannot_count_is_refused_as_without(what: str) -> None:
    program = Program(net(), [0])
    un.parallel(program.model, program.optimizer, AHEAD.format(2), world=World())
    before = values_of(program.model)
    program.backward(0)
    first = next(iter(program.model.parameters()))
    if what == "replaced":
        first.grad = torch.zeros_like(first)
    elif what == "written":
        with torch.no_grad():
            first.mul_(2.0)
        before = values_of(program.model)
    else:
        first.grad.mul_(2.0)
    with pytest.raises(ValueError, match=what if what != "written" else "was written to"):
        program.optimizer.step()
    assert same(values_of(program.model), before)


def test_only_the_last_pass_of_a_window_is_stepped_ahead() -> None:
    def work(world: World, spec: str, passes: int) -> Any:
        program = Program(net(), [world.rank])
        program.overflows = False
        replica = un.parallel(program.model, program.optimizer, spec, world=world, accumulate=passes)
        for t in range(12):
            program.optimizer.zero_grad()
            with replica.no_sync():
                program.backward(3 * t)
            program.backward(3 * t + 1)
            if passes == 2:
                program.backward(3 * t + 2)
            program.clip()
            program.optimizer.step()
        done = count(replica) if "ahead" in spec else None
        replica.restore()
        return values_of(program.model), done

    for passes in (1, 2):
        found = run_threads(lambda world, n=passes: work(world, AHEAD.format(2), n), 2)[0]
        plain = run_threads(lambda world, n=passes: work(world, PLAIN.format(2), n), 2)[0]
        assert same(found[0], plain[0])
        assert 0 < found[1][0] <= 12 * 3


def test_a_step_in_a_window_that_has_not_ended_counts() -> None:
    """The gradients of the passes so far leave just before the step."""

    def work(world: World, spec: str) -> dict[str, Tensor]:
        program = Program(net(), [world.rank])
        replica = un.parallel(program.model, program.optimizer, spec, world=world, accumulate=3)
        for t in range(0, 8, 2):
            program.optimizer.zero_grad()
            program.backward(t)
            program.backward(t + 1)
            program.optimizer.step()
        replica.restore()
        return values_of(program.model)

    found, plain = (run_threads(lambda world, s=s: work(world, s.format(2)), 2)[0] for s in (AHEAD, PLAIN))
    assert same(found, plain)


def test_several_optimizers_with_hooks_and_closures_step_each_on_its_own() -> None:
    def work(world: World, spec: str | None) -> Any:
        model = net()
        parts = [[*model.inner.parameters()], [*model.seldom.parameters()]]
        optimizers = [torch.optim.AdamW(parts[0], lr=0.01, fused=True), torch.optim.SGD(parts[1], lr=0.1, fused=True)]

        def slow_down(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.param_groups[0]["lr"] *= 0.9

        optimizers[0].register_step_pre_hook(slow_down)
        replica = spec and un.parallel(model, optimizers, spec, world=world)

        def compute(t: int) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(batch(t, world.rank, torch.float32)[:, :16], seldom=True).square().mean()
            loss.backward()
            return loss

        for t in range(8):
            if t % 3 == 2:
                optimizers[0].step(lambda t=t: compute(t))  # type: ignore[misc]
                continue
            compute(t)
            if t % 2:
                optimizers[0].step()
            optimizers[1].step()
        if replica:
            replica.restore()
        return values_of(model)

    assert same(work(World(), AHEAD.format(2)), work(World(), None))
    found, plain = (run_threads(lambda world, s=s: work(world, s.format(2)), 2)[0] for s in (AHEAD, PLAIN))
    assert same(found, plain)


@pytest.mark.parametrize("change", ["switch", "rebind"])
def test_a_world_that_changes_between_backward_and_step_goes_on_from_the_old_values(change: str) -> None:
    """To other stages, or with a rank more: the gradients are dropped, and so is what was stepped with them."""

    def work(world: World, spec: str) -> dict[str, Tensor]:
        smaller = world if change == "switch" else world.split([[0, 1], [2]])
        program = Program(net(), [world.rank])
        replica = un.parallel(program.model, program.optimizer, spec, world=smaller)
        if world.rank < 2:
            program.run(range(4))
            program.optimizer.zero_grad()
            program.backward(5)
        if change == "switch":
            replica = replica.switch(spec.replace("stage=2", "stage=3"))
        else:
            replica.rebind(world)
        program.run(range(6, 9))
        replica.restore()
        return values_of(program.model)

    size = 2 if change == "switch" else 3
    found, plain = (run_threads(lambda world, s=s: work(world, s.format(2)), size)[0] for s in (AHEAD, PLAIN))
    assert same(found, plain)


def test_optimizers_of_whole_tensors_are_refused() -> None:
    model = nn.Linear(16, 16, bias=False)
    with pytest.raises(ValueError, match=r"step_ahead=True.*whole"):
        un.parallel(model, torch.optim.Muon(model.parameters()), AHEAD.format(2), world=World())
