"""Nested state to JSON and tensors, and back, exactly: the one form that state has on disk and on a wire.

No pickle and no code: what is read can only ever become the plain values listed at `pack`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

__all__ = ["from_bytes", "pack", "to_bytes", "unpack"]

Tensors = dict[str, torch.Tensor]
Path = tuple[str | int, ...]

# The dtypes that safetensors stores under their own name; the others travel as bytes beside their dtype.
_NATIVE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_INLINE_BYTES = 1024  # shorter bytes stay inside the JSON, as base64
_LONG_INT_BITS = 8192  # Python refuses to read longer ints from decimal text
_LENGTH = struct.Struct("<Q")


def pack(obj: Any, *, leaves: type | tuple[type, ...] = ()) -> tuple[Any, Tensors]:
    """Split `obj` into a tree that JSON holds and the tensors it mentions by name.

    Accepts None, bool, int, float (inf and nan too), str, bytes, list, tuple, dict, OrderedDict and Counter
    with keys of str or int, torch tensors of every dtype, numpy arrays and scalars, torch.Size, torch.dtype
    and torch.device; `unpack` gives each back with its own type and value. A tensor that occurs twice is kept
    once, and is one object again after `unpack`. Tensors are referred to, not copied, where they already lie
    contiguous on the CPU; after `unpack` they lie there, detached. What stands for a tensor, of a class among
    `leaves`, is kept in its place.

    Returns the tree and the tensors by the path at which each was found.

    Raises:
        TypeError: a value of any other type, named by its path.

    Example:
        >>> tree, tensors = pack({"lr": 0.1, "momentum": torch.zeros(2)})
        >>> tree, list(tensors)
        ({'lr': 0.1, 'momentum': {'!tensor': 'momentum'}}, ['momentum'])
    """
    packer = _Packer(leaves)
    try:
        return packer.tree(obj, ()), packer.tensors
    except RecursionError:
        raise ValueError("the state contains itself or is nested too deeply; expected a finite tree") from None


def unpack(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild what `pack` split; ValueError for a tree or tensors that `pack` could not have written."""
    try:
        return _Unpacker(tensors).value(tree)
    except RecursionError:
        raise ValueError("packed state is nested too deeply") from None


def to_bytes(obj: Any) -> bytes:
    """`pack` into one message: the header's length, the header in JSON, then each tensor's raw bytes."""
    tree, tensors = pack(obj)
    if not tensors:
        header = json.dumps([tree], separators=(",", ":")).encode()
        return _LENGTH.pack(len(header)) + header
    layout = [[name, _dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()]
    header = json.dumps([tree, layout], separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(_raw(t).numpy().data for t in tensors.values())])


