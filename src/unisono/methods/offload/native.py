"""The host's step of Adam and AdamW as compiled code: one pass over the memory, on threads of its own.

`native.cpp` is compiled at the first use, where there is a compiler, and kept in the user's cache. It is used where it
gives the very bits that torch's fused kernel gives; otherwise `step_tiles` steps, as it does for other optimizers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.methods.offload.fused import ADAM, ADAMW, step_tiles

SOURCE = Path(__file__).with_name("native.cpp")
# Rounded as written: no products joined with sums, no other order. The last two leave results as they are.
_FLAGS = ["-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_LINKING = ["-shared", "-fPIC", "-pthread"]
_COMPILE_S = 60
_POINTERS = ("p_old", "m_old", "v_old", "p", "m", "v", "gradient", "out", "spans", "ratios", "table")
_COUNTS = ("span_count", "each", "period", "m_place", "v_place", "width")
_NUMBERS = ("lr", "decay", "beta1", "beta2", "eps", "correction1", "correction2", "scale")
_FLAGS_OF_STEP = ("adamw", "fresh", "idle", "narrow", "narrow_gradient", "narrow_out", "stream")
_WIDE, _NARROW = torch.float32, torch.bfloat16


class _Args(ctypes.Structure):
    """As in native.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_double) for name in _NUMBERS),
        *((name, ctypes.c_int32) for name in _FLAGS_OF_STEP),
    ]


class Step:
    """What one call steps; the names are those of `step_tiles`. numbers: None to carry values over as they are. width:
    of torch's vectors, which rounds differently what does not fill one.

    old, new: master and the two moments, before and after; the same ones to step in place. stream: write past the
    caches, where memory is written that was not read.
    """

    def __init__(
        self,
        kind: int,
        numbers: Sequence[float] | None,
        count: float,
        fresh: bool,
        spans: Sequence[int],
        old: Sequence[Tensor],
        new: Sequence[Tensor],
        gradient: Tensor,
        scale: float,
        out: Tensor | None,
        table: Tensor,
        places: Sequence[int],
        ratios: tuple[Sequence[float], int] | None,
        width: int,
    ) -> None:
        every = (ctypes.c_int64 * len(spans))(*spans)
        wider = None if ratios is None else (ctypes.c_float * len(ratios[0]))(*ratios[0])
        self.kept: tuple[Any, ...] = (every, wider, old, new, gradient, out, table)  # alive until the end
        lr, decay, beta1, beta2, eps = numbers or (0.0, 0.0, 0.5, 0.5, 1.0)
        places = places or (0, 0)
        self.args = _Args(
            *(x.data_ptr() for x in (*old, *new, gradient)),
            None if out is None else out.data_ptr(),
            ctypes.cast(every, ctypes.c_void_p),
            None if wider is None else ctypes.cast(wider, ctypes.c_void_p),
            table.data_ptr(),
            len(spans) // 2,
            1 if ratios is None else ratios[1],
            table.numel() // 2,
            *places,
            width,
            lr,
            decay,
            beta1,
            beta2,
            eps,
            1 - beta1**count,
            1 - beta2**count,
            scale,
            kind == ADAMW,
            fresh,
            numbers is None,
            old[1].dtype == _NARROW,
            gradient.dtype == _NARROW,
            out is not None and out.dtype == _NARROW,
            new[0] is not old[0],
        )


class NativePool:
    """Threads that step, in the order in which steps are given."""

    def __init__(self, threads: int) -> None:
        found = load()
        assert found is not None
        self._library, self.width = found
        self._pool = self._library.pool_open(threads)

    def start(self, step: Step) -> Callable[[], None]:
        """Begin a step; call what is returned to wait until it is done."""
        job, lock, ended = self._library.job_start(self._pool, ctypes.byref(step.args)), threading.Lock(), [False]

        def wait() -> None:
            with lock:
                if not ended[0]:
                    self._library.job_wait(self._pool, job)
                    ended[0] = True
                    step.kept = ()

        return wait

    def close(self) -> None:
        """End the threads, once all steps are done."""
        if self._pool:
            self._library.pool_close(self._pool)
            self._pool = None


