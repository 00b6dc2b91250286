"""`unisono memory`: what is learned from a script that is run up to its first step, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.cli import main
from unisono.methods.strategy import binding
from unisono.predict.footprint.memory_report import MemoryReport
from unisono.predict.footprint.script import ScriptError, predict_for_script

# Programs of process groups (one of torch, one of a mesh), and of libraries that count the processes themselves.
OTHERS = ("gpt_ddp.py", "hybrid.py", "hf_text_classification.py", "keras_convnet.py")
EXAMPLES = sorted(p for p in (Path(__file__).parents[2] / "examples").glob("*.py") if p.name not in OTHERS)
ROOMY: dict[str, Any] = {"device_memory": "1TiB", "host_memory": "10TiB", "disk": "100TiB"}
SIZES = ["--device-memory", "1GiB", "--host-memory", "1GiB", "--disk", "1GiB"]
HEAD = """
import sys
import torch, unisono as un
from torch import nn
from torch.nn import functional as F
world = un.join()
x, y = torch.randn(64, 50), torch.zeros(64, dtype=torch.long)
model = nn.Sequential(nn.Linear(50, 300), nn.ReLU(), nn.Linear(300, 10)).to(world.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
"""
LOOP = """
un.parallel(model, optimizer, "allreduce")
for images, labels in un.shard((x, y), batch_size=32):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    raise SystemExit("the first step did not end the run")
"""
PARAMETERS = 50 * 300 + 300 + 300 * 10 + 10
Ask = Callable[..., MemoryReport]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """The report on a script of this text."""

    def asked(text: str, *arguments: str, workers: int = 1, **mesh: Any) -> MemoryReport:
        file = tmp_path / "train.py"
        file.write_text(dedent(text))
        return predict_for_script(str(file), arguments, workers=workers, **ROOMY, **mesh)

    return asked


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_run_as_far_as_needed(path: Path) -> None:
    one, two = (predict_for_script(str(path), ["--batch-size", "64"], workers=n, **ROOMY) for n in (1, 2))
    assert not one.left_out
    assert not two.left_out
    assert one.facts.step_memory is not None
    assert two.facts.step_memory is not None
    assert 0.45 < two.facts.step_memory.alone / one.facts.step_memory.alone < 0.75  # half of the batch


def test_a_script_gives_what_its_model_optimizer_and_batch_give(ask: Ask) -> None:
    model = nn.Sequential(nn.Linear(50, 300), nn.ReLU(), nn.Linear(300, 10))
    batch = torch.empty(16, 50), torch.empty(16, dtype=torch.long)
    direct = un.memory(
        model, torch.optim.Adam(model.parameters()), batch=batch, loss=nn.functional.cross_entropy, workers=2, **ROOMY
    )
    report = ask(HEAD + LOOP, workers=2)
    assert report.left_out == ()
    assert report.facts.trainable == PARAMETERS
    for spec in ("allreduce", "zero(stage=2)", 'zero(stage=3, optimizer_on="cpu")'):
        assert report.need(spec).device == pytest.approx(direct.need(spec).device, rel=0.01)
    assert report.need('zero(stage=3, precision="bf16")').device == pytest.approx(
        direct.need('zero(stage=3, precision="bf16")').device, rel=0.02
    )


def test_nothing_stays_behind(ask: Ask) -> None:
    register, apply = nn.Module.register_parameter, nn.Module._apply
    ask(HEAD + LOOP, workers=2)
    assert (nn.Module.register_parameter, nn.Module._apply) == (register, apply)
    assert binding.observer is None
    assert un.join().size == 1
    model = nn.Linear(2, 2)
    assert type(model.weight) is nn.Parameter
    assert model.weight.sum().item() != 0


def test_a_model_larger_than_memory_is_no_matter(ask: Ask) -> None:
    big = HEAD.replace("nn.Linear(300, 10)", "*(nn.Linear(20_000, 20_000) for _ in range(80)), nn.Linear(20_000, 10)")
    report = ask(big.replace("nn.Linear(50, 300)", "nn.Linear(50, 20_000)") + LOOP)
    assert report.left_out == ()
    assert report.facts.trainable > 80 * 20_000**2  # 128 GB


def test_the_trainer_is_understood(ask: Ask) -> None:
    text = """
    loss = nn.CrossEntropyLoss()
    trainer = un.Trainer(model, optimizer, "local_sgd(every=4)", loss=loss, clip_norm=1.0, accumulate=2)
    trainer.fit((x, y), epochs=1, batch_size=16)
    """
    report = ask(HEAD + dedent(text), workers=2)
    assert report.left_out == ()
    assert report.facts.backwards == 2
    assert report.need("zero(stage=1)").gradients > 4 * PARAMETERS  # accumulated whole


def test_amp_copies_ties_and_values_do_not_stop_it(ask: Ask) -> None:
    text = """
    import copy
    inner = nn.Linear(50, 50)
    layers = nn.ModuleList(copy.deepcopy(inner) for _ in range(3))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.scale = layers, nn.Parameter(torch.ones(()))
            self.layers[1].weight = self.layers[0].weight
        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x * self.scale
    model = Net().double().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    un.parallel(model, optimizer)
    for step in range(3):
        with torch.autocast("cpu"):
            loss = model(x.double()).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        print(f"{loss.item():.3f} {float(total):.3f}")
        scaler.step(optimizer)
        sys.exit("not reached")
    """
    report = ask(HEAD + dedent(text))
    assert report.left_out == ()
    assert report.facts.trainable == 2 * 2500 + 3 * 50 + 1
    assert report.facts.trainable_bytes == 8 * report.facts.trainable


def test_only_the_first_model_counts(ask: Ask) -> None:
    text = """
    other = nn.Linear(50, 7)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    un.parallel(model, optimizer)
    un.parallel(other, second)
    other(x).sum().backward()
    second.step()
    model(x).sum().backward()
    optimizer.step()
    """
    report = ask(HEAD + dedent(text))
    assert report.left_out == ()
    assert report.facts.trainable == PARAMETERS


# Where it does not go as far --------------------------------------------------------------------------------


def test_what_needs_values_is_answered_without_activations(ask: Ask) -> None:
    report = ask(HEAD + "un.parallel(model, optimizer)\nkept = model(x)[model(x) > 0].sum().backward()\n")
    assert report.facts.step_memory is None
    assert report.need("allreduce").parameters == 4 * PARAMETERS
    assert report.need("allreduce").optimizer >= 8 * PARAMETERS
    assert any("the script failed before its first optimizer step (Dynamic" in what for what in report.left_out)


def test_a_script_that_ends_without_a_step_is_answered_without_activations(ask: Ask) -> None:
    report = ask(HEAD + "un.parallel(model, optimizer)\n")
    assert any("ended without an optimizer step" in what for what in report.left_out)
    assert report.facts.step_memory is None


def test_what_fails_on_fakes_before_the_model_is_there_is_run_with_memory(ask: Ask) -> None:
    report = ask(HEAD + "model[0].weight.detach().numpy()\n" + LOOP)
    assert report.facts.trainable == PARAMETERS
    assert any("the script failed before un.parallel" in what for what in report.left_out)
    assert "not in these numbers" in str(report)


def test_a_script_that_never_calls_parallel_is_refused_with_what_to_do(ask: Ask) -> None:
    with pytest.raises(ScriptError, match=r"ended without calling un\.parallel\(model, optimizer"):
        ask(HEAD)
    with pytest.raises(ScriptError, match=r"ended without calling un\.parallel"):
        ask("import sys; sys.exit(0)")
    with pytest.raises(ScriptError, match=r"made 10 optimizer steps without calling un\.parallel.* RANK, WORLD_SIZE"):
        ask(HEAD + "while True:\n    F.cross_entropy(model(x), y).backward()\n    optimizer.step()\n")


def test_a_script_that_fails_is_refused_with_its_own_error(ask: Ask) -> None:
    with pytest.raises(ScriptError, match=r"train\.py failed before it called un\.parallel: KeyError: 'data'"):
        ask("{}['data']")
    with pytest.raises(ScriptError, match="ended with status 5 before"):
        ask("import sys; sys.exit(5)")


# The command ------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(HEAD + "print('arguments', sys.argv[1:])\n" + LOOP)
    return str(file)


def test_options_may_follow_the_program_and_the_rest_is_its_own(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", script, "--epochs", "3", "--workers", "2", *SIZES, "--", "--workers", "9"]) == 0
    out, err = capsys.readouterr()
    assert "arguments ['--epochs', '3', '--workers', '9']" in err
    assert "18,310 trainable parameters, 2 workers" in out
    assert "fits, the fastest first:\n  allreduce " in out
    assert main(["memory", "-n", "2", *SIZES, script]) == 0
    assert capsys.readouterr().out == out


def test_a_mesh_gives_a_workers_part(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", script, "--mesh", "data=2,pipeline=2", "--microbatches", "8", *SIZES]) == 0
    out = capsys.readouterr().out
    assert "a worker's part, 4 workers (data=2, tensor=1, pipeline=2)" in out
    assert f"{PARAMETERS // 2:,} trainable parameters" in out
    assert "with 3 of 8 microbatches under way (1F1B)" in out
    assert main(["memory", script, "--mesh", "pipeline=2", "--schedule", "GPipe", *SIZES]) == 0
    assert "with 4 of 4 microbatches under way (GPipe)" in capsys.readouterr().out
    for wrong, told in (
        (["--mesh", "rows=2"], "expected axes as in data=2,tensor=2,pipeline=2"),
        (["--mesh", "tensor=3", "--workers", "8"], "tensor=3 does not divide 8 ranks. What would fit: "),
        (["--mesh", "pipeline=2", "--schedule", "2F2B"], "expected GPipe, 1F1B"),
    ):
        with pytest.raises(SystemExit):
            main(["memory", script, *wrong, *SIZES])
        assert told in capsys.readouterr().err


def test_a_script_that_makes_a_pipeline_itself_is_understood(ask: Ask) -> None:
    """Its step runs in microbatches already: activations are those of what is under way, not of a fourth of it."""
    piped = """
mesh = un.mesh(pipeline=2)
pipe = mesh.pipe(model, x[:8], F.cross_entropy, microbatches=4)
un.parallel(pipe.module, optimizer, world=mesh.data)
pipe.step(x[:32], y[:32])
optimizer.step()
raise SystemExit("the first step did not end the run")
"""
    mesh = {"mesh": {"pipeline": 2}, "microbatches": 4}
    ours, plain = ask(HEAD + piped, workers=2, **mesh), ask(HEAD + LOOP, workers=2, **mesh)
    assert ours.left_out[-1] == plain.left_out[-1]
    assert ours.need("allreduce").parameters == plain.need("allreduce").parameters
    # Each microbatch also has a gradient that is added to those before it: much, in a model as small as this one.
    assert 0.8 < ours.need("allreduce").activations / plain.need("allreduce").activations < 2


def test_the_status_says_that_nothing_fits(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", script, "--device-memory", "1kB", "--host-memory", "1kB", "--disk", "1kB"]) == 3
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device-memory", "24G"], 'write "24GiB"'),
        (["--host-memory", "lots"], "host_memory must be"),
        (["--disk", "/no/such"], "disk must be"),
        (["--workers", "0"], "expected a whole number from 1 up"),
    ],
)
def test_wrong_sizes_are_refused(
    script: str, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for order in ([script, *arguments], [*arguments, script]):
        with pytest.raises(SystemExit) as ended:
            main(["memory", *order])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_a_script_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["memory", "no_such_script.py", "--workers", "2"])
    assert "no such script: no_such_script.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["memory"])
    assert "no program given" in capsys.readouterr().err


def test_a_script_without_parallel_ends_the_command_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plain.py"
    file.write_text("print('hello')\n")
    assert main(["memory", str(file)]) == 1
    assert "ended without calling un.parallel" in capsys.readouterr().err


def test_a_module_is_run_with_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_for_memory").mkdir()
    (tmp_path / "package_for_memory" / "__init__.py").touch()
    (tmp_path / "package_for_memory" / "train.py").write_text(HEAD + LOOP)
    monkeypatch.chdir(tmp_path)
    report = predict_for_script("package_for_memory.train", module=True, **ROOMY)
    assert report.facts.trainable == PARAMETERS
