"""Paths of this machine, told from addresses that only look like them."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["local_path"]


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path; ValueError for an address with a scheme, which would name a folder `s3:` below the working directory.

    >>> local_path("s3://bucket/run")
    Traceback (most recent call last):
        ...
    ValueError: s3://bucket/run has the scheme s3, which is not supported here: expected a path on a disk that all \
workers see; a bucket that is mounted as a folder has one
    """
    text = os.fspath(path)
    if (found := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", text)) is not None:  # a Path has made one slash of two
        raise ValueError(
            f"{text} has the scheme {found[1]}, which is not supported here: expected a path on a disk that all "
            "workers see; a bucket that is mounted as a folder has one"
        )
    return Path(text)
