"""Functions on their way to an engine's own processes: pickled by us, so that the import path of the driver is known
there before they are opened. They travel by the engine's own channel, as its functions do."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from typing import Any

__all__ = ["Packed"]

_opened: dict[bytes, Any] = {}
_KEPT = 8  # programs that a process keeps open


class Packed:
    """`Packed(value).open()` is the value, in a process that has the same modules in the same places, or installed."""

    def __init__(self, value: Any) -> None:
        name = "cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle"
        try:
            self.data: bytes = importlib.import_module(name).dumps(value)
        except Exception as error:
            more = "; pip install cloudpickle to send lambdas" if name == "pickle" else ""
            raise TypeError(
                f"{value!r} cannot be sent to the engine's workers: {error}. Make what it refers to inside the "
                f"function, or pass names and settings instead of live objects{more}."
            ) from error
        self.key = hashlib.sha256(self.data).digest()
        self.path = [entry or os.getcwd() for entry in sys.path]

    def open(self) -> Any:
        """The value; made once in a process."""
        if self.key not in _opened:
            sys.path += [entry for entry in self.path if entry not in sys.path and os.path.exists(entry)]
            import pickle

            while len(_opened) >= _KEPT:
                del _opened[next(iter(_opened))]
            _opened[self.key] = pickle.loads(self.data)  # noqa: S301  # came from the driver by the engine's channel
        return _opened[self.key]
