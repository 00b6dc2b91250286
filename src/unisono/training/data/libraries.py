"""Streams of other libraries in parts: Hugging Face datasets, WebDataset, MosaicML's streaming, litdata.

Each library reads its own format; here is only how its data is cut, and where reading continues.
"""

from __future__ import annotations

import copy
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

from unisono.training.data.parts import Later, OwnParts, Part, Source

_META = re.compile(r"__[^/]*__($|/)")  # names of files that the library skips
_Way = Callable[[Any], "Source | str | None"]


def as_source(data: Any) -> tuple[Source | None, str]:
    """`data` in parts; or None, and why it cannot be divided ("" if it is no stream of a library that we know)."""
    if isinstance(data, Source):
        return data, ""
    if callable(getattr(data, "parts", None)) and callable(getattr(data, "read_part", None)):
        return OwnParts(data), ""
    ways: tuple[_Way, ...] = (_open_hugging_face, _open_webdataset, _open_mosaic, _open_litdata)
    for open_with in ways:
        found = open_with(data)
        if isinstance(found, Source):
            return found, ""
        if found is not None:
            return None, found
    return None, ""


def _comes_from(data: Any, library: str) -> bool:
    """Whether its class, or one that this is made from, is of a library."""
    return any(kind.__module__.partition(".")[0] == library for kind in type(data).__mro__)


class ShardedStream(Source):
    """A Hugging Face IterableDataset: its shards are the parts. Inside a shard the library finds its place again by
    reading the shard from its start."""

    shuffles = False

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def parts(self) -> list[Part]:
        return [Part(f"shard {i} of {self.dataset.num_shards}", what=i) for i in range(self.dataset.num_shards)]

    def read_part(self, part: Part, at: Any) -> Iterator[tuple[Any, Any]]:
        shard = self.dataset.shard(self.dataset.num_shards, part.what)
        if at is not None:
            shard.load_state_dict(copy.deepcopy(at))
        for sample in shard:
            yield sample, Later(shard.state_dict)


def _open_hugging_face(data: Any) -> Source | str | None:
    if not (_comes_from(data, "datasets") and hasattr(data, "num_shards") and hasattr(data, "load_state_dict")):
        return None
    stage, kinds = getattr(data, "_ex_iterable", None), []
    while stage is not None:
        kinds.append(type(stage).__name__)
        stage = getattr(stage, "ex_iterable", None)
    if "BufferShuffledExamplesIterable" in kinds:
        return (
            "its .shuffle(...) keeps samples in a buffer of its own, which no position tells of, so that a resumed run "
            "would drop them. Leave .shuffle out and say un.shard(dataset, shuffle=True, buffer=1024, ...)"
        )
    held = [kind for kind in kinds if kind in ("TakeExamplesIterable", "SkipExamplesIterable")]
    if held:
        return f"its {'.take' if held[0][0] == 'T' else '.skip'}(...) counts the samples of all shards"
    return ShardedStream(data)


class TarParts(Source):
    """A WebDataset: its tar files are the parts. The stages behind the tar reader are the library's and the user's own.

    A place is [where a sample of the tar begins, how many samples the stages have made of it]. In a tar that cannot be
    sought in (compressed, or through a pipe) it counts the tar's samples, and reading continues from the tar's start.
    """

    def __init__(self, urls: list[str], expand: Any, group: Any, stages: list[Any], shuffles: bool) -> None:
        self.urls, self.expand, self.group, self.stages, self.shuffles = urls, expand, group, stages, shuffles

    def parts(self) -> list[Part]:
        paths = [url.removeprefix("file:") if ":" not in url.removeprefix("file:") else "" for url in self.urls]
        sizes = [os.path.getsize(path) if path else 1 for path in paths]
        return [Part(u, size, None, path, u) for u, size, path in zip(self.urls, sizes, paths, strict=True)]

    def read_part(self, part: Part, at: Any) -> Iterator[tuple[Any, Any]]:
        where, made = at or [0, 0]
        tracked = _TarSamples(part, where, self.expand, self.group)
        found: Any = iter(tracked)
        for stage in self.stages:
            found = stage(found)
        last, count = where, 0
        for sample in found:
            count, last = (count + 1 if tracked.start == last else 1), tracked.start
            if tracked.start == where and count <= made:
                continue
            yield sample, [last, count]


