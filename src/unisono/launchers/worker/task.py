"""Inside an engine's own process (a Ray actor, a Spark task): run one worker's agent there, beside the data.

Also how tables get there: among the arguments of a function they are replaced by a `TablePart`, which every worker
opens as its own rows (table_files.py writes them, runtime/table_part.py reads them).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.launchers.engines.engine import AGENT, agent_command
from unisono.launchers.table_files import TableFiles, write_listing

__all__ = ["FAILED", "replace_tables", "run_agent"]

FAILED = 1


def run_agent(env: Mapping[str, str], rank: int, workers: int, parts: Sequence[TableFiles] = ()) -> tuple[int, str]:
    """Run the agent of `rank` to its end; its exit status and what it wrote itself (only where it could not start).

    A process of its own: engines use theirs for other tasks too, and it must end with this one, however this one ends.
    """
    place = {"RANK": str(rank), "WORLD_SIZE": str(workers), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told = json.dumps({**json.loads(env[AGENT]), "parent": os.getpid()})
    env = {**os.environ, **env, **place, AGENT: told}
    with write_listing(parts) as listing, tempfile.TemporaryFile() as output:
        if parts:
            env["UNISONO_PARTS"] = f"/proc/{os.getpid()}/fd/{listing.fileno()}"
        agent = subprocess.Popen(agent_command(None), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            status = agent.wait()
        except BaseException:
            agent.terminate()
            agent.wait()
            raise
        finally:
            for part in parts:
                part.close()
        output.seek(0)
        words = output.read(1 << 14).decode("utf-8", "replace").strip()
    return status, words


def replace_tables(
    args: Sequence[Any], kwargs: Mapping[str, Any], is_table: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """The arguments with a `TablePart` in place of each table, also inside lists, tuples and dicts; and the tables."""
    tables: list[Any] = []

    def lift(value: Any) -> Any:
        if is_table(value):
            from unisono.launchers.runtime.table_part import TablePart  # imports numpy

            number = next((i for i, table in enumerate(tables) if table is value), len(tables))
            if number == len(tables):
                tables.append(value)
            return TablePart.placeholder(number)
        if type(value) in (list, tuple):
            return type(value)(lift(item) for item in value)
        if type(value) is dict:
            return {key: lift(item) for key, item in value.items()}
        return value

    return tuple(lift(value) for value in args), {key: lift(value) for key, value in kwargs.items()}, tables
