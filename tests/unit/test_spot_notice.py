"""A cloud's word that it takes the machine away, from a metadata service of ours."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from unisono.launchers.runtime.spot_notice import follow_notice


class Service(BaseHTTPRequestHandler):
    """AWS' and Google's: nothing at the first question, then a notice."""

    asked = 0

    def do_PUT(self) -> None:
        self._answer(200, "a token")

    def do_GET(self) -> None:
        type(self).asked += 1
        is_aws = self.headers["X-aws-ec2-metadata-token"] == "a token" and "instance-action" in self.path
        is_gcp = self.headers["Metadata-Flavor"] == "Google" and self.path.endswith("/preempted")
        assert is_aws or is_gcp
        if type(self).asked == 1:
            self._answer(404 if is_aws else 200, "" if is_aws else "FALSE")
        else:
            self._answer(200, '{"action": "terminate"}' if is_aws else "TRUE")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Service.asked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_notice_is_told_once_it_is_there(cloud: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SPOT", f"{cloud}={address}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for this: it would answer for another machine
    monkeypatch.delenv("no_proxy", raising=False)
    told: list[int] = []
    thread = follow_notice(lambda: told.append(Service.asked), every_s=0.01)
    assert thread is not None
    thread.join(60)
    assert told == [2]


def test_nobody_asks_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_SPOT", raising=False)
    assert follow_notice(lambda: None) is None


def test_another_cloud_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SPOT", "azure")
    with pytest.raises(ValueError, match="UNISONO_SPOT: got 'azure'; expected aws or gcp"):
        follow_notice(lambda: None)


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_service_that_does_not_answer_is_named(
    cloud: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a container on AWS its answers do not arrive, and no notice ever would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("UNISONO_SPOT", f"{cloud}={address}")
    assert follow_notice(lambda: None, every_s=3600) is not None
    said, end = "", time.monotonic() + 60
    while "\n" not in said and time.monotonic() < end:
        time.sleep(0.01)
        said += capfd.readouterr().err
    assert said.count(f"{address} does not answer") == 1
