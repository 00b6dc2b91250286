"""Numbers and outcomes of a run in words, the same on a terminal, on a page and in a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from unisono.observe.reports.summary import PARTS, RankSummary, Summary, show_time
from unisono.units import show_bytes, show_duration, show_ms, show_number

__all__ = [
    "conclude",
    "count_classes",
    "describe_balance",
    "describe_noise",
    "describe_outcome",
    "describe_speed_up",
    "list_differences",
    "list_facts",
    "list_parts",
    "list_rank_cells",
]

_GOOD = 0.8  # an efficiency
_OUTCOMES = {
    "ok": "ended well",
    "failed": "failed",
    "interrupted": "interrupted",
    "preempted": "saved and left after SIGTERM",
    "killed": "killed: its launcher wrote no end",
    "running": "still running",
    "unknown": "how it ended is not known",
}


def describe_outcome(found: Summary) -> str:
    """How the run ended, in words."""
    text = _OUTCOMES.get(found.outcome, found.outcome)
    return text if not found.exit_status else f"{text} (exit status {found.exit_status})"


def list_facts(found: Summary) -> list[tuple[str, str]]:
    """Names and texts that say what the run was."""
    hosts = found.hosts if len(found.hosts) <= 4 else [*found.hosts[:3], f"{len(found.hosts) - 3} more"]
    where = f" on {', '.join(hosts)}" if hosts else ""
    samples = f", {found.samples_a_step:.4g} samples each" if found.samples_a_step else ""
    facts = [
        ("run", found.name),
        ("outcome", describe_outcome(found)),
        ("started", f"{show_time(found.started) or 'not known'}, lasted {show_duration(found.seconds)}"),
        ("command", found.command or "not known"),
        ("method", found.strategy or "not known"),
        ("mesh", found.mesh),
        ("workers", f"{found.workers}{where}" + (f", {', '.join(found.devices[:3])}" if found.devices else "")),
        ("encryption", found.encryption),
        ("steps", f"{found.steps:,}{samples}"),
        ("noise scale", describe_noise(found)),
        ("model", "not known" if found.parameters is None else f"{found.parameters:,} parameters"),
        ("versions", ", ".join(f"{name} {text}" for name, text in found.versions.items()) or "not known"),
        ("folder", found.folder),
    ]
    return [(name, text) for name, text in facts if text]


def describe_noise(found: Summary) -> str:
    """How large a batch would still save steps; empty where that was not measured."""
    batches = found.noise_batches
    if batches is None:
        return ""
    samples = f", about {batches * found.samples_a_step:,.3g} samples" if found.samples_a_step else ""
    if batches > 2:
        means = "a larger batch would save steps nearly in proportion"
    else:
        means = "a larger batch saves few steps" if batches < 0.5 else "the batch is about as large as pays"
    return f"{batches:.3g} times the global batch{samples}: {means}"


def conclude(found: Summary) -> str:
    """Whether the workers were worth it, and what to do; empty where that is not known."""
    gained = found.speed_up
    if gained.times is None or gained.efficiency is None or not found.cost.get("wall"):
        return ""
    bound = "" if gained.how.startswith("measured") else "at most "
    work = f"{found.workers} workers do {bound}{gained.times:.2f} times the work of one"
    if gained.efficiency >= _GOOD:
        return f"{work}: little is left to gain."
    most = max((part for part in PARTS if part != "compute"), key=lambda part: found.cost[part])
    why = f"{most} takes {100 * found.cost[most] / found.cost['wall']:.0f} % of a step"
    slow = found.slowest.text if found.slowest and found.slowest.cause else ""
    if gained.times < 1 and not (slow and most == "waiting"):  # else the slow rank is to blame, not the model
        return f"One worker is faster for this model: {work}, as {why}. Use -n 1, or more samples per worker."
    remedy = {
        "communication": "`unisono plan` looks for a method that needs less; larger batches need fewer exchanges",
        "waiting": slow or "more samples per step help",
        "data": "read ahead of the step, as a DataLoader with num_workers does",
    }[most]
    return f"{work}, as {why}: {remedy}."


def describe_speed_up(found: Summary) -> str:
    """How many times as fast as one worker it is, and how that is known."""
    gained = found.speed_up
    if gained.times is None or gained.efficiency is None:
        return f"speed-up: {gained.how}"
    return f"speed-up {gained.times:.2f}, efficiency {100 * gained.efficiency:.0f} %: {gained.how}"


def list_rank_cells(found: Summary, rank: RankSummary, *, details: bool = False) -> list[str]:
    """A rank's row in the table of costs; `details`: with its host and its longest step.

    The mesh is a column of its own if the run had one.
    """
    place = [rank.mesh_place] if any(one.mesh_place for one in found.ranks) else []
    times = [show_ms(rank.cost[name]) for name in ("wall", *PARTS, "hidden")]
    samples = "-" if rank.samples is None else f"{rank.samples:,}"
    host, longest = ([rank.host], [show_ms(rank.longest_s)]) if details else ([], [])
    sent = show_bytes(rank.cost["bytes_sent"])
    return [rank.label, *place, *host, *times, *longest, sent, f"{rank.steps:,}", samples]


def count_classes(ranks: Iterable[RankSummary]) -> dict[str, int]:
    """Samples of all these ranks, by class."""
    total: dict[str, int] = {}
    for rank in ranks:
        for name, count in rank.classes.items():
            total[name] = total.get(name, 0) + count
    return total


def describe_balance(found: Summary) -> list[str]:
    """How evenly data and work were split."""
    trained = [rank for rank in found.ranks if rank.steps]
    lines = []
    reading = [rank for rank in trained if not rank.is_copy]
    samples = [rank.samples for rank in reading if rank.samples is not None]
    if len(samples) > 1 and len(samples) == len(reading):
        lines.append(f"samples per worker: {min(samples):,} to {max(samples):,}, {sum(samples):,} in all")
    own = [rank.own_s for rank in trained]
    if len(own) > 1 and max(own) > 0:
        lines.append(f"own work per step: {show_ms(min(own))} to {show_ms(max(own))} ms (compute and data)")
    if (mix := _describe_classes(found)) is not None:
        lines.append(mix)
    return lines


def _describe_classes(found: Summary) -> str | None:
    """How far a worker's mix of classes is from that of all: half the sum of the differences between the shares."""
    known = [rank for rank in found.ranks if rank.classes and not rank.is_copy]
    if len(known) < 2:
        return None
    total = count_classes(known)
    every = sum(total.values())
    distances = []
    for rank in known:
        own = sum(rank.classes.values())
        distances.append(sum(abs(rank.classes.get(n, 0) / own - c / every) for n, c in total.items()) / 2)
    worst = max(range(len(known)), key=lambda i: distances[i])
    text = f"class mix: {len(total)} classes; the worker furthest from the overall mix is rank {known[worst].rank}"
    return f"{text}, with {100 * distances[worst]:.1f} % of its samples in other classes"


