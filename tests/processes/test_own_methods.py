"""Methods of one's own, in a folder or an installed package: known to every command and to workers, and tested."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from preloaded import Program
from unisono.cli.command_line import make_parser

METHOD = """
from unisono.facts import Example, Facts
from unisono.reducer import Reduced, staged

def mine():
    '''The exact mean, by a method of one's own.'''
    def stages(bucket, state, world):
        handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
        yield
        handle.wait()
        return Reduced(bucket.tensors), state

    return staged(lambda bucket: {}, stages, exact=True)

FACTS = Facts([Example("mine", exact=True, memory=False)])
"""
PROGRAM = """
import os
from unisono.spec.catalog import find_unknown
print("knows mine:", find_unknown(os.environ["UNISONO_STRATEGY"]) is None)
"""


@pytest.fixture
def methods(tmp_path: Path) -> Path:
    (tmp_path / "methods/reducers").mkdir(parents=True)
    (tmp_path / "methods/reducers/mine.py").write_text(f'"""A mean of one\'s own."""\n{METHOD}')
    return tmp_path / "methods"


def list_methods(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "strategies", *words]
    return subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)


def test_workers_know_the_methods_of_a_folder(methods: Path, run_script: Callable[..., Launched]) -> None:
    words = ("-n", "2", "--methods", "methods", "--strategy", "mine")
    status, out, err = run_script(PROGRAM, *words).finish()
    assert (status, out.count("knows mine: True")) == (0, 2), err


@pytest.mark.parametrize("how", ["option", "variable", "entry point"])
def test_a_folder_and_a_package_add_methods(how: str, methods: Path) -> None:
    words, env = [], {}
    if how == "option":
        words = ["--methods", "methods"]
    elif how == "variable":
        env = {"UNISONO_METHODS": str(methods)}
    else:
        (methods / "__init__.py").touch()
        about = methods.parent / "other-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        gone = "gone = no_such_package.methods"  # is said, and is no error
        (about / "entry_points.txt").write_text(f"[unisono.methods]\nother = methods\n{gone}\n")
        env = {"PYTHONPATH": os.pathsep.join([str(methods.parent), os.environ.get("PYTHONPATH", "")])}
    listed = list_methods(methods.parent, *words, **env)
    assert ("no_such_package.methods) adds no methods" in listed.stderr) == (how == "entry point")
    assert "\n  mine            A mean of one's own.\n" in listed.stdout, listed.stderr


def test_what_is_no_folder_of_methods_and_a_name_that_is_taken_are_said(methods: Path) -> None:
    refused = list_methods(methods.parent, "--methods", "methods/reducers")
    assert refused.returncode == 2
    assert "reducers has neither a folder strategies nor a folder reducers" in refused.stderr
    (methods / "reducers/topk.py").touch()
    refused = list_methods(methods.parent, UNISONO_METHODS=str(methods))
    assert "'topk', which is the name of another method" in refused.stderr


def test_a_plan_takes_specs_or_a_folder(methods: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr("unisono.methods.spec.use_methods", used.append)
    words = ["plan", "-n", "2", "--methods", str(methods), "--methods", "allreduce; mine", "train.py"]
    assert (make_parser().read(words).methods, used) == (["allreduce", "mine"], [str(methods)])


def test_the_conformance_tests_run_over_methods_of_a_folder(methods: Path) -> None:
    command = methods.parent / "command.py"
    command.write_text("import sys, unisono.cli\nsys.exit(unisono.cli.main())\n")

    def run(*words: str) -> tuple[int, str, str]:
        program = Program(command, "conformance", "methods", *words, env=os.environ, cwd=methods.parent)
        out, err = program.communicate(100)
        return program.wait(), out, err

    chosen = ("-k", "facts_say or refuses or unused")
    status, out, err = run(*chosen, "-rA")
    assert status == 0, out + err
    assert "facts_say[mine]" in out
    assert "[allreduce(reducer=mine)" in out
    assert "topk" not in out
    text = (methods / "reducers/mine.py").read_text()
    (methods / "reducers/mine.py").write_text(text.replace("exact=True, memory", "exact=False, memory"))
    status, out, err = run(*chosen)
    assert (status, "facts_say[mine]" in out) == (1, True), out + err
