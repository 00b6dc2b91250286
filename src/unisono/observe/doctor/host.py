"""What is installed here, and what this host gives to a run: cores, memory, shared memory, huge pages, limits, the
folder of runs, engines, the lab. Each check takes what it looks at as an argument, so that tests can show it a broken
host."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

from unisono.launchers.runtime.huge_pages import HugePages, are_wanted, read_huge_pages
from unisono.launchers.runtime.machine import available_bytes, host_bytes, usable_cores
from unisono.launchers.runtime.run_folder import find_runs_folder
from unisono.observe.doctor.findings import Finding, State, judge
from unisono.units import show_size

__all__ = [
    "check_clock",
    "check_cores",
    "check_descriptors",
    "check_engines",
    "check_extras",
    "check_huge_pages",
    "check_lab",
    "check_locked_memory",
    "check_package",
    "check_python",
    "check_required",
    "check_runs_folder",
    "check_shared_memory",
    "check_system",
    "find_version",
    "read_requirements",
]

SECTION, INSTALLED = "this host", "installed"
_SMALL_SHM = 256 << 20
_FEW_DESCRIPTORS, _VERY_FEW = 1024, 128
_LITTLE_ROOM, _LITTLE_MEMORY = 100 << 20, 1 << 30
_NETWORK_FILES = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "9p", "fuse.sshfs")
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_PROGRAMS = {"mpi": "mpirun", "slurm": "srun", "ssh": "ssh"}
_PACKAGES = {"torchrun": "torch", "ray": "ray", "spark": "pyspark"}
PYTHONS = ((3, 10), (3, 14))  # the oldest and the newest with which the tests run
TORCHES = ((2, 11), (2, 13))
_DEVELOPERS = ("dev", "docs", "all")  # extras that are made of others, or of tools
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9A-Za-z.]*)")

_SERVES_AS_WELL = {"xgboost-cpu": "xgboost"}

FindVersion = Callable[[str], "str | None"]


# What is installed ----------------------------------------------------------------------------------------------------


def find_version(name: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_requirements() -> list[str]:
    """What this package says it needs, with the extras; empty where it is not installed but found by a path."""
    try:
        return metadata.requires("unisono") or []
    except metadata.PackageNotFoundError:
        return []


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> list[Finding]:
    """Whether the tests run with this Python."""
    text = f"{platform.python_implementation()} {_show(version)} ({sys.executable})"
    return [_compare("python", text, _show(version), PYTHONS, "install a newer Python")]


def check_system(
    system: str = sys.platform, release: str = platform.release(), machine: str = platform.machine()
) -> list[Finding]:
    """Whether this was ever run on such a system: Linux on x86-64 is what the tests run on."""
    text, advice = f"{system} {release} on {machine}", ""
    if system != "linux":
        advice = "never run there; threads (un.run_threads) and local workers that send messages should do"
    elif "microsoft" in release.lower():
        text = f"WSL: {text}"
        advice = (
            "never run there; other hosts reach workers only with networkingMode=mirrored in .wslconfig, and memory is "
            "what .wslconfig gives"
        )
    elif machine != "x86_64":
        advice = "never run on such a processor: please report what does not work"
    return [judge(INSTALLED, "system", text, advice, {"system": system, "release": release, "machine": machine})]


def check_package(version: str, folder: Path, find: FindVersion = find_version) -> list[Finding]:
    """This package, and whether what is imported is what was installed."""
    installed = find("unisono")
    text, values = f"{version} ({folder})", {"version": version, "folder": str(folder)}
    advice = ""
    if installed is None:
        advice = "found by its path, not installed: torch does not know the backend `unisono` then; pip install -e ."
    elif installed != version:
        advice = (
            f"pip knows version {installed}: another copy is in the way (PYTHONPATH), or run pip install -e . again"
        )
    return [judge(INSTALLED, "unisono", text, advice, values)]


def check_required(find: FindVersion = find_version) -> list[Finding]:
    """torch, numpy and rich, without which nothing runs."""
    found = []
    for name in ("torch", "numpy", "rich"):
        version = find(name)
        if version is None:
            found.append(Finding(INSTALLED, name, "bad", "not installed", f"pip install {name}"))
        elif name == "torch":
            found.append(_compare(name, version, version, TORCHES, "pip install --upgrade 'torch>=2.11'"))
        else:
            found.append(Finding(INSTALLED, name, "ok", version, values={"version": version}))
    return found


def _compare(name: str, text: str, version: str, tested: tuple[tuple[int, int], ...], remedy: str) -> Finding:
    """Whether a version is among those that the tests run with: an older one is bad, a newer one a warning."""
    oldest, newest = tested
    number, values = _read(version)[:2], {"version": version}
    known = f"the tests run with {_show(oldest)} to {_show(newest)}"
    if number < oldest:
        return Finding(INSTALLED, name, "bad", text, f"{known}: {remedy}", values)
    return judge(INSTALLED, name, text, f"newer than the tested versions: {known}" if number > newest else "", values)


# Extras ---------------------------------------------------------------------------------------------------------------


def check_extras(requirements: Iterable[str] | None = None, find: FindVersion = find_version) -> list[Finding]:
    """A line for each extra that is there, one for all others; what is too old or half there is a warning."""
    found, absent = [], []
    for extra, needed in _sort_by_extra(read_requirements() if requirements is None else requirements).items():
        versions = {name: find(name) or find(_SERVES_AS_WELL.get(name, name)) for name, _ in needed}
        missing = [name for name, version in versions.items() if version is None]
        wrong = [
            f"{name} {versions[name]}, needed {bounds}" for name, bounds in needed if _is_wrong(versions[name], bounds)
        ]
        if len(missing) == len(versions):
            absent.append(extra)
            continue
        text = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
        advice = "; ".join([*wrong, *(f"{name} is missing" for name in missing if wrong)])
        if wrong:
            found.append(Finding(INSTALLED, f"[{extra}]", "warn", text, f"{advice}: pip install 'unisono[{extra}]'"))
        elif missing:  # a part of it may be there for other reasons
            absent.append(f"{extra} (without {', '.join(missing)})")
        else:
            found.append(Finding(INSTALLED, f"[{extra}]", "ok", text, values={"versions": versions}))
    if absent:
        text = f"not installed: {', '.join(absent)}"
        found.append(Finding(INSTALLED, "other extras", "ok", text, "to add one: pip install 'unisono[NAME]'"))
    return found


def _sort_by_extra(requirements: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Names and bounds by extra.

    >>> _sort_by_extra(["numpy", 'ray[data]>=2.40; extra == "ray"'])
    {'ray': [('ray', '>=2.40')]}
    """
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for text in requirements:
        match = _REQUIREMENT.match(text)
        if match is not None and match[3] and match[3] not in _DEVELOPERS:
            found[match[3]].append((match[1], match[2].strip(" ()")))
    return dict(found)


