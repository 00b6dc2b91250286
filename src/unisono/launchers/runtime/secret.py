"""The secret of a run, which opens its store: made by the launcher, or given by the user where there is none.

It travels in the environment of the workers, which only their user can read, and never on a command line.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

__all__ = ["SECRET", "STORE", "derive_secret", "read_store_secret"]

SECRET = "UNISONO_SECRET"
STORE = "UNISONO_STORE"  # the address of the launcher's store, which the launcher's secret opens
_FEWEST_CHARACTERS = 16


def derive_secret(secret: bytes, purpose: str) -> bytes:
    """Derive a secret for one purpose, from which the first cannot be found."""
    return hmac.digest(secret, b"unisono " + purpose.encode(), hashlib.sha256)


def read_store_secret(host: str, port: int, *, hosted: bool, env: Mapping[str, str] = os.environ) -> bytes | None:
    """What opens the store at an address; None for one that asks for no secret.

    `hosted`: whether whoever started the workers keeps the store. That is our launcher, or torchrun, whose store knows
    no secret.
    """
    text = env.get(SECRET, "")
    if not text or (hosted and env.get(STORE) != f"{host}:{port}"):
        return None
    if len(text) < _FEWEST_CHARACTERS:
        raise ValueError(
            f"{SECRET} has {len(text)} characters; expected at least {_FEWEST_CHARACTERS}, the same on every worker, "
            "such as `openssl rand -hex 32` prints"
        )
    return derive_secret(text.encode(), "store")
