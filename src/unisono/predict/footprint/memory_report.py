"""The answer of `un.memory`: what a machine has, a table of all settings, what fits, and predicted against measured."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.launchers.runtime.machine import host_bytes
from unisono.methods.spec import build
from unisono.predict.footprint.formula import (
    HALF_BYTES,
    KINDS,
    ModelFacts,
    Need,
    compute_need,
    list_settings,
)
from unisono.text_table import format_rows
from unisono.units import parse_size, show_size


@dataclass(frozen=True)
class Capacity:
    """Bytes that there are: of a worker's device, of a host with `workers` workers on it, and of its disk.

    `device` None: the workers compute in the host's own memory.
    """

    device: int | None
    host: int
    disk: int
    workers: int
    guessed: tuple[str, ...] = ()  # what was not given, and taken from this machine

    def describe(self) -> str:
        """The capacity in one line, for a report."""
        here = {name: " (this machine's)" if name in self.guessed else "" for name in ("device", "host", "disk")}
        shared = f", shared by {self.workers} workers" if self.workers > 1 else ""
        parts = [f"host {show_size(self.host)}{here['host']}{shared}", f"disk {show_size(self.disk)}{here['disk']}"]
        if self.device is not None:
            return "; ".join([f"device {show_size(self.device)}{here['device']}", *parts])
        return "; ".join([f"{parts[0]}, in which they compute", parts[1]])


def find_capacity(
    device_memory: str | int | None,
    host_memory: str | int | None,
    disk: str | int | Path | None,
    *,
    workers: int,
) -> Capacity:
    """Sizes as given; what is not given is this machine's. `disk` is a size, or a folder on that disk."""
    guessed: list[str] = []
    if device_memory is not None:
        device: int | None = parse_size(device_memory, "device_memory")
    elif torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory
        guessed.append("device")
    else:
        device = None
    if host_memory is not None:
        host = parse_size(host_memory, "host_memory")
    else:
        host = host_bytes()
        guessed.append("host")
    room, here = _find_room(disk)
    return Capacity(device, host, room, workers, (*guessed, "disk") if here else tuple(guessed))


def _find_room(disk: str | int | Path | None) -> tuple[int, bool]:
    if disk is None:
        return shutil.disk_usage(".").free, True
    if isinstance(disk, (str, Path)) and Path(disk).is_dir():
        return shutil.disk_usage(disk).free, False
    if isinstance(disk, Path):
        raise ValueError(f"disk: no such folder: {disk}; give a folder that exists, or a size such as '200GiB'")
    try:
        return parse_size(disk, "disk"), False
    except ValueError as error:
        raise ValueError(f"{error}; or a folder that exists, whose free space counts") from None


_BEST = 5  # of the settings that fit, so many are spelled out


class SettingRow(NamedTuple):
    """A setting, and what a worker needs under it."""

    spec: str  # to give to un.parallel
    need: Need
    shortage: str  # what there is too little of, in words; empty where it fits


@dataclass(frozen=True)
class Comparison:
    """Predicted against measured bytes, by place: {"device": (predicted, measured), ...}."""

    spec: str
    places: dict[str, tuple[int, int]]

    def ratio(self, place: str = "device") -> float:
        """Measured bytes over predicted ones."""
        predicted, measured = self.places[place]
        return measured / max(1, predicted)

    def __str__(self) -> str:
        parts = [
            f"{place}: predicted {show_size(p)}, measured {show_size(m)} ({m / max(1, p) - 1:+.1%})"
            for place, (p, m) in self.places.items()
        ]
        return f"{self.spec}: {'; '.join(parts)}"


