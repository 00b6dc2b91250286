"""Where metrics go beside the run's folder: TensorBoard, a Prometheus endpoint, Weights & Biases, MLflow,
OpenTelemetry, and loggers of the user's own.

Each is fed by one process of its own (feeding.py), through its own library where it needs one. No torch.
"""

from __future__ import annotations

import http.server
import importlib
import importlib.util
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.observe.runs.reading import RunReader

__all__ = [
    "LOG",
    "Asked",
    "MLflow",
    "OpenTelemetry",
    "Own",
    "Prometheus",
    "Sink",
    "TensorBoard",
    "WandB",
    "describe_run",
    "open_sink",
    "read_asked",
]

LOG = "UNISONO_LOG"
PORT = 9400
_A_REQUEST = 1000
_MODULES = {
    "tensorboard": "tensorboard",
    "prometheus": "",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "otel": "opentelemetry.sdk.metrics",
}


@dataclass(frozen=True)
class Asked:
    """One that was asked for: its name, and for Prometheus where it is to listen. A name such as "module:function" is
    a logger of the user's own."""

    name: str
    host: str = "127.0.0.1"
    port: int = PORT

    def __str__(self) -> str:
        return f"{self.name}:{self.host}:{self.port}" if self.name == "prometheus" else self.name


def read_asked(text: str) -> list[Asked]:
    """What a text such as "tensorboard,prometheus:9400" asks for. ValueError where there is no such thing, or the
    library that it needs is not installed.

    >>> read_asked("prometheus"), read_asked("prometheus:0.0.0.0:80")
    ([Asked(name='prometheus', host='127.0.0.1', port=9400)], [Asked(name='prometheus', host='0.0.0.0', port=80)])
    """
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, rest = word.partition(":")
        if name not in _MODULES and rest.isidentifier():
            found.append(_find_own(word))
            continue
        if name not in _MODULES:
            raise ValueError(f"got {word!r} to log to; expected some of {', '.join(_MODULES)}, separated by commas")
        if rest and name != "prometheus":
            raise ValueError(f"got {word!r}; only prometheus takes a port, as in prometheus:{PORT}")
        module = _MODULES[name]
        if module and not _is_installed(module):
            raise ValueError(f'{name} is not installed here: pip install "unisono[{name}]"')
        host, _, port = rest.rpartition(":")
        if rest and not (port.isdecimal() and int(port) < 65536):
            raise ValueError(f"got {word!r}; expected prometheus:PORT or prometheus:ADDRESS:PORT")
        found.append(Asked(name, host or "127.0.0.1", int(port) if rest else PORT))
    return found


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would lie in
        return False


def _find_own(word: str) -> Asked:
    """A logger of the user's own, which is there and can be called."""
    try:
        made = getattr(importlib.import_module(word.partition(":")[0]), word.partition(":")[2])
    except (ImportError, AttributeError) as error:
        raise ValueError(f"got {word!r} to log to, a function in a module, and found none: {error}") from None
    if not callable(made):
        raise ValueError(f"got {word!r} to log to, which is no function")
    return Asked(word)


class Sink(ABC):
    """A destination for the metrics of a run."""

    def __init__(self, asked: Asked, reader: RunReader) -> None:
        self.asked, self.reader = asked, reader

    @abstractmethod
    def add(self, step: int, unix: float, values: Mapping[str, float]) -> None:
        """Take the metrics of a step, joined over the ranks."""

    @abstractmethod
    def flush(self) -> None:
        """Called after a batch of `add`: send or write what is buffered."""

    @abstractmethod
    def close(self, outcome: str) -> None:
        """Finish: the run is over, with this outcome."""


def open_sink(asked: Asked, reader: RunReader) -> Sink:
    """Open the destination that was asked for."""
    make: dict[str, Callable[[Asked, RunReader], Sink]] = {
        "tensorboard": TensorBoard,
        "prometheus": Prometheus,
        "wandb": WandB,
        "mlflow": MLflow,
        "otel": OpenTelemetry,
    }
    return make.get(asked.name, Own)(asked, reader)


class TensorBoard(Sink):
    """Event files in the folder of the run: `tensorboard --logdir ~/.local/state/unisono/runs` shows all runs."""

    def __init__(self, asked: Asked, reader: RunReader) -> None:
        super().__init__(asked, reader)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(reader.folder / "tensorboard"))

    def add(self, step: int, unix: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=unix, step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, outcome: str) -> None:
        self._writer.close()


class WandB(Sink):
    """A run of Weights & Biases; project, entity and mode are those of its own variables (WANDB_PROJECT, ...)."""

    def __init__(self, asked: Asked, reader: RunReader) -> None:
        super().__init__(asked, reader)
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "unisono"),
            name=str(reader.run.get("name", "run")),
            config=describe_run(reader),
            dir=str(reader.folder),
        )
        self._step = -1

    def add(self, step: int, unix: float, values: Mapping[str, float]) -> None:
        """See Sink. Its steps only grow: what is logged for an earlier one goes to the newest."""
        self._step = max(step, self._step)
        self._run.log(dict(values), step=self._step)

    def flush(self) -> None:
        """See Sink: the library sends by itself."""

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "ok" else 1)


