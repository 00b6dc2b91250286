"""`unisono run --small`: real workers, which agree or do not."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from pathlib import Path

import pytest

from unisono.predict.rehearsal import small
from unisono.predict.rehearsal.small import SmallRequest, SmallVerdict, compare_worlds

SCRIPT = """
    import torch, unisono as un
    world = un.join(device="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = un.parallel(model, optimizer)
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 2))
    for epoch in range(9):
        for x, y in un.shard(data, batch_size=32):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y, reduction=REDUCTION).backward()
            optimizer.step()
        un.save("checkpoint", replica)
    print("end")
"""


def compare(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> SmallVerdict:
    (folder / "script.py").write_text(textwrap.dedent(text))
    monkeypatch.chdir(folder)
    return compare_worlds(SmallRequest(["script.py"], 2, 4, is_warm=True))


@pytest.mark.parametrize(("reduction", "agrees"), [("mean", True), ("sum", False)])
def test_worlds_of_one_and_two_are_compared(
    reduction: str, agrees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = compare(tmp_path, SCRIPT.replace("REDUCTION", repr(reduction)), monkeypatch)
    assert verdict.exit_status == (0 if agrees else 1)
    head = f"one worker and 2, allreduce, 4 steps each: they {'agree' if agrees else 'differ'}"
    assert verdict.text.startswith(head)
    said = "gradients agree" if agrees else "are 0.5 times those of one: the loss is a sum over samples"
    assert said in verdict.text
    assert "dropout was switched off for this comparison: 1" in verdict.text
    assert "the script begins with other parameters each time" in verdict.text
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]  # nothing was saved


def test_a_script_that_fails_shows_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = compare(tmp_path, "raise KeyError('no data')", monkeypatch)
    assert verdict.exit_status == 1
    assert "with one worker the script failed (exit status 1)" in verdict.text
    assert verdict.log is not None
    assert "KeyError: 'no data'" in verdict.log.read_text()
    shutil.rmtree(verdict.log.parent)


def test_an_interrupted_comparison_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt(*_: object) -> int:
        assert list(tmp_path.glob("unisono-small-*"))
        raise SystemExit(130)

    monkeypatch.setattr(small, "_run", interrupt)
    with pytest.raises(SystemExit):
        compare_worlds(SmallRequest(["script.py"], 2, 4))
    assert list(tmp_path.iterdir()) == []