class _TarSamples:
    """The samples of a tar, grouped by the library; `start` is where the one that came last begins."""

    def __init__(self, part: Part, where: int, expand: Any, group: Any) -> None:
        self.part, self.where, self.expand, self.group = part, where, expand, group
        self.start = where

    def __iter__(self) -> Iterator[Any]:
        offsets: list[int] = []  # of the files that were read of this sample, and the first one of the next
        is_sought = bool(self.part.path) and not self.part.path.endswith((".gz", ".bz2", ".xz", ".zst"))
        files = self._read_members(offsets) if is_sought else self._read_stream()
        for number, sample in enumerate(self.group(files)):
            if is_sought:
                self.start, offsets[:] = offsets[0], offsets[-1:]
                yield sample
            elif number >= self.where:
                self.start = number
                yield sample

    def _read_members(self, offsets: list[int]) -> Iterator[dict[str, Any]]:
        """The files from a place on; `offsets` gets the place of each."""
        options = getattr(self.expand, "kw", {})
        select, rename = options.get("select_files"), options.get("rename_files")
        with open(self.part.path, "rb", buffering=1 << 12) as file:  # what is read ahead a resumed run reads again
            file.seek(self.where)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    vars(tar)["members"] = []  # else all that were read are kept
                    name = member.name
                    if not member.isreg() or _META.match(name):
                        continue
                    name = rename(name) if rename else name
                    if select is not None and not select(name):
                        continue
                    offsets.append(member.offset)
                    file.seek(member.offset_data)
                    yield {"fname": name, "data": file.read(member.size), "__url__": self.part.what}
        yield {}  # the end of a tar: a sample does not go on in the next

    def _read_stream(self) -> Any:
        from webdataset.tariterators import url_opener

        return self.expand(url_opener([{"url": self.part.what}]))


def _open_webdataset(data: Any) -> Source | str | None:
    stages = getattr(data, "pipeline", None)
    if not (_comes_from(data, "webdataset") and isinstance(stages, list) and stages):
        return None
    urls, shuffles, expand = getattr(stages[0], "urls", None), False, None
    if type(stages[0]).__name__ != "SimpleShardList" or not urls:
        return f"its tars are drawn by {type(stages[0]).__name__}; a plain list of them can be divided"
    for i, stage in enumerate(stages[1:], 1):
        name = name_stage(stage)
        if name in ("shuffle", "detshuffle"):
            shuffles |= _buffers(stage)
        elif name == "tar_file_expander":
            expand = stage
        elif name == "group_by_keys" and expand is not None:
            rest = stages[i + 1 :]
            shuffles |= any(name_stage(s) in ("shuffle", "detshuffle") and _buffers(s) for s in rest)
            kept = [s for s in rest if name_stage(s) not in ("shuffle", "detshuffle", "check_empty")]
            return TarParts(list(urls), expand, stage, kept, shuffles)
        elif name not in ("single_node_only", "split_by_worker", "StreamingOpen"):
            return f"its stage {name} comes before the tars are read"
    return "it has no stages that read tars (tar_file_expander, group_by_keys)"


def _buffers(stage: Any) -> bool:
    """Whether a stage shuffles: its buffer may have no room."""
    arguments = getattr(stage, "args", ()) or (getattr(stage, "bufsize", True),)
    return bool(arguments[0])


def name_stage(stage: Any) -> str:
    """What a stage of a WebDataset is called."""
    return str(getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__).lstrip("_"))


class Chunks(Source):
    """A dataset that can be read by number, and lies in chunks of known length: reading follows the chunks."""

    def __init__(self, dataset: Any, names: list[str], lengths: list[int], shuffles: bool) -> None:
        self.dataset, self.names, self.lengths, self.shuffles = dataset, names, lengths, shuffles

    def parts(self) -> list[Part]:
        found, first = [], 0
        for name, n in zip(self.names, self.lengths, strict=True):
            found.append(Part(name, n, n, "", first))
            first += n
        return [part for part in found if part.samples]

    def read_part(self, part: Part, at: Any) -> Iterator[tuple[Any, Any]]:
        assert part.samples is not None
        for i in range(at or 0, part.samples):
            yield self.dataset[part.what + i], i + 1


def _open_mosaic(data: Any) -> Source | str | None:
    lengths = getattr(data, "samples_per_shard", None)
    if lengths is None or not _comes_from(data, "streaming"):
        return None
    names = [f"shard {i}" for i in range(len(lengths))]
    return Chunks(data, names, [int(n) for n in lengths], bool(getattr(data, "shuffle", False)))


def _open_litdata(data: Any) -> Source | str | None:
    if not _comes_from(data, "litdata"):
        return None
    if not hasattr(data, "subsampled_files"):
        return "of litdata a StreamingDataset can be divided"
    data[0]  # it opens its folder with the first sample
    chunks = data.cache._reader.config.intervals
    lengths = [int(interval[2]) - int(interval[1]) for interval in chunks]
    return Chunks(data, [str(name) for name in data.subsampled_files], lengths, bool(data.shuffle))
