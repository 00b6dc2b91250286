"""Nested state goes to JSON and tensors and comes back exactly."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from unisono.packing import from_bytes, pack, to_bytes, unpack

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits", "torch.int1"))
    }
    - {getattr(torch, f"uint{n}") for n in range(1, 8)}
    - {getattr(torch, f"int{n}") for n in range(1, 8)}
    | {torch.int16},
    key=str,
)


def through_json(obj: object) -> object:
    tree, tensors = pack(obj)
    return unpack(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def through_bytes(obj: object) -> object:
    return from_bytes(to_bytes(obj))


both_ways = pytest.mark.parametrize("way", [through_json, through_bytes])


def same(a: object, b: object) -> bool:
    """Equal in type and value, all the way down; nan equals nan; tensors by their bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw = [x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return [*map(type, a)] == [*map(type, b)] and [*a] == [*b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@both_ways
@pytest.mark.parametrize(
    "obj",
    [
        *(None, True, False, 0, -7, 2**63, -(2**200), 10**6000),
        *(0.1, -0.0, 1e-320, 1.7976931348623157e308, math.inf, -math.inf, math.nan),
        *("", "text", "naïve ☃", "\ud800 lone surrogate", "\x00", b"", b"\x00\xff", b"x" * 5000),
        *([], (), {}, [[]], ((),), [1, (2, [3.0])], {"a": {"b": []}}),
        *({0: "int", "0": "str"}, {True: 1}, {"!tuple": [1]}, {"a": 1, "!tensor": "a"}, {1: {"x": (1,)}}),
        *(OrderedDict(b=1, a=2), Counter({10: 2, 20: 1}), random.Random(3).getstate()),
        *(torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)),
        *(
            np.float32(0.1),
            np.float64(math.nan),
            np.int8(-3),
            np.bool_(True),
            np.str_("ab"),
            np.str_(""),
            np.complex64(1j),
        ),
        *(np.datetime64("2020-01-01"), np.random.RandomState(1).get_state()),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_plain_values_come_back_with_type_and_value(way, obj):
    assert same(way(obj), obj)


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (3, 4)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(way, dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    assert same(way({"x": [tensor]}), {"x": [tensor]})


@both_ways
def test_views_conjugates_and_parameters_come_back_as_their_values(way):
    base = torch.arange(24.0).reshape(4, 6)
    for tensor in (base.t(), base[1:3, ::2], base.expand(2, 4, 6), base[:, 1], base[2, 3]):
        assert same(way(tensor), tensor)
    wave = torch.randn(3, dtype=torch.complex64)
    assert same(way(wave.conj()), wave.conj().resolve_conj())
    assert same(way(wave.conj().imag), wave.conj().imag.resolve_neg())
    back = way(torch.nn.Parameter(base))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


@both_ways
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 4), np.float32),
        np.array(5, np.uint16),
        np.array(["a", "bcd"]),
        np.array([True, False]),
        np.arange(4, dtype=">i4"),
        np.arange(10)[::-3],
        np.array(["2020-01-01"], "datetime64[s]"),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_numpy_arrays_come_back_and_can_be_written_to(way, array):
    back = way([array])[0]
    assert same(back, array)
    back[...] = back


@both_ways
def test_an_alias_is_kept_once_and_is_one_object_again(way):
    weight, empty, wave = torch.randn(3), torch.empty(0), torch.randn(2, dtype=torch.complex128)
    tied = {"a": weight, "b": weight.view(3), "c": [weight.detach()], "d": weight[:2], "w": (wave, wave)}
    tied |= {"e": empty, "f": empty}
    assert len(pack(tied)[1]) == 4
    back = way(tied)
    assert back["a"] is back["b"] is back["c"][0]
    assert back["e"] is back["f"]
    assert back["w"][0] is back["w"][1]
    assert same(back["d"], weight[:2])


def test_packing_does_not_copy_contiguous_tensors_and_reading_gives_own_memory():
    weight = torch.randn(3)
    assert pack([weight])[1]["[0]"].data_ptr() == weight.data_ptr()
    data = bytearray(to_bytes([weight]))
    back = from_bytes(data)[0]
    data[-4:] = b"\x00" * 4
    assert torch.equal(back, weight)


def test_tensors_are_named_by_their_path_and_names_never_collide():
    state = {
        "a": {"b": torch.ones(1)},
        "a.b": torch.zeros(1),
        "l": [torch.ones(2)],
        "__metadata__": torch.ones(3),
    }
    tensors = pack(state)[1]
    assert list(tensors) == ["a.b", "a.b~2", "l[0]", "__metadata__~2"]
    assert same(through_bytes(state), state)


def test_optimizer_and_scheduler_states_come_back():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    for state in (model.state_dict(), optimizer.state_dict(), scheduler.state_dict()):
        state = dict(state) if isinstance(state, dict) else state
        assert same(through_json(state), state)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (
            {"optimizer": {"param_groups": [{"foo": object()}]}},
            r"optimizer\.param_groups\[0\]\.foo: got <class 'object'>",
        ),
        (lambda: 0, r"state: got <class 'function'>"),
        ({"p": Point(1, 2)}, r"p: got <class '.*Point'>"),
        ([{1, 2}], r"\[0\]: got <class 'set'>"),
        ({"a": {(1, 2): 3}}, r"a: got a dict key \(1, 2\)"),
        ({"x": np.array([object()])}, r"x: got a numpy value of dtype object"),
        ({"x": np.zeros(2, [("a", "i4")])}, r"x: got a numpy value of dtype"),
        ({"x": torch.ones(2).to_sparse()}, r"x: got a tensor of layout torch.sparse_coo"),
        ({"x": torch.ones(2, device="meta")}, r"x: got a tensor .* on meta"),
        ({"x": torch.nn.UninitializedParameter()}, r"x: got <class .*UninitializedParameter"),
    ],
)
def test_anything_else_is_refused_by_its_path(obj, message):
    with pytest.raises(TypeError, match=message):
        to_bytes(obj)


