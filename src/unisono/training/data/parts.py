"""What a divided stream reads: a source in parts, each read by one worker; several sources mixed; sequences packed.

A source is anything with `parts()` and `read_part(part, at)`; the rest of `Source` has defaults. A *lane* is a list of
parts that is read from its first to its last. Its position is a *cursor*, [number of the part, `at` inside it].
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

Cursor = list[Any]  # plain values only: it is sent to other ranks and kept in checkpoints
START: Cursor = [0, None]
_NO_PARTS = "it has no parts() and read_part(part, at)"


@dataclass(frozen=True)
class Part:
    """A piece of the data that one worker reads.

    Attributes:
        name: What errors call it; the same in every run.
        weight: Its length in bytes or samples, as far as known: parts are dealt so that lanes are about as long.
        samples: How many samples it has, if that is known before it is read; `at` then counts samples.
        path: The file it lies in, which must not change while it is used; "" if there is none.
        what: What the source needs to find it.
    """

    name: str
    weight: int = 1
    samples: int | None = None
    path: str = ""
    what: Any = None


class Later:
    """The `at` of a source for which it is costly: asked for only if it is needed, before the next sample is read."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.ask = ask


def settle(cursor: Cursor) -> Cursor:
    """The cursor in plain values."""
    return [copy.deepcopy(x.ask()) if isinstance(x, Later) else x for x in cursor]


