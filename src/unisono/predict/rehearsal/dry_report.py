"""What a dry run found, in words."""

from __future__ import annotations

from unisono.predict.rehearsal.dry import DryResult
from unisono.text_table import format_rows
from unisono.units import show_s, show_size

__all__ = ["write_dry_report"]

_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def write_dry_report(result: DryResult) -> str:
    """The report of a dry run as text."""
    parts = [_write_head(result), _write_shapes(result), _write_memory(result), _write_traffic(result)]
    for title, lines in (("problems", result.problems), ("notes", result.notes)):
        if lines:
            parts.append("\n".join([title, *(f"  - {line}" for line in lines)]))
    parts.append("this run would not work" if result.problems else "this run would work")
    return "\n\n".join(part for part in parts if part)


def _write_head(result: DryResult) -> str:
    request = result.request
    hosts = -(-request.workers // request.per_host)
    where = "one host" if hosts == 1 else f"{hosts} hosts, {request.per_host} on each"
    method = f", {result.strategy}" if result.strategy else ""
    return (
        f"dry run of {request.program}: {request.workers} workers on {where}{method}; {result.steps} steps of one of "
        "them\nNothing was sent, and un.save wrote nothing. What else the script does, it has done."
    )


def _write_shapes(result: DryResult) -> str:
    lines = [f"  model           {result.model}"] if result.model else []
    lines += [f"  a worker's part {text}" for text in result.inputs]
    lines += [f"  data            {text}" for text in result.data]
    return "\n".join(["shapes", *lines]) if lines else ""


def _write_memory(result: DryResult) -> str:
    if result.memory is None:
        return ""
    try:
        need = result.memory.need(result.strategy or "allreduce")
    except ValueError:
        need = result.memory.need("allreduce")
    total = need.device + (need.host if result.memory.machine.device is None else 0)
    kinds = ", ".join(f"{kind} {show_size(getattr(need, kind))}" for kind in _KINDS if getattr(need, kind))
    lines = ["memory of a worker", f"  {show_size(total)}: {kinds}", f"  there is: {result.memory.machine.describe()}"]
    lines += [f"  not in it: {what}" for what in result.memory.left_out]
    return "\n".join(lines)


def _write_traffic(result: DryResult) -> str:
    if not result.traffic:
        return ""
    rows = sorted(result.traffic.items(), key=lambda item: -item[1].sent)
    table = [["", kind, show_size(round(t.sent)), f"in {t.calls:.3g} calls"] for kind, t in rows]
    table.append(["", "in all", show_size(round(sum(t.sent for _, t in rows))), ""])
    lines = ["traffic of a step, sent by each worker", *format_rows(table, left=(1, 3))]
    if result.exchange_s is not None:
        link = result.request.link
        lines.append(f"  over links of {link.describe()} (--net), one after the other: {show_s(result.exchange_s)}")
    return "\n".join(lines)
