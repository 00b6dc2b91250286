"""Split tensors in a checkpoint's folder: each rank writes what it holds, and any reader finds all of it.

pieces-00001.safetensors   rank 1's elements: "model.0.weight[128:256]", one line for each span
rank-00001.json            "pieces": the spans of each name
shared.json                "pieces": dtype and shape of each whole tensor; the trees of all ranks, merged
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.packing import count_shape_bytes, find_dtype, unpack
from unisono.training.checkpoint import safetensors
from unisono.training.checkpoint.slices import Piece, Span, Stored

__all__ = ["SPLIT", "find_pieces", "merge_trees", "name_file", "unpack_lazily", "write_pieces"]

SPLIT = ("model", "optimizer")  # the parts of the state that may hold pieces

Spans = dict[str, list[list[int]]]  # name -> [start, stop] of each span


def name_file(rank: int) -> str:
    """The file of a rank's pieces."""
    return f"pieces-{rank:05d}.safetensors"


# Writing --------------------------------------------------------------------------------------------------


def write_pieces(folder: Path, rank: int, pieces: Mapping[str, Piece]) -> tuple[safetensors.Written | None, Spans]:
    """Write a rank's elements as a stream; returns size and checksum (None: no elements, no file) and the spans."""
    spans = {name: held for name, piece in pieces.items() if (held := piece.describe()[2])}
    if not spans:
        return None, {}
    return safetensors.write_stream(folder / name_file(rank), _list_entries(pieces)), spans


def _list_entries(pieces: Mapping[str, Piece]) -> Iterator[safetensors.Entry]:
    for name, piece in pieces.items():
        for start, stop, read in piece.spans:
            count, chunks, dtype = stop - start, piece.chunks(start, stop, read), piece.dtype
            if not safetensors.is_storable(dtype):
                count, chunks, dtype = count * dtype.itemsize, (x.view(torch.uint8) for x in chunks), torch.uint8
            yield safetensors.Entry(_name_line(name, start, stop), dtype, [count], chunks)


def _name_line(name: str, start: int, stop: int) -> str:
    return f"{name}[{start}:{stop}]"


def merge_trees(trees: Sequence[Any]) -> Any:
    """The union of packed trees: a rank may leave out the state of parameters of which it holds nothing.

    If two trees have a value in the same place, the first one's is taken.
    """
    whole = trees[0]
    for tree in trees[1:]:
        whole = _union(whole, tree)
    return whole


def _union(a: Any, b: Any) -> Any:
    first, second = _read_items(a), _read_items(b)
    if first is None or second is None:
        return a
    both = {key: _union(first[key], second[key]) if key in second else first[key] for key in first}
    both |= {key: value for key, value in second.items() if key not in first}
    tag = _read_tag(a) or _read_tag(b)
    if not tag:
        return both
    numbered = all(type(key) is int for key in both)
    return {tag: [[key, both[key]] for key in (sorted(both) if numbered else both)]}


def _read_items(tree: Any) -> dict[Any, Any] | None:
    """The items of a packed dict; None for everything else."""
    if not isinstance(tree, dict) or _read_tag(tree) not in ("", "!dict", "!ordered"):
        return None
    return dict(tree[_read_tag(tree)]) if _read_tag(tree) else tree


def _read_tag(tree: dict[str, Any]) -> str:
    first = next(iter(tree), "")
    return first if first.startswith("!") else ""


# Reading --------------------------------------------------------------------------------------------------


def find_pieces(folder: Path, wholes: Mapping[str, Sequence[Any]], ranks: Sequence[Spans]) -> dict[str, Stored]:
    """The split tensors (`wholes`: dtype and shape by name) in the files of all ranks; ValueError if one lacks."""
    spans: dict[str, list[Span]] = {name: [] for name in wholes}
    kinds = {name: find_dtype(dtype) for name, (dtype, _) in wholes.items()}
    for name, (_, shape) in wholes.items():
        count_shape_bytes(shape, kinds[name].itemsize)
    for rank, held in enumerate(ranks):
        lines = safetensors.index(folder / name_file(rank)) if held else {}
        for name, places in held.items():
            for start, stop in places:
                line = lines.get(_name_line(name, start, stop))
                if name not in wholes or line is None:
                    raise ValueError(f"{name_file(rank)} has no elements {start} to {stop} of {name[:200]!r}")
                spans[name].append(_make_span(line, start, stop, kinds[name]))
    return {name: Stored(shape, kinds[name], spans[name], name) for name, (_, shape) in wholes.items()}


def _make_span(line: Stored, start: int, stop: int, dtype: torch.dtype) -> Span:
    if line.dtype != dtype:
        line = line.view_as(dtype, [stop - start])
    if line.shape != (stop - start,):
        raise ValueError(f"{line!r} should have {stop - start} elements")
    return Span(start, stop, lambda a, b: line.read(a - start, b - start))


def unpack_lazily(tree: Any, stored: Mapping[str, Stored]) -> Any:
    """What `unisono.packing.unpack` gives, with a Stored in place of every tensor."""
    found: dict[str, Any] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(x) for x in node]
        if not isinstance(node, dict):
            return node
        tag = _read_tag(node)
        if tag == "!tensor":
            return {tag: place(node[tag], node)}
        if tag in ("!array", "!blob"):
            found[node[tag]] = stored[node[tag]].full()
            return node
        return {key: walk(x) for key, x in node.items()}

    def place(name: str, node: dict[str, Any]) -> str:
        if "dtype" not in node:
            found.setdefault(name, stored[name])
            return name
        key = f"{name} as {node['dtype']}"
        dtype = find_dtype(node["dtype"])
        count_shape_bytes(node["shape"], dtype.itemsize)
        found.setdefault(key, stored[name].view_as(dtype, node["shape"]))
        return key

    return unpack(walk(tree), found)
