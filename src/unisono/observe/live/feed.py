"""What the page is sent: the whole (thinned) history when it opens, then what has changed.

Every message may be applied twice: it sets bins, points and marks by their numbers. So a page that opens in the middle
of the stream misses nothing, and one that lost its connection begins anew with the whole.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from unisono.launchers.runtime.run_folder import NOISE, SIGNAL, divide_noise
from unisono.observe.live.bins import BYTES, PARTS, STEPS, Bins, Floats
from unisono.observe.live.live_run import LiveRun, LiveWorker, Speed
from unisono.observe.runs.reading import say_mesh_place
from unisono.units import as_json

__all__ = ["MANY", "VIEWS", "WORST", "Feed"]

VIEWS = ("recent", "whole")
MANY = 64  # with more ranks, rows are those of the worst, and a heat map has all
WORST = 24
_CHOICE_S = 5.0  # the worst are chosen again so often
_RANKS_S = 1.0  # numbers of more than MANY ranks are sent so often
_DATA = PARTS.index("data")


class Feed:
    """Messages, as JSON, for each view of one run: "recent" has the last minutes, "whole" all of it."""

    def __init__(self, live: LiveRun) -> None:
        self.live = live
        self._header = ""
        self._rows: list[int] = []  # the places that have a row in the timeline
        self._rows_told: dict[str, list[int]] = {}
        self._folds_told: dict[str, int] = {}
        self._chosen_at = self._ranks_at = float("-inf")

    # The two messages ------------------------------------------------------------------------------------------------

    def make_snapshot(self, view: str, now: float) -> str:
        """The message for a page that opens: everything that is known."""
        speeds, states = self.live.measure_speeds(), self.live.describe_places(now)
        self._choose_rows(speeds, states, now)
        bins = self._bins(view)
        self._folds_told.setdefault(view, bins.folds)
        self._rows_told.setdefault(view, self._rows)
        return _write(
            {
                "all": True,
                "now": round(now, 3),
                "view": view,
                "run": self._describe_run(),
                "ranks": self._list_ranks(speeds, states),
                "metrics": self._list_metrics(all_points=True),
                "marks": self.live.marks.since(0),
                **self._list_bins(bins, bins.first, bins.first),
            }
        )

    def make_updates(self, views: set[str], now: float) -> dict[str, str]:
        """What has changed since the last call, for these views."""
        live = self.live
        common: dict[str, Any] = {"now": round(now, 3)}
        header = self._describe_run()
        if (text := json.dumps(header)) != self._header:
            self._header, common["run"] = text, header
        if len(live.places) <= MANY or now - self._ranks_at >= _RANKS_S:
            self._ranks_at = now
            speeds, states = live.measure_speeds(), live.describe_places(now)
            self._choose_rows(speeds, states, now)
            common["ranks"] = self._list_ranks(speeds, states)
        if metrics := self._list_metrics(all_points=False):
            common["metrics"] = metrics
        if marks := live.marks.since(live.marks.changed):
            common["marks"] = marks
        updates = {view: self._update_view(view, common, now) for view in views}
        live.mark_told()
        return updates

    def _update_view(self, view: str, common: dict[str, Any], now: float) -> str:
        bins = self._bins(view)
        if self._folds_told.get(view) != bins.folds:  # the numbers of bins are others now
            self._folds_told[view] = bins.folds
            self._rows_told[view] = self._rows
            return self.make_snapshot(view, now)
        changed = max(bins.changed, bins.first)
        all_rows = self._rows_told.get(view) != self._rows
        self._rows_told[view] = self._rows
        return _write({**common, **self._list_bins(bins, changed, bins.first if all_rows else changed)})

    # Their parts -----------------------------------------------------------------------------------------------------

    def _bins(self, view: str) -> Bins:
        return self.live.whole if view == "whole" else self.live.recent

    def _choose_rows(self, speeds: dict[int, Speed], states: dict[int, str], now: float) -> None:
        places = self.live.places
        if len(places) <= MANY:
            rows = sorted(places)
        elif now - self._chosen_at >= _CHOICE_S:
            self._chosen_at = now
            rows = self.live.order_places(speeds, states)[:WORST]
        else:
            return
        self._rows = rows

    def _describe_run(self) -> dict[str, Any]:
        live, run = self.live, self.live.run
        first = next((live.places[n] for n in sorted(live.places)), None)
        about = first.header if first is not None else {}
        size = int(about.get("size") or 0) or run.get("workers") or len(live.places)
        hosts = {str(place.header.get("host")) for place in live.places.values() if place.header.get("host")}
        return {
            "name": run.get("name") or live.folder.name,
            "folder": str(live.folder),
            "command": [str(word) for word in run.get("command") or []],
            "cwd": run.get("cwd"),
            "engine": run.get("engine"),
            "versions": run.get("versions") or {},
            "hosts": sorted(hosts)[:100],
            "size": size,
            "strategy": about.get("strategy"),
            "mesh": about.get("mesh"),
            "device": about.get("device"),
            "parameters": about.get("parameters"),
            "started": run.get("started"),
            "ended": run.get("ended"),
            "state": live.describe_state(),
            "exit_status": run.get("exit_status"),
            "report": str(run.get("report") or "")[:20_000],
            "missing": live.missing[:20],
            "unreadable": live.unreadable,
            "many": len(live.places) > MANY,
            "last": round(max((place.last for place in live.places.values()), default=0.0), 3)
            if live.is_over()
            else None,
        }

    def _list_ranks(self, speeds: dict[int, Speed], states: dict[int, str]) -> list[list[Any]]:
        return [_describe_place(self.live.places[n], speeds.get(n), states[n]) for n in sorted(self.live.places)]

    def _list_metrics(self, *, all_points: bool) -> dict[str, Any]:
        found = {}
        for name, series in self.live.metrics.items():
            if name in (NOISE, SIGNAL):
                continue
            since = 0 if all_points else series.changed
            points = [
                [s, round(t, 3), _short(v), _short(low), _short(high)] for s, t, v, low, high in series.since(since)
            ]
            if points:
                found[name] = {"how": series.how, "from": since * series.width, "points": points}
        if NOISE in self.live.metrics and SIGNAL in self.live.metrics:
            noise, signal = self.live.metrics[NOISE], self.live.metrics[SIGNAL]
            since = 0 if all_points else min(noise.changed, signal.changed)
            both = zip(noise.since(since), signal.since(since), strict=False)
            shown = [(s, t, divide_noise(over, under)) for (s, t, over, *_), (_, _, under, *_) in both]
            points = [[s, round(t, 3), *[_short(x)] * 3] for s, t, x in shown if x is not None]
            if points:
                found["noise scale / batch"] = {"how": "mean", "from": since * noise.width, "points": points}
        return found

    def _count_ranks(self, bins: Bins, number: int) -> int:
        """How many ranks there were in a bin, whether or not they have told of it yet."""
        start = (bins.begin or 0.0) + number * bins.width_s
        places = self.live.places.values()
        return sum(p.since < start + bins.width_s and (not p.outcome or p.last > start) for p in places)

    def _list_bins(self, bins: Bins, changed: int, strips_from: int) -> dict[str, Any]:
        """Bins from `changed` on as rows of numbers; cells of the timeline from `strips_from` on."""
        sums = bins.sums(min(changed, strips_from))
        skipped = changed - min(changed, strips_from)
        count = max(self.live.places, default=-1) + 1
        rows = [r for r in self._rows if r < bins.places]
        found: dict[str, Any] = {
            "bins": {
                "begin": bins.begin,
                "width": bins.width_s,
                "first": bins.first,
                "from": changed,
                "rows": [_average(one, self._count_ranks(bins, changed + i)) for i, one in enumerate(sums[skipped:])],
            },
            "strips": {
                "places": rows,
                "from": strips_from if strips_from < changed else changed,
                "cells": [_pack_strips(one[rows], bins.width_s) for one in sums],
            },
        }
        if len(self.live.places) > MANY:
            found["heat"] = {"from": min(changed, strips_from), "cells": [_pack_heat(one[:count]) for one in sums]}
        return found


def _average(one: Floats, ranks: int) -> list[float] | None:
    """A bin: steps a second, bytes a second of all ranks, seconds of a step by part, own time at the 5th, 50th and 95th
    percentile of the ranks and of the slowest; None where there is no step."""
    active = one[one[:, STEPS] > 0]
    if not len(active):
        return None
    total = active.sum(0)
    wall = float(total[: len(PARTS)].sum())
    own = (active[:, 0] + active[:, _DATA]) / active[:, STEPS]
    bands = np.percentile(own, [5, 50, 95, 100])
    speed = total[STEPS] / wall if wall else 0.0
    sent = total[BYTES] * ranks / wall if wall else 0.0
    return [_short(float(x)) for x in (speed, sent, *(total[: len(PARTS)] / total[STEPS]), *bands)]


def _pack_strips(rows: Floats, width_s: float) -> str:
    """A byte for each place and part: 200 is the whole bin."""
    shares = np.clip(rows[:, : len(PARTS)] / width_s * 200, 0, 255)
    return base64.b64encode(np.rint(shares).astype(np.uint8).tobytes()).decode()


def _pack_heat(rows: Floats) -> str:
    """A byte for each place: 0 no step, else 128 + 32 log2(own time / median of all)."""
    steps = rows[:, STEPS]
    own = np.divide(rows[:, 0] + rows[:, _DATA], steps, out=np.zeros(len(rows)), where=steps > 0)
    known = own > 0
    median = float(np.median(own[known])) if known.any() else 1.0
    levels = np.zeros(len(rows))
    levels[known] = np.clip(128 + 32 * np.log2(own[known] / median), 1, 255)
    return base64.b64encode(np.rint(levels).astype(np.uint8).tobytes()).decode()


def _describe_place(place: LiveWorker, speed: Speed | None, state: str) -> list[Any]:
    numbers = (
        [None] * (len(PARTS) + 3)
        if speed is None
        else [_short(x) for x in (speed.steps_s, *speed.parts, speed.bytes_s, speed.factor)]
    )
    about = [*(place.header.get(name) for name in ("host", "pid", "device")), say_mesh_place(place.header)]
    return [place.place, place.rank, state, place.step, round(place.last, 2), *numbers, *about]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _write(message: dict[str, Any]) -> str:
    try:
        return json.dumps(message, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:  # a number that is none, such as somebody's step: it must not end the page
        return json.dumps(as_json(message), separators=(",", ":"), default=str)
