"""Nested state to JSON and tensors, and back, exactly: the one form that state has on disk and on a wire.

No pickle and no code: what is read can only ever become the plain values listed at `pack`.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

__all__ = ["count_shape_bytes", "find_dtype", "from_bytes", "pack", "to_bytes", "unpack"]

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

_PACKED = "packed state"  # what an error calls it

# What is read may come from anywhere: each number is judged before anything is made of it.
_MAX_DIMENSIONS = 64  # of a tensor, and of an array
_MAX_BYTES = 2**63 - 1  # what a tensor's strides may count
_MAX_EMPTY_ITEM = 1 << 24  # NumPy reserves the bytes of one item for an array of none
_MAX_EMPTY_ITEMS = 1 << 20  # items without bytes: NumPy gives each of them one
_NUMPY_DTYPE = re.compile(r"[<>|=]([biufcSUV]\d{1,9}|[mM]8(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)", re.ASCII)
_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def pack(obj: Any, *, leaves: type | tuple[type, ...] = (), to_cpu: bool = True) -> tuple[Any, Tensors]:
    """Split `obj` into a tree that JSON holds and the tensors it mentions by name.

    Accepts None, bool, int, float (inf and nan too), str, bytes, list, tuple, dict, OrderedDict and Counter
    with keys of str or int, torch tensors of every dtype, numpy arrays and scalars, torch.Size, torch.dtype
    and torch.device; `unpack` gives each back with its own type and value. A tensor that occurs twice is kept
    once, and is one object again after `unpack`. Tensors are referred to, not copied, if they already lie
    contiguous on the CPU; after `unpack` they lie there, detached. What stands for a tensor, of a class among
    `leaves`, is kept in its place. `to_cpu=False` leaves tensors on their device, for a caller who copies them himself.

    Returns the tree and the tensors by the path at which each was found.

    Raises:
        TypeError: a value of any other type, named by its path.

    Example:
        >>> tree, tensors = pack({"lr": 0.1, "momentum": torch.zeros(2)})
        >>> tree, list(tensors)
        ({'lr': 0.1, 'momentum': {'!tensor': 'momentum'}}, ['momentum'])
    """
    packer = _Packer(leaves, to_cpu)
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
    layout = [[name, _dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()]
    header = json.dumps([tree, layout] if layout else [tree], separators=(",", ":")).encode()
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
        raise ValueError(f"packed state has a broken header: {_shorten(error)}") from None
    if not isinstance(header, list) or len(header) not in (1, 2):
        raise ValueError("packed state has a broken header: expected [tree] or [tree, layout]")
    tensors = _read_tensors(header[1], view[start + length :]) if len(header) == 2 else {}
    return unpack(header[0], tensors)


def _read_tensors(layout: Any, body: memoryview) -> Tensors:
    tensors: Tensors = {}
    position = 0
    if not isinstance(layout, list):
        raise ValueError(f"packed state has a broken layout: expected a list, got {_shorten(layout)}")
    for entry in layout:
        if not isinstance(entry, list) or len(entry) != 3 or type(entry[0]) is not str:
            raise ValueError(f"packed state has a broken layout: expected name, dtype, shape, got {_shorten(entry)}")
        name, shape = entry[0], entry[2]
        try:
            dtype = find_dtype(entry[1])
            size = count_shape_bytes(shape, dtype.itemsize)
            part = body[position : position + size]
            if len(part) == size:
                tensors[name] = _tensor_of(part, dtype, shape)
        except (ValueError, RuntimeError) as error:  # RuntimeError: a dtype that torch knows and has no tensors of
            raise ValueError(f"packed state has a broken layout: {_shorten(error)}") from None
        if len(part) < size:
            raise ValueError(f"packed state is cut short: tensor {_shorten(name)} needs {size} bytes")
        position += size
    if position != len(body):
        raise ValueError(f"packed state has {len(body) - position} bytes too many")
    return tensors


class _Packer:
    """One walk over a nested state; collects tensors by the path at which they were first met."""

    def __init__(self, leaves: type | tuple[type, ...] = (), to_cpu: bool = True) -> None:
        self.tensors: Tensors = {}
        self._leaves, self._to_cpu = leaves, to_cpu
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
            if all(type(key) is str and not key.startswith("!") for key in obj):
                return {key: self.tree(value, (*path, key)) for key, value in obj.items()}
            return {"!dict": self._pairs(obj.items(), path)}
        if kind is list:
            return [self.tree(x, (*path, i)) for i, x in enumerate(obj)]
        if kind is tuple:
            return {"!tuple": [self.tree(x, (*path, i)) for i, x in enumerate(obj)]}
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj, path)
        return self._rare(obj, path)

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
        if kind in (OrderedDict, Counter):
            return {"!ordered" if kind is OrderedDict else "!counter": self._pairs(obj.items(), path)}
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
            alias = obj.device, obj.data_ptr(), obj.shape, obj.stride(), obj.dtype, obj.is_conj(), obj.is_neg()
        if (name := self._names.get(alias)) is None:
            values = obj.resolve_conj().resolve_neg()
            values = (values.cpu() if self._to_cpu else values).contiguous()
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
        self._copied: set[str] = set()

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
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            if isinstance(error, RecursionError) or str(error).startswith(_PACKED):
                raise
            raise ValueError(f"packed state has a broken {tag!r} entry: {_shorten(error)}") from None

    def _tagged(self, tag: str, body: Any, tree: dict[str, Any]) -> Any:
        if tag == "!tensor":
            return self._tensor(_expect(str, body), tree)
        if tag == "!tuple":
            return tuple(self.value(x) for x in _expect(list, body))
        if tag in ("!dict", "!ordered", "!counter"):
            kind = {"!dict": dict, "!ordered": OrderedDict, "!counter": Counter}[tag]
            return kind({_read_key(pair): self.value(pair[1]) for pair in _expect(list, body)})
        if tag in ("!array", "!scalar"):
            return self._numpy(tag, body, tree)
        if tag == "!int":
            return _read_hex(body)
        if tag == "!float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[body]
        if tag == "!bytes":
            return base64.b64decode(_expect(str, body).encode(), validate=True)
        if tag == "!blob":
            return self._take(body).numpy().tobytes()
        if tag == "!size":
            return torch.Size(_read_number(n) for n in _expect(list, body))
        if tag == "!dtype":
            return find_dtype(body)
        if tag == "!device":
            return torch.device(_expect(str, body))
        raise ValueError(f"packed state has an unknown entry {_shorten(tag)}; was it written by a newer version?")

    def _tensor(self, name: str, tree: dict[str, Any]) -> torch.Tensor:
        dtype_name = tree.get("dtype", "")
        if (name, dtype_name) not in self._built:
            tensor = self._tensors[name]
            if dtype_name:
                dtype = find_dtype(dtype_name)
                count_shape_bytes(tree["shape"], dtype.itemsize)
                tensor = tensor.reshape(-1).view(dtype).reshape(tree["shape"])
            self._built[name, dtype_name] = tensor
        return self._built[name, dtype_name]

    def _take(self, name: Any) -> torch.Tensor:
        """A tensor that the caller copies; each only once, or a short text could ask for copies without end."""
        if _expect(str, name) in self._copied:
            raise ValueError(f"two values in the place of {_shorten(name)}")
        self._copied.add(name)
        return self._tensors[name]

    def _numpy(self, tag: str, body: Any, tree: dict[str, Any]) -> Any:
        dtype = _find_numpy_dtype(tree["dtype"])
        scalar = tag == "!scalar"
        raw = base64.b64decode(_expect(str, body).encode(), validate=True) if scalar else None
        size = len(raw) if raw is not None else self._tensors[_expect(str, body)].nbytes
        shape = () if scalar else tuple(_check_shape(tree["shape"]))
        if count_shape_bytes([*shape], dtype.itemsize) != size or (
            not size and (dtype.itemsize > _MAX_EMPTY_ITEM or math.prod(shape) > _MAX_EMPTY_ITEMS)
        ):
            raise ValueError(f"{size} bytes for a numpy value of {dtype} and shape {_shorten(shape)}")
        raw = self._take(body).numpy().tobytes() if raw is None else raw
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


def find_dtype(name: Any) -> torch.dtype:
    """The dtype of a name that was read; ValueError if this torch has none of that name."""
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"an unknown dtype {_shorten(name)}; this torch is {torch.__version__}")
    return dtype


def _find_numpy_dtype(name: Any) -> np.dtype[Any]:
    """What `dtype.str` writes of numbers, bools, strings and times, and nothing else that NumPy would read."""
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"an unknown numpy dtype {_shorten(name)}")
    return np.dtype(name)


def count_shape_bytes(shape: Any, itemsize: int) -> int:
    """The bytes of a tensor whose shape was read; ValueError for a shape that no tensor has."""
    numbers = _check_shape(shape)
    if math.prod(max(n, 1) for n in numbers) * max(itemsize, 1) > _MAX_BYTES:
        raise ValueError(f"a shape that is too large: {_shorten(shape)}")
    return math.prod(numbers) * itemsize


def _check_shape(shape: Any) -> list[int]:
    """A shape of at most `_MAX_DIMENSIONS` whole numbers of 64 bits, so that their product stays short."""
    is_short = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS
    if not is_short or not all(type(n) is int and 0 <= n <= _MAX_BYTES for n in shape):
        raise ValueError(f"a broken shape {_shorten(shape)}")
    return list(shape)


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {_shorten(value)}")
    return value


def _read_number(n: Any) -> int:
    """A whole number of 64 bits."""
    if type(n) is not int or not -_MAX_BYTES <= n <= _MAX_BYTES:
        raise TypeError(f"expected a whole number of 64 bits, got {_shorten(n)}")
    return n


def _read_key(pair: Any) -> Any:
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int, bool):
        raise TypeError(f"expected a key of str or int, and its value; got {_shorten(pair)}")
    return pair[0]


def _read_hex(text: Any) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", _expect(str, text), re.ASCII):
        raise TypeError(f"expected a number such as 0xff, got {_shorten(text)}")
    return int(text, 16)


def _shorten(value: Any) -> str:
    """A value for an error message, cut if long. (A very long number has no decimal text at all.)"""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


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
