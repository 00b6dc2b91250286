"""Runs before the run: scripts on a simulated world, and how worlds of one and several workers are compared."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.cli.command_line import main
from unisono.launchers.runtime.link_emulation import Link
from unisono.predict.rehearsal.dry import DryRequest, DryResult, rehearse, write_dry_report
from unisono.predict.rehearsal.small import Observed, Verdict, judge

# -- on a simulated world ----------------------------------------------------------------------------------------------

SCRIPT = """
    import sys, torch, unisono as un
    world = un.join(device="cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = un.parallel(model, optimizer, STRATEGY)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 4))
    for epoch in range(3):
        for x, y in un.shard(data, batch_size=BATCH):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        un.save("checkpoint", replica)
    print("end")
"""


# As programs for DistributedDataParallel begin: they ask the environment, and make a process group.
ASKING = """
import os, torch
import torch.distributed as dist
from torch.distributed import init_process_group
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
place = [int(os.environ.get(name, -1)) for name in names]
assert place == [0, 4, 0, 2], place
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
init_process_group(backend="gloo")
dist.barrier()
assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
"""
ENDLESS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    try:
        optimizer.step()
    except Exception:
        pass
"""


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DryResult]:
    """dry(workers, text, STRATEGY=..., BATCH=..., SAMPLES=...) rehearses that script."""
    monkeypatch.chdir(tmp_path)

    def run(workers: int, text: str = SCRIPT, per_host: int | None = None, **values: Any) -> DryResult:
        text = textwrap.dedent(text)
        options = {key: values.pop(key) for key in list(values) if key.islower()}
        for name, value in {"STRATEGY": "allreduce", "BATCH": 128, "SAMPLES": 512, **values}.items():
            text = text.replace(name, repr(value))
        (tmp_path / "train.py").write_text(text)
        return rehearse(DryRequest("train.py", [], workers, per_host or workers, **options))

    return run


def test_shapes_memory_and_traffic_of_64_workers_are_known(dry: Callable[..., DryResult]) -> None:
    result = dry(64, per_host=8, link=Link(1e9, 0.0))
    assert (result.exit_status, result.problems, result.steps) == (0, [], 3)
    assert result.inputs == ["(2, 8) float32"]
    assert result.model.startswith("Linear: 36 parameters in 2 tensors")
    assert result.data == ["shard0: 512 samples, 4 steps per epoch, global batches of 128, 2 each"]
    # A ring all-reduce sends 2 (N - 1) / N of the bytes: 36 numbers, each tensor on cache lines of 64 bytes, and
    # behind them a flag for each tensor and one for learning rates.
    gradients = result.traffic["all_reduce gradients"]
    assert (gradients.calls, gradients.sent) == (1.0, math.ceil(2 * 63 / 64 * 4 * (32 + 16 + 3)))
    assert result.exchange_s == pytest.approx(8 * sum(t.sent for t in result.traffic.values()) / 1e9, rel=0.05)
    assert result.memory is not None
    assert result.memory.need("allreduce").optimizer == 36 * 4
    text = write_dry_report(result)
    assert "64 workers on 8 hosts, 8 on each, allreduce" in text
    assert text.endswith("this run would work")


def test_nothing_is_saved(dry: Callable[..., DryResult], tmp_path: Path) -> None:
    assert dry(4, BATCH=512, SAMPLES=512, steps=2).problems == []  # a step an epoch: un.save is called in between
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"BATCH": 32}, "ValueError: un.shard got batch_size=32 for 64 workers."),
        ({"SAMPLES": 50}, "ValueError: un.shard got 50 samples for 64 workers."),
        ({"STRATEGY": "allreduse"}, "did you mean 'allreduce'"),
        ({"STRATEGY": "qadam"}, "TypeError: qadam takes over the step of torch.optim.Adam"),
        ({"STRATEGY": "hogwild", "per_host": 8}, "ValueError: hogwild needs all workers on one host, got 8"),
    ],
)
def test_settings_that_would_not_work_are_problems(
    values: dict[str, Any], problem: str, dry: Callable[..., DryResult]
) -> None:
    result = dry(64, **values)
    assert result.exit_status == 1
    assert problem in " ".join(result.problems)
    assert "(line " in result.problems[0]
    assert write_dry_report(result).endswith("this run would not work")