def list_parts(found: Summary) -> list[str]:
    """The parts of a step, those that cannot be told apart marked."""
    return [f"{part} (not told apart)" if part in found.not_measured else part for part in PARTS]


# Runs side by side ----------------------------------------------------------------------------------------------------


def list_differences(runs: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """Rows of a table: a name, and a cell for each run; of numbers, how many times the first run's."""
    bubble = "  bubble, % of the schedule"
    rows: list[tuple[str, list[str]]] = [
        ("outcome", [describe_outcome(run) for run in runs]),
        ("started", [show_time(run.started) or "-" for run in runs]),
        ("lasted", [show_duration(run.seconds) for run in runs]),
        ("command", [run.command or "-" for run in runs]),
        ("method", [run.strategy or "-" for run in runs]),
        ("workers", [str(run.workers) for run in runs]),
        ("mesh", [run.mesh or "-" for run in runs]),
        ("parameters", ["-" if run.parameters is None else f"{run.parameters:,}" for run in runs]),
        ("versions", [", ".join(f"{k} {v}" for k, v in run.versions.items()) or "-" for run in runs]),
        ("steps", [f"{run.steps:,}" for run in runs]),
        _compare("step, ms", [run.cost.get("wall") for run in runs], show_ms),
        *(_compare(f"  {part}", [run.cost.get(part) for run in runs], show_ms) for part in PARTS),
        _compare(bubble, [100 * run.pipeline.bubble if run.pipeline else None for run in runs], "{:.1f}".format),
        _compare("sent per step and worker", [run.cost.get("bytes_sent") for run in runs], show_bytes),
        _compare("samples per second", [run.samples_a_second for run in runs], "{:,.0f}".format),
        _compare("speed-up", [run.speed_up.times for run in runs], "{:.2f}".format),
        ("slowest rank", [_describe_slowest(run) for run in runs]),
    ]
    lasts = [{metric.name: metric.last for metric in run.metrics if metric.values} for run in runs]
    names = dict.fromkeys(metric.name for run in runs for metric in run.metrics if metric.how != "rank")
    rows += [_compare(f"{name}, last", [last.get(name) for last in lasts], show_number) for name in names]
    rows.append(("missing", ["; ".join(run.missing) or "nothing" for run in runs]))
    same = ("versions", "command", "parameters", "missing")
    rows = [(name, cells) for name, cells in rows if name not in ("mesh", bubble) or set(cells) != {"-"}]
    return [(name, cells) for name, cells in rows if name not in same or len(set(cells)) > 1 or name == "parameters"]


def _compare(name: str, numbers: Sequence[float | None], show: Callable[[float], str]) -> tuple[str, list[str]]:
    first, *others = ["-" if number is None else show(number) for number in numbers]
    for i, number in enumerate(numbers[1:]):
        if number and numbers[0]:
            others[i] += f"  ({number / numbers[0]:.2f}x)"
    return name, [first, *others]


def _describe_slowest(run: Summary) -> str:
    if run.slowest is None:
        return "-"
    return f"{run.slowest.rank}: {run.slowest.cause}, {run.slowest.factor:.2f}x" if run.slowest.cause else "none"
