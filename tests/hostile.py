"""Hostile files: packed states and files of tensors whose headers lie, drawn from a seed, and what becomes of them.

`python tests/hostile.py --states 20000 --files 12000` counts what was accepted, what was refused as it should be, and
anything else; it names the case that took the most CPU time. The unit tests judge a few thousand of the same.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import unisono as un
from unisono.packing import from_bytes, to_bytes
from unisono.training.checkpoint import CheckpointError, safetensors

NUMBERS = [
    -1, 0, 1, 2, 3, 64, 65, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**300,
    -(10**300), 1.0, 1.5, -0.0, 1e308, float("inf"), float("nan"), True, False, None,
]  # fmt: skip
TEXTS = [
    "", "t", "model.0.weight", "é", "\ud800", "\x00", "a" * 5000, "inf", "0x", "0xf", "-0xFF", "F32", "U8", "BOOL",
    "C64", "F4", "float32", "qint8", "quint4x2", "bits8", "uint1", "float4_e2m1fn_x2", "nn", "_inductor",
    "__dict__", "cuda:99", "cuda:99999999999999999999", "cpu", "meta", "<f8", "<f3", "|O", "O", "V0", "|V0",
    "|S0", "<U0", "|S999999999", "<U999999999", "|V99999999999999999999", "9999999999f8",
    "(1000000000,1000000000)f8", "i4,(2,3)f8", "i4,", "f8;", "(", "{'a': 1}", "datetime64[",
    "<M8[99999999999999999999s]", "<M8[s/0]", "<M8[generic]", "<m8[25s]", "<M8[]", ",", "=f8", ">c16",
    "f" * 3000, "AAAA", "AAA", "***",
]  # fmt: skip
TAGS = [
    "!tensor", "!tuple", "!dict", "!ordered", "!counter", "!array", "!scalar", "!int", "!float", "!bytes", "!blob",
    "!size", "!dtype", "!device", "!code", "!",
]  # fmt: skip

JUDGED = ("dtype", "shape", "data_offsets", *TAGS)  # where numbers and dtypes are


class Case(NamedTuple):
    """Something to be judged, and what may be raised by whoever judges it."""

    kind: str
    judge: Callable[[], object]
    refusals: tuple[type[Exception], ...]


def draw_value(rng: random.Random, depth: int = 0) -> Any:
    """A value that does not belong where it is put."""
    kind = rng.randrange(12 if depth < 3 else 6)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(TEXTS)
    if kind == 6:
        return [draw_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(TEXTS): draw_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    if kind == 8:
        tag = {rng.choice(TAGS): draw_value(rng, depth + 1)}
        return tag | {key: draw_value(rng, depth + 1) for key in ("dtype", "shape") if rng.random() < 0.7}
    if kind == 9:  # numbers whose product would be a long one, or a list many times over
        long, many = rng.choice([(70, [2**62, 10**300]), (2000, [10**9]), (3, [10**9, [1] * 1000, [[0]]])])
        return [rng.choice(many) for _ in range(rng.randint(2, long))]
    if kind == 10:
        nested: Any = rng.choice(NUMBERS)
        for _ in range(rng.choice([10, 500, 3000])):
            nested = [nested]
        return nested
    return [rng.choice([0, 1, 2**40, 2**62]) for _ in range(rng.randrange(1, 5))]


def list_places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place inside a tree: its container, and the key or index."""
    ahead = [tree]
    while ahead:
        one = ahead.pop()
        if isinstance(one, dict | list):
            for key, value in list(one.items() if isinstance(one, dict) else enumerate(one)):
                yield one, key
                ahead.append(value)