def _is_wrong(version: str | None, bounds: str) -> bool:
    """Whether a version is outside of bounds such as ">=2.40,<3".

    >>> _is_wrong("2.39.1", ">=2.40"), _is_wrong("2.40", ">=2.40"), _is_wrong("3.0", "<3")
    (True, False, True)
    """
    if version is None:
        return False
    mine = _read(version)
    for sign, text in _BOUND.findall(bounds):
        other = _read(text)
        length = max(len(mine), len(other))
        a, b = mine + (0,) * (length - len(mine)), other + (0,) * (length - len(other))
        held = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}
        if not held[sign]:
            return True
    return False


def _read(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with.

    >>> _read("2.13.0+cpu"), _read("2.14.0a0")
    ((2, 13, 0), (2, 14, 0))
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _show(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# What the host gives --------------------------------------------------------------------------------------------------


def check_cores(cores: int | None = None, memory: int | None = None, free: int | None = None) -> list[Finding]:
    """Usable cores, and free memory."""
    cores = usable_cores() if cores is None else cores
    memory, free = host_bytes() if memory is None else memory, available_bytes() if free is None else free
    text = f"{cores} usable core{'s' * (cores > 1)}; {show_size(free)} of {show_size(memory)} memory are free"
    values = {"cores": cores, "memory_bytes": memory, "free_bytes": free}
    little = "a worker uses about 300 MiB before its model: close other programs, or start fewer workers"
    return [judge(SECTION, "cores and memory", text, little if free < _LITTLE_MEMORY else "", values)]


def check_shared_memory(
    folder: Path = Path("/dev/shm"), make: Callable[[], int] = lambda: os.memfd_create("unisono-doctor")
) -> list[Finding]:
    """Memory without a name, in which workers of a host meet; and /dev/shm, which PyTorch's data loaders use."""
    found = []
    try:
        os.close(make())
        found.append(Finding(SECTION, "memfd", "ok", "memory that workers share can be created"))
    except (OSError, AttributeError) as error:
        advice = "workers of one host share it: use Linux 3.17 or newer, without a seccomp filter on memfd_create"
        found.append(Finding(SECTION, "memfd", "bad", f"memfd_create fails: {error}", advice))
    try:
        room = os.statvfs(folder)
    except OSError as error:
        text = f"{folder} is missing ({error.strerror})"
        advice = "a DataLoader with num_workers cannot hand batches over: mount a tmpfs there"
        return [*found, Finding(SECTION, "/dev/shm", "warn", text, advice)]
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text, values = f"{show_size(free)} of {show_size(size)} are free", {"size_bytes": size, "free_bytes": free}
    small = (
        "Unisono does not use it, but a DataLoader with num_workers puts batches there and dies when it is full: "
        "docker run --shm-size=1g (or --ipc=host), or mount -o remount,size=1g /dev/shm"
    )
    return [*found, judge(SECTION, "/dev/shm", text, small if free < _SMALL_SHM else "", values)]


def check_huge_pages(pages: HugePages | None = None) -> list[Finding]:
    """Whether workers get huge pages for their own memory, and for what they share."""
    pages = read_huge_pages() if pages is None else pages
    lines = pages.describe()
    text = "; ".join(line.removeprefix("huge pages ") for line in lines if not line.startswith("  "))
    advice = "; ".join(line.strip() for line in lines if line.startswith("  "))
    if not are_wanted():
        return [Finding(SECTION, "huge pages", "ok", f"{text}; UNISONO_HUGE_PAGES=0: they are not requested")]
    state: State = "warn" if pages.own == "never" or pages.shared == "deny" else "ok"
    return [Finding(SECTION, "huge pages", state, text, advice, {"own": pages.own, "shared": pages.shared})]


def check_descriptors(limits: tuple[int, int] | None = None) -> list[Finding]:
    """How many files a process may have open: connections, memory of other workers, files of data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    endless = resource.RLIM_INFINITY
    text = "without limit" if soft == endless else f"{soft} per process"
    advice = f"`ulimit -n {4096 if hard == endless else min(hard, 4096)}` before a run"
    values = {"soft": soft, "hard": hard}
    if soft != endless and soft < _VERY_FEW:
        return [Finding(SECTION, "open files", "bad", text, f"too few for a run: {advice}", values)]
    few = f"enough for a few workers; with many, or many files of data: {advice}"
    return [judge(SECTION, "open files", text, few if soft != endless and soft < _FEW_DESCRIPTORS else "", values)]


def check_locked_memory(limits: tuple[int, int] | None = None, infiniband: Path | None = None) -> list[Finding]:
    """Memory that may be locked: InfiniBand needs it, nothing else of ours does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK) if limits is None else limits
    folder = Path("/sys/class/infiniband") if infiniband is None else infiniband
    has_cards = folder.is_dir() and any(folder.iterdir())
    text = "without limit" if soft == resource.RLIM_INFINITY else show_size(soft)
    short = "this host has InfiniBand, for which NCCL locks memory: `ulimit -l unlimited` (limits.conf: memlock)"
    advice = short if has_cards and soft != resource.RLIM_INFINITY else ""
    return [judge(SECTION, "locked memory", text, advice, {"soft": soft})]


def check_clock(read: Callable[[], int] | None = None, *, matters: bool = False) -> list[Finding]:
    """Whether something (NTP, PTP) keeps this host's clock right; between hosts that matters."""
    state = _read_clock_state() if read is None else read()
    if state == _UNSYNCHRONISED:
        text = "not synchronised (NTP, PTP), according to the kernel"
        if matters:
            advice = "times in the logs of hosts cannot be compared: run chrony or systemd-timesyncd on each"
            return [Finding(SECTION, "clock", "warn", text, advice)]
        return [Finding(SECTION, "clock", "ok", f"{text}; one host does not need that")]
    return [Finding(SECTION, "clock", "ok", "synchronised" if state >= 0 else "the kernel does not say")]


def _read_clock_state() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return -1
    return int(libc.adjtimex(ctypes.create_string_buffer(512)))  # of zeros: it is asked, not set


# The folder of runs ---------------------------------------------------------------------------------------------------


def check_runs_folder(folder: Path | None = None, mounts: str | None = None) -> list[Finding]:
    """Where runs are recorded: can it be written to, is there room, and is it a disk of this host?"""
    folder = find_runs_folder() if folder is None else folder
    name = "folder of runs"
    if folder is None:
        return [Finding(SECTION, name, "ok", "runs are not recorded (UNISONO_RUNS=off)")]
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    kind = _find_kind(there, Path("/proc/mounts").read_text(encoding="utf-8") if mounts is None else mounts)
    room = os.statvfs(there)
    free = room.f_bavail * room.f_frsize
    text, values = f"{folder} ({kind or 'unknown'}, {show_size(free)} free)", {"file_system": kind, "free_bytes": free}
    elsewhere = "set UNISONO_RUNS to another folder, or to off"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return [Finding(SECTION, name, "bad", text, f"{there} cannot be written to: {elsewhere}", values)]
    advice = ""
    if free < _LITTLE_ROOM:
        advice = f"the disk is nearly full: {elsewhere}"
    elif kind.startswith(_NETWORK_FILES):
        advice = f"a record is written twice a second, over the network there: {elsewhere} on a disk of this host"
    elif kind == "tmpfs":
        advice = f"it is in memory, and lost at the next boot: {elsewhere}"
    return [judge(SECTION, name, text, advice, values)]


def _find_kind(path: Path, mounts: str) -> str:
    """The file system that a path lies on, by the longest mount above it; the last of those that are the same."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[1])
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


# Engines, the lab -----------------------------------------------------------------------------------------------------


def check_engines(
    which: Callable[[str], str | None] = shutil.which,
    find: FindVersion = find_version,
    env: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """The engines that `unisono run --on` could use here."""
    there: dict[str, str] = {name: path for name, program in _PROGRAMS.items() if (path := which(program))}
    there |= {name: f"{package} {version}" for name, package in _PACKAGES.items() if (version := find(package))}
    found = []
    if "spark" in there and which("java") is None and "JAVA_HOME" not in env:
        advice = "Spark needs Java: apt-get install default-jre-headless"
        found = [Finding(SECTION, "spark", "warn", f"{there['spark']}, and no java", advice)]
    absent = [name for name in (*_PROGRAMS, *_PACKAGES) if name not in there]
    text = ", ".join(f"{name} ({path})" for name, path in there.items()) or "none"
    text += f"; missing: {', '.join(absent)}" if absent else ""
    return [Finding(SECTION, "engines", "ok", text, values={"engines": there}), *found]


def check_lab(find: Callable[[], str] | None = None) -> list[Finding]:
    """Whether `unisono run --hosts 4 --net 100mbit` can make hosts of network namespaces. Tries it."""
    from unisono.launchers.lab.hosts import find_obstacle

    obstacle = (find_obstacle if find is None else find)()
    if obstacle:
        text = f"emulated hosts cannot be network namespaces here: {obstacle}"
        advice = "`unisono run --hosts` still works: the workers' own transport throttles the links"
        return [Finding(SECTION, "lab", "warn", text, advice)]
    return [Finding(SECTION, "lab", "ok", "emulated hosts can be network namespaces, with links throttled by tc")]
