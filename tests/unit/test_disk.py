"""The scratch file of the disk tier: contents, alignment, failures, and what it leaves behind (nothing)."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preloaded import Program
from unisono.methods.offload import disk as disk_module
from unisono.methods.offload.disk import (
    ALIGNMENT,
    Disk,
    DiskError,
    Region,
    align,
    free_bytes,
    make_buffer,
)

REQUEST = 1 << 16
SIZES = [1, 511, 4095, 4096, 4097, REQUEST - 1, REQUEST, REQUEST + 1, 3 * REQUEST, 5 * REQUEST + 12345]


def refuse_direct(patch: pytest.MonkeyPatch) -> None:
    """As a file system without direct I/O does."""
    real = fcntl.fcntl

    def refusing(fd: int, command: int, flags: int = 0) -> Any:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, flags)

    patch.setattr(fcntl, "fcntl", refusing)


def small(folder: Path, nbytes: int = 64 * REQUEST) -> Disk:
    return Disk(folder, nbytes, threads=3, request_bytes=REQUEST)


@pytest.fixture(params=["direct", "buffered"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    if request.param == "buffered":
        refuse_direct(monkeypatch)
        with pytest.warns(UserWarning, match="refuses direct I/O"):
            found = small(tmp_path)
        monkeypatch.setattr(disk_module, "_warned", set())
    else:
        found = directly(tmp_path)
    assert found.direct == (request.param == "direct")
    yield found
    found.close()


def directly(folder: Path) -> Disk:
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk_module, "_warn_of_page_cache", lambda _: None)
            found = small(folder)
    except DiskError as error:  # pragma: no cover
        pytest.skip(str(error))
    if not found.direct:  # pragma: no cover
        found.close()
        pytest.skip("this file system refuses direct I/O")
    return found


def noise(nbytes: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=draw)


def contents(found: Disk) -> bytes:
    """The file as another reader sees it."""
    return Path(f"/proc/self/fd/{found._requests.fd}").read_bytes()


def intercept(patch: pytest.MonkeyPatch, kind: str, instead: Callable[..., int]) -> None:
    """`instead` gets the real call and its arguments."""
    name = "preadv" if kind == "read" else "pwritev"
    real = getattr(os, name)
    patch.setattr(os, name, lambda fd, views, at: instead(real, fd, views, at))


def test_blocks_of_every_size_come_back_as_written(disk: Disk) -> None:
    regions = [disk.place(n) for n in SIZES]
    sources = [disk.make_buffer(n).copy_(noise(n, n)) for n in SIZES]
    for handle in [disk.write(*pair) for pair in zip(regions, sources, strict=True)]:
        handle.wait()
    targets = [disk.make_buffer(n) for n in SIZES]
    for handle in [disk.read(*pair) for pair in zip(regions, targets, strict=True)]:
        handle.wait()
    for n, target in zip(SIZES, targets, strict=True):
        assert torch.equal(target, noise(n, n))
    held = contents(disk)
    assert len(held) == disk.nbytes
    for region, n in zip(regions, SIZES, strict=True):
        assert held[region.start : region.start + n] == bytes(noise(n, n).numpy())


def test_parts_at_any_byte_from_any_memory_behave_like_a_byte_array(disk: Disk) -> None:
    size = 3 * REQUEST + 100
    region, expected, draw = disk.place(size), bytearray(size), random.Random(0)
    guard = disk.place(100)
    disk.write(guard, noise(100)).wait()
    for i in range(60):
        start = draw.choice([0, draw.randrange(size), ALIGNMENT * draw.randrange(size // ALIGNMENT)])
        n = draw.choice([size - start, draw.randrange(size - start), min(50, size - start)])
        part, memory = region.slice(start, n), torch.empty(n + 8, dtype=torch.uint8)[3 : 3 + n]
        if i % 2 == 0:
            disk.write(part, memory.copy_(noise(n, i))).wait()
            expected[start : start + n] = bytes(noise(n, i).numpy())
        else:
            disk.read(part, memory).wait()
            assert bytes(memory.numpy()) == bytes(expected[start : start + n])
    assert contents(disk)[region.start : region.start + size] == bytes(expected)
    assert torch.equal(disk.read(guard, torch.empty(100, dtype=torch.uint8)).wait(), noise(100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_tensors_of_any_dtype_keep_their_bits(disk: Disk, dtype: torch.dtype) -> None:
    given = torch.randn(77, 13).to(dtype)
    region = disk.place(given.nbytes)
    disk.write(region, given).wait()
    got = torch.empty_like(given)
    assert disk.read(region, got).wait() is got
    assert torch.equal(got, given)


def test_an_empty_block_is_done_at_once(disk: Disk) -> None:
    region = disk.place(0)
    assert disk.write(region, disk.make_buffer(0)).done()
    assert disk.read(region, disk.make_buffer(0)).wait().numel() == 0


def test_a_read_gives_only_what_it_was_asked_for(disk: Disk) -> None:
    region = disk.place(10_000)
    disk.write(region, noise(10_000)).wait()
    line = disk.make_buffer(10_000).fill_(9)
    disk.read(region, line[:5000]).wait()
    assert torch.equal(line[:5000], noise(10_000)[:5000])
    assert line[5000:].unique().tolist() == [9]


def test_direct_requests_are_aligned_and_none_is_longer_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []

    def note(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        address = torch.frombuffer(views[0], dtype=torch.uint8).data_ptr()
        seen.append((at, address, views[0].nbytes))
        return int(real(fd, views, at))

    disk = directly(tmp_path)
    intercept(monkeypatch, "read", note)
    intercept(monkeypatch, "write", note)
    regions = [disk.place(n) for n in SIZES]
    for region in regions:
        disk.write(region, disk.make_buffer(region.nbytes)).wait()
        disk.read(region, torch.empty(region.nbytes, dtype=torch.uint8)).wait()
    disk.close()
    assert all(value % ALIGNMENT == 0 for request in seen for value in request)
    assert REQUEST <= max(nbytes for *_, nbytes in seen) <= REQUEST + ALIGNMENT


@pytest.mark.parametrize("most", [ALIGNMENT, ALIGNMENT + 904, 3 * ALIGNMENT])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_short_transfer_goes_on_where_it_stopped(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    n = 2 * REQUEST + 777
    calls = 0

    def short(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        nonlocal calls
        calls += 1
        whole = int(real(fd, [views[0][: max(ALIGNMENT, most // ALIGNMENT * ALIGNMENT)]], at))
        return min(whole, most)

    region, line = disk.place(n), disk.make_buffer(n)
    intercept(monkeypatch, kind, short)
    disk.write(region, line.copy_(noise(n))).wait()
    disk.read(region, line.zero_()).wait()
    assert torch.equal(line, noise(n))
    assert contents(disk)[region.start : region.start + n] == bytes(noise(n).numpy())
    assert calls > n // (3 * ALIGNMENT)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_transfer_that_stops_for_good_is_an_error(disk: Disk, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    region = disk.place(REQUEST)
    intercept(monkeypatch, kind, lambda *_: 0)
    move = disk.read if kind == "read" else disk.write
    with pytest.raises(DiskError, match="stopped short"):
        move(region, disk.make_buffer(REQUEST)).wait()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_io_error_comes_out_at_wait_and_leaves_the_rest_usable(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    good, bad = disk.place(3 * REQUEST), disk.place(3 * REQUEST)
    broken = bad.start + REQUEST

    def fail(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        if at <= broken < at + views[0].nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(real(fd, views, at))

    lines = [disk.make_buffer(3 * REQUEST).copy_(noise(3 * REQUEST, i)) for i in range(2)]
    for region, line in zip((good, bad), lines, strict=True):
        disk.write(region, line).wait()
    with monkeypatch.context() as patch:
        intercept(patch, kind, fail)
        move = disk.read if kind == "read" else disk.write
        handles = [move(good, lines[0]), move(bad, lines[1])]
        assert torch.equal(handles[0].wait(), noise(3 * REQUEST, 0))
        for _ in range(2):
            with pytest.raises(DiskError) as found:
                handles[1].wait()
        assert found.value.errno == errno.EIO
        for part in ("reading" if kind == "read" else "writing", str(tmp_path), f"at byte {broken}", "Input/output"):
            assert part in str(found.value)
    assert torch.equal(move(bad, lines[1]).wait(), noise(3 * REQUEST, 1))


def test_a_failed_transfer_ends_only_when_its_memory_is_free(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    region, go_on, begun, failed = disk.place(2 * REQUEST), *(threading.Event() for _ in range(3))

    def fail_or_hang(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        if at == region.start:
            assert begun.wait(30)
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        begun.set()
        assert go_on.wait(30)
        return int(real(fd, views, at))

    intercept(monkeypatch, "write", fail_or_hang)
    handle = disk.write(region, disk.make_buffer(2 * REQUEST))
    assert failed.wait(30)
    time.sleep(0.05)
    assert not handle.done()
    go_on.set()
    with pytest.raises(DiskError):
        handle.wait()


def test_a_full_disk_during_a_write_says_what_to_do(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    intercept(monkeypatch, "write", full)
    with pytest.raises(DiskError, match="No space left on device; free some space") as found:
        disk.write(disk.place(10), disk.make_buffer(10)).wait()
    assert found.value.errno == errno.ENOSPC


def test_a_buffered_write_that_does_not_reach_the_disk_fails_with_all_that_were_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    with pytest.warns(UserWarning, match="refuses direct"):
        disk = small(tmp_path)
    regions = [disk.place(100) for _ in range(2)]
    both = threading.Barrier(2)
    failures = iter([OSError(errno.EIO, os.strerror(errno.EIO))])

    def together(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        both.wait(30)
        return int(real(fd, views, at))

    def once(_: int) -> None:
        for error in failures:
            raise error

    with monkeypatch.context() as patch:
        intercept(patch, "write", together)
        patch.setattr(os, "fdatasync", once)  # the system reports a lost write to one caller only
        for handle in [disk.write(region, disk.make_buffer(100)) for region in regions]:
            with pytest.raises(DiskError, match=r"Input/output error|under way"):
                handle.wait()
    disk.write(regions[0], disk.make_buffer(100)).wait()
    disk.close()


def test_counters_hold_what_was_moved(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.moved == {"read": 0, "write": 0}
    regions = [disk.place(n) for n in SIZES]
    for region in regions:
        disk.write(region, disk.make_buffer(region.nbytes)).wait()
    disk.read(regions[-1], disk.make_buffer(SIZES[-1])).wait()
    disk.read(regions[-1].slice(10, 20), disk.make_buffer(20)).wait()
    assert disk.moved == {"read": SIZES[-1] + 20, "write": sum(SIZES)}
    intercept(monkeypatch, "write", lambda *_: 0)
    with pytest.raises(DiskError):
        disk.write(regions[0], disk.make_buffer(1)).wait()
    assert disk.moved["write"] == sum(SIZES)


def test_the_buffered_fallback_is_told_once_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    with pytest.warns(UserWarning, match="page cache"):
        small(tmp_path).close()
    small(tmp_path).close()  # a second warning would be an error here


def test_slots_lie_apart_on_borders_and_end_with_the_room(tmp_path: Path) -> None:
    disk = small(tmp_path, nbytes=sum(align(n) for n in SIZES))
    regions = [disk.place(n) for n in SIZES]
    ends = [region.start + region.nbytes for region in regions]
    assert all(region.start % ALIGNMENT == 0 for region in regions)
    assert all(end <= region.start for end, region in zip(ends, regions[1:], strict=False))
    with pytest.raises(ValueError, match=f"no room for 1 bytes: {disk.nbytes} of the {disk.nbytes}"):
        disk.place(1)
    assert disk.place(0).nbytes == 0
    disk.close()


def test_buffers_begin_on_a_page_and_outlive_the_disk(disk: Disk) -> None:
    lines = [disk.make_buffer(n) for n in (*SIZES, 3 << 20)]
    disk.close()
    for line in lines:
        assert line.data_ptr() % ALIGNMENT == 0
        assert line.fill_(5).sum() == 5 * line.numel()


def test_what_cannot_be_done_is_refused_at_the_call(disk: Disk, tmp_path: Path) -> None:
    region = disk.place(100)
    with pytest.raises(ValueError, match="a tensor of 101 bytes was given for a region of 100"):
        disk.write(region, disk.make_buffer(101))
    with pytest.raises(ValueError, match="strided"):
        disk.read(region, torch.empty(10, 10, dtype=torch.uint8).t()[:, :5])
    with pytest.raises(ValueError, match="on meta"):
        disk.read(region, torch.empty(10, dtype=torch.uint8, device="meta"))
    with pytest.raises(ValueError, match="outside this scratch file"):
        disk.read(Region(disk.nbytes, 10), disk.make_buffer(10))
    with pytest.raises(ValueError, match="no slice of 50 bytes at 60"):
        region.slice(60, 50)
    for bad in ({"nbytes": -1}, {"threads": 0}, {"request_bytes": 100}):
        with pytest.raises(ValueError, match="expected at least"):
            Disk(tmp_path, **{"nbytes": 10, **bad})
    with pytest.raises(ValueError, match="is not a folder"):
        Disk(tmp_path / "nowhere", 10)
    disk.close()
    with pytest.raises(RuntimeError, match="closed"):
        disk.read(region, disk.make_buffer(100))


def test_another_process_is_told_to_create_its_own(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    region = disk.place(10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="create one in each process"):
            disk.read(region, disk.make_buffer(10))


def test_too_little_space_is_said_at_creation_with_the_numbers(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    with pytest.raises(DiskError) as found:
        Disk(tmp_path, 2 * free)
    assert found.value.errno == errno.ENOSPC
    assert f"{align(2 * free)} bytes" in str(found.value)
    assert f"{2 * free / 2**30:.2f} GiB" in str(found.value)
    assert "are free there" in str(found.value)
    assert os.listdir(tmp_path) == []


def test_a_small_real_file_system_that_is_full_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        with pytest.raises(DiskError, match=r"No space left on device; 0\.00 GiB \(1048576 bytes\) are free"):
            Disk(tmp_path, 2 << 20)
        assert free_bytes(tmp_path) == 1 << 20
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(("code", "told"), [(errno.ENOSPC, "are free there"), (errno.EFBIG, "File too large")])
def test_space_that_others_took_meanwhile_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, told: str
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskError, match=told) as found:
        Disk(tmp_path, 1 << 20)
    assert found.value.errno == code
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("unnamed", [True, False])
def test_no_name_stands_in_the_folder_and_the_space_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    real = os.open

    def without_tmpfile(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode, **rest)

    if not unnamed:
        monkeypatch.setattr(os, "open", without_tmpfile)
    disk = small(tmp_path)
    assert os.listdir(tmp_path) == []
    found = os.fstat(disk._requests.fd)
    assert (found.st_nlink, found.st_size) == (0, disk.nbytes)
    assert found.st_blocks * 512 >= disk.nbytes
    disk.close()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskError, match=f"{tmp_path}: Permission denied"):
        Disk(tmp_path, 10)


def test_a_killed_process_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    program = """
import sys
from unisono.methods.offload.disk import Disk
disk = Disk(sys.argv[1], 4 << 20)
region, line = disk.place(4 << 20), disk.make_buffer(4 << 20)
disk.write(region, line).wait()
print("written", flush=True)
while True:
    disk.write(region, line).wait()
