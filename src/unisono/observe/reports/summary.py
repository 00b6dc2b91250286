"""A recorded run in numbers: the cost of a step, bytes, speed-up, balance, the slowest rank, metrics, verdicts.

All of it follows from what the ranks wrote (see unisono.runs.reading). What cannot be known from an incomplete record
is None, and `missing` says why.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unisono.launchers.runtime.run_folder import NOISE, SIGNAL, SUMMED, divide_noise
from unisono.observe.reports.pipelines import PipelineSummary, describe_mesh, summarise_pipeline
from unisono.observe.reports.trace import find_waits
from unisono.observe.reports.verdicts import Slowest, find_changes, find_slowest, find_verdicts
from unisono.observe.runs.reading import RankLog, RunReader, say_mesh_place
from unisono.units import as_json, show_bytes, show_duration

__all__ = ["PARTS", "MetricSummary", "RankSummary", "SpeedUp", "Summary", "compare_with", "show_time", "summarise"]

PARTS = ("compute", "communication", "waiting", "data")
WARM_UP = 3  # steps at the beginning of a longer run that do not count: the first are slower
_SHORT = 20


@dataclass
class RankSummary:
    """One worker. Seconds and bytes are those of a mean step."""

    place: int
    rank: int
    host: str
    device: str
    steps: int
    cost: dict[str, float]  # wall, compute, communication, waiting, data, hidden, bytes_sent, collectives, compression
    longest_s: float  # of one step
    samples: int | None = None
    classes: dict[str, int] = field(default_factory=dict)
    samples_a_step: float | None = None
    bytes_sent: int = 0  # in all its steps
    outcome: str | None = None  # None: it did not write its end
    mesh_place: str = ""  # "data 0, pipeline 1"
    is_copy: bool = False  # on a mesh: its samples are those of another rank

    @property
    def label(self) -> str:
        """Its rank; where ranks were dealt anew, the number that the launcher's messages call the worker by."""
        return str(self.rank) if self.rank == self.place else f"worker {self.place}"

    @property
    def name(self) -> str:
        """The same in a sentence."""
        return f"rank {self.rank}" if self.rank == self.place else self.label

    @property
    def own_s(self) -> float:
        """What it does itself in a step, and nobody waits for others."""
        return self.cost["compute"] + self.cost["data"]


@dataclass
class MetricSummary:
    """A metric over the run, joined over the ranks; `ranks` where each rank's is its own."""

    name: str
    how: str
    steps: list[int]
    times: list[float]  # seconds since the first step began
    values: list[float]
    ranks: dict[int, float] = field(default_factory=dict)  # the last of each

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1] if self.values else math.nan


@dataclass
class SpeedUp:
    """How many times as fast as one worker (or as the baseline), and of what is possible."""

    times: float | None
    efficiency: float | None
    how: str


@dataclass
class Summary:
    """A run. What is not known is None."""

    name: str
    folder: str
    command: str
    program: str
    strategy: str
    workers: int
    hosts: list[str]
    devices: list[str]
    parameters: int | None
    versions: dict[str, str]
    machine: dict[str, Any]
    started: float | None
    seconds: float | None
    outcome: str  # ok, failed, interrupted, preempted, killed, running, unknown
    exit_status: int | None
    failure: str
    missing: list[str]
    steps: int
    cost: dict[str, float]  # of a mean step, over all ranks; empty where there was none
    not_measured: list[str]
    notes: list[str]  # on the cost
    bytes_by_kind: dict[str, int]
    bytes_by_formula: bool
    samples_a_step: float | None
    speed_up: SpeedUp
    slowest: Slowest | None
    ranks: list[RankSummary]
    metrics: list[MetricSummary]
    verdicts: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    encryption: str = ""  # between hosts: whether, and what it cost
    mesh: str = ""  # "data=2, tensor=1, pipeline=2"
    pipeline: PipelineSummary | None = None

    @property
    def samples_a_second(self) -> float | None:
        """Samples that all ranks together train on in a second."""
        if not self.samples_a_step or not self.cost.get("wall"):
            return None
        return self.samples_a_step / self.cost["wall"]

    @property
    def loss(self) -> float | None:
        """The last loss."""
        found = next((metric.last for metric in self.metrics if metric.name == "loss"), math.nan)
        return None if math.isnan(found) else found

    @property
    def noise_batches(self) -> float | None:
        """The gradient noise scale in global batches, as last measured (see `methods.exchange.noise_scale`)."""
        last = {metric.name: metric.last for metric in self.metrics if metric.name in (NOISE, SIGNAL)}
        return divide_noise(last.get(NOISE, math.nan), last.get(SIGNAL, math.nan))

    def as_json(self) -> dict[str, Any]:
        """The whole summary as JSON can hold it."""
        found: dict[str, Any] = as_json(asdict(self))
        found["samples_a_second"], found["loss"] = self.samples_a_second, self.loss
        found["noise_batches"] = self.noise_batches
        return found


