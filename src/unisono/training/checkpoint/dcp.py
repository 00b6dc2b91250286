"""Folders of torch.distributed.checkpoint (FSDP2, torchtitan): read by parts and without running code, and written.

In `.metadata`, a pickle, stands where each block of each tensor lies in the files; only the classes that torch itself
writes there are let in. The blocks are files of torch.save within the files, read with weights_only=True.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.training.checkpoint.foreign import DCP_METADATA
from unisono.training.checkpoint.slices import Span, Stored, list_runs

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_ALLOWED = {
    *((_METADATA, name) for name in _CLASSES),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write there")


def read_dcp(folder: Path) -> dict[str, Any]:
    """The nested state of a folder, with a Stored in place of each tensor."""
    metadata = _read_metadata(folder)
    paths: Mapping[str, Any] = metadata.planner_data or {}
    places: dict[str, list[Any]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append((index, info))
    whole: dict[str, Any] = {}
    for key, about in metadata.state_dict_metadata.items():
        if key not in places:
            raise ValueError(f"{folder / DCP_METADATA} does not say where {key} is")
        if hasattr(about, "chunks"):
            value: Any = _make_stored(folder, key, about, places[key])
        else:
            value = _read_item(folder, key, places[key][0][1])
        _place(whole, paths.get(key, (key,)), value)
    return whole


def _read_metadata(folder: Path) -> Any:
    import torch.distributed.checkpoint.metadata  # noqa: F401 - the classes that are let in

    try:
        with open(folder / DCP_METADATA, "rb") as file:
            found = _Unpickler(file).load()
        _ = found.state_dict_metadata, found.storage_data
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / DCP_METADATA} is not as torch.distributed.checkpoint writes it: {error}") from None
    return found


def _make_stored(folder: Path, key: str, about: Any, places: list[Any]) -> Stored:
    """A tensor whose blocks are read when their elements are asked for."""
    dtype, shape = about.properties.dtype, list(about.size)
    by_offset = {tuple(index.offset or (0,) * len(shape)): info for index, info in places}
    spans = []
    for chunk in about.chunks:
        offset, block = tuple(chunk.offsets), tuple(chunk.sizes)
        if (info := by_offset.get(offset)) is None:
            raise ValueError(f"{folder / DCP_METADATA} does not say where the block of {key} at {list(offset)} is")
        read_block = lru_cache(maxsize=1)(partial(_read_block, folder, key, info, block, dtype))
        length, starts = list_runs(shape, block, offset)
        for number, start in enumerate(starts):
            spans.append(Span(start, start + length, partial(_read_run, read_block, number * length - start)))
    return Stored(shape, dtype, spans, key)


def _read_run(read_block: Any, shift: int, start: int, stop: int) -> Tensor:
    found: Tensor = read_block()[start + shift : stop + shift]
    return found


def _read_block(folder: Path, key: str, info: Any, block: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    found = _read_item(folder, key, info)
    if not isinstance(found, Tensor) or found.dtype != dtype or found.numel() != math.prod(block):
        raise ValueError(f"{folder / info.relative_path} does not hold a block of {list(block)} {dtype} of {key}")
    return found.detach().contiguous().reshape(-1)


def _read_item(folder: Path, key: str, info: Any) -> Any:
    if Path(info.relative_path).is_absolute() or ".." in Path(info.relative_path).parts:
        raise ValueError(f"{folder / DCP_METADATA} places {key} outside of the folder, in {info.relative_path}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{folder}: {key} is stored by an extension ({info.transform_descriptors}); save it without")
    with open(folder / info.relative_path, "rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{key} in {folder / info.relative_path} cannot be read without running code: {reason}"
        ) from None


def _place(whole: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put a value where its path leads: keys of dicts, and numbers of lists."""
    here: Any = whole
    for key, following in zip(path, (*path[1:], None), strict=True):
        empty: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(here, list):
            if key == len(here):
                here.append(empty)
        elif following is None or key not in here:
            here[key] = empty
        here = here[key]


# Writing --------------------------------------------------------------------------------------------------


def write_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """Write nested state with Stored tensors as a folder that torch.distributed.checkpoint loads, in any world.

    One tensor is in memory at a time.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    standing: dict[int, Stored] = {}

    class Planner(DefaultSavePlanner):
        """Plans with tensors that only have the shapes, and gives each one's values when it is written."""

        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            return standing[id(found)].full() if id(found) in standing else found

    def stand_for(value: Any) -> Any:
        if isinstance(value, Stored):
            empty = torch.empty((), dtype=value.dtype).expand(value.shape)
            standing[id(empty)] = value
            return empty
        if isinstance(value, Mapping):
            return {key: stand_for(x) for key, x in value.items()}
        return [stand_for(x) for x in value] if isinstance(value, list) else value

    # What torch's own `save` does in one process, without its warning that it is one.
    writer, planner = FileSystemWriter(folder), Planner()
    writer.reset(folder)
    planner.set_up_planner(stand_for(state), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    [plan] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