def from_bytes(data: bytes | bytearray | memoryview) -> Any:
    """Read a message of `to_bytes`; ValueError for a malformed one. Tensors get memory of their own."""
    view = memoryview(data).cast("B")
    start = _LENGTH.size
    if len(view) < start or len(view) - start < (length := _LENGTH.unpack_from(view)[0]):
        raise ValueError(f"packed state is cut short: got {len(view)} bytes")
    try:
        header = json.loads(bytes(view[start : start + length]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"packed state has a broken header: {error}") from None
    if not isinstance(header, list) or len(header) not in (1, 2):
        raise ValueError("packed state has a broken header: expected [tree] or [tree, layout]")
    tensors = _read_tensors(header[1], view[start + length :]) if len(header) == 2 else {}
    return unpack(header[0], tensors)


def _read_tensors(layout: Any, body: memoryview) -> Tensors:
    tensors: Tensors = {}
    position = 0
    try:
        for name, dtype_name, shape in layout:
            dtype = _dtype(dtype_name)
            size = math.prod(_shape(shape)) * dtype.itemsize
            if size > len(body) - position:
                raise ValueError(f"packed state is cut short: tensor {name!r} needs {size} bytes")
            tensors[name] = _tensor_of(body[position : position + size], dtype, shape)
            position += size
    except TypeError as error:
        raise ValueError(f"packed state has a broken layout: {error}") from None
    if position != len(body):
        raise ValueError(f"packed state has {len(body) - position} bytes too many")
    return tensors


class _Packer:
    """One walk over a nested state; collects tensors by the path at which they were first met."""

    def __init__(self, leaves: type | tuple[type, ...] = ()) -> None:
        self.tensors: Tensors = {}
        self._leaves = leaves
        self._names: dict[Any, str] = {}  # where a tensor's values lie -> its name, to keep aliases once
        self._kept: list[Any] = []  # holds what the identities in _names refer to

    def tree(self, obj: Any, path: Path) -> Any:
        kind = type(obj)
        if obj is None or kind is bool or kind is str:
            return obj
        if kind is int:
            return obj if obj.bit_length() <= _LONG_INT_BITS else {"!int": hex(obj)}
        if kind is float:
            return obj if math.isfinite(obj) else {"!float": repr(obj)}
        if kind is dict:
            return self._dict(obj, path)
        if kind is list:
            return [self.tree(x, (*path, i)) for i, x in enumerate(obj)]
        if kind is tuple:
            return {"!tuple": [self.tree(x, (*path, i)) for i, x in enumerate(obj)]}
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj, path)
        return self._rare(obj, path)

    def _dict(self, obj: dict[Any, Any], path: Path) -> Any:
        if all(type(key) is str and not key.startswith("!") for key in obj):
            return {key: self.tree(value, (*path, key)) for key, value in obj.items()}
        return {"!dict": self._pairs(obj.items(), path)}

    def _pairs(self, items: Iterable[tuple[Any, Any]], path: Path) -> list[list[Any]]:
        pairs = []
        for key, value in items:
            if type(key) not in (str, int, bool):
                _refuse(key, path, f"a dict key {key!r}", "keys must be str or int")
            pairs.append([key, self.tree(value, (*path, str(key)))])
        return pairs

    def _rare(self, obj: Any, path: Path) -> Any:
        kind = type(obj)
        if isinstance(obj, self._leaves):
            if (name := self._names.get(id(obj))) is None:
                name = self._names[id(obj)] = self._store(obj, path)
            return {"!tensor": name}
        if kind is bytes:
            if len(obj) <= _INLINE_BYTES:
                return {"!bytes": base64.b64encode(obj).decode()}
            return {"!blob": self._store(_tensor_of(memoryview(obj), torch.uint8, [len(obj)]), path)}
        if kind is OrderedDict:
            return {"!ordered": self._pairs(obj.items(), path)}
        if kind is Counter:
            return {"!counter": self._pairs(obj.items(), path)}
        if kind is torch.Size:
            return {"!size": list(obj)}
        if kind is torch.dtype:
            return {"!dtype": _dtype_name(obj)}
        if kind is torch.device:
            return {"!device": str(obj)}
        if isinstance(obj, np.ndarray | np.generic):
            return self._numpy(obj, path)
        return _refuse(obj, path)

    def _tensor(self, obj: torch.Tensor, path: Path) -> Any:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            _refuse(obj, path, hint="a tensor subclass has no plain form; give its plain local or full tensor")
        if obj.layout is not torch.strided or obj.is_quantized or obj.device.type == "meta":
            what = f"a tensor of layout {obj.layout}, dtype {obj.dtype} on {obj.device}"
            _refuse(obj, path, what, "only dense tensors that hold values can be packed")
        alias: Any = id(obj)
        self._kept.append(obj)
        obj = obj.detach()
        if obj.numel():
            alias = (
                obj.device,
                obj.data_ptr(),
                obj.shape,
                obj.stride(),
                obj.dtype,
                obj.is_conj(),
                obj.is_neg(),
            )
        if (name := self._names.get(alias)) is None:
            values = obj.resolve_conj().resolve_neg().cpu().contiguous()
            name = self._store(values if obj.dtype in _NATIVE else _raw(values), path)
            self._names[alias] = name
        if obj.dtype in _NATIVE:
            return {"!tensor": name}
        return {"!tensor": name, "dtype": _dtype_name(obj.dtype), "shape": list(obj.shape)}

    def _numpy(self, obj: np.ndarray[Any, Any] | np.generic, path: Path) -> Any:
        dtype = obj.dtype
        if dtype.hasobject or dtype.fields is not None or np.dtype(dtype.str) != dtype:
            _refuse(obj, path, f"a numpy value of dtype {dtype}", "expected numbers, bools, strings or times")
        if isinstance(obj, np.generic):
            raw = obj.tobytes()[: dtype.itemsize]  # an empty string's bytes would be one character long
            return {"!scalar": base64.b64encode(raw).decode(), "dtype": dtype.str}
        if type(obj) is not np.ndarray:
            _refuse(obj, path, hint="give a plain numpy.ndarray")
        raw = obj.tobytes()
        name = self._store(_tensor_of(memoryview(raw), torch.uint8, [len(raw)]), path)
        return {"!array": name, "dtype": dtype.str, "shape": list(obj.shape)}

    def _store(self, tensor: Any, path: Path) -> str:
        base = name = _join(path) or "value"
        number = 1
        while name in self.tensors or name == "__metadata__":  # safetensors keeps that name for itself
            number += 1
            name = f"{base}~{number}"
        self.tensors[name] = tensor
        return name


