"""Huge pages, of 2 MiB instead of 4 KiB: whether this kernel gives them, and memory of several processes on them.

A training step passes over much memory once, so each page costs it a walk through tables, in a virtual machine two.
The C library asks for huge pages for its own memory (`glibc.malloc.hugetlb`, see launchers/processes.py).

Also which pages of a private mapping this process has copies of its own of, as it wrote to them: all others show the
file, whoever changes it. Linux says which are which, by 8 bytes a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "HUGE",
    "VARIABLE",
    "HugePages",
    "advise",
    "are_wanted",
    "drop_copied",
    "fill_with_huge_pages",
    "find_copied",
    "map_shared",
    "read_huge_pages",
]

VARIABLE = "UNISONO_HUGE_PAGES"  # "0": ask for none
HUGE = 2 << 20  # bytes of a huge page, where the kernel does not say
_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")
_MAP_FIXED, _MAP_NORESERVE, _MADV_COLLAPSE = 0x10, 0x4000, 25  # of Linux; Python has no names for these
_AT_A_TIME = 64 << 20  # bytes: where the kernel finds no huge page, it is not asked for all the others
_LIBC = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HugePages(NamedTuple):
    """What the kernel is set to, "" where it does not say.

    own: for a process's own memory: "always", "madvise" (who asks for them) or "never".
    shared: for memory of several processes: these, "within_size", "advise" (who asks for them) or "deny".
    """

    own: str
    shared: str

    def describe(self) -> list[str]:
        """A line for each kind of memory, and what root could change."""
        if not self.own:
            return ["huge pages: this system does not say whether it has any"]
        lines = [f"huge pages for a process's own memory: {self.own}" + _ASKED.get(self.own, "")]
        if self.own == "never":
            lines.append(_hint("enabled", "madvise", "a step that is bound by memory gains some 10 to 15%"))
        lines.append(f"huge pages for memory that workers share: {self.shared}" + _ASKED.get(self.shared, ""))
        if self.shared == "never":
            lines.append("  shared memory is put on huge pages once, when it is made, as far as free ones are found")
            lines.append(_hint("shmem_enabled", "advise", "it then gets them at any time"))
        elif self.shared == "deny":
            lines.append(_hint("shmem_enabled", "advise", "an exchange inside a host gains some 10 to 15%"))
        return lines


_ASKED = {"madvise": " (workers ask for them)", "advise": " (it asks for them)"}


def _hint(file: str, value: str, gain: str) -> str:
    return f"  as root, `echo {value} > {_FOLDER / file}` changes that: {gain}"


def read_huge_pages(folder: Path = _FOLDER) -> HugePages:
    """The kernel's settings.

    >>> read_huge_pages().own in ("always", "madvise", "never", "")
    True
    """
    return HugePages(_read_choice(folder / "enabled"), _read_choice(folder / "shmem_enabled"))


def _read_choice(file: Path) -> str:
    """Which word of the file is in brackets."""
    try:
        found = re.search(r"\[(\w+)\]", file.read_text(encoding="ascii"))
    except OSError:
        return ""
    return found[1] if found else ""


def map_shared(fd: int, nbytes: int, *, private: bool = False) -> Any:
    """The memory behind `fd` as a buffer, mapped as long as someone holds that; huge pages fit into it.

    It holds no descriptor, as Python's own mmap would: a large model has many mappings. `private`: what is written to
    it stays in this mapping (see `copied_pages`).
    """
    room = nbytes + HUGE
    start = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-start // HUGE) * HUGE
    end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    _map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind | _MAP_FIXED, fd)
    for low, high in ((start, address), (end, start + room)):
        if high - low >= mmap.PAGESIZE:
            _LIBC.munmap(low, high - low)
    if are_wanted():
        advise(address, nbytes, mmap.MADV_HUGEPAGE)  # a kernel without them says so, and nothing is lost
    made = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(made, _LIBC.munmap, address, nbytes).atexit = False  # threads may use it to the end
    return made


def advise(address: int, nbytes: int, how: int) -> bool:
    """Tell the kernel about memory (`man 2 madvise`); whether it took the advice."""
    return bool(_LIBC.madvise(address, nbytes, how) == 0)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found: int = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {nbytes} bytes of shared memory cannot be mapped")
    return found


def fill_with_huge_pages(address: int, nbytes: int) -> int:
    """Put memory of `map_shared` on huge pages now, as far as free ones are found; returns the bytes that are.

    For who is about to fill all of it: it is not empty any more afterwards. Only where the kernel is set to give no
    huge pages when shared memory is first touched. The call is made for that: it does not depend on the setting.
    """
    if not are_wanted() or read_huge_pages().shared != "never":
        return 0
    done, whole = 0, nbytes // HUGE * HUGE
    while done < whole:
        some = min(_AT_A_TIME, whole - done)
        if not advise(address + done, some, _MADV_COLLAPSE):
            break
        done += some
    return done


def are_wanted() -> bool:
    """Whether the user has not said otherwise."""
    return os.environ.get(VARIABLE) != "0"


# Pages that were written to ------------------------------------------------------------------------------------------


_TABLE = "/proc/self/pagemap"
_FLAGS = 61  # the lowest of three bits of an entry: a page of a file (1), swapped out (2), in memory (4)


def find_copied(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Where copies begin and end, in bytes from `address`, the beginning of a page; None: the kernel does not say."""
    import numpy as np

    first, count = address // mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE)
    try:
        with open(_TABLE, "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), 8 * count, 8 * first)
    except OSError:
        return None
    if len(raw) < 8 * count:
        return None
    flags = np.frombuffer(raw, np.uint64) >> np.uint64(_FLAGS)
    copied = (flags > 1) & (flags % 2 == 0)
    if not copied.any():
        return []
    edges = np.flatnonzero(np.diff(copied, prepend=False, append=False)).reshape(-1, 2)
    return [(int(a) * mmap.PAGESIZE, int(b) * mmap.PAGESIZE) for a, b in edges]


def drop_copied(address: int, nbytes: int) -> None:
    """Let go of all copies: the pages show the file again."""
    advise(address, nbytes, mmap.MADV_DONTNEED)
