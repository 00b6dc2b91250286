"""Files from anywhere: whatever a header says, it is refused by the error that it should be, or it is read.

UNISONO_FUZZ=20 judges twenty times as many; `python tests/hostile.py` counts the outcomes.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono as un
from hostile import (
    Case,
    Folder,
    draw_checkpoints,
    draw_files,
    draw_states,
    judge_all,
    make_checkpoint,
    sum_manifest,
)
from unisono.methods.spec import SpecError, build
from unisono.packing import from_bytes, to_bytes, unpack
from unisono.tables.estimators.formats import find_format
from unisono.training.checkpoint import CheckpointError, safetensors
from unisono.units import parse_size

TIMES = int(os.environ.get("UNISONO_FUZZ", "1"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("hostile"))


def check(cases: Iterator[Case]) -> None:
    found = judge_all(cases)
    assert not found.others, "\n".join(found.others[:10])
    assert any(outcome == "accepted" for _, outcome in found.counts), "some of it is whole after all"
    assert sum(outcome != "accepted" for _, outcome in found.counts.elements()) > 20


def test_packed_messages_are_read_or_refused() -> None:
    check(draw_states(random.Random(10), 1000 * TIMES))


def test_checkpoints_are_read_or_refused(folder: Folder) -> None:
    check(draw_checkpoints(random.Random(11), 150 * TIMES, folder))


def test_files_of_tensors_are_read_or_refused(folder: Folder) -> None:
    check(draw_files(random.Random(12), 500 * TIMES, folder))


# One by one: what was judged slowly, or raised something else ---------------------------------------------


def write_header(path: Path, header: Any, body: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def entry(**changed: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}}


@pytest.mark.parametrize(
    "header",
    [
        entry(shape=[[1] * 1000, 10**9]),  # the product repeats the list
        entry(shape=[10**300] * 2000),
        entry(shape=[2.0]),
        entry(shape=[True, 2]),
        entry(shape=["2"]),
        entry(shape=2),
        entry(shape=[1] * 70 + [2]),
        entry(shape=[0, 2**62, 2**62], data_offsets=[0, 0]),
        entry(shape=[0, 2**63], data_offsets=[0, 0]),
        entry(shape=[-1, -2]),
        entry(data_offsets=[0.0, 8.0]),
        entry(data_offsets=[-8, 0]),
        entry(data_offsets=[0, 10**300]),
        entry(data_offsets="08"),
        entry(data_offsets=[[0], [8]]),
        entry(dtype=["F32"]),
        entry(dtype="F4"),
        {"x": [1, 2]},
        [1, 2],
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_header_of_tensors_is_judged_before_it_is_used(tmp_path: Path, header: Any) -> None:
    path = write_header(tmp_path / "x.safetensors", header, bytes(8))
    for read in (safetensors.read, safetensors.index):
        with pytest.raises(ValueError, match=r"x\.safetensors has a broken header"):
            read(path)


@pytest.mark.parametrize(
    "tree",
    [
        *({"!array": "t", "dtype": dtype, "shape": [2]} for dtype in ("i4,(2,3)f8", "9f8", "<M8[s/0]", "(", "<f3", 8)),
        {"!array": "none", "dtype": "|S0", "shape": [10**15]},
        {"!array": "none", "dtype": "<U999999999", "shape": [0]},
        {"!array": "t", "dtype": "<f8", "shape": [[1] * 1000, 10**9]},
        {"!scalar": "", "dtype": "(1000000000,1000000000)f8"},
        {"!size": [2**64]},
        {"!size": ["a"]},
        {"!size": 3},
        {"!float": 10**400},
        {"!float": "1e5"},
        {"!int": "zz"},
        {"!int": 3},
        {"!dtype": "_inductor"},
        {"!dtype": 3},
        {"!device": "cuda:99999999999999999999"},
        {"!tuple": "abc"},
        {"!dict": [[1.5, 1]]},
        {"!dict": ["ab"]},
        [{"!blob": "t"}, {"!blob": "t"}],
        {"!tensor": "t", "dtype": "float64", "shape": [2**62, 4]},
        {"!tensor": ["t"]},
    ],
    ids=lambda tree: str(tree)[:60],
)
def test_a_packed_tree_is_judged_before_it_is_used(tree: Any) -> None:
    tensors = {"t": torch.zeros(16, dtype=torch.uint8), "none": torch.zeros(0, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="packed state"):
        unpack(tree, tensors)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("shared.json", lambda tree: tree | {"optimizer": 3}),
        ("shared.json", lambda tree: tree | {"shards": {"shard0": {"epoch": "first"}}}),
        ("shared.json", lambda tree: tree | {"shards": {"shard0": {"epoch": 1, "batch": 0, "seed": 0}}}),
        ("shared.json", lambda tree: tree | {"ledger": {"step_count": -1}}),
        ("shared.json", lambda tree: {k: v for k, v in tree.items() if k != "versions"}),
        ("shared.json", lambda tree: [tree]),
        ("rank-00000.json", lambda tree: tree | {"differs": {"a": 1}}),
        ("rank-00000.json", lambda tree: tree | {"differs": ["absent"]}),
    ],
)
def test_a_checkpoint_that_lies_is_refused_by_the_name_of_its_file(
    folder: Folder, file: str, change: Callable[[Any], Any]
) -> None:
    path = folder.put({file: json.dumps(change(json.loads(folder.files[file]))).encode()})
    with pytest.raises(CheckpointError, match=file.partition(".")[0]):
        un.read_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": None},
        {"step": "a"},
        {"world_size": 10**30},
        {"serial": [1]},
        {"files": [1]},
        {"files": {"../x": [1, 1]}},
        {"files": {"..": [1, 1]}},
    ],
    ids=str,
)
def test_a_manifest_that_lies_is_refused(folder: Folder, change: dict[str, Any]) -> None:
    manifest = {k: v for k, v in (folder.manifest | change).items() if v is not None}
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        un.read_checkpoint(folder.put({}, manifest))


@pytest.mark.parametrize("name", ["manifest.json", "shared.json", "shared.safetensors", "rank-00000.json"])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
def test_a_file_that_has_no_end_is_refused_by_its_name(tmp_path: Path, name: str, kind: str) -> None:
    """A FIFO nobody writes to would block the reader."""
    make_checkpoint(tmp_path)
    made = next((tmp_path / "made").glob("step-*"))
    (made / name).unlink()
    if kind == "fifo":
        os.mkfifo(made / name)
    else:
        (made / name).symlink_to(kind)
    if name != "manifest.json":  # as a manifest may claim
        manifest = json.loads((made / "manifest.json").read_bytes())
        manifest["files"][name] = [0, 0]
        (made / "manifest.json").write_text(json.dumps(sum_manifest(manifest)))
    with pytest.raises(CheckpointError, match=rf"{name} is not a regular file"):
        un.read_checkpoint(tmp_path / "made")


def test_a_manifest_of_gigabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    os.truncate(next((tmp_path / "made").glob("step-*/manifest.json")), 3 << 30)
    with pytest.raises(CheckpointError, match=r"manifest\.json has 3221225472 bytes"):
        un.read_checkpoint(tmp_path / "made")


def test_sizes_and_specs_of_any_length_are_refused() -> None:
    digits = "9" * 300
    for size in (digits, f"{digits}GiB", f".{digits}", "9" * 25 + "PB", int(digits), 10**400):
        with pytest.raises(ValueError, match=r"budget (is beyond|must be)"):
            parse_size(size, "budget")
    for spec in (
        f"local_sgd(every={digits})",
        f"diloco(outer_lr={digits})",
        f"topk(k=-{digits})",
        f"x(0x{'f' * 4000})",
    ):
        with pytest.raises(SpecError, match="64 bits"):
            build(spec)


def test_a_table_of_numbers_is_held_against_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for shape in (
        "(4611686018427387904, 3)",
        "(99999999, 3)",
        "(-1, 3)",
        "(0, 9999999999)",
        "(2, 'a')",
        "(2, 3",
        "9" * 300,
    ):
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(48))
        with pytest.raises(ValueError, match=r"x\.npy"):
            find_format(str(path)).cut_pieces(str(path), 1000)


def test_a_message_comes_back_when_nothing_was_changed() -> None:
    state = {"empty": np.zeros(3, "V0"), "word": np.str_(""), "none": torch.empty(0, 2**40), "long": 2**9000}
    back = from_bytes(to_bytes(state))
    assert (back["word"], back["long"], back["none"].shape) == ("", 2**9000, (0, 2**40))
    assert back["empty"].shape == (3,)