def summarise(reader: RunReader) -> Summary:
    """What a run was, as far as it was recorded."""
    run, logs = reader.run, list(reader.ranks.values())
    outcome, states = run.get("outcome"), {True: "running", False: "killed", None: "unknown"}
    header = next((log.header for log in logs if log.header), {})
    ranks = [_summarise_rank(log) for log in logs if log.rows.steps or log.header]
    first = [(_as_float(log.headers[0].get("time")), log.offset) for log in logs if log.headers]
    began = _as_float(run.get("started")) or min((at + offset for at, offset in first if at), default=None)
    last = [log.last_unix for log in logs if not math.isnan(log.last_unix)]
    ended = _as_float(run.get("ended")) or max(last, default=None)  # or the last line that there is
    not_measured, notes = _settle_waiting(logs, ranks)
    workers = max([int(log.header.get("size") or 0) for log in logs] or [0]) or int(_as_float(run.get("workers")) or 0)
    trained = [rank for rank in ranks if rank.steps]
    batches = [rank.samples_a_step for rank in ranks if not rank.is_copy]
    known = [samples for samples in batches if samples is not None]
    return Summary(
        name=str(run.get("name") or Path(reader.folder).resolve().name),
        folder=str(reader.folder),
        command=_join_words(run.get("command")),
        program=_join_words(run.get("program")),
        strategy=str(header.get("strategy") or ""),
        workers=workers,
        hosts=list(dict.fromkeys(str(log.header["host"]) for log in logs if "host" in log.header)),
        devices=list(dict.fromkeys(str(log.header["device"]) for log in logs if "device" in log.header)),
        parameters=_count_parameters(logs),
        versions={str(k): str(v) for k, v in _as_dict(run.get("versions")).items()} or _as_dict(header.get("versions")),
        machine=_as_dict(run.get("machine")),
        started=began,
        seconds=None if began is None or ended is None else max(0.0, ended - began),
        outcome=outcome if isinstance(outcome, str) else states[reader.is_running],
        exit_status=status if isinstance(status := run.get("exit_status"), int) else None,
        failure=str(run.get("report") or ""),
        missing=reader.missing,
        steps=max((log.last_step + 1 for log in logs), default=0),
        cost={name: sum(r.cost[name] for r in trained) / len(trained) for name in SUMMED} if trained else {},
        not_measured=not_measured,
        notes=notes,
        bytes_by_kind=_sum_kinds(logs),
        bytes_by_formula=any(bool(log.header.get("bytes_by_formula")) for log in logs),
        samples_a_step=sum(known) if known and len(known) == len(batches) else None,
        speed_up=_estimate_speed_up(ranks, not_measured, workers),
        slowest=find_slowest(ranks),
        ranks=ranks,
        metrics=_summarise_metrics(reader),
        verdicts=find_verdicts(reader),
        changes=find_changes(reader),
        encryption=_describe_encryption(logs),
        mesh=describe_mesh(header),
        pipeline=summarise_pipeline(logs),
    )


def _summarise_rank(log: RankLog) -> RankSummary:
    rows = log.rows
    counted = rows.array
    if rows.steps >= _SHORT and len(counted) > WARM_UP:
        counted = counted[counted[:, 0] >= counted[0, 0] + WARM_UP]
    steps = float((counted[:, 1] - counted[:, 0] + 1.0).sum())
    sums = counted[:, 3 : 3 + len(SUMMED)].sum(axis=0) / max(steps, 1.0)
    samples, of_steps = log.data.get("samples"), log.data.get("steps")
    classes = log.data.get("classes")
    return RankSummary(
        place=log.place,
        rank=log.rank,
        host=str(log.header.get("host", "")),
        device=str(log.header.get("device", "")),
        steps=rows.steps,
        cost={name: float(value) for name, value in zip(SUMMED, sums, strict=True)},
        longest_s=float(counted[:, -1].max(initial=0.0)),
        samples=samples if isinstance(samples, int) else None,
        classes=classes if isinstance(classes, dict) else {},
        samples_a_step=samples / of_steps
        if isinstance(samples, int) and isinstance(of_steps, int) and of_steps
        else None,
        bytes_sent=int(rows.totals["bytes_sent"]),
        outcome=None if log.end is None else str(log.end.get("outcome", "")),
        mesh_place=say_mesh_place(log.header),
        is_copy=any(log.header.get("at", [0, 0, 0])[1:]),
    )


def _count_parameters(logs: Sequence[RankLog]) -> int | None:
    """Of the model; on a mesh, of all ranks that hold one together (copies on the tensor axis count each)."""
    held = [log.header.get("parameters") for log in logs if log.header and log.header.get("at", (0,))[0] == 0]
    if not any("mesh" in log.header for log in logs):
        held = held[:1]
    known = [count for count in held if isinstance(count, int)]
    return sum(known) if known else None