def test_a_batch_that_does_not_divide_is_a_note(dry: Callable[..., DryResult]) -> None:
    result = dry(48, BATCH=100, SAMPLES=310)
    assert result.exit_status == 0
    notes = " ".join(result.notes)
    assert "batch_size=100 does not divide by 48 workers: 4 of them have a sample more" in notes
    assert "96 or 144 would" in notes
    assert "the last batch of an epoch has 10 samples for 48 workers, so that 38 have none" in notes


def test_too_little_memory_is_a_problem_of_its_own(dry: Callable[..., DryResult]) -> None:
    result = dry(8, host_memory="1KiB")
    assert result.exit_status == 3
    assert result.problems[0].startswith("memory: short of ")


def test_methods_that_need_others_to_answer_are_run_as_allreduce(dry: Callable[..., DryResult]) -> None:
    result = dry(4, STRATEGY="parameter_server")
    assert (result.exit_status, result.traffic) == (0, {})
    assert "the steps were run under allreduce, and traffic is not known: its servers answer" in result.notes[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("print('no')", "ended without calling un.parallel"),
        ("raise SystemExit('no data here')", "the script ended itself: no data here"),
        ("import torch\n\nraise KeyError('x')", "KeyError: 'x' (line 3)"),
        (SCRIPT.replace("optimizer.step()", "pass"), "ended without an optimizer step"),
        (ENDLESS, "made 10 optimizer steps without calling un.parallel"),
    ],
)
def test_scripts_that_train_nothing_would_not_work(text: str, problem: str, dry: Callable[..., DryResult]) -> None:
    result = dry(2, text)
    assert result.exit_status == 1
    assert problem in result.problems[0]