def spoil(tree: Any, rng: random.Random) -> Any:
    """A copy in which one to three places hold something else, or nothing, or have another name."""
    spoilt = [json.loads(json.dumps(tree))]
    places = list(list_places(spoilt))
    judged = [(holder, key) for holder, key in places if key in JUDGED or isinstance(holder[key], int)]
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(judged if judged and rng.random() < 0.5 else places)
        there = key in container if isinstance(container, dict) else key < len(container)
        if not there:
            continue  # another change took it away
        change = rng.randrange(8)
        if change == 0 and isinstance(container, dict):
            container[rng.choice([*TEXTS, *TAGS])] = container.pop(key)
        elif change == 1 and container is not spoilt:
            del container[key]
        elif change == 2 and isinstance(container[key], int) and not isinstance(container[key], bool):
            container[key] += rng.choice([-1, 1, 8, 2**40])
        elif change == 3:
            container[key] = {rng.choice(TAGS): container[key]}
        else:
            container[key] = draw_value(rng)
    return spoilt[0]


def write_text(tree: Any, rng: random.Random) -> bytes:
    """JSON of a tree; now and then with a few bytes changed."""
    try:
        text = bytearray(json.dumps(tree).encode("utf-8", "surrogatepass"))
    except RecursionError:
        text = bytearray(b"[" * 100_000)
    if text and rng.random() < 0.15:
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text)


def make_state() -> dict[str, Any]:
    return {
        "lr": 0.1, "steps": [1, 2, 2**9000], "bad": float("nan"), "pair": (1, "a"),
        "numbered": {0: torch.arange(4), 1: None}, "half": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex128), "raw": b"12" * 900,
        "short": b"12", "size": torch.Size([2, 3]), "dtype": torch.float16, "device": torch.device("cpu"),
        "array": np.arange(6.0).reshape(2, 3), "scalar": np.float32(2), "time": np.datetime64("2020-01-01", "s"),
        "empty": np.zeros((0, 3), "<U5"), "count": Counter("abca"), "none": torch.empty(0, 5),
    }  # fmt: skip


def draw_states(rng: random.Random, count: int) -> Iterator[Case]:
    """Messages of `to_bytes`, with a header that lies."""
    message = to_bytes(make_state())
    length = struct.unpack_from("<Q", message)[0]
    header, body = json.loads(message[8 : 8 + length]), message[8 + length :]
    for _ in range(count):
        text = write_text(spoil(header, rng), rng)
        said = len(text) if rng.random() < 0.97 else rng.choice([0, len(text) - 1, len(text) + 5, 2**63, 2**64 - 1])
        data = struct.pack("<Q", max(said, 0)) + text + body
        yield Case("message", lambda data=data: from_bytes(data), (ValueError,))


