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
import signal
import subprocess
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.methods.offload.fused import ADAM, ADAMW, step_tiles

SWITCH = "UNISONO_COMPILED_STEP"  # "0": nothing is compiled
SOURCE = Path(__file__).with_name("native.cpp")
# Rounded as written: no products joined with sums, no other order. Those of the second line leave results as they are.
_FLAGS = ["-O3", "-march=native", "-std=c++17", "-ffp-contract=off"]
_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
_LINKING = ["-shared", "-fPIC", "-pthread"]
_COMPILE_S = 60
_loading = threading.Lock()  # workers that are threads compile once
_POINTERS = ("p_old", "m_old", "v_old", "p", "m", "v", "gradient", "out", "spans", "ratios", "table")
_COUNTS = ("span_count", "each", "period", "m_place", "v_place", "width")
_NUMBERS = ("lr", "decay", "beta1", "beta2", "eps", "correction1", "correction2", "scale")
_FLAGS_OF_STEP = ("adamw", "fresh", "idle", "narrow", "narrow_gradient", "narrow_out", "stream")
_WIDE, _NARROW = torch.float32, torch.bfloat16


class NotCompiled(RuntimeError):
    """There is no compiled code, and nothing is wrong: there is no compiler, or the user wants none."""


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
        self._threads = threads
        self._under_way: set[Step] = set()  # not yet waited for: their memory stays
        self._open()

    def _open(self) -> None:
        self._process, self._pool = os.getpid(), self._library.pool_open(self._threads)
        if not self._pool:
            raise RuntimeError(
                "no thread can be started to step the optimizer: raise the limit of processes (ulimit -u)"
            )
        # Ends the threads once all steps are done: by hand, with this object, or at the end of the program.
        self.close = weakref.finalize(self, _close, self._library, self._pool, self._process)

    def start(self, step: Step) -> Callable[[], None]:
        """Begin a step; call what is returned to wait until it is done."""
        if self._process != os.getpid():  # a forked child has none of the threads
            self._open()
        self._under_way.add(step)
        job = self._library.job_start(self._pool, ctypes.byref(step.args))
        if not job:
            self._under_way.discard(step)
            raise RuntimeError("the optimizer cannot be stepped: its threads have ended, or there is no memory")
        lock = threading.Lock()

        def wait() -> None:
            with lock:
                if step in self._under_way:
                    self._library.job_wait(self._pool, job)
                    self._under_way.discard(step)

        return wait


def _close(library: ctypes.CDLL, pool: int, process: int) -> None:
    if process == os.getpid():
        library.pool_close(pool)


def fits(lines: Mapping[str, Tensor], gradient: Tensor, out: Tensor | None) -> bool:
    """Whether the compiled code steps such lines: master values in fp32, two moments."""
    master, *moments = lines.values()
    kinds = {x.dtype for x in moments}
    given = [gradient.dtype] if out is None else [gradient.dtype, out.dtype]
    return master.dtype == _WIDE and len(moments) == 2 and len(kinds) == 1 and {*kinds, *given} <= {_WIDE, _NARROW}


@functools.cache
def load() -> tuple[ctypes.CDLL, int] | None:
    """The compiled code, and the width of torch's vectors; None where torch's kernel is to step."""
    with _loading:
        try:
            return find()
        except subprocess.TimeoutExpired:
            warnings.warn(
                f"the C++ compiler did not end within {_COMPILE_S} s: torch's kernel steps the optimizer. With "
                f"{SWITCH}=0 nothing is compiled",
                stacklevel=2,
            )
        except Exception:  # `unisono doctor` says which
            pass
    return None


def find(*, keep: bool = True) -> tuple[ctypes.CDLL, int]:
    """The compiled code, from the user's cache or made now (and kept there), and the width of torch's vectors. Raises
    what is in the way: no compiler, no room, a library that cannot be loaded, other bits than torch's."""
    if os.environ.get(SWITCH) == "0":
        raise NotCompiled(f"{SWITCH}=0")
    library = _open(keep=keep)
    for name, result, given in (
        ("pool_open", ctypes.c_void_p, [ctypes.c_int]),
        ("pool_close", None, [ctypes.c_void_p]),
        ("job_start", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
        ("job_wait", None, [ctypes.c_void_p, ctypes.c_void_p]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, given
    for width in (16, 8, 4):
        if all(agrees(library, width, kind) for kind in (ADAM, ADAMW)):
            return library, width
    raise RuntimeError("it does not give the bits of this torch")


def _open(*, keep: bool) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NotCompiled("there is no C++ compiler")
    processor = platform.processor()
    if os.path.exists("/proc/cpuinfo"):  # -march=native differs between machines that have a home in common
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = str(sorted({line for line in lines if line.startswith(("flags", "Features", "model", "CPU p"))}))
    made_of = (SOURCE.read_bytes(), _FLAGS, compiler, platform.libc_ver(), platform.machine(), processor)
    name = f"adam-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    folder = _find_folder(make=keep)
    if folder is not None and _is_mine(folder / name):
        with suppress(OSError):  # what is no library is made anew
            return ctypes.CDLL(str(folder / name))
    with tempfile.TemporaryDirectory(prefix="unisono-", dir=folder) as here:
        made = Path(here) / name
        _compile([compiler, *_FLAGS, *_LINKING, str(SOURCE), "-o", str(made)])
        library = ctypes.CDLL(str(made))
        if folder is not None and keep:
            made.chmod(0o700)
            with made.open("rb") as file:
                os.fsync(file.fileno())  # under its name it is whole, also after a power cut
            os.replace(made, folder / name)
    return library


def _find_folder(*, make: bool) -> Path | None:
    """The user's cache, for code that is run later; None where there is none that only this user can write to."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (cache if cache.is_absolute() else Path.home() / ".cache") / "unisono"
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: nobody knows a home
        return None
    return folder if _is_mine(folder) and os.access(folder, os.W_OK | os.X_OK) else None


def _is_mine(path: Path) -> bool:
    """Whether it is there and nobody else can write to it."""
    with suppress(OSError):
        found = path.stat()
        return found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return False


def _compile(command: list[str]) -> None:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=_COMPILE_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            raise
    if process.returncode:
        lines = [line for line in said.splitlines() if "error" in line] or said.splitlines() or ["nothing was said"]
        raise RuntimeError(f"{command[0]} failed: {lines[0]}")


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
