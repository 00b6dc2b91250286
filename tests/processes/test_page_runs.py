"""`unisono run --page`: a server beside the launcher, which ends with the run and never stops it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from launched import Launched

WAITS = """
import pathlib, time
pathlib.Path("ready").write_text("yes\\n")
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""
TRAINS = """
import pathlib, time, torch, unisono as un

def stand_here():
    pathlib.Path(f"ready-{world.rank}").write_text("yes\\n")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)

world = un.join(device="cpu")
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
un.parallel(model, optimizer, "allreduce")
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
stand_here()
"""


def read_address(launched: Launched) -> str:
    assert launched.process.stderr is not None
    line = launched.process.stderr.readline().decode()
    (url,) = re.findall(r"^unisono: page: (http://127\.0\.0\.1:\d+/[\w-]{24}/)$", line)
    return str(url)


def get(url: str, name: str = "") -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        connection.request("GET", parts.path + name)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def is_gone(url: str, within_s: float = 30.0) -> bool:
    """Whether nobody listens there, or soon does not."""
    parts = urlsplit(url)
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5).close()
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_page_is_there_while_the_run_goes_on_and_ends_with_it(
    run_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = run_script(WAITS, "-n", "1", "--page", "--run-dir", "record")
    url = read_address(launched)
    launched.wait_for_files("ready")
    assert get(url)[0] == 200
    assert get(url.replace(urlsplit(url).path, "/wrong/"))[0] == 403
    assert json.loads((tmp_path / "record/run.json").read_text())["page"] == url
    (tmp_path / "go").touch()
    assert launched.finish()[0] == 0
    assert is_gone(url)


def test_a_page_outlives_no_launcher(run_script: Callable[..., Launched]) -> None:
    launched = run_script(WAITS, "-n", "1", "--page-stay", "--run-dir", "record")
    url = read_address(launched)
    launched.wait_for_files("ready")
    assert get(url)[0] == 200
    launched.signal(signal.SIGKILL)
    launched.process.wait()
    assert is_gone(url)


def test_with_stay_the_page_is_there_until_it_is_interrupted(
    run_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = run_script("raise SystemExit(3)", "-n", "1", "--page-stay", "--run-dir", "record")
    url = read_address(launched)
    assert launched.process.stderr is not None
    assert any(b"the page stays until Ctrl-C" in line for line in launched.process.stderr)
    assert get(url)[0] == 200
    launched.signal(signal.SIGINT)
    assert launched.finish()[0] == 3
    assert is_gone(url)


def test_training_goes_on_where_there_can_be_no_page(
    run_script: Callable[..., Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        status, out, err = run_script(
            "print('trained')", "-n", "1", "--page", "--page-port", port, "--run-dir", "a"
        ).finish()
    assert (status, out) == (0, "trained\n"), err
    assert f"unisono: port {port} is in use; the page uses another\nunisono: page: http://" in err
    for options, why in (
        (("--page", "--page-bind", "192.0.2.1", "--run-dir", "b"), "no page: cannot listen at 192.0.2.1:0"),
        (("--page", "--no-record"), "no page: it shows what is recorded, and this run is not"),
    ):
        status, out, err = run_script("print('trained')", "-n", "1", *options).finish()
        assert (status, out) == (0, "trained\n"), err
        assert f"unisono: {why}" in err


def test_the_page_has_the_stack_of_a_rank_that_stands_still(
    run_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = run_script(TRAINS, "-n", "2", "--warm", "--page", "--run-dir", "record")
    url = read_address(launched)
    launched.wait_for_files("ready-0", "ready-1", timeout_s=60)
    until = time.monotonic() + 60
    while (answer := get(url, "stacks?place=1"))[0] == 404 and time.monotonic() < until:  # it has not read the file yet
        time.sleep(0.05)
    found = json.loads(answer[1])
    assert found["rank"] == 1
    assert re.search(r"script\.py.*\bin stand_here|stand_here.*script\.py", found["text"]), found
    (tmp_path / "go").touch()
    assert launched.finish()[0] == 0
