"""Commands that read what runs have left: their records, and checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.arguments import Command, parse_count
from unisono.launchers.runtime.run_folder import NoSuchRun, find_run, find_runs_folder, list_runs
from unisono.units import show_bytes

if TYPE_CHECKING:
    from unisono.observe.reports.summary import Summary
    from unisono.observe.runs.reading import RunReader

__all__ = ["COMMANDS"]

# unisono runs -----------------------------------------------------------------------------------------------------

_RUNS = """\
List the recorded runs, the newest first: name, when, workers, method, steps, loss, outcome. `unisono report NAME` shows
one.
"""
_RUNS_MORE = """\
They are in $UNISONO_RUNS, or in ~/.local/state/unisono/runs. The oldest are removed beyond 50 runs or 1 GiB.

examples:
  unisono runs --last 5
  unisono runs --json
"""


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.add_argument("--last", type=parse_count, metavar="N", help="only the newest N; default: all")


def _run_runs(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from unisono.observe.reports.summary import show_time, summarise
    from unisono.observe.reports.text import list_run, print_runs
    from unisono.observe.runs.reading import RunReader

    found = []
    for folder in list_runs()[: options.last]:
        reader = RunReader(folder, ends=True)
        reader.poll()
        found.append(summarise(reader))
    if options.json:
        names = ("name", "folder", "started", "seconds", "workers", "strategy", "steps", "outcome", "exit_status")
        whole = [one.as_json() for one in found]
        print(json.dumps([{**{name: one[name] for name in names}, "loss": one["loss"]} for one in whole], indent=1))
        return 0
    if not found:
        print(
            f"unisono: no run is recorded in {find_runs_folder() or 'any folder (UNISONO_RUNS=off)'}", file=sys.stderr
        )
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    print_runs([list_run(one, show_time(one.started)) for one in found], console)
    return 0


# unisono report ---------------------------------------------------------------------------------------------------

_REPORT = """\
Report on a run: its settings, the cost of a step in compute, communication, waiting and data, bytes by kind, speed-up
and efficiency, the slowest rank and why, how evenly data and work were split, losses and metrics, verdicts and changes
of the world.

`unisono run` records runs, `unisono runs` lists them. If a run was killed, or its record is damaged, the report covers
what was recorded and says what is missing.
"""
_REPORT_MORE = """\
examples:
  unisono report last                          the newest run of this folder, in short
  unisono report last --html report.html       a page with charts that opens without a network
  unisono report last --png report.png --trace trace.json    a picture; a trace for ui.perfetto.dev
  unisono report 2026-11-16_15-40-12_train     by its name, or the beginning of it
  unisono report runs/a runs/b                 two runs side by side
  unisono report last --baseline 2026-11-16_15-38    speed-up as measured against a run with one worker
"""


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, its name, or last")
    parser.add_argument(
        "--baseline", metavar="RUN", help="measure the speed-up against this run, such as one with -n 1"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that opens without a network")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture (.png, .svg or .pdf)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of all ranks, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead")


def _run_report(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if len(options.runs) > 1 and (options.trace or options.png):
        parser.error("--png and --trace work for one run: name one")
    from unisono.observe.reports.summary import compare_with, summarise

    try:
        readers = [_read(name) for name in options.runs]
        base = summarise(_read(options.baseline)) if options.baseline else None
    except NoSuchRun as error:
        print(f"unisono report: {error}", file=sys.stderr)
        return 1
    found = [summarise(reader) for reader in readers]
    if base is not None:
        for one in found:
            one.speed_up = compare_with(one, base)
    if not _write_files(options, readers, found):
        return 1
    if options.json:
        numbers = [one.as_json() for one in found]
        print(json.dumps(numbers[0] if len(numbers) == 1 else numbers, indent=1))
    else:
        _print(found)
    return 0


def _read(name: str) -> RunReader:
    from unisono.observe.runs.reading import RunReader

    reader = RunReader(find_run(name))
    reader.poll()
    return reader


def _print(found: list[Summary]) -> None:
    from rich.console import Console

    from unisono.observe.reports.text import print_report, print_side_by_side
    from unisono.observe.reports.wording import list_differences

    console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 140)
    if len(found) == 1:
        print_report(found[0], console)
    else:
        print_side_by_side(list_differences(found), [one.name for one in found], console)


def _write_files(options: argparse.Namespace, readers: list[RunReader], found: list[Summary]) -> bool:
    """Write what was asked for; False, and a word, where that cannot be done."""
    from unisono.observe.reports.page import draw, make_page
    from unisono.observe.reports.trace import write_trace

    jobs: list[tuple[Path | None, Callable[[Path], object]]] = [
        (options.html, lambda path: path.write_text(make_page(found), encoding="utf-8")),
        (options.png, lambda path: draw(found[0], path)),
        (options.trace, lambda path: write_trace(readers[0], path)),
    ]
    for path, write in jobs:
        if path is None:
            continue
        try:
            write(path)
        except (OSError, ValueError, ImportError) as error:
            why = f"{path}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
            print(f"unisono report: {why}", file=sys.stderr)
            return False
        print(f"unisono: wrote {path}", file=sys.stderr)
    return True


# unisono export ---------------------------------------------------------------------------------------------------

_EXPORT = """\
Write the model of the newest intact checkpoint in another format: as one safetensors file, as a Hugging Face folder, or
(with the optimizer) as a folder of torch.distributed.checkpoint.

It may be of any strategy, placement and number of workers, and of any of these formats itself. The tensors stream, one
at a time. Model and optimizer in Python: un.read_checkpoint, un.export.
"""
_EXPORT_MORE = """\
exit status: 0; 1 if there is no intact checkpoint; 2 if the file exists.

examples:
  unisono export run/checkpoint model.safetensors
  unisono export run/checkpoint/step-1200 model.safetensors --overwrite
  unisono export run/checkpoint ema.safetensors --average
  unisono export run/checkpoint my-model --format huggingface --dtype bf16 --like base-model
  unisono export run/checkpoint for-fsdp2 --format dcp
"""


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a folder that un.save wrote to, one checkpoint in it, or another format")
    parser.add_argument("out", help="the file or folder to write")
    parser.add_argument("--format", choices=("safetensors", "huggingface", "dcp"), help="default: by the name of out")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the weights; default: unchanged")
    parser.add_argument("--like", metavar="FOLDER", help="a Hugging Face folder whose config and tokenizer are copied")
    parser.add_argument("--average", action="store_true", help="the average of the weights that un.average kept")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file or folder")


def _run_export(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import torch

    from unisono.training.checkpoint import CheckpointError
    from unisono.training.checkpoint.export import export

    form: Any = options.format or ("safetensors" if "." in Path(options.out).name else None)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}[options.dtype]
    given = {"dtype": dtype, "like": options.like, "overwrite": options.overwrite}
    try:
        done = export(options.checkpoint, options.out, form, average=options.average, **given)
    except FileExistsError:
        parser.error(f"{options.out} exists: choose another name, or pass --overwrite")
    except (CheckpointError, OSError, ValueError) as error:
        print(f"unisono export: {error}", file=sys.stderr)
        return 1
    print(
        f"{done.path}: {done.tensors} tensors, {show_bytes(done.size_bytes)}, from {done.checkpoint} (step {done.step})"
    )
    return 0


COMMANDS = {
    "runs": Command(_RUNS, _RUNS_MORE, _add_runs, _run_runs),
    "report": Command(_REPORT, _REPORT_MORE, _add_report, _run_report),
    "export": Command(_EXPORT, _EXPORT_MORE, _add_export, _run_export),
}
