"""The pages on coming from another system: their lines are counted, their programs run and train alike, and every name
and setting of ours that they give exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono as un
from doc_pages import ROOT, Block, blocks
from unisono.methods.spec import build
from unisono.methods.strategy import Replica
from unisono.world import World

FOLDER = ROOT / "docs" / "migrating"
PAGES = sorted(FOLDER.glob("*.md"))


class Net(nn.Module):
    """The same weights each time, as a program that loads them has."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(4, 2)
        for p in self.layer.parameters():
            nn.init.normal_(p, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores


DIFFS = [block for page in PAGES for block in blocks(page) if block.comment.startswith("lines:")]


def side(block: Block, left_out: str) -> str:
    """The program before (`left_out` is "+") or after ("-")."""
    return "\n".join(line[1:] for line in block.text.splitlines() if not line.startswith(left_out))


def run(source: str, page: Path) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    exec(compile(source, str(page), "exec"), {"__name__": "__main__", "dataset": dataset, "Net": Net})


def by_name(block: Block) -> str:
    return f"{block.page.stem}:{block.line}"


@pytest.mark.parametrize("block", DIFFS, ids=by_name)
def test_the_lines_that_change_are_as_many_as_the_page_says(block: Block) -> None:
    said = int(re.findall(r"\d+", block.comment)[0])
    assert sum(line.startswith("+") for line in block.text.splitlines()) == said
    table = (FOLDER / "index.md").read_text(encoding="utf-8")
    [row] = [line for line in table.splitlines() if line.startswith("|") and f"({block.page.name})" in line]
    assert str(said) in re.findall(r"\d+", row.split("|")[2])


@pytest.fixture
def alone_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def alone_under_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    state = pytest.importorskip("accelerate.state")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)  # it outlives the Accelerator


@pytest.mark.parametrize("block", [b for b in DIFFS if "," in b.comment], ids=by_name)
def test_programs_run_and_train_as_before(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", *(["--epochs", "2"] if "argparse" in block.text else [])])
    if "SummaryWriter" in block.text:
        pytest.importorskip("tensorboard")
    un.run_threads(lambda world: run(side(block, "-"), block.page), 1)
    if not block.comment.endswith("program"):  # the other system is not installed, or wants a GPU
        return
    ours = torch.load("model.pt", weights_only=True)
    Path("model.pt").unlink()
    request.getfixturevalue("alone_under_accelerate" if "accelerate" in block.text else "alone_under_torchrun")
    run(side(block, "+"), block.page)
    theirs = torch.load("model.pt", weights_only=True)
    assert theirs.keys() == ours.keys()
    assert not torch.equal(ours["layer.weight"], Net().layer.weight)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_and_settings_of_ours_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    owners = {"un": un, "world": World(None), "replica": Replica}
    for owner, name in re.findall(r"\b(un|world|replica)\.(\w+)", text):
        assert hasattr(owners[owner], name), f"{owner}.{name}"
    specs = re.findall(r'"(\w+\([^"\n]*\))"', text) + re.findall(r'(?:Strategy\(|optimizer, )"(\w+)"', text)
    for spec in specs:
        build(spec, kind="strategy")
