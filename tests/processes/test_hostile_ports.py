"""Strangers at the control ports and data ports of a run: it goes on, and ends with what it should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostile_ports import attack_training

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("data", "encrypt"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_training_under_attack_goes_on_and_ends_with_the_right_weights(data: bool, encrypt: bool) -> None:
    """Two ports: the launcher's and the store's, or a data port of each rank."""
    found = attack_training(150 if data else 300, data=data, encrypt=encrypt)
    assert found == {
        "hostile_sent": 300,
        "hostile_refused": 300,
        "training_went_on": True,
        "weights_equal": True,
    }


def test_the_secret_is_in_no_command_line_and_no_report(run_script: Callable[..., Any], tmp_path: Path) -> None:
    """A worker looks at all processes, and then fails."""
    status, out, err = run_script(
        """
        import os, pathlib
        secret = os.environ["UNISONO_SECRET"]
        pathlib.Path("secret").write_text(secret)
        lines = []
        for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(file.read_bytes())
            except OSError:
                pass  # it has ended
        assert any(b"script.py" in line for line in lines)
        assert not any(secret.encode() in line for line in lines)
        raise ValueError("looked")
        """,
        "-n",
        "1",
    ).finish()
    assert (status, "ValueError: looked" in err) == (1, True), err
    secret = (tmp_path / "secret").read_text()
    assert len(secret) == 64
    assert secret not in out + err
