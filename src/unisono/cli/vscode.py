"""`unisono run --debugpy`: a debug port per rank, and VS Code's launch.json to attach to all of them at once."""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import sys
from pathlib import Path
from typing import Any

__all__ = ["PORT", "open_ports"]

PORT = 5678  # debugpy's own default
_COMPOUND = "unisono: all ranks"


def open_ports(options: argparse.Namespace, parser: argparse.ArgumentParser, workers: int) -> int | None:
    """Check that every rank can listen, write launch.json, and say so once; rank 0's port, None if not asked for."""
    if not options.debugpy:
        if options.debug_port is not None:
            parser.error("--debug-port goes with --debugpy")
        return None
    if options.on != "local" or options.workers[0] is not None or options.pdb:
        parser.error("--debugpy goes with a fixed number of workers on this host, and not with --pdb")
    if importlib.util.find_spec("debugpy") is None:
        parser.error("--debugpy needs the package debugpy: pip install debugpy")
    first: int = options.debug_port or PORT
    taken = [port for port in range(first, first + workers) if not _is_free(port)]
    if taken:
        parser.error(f"--debugpy: port {taken[0]} is in use, or no port; name another, as in --debug-port {PORT + 100}")
    where = f"127.0.0.1:{first}" + (f" (rank 0) to {first + workers - 1}" if workers > 1 else "")
    why = _write_launch_file(Path(".vscode", "launch.json"), first, workers)
    more = f" (not added to .vscode/launch.json, {why}: docs/debugger.md has the entries)" if why else ""
    print(f"unisono: the workers wait for a debugger at {where}; in VS Code start {_COMPOUND!r}{more}", file=sys.stderr)
    return first


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError):
        return False
    return True


def _write_launch_file(path: Path, first: int, workers: int) -> str:
    """Add our entries to launch.json, in place of those of an earlier run; or why that cannot be done."""
    try:
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"version": "0.2.0"}
    except ValueError:
        return "which has comments"
    except OSError as error:
        return f"which cannot be read: {error.strerror}"
    mine = [
        {
            "name": f"unisono: rank {rank}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": first + rank},
            "justMyCode": True,
        }
        for rank in range(workers)
    ]
    together = {"name": _COMPOUND, "configurations": [entry["name"] for entry in mine], "stopAll": True}
    for key, entries in (("configurations", mine), ("compounds", [together])):
        others = [entry for entry in found.get(key, []) if not str(entry.get("name", "")).startswith("unisono: ")]
        found[key] = others + entries
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        return f"which cannot be written: {error.strerror}"
    return ""