class MLflow(Sink):
    """A run of MLflow; server and experiment are those of its own variables (MLFLOW_TRACKING_URI, ...)."""

    def __init__(self, asked: Asked, reader: RunReader) -> None:
        super().__init__(asked, reader)
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        self._waiting: list[Any] = []
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "unisono")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=str(reader.run.get("name", "run"))).info.run_id
        for key, value in describe_run(reader).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def add(self, step: int, unix: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        at = int(unix * 1000)
        self._waiting += [Metric(name, value, at, step) for name, value in values.items()]

    def flush(self) -> None:
        """See Sink. A request for many steps, of as many numbers as a server takes."""
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_A_REQUEST])
            del self._waiting[:_A_REQUEST]

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self._id, status={"ok": "FINISHED"}.get(outcome, "FAILED"))


class OpenTelemetry(Sink):
    """Gauges `unisono.NAME` for a collector; where that is, is set by OTEL_EXPORTER_OTLP_ENDPOINT and its kin."""

    def __init__(self, asked: Asked, reader: RunReader) -> None:
        super().__init__(asked, reader)
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        self._provider: Any = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
        self._meter: Any = self._provider.get_meter("unisono")
        self._gauges: dict[str, Any] = {}
        self._labels = {"run": str(reader.run.get("name", reader.folder.name))}

    def add(self, step: int, unix: float, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"unisono.{name.replace('/', '.')}")
            self._gauges[name].set(value, self._labels)

    def flush(self) -> None:
        """See Sink: the library sends by itself, every OTEL_METRIC_EXPORT_INTERVAL milliseconds."""

    def close(self, outcome: str) -> None:
        self._provider.shutdown()


class Own(Sink):
    """A logger of the user's own: `function(settings)` gives an object with `log(values, step=...)` and perhaps
    `finish()`, as the runs of wandb and of many others have them."""

    def __init__(self, asked: Asked, reader: RunReader) -> None:
        super().__init__(asked, reader)
        module, _, name = asked.name.partition(":")
        self._run: Any = getattr(importlib.import_module(module), name)(describe_run(reader))

    def add(self, step: int, unix: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """See Sink: a library sends by itself."""

    def close(self, outcome: str) -> None:
        if hasattr(self._run, "finish"):
            self._run.finish()


class Prometheus(Sink):
    """An endpoint of its own that answers with the newest numbers, as text; on this host alone unless asked."""

    def __init__(self, asked: Asked, reader: RunReader) -> None:
        super().__init__(asked, reader)
        self.values: dict[str, float] = {}
        self._text = b""
        sink = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.partition("?")[0] in ("/", "/metrics")
                body = sink.text if known else b"not found: the numbers are at /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: the output is the training program's."""

        self._server = http.server.ThreadingHTTPServer((asked.host, asked.port), Answer)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.flush()

    @property
    def text(self) -> bytes:
        """The body of the answer to a request."""
        return self._text

    def add(self, step: int, unix: float, values: Mapping[str, float]) -> None:
        self.values.update(values)

    def flush(self) -> None:
        """See Sink. The answer is written anew, in the thread that reads the run."""
        self._text = _write_text(self.reader, self.values).encode()

    def close(self, outcome: str) -> None:
        self._server.shutdown()
        self._server.server_close()


def _write_text(reader: RunReader, values: Mapping[str, float]) -> str:
    """The newest numbers in Prometheus' text format."""
    run = _label(str(reader.run.get("name", reader.folder.name)))
    lines = ["# TYPE unisono_metric gauge"]
    lines += [f'unisono_metric{{run="{run}",name="{_label(name)}"}} {_number(v)}' for name, v in values.items()]
    lines += ["# TYPE unisono_workers gauge", f'unisono_workers{{run="{run}"}} {len(reader.ranks)}']
    rows: dict[str, list[tuple[str, float]]] = {}
    for rank in reader.ranks.values():
        who = f'run="{run}",rank="{rank.rank}"'
        rows.setdefault("step gauge", []).append((who, rank.last_step + 1))
        age_s = time.time() - rank.last_unix
        rows.setdefault("last_line_age_seconds gauge", []).append((who, age_s))
        rows.setdefault("bytes_sent_total counter", []).append((who, rank.rows.totals["bytes_sent"]))
        for part in ("wall", "compute", "communication", "waiting", "data", "hidden"):
            rows.setdefault("seconds_total counter", []).append((f'{who},part="{part}"', rank.rows.totals[part]))
        if isinstance(samples := rank.data.get("samples"), int):
            rows.setdefault("samples_total counter", []).append((who, samples))
        verdicts = sum(event["kind"] in ("verdict", "straggler") for event in rank.events)
        rows.setdefault("verdicts_total counter", []).append((who, verdicts))
    for head, found in rows.items():
        name = head.partition(" ")[0]
        lines.append(f"# TYPE unisono_{head}")
        lines += [f"unisono_{name}{{{labels}}} {_number(value)}" for labels, value in found]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.10g}" if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"


def describe_run(reader: RunReader) -> dict[str, Any]:
    """What a run was, for those who keep settings beside numbers."""
    header = next((rank.header for rank in reader.ranks.values() if rank.header), {})
    names: Sequence[str] = ("command", "workers", "engine", "cwd", "versions", "machine")
    found = {name: reader.run[name] for name in names if name in reader.run}
    return {**found, **{name: header[name] for name in ("strategy", "parameters", "device") if name in header}}