class _Unpacker:
    """The reverse walk; a tensor mentioned twice becomes one object."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._built: dict[tuple[str, str], torch.Tensor] = {}

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(x) for x in tree]
        if not isinstance(tree, dict):
            return tree
        tag = next(iter(tree), "")
        if not tag.startswith("!"):
            return {key: self.value(x) for key, x in tree.items()}
        try:
            return self._tagged(tag, tree[tag], tree)
        except (KeyError, TypeError, AttributeError, RuntimeError, binascii.Error) as error:
            if isinstance(error, RecursionError):
                raise
            raise ValueError(f"packed state has a broken {tag!r} entry: {error!r}") from None

    def _tagged(self, tag: str, body: Any, tree: dict[str, Any]) -> Any:
        if tag == "!tensor":
            return self._tensor(body, tree)
        if tag == "!tuple":
            return tuple(self.value(x) for x in body)
        if tag in ("!dict", "!ordered", "!counter"):
            kind = {"!dict": dict, "!ordered": OrderedDict, "!counter": Counter}[tag]
            return kind({key: self.value(x) for key, x in body})
        if tag in ("!array", "!scalar"):
            return self._numpy(tag, body, tree)
        if tag == "!int":
            return int(body, 16)
        if tag == "!float":
            return float(body)
        if tag == "!bytes":
            return base64.b64decode(body, validate=True)
        if tag == "!blob":
            return self._tensors[body].numpy().tobytes()
        if tag == "!size":
            return torch.Size(body)
        if tag == "!dtype":
            return _dtype(body)
        if tag == "!device":
            return torch.device(body)
        raise ValueError(f"packed state has an unknown entry {tag!r}; was it written by a newer version?")

    def _tensor(self, name: str, tree: dict[str, Any]) -> torch.Tensor:
        dtype_name = tree.get("dtype", "")
        if (name, dtype_name) not in self._built:
            tensor = self._tensors[name]
            if dtype_name:
                tensor = tensor.reshape(-1).view(_dtype(dtype_name)).reshape(_shape(tree["shape"]))
            self._built[name, dtype_name] = tensor
        return self._built[name, dtype_name]

    def _numpy(self, tag: str, body: str, tree: dict[str, Any]) -> Any:
        dtype = np.dtype(str(tree["dtype"]))
        scalar = tag == "!scalar"
        raw = base64.b64decode(body, validate=True) if scalar else self._tensors[body].numpy().tobytes()
        shape = () if scalar else tuple(_shape(tree["shape"]))
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError(f"packed state has {len(raw)} bytes for a numpy value of {dtype} and shape {shape}")
        array = np.zeros(shape, dtype)
        if raw:
            array = np.frombuffer(raw, dtype).reshape(shape).copy()
        return array[()] if scalar else array


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous CPU tensor, as a flat uint8 view."""
    return tensor.reshape(-1).view(torch.uint8)


def _tensor_of(raw: memoryview, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if len(raw):
        _raw(tensor).numpy()[:] = np.frombuffer(raw, np.uint8)
    return tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"packed state names an unknown dtype {name!r}; this torch is {torch.__version__}")
    return dtype


def _shape(shape: list[int]) -> list[int]:
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"packed state has a broken shape {shape!r}")
    return shape


def _join(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _refuse(obj: Any, path: Path, what: str = "", hint: str = "") -> NoReturn:
    what = what or f"{type(obj)}"
    hint = hint or (
        "expected None, bool, int, float, str, bytes, list, tuple, dict, torch tensors or numpy arrays; "
        "convert it to one of these"
    )
    raise TypeError(f"{_join(path) or 'state'}: got {what}; {hint}")
