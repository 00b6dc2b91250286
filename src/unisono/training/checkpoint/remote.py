"""Folders at an address such as s3://bucket/run, through fsspec: whole objects, read and written with retries.

An object store has no rename and no locks. What it has: an object appears when all of it was sent, and can be asked
for by its name although a listing does not show it yet.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

from unisono.launchers.runtime.faults import before_write
from unisono.training.checkpoint.slices import CHUNK_BYTES

T = TypeVar("T")
_ATTEMPTS = 6  # of each operation; the drivers repeat single requests themselves
_BACKOFF_S = 0.4  # before the second, twice as long before the third, and so on
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # a Path has made one slash of two
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FINAL = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError)


class RemoteError(OSError):
    """An operation at an address failed, and was repeated where that could help; the message names the address."""


class RemotePath:
    """An object or a folder at an address, with what checkpoints use of `pathlib.Path`."""

    def __init__(self, driver: Any, path: str, scheme: str) -> None:
        self._driver, self._path, self._scheme = driver, path.rstrip("/"), scheme

    def __truediv__(self, name: str) -> RemotePath:
        return self if name == "." else RemotePath(self._driver, f"{self._path}/{name}", self._scheme)

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path.lstrip('/')}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._driver, self._path.rpartition("/")[0], self._scheme)

    def relative_to(self, root: RemotePath) -> str:
        return self._path[len(root._path) + 1 :] or "."

    def exists(self) -> bool:
        """Whether the object is there, asked for by its name."""
        return self._find_size() is not None

    def size(self) -> int:
        """The object's bytes; FileNotFoundError if it is not there."""
        if (found := self._find_size()) is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return found

    def _find_size(self) -> int | None:
        def ask() -> int | None:
            self._driver.invalidate_cache()
            try:
                return int(self._driver.info(self._path).get("size") or 0)
            except FileNotFoundError:
                return None

        return self._repeat("looking for", ask)

    def list_names(self) -> list[str]:
        """The names in this folder; none if it does not exist. RemoteError if not even its bucket does."""

        def ask() -> list[str]:
            self._driver.invalidate_cache()
            try:
                found = self._driver.ls(self._path, detail=False)
            except FileNotFoundError:
                bucket = self._path.lstrip("/").partition("/")[0]
                if self._scheme != "memory" and not self._driver.exists(bucket):
                    raise RemoteError(errno.ENOENT, f"{self}: there is no {self._scheme}://{bucket}") from None
                return []
            return [str(path).rstrip("/").rpartition("/")[2] for path in found]

        return self._repeat("listing", ask)

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """The object's bytes, or a range of them; FileNotFoundError if it is not there."""
        found = self._repeat("reading", lambda: self._driver.cat_file(self._path, start=start, end=stop))
        return bytes(found)

    def read_into(self, buffer: Any, start: int) -> None:
        """Fill a buffer from byte `start` on."""
        view = memoryview(buffer).cast("B")
        found = self.read_bytes(start, start + len(view))
        if len(found) != len(view):
            raise ValueError(f"{self.name} is cut short")
        view[:] = found

    def write(self, make_parts: Callable[[], Iterable[Any]]) -> tuple[int, int]:
        """Write an object from buffers, which may have to be made several times; returns its size and CRC-32."""

        def send() -> tuple[int, int]:
            file = self._driver.open(self._path, "wb", autocommit=False)
            try:
                sent = write_chunks(make_parts(), file.write)
                file.close()
                file.commit()
            except BaseException:
                with suppress(Exception):  # what was sent is not to become an object; the error is the one to raise
                    file.discard()
                raise
            return sent

        return self._repeat("writing", send)

    def write_bytes(self, data: bytes) -> None:
        """Write a small object in one request."""
        self._repeat("writing", lambda: self._driver.pipe_file(self._path, data))

    def remove(self) -> None:
        """Remove the object, or the folder with all in it, if it is there."""

        def remove() -> None:
            self._driver.invalidate_cache()
            with suppress(FileNotFoundError):
                self._driver.rm(self._path, recursive=True)

        self._repeat("removing", remove)

    def open(self) -> RemoteFile:
        """The object as a file to read from: only what is asked for is fetched."""
        return RemoteFile(self)

    def _repeat(self, doing: str, call: Callable[[], T]) -> T:
        """Call until it works, at most `_ATTEMPTS` times, unless trying again makes no sense."""
        began, attempt = time.monotonic(), 1
        while True:
            try:
                return call()
            except Exception as error:
                if isinstance(error, RemoteError) or (doing == "reading" and isinstance(error, FileNotFoundError)):
                    raise
                why = self._find_final(error)
                if not why and attempt == _ATTEMPTS:
                    why = f"{attempt} times in {time.monotonic() - began:.0f} s, the last time: {_describe(error)}"
                if why:
                    number = getattr(error, "errno", None) or errno.EIO
                    raise RemoteError(number, f"{doing} {self} failed {why}") from error
            time.sleep(_BACKOFF_S * 2**attempt * random.uniform(0.25, 0.75))
            attempt += 1

    def _find_final(self, error: Exception) -> str:
        """Why it makes no sense to try again, in words; "" if it does."""
        if "Credentials" in type(error).__name__:
            return (
                f"as there are no credentials for {self._scheme}:// here ({_describe(error)}): give every worker the "
                "ones that its driver looks for (for s3://, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)"
            )
        if isinstance(error, FileNotFoundError):
            return f"as its bucket or folder does not exist (any more): {_describe(error)}"
        if isinstance(error, _FINAL) or (isinstance(error, OSError) and error.errno in _FULL):
            return f"for good: {_describe(error)}"
        return ""


def write_chunks(parts: Iterable[Any], write: Callable[[memoryview], object]) -> tuple[int, int]:
    """Write buffers one after the other, some MiB at a time; returns the size and the CRC-32 of all."""
    size = crc = 0
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
            before_write("checkpoint")
            write(chunk)
    return size, crc


class RemoteFile(io.RawIOBase):
    """An object to be read from: each read fetches its bytes."""

    def __init__(self, path: RemotePath) -> None:
        self._remote, self._size, self._at = path, path.size(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    @property
    def size(self) -> int:
        """The object's bytes."""
        return self._size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._size, self._at + len(view))
        if stop <= self._at:
            return 0
        found = self._remote.read_bytes(self._at, stop)
        view[: len(found)] = found
        self._at += len(found)
        return len(found)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


Place = Path | RemotePath


def find_place(path: str | os.PathLike[str] | RemotePath) -> Place:
    """The path; for an address with a scheme a RemotePath (file:// is a path). Nothing is asked of it yet.

    >>> find_place("file:///tmp/run"), str(find_place("memory://run"))
    (PosixPath('/tmp/run'), 'memory://run')
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    if (found := _SCHEME.match(text)) is None:
        return Path(text)
    scheme, rest = found[1].lower(), text[found.end() :].lstrip("/")
    address = f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
    if scheme == "file":
        return Path(unquote(urlparse(address).path))
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{text} is reached through fsspec: pip install 'unisono[remote]'") from error
    try:
        driver, inside = url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        raise ImportError(f"{text}: {error}. pip install 'unisono[remote]' has the driver of s3://") from error
    except ValueError as error:
        raise ValueError(f"{text} has the scheme {scheme}, which fsspec does not know: {error}") from error
    return RemotePath(driver, inside, scheme)