@dataclass(frozen=True)
class MemoryReport:
    """What each of `workers` workers needs under every setting. `print(report)` shows all of it.

    facts: what was found of the model, the optimizer and a step.
    machine: what there is.
    left_out: what could not be found, in words: it is missing from the numbers.
    """

    facts: ModelFacts
    machine: Capacity
    workers: int
    left_out: tuple[str, ...] = ()
    title: str = ""
    mesh: tuple[int, int] = (1, 1)  # tensor, pipeline

    @property
    def replicas(self) -> int:
        """How many workers have the same part of the model: those of the data axis."""
        return self.workers // (self.mesh[0] * self.mesh[1])

    @property
    def rows(self) -> list[SettingRow]:
        """Every stage and placement, the fastest first."""
        half = self.facts.trainable_bytes > HALF_BYTES * self.facts.trainable
        whole = bool(self.facts.whole)
        settings = list_settings(self.replicas, device_is_host=self.machine.device is None, half=half, whole=whole)
        needs = [(spec, self.need(spec)) for spec in settings]
        return [SettingRow(spec, need, describe_shortage(need, self.machine)) for spec, need in needs]

    def fits(self) -> list[str]:
        """The settings that fit, the fastest first: texts to give to `un.parallel`."""
        return [row.spec for row in self.rows if not row.shortage]

    def need(self, spec: str) -> Need:
        """What a worker needs under `spec`; settings that change nothing here may be in it."""
        pattern = build(spec, kind="strategy").pattern()
        if pattern.keeps is None:
            raise ValueError(f"memory is known for allreduce with any reducer, shared and zero, got {spec!r}")
        # On one host all cores compute: what is exchanged waits (see `overlap_pays`).
        apart = self.machine.device is not None
        overlap = apart or self.workers > self.machine.workers
        near = max(1, min(self.replicas, self.machine.workers // self.mesh[0]))  # of the data axis, on one host
        options: Any = {"overlap": overlap, "apart": apart, "per_host": near, "reducer": pattern.reducer}
        return compute_need(self.facts, pattern.keeps, self.replicas, **options)

    def compare(self, spec: str, **measured: int | None) -> Comparison:
        """Predicted against measured: `compare("zero(stage=2)", device=peak_bytes, host=..., disk=...)`."""
        wanted, places = self.need(spec), ("device", "host", "disk")
        odd = [name for name in measured if name not in places]
        if odd:
            raise TypeError(f"compare got {odd[0]!r}; expected bytes of {', '.join(places)}")
        return Comparison(spec, {k: (getattr(wanted, k), v) for k, v in measured.items() if v is not None})

    # Words -----------------------------------------------------------------------------------------------

    def table(self) -> str:
        """All settings, a line each, in bytes of one worker; 16-bit moments only where nothing else fits."""
        with_host = self.machine.device is not None
        head = ["setting", *KINDS, "device", *(["host"] if with_host else []), "disk", "fits"]
        if not with_host:
            head[head.index("device")] = "memory"
        lines: list[list[str]] = [head]
        rows = self.rows
        plain = [row for row in rows if "moments" not in row.spec]
        only_these = any(not row.shortage for row in rows) and all(row.shortage for row in plain)
        for row in rows if only_these else plain:
            n = row.need
            total = [n.device, n.host] if with_host else [n.device + n.host]
            numbers = [*(getattr(n, kind) for kind in KINDS), *total, n.disk]
            lines.append([row.spec, *(show_size(x) for x in numbers), "no" if row.shortage else "yes"])
        return "\n".join(format_rows(lines))

    def __str__(self) -> str:
        parts = [self._format_head(), self.table(), self._format_advice()]
        if self.left_out:
            parts.append("not in these numbers:\n" + "\n".join(f"  - {what}" for what in self.left_out))
        return "\n\n".join(parts)

    def _format_head(self) -> str:
        f = self.facts
        frozen = f", {f.frozen:,} frozen" if f.frozen else ""
        many = f"{self.workers} workers" if self.workers > 1 else "1 worker"
        if self.mesh != (1, 1):
            many += f" (data={self.replicas}, tensor={self.mesh[0]}, pipeline={self.mesh[1]})"
            many = f"a worker's part, {many}"
        return (
            f"{self.title or 'model'}: {f.trainable:,} trainable parameters{frozen}, {many}; bytes of one worker\n"
            f"available: {self.machine.describe()}"
        )

    def _format_advice(self) -> str:
        rows = self.rows
        fitting = [row for row in rows if not row.shortage]
        if not fitting:
            return self._explain_no_fit(rows)
        lines = ["fits, the fastest first:"]
        rows_shown = [["", row.spec, self._format_total(row.need)] for row in fitting[:_BEST]]
        lines += format_rows(rows_shown, left=(1, 2))
        if len(fitting) > _BEST:
            lines.append(f"  and {len(fitting) - _BEST} more: report.fits() has all of them")
        best = fitting[0].spec
        if self.machine.device is not None and "params_on" not in best:
            if 'optimizer_on="cpu"' in best:
                there = show_size(self.machine.device)
                lines.append(f'add device_memory="{there}" to it, and as much of the state as fits stays on the device')
            elif 'optimizer_on="disk"' in best:
                lines.append('add host_memory="..." to it, and as much of the state stays in the host\'s memory')
        return "\n".join(lines)

    def _format_total(self, n: Need) -> str:
        if self.machine.device is None:
            return f"{show_size(n.device + n.host)}" + (f", {show_size(n.disk)} of disk" if n.disk else "")
        parts = [(n.device, "on the device"), (n.host, "of the host"), (n.disk, "of disk")]
        return ", ".join(f"{show_size(x)} {where}" for x, where in parts if x)

    def _explain_no_fit(self, rows: Sequence[SettingRow]) -> str:
        def excess(row: SettingRow) -> float:
            """By what factor the scarcest resource is exceeded."""
            return max(wanted / max(1, has) for _, wanted, has, _ in _list_demands(row.need, self.machine))

        least = min(rows, key=excess)
        lines = [f"nothing fits. Closest: {least.spec}, which lacks {least.shortage}."]
        if least.need.activations > least.need.device / 2:
            lines.append(
                f"Activations take {show_size(least.need.activations)} of it: a smaller batch per worker, or "
                "activation checkpointing (torch.utils.checkpoint), needs less."
            )
        for more in (self.workers * 2**i for i in range(1, 11)):
            if fitting := dataclasses.replace(self, workers=more).fits():
                lines.append(f"With {more} workers, {fitting[0]} fits, with as many per host and the same batch each.")
                break
        return "\n".join(lines)


def describe_shortage(needed: Need, there: Capacity) -> str:
    """Which memory is short and by how much, in words; empty if everything fits."""
    parts = []
    for name, wanted, has, many in _list_demands(needed, there):
        if wanted > has:
            each = f" for {many} workers" if many > 1 else ""
            parts.append(f"{show_size(wanted - has)} of {name} (needs {show_size(wanted)}{each}, has {show_size(has)})")
    return " and ".join(parts)


def _list_demands(needed: Need, there: Capacity) -> list[tuple[str, int, int, int]]:
    many = there.workers
    if there.device is None:
        host = [("memory", (needed.device + needed.host) * many, there.host, many)]
    else:
        host = [
            ("device memory", needed.device, there.device, 1),
            ("host memory", needed.host * many, there.host, many),
        ]
    return [*host, ("disk", needed.disk * many, there.disk, many)]