def _settle_waiting(logs: Sequence[RankLog], ranks: Sequence[RankSummary]) -> tuple[list[str], list[str]]:
    """What cannot be told apart, and what is to be said of it. Between hosts, waiting was counted as communication:
    where the record has all ranks' arrivals, it is taken out of that."""
    not_measured = sorted({str(part) for log in logs for part in log.header.get("not_measured", [])})
    if "waiting" in not_measured or not any(int(log.header.get("hosts") or 1) > 1 for log in logs):
        return not_measured, []
    waits, steps = find_waits([log for log in logs if log.rows.steps])
    if not steps:
        return [*not_measured, "waiting"], ["between hosts, waiting counts as communication: the record cannot tell"]
    for rank in ranks:
        moving = rank.cost["communication"] - rank.cost["compression"]
        waited = max(0.0, min(waits.get(rank.place, 0.0), moving))
        rank.cost["communication"] -= waited
        rank.cost["waiting"] += waited
    return not_measured, [f"between hosts, waiting is worked out from all ranks' arrivals in {steps} steps"]


def _describe_encryption(logs: Sequence[RankLog]) -> str:
    """Whether what passed between hosts was encrypted, and how long that took; empty for one host."""
    known = [log for log in logs if int(log.header.get("hosts") or 1) > 1 and "encrypted" in log.header]
    if not known:
        return ""
    if not any(log.header["encrypted"] for log in known):
        return "tensors between hosts are not encrypted: one private network, or --no-encrypt"
    counted = [log.encryption for log in known if log.encryption]
    if not counted:
        return "everything sent between hosts"
    nbytes = sum(one.get("bytes", 0.0) for one in counted)
    seconds = max(one.get("seconds", 0.0) for one in counted)
    cost = f"about {show_duration(seconds)} of a core's time per worker"
    return f"everything sent between hosts: {show_bytes(nbytes)}, {cost}"


# Speed-up ------------------------------------------------------------------------------------------------------------


def _estimate_speed_up(ranks: Sequence[RankSummary], not_measured: Sequence[str], workers: int) -> SpeedUp:
    """From the ledger: one worker would do what all do themselves, one after the other, and exchange nothing. Each
    rank does so for a share of its time; the sum of these shares is how many workers' work is done at once."""
    trained = [rank for rank in ranks if rank.steps and rank.cost["wall"] > 0]
    if workers <= 1 or len(trained) < 2:
        return SpeedUp(None, None, "one worker" if workers == 1 else "not known: fewer than two workers made steps")
    if "communication" in not_measured:
        return SpeedUp(None, None, "not known: this method cannot tell communication from computation")
    times = sum(rank.own_s / rank.cost["wall"] for rank in trained)
    return SpeedUp(
        times,
        times / len(trained),
        "estimated from the ledger: one worker would compute what all compute, and exchange nothing. This is an upper "
        "bound, because work that every worker repeats, such as the optimizer's step, counts for each; to measure it, "
        "run with -n 1 and pass that run as --baseline",
    )


def compare_with(found: Summary, base: Summary) -> SpeedUp:
    """Measured against another run: samples a second where both count them, else steps a second."""
    if not found.cost or not base.cost:
        return SpeedUp(None, None, f"not known: {(base if found.cost else found).name} made no step")
    ours, theirs, what = found.samples_a_second, base.samples_a_second, "samples per second"
    if ours is None or theirs is None:
        ours, theirs, what = 1 / found.cost["wall"], 1 / base.cost["wall"], "steps per second"
    times = ours / theirs
    more = max(1, found.workers) / max(1, base.workers)
    who = f"{base.workers} worker{'s' if base.workers != 1 else ''}"
    return SpeedUp(times, times / more, f"measured: {what}, against {base.name} with {who}")


# Pieces --------------------------------------------------------------------------------------------------------------


def _sum_kinds(logs: Sequence[RankLog]) -> dict[str, int]:
    """Bytes sent by all ranks, by kind: the tag up to its first slash, so that all buckets are one. Most first."""
    sums: dict[str, int] = {}
    for log in logs:
        for tag, sent in log.tags.items():
            kind = tag.partition("/")[0]
            sums[kind] = sums.get(kind, 0) + sent
    return dict(sorted(((k, v) for k, v in sums.items() if v), key=lambda pair: -pair[1]))


def _summarise_metrics(reader: RunReader) -> list[MetricSummary]:
    logs = [log for log in reader.ranks.values() if len(log.rows)]
    began = min((float(log.rows.array[0, 2]) + log.offset for log in logs), default=None)
    found = []
    for name in reader.metric_names:
        joined = reader.join_metric(name)
        if joined is not None:
            times = joined.times - (began if began is not None else joined.times[0])
            steps = [int(step) for step in joined.steps]
            found.append(MetricSummary(name, joined.how, steps, times.tolist(), joined.values.tolist()))
        else:
            last = {log.rank: log.metrics[name].last for log in reader.ranks.values() if name in log.metrics}
            found.append(MetricSummary(name, "rank", [], [], [], last))
    return sorted(found, key=lambda metric: metric.name != "loss")


def _as_float(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _join_words(words: Any) -> str:
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def show_time(unix: float | None) -> str:
    """A unix time as local date and time; "" if it is not known."""
    return "" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
