"""Metrics handed on while a run goes on: joined over ranks, and through each library's own doors."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from unisono.observe.runs import feeding, sinks
from unisono.observe.runs.feeding import Feeder, Joiner
from unisono.observe.runs.reading import RankLog, RunReader
from unisono.observe.runs.sinks import Asked, Prometheus, Sink, open_sink, read_asked


def write(folder: Path, place: int, *lines: Any) -> None:
    """Add lines to a worker's file."""
    path = folder / "ranks" / f"{place:05}.jsonl"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        lines = (["header", {"rank": place, "size": 2, "unix": 1000.0, "pid": 1, "strategy": "allreduce"}], *lines)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def loss(step: int, value: float | None, how: str = "mean") -> list[Any]:
    return ["metrics", step, step / 10, {"loss": value}, how]


class Taken(Sink):
    """Keeps what it is given."""

    def __init__(self, asked: Asked, reader: RunReader) -> None:
        super().__init__(asked, reader)
        self.rows: list[tuple[int, float, dict[str, float]]] = []
        self.outcome = ""

    def add(self, step: int, unix: float, values: Mapping[str, float]) -> None:
        self.rows.append((step, unix, dict(values)))

    def flush(self) -> None: ...

    def close(self, outcome: str) -> None:
        self.outcome = outcome


# What is asked for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensorbord", "got 'tensorbord' to log to; expected some of tensorboard, prometheus, wandb, mlflow, otel"),
        ("nomodule:start", "a function in a module, and found none"),
        ("json:nothing", "a function in a module, and found none"),
        ("sys:path", "which is no function"),
        ("prometheus:port", "expected prometheus:PORT"),
        ("prometheus:99999", "expected prometheus:PORT"),
        ("tensorboard:80", "only prometheus takes a port"),
    ],
)
def test_what_there_is_not_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        read_asked(text)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_library_that_is_not_installed_is_named_with_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf'{name} is not installed here: pip install "unisono\[{name}\]"'):
        read_asked(f"prometheus,{name}")


# Joined --------------------------------------------------------------------------------------------------------------


def test_a_step_is_given_once_every_rank_has_said_its_value() -> None:
    joiner, first, second = Joiner(), RankLog(0, offset=0.0), RankLog(1, offset=0.0)
    joiner.take(first, "loss", "mean", [(1, 0.1, 1.0), (2, 0.2, 3.0)])
    joiner.take(second, "loss", "mean", [(1, 0.1, 2.0)])
    assert joiner.give() == [(1, 0.1, {"loss": 1.5})]
    assert joiner.give() == []
    joiner.take(second, "loss", "mean", [(2, 0.25, 5.0)])
    assert joiner.give() == [(2, 0.25, {"loss": 4.0})]


def test_a_rank_that_says_nothing_any_more_is_waited_for_only_so_long() -> None:
    joiner, first, second = Joiner(), RankLog(0, offset=0.0), RankLog(1, offset=0.0)
    joiner.take(first, "n", "sum", [(1, 0.0, 1.0), (2, 1.0, 3.0), (3, 15.0, 5.0)])
    joiner.take(second, "n", "sum", [(1, 0.0, 2.0)])
    assert joiner.give() == [(1, 0.0, {"n": 3.0}), (2, 1.0, {"n": 5.0})]  # its last value counts for a while
    joiner.take(first, "n", "sum", [(4, 30.0, 7.0)])
    assert joiner.give() == [(3, 15.0, {"n": 5.0})]


@pytest.mark.parametrize(("how", "value"), [("mean", 2.5), ("sum", 5.0), ("min", 1.0), ("max", 4.0)])
def test_ranks_of_a_long_run_write_of_different_steps_and_are_joined_all_the_same(how: str, value: float) -> None:
    joiner, first, second = Joiner(), RankLog(0, offset=0.0), RankLog(1, offset=0.0)
    joiner.take(first, "v", how, [(10, 0.1, 1.0)])
    joiner.take(second, "v", how, [(13, 0.1, 4.0)])
    assert joiner.give(last=True)[-1] == (13, 0.1, {"v": value})


def test_each_ranks_own_values_stay_apart() -> None:
    joiner = Joiner()
    for place in (0, 1):
        joiner.take(RankLog(place, offset=0.0), "lr", "rank", [(1, 0.1, float(place))])
    assert joiner.give() == [(1, 0.1, {"lr/rank0": 0.0, "lr/rank1": 1.0})]


def test_numbers_near_the_end_of_all_numbers_are_joined() -> None:
    joiner = Joiner()
    for place in (0, 1):
        joiner.take(RankLog(place, offset=0.0), "loss", "sum", [(1, 0.1, 1e308)])
    assert joiner.give() == [(1, 0.1, {"loss": math.inf})]