"""
    script = tmp_path.with_suffix(".py")
    script.write_text(program)
    child = Program(script, tmp_path, env=os.environ)
    try:
        assert child.stdout.readline() == "written\n"
        assert os.listdir(tmp_path) == []
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_close_drops_what_is_queued_and_tells_who_waits(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    regions, go_on, begun = [disk.place(10) for _ in range(5)], threading.Event(), threading.Semaphore(0)

    def hang(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        begun.release()
        assert go_on.wait(30)
        return int(real(fd, views, at))

    intercept(monkeypatch, "read", hang)
    handles = [disk.read(region, disk.make_buffer(10)) for region in regions]
    for _ in range(3):  # as many as there are threads
        assert begun.acquire(timeout=30)
    closing = threading.Thread(target=disk.close)
    closing.start()
    for handle in handles[3:]:
        with pytest.raises(RuntimeError, match="closed before"):
            handle.wait()
    go_on.set()
    closing.join(30)
    for handle in handles[:3]:
        assert handle.wait().numel() == 10


@pytest.mark.parametrize("by", ["close", "collection"])
def test_the_space_is_given_back(tmp_path: Path, by: str) -> None:
    disk = small(tmp_path)
    disk.write(disk.place(10), disk.make_buffer(10)).wait()
    fd, threads = disk._requests.fd, disk._requests._threads
    if by == "close":
        disk.close()
        disk.close()
    del disk
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_interrupted_wait_can_be_taken_up_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    region, go_on = disk.place(100), threading.Event()
    disk.write(region, noise(100)).wait()

    def hang(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        assert go_on.wait(30)
        return int(real(fd, views, at))

    intercept(monkeypatch, "read", hang)
    handle = disk.read(region, disk.make_buffer(100))
    main = threading.get_ident()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    timer.join()
    go_on.set()
    assert torch.equal(handle.wait(), noise(100))


def test_free_space_is_that_of_the_folder(tmp_path: Path) -> None:
    assert abs(free_bytes(tmp_path) - shutil.disk_usage(tmp_path).free) < 1 << 30


def test_a_buffer_is_zero_and_of_the_size_asked_for() -> None:
    for n in SIZES:
        line = make_buffer(n)
        assert line.numel() == n
        assert not line.any()
