"""All code in README.md and docs runs: Python block by block, a page at a time, and commands through the parser.

A page's blocks share one namespace, which begins with what a reader is assumed to have: a model, an optimizer, data.
`<!-- not run: REASON -->` right above a block leaves it out; `<!-- smaller: 2048 -> 64 -->` runs it smaller. A block
below `<!-- output -->` is what the Python block before it prints.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doc_pages
import unisono as un
from doc_pages import PAGES, ROOT, Block, blocks
from unisono.cli.command_line import make_parser
from unisono.methods.spec import extend
from unisono.world import World

NOT_RUN = 8  # blocks at most: those that need an engine
LINES = {"reducers/terngrad.py": 46, "strategies/easgd.py": 60}  # of code at most, blank ones left out

pages = pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))], ids=lambda p: str(p.relative_to(ROOT))
)


class Net(nn.Module):
    """Rows of 20 numbers, or of tokens, to two scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(64, 20), nn.Linear(20, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.is_floating_point() else self.embed(x).mean(1)
        scores: Tensor = self.head(self.body(rows).tanh())
        return scores


def given(world: World, folder: Path) -> dict[str, Any]:
    """What a reader is assumed to have."""
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(600, 20, generator=generator)
    y = (x.sum(1) > 0).long()
    model, other, loss_fn = Net(), Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "un": un,
        "world": world,
        "Net": Net,
        "model": model,
        "optimizer": optimizer,
        "x": x,
        "y": y,
        "dataset": (x, y),
        "labels": y,
        "loss_fn": loss_fn,
        "loss": loss_fn(model(x), y),
        "x_val": x,
        "y_val": y,
        "x_test": x,
        "y_test": y,
        "batches": [(x, y)] * 8,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "evaluate": lambda model: model(x),
        "final_loss": 0.5,
        "peak_bytes": 1 << 20,
        "methods": folder / "methods",
        "replica": un.parallel(other, torch.optim.SGD(other.parameters(), lr=0.1), world=world),
    }


@pytest.fixture
def one_replica_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Pages show several `un.parallel(model, ...)` in a row, as alternatives: each ends the one before. Gives a
    function that ends the last."""
    real, own = un.parallel, threading.local()

    def close() -> None:
        for replica in getattr(own, "replicas", []):
            replica.close()
        own.replicas = []

    def parallel(*args: Any, **kwargs: Any) -> un.Replica:
        close()
        replica = real(*args, **kwargs)
        switch = replica.switch

        def follow(strategy: Any) -> un.Replica:
            own.replicas = [switch(strategy)]
            return own.replicas[0]

        replica.switch = follow  # type: ignore[method-assign]
        own.replicas = [replica]
        return replica

    monkeypatch.setattr(un, "parallel", parallel)
    return close


@pytest.fixture
def workers_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`un.launch` checks its arguments, makes the engine, and runs the function in threads."""
    real = un.launch
    signature = inspect.signature(real)

    def launch(*args: Any, **kwargs: Any) -> list[Any]:
        bound = signature.bind(*args, **kwargs).arguments
        return un.run_threads(
            lambda world: bound["fn"](*bound.get("args", ()), **(bound.get("kwargs") or {})), bound["workers"]
        )

    importlib.import_module("unisono.tables.map_reduce")
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "unisono"]
    for module in ours:
        if module is un or vars(module).get("launch") is real:
            monkeypatch.setattr(module, "launch", launch)


def test_the_loop_of_the_readme_ends_with_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_replica_at_a_time: Callable[[], None]
) -> None:
    """So that one worker and several, which begin as rank 0 does, show the same accuracy."""
    monkeypatch.chdir(tmp_path)
    loop = next(block for block in blocks(ROOT / "README.md") if block.language == "python")

    def work(world: World) -> list[Tensor]:
        names = given(world, tmp_path)
        exec(loop.source, names)
        one_replica_at_a_time()
        return [p.detach() for p in names["model"].parameters()]

    ended = [un.run_threads(work, 1)[0] for _ in range(2)]
    assert all(map(torch.equal, *ended))


@pages
@pytest.mark.usefixtures("workers_as_threads")
@pytest.mark.filterwarnings("ignore:.*sends .* bytes per rank and step.*:UserWarning")  # of models as small as this
def test_the_code_of_a_page_runs(
    page: Path, one_replica_at_a_time: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")  # pictures are drawn in a thread, and shown nowhere
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    lay_out(tmp_path, page)

    def work(world: World) -> None:
        namespace = given(world, tmp_path)
        for block, after in pairwise([*blocks(page), Block(page, 0, "", "")]):
            if block.language == "python" and not block.why_not and not block.file:
                run(block, namespace, after.text if after.comment == "output" else None)
        one_replica_at_a_time()

    with extend(reducers="methods/reducers", strategies="methods/strategies"):
        un.run_threads(work, 2 if page.parent.name == "methods" else 1)
    if page.parent.name == "textbook":
        drawn = re.findall(r"\]\((\w+\.png)\)", page.read_text(encoding="utf-8"))
        assert [picture for picture in drawn if not (tmp_path / picture).exists()] == []


def lay_out(folder: Path, page: Path) -> None:
    """Files that a page speaks of: `train.py` is its own where it has one."""
    doc_pages.write_methods(folder / "methods")
    programs = [block.text for block in blocks(page) if 'if __name__ == "__main__":' in block.text]
    (folder / "train.py").write_text(programs[0] if programs else "def train(lr): return lr\n")
    (folder / "data").mkdir()
    rows = [f"{size},{rooms},{3 * size + rooms}" for size in range(40, 60) for rooms in range(1, 5)]
    for i in range(2):
        (folder / "data" / f"part-{i}.csv").write_text("\n".join(["size,rooms,price", *rows[i::2]]) + "\n")


def run(block: Block, namespace: dict[str, Any], output: str | None = None) -> None:
    """Run a block, which must print `output` if there is one; an error names the page and the line."""
    program = compile("\n" * (block.line - 1) + block.source, str(block.page), "exec")
    if output is None:
        exec(program, namespace)
        return
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, namespace)
    assert printed.getvalue().splitlines() == output.splitlines()


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [block for page in PAGES for block in blocks(page) if block.language == "python" and block.why_not]
    assert len(left_out) <= NOT_RUN
    assert all(len(block.why_not.split()) > 1 for block in left_out)


@pytest.mark.parametrize("file", LINES)
def test_the_methods_that_pages_build_are_short(file: str, tmp_path: Path) -> None:
    doc_pages.write_methods(tmp_path)
    if not (tmp_path / file).exists():
        pytest.skip("no page builds it yet")
    lines = (tmp_path / file).read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= LINES[file]
    assert max(map(len, lines)) <= 120


# Commands ------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[Block, str]]:
    """The lines of shell blocks that run `unisono`."""
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("", "sh", "bash", "console") and "src/unisono/" not in block.text:
                for line in block.text.replace("\\\n", " ").splitlines():
                    words = shlex.split(line.removeprefix("$ "), comments=True) if "unisono " in line else []
                    words = words[words.index("&&") + 1 :] if "&&" in words else words
                    if "unisono" in words and "install" not in words:
                        yield block, shlex.join(words[words.index("unisono") + 1 :])


@pytest.mark.parametrize("command", dict.fromkeys(command for _, command in commands()))
def test_commands_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.methods.spec.use_methods", lambda folders: None)  # they are not here
    words = shlex.split(command)
    assert make_parser().read(words).command == words[0]  # it ends with an error where it does not parse