def test_a_feeder_whose_starter_is_gone_before_it_has_begun_ends(tmp_path: Path) -> None:
    """What it writes to is open until it has ended: so long the command here goes on."""
    (tmp_path / "run.json").write_text('{"format": 1}')
    start = "from pathlib import Path; from unisono.observe.runs.feeding import start_feeding as start"
    program = f"{start}; print(start(Path({str(tmp_path)!r}), 'prometheus:0').pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        feeder = int(starter.stdout.readline())
        starter.wait()
        try:
            assert starter.communicate(timeout=60) == ("", None)
        except subprocess.TimeoutExpired:
            os.kill(feeder, signal.SIGKILL)
            raise


# The feeder ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    """What was opened."""
    opened: list[Taken] = []

    def open_one(asked: Asked, reader: RunReader) -> Sink:
        opened.append(Taken(asked, reader))
        return opened[-1]

    monkeypatch.setattr(feeding, "open_sink", open_one)
    return opened


def test_a_growing_run_is_handed_on_and_its_end_with_all_that_is_left(tmp_path: Path, taken: list[Taken]) -> None:
    feeder = Feeder(tmp_path, [Asked("wandb")])
    feeder.step()
    assert taken == []  # nobody has written, so nothing is known of the run
    write(tmp_path, 0, loss(1, 1.0), loss(2, 2.0))
    write(tmp_path, 1, loss(1, 3.0))
    feeder.step()
    assert taken[0].rows == [(1, 1000.1, {"loss": 2.0})]
    write(tmp_path, 1, loss(2, None))  # nan on one rank: libraries take no such number
    write(tmp_path, 0, ["step", 0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0, 100, 1, 0.0])
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "name": "x", "ended": 5.0, "outcome": "ok"}))
    feeder.step(last=True)
    feeder.close()
    _, costs = taken[0].rows
    assert costs[0] == 1
    assert costs[2]["step/total_ms"] == pytest.approx(500.0)
    assert costs[2]["step/compute_ms"] == pytest.approx(250.0)
    assert costs[2]["step/bytes_sent"] == 100
    assert taken[0].outcome == "ok"