def test_a_state_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        pack(loop)


def test_damaged_messages_raise_value_errors_only():
    message = to_bytes({"a": [1, 2.5, None], "t": torch.arange(5), "n": np.ones(2), "b": b"12", "e": torch.Size([1])})
    for end in range(len(message)):
        with pytest.raises(ValueError, match="packed state"):
            from_bytes(message[:end])
    with pytest.raises(ValueError, match="too many"):
        from_bytes(message + b"!")
    rng = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(message)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged) - 56)] = rng.randrange(256)
        with contextlib.suppress(ValueError):
            from_bytes(damaged)


@pytest.mark.parametrize(
    "tree",
    [
        {"!tensor": "absent"},
        {"!array": "t", "dtype": "O", "shape": [1]},
        {"!array": "t", "dtype": "<f8", "shape": [7]},
        {"!array": "t", "dtype": "<f8", "shape": [-1]},
        {"!array": "t"},
        {"!scalar": "AA==", "dtype": "<f8"},
        {"!scalar": "", "dtype": "<f8"},
        {"!dtype": "nn"},
        {"!device": 3.5},
        {"!code": "import os"},
        {"!tensor": "t", "dtype": "complex32", "shape": [99]},
        {"!dict": [[[], 1]]},
        {"!bytes": "***"},
    ],
    ids=str,
)
def test_trees_that_pack_never_writes_are_refused(tree):
    with pytest.raises(ValueError, match="packed state"):
        unpack(tree, {"t": torch.zeros(16, dtype=torch.uint8)})


def test_the_module_needs_no_safetensors_and_no_pickle():
    code = "import unisono.packing, sys; assert 'safetensors' not in sys.modules; print(unisono.packing.__file__)"
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    with open(path) as file:
        assert "import pickle" not in file.read()
