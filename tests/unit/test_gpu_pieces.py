"""tests/gpu.py, without a GPU: pieces that pass, fail, take too long or are interrupted; what the next call does."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import gpu

ROOT = Path(__file__).parents[2]
MACHINE = {"gpu": "some", "torch": "2.0", "python": "3.0"}
LINE = 'print(\'some words\')\nprint(\'{"x": 1.5, "torch": "2.0"}\')'
NEEDS = "reason=" + '"needs a CUDA device"'
WAIT = "import signal\nsignal.pause()"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own, where all is as on a machine with a GPU."""
    for folder in ("src", "tests", "benchmarks"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "probe", lambda: MACHINE)
    monkeypatch.setattr(gpu, "BENCHMARKS", {})
    return tmp_path


def add(tree: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    for name, text in programs.items():
        (tree / "benchmarks" / f"{name}.py").write_text(text)
    monkeypatch.setattr(gpu, "BENCHMARKS", {f"{name}.py": 0.0 for name in programs})


def call(tree: Path, *more: str) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """The exit status, the state and the results."""
    state, results = tree / "build" / "state.jsonl", tree / "results.jsonl"
    status = gpu.main(["--state", str(state), "--results", str(results), *more])
    read = [[json.loads(x) for x in p.read_text().splitlines()] if p.exists() else [] for p in (state, results)]
    return status, read[0], read[1]


def test_a_call_goes_on_where_the_last_one_ended_and_results_have_each_line_once(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(
        tree,
        monkeypatch,
        good=LINE,
        bad="raise SystemExit(3)",
        mute="print('no line')",
        none="print('{\"skipped\": 1}')",
    )
    status, state, results = call(tree)
    assert status == 1
    assert [(r["piece"], r["status"]) for r in state] == [
        ("good.py", "passed"), ("bad.py", "failed"), ("mute.py", "failed"), ("none.py", "failed"),
    ]  # fmt: skip
    assert results == [{"date": state[0]["date"], "benchmark": "good.py", **MACHINE, "x": 1.5}]
    assert "1 of 4 pieces passed, 3 did not, 0 are left" in capsys.readouterr().out
    assert call(tree) == (1, state, results), "nothing was left"
    (tree / "results.jsonl").unlink()  # another copy of the tree
    assert call(tree)[2] == results
    again = call(tree, "--again")[1]
    assert [r["piece"] for r in again[len(state) :]] == ["bad.py", "mute.py", "none.py"]
    (tree / "src" / "changed.py").write_text("")
    assert len(call(tree)[1]) == len(again) + 4, "other files: all are left"


def test_the_first_of_a_call_that_needs_more_than_all_the_time_failed_and_the_next_call_runs_the_others(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tree, monkeypatch, endless=WAIT, good=LINE)
    monkeypatch.setattr(gpu, "BENCHMARKS", {"endless.py": 5.0, "good.py": 0.1})
    assert [(r["piece"], r["status"]) for r in call(tree, "--minutes", "0.005")[1]] == [("endless.py", "too long")]
    assert "1 are left (the same command runs them): good.py" in capsys.readouterr().out
    status, state, _ = call(tree)
    assert (status, [r["piece"] for r in state]) == (1, ["endless.py", "good.py"])


def test_a_piece_that_the_end_of_the_time_cuts_is_left(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tree, monkeypatch, good=LINE, endless=WAIT)
    limits: list[float] = []
    real = gpu.run

    def run(piece: gpu.Piece, limit_s: float, folder: Path) -> dict[str, Any]:
        limits.append(limit_s)
        return real(piece, 0.2 if piece.name == "endless.py" else limit_s, folder)

    monkeypatch.setattr(gpu, "run", run)
    status, state, _ = call(tree)
    assert (status, [r["piece"] for r in state]) == (0, ["good.py"])
    assert limits[1] < limits[0], "it gets what is left of the time"
    assert [r["status"] for r in call(tree)[1]] == ["passed", "too long"], "the first of the next call"


def test_a_piece_that_hangs_leaves_the_others_their_time(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tree, monkeypatch, good=LINE, endless=WAIT, other=LINE)
    monkeypatch.setattr(gpu, "BENCHMARKS", {"good.py": 1.0, "endless.py": 0.0, "other.py": 1.0})
    monkeypatch.setattr(gpu, "MINUTES", 0.005)
    assert [r["status"] for r in call(tree, "--minutes", "30")[1]] == ["passed", "too long", "passed"]


def test_what_cannot_end_in_time_is_not_begun(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tree, monkeypatch, one=LINE, long=WAIT, two=LINE)
    monkeypatch.setattr(gpu, "BENCHMARKS", {"one.py": 9.0, "long.py": 9.0, "two.py": 0.0})
    assert [r["piece"] for r in call(tree)[1]] == ["one.py", "two.py"]


def test_an_interrupt_ends_the_piece_and_what_was_done_stays_done(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The piece interrupts its parent, which is a process of its own, and would wait for ever.
    stop = f"import os, signal\nopen('pid', 'w').write(str(os.getpid()))\nos.kill(os.getppid(), signal.SIGINT)\n{WAIT}"
    add(tree, monkeypatch, good=LINE, stop=stop)
    driver = (
        f"import sys, signal\nfrom pathlib import Path\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nimport gpu\n"
        f"signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"gpu.ROOT, gpu.probe, gpu.BENCHMARKS = Path.cwd(), lambda: {MACHINE!r}, {gpu.BENCHMARKS!r}\n"
        "gpu.main(['--state', 'build/state.jsonl', '--results', 'results.jsonl'])"
    )
    ended = subprocess.run([sys.executable, "-c", driver], cwd=tree, capture_output=True, text=True, check=False)
    assert ended.returncode in (-signal.SIGINT, 130)
    assert not Path("/proc", (tree / "pid").read_text()).exists()
    state = [json.loads(line) for line in (tree / "build" / "state.jsonl").read_text().splitlines()]
    assert [r["piece"] for r in state] == ["good.py"]
    status, _, results = call(tree, "--list")
    assert (status, results) == (0, []), "a list runs nothing"


def test_files_of_tests_are_pieces_and_have_one_line_when_all_were_run(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "pyproject.toml").write_text("")
    (tree / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--cuda', action='store_true')"
    )
    for name, text in [("a", "def test_one(): pass\ndef test_two(): assert False"), ("b", "def test_three(): pass")]:
        (tree / "tests" / f"test_{name}.py").write_text(f"# {NEEDS}\n{text}")
    (tree / "tests" / "test_other.py").write_text("# a CUDA device\ndef test_nothing(): assert False")
    status, state, results = call(tree)
    assert status == 1
    assert [(r["piece"], r["passed"], r["failed"]) for r in state] == [
        ("tests/test_a.py", 1, ["tests.test_a::test_two"]),
        ("tests/test_b.py", 1, []),
    ]
    counted = {"passed": 2, "failed": 1, "files_not_passed": ["tests/test_a.py"]}
    assert results == [{"date": state[0]["date"], "benchmark": "tests --cuda", **counted, **MACHINE}]


def test_without_a_cuda_device_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "probe", lambda: {"gpu": False, "torch": "2.0+cpu"})
    assert gpu.main(["--state", str(tmp_path / "state" / "s")]) == 1
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("no CUDA device for ")
    assert "make gpu PYTHON=python3" in said
    assert not (tmp_path / "state").exists()


def test_the_page_of_results_shows_what_pieces_add() -> None:
    sys.path.append(str(ROOT / "docs"))
    names = [*gpu.BENCHMARKS, "tests --cuda"]
    assert import_module("results").list_unknown([{"benchmark": name} for name in names]) == []


def test_every_benchmark_with_a_part_for_gpus_is_a_piece() -> None:
    found = {piece.name.split()[0] for piece in gpu.find_pieces() if not piece.is_test}
    files = {p.name: p.read_text("utf-8") for p in (ROOT / "benchmarks").glob("*.py")}
    assert {"tests/processes/test_cuda.py", "tests/unit/test_crossbow.py"} <= {p.name for p in gpu.find_pieces()}
    with_part = {name for name, text in files.items() if name.startswith("gpu_") or 'add_argument("--gpu"' in text}
    assert found == with_part
    specs = re.findall(
        r'^    "(\w+)": "', files["reducers.py"].partition("\nSPECS = {")[2].partition("\n}")[0], re.MULTILINE
    )
    words = [word for name in gpu.BENCHMARKS if name.startswith("gpu_reducers") for word in name.split()]
    assert len(specs) > 10
    assert set(specs) - set(words) == {"nuqsgd_elias"}, "its coding is the CPU's work"
