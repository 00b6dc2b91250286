"""A command in a folder of its own, after which no process of it may be left; Spark's settings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_commands import Command, left_over, run_in


@pytest.fixture(scope="session", autouse=True)
def _short_lived_java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every JVM of Spark compiles quickly rather than well: it lives for a minute."""
    folder = tmp_path_factory.mktemp("conf")
    lines = [f"spark.{who}.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC" for who in ("driver", "executor")]
    (folder / "spark-defaults.conf").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONF_DIR", str(folder))
        yield


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """command(*words, script=text, env={}): see engine_commands.run_in."""
    yield partial(run_in, tmp_path)
    assert left_over(str(tmp_path)) == [], "processes of the run are still there"
