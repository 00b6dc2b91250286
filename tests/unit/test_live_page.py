"""The page's server: who is answered, what is sent, and what it says when something is not there."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from live_pages import serve
from simulated_run import SimulatedRun
from unisono.observe.live.beside import NoPage, open_address
from unisono.observe.live.server import is_own_name

PAGES = Path(__file__).parents[2] / "src/unisono/observe/pages"


@pytest.fixture
def run(tmp_path: Path) -> SimulatedRun:
    run = SimulatedRun(tmp_path, ranks=3, steps_s=20.0, began=time.time() - 5.0)
    run.write()
    return run


# Who is answered ------------------------------------------------------------------------------------------------------


def test_nothing_is_shown_without_the_token(run: SimulatedRun) -> None:
    with serve(run.folder) as served:
        for name in ("", "live.js", "events", "stacks?place=0"):
            for token in ("", "x", served.token[:-1], served.token + "x", served.token.swapcase(), "%C3%A9"):
                status, _, body = served.get(name, token=token)
                assert (status, run.folder.name.encode() in body) == (403, False), (name, token)
        assert served.ask("GET", "/", {})[0] == 403
        assert served.ask("GET", f"/{served.token}", {})[0] == 403  # without the slash, links of the page lead nowhere
        assert served.get()[0] == 200
        assert served.get("live.js")[0] == 200


def test_a_name_that_was_made_to_point_here_is_refused(run: SimulatedRun) -> None:
    with serve(run.folder) as served:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.7", "a b"):
            assert served.get(headers={"Host": host})[0] == 421, host
        for host in (f"127.0.0.1:{served.port}", "localhost:8080", "[::1]:9"):  # another port: forwarded by ssh
            assert served.get(headers={"Host": host})[0] == 200, host


def test_names_of_a_server_that_others_may_reach() -> None:
    assert is_own_name("10.0.0.7:80", "0.0.0.0")
    assert is_own_name(socket.gethostname(), "0.0.0.0")
    assert not is_own_name("evil.example", "0.0.0.0")
    assert not is_own_name("10.0.0.7", "localhost")


def test_pages_of_other_sites_get_no_data(run: SimulatedRun) -> None:
    with serve(run.folder) as served:
        assert served.get("live.js", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})[0] == 403
        assert served.get("live.js", headers={"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "no-cors"})[0] == 200
        assert served.get(headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200


def test_it_is_read_only(run: SimulatedRun) -> None:
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with serve(run.folder) as served:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            status, headers, _ = served.get("events", method=method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")
        for path in ("../run.json", "%2e%2e/run.json", "run.json", "ranks/00000.jsonl", "vendor/uPlot.LICENSE"):
            assert served.get(path)[0] == 404
        assert served.get(method="HEAD")[2] == b""
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_answers_forbid_the_browser_all_but_this_server(run: SimulatedRun) -> None:
    with serve(run.folder) as served:
        for name in ("", "live.js", "nothing"):
            _, headers, _ = served.get(name)
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_is_fetched_from_elsewhere() -> None:
    for name in ("live.html", "live.css", "live.js", "live_charts.js", "live_ranks.js"):
        text = (PAGES / name).read_text()
        assert not re.search(r"https?://|@import|url\(|innerHTML|eval\(|document\.write", text), name
    html = (PAGES / "live.html").read_text()
    assert not re.search(r"style=|\son\w+=|<script>", html)  # the policy would forbid them


@pytest.mark.parametrize("text", [b"hello", b"GET / HTTP/9", b"GET / HTTP/1.1\r\nbroken"])
def test_what_is_no_request_is_refused(run: SimulatedRun, text: bytes) -> None:
    with serve(run.folder) as served, socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
        sock.sendall(text + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400")


def test_connections_that_ask_for_nothing_keep_nobody_out(run: SimulatedRun) -> None:
    with serve(run.folder) as served, served.stream() as messages, ExitStack() as silent:
        next(messages)
        for _ in range(300):
            half = silent.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            half.sendall(b"GET /")
        assert served.get()[0] == 200
        next(messages)  # whoever knows the token stays


def test_a_request_without_end_is_refused(run: SimulatedRun) -> None:
    with serve(run.folder) as served:
        assert served.get(headers={"X-Long": "x" * 40_000})[0] == 431
        assert served.get()[0] == 200


# What is sent ---------------------------------------------------------------------------------------------------------


def test_a_page_gets_the_history_and_then_what_is_new(run: SimulatedRun) -> None:
    with serve(run.folder) as served, served.stream() as messages:
        first = next(messages)
        assert first["all"]
        assert [rank[3] for rank in first["ranks"]] == [run.step - 1] * 3
        run.write(time.time() + 5.0)
        for message in messages:
            assert "all" not in message
            if message["ranks"][0][3] == run.step - 1:
                break
        with served.stream("whole") as later:  # a page that opens late
            again = next(later)
        assert again["ranks"][0][3] == run.step - 1
        assert again["metrics"]["loss"]["points"][0][0] == 0


def test_a_dead_worker_and_the_end_are_told(run: SimulatedRun) -> None:
    with serve(run.folder, stays=False) as served, served.stream() as messages:
        next(messages)
        run.lose(2, "killed by SIGKILL")
        run.write(time.time() + 1.0)
        message = next(m for m in messages if m["ranks"][2][2] == "lost")
        assert "killed by SIGKILL" in message["marks"][0][6]
        run.finish("failed", report="rank 2 was killed")
        states = [m["run"]["state"] if "run" in m else "bye" if "bye" in m else "" for m in messages]
    assert states[-1] == "bye"  # beside a run, the server ends with it
    assert "failed" in states


def test_a_page_that_leaves_is_forgotten(run: SimulatedRun) -> None:
    with serve(run.folder) as served:
        with served.stream() as messages:
            next(messages)
            assert len(served.server._viewers) == 1
        with served.stream() as messages:
            for _ in messages:
                if len(served.server._viewers) == 1:
                    break


# Stacks ---------------------------------------------------------------------------------------------------------------


def test_a_stack_is_asked_for_and_a_reason_given_where_there_is_none(run: SimulatedRun) -> None:
    asked: list[Path] = []

    def ask(folder: Path) -> dict[int, str]:
        asked.append(folder)
        return {1: 'File "train.py", line 88 in <module>'}

    with serve(run.folder, stacks=ask) as served:
        status, headers, body = served.get("stacks?place=1")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert json.loads(body) == {"rank": 1, "text": 'File "train.py", line 88 in <module>'}
        assert "gave no stack" in json.loads(served.get("stacks?place=2")[2])["error"]
        for place in ("9", "x", "", "-1"):
            assert served.get(f"stacks?place={place}")[0] == 404
    assert set(asked) == {run.folder}
    with serve(run.folder) as served:
        assert "nobody is there" in json.loads(served.get("stacks?place=1")[2])["error"]
    run.finish()
    with serve(run.folder, stacks=ask) as served:
        assert "the run is over" in json.loads(served.get("stacks?place=1")[2])["error"]


def test_other_pages_are_served_while_a_stack_is_awaited(run: SimulatedRun) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def ask(folder: Path) -> dict[int, str]:
        is_asked.set()
        may_answer.wait(60)
        return {0: "here"}

    with serve(run.folder, stacks=ask) as served:
        answers: list[bytes] = []
        asking = threading.Thread(target=lambda: answers.append(served.get("stacks?place=0")[2]))
        asking.start()
        assert is_asked.wait(60)
        assert served.get()[0] == 200
        may_answer.set()
        asking.join()
    assert json.loads(answers[0])["text"] == "here"


# Addresses ------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_and_another_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        opened = open_address("127.0.0.1", port)
    with opened.listener:
        assert opened.note == f"port {port} is in use; the page uses another"
        assert opened.port != port


def test_an_address_that_is_not_of_this_machine_is_said() -> None:
    with pytest.raises(NoPage, match=r"no page: cannot listen at 192\.0\.2\.1"):
        open_address("192.0.2.1")
    with pytest.raises(NoPage, match=r"no page: cannot listen at nowhere\.invalid"):
        open_address("nowhere.invalid", 80)


def test_tokens_differ_and_are_long() -> None:
    opened = [open_address() for _ in range(3)]
    for one in opened:
        one.listener.close()
    assert len({one.token for one in opened}) == 3
    assert all(len(one.token) >= 24 and one.token in one.url for one in opened)


def test_the_server_needs_no_torch() -> None:
    program = "import sys, unisono.live.server, unisono.live.terminal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
