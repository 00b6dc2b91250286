"""Huge pages: what the kernel says, and memory in which they fit."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch

from unisono.launchers import forks, processes
from unisono.launchers.runtime.huge_pages import HUGE, HugePages, fill_with_huge_pages, map_shared, read_huge_pages
from unisono.world.transports.mapped import MappedMemory


def test_the_kernels_choice_is_read(tmp_path: Path) -> None:
    assert read_huge_pages(tmp_path) == ("", "")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    assert read_huge_pages(tmp_path) == ("madvise", "never")


def test_the_hint_names_what_root_could_change() -> None:
    def hints(own: str, shared: str) -> list[str]:
        return [line.partition("`")[2].partition("`")[0] for line in HugePages(own, shared).describe() if "`" in line]

    folder = "/sys/kernel/mm/transparent_hugepage"
    assert hints("madvise", "advise") == []
    assert hints("never", "advise") == [f"echo madvise > {folder}/enabled"]
    assert hints("always", "never") == [f"echo advise > {folder}/shmem_enabled"]
    assert hints("always", "deny") == [f"echo advise > {folder}/shmem_enabled"]
    assert hints("", "") == []


def test_mapped_memory_begins_where_a_huge_page_can_and_goes_with_its_last_user() -> None:
    fd, nbytes = os.memfd_create("test"), HUGE + 5000
    os.ftruncate(fd, nbytes)
    first, second = map_shared(fd, nbytes), map_shared(fd, nbytes)
    os.close(fd)
    address = ctypes.addressof(first)
    assert address % HUGE == 0
    line = torch.frombuffer(first, dtype=torch.uint8)
    line.fill_(7)
    assert torch.frombuffer(second, dtype=torch.uint8).eq(7).all()
    assert fill_with_huge_pages(address, nbytes) in (0, HUGE)  # as far as the kernel has some
    assert line.eq(7).all()
    assert f"\n{address:x}-" in "\n" + Path("/proc/self/maps").read_text()
    del first, line
    gc.collect()
    assert f"\n{address:x}-" not in "\n" + Path("/proc/self/maps").read_text()


def test_large_memory_of_ranks_is_mapped_so() -> None:
    def alone(item: bytes) -> list[bytes]:
        return [item]

    for huge in (False, True):
        memory = MappedMemory(HUGE + 100, 0, alone, huge=huge)
        memory.prepare(0)
        assert memory.mine.numel() == HUGE + 100
        assert memory.mine.eq(0).all()
        assert not huge or memory.address % HUGE == 0


def test_memory_that_cannot_be_mapped_is_an_error_that_says_so() -> None:
    with pytest.raises(OSError, match="bytes of shared memory cannot be mapped"):
        map_shared(-1, HUGE)


@pytest.mark.parametrize("fresh", [True, False])
def test_workers_ask_for_huge_pages_unless_the_user_has_said_otherwise(
    fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment of a fresh worker, and in that of a fork server, whose workers have its C library."""

    def tunables() -> str | None:
        if fresh:
            made = processes.worker_environment(0, 2, address=("127.0.0.1", 1), run_id="x")
        else:
            made = forks.server_environment(os.environ)
        return made.get("GLIBC_TUNABLES")

    monkeypatch.delenv("UNISONO_HUGE_PAGES", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert tunables() == "glibc.malloc.hugetlb=1"
    for given, made in (
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.hugetlb=2:glibc.malloc.check=1", "glibc.malloc.hugetlb=2:glibc.malloc.check=1"),
    ):
        monkeypatch.setenv("GLIBC_TUNABLES", given)
        assert tunables() == made
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setenv("UNISONO_HUGE_PAGES", "0")
    assert tunables() is None
