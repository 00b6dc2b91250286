"""What this host gives to a run: cores, memory, shared memory, huge pages, limits, the folder of runs, engines, the
lab. Each check takes what it looks at as an argument, so that tests can show it a broken host."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
from collections.abc import Callable, Mapping
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
    "check_huge_pages",
    "check_lab",
    "check_locked_memory",
    "check_runs_folder",
    "check_shared_memory",
]

SECTION = "this host"
_SMALL_SHM = 256 << 20
_FEW_DESCRIPTORS, _VERY_FEW = 1024, 128
_LITTLE_ROOM, _LITTLE_MEMORY = 100 << 20, 1 << 30
_NETWORK_FILES = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "9p", "fuse.sshfs")
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_PROGRAMS = {"mpi": "mpirun", "slurm": "srun", "ssh": "ssh"}
_PACKAGES = {"torchrun": "torch", "ray": "ray", "spark": "pyspark"}


def check_cores(cores: int | None = None, memory: int | None = None, free: int | None = None) -> list[Finding]:
    """Usable cores, and free memory."""
    cores = usable_cores() if cores is None else cores
    memory, free = host_bytes() if memory is None else memory, available_bytes() if free is None else free
    text = f"{cores} usable core{'s' * (cores > 1)}; {show_size(free)} of {show_size(memory)} memory are free"
    values = {"cores": cores, "memory_bytes": memory, "free_bytes": free}
    little = "a worker takes some 300 MiB before its model: end something, or start few workers"
    return [judge(SECTION, "cores and memory", text, little if free < _LITTLE_MEMORY else "", values)]


def check_shared_memory(
    folder: Path = Path("/dev/shm"), make: Callable[[], int] = lambda: os.memfd_create("unisono-doctor")
) -> list[Finding]:
    """Memory without a name, in which workers of a host meet; and /dev/shm, which PyTorch's data loaders use."""
    found = []
    try:
        os.close(make())
        found.append(Finding(SECTION, "memfd", "ok", "memory that workers share can be made"))
    except (OSError, AttributeError) as error:
        advice = (
            "workers of one host meet in it: Linux 3.17 or newer, and no filter on memfd_create (seccomp), is needed"
        )
        found.append(Finding(SECTION, "memfd", "bad", f"memfd_create fails: {error}", advice))
    try:
        room = os.statvfs(folder)
    except OSError as error:
        text = f"{folder} is not there ({error.strerror})"
        advice = "a DataLoader with num_workers cannot hand batches over: mount a tmpfs there"
        return [*found, Finding(SECTION, "/dev/shm", "warn", text, advice)]
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text, values = f"{show_size(free)} of {show_size(size)} are free", {"size_bytes": size, "free_bytes": free}
    small = (
        "our own memory does not lie there, but a DataLoader with num_workers puts batches there, and dies where "
        "it is full: docker run --shm-size=1g (or --ipc=host), or mount -o remount,size=1g /dev/shm"
    )
    return [*found, judge(SECTION, "/dev/shm", text, small if free < _SMALL_SHM else "", values)]


def check_huge_pages(pages: HugePages | None = None) -> list[Finding]:
    """Whether workers get huge pages for their own memory, and for what they share."""
    pages = read_huge_pages() if pages is None else pages
    lines = pages.describe()
    text = "; ".join(line.removeprefix("huge pages ") for line in lines if not line.startswith("  "))
    advice = "; ".join(line.strip() for line in lines if line.startswith("  "))
    if not are_wanted():
        return [Finding(SECTION, "huge pages", "ok", f"{text}; UNISONO_HUGE_PAGES=0: they are not asked for")]
    state: State = "warn" if pages.own == "never" or pages.shared == "deny" else "ok"
    return [Finding(SECTION, "huge pages", state, text, advice, {"own": pages.own, "shared": pages.shared})]


def check_descriptors(limits: tuple[int, int] | None = None) -> list[Finding]:
    """How many files a process may have open: connections, memory of other workers, files of data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    endless = resource.RLIM_INFINITY
    text = "without limit" if soft == endless else f"{soft} a process"
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
        text = "nothing keeps it right (NTP, PTP), says the kernel"
        if matters:
            advice = "times in the logs of hosts cannot be compared: run chrony or systemd-timesyncd on each"
            return [Finding(SECTION, "clock", "warn", text, advice)]
        return [Finding(SECTION, "clock", "ok", f"{text}; on one host nothing needs that")]
    return [Finding(SECTION, "clock", "ok", "kept right" if state >= 0 else "the kernel does not say")]


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
        advice = f"it is memory, and gone at the next start: {elsewhere}"
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
    find: Callable[[str], str | None] | None = None,
    env: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """The engines that `unisono run --on` could use here."""
    from unisono.observe.doctor.installed import find_version

    find = find_version if find is None else find
    there: dict[str, str] = {name: path for name, program in _PROGRAMS.items() if (path := which(program))}
    there |= {name: f"{package} {version}" for name, package in _PACKAGES.items() if (version := find(package))}
    found = []
    if "spark" in there and which("java") is None and "JAVA_HOME" not in env:
        advice = "Spark needs Java: apt-get install default-jre-headless"
        found = [Finding(SECTION, "spark", "warn", f"{there['spark']}, and no java", advice)]
    absent = [name for name in (*_PROGRAMS, *_PACKAGES) if name not in there]
    text = ", ".join(f"{name} ({path})" for name, path in there.items()) or "none"
    text += f"; not here: {', '.join(absent)}" if absent else ""
    return [Finding(SECTION, "engines", "ok", text, values={"engines": there}), *found]


def check_lab(find: Callable[[], str] | None = None) -> list[Finding]:
    """Whether `unisono run --hosts 4 --net 100mbit` can make hosts of network namespaces. Tries it."""
    from unisono.launchers.lab.hosts import find_obstacle

    obstacle = (find_obstacle if find is None else find)()
    if obstacle:
        text = f"emulated hosts cannot be network namespaces here: {obstacle}"
        advice = "`unisono run --hosts` works without: the workers' own transport holds bytes back then"
        return [Finding(SECTION, "lab", "warn", text, advice)]
    return [Finding(SECTION, "lab", "ok", "emulated hosts can be network namespaces, with links that tc holds back")]