class Source(IterableDataset[Any]):
    """Data in parts. By itself it is an iterable dataset whose position can be saved, as torchdata's StatefulDataLoader
    asks for; the processes of a DataLoader divide its parts.

    Attributes:
        shuffles: What `un.shard` does if its `shuffle` is left out.
    """

    shuffles = True
    _cursor: Cursor | None = None
    _stamps: dict[str, Any] | None = None

    def parts(self) -> list[Part]:
        """All parts, in the same order each time."""
        raise NotImplementedError

    def read_part(self, part: Part, at: Any) -> Iterator[tuple[Any, Any]]:
        """The samples of a part from `at` on (None: from its start), each with the `at` of what follows it."""
        raise NotImplementedError

    def read_lane(self, lane: Sequence[Part], cursor: Cursor) -> Iterator[tuple[Any, Cursor]]:
        """The samples of a lane from a cursor on, each with the cursor of what follows it."""
        first, at = cursor
        for i in range(first, len(lane)):
            if at is None or at != lane[i].samples:
                self.check_unchanged(lane[i])
                for sample, after in self.read_part(lane[i], at):
                    yield sample, [i, after]
            at = None

    def note_files(self) -> None:
        """Remember the size and age of every file: from here on they must not change."""
        paths = {part.path for part in self.parts() if part.path}
        self._stamps = {path: stamp_file(path) for path in sorted(paths)}

    def check_unchanged(self, part: Part) -> None:
        """Raise if the file of a part is not the one of the beginning."""
        if not part.path or self._stamps is None:
            return
        noted, now = self._stamps.get(part.path), stamp_file(part.path)
        if noted is not None and noted != now:
            raise RuntimeError(
                f"{part.path} has changed since this run began to read it: it had {noted[0]} bytes and has {now[0]}"
                f"{'' if noted[0] != now[0] else ', with another time of change'}. What was read of it is not known "
                "any more: keep the files of a run as they are, and start a new run with others."
            )

    # As a dataset by itself, in one process or in those of a DataLoader

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        lane = self.parts() if info is None else self.parts()[info.id :: info.num_workers]
        start, self._cursor = self._cursor or START, None
        for sample, cursor in self.read_lane(lane, start):
            self._cursor = cursor
            yield sample
        self._cursor = None

    def state_dict(self) -> dict[str, Any]:
        """The position of the pass under way, in this process."""
        return {"cursor": None if self._cursor is None else settle(self._cursor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass at a saved position."""
        self._cursor = state["cursor"]


class OwnParts(Source):
    """A user's dataset that says what its parts are: `parts()`, a list of names, and `read_part(name, at)`."""

    shuffles = False

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def parts(self) -> list[Part]:
        found = self.dataset.parts()
        return [part if isinstance(part, Part) else Part(str(part), what=part) for part in found]

    def read_part(self, part: Part, at: Any) -> Iterator[tuple[Any, Any]]:
        given = part if part.what is None else part.what
        return iter(self.dataset.read_part(given, at))


class Mix(Source):
    """Several sources, read side by side; made by `mix`."""

    def __init__(self, sources: dict[str, Source], weights: dict[str, float], stop: str) -> None:
        self.sources, self.weights, self.stop = sources, weights, stop
        self.shuffles = any(source.shuffles for source in sources.values())

    def parts(self) -> list[Part]:
        raise TypeError("un.mix is read by un.shard(un.mix(...), batch_size=...), not iterated directly")

    def __repr__(self) -> str:
        shares = ", ".join(f"{name} {weight:.3g}" for name, weight in self.weights.items())
        return f"<mix of {shares}{', until the first ends' if self.stop == 'first' else ''}>"


def mix(
    sources: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, stop: Literal["all", "first"] = "all"
) -> Mix:
    """Several streams as one, for `un.shard`: every batch has each source's share of it, to within a few samples.

    Args:
        sources: By name, whatever `un.shard` can divide: `un.records(...)`, a Hugging Face stream, a WebDataset, ...
        weights: A share for each source, in any unit; by default the same for all. They decide how fast a source is
            read, not how often: once per epoch.
        stop: "all": a source that has ended leaves its share to the others, and each sample comes once per epoch.
            "first": the epoch ends when a source does, within one buffer; the others' remaining samples are dropped.

    >>> import unisono as un
    >>> un.mix({"a": un.records(["a.jsonl"]), "b": un.records(["b.jsonl"])}, {"a": 3, "b": 1})
    <mix of a 0.75, b 0.25>
    """
    from unisono.training.data.libraries import as_source

    if not isinstance(sources, Mapping) or not sources:
        raise TypeError(f"un.mix got {type(sources).__name__}. Expected a dict of one or more streams, by name.")
    shares = dict.fromkeys(sources, 1.0) if weights is None else {k: float(v) for k, v in weights.items()}
    if set(shares) != set(sources) or not all(0 < share < float("inf") for share in shares.values()):
        raise ValueError(f"un.mix got weights={weights} for {sorted(sources)}. Expected a number above 0 for each.")
    if stop not in ("all", "first"):
        raise ValueError(f"un.mix got stop={stop!r}. Expected 'all' or 'first'.")
    found: dict[str, Source] = {}
    for name, data in sources.items():
        source, why = as_source(data)
        if source is None or isinstance(source, Mix):
            why = why or ("it is a mix itself" if source else _NO_PARTS)
            raise TypeError(f"un.mix got {name!r}, a {type(data).__name__}, which cannot be divided: {why}.")
        found[name] = source
    whole = sum(shares.values())
    return Mix(found, {name: shares[name] / whole for name in found}, stop)


class Pack(Source):
    """Token sequences of a source, joined and cut to one length; made by `pack`."""

    def __init__(self, source: Source, length: int, key: Any, eos: int | None, rest: str, pad: int) -> None:
        self.source, self.length, self.key, self.eos, self.rest, self.pad = source, length, key, eos, rest, pad
        self.shuffles = source.shuffles

    def parts(self) -> list[Part]:
        return [Part(p.name, p.weight, None, p.path, p) for p in self.source.parts()]

    def note_files(self) -> None:
        self.source.note_files()

    def read_lane(self, lane: Sequence[Part], cursor: Cursor) -> Iterator[tuple[Any, Cursor]]:
        """Its cursor is that of the document being cut, and how many of its tokens have been given out."""
        part, at = cursor
        inner, used = ([part, None], 0) if at is None else ([part, at[0]], at[1])
        held: list[int] = []
        for sample, found in self.source.read_lane([p.what for p in lane], inner):
            after = settle(found)
            tokens = self._read_tokens(sample)
            held += tokens[used:]
            start, used = len(tokens) - len(held), 0  # where `held` begins in this document; before it if negative
            while len(held) >= self.length:
                piece, held = held[: self.length], held[self.length :]
                start += self.length
                following = [inner[0], [inner[1], start]] if held else [after[0], [after[1], 0]]
                yield torch.tensor(piece), following
            inner = after
        if held and self.rest == "pad":
            padded = held + [self.pad] * (self.length - len(held))
            yield torch.tensor(padded), [len(lane), None]

    def _read_tokens(self, sample: Any) -> list[int]:
        tokens = sample if self.key is None else sample[self.key]
        found = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        return found if self.eos is None else [*found, self.eos]


def pack(
    source: Any,
    length: int,
    *,
    key: Any = "input_ids",
    eos: int | None = None,
    rest: Literal["drop", "pad"] = "drop",
    pad: int = 0,
) -> Pack:
    """Token sequences joined and cut to `length`, for `un.shard`; a sample is a tensor of `length` token numbers.

    Args:
        source: A stream that `un.shard` can divide, whose samples have a list or array of token numbers.
        length: Tokens in a sample.
        key: Where a sample has its tokens; None if the sample is the list itself.
        eos: A token that is put after each sequence, if any.
        rest: The last tokens of each lane (see `un.shard`), if fewer than `length`: "drop" them, or "pad" them with
            the token `pad`.
    """
    from unisono.training.data.libraries import as_source

    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"un.pack got length={length!r}. Expected a whole number, 1 or more.")
    if rest not in ("drop", "pad"):
        raise ValueError(f"un.pack got rest={rest!r}. Expected 'drop' or 'pad'.")
    found, why = as_source(source)
    if found is None or isinstance(found, Mix):
        why = why or (_NO_PARTS if found is None else "pack each source of the mix")
        raise TypeError(f"un.pack got a {type(source).__name__}, which cannot be divided: {why}.")
    return Pack(found, length, key, eos, rest, pad)


def stamp_file(path: str) -> list[Any]:
    """The size of a file, and what tells a changed one from the same: its time of change or its ETag."""
    if "://" not in path:
        found = os.stat(path)
        return [found.st_size, found.st_mtime_ns]
    system, inside = open_filesystem(path)
    system.invalidate_cache()
    about = system.info(inside)
    mark = next((about[key] for key in ("ETag", "etag", "mtime", "LastModified", "last_modified") if key in about), "")
    return [int(about["size"]), str(mark)]


def open_filesystem(address: str) -> tuple[Any, str]:
    """The fsspec filesystem of an address with a scheme, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{address} is read through fsspec: pip install 'unisono[parquet]'") from error
    try:
        system, path = url_to_fs(address)
    except ImportError as error:
        raise ImportError(f"{address}: fsspec has no driver for this scheme here: {error}") from error
    return system, path


def open_bytes(path: str) -> Any:
    """Open a file for reading bytes, without reading ahead: what is not asked for is not read."""
    if "://" not in path:
        return open(path, "rb", buffering=0)
    system, inside = open_filesystem(path)
    return system.open(inside, "rb", cache_type="none")
