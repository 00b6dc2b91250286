"""Addresses of files: local paths and patterns, and through fsspec what has a scheme, such as hdfs:// and s3://."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["list_files", "open_file", "read_size"]


def list_files(paths: str | Path | Sequence[str | Path], endings: Sequence[str]) -> list[str]:
    """List the files that the addresses name, in order; those of a pattern or a folder are sorted by name."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [file for one in given for file in _expand(str(one), tuple(endings))]
    if not found:
        raise FileNotFoundError(f"no files at {', '.join(map(str, given)) or 'an empty list of addresses'}")
    return found


def open_file(address: str) -> IO[bytes]:
    """Open the file for reading bytes."""
    if "://" not in address:
        return open(address, "rb")
    system, path = _open_filesystem(address)
    file: IO[bytes] = system.open(path, "rb")
    return file


def read_size(address: str) -> int:
    """How many bytes the file has."""
    if "://" not in address:
        return os.path.getsize(address)
    system, path = _open_filesystem(address)
    return int(system.size(path))


def _expand(address: str, endings: tuple[str, ...]) -> list[str]:
    if "://" in address:
        system, path = _open_filesystem(address)
        scheme = address.split("://", 1)[0]
        if glob.has_magic(path):
            return [f"{scheme}://{p.lstrip('/') if scheme != 'file' else p}" for p in sorted(system.glob(path))]
        if system.isdir(path):
            inside = sorted(p for p in system.ls(path, detail=False) if p.endswith(endings))
            return [f"{scheme}://{p.lstrip('/') if scheme != 'file' else p}" for p in inside]
        if not system.exists(path):
            raise FileNotFoundError(f"no file at {address}")
        return [address]
    if glob.has_magic(address) and not os.path.exists(address):
        return sorted(glob.glob(address))
    if os.path.isdir(address):
        return sorted(os.path.join(address, name) for name in os.listdir(address) if name.endswith(endings))
    if not os.path.exists(address):
        raise FileNotFoundError(f"no file at {os.path.abspath(address)}")
    return [address]


def _open_filesystem(address: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{address} is read through fsspec: pip install 'unisono[parquet]'") from error
    scheme = address.split("://", 1)[0]
    try:
        system, path = url_to_fs(address)
    except ImportError as error:
        raise ImportError(f"{address}: fsspec has no driver for {scheme}:// here: {error}") from error
    return system, path