def fits(lines: Mapping[str, Tensor], gradient: Tensor, out: Tensor | None) -> bool:
    """Whether the compiled code steps such lines: master values in fp32, two moments."""
    master, *moments = lines.values()
    kinds = {x.dtype for x in moments}
    given = [gradient.dtype] if out is None else [gradient.dtype, out.dtype]
    return master.dtype == _WIDE and len(moments) == 2 and len(kinds) == 1 and {*kinds, *given} <= {_WIDE, _NARROW}


@functools.cache
def load() -> tuple[ctypes.CDLL, int] | None:
    """The compiled code, and the width of torch's vectors; None where it cannot be compiled, or does not give torch's
    bits."""
    try:
        library = ctypes.CDLL(str(_compile()))
        for name, result, given in (
            ("pool_open", ctypes.c_void_p, [ctypes.c_int]),
            ("pool_close", None, [ctypes.c_void_p]),
            ("job_start", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
            ("job_wait", None, [ctypes.c_void_p, ctypes.c_void_p]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, given
        widths = (width for width in (16, 8, 4) if all(agrees(library, width, kind) for kind in (ADAM, ADAMW)))
        return next(((library, width) for width in widths), None)
    except Exception:  # no compiler, no room, a library that cannot be loaded
        return None


def _compile() -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    processor = platform.processor()
    if os.path.exists("/proc/cpuinfo"):  # -march=native differs between machines that have a home in common
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = str(sorted({line for line in lines if line.startswith(("flags", "Features", "model"))}))
    key = hashlib.sha256(repr((SOURCE.read_bytes(), _FLAGS, compiler, processor)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="unisono-"))
    library = folder / f"adam-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as here:
            made = Path(here) / "adam.so"
            command = [compiler, *_FLAGS, *_LINKING, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            os.replace(made, library)
    return library


def agrees(library: ctypes.CDLL, width: int, kind: int) -> bool:
    """Whether the compiled code steps a few thousand numbers exactly as `step_tiles` does."""
    generator = torch.Generator().manual_seed(0)
    table = torch.arange(1 << 15, dtype=torch.int32).remainder(1 << 14) * 3
    pool = library.pool_open(2)
    try:
        for spans, ratios in (([0, 2048, 2112, 4992], ([1.0, 1.75, 0.8125], 2000)), ([0, 2011, 2500, 4999], None)):
            for narrow, count, lr in ((_WIDE, 1.0, 0.1), (_NARROW, 7.5, 1e-3), (_WIDE, 3e4, 1e-5)):
                for decay, beta1, fresh in ((0.0, 0.9, False), (0.1, 0.4, count == 1.0)):
                    p, g, m = (torch.randn(spans[-1], dtype=_WIDE, generator=generator) * 10.0**-i for i in range(3))
                    if ratios is not None and kind == ADAM:
                        decay = 0.0
                    numbers = [lr, decay, beta1, 0.999, 1e-8]
                    lines = [p, m.to(narrow), m.square().to(narrow)]
                    case = (kind, numbers, count, fresh, spans, lines, g.to(torch.bfloat16), table, ratios)
                    if not _agrees(library, pool, width, *case):
                        return False
    finally:
        library.pool_close(pool)
    return True


def _agrees(
    library: ctypes.CDLL,
    pool: Any,
    width: int,
    kind: int,
    numbers: list[float],
    count: float,
    fresh: bool,
    spans: list[int],
    lines: Sequence[Tensor],
    gradient: Tensor,
    table: Tensor,
    ratios: tuple[list[float], int] | None,
) -> bool:
    results, places, scale = [], [5, 900], 0.3
    for native in (False, True):
        every = [line.clone() for line in lines]
        out = torch.zeros_like(gradient)
        if native:
            given = (spans, every, every, gradient, scale, out, table, places, ratios, width)
            step = Step(kind, numbers, count, fresh, *given)
            library.job_wait(pool, library.job_start(pool, ctypes.byref(step.args)))
        else:
            master, *state = every
            scratch = [torch.empty(master.numel(), dtype=_WIDE) for _ in range(3)]
            bits = [line.view(torch.int32) for line in scratch[1:]]
            head: list[Any] = [kind, numbers, [False, False], torch.tensor(count), fresh, [0.0, 0.0], spans, master]
            rest: list[Any] = [gradient, scale, state, out, scratch, bits, table, places, master.numel(), [master], []]
            with torch.no_grad():
                step_tiles(*[*head, *rest, *([[], 0, 0] if ratios is None else [*ratios, 0])])
        results.append([*every, out])
    return all(map(torch.equal, *results))
