"""Who was slow and why, what was said while the run went on, and how its world changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from unisono.observe.runs.reading import RunReader
from unisono.units import show_s

if TYPE_CHECKING:
    from unisono.observe.reports.summary import RankSummary

__all__ = ["Slowest", "describe", "find_changes", "find_slowest", "find_verdicts"]

ABOUT_EQUAL = 1.1
_VERDICTS = ("verdict", "straggler", "hang", "fault")
_CHANGES = ("worker lost", "worker joined", "world", "straggler over", "shares", "strategy", "outlier")
_TOLD = ("time", "kind", "step", "rank", "pid", "text")
_MOST = 200


@dataclass
class Slowest:
    """The rank that does most in a step, compared with the others; `cause` is "" where all are about as fast."""

    rank: int
    place: int
    factor: float
    cause: str  # "input", "samples", "compute", ""
    text: str


def find_slowest(ranks: Sequence[RankSummary]) -> Slowest | None:
    """Who keeps the others waiting, by what each does itself in a step; None with fewer than two ranks.

    The cause is where the time goes that it takes more than the others do.
    """
    trained = [rank for rank in ranks if rank.steps]
    if len(trained) < 2:
        return None
    slow = max(trained, key=lambda rank: rank.own_s)
    others = [rank for rank in trained if rank is not slow]
    usual = median(rank.own_s for rank in others)
    factor = slow.own_s / usual if usual > 0 else 1.0
    if factor < ABOUT_EQUAL:
        text = f"all ranks are about as fast: the slowest takes {100 * (factor - 1):.0f} % more"
        return Slowest(slow.rank, slow.place, factor, "", text)
    extra = slow.own_s - usual
    in_data = slow.cost["data"] - median(rank.cost["data"] for rank in others)
    samples = [rank.samples_a_step for rank in others if rank.samples_a_step]
    more = slow.samples_a_step / median(samples) if samples and slow.samples_a_step else 1.0
    cause = "input" if in_data > extra / 2 else "samples" if more - 1 > (factor - 1) / 2 else "compute"
    why = {
        "input": f"it waits for its input, {show_s(slow.cost['data'])} per step",
        "samples": f"it has {more:.2f} times as many samples",
        "compute": "it computes longer on as many samples",
    }[cause]
    text = f"{slow.name} takes {factor:.2f} times as long as the others for its part of a step: {why}"
    return Slowest(slow.rank, slow.place, factor, cause, text)


def find_verdicts(reader: RunReader) -> list[dict[str, Any]]:
    """What ranks and launcher have said while it ran, each once: all ranks come to the same verdicts."""
    found = _collect(reader, _VERDICTS)
    judged = {(event.get("rank"), event.get("step")) for event in found if event["kind"] == "verdict"}
    return [e for e in found if e["kind"] != "straggler" or (e.get("rank"), e.get("step")) not in judged]


def find_changes(reader: RunReader) -> list[dict[str, Any]]:
    """Workers that were lost or came, worlds that were formed, and other turns of the run."""
    return _collect(reader, _CHANGES)


def _collect(reader: RunReader, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Events of these kinds by unix time, each of them once."""
    found: list[dict[str, Any]] = [dict(event) for event in reader.events if event["kind"] in kinds]
    for log in reader.ranks.values():
        found += [{**event, "time": event["time"] + log.offset} for event in log.events if event["kind"] in kinds]
    told = {event.get("generation") for event in found if event["kind"] == "world" and "ranks" in event}  # by ranks
    found = [event for event in found if "size" not in event or event.get("generation") not in told]
    unique: dict[str, dict[str, Any]] = {}
    for event in sorted(found, key=lambda event: float(event["time"])):
        known = {name: value for name, value in event.items() if name not in ("time", "step", "pid")}
        key = repr((event.get("step"), sorted(known.items(), key=str)))
        unique.setdefault(key, {**event, "text": describe(event)})
    return list(unique.values())[:_MOST]


def describe(event: dict[str, Any]) -> str:
    """An event in words."""
    if event.get("text") and event["kind"] != "worker lost":
        return str(event["text"])
    who = f"rank {event['rank']}" if "rank" in event else ""
    kind = event["kind"]
    if kind == "straggler":
        factor = event.get("factor")
        times = f"{factor:.1f}x " if isinstance(factor, int | float) else ""
        return f"{who} is {times}slower than the others since step {event.get('since')}: {event.get('cause')}"
    if kind == "worker lost":
        return f"worker {event.get('rank')} was lost: {event.get('text') or 'no reason is known'}"
    if kind == "world":
        count = event.get("ranks", event.get("size"))
        what = f": {event['what']}" if event.get("what") else ""
        return f"{count} workers continue (generation {event.get('generation')}){what}"
    details = ", ".join(f"{name} {value}" for name, value in event.items() if name not in _TOLD)
    return " ".join(filter(None, [f"{kind}:", who, details])).rstrip(":")