def make_checkpoint(folder: Path) -> dict[str, bytes]:
    """A whole checkpoint, as its files."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    replica = un.parallel(model, optimizer, "allreduce", world=un.World())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {key: value for key, value in make_state().items() if key != "steps"}
    made = Path(un.save(folder / "made", replica, extra=state))
    return {path.name: path.read_bytes() for path in made.iterdir()}


def sum_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """With the checksum that it should have."""
    plain = {key: value for key, value in manifest.items() if key != "crc32"}
    return plain | {"crc32": zlib.crc32(json.dumps(plain, sort_keys=True).encode())}


class Folder:
    """A checkpoint of which files are replaced; every checksum is right."""

    def __init__(self, root: Path) -> None:
        self.files, self.path = make_checkpoint(root), root / "spoilt"
        self.path.mkdir()
        self.manifest = json.loads(self.files["manifest.json"])
        self.written: dict[str, bytes] = {}

    def put(self, changed: dict[str, bytes], manifest: dict[str, Any] | None = None) -> Path:
        files = self.files | changed
        listed = self.manifest["files"] | {name: [len(data), zlib.crc32(data)] for name, data in changed.items()}
        manifest = self.manifest | {"files": listed} if manifest is None else manifest
        files["manifest.json"] = json.dumps(sum_manifest(manifest)).encode("utf-8", "surrogatepass")
        for name, data in files.items():
            if self.written.get(name) != data:
                (self.path / name).write_bytes(data)
        self.written = files
        return self.path


def load_whole(path: Path) -> object:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return un.load(path, un.parallel(model, torch.optim.Adam(model.parameters()), "allreduce", world=un.World()))


def draw_checkpoints(rng: random.Random, count: int, folder: Folder) -> Iterator[Case]:
    """Checkpoints whose trees or manifest lie, read or loaded."""
    trees = {name: json.loads(folder.files[name]) for name in ("shared.json", "rank-00000.json")}
    for _ in range(count):
        name = rng.choice(["shared.json", "shared.json", "rank-00000.json", "manifest.json"])
        if name == "manifest.json":
            manifest = spoil({k: v for k, v in folder.manifest.items() if k != "crc32"}, rng)
            try:
                json.dumps(manifest, sort_keys=True)
            except (RecursionError, TypeError):  # no text for it, and no checksum
                manifest = {"format": 1}
            args: tuple[Any, ...] = ({}, manifest if isinstance(manifest, dict) else {"format": 1})
        else:
            args = ({name: write_text(spoil(trees[name], rng), rng)},)
        if rng.random() < 0.5:
            yield Case("checkpoint, read", lambda args=args: un.read_checkpoint(folder.put(*args)), (CheckpointError,))
        else:  # one that is whole and of another model is refused by a ValueError
            yield Case("checkpoint, loaded", lambda a=args: load_whole(folder.put(*a)), (CheckpointError, ValueError))


def draw_files(rng: random.Random, count: int, folder: Folder) -> Iterator[Case]:
    """Files of tensors with a header that lies: read, listed, and inside a checkpoint."""
    data = folder.files["shared.safetensors"]
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    path = folder.path.parent / "x.safetensors"
    for _ in range(count):
        text = write_text(spoil(header, rng), rng)
        said = len(text) if rng.random() < 0.97 else rng.choice([0, len(text) - 1, len(text) + 5, 2**63, 2**64 - 1])
        spoilt = max(said, 0).to_bytes(8, "little") + text + body
        way = rng.randrange(3)
        if way == 2:
            given = {"shared.safetensors": spoilt}
            yield Case(
                "tensors, in a checkpoint", lambda g=given: un.read_checkpoint(folder.put(g)), (CheckpointError,)
            )
            continue

        def judge(spoilt: bytes = spoilt, way: int = way) -> object:
            path.write_bytes(spoilt)
            return safetensors.read(path) if way else {n: x.full() for n, x in safetensors.index(path).items()}

        yield Case("tensors, read" if way else "tensors, listed", judge, (ValueError,))


class Outcome(NamedTuple):
    """What became of the cases."""

    counts: Counter[tuple[str, str]]
    others: list[str]
    slowest_s: float
    slowest: str


def judge_all(cases: Iterator[Case]) -> Outcome:
    """Judge every case; what was raised beside the refusals is listed."""
    counts: Counter[tuple[str, str]] = Counter()
    others: list[str] = []
    slowest_s, slowest = 0.0, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, case in enumerate(cases):
            start = time.process_time()
            try:
                case.judge()
                found = "accepted"
            except case.refusals as error:
                found = type(error).__name__
                if not str(error):
                    others.append(f"case {number}, {case.kind}: a refusal without words")
            except Exception as error:
                found = f"other: {type(error).__name__}"
                others.append(f"case {number}, {case.kind}: {error!r:.300}")
            took = time.process_time() - start
            counts[case.kind, found] += 1
            if took > slowest_s:
                slowest_s, slowest = took, f"case {number}, {case.kind}: {found}"
    return Outcome(counts, others, slowest_s, slowest)


def draw_all(root: Path, *, states: int, files: int, seed: int = 0) -> Iterator[Case]:
    """Of the states, a third as messages and two thirds inside checkpoints."""
    folder = Folder(root)
    yield from draw_states(random.Random(seed), states - states // 3 * 2)
    yield from draw_checkpoints(random.Random(seed + 1), states // 3 * 2, folder)
    yield from draw_files(random.Random(seed + 2), files, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = judge_all(draw_all(Path(root), states=asked.states, files=asked.files, seed=asked.seed))
    for (kind, outcome), count in sorted(found.counts.items()):
        print(f"{kind:<28}{outcome:<28}{count:>8}")
    print(f"slowest: {found.slowest_s:.3f} s of CPU time, {found.slowest}")
    print("\n".join(found.others[:20]))
    sys.exit(bool(found.others))


if __name__ == "__main__":
    main()