def test_one_that_fails_is_said_once_and_the_others_go_on(
    tmp_path: Path, taken: list[Taken], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feeder = Feeder(tmp_path, [Asked("wandb"), Asked("tensorboard")])
    write(tmp_path, 0, loss(1, 1.0))
    feeder.step()

    def fail(*_: object) -> None:
        raise ConnectionError("no such server")

    monkeypatch.setattr(taken[0], "add", fail)
    for step in (2, 3):
        write(tmp_path, 0, loss(step, 1.0))
        feeder.step()
    assert [row[0] for row in taken[1].rows] == [1, 2, 3]
    said = capsys.readouterr().err
    assert said.count("nothing more is logged to wandb: ConnectionError: no such server; training continues") == 1


# Each door -----------------------------------------------------------------------------------------------------------


def fetch(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_prometheus_reads_the_newest_numbers(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    write(tmp_path, 0, ["step", 0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0, 100, 1, 0.0], loss(1, 2.0))
    write(tmp_path, 1, ["event", "verdict", 1, 1.0, {"rank": 1}], ["data", {"samples": 32}])
    (tmp_path / "run.json").write_text(json.dumps({"name": 'a "run"\n'}))
    reader = RunReader(tmp_path)
    reader.poll()
    sink = open_sink(Asked("prometheus", port=0), reader)
    assert isinstance(sink, Prometheus)
    try:
        sink.add(1, 1000.0, {"loss": 2.0, 'odd"\\name': 1.0})
        sink.flush()
        found = {
            (s.name, s.labels.get("rank"), s.labels.get("part") or s.labels.get("name")): s.value
            for family in parser.text_string_to_metric_families(fetch(sink.port))
            for s in family.samples
        }
        assert found["unisono_metric", None, "loss"] == 2.0
        assert found["unisono_metric", None, 'odd"\\name'] == 1.0
        assert found["unisono_step", "0", None] == 1
        assert found["unisono_seconds_total", "0", "compute"] == 0.25
        assert found["unisono_bytes_sent_total", "0", None] == 100
        assert found["unisono_samples_total", "1", None] == 32
        assert found["unisono_verdicts_total", "1", None] == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(sink.port, "/etc/passwd")
    finally:
        sink.close("ok")


def test_the_dashboard_asks_for_what_prometheus_reads(tmp_path: Path) -> None:
    write(tmp_path, 0, ["step", 0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0, 100, 1, 0.0], ["data", {"samples": 32}])
    reader = RunReader(tmp_path)
    reader.poll()
    given = set(re.findall(r"^(unisono_\w+)\{", sinks._write_text(reader, {"loss": 1.0}), re.MULTILINE))
    dashboard = (Path(__file__).parents[2] / "docs" / "_static" / "grafana.json").read_text()
    assert set(re.findall(r"\bunisono_\w+", dashboard)) == given


def test_a_logger_of_ones_own_gets_settings_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mylog.py").write_text(
        "seen = []\n"
        "class Run:\n"
        "    def log(self, values, step): seen.append((step, values))\n"
        "    def finish(self): seen.append('finished')\n"
        "def start(settings):\n"
        "    seen.append(settings['strategy'])\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, 0, loss(1, 2.0))
    (tmp_path / "run.json").write_text(json.dumps({"workers": 1}))
    reader = RunReader(tmp_path)
    reader.poll()
    (asked,) = read_asked("mylog:start")
    sink = open_sink(asked, reader)
    sink.add(1, 1000.0, {"loss": 2.0})
    sink.close("ok")
    assert __import__("mylog").seen == ["allreduce", (1, {"loss": 2.0}), "finished"]


def test_opentelemetry_sends_gauges_to_its_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        sink = open_sink(Asked("otel"), RunReader(tmp_path))
        sink.add(3, 1000.0, {"loss": 2.0})
        sink.close("ok")  # sends what there is
        server.shutdown()
        serving.join()
    sent = ExportMetricsServiceRequest.FromString(bodies[-1]).resource_metrics[0].scope_metrics[0].metrics
    points = {metric.name: metric.gauge.data_points[0] for metric in sent}
    assert (points["unisono.step"].as_int, points["unisono.loss"].as_double) == (3, 2.0)


def test_a_port_in_use_is_said_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        feeder = Feeder(tmp_path, [Asked("prometheus", port=taken.getsockname()[1])])
        write(tmp_path, 0, loss(1, 1.0))
        feeder.step()
        feeder.close()
    said = capsys.readouterr().err
    assert "nothing is logged to prometheus:127.0.0.1:" in said
    assert "in use" in said


def test_tensorboard_shows_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feeder = Feeder(tmp_path, read_asked("tensorboard"))
    write(tmp_path, 0, loss(1, 1.0), loss(2, 2.0))
    write(tmp_path, 1, loss(1, 3.0), loss(2, 5.0))
    feeder.step()
    feeder.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [(e.step, e.value) for e in shown.Scalars("loss")] == [(1, 2.0), (2, 3.5)]


def test_wandb_and_mlflow_are_called_as_they_want_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their libraries, replaced by what they are asked to do: a run, its settings, numbers by step, its end."""
    calls: list[Any] = []

    class Run:
        info = types.SimpleNamespace(run_id="r1")

        def log(self, values: dict[str, float], *, step: int) -> None:
            calls.append(("log", values, step))

        def finish(self, *, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    class Client:
        def get_experiment_by_name(self, name: str) -> Any:
            return None

        def create_experiment(self, name: str) -> str:
            return f"id of {name}"

        def create_run(self, experiment: str, *, run_name: str) -> Run:
            calls.append(("create", experiment, run_name))
            return Run()

        def log_param(self, run: str, key: str, value: str) -> None:
            calls.append(("param", key, value))

        def log_batch(self, run: str, *, metrics: list[Any]) -> None:
            calls.append(("batch", list(metrics)))

        def set_terminated(self, run: str, *, status: str) -> None:
            calls.append(("terminated", status))

    def init(**settings: Any) -> Run:
        calls.append(("init", settings["project"], settings["name"], settings["config"]["strategy"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))  # type: ignore[arg-type]
    tracking = types.SimpleNamespace(MlflowClient=Client)
    entities = types.SimpleNamespace(Metric=lambda *values: values)
    for name, module in (("mlflow", tracking), ("mlflow.tracking", tracking), ("mlflow.entities", entities)):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.json").write_text(json.dumps({"name": "train", "workers": 2, "outcome": "failed", "ended": 1.0}))
    write(tmp_path, 0, loss(5, 1.0))
    feeder = Feeder(tmp_path, [Asked("wandb"), Asked("mlflow")])
    feeder.step()
    write(tmp_path, 0, ["metrics", 3, 0.9, {"late": 2.0}, "mean"])
    feeder.step()
    feeder.close()
    assert calls[0] == ("init", "unisono", "train", "allreduce")
    assert ("create", "id of unisono", "train") in calls
    assert ("param", "strategy", "allreduce") in calls
    logged = [call for call in calls if call[0] in ("log", "batch")]
    assert logged == [
        ("log", {"loss": 1.0}, 5),
        ("batch", [("loss", 1.0, 1000500, 5)]),
        ("log", {"late": 2.0}, 5),  # its steps never go back
        ("batch", [("late", 2.0, 1000900, 3)]),
    ]
    assert calls[-2:] == [("finish", 1), ("terminated", "FAILED")]