def test_a_script_finds_the_environment_of_a_worker_and_nothing_of_it_stays(
    dry: Callable[..., DryResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "7")
    before, make = dict(os.environ), torch.distributed.init_process_group
    result = dry(4, ASKING + textwrap.dedent(SCRIPT), per_host=2)
    assert result.exit_status == 0, result.problems
    assert (result.steps, result.memory is not None) == (3, True)
    assert dict(os.environ) == before
    assert torch.distributed.init_process_group is make
    assert not torch.distributed.is_initialized()


def test_data_that_are_not_divided_are_noted(dry: Callable[..., DryResult]) -> None:
    text = SCRIPT.replace("un.shard(data, batch_size=BATCH)", "torch.utils.data.DataLoader(data, batch_size=BATCH)")
    assert any(note.startswith("un.shard was not used") for note in dry(4, text).notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dry", "--small"], "give one of them"),
        (["--steps", "3"], "--steps goes with --dry or --small"),
        (["--workers-per-host", "3"], "--workers-per-host goes with --dry"),
        (["--small", "--on", "ssh", "--hosts", "a,b"], "--small runs on this machine"),
        (["-n", "1", "--small"], "--small compares one worker with several"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SystemExit):
        main(["run", "-n", "2", *options, str(tmp_path / "train.py")])
    assert words in capsys.readouterr().err


def test_the_command_prints_the_report_and_gives_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('no data')")
    assert main(["run", "--dry", "-n", "8", "--on", "slurm", "--net", "100mbit", "train.py"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("dry run of train.py: 8 workers on ")
    assert "the script ended itself: no data" in out


# -- worlds of one and two, compared -----------------------------------------------------------------------------------


class Batch(nn.Module):
    """With batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.layer(x)).tanh())
        return y


def observe(
    model: nn.Module, parts: list[Tensor], loss: Callable[[Tensor], Tensor], *, shards: int = 1, lr: float = 0.1
) -> Observed:
    """One step of plain PyTorch for a world whose ranks have these parts: the mean of their gradients."""
    notes, losses, sums = [], [], {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for part in parts:
        mine = copy.deepcopy(model)
        value = loss(mine(part))
        value.backward()
        losses.append(float(value.detach()))
        for name, p in mine.named_parameters():
            sums[name] += p.grad / len(parts)
        notes.append(
            {
                "strategy": "allreduce",
                "samples": len(part),
                "total": float(part.double().abs().sum()),
                "digest": str(part.tolist()),
                "shards": shards,
                "seeded": True,
                "dropout": [],
                "batch_norms": [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm1d)],
                "steps": 1,
            }
        )
    stepped = {name: p.detach() - lr * sums[name] for name, p in model.named_parameters()}
    return Observed(notes, [sum(losses) / len(losses)], sums, stepped)


def make(model: nn.Module) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)
    return model, torch.randn(8, 6), {name: p.detach().clone() for name, p in model.named_parameters()}


def mean(y: Tensor) -> Tensor:
    return (y**2).mean()


def judge_parts(model: nn.Module, parts: list[Tensor], loss: Callable[[Tensor], Tensor], **how: Any) -> Verdict:
    model, x, start = make(model)
    parts = parts or list(x.chunk(2))
    grade = how.pop("grade", "exact")
    return judge(observe(model, [x], loss, **how), observe(model, parts, loss, **how), start, grade)


def test_a_right_program_agrees() -> None:
    verdict = judge_parts(nn.Linear(6, 1), [], mean)
    assert verdict.agrees is True
    assert "gradients agree" in verdict.lines[0]
    assert "after 1 steps" in verdict.lines[1]


def test_a_sum_as_loss_is_told_from_a_mean() -> None:
    verdict = judge_parts(nn.Linear(6, 1), [], lambda y: (y**2).sum())
    assert verdict.agrees is False
    assert "gradients of 2 workers are 0.5 times those of one: the loss is a sum over samples" in verdict.lines[0]


def test_batch_normalisation_is_named_with_the_parameters_that_differ() -> None:
    verdict = judge_parts(Batch(), [], mean)
    assert verdict.agrees is False
    text = "\n".join(verdict.lines)
    assert "  layer.weight: " in text
    assert "batch normalisation (norm) takes its statistics from each worker's own samples: un.sync_batch_norm" in text


def test_workers_with_the_same_samples_are_found() -> None:
    _, x, _ = make(nn.Linear(6, 1))
    verdict = judge_parts(nn.Linear(6, 1), [x, x], mean)
    assert verdict.agrees is False
    assert (
        "workers train on the same samples (8, 8; one worker alone: 8): divide the data by un.shard" in verdict.lines[0]
    )


def test_a_batch_size_of_each_worker_is_found() -> None:
    _, x, _ = make(nn.Linear(6, 1))
    verdict = judge_parts(nn.Linear(6, 1), [x, x + 1], mean)
    assert verdict.agrees is False
    assert "the global batch is not the same: 8 samples with one worker, 16 with 2 (8, 8)" in verdict.lines[0]


@pytest.mark.parametrize(("shards", "agrees"), [(0, False), (1, None)])
def test_other_samples_are_a_mistake_and_other_numbers_of_the_same_are_chance(shards: int, agrees: bool | None) -> None:
    _, x, _ = make(nn.Linear(6, 1))
    verdict = judge_parts(nn.Linear(6, 1), [x[:4] * 1.1, x[4:]], mean, shards=shards)
    assert verdict.agrees is agrees
    assert ("random augmentation" if shards else "seeds of each rank's own") in verdict.lines[0]


def test_methods_that_are_not_exact_are_not_held_to_it() -> None:
    verdict = judge_parts(nn.Linear(6, 1), [], mean, grade="other")
    assert verdict.agrees is None
    assert "is not exact" in verdict.lines[0]


def test_an_optimizer_that_depends_on_the_world_is_found_after_the_gradients() -> None:
    model, x, start = make(nn.Linear(6, 1))
    verdict = judge(observe(model, [x], mean), observe(model, list(x.chunk(2)), mean, lr=0.2), start, "exact")
    assert verdict.agrees is False
    assert "The first gradients agree, so something after them does not" in "\n".join(verdict.lines)


DROPPING = """
import json
import torch
from torch.nn.functional import dropout, scaled_dot_product_attention as attend
import torch.nn.functional as F
from unisono.predict.rehearsal.recorder import _switch_off_dropout

found = _switch_off_dropout(torch.nn.Linear(1, 1))
x = torch.randn(1, 2, 8, 4)
assert torch.equal(dropout(x, 0.9), x)
for call in (attend, F.scaled_dot_product_attention):
    assert torch.equal(call(x, x, x, dropout_p=0.9), call(x, x, x))
    assert torch.equal(call(query=x, key=x, value=x, is_causal=True, dropout_p=0.9), call(x, x, x, None, 0.9, True))
print(json.dumps(found))
"""


def test_dropout_is_off_however_the_program_calls_it() -> None:
    ended = subprocess.run([sys.executable, "-c", DROPPING], capture_output=True, text=True, check=False)
    names = [f"torch.nn.functional.{name}" for name in ("dropout", "scaled_dot_product_attention")]
    assert (ended.stderr, json.loads(ended.stdout)) == ("", names)
