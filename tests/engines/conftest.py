"""A command in a folder of its own, after which no process of it may be left."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_commands import Command, left_over, run_in


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """command(*words, script=text, env={}): see engine_commands.run_in."""
    yield partial(run_in, tmp_path)
    assert left_over(str(tmp_path)) == [], "processes of the run are still there"
