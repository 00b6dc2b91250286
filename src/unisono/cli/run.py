"""`unisono run`: a program in N workers, on this machine or on an engine.

An option such as `--hosts` is the engine's field of the same name: an engine without that field does not take it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli import rehearsal
from unisono.cli.arguments import (
    Command,
    add_methods_option,
    check_program,
    parse_count,
    parse_folder,
    parse_ports,
    parse_seconds,
)
from unisono.cli.engine_options import FIELDS
from unisono.cli.methods import check_strategy
from unisono.cli.under_way import add_page_options, show_page
from unisono.cli.vscode import PORT, open_ports
from unisono.launchers import on
from unisono.launchers.job import Adapt, ElasticSettings, Job, check_elastic_on_one_host
from unisono.launchers.output import FOLDER
from unisono.launchers.runtime.run_folder import RunFolder, find_runs_folder

if TYPE_CHECKING:
    from unisono.launchers.engines.engine import Engine

__all__ = ["COMMANDS", "add_arguments", "run"]

_DESCRIPTION = """\
Run a program in N workers, on this machine or on a cluster.

  unisono run -n 4 train.py --epochs 3
  unisono run -n 4 --strategy "powersgd(rank=4)" --page train.py
  unisono run --on ssh -n 8 --hosts a:4,b:4 train.py

Options for unisono come before the program; everything after it belongs to the program. If a worker fails, the others
are stopped, one report says which worker failed and why, and the exit status is that worker's (128 + the number of a
signal). Ctrl-C stops everything within 2 seconds, a second Ctrl-C at once. No process that a worker started outlives
the run.

SIGTERM stops the run too. Workers that use un.Trainer with a checkpoint folder, or un.preempted(), first save and leave
after the same step; they have --grace for it. The exit status is then 143, and the same command resumes the run. A
second SIGTERM stops everything.
"""
_EPILOG = """\
output:
  auto     one worker: unchanged. Several: each line has its rank in front, "[1] loss 0.31"; on a terminal rank 0
           writes directly and without a prefix, so that a progress bar works
  prefix   lines of all ranks, with the rank in front, also on a terminal
  rank0    rank 0 only, unchanged; if another rank fails, its last 40 lines
  files    DIR/rank-0.out, DIR/rank-1.out, ... (both streams); the terminal shows only failures

elastic runs, -n MIN:MAX (docs/elastic.md)
  Starts MAX workers and replaces those that are lost. While at least MIN are left, the others continue from the
  current step. `unisono scale N` changes the number of workers during training. --adapt starts MIN workers. It adds
  one if the last was worth at least 0.3 of a worker, and removes one that was worth less than 0.1; it waits twice as
  long after each rejection before it tries again. It prints each decision to standard error. --target 12 adds workers
  only while the run makes fewer than 12 steps/s. --later 2 reserves two of the MAX places for hosts that join later
  by `unisono join`; it works without --on too.

emulated hosts, --hosts N and --net LINK (docs/lab.md)
  --hosts 4              four hosts emulated on this machine, one worker each; with -n 8 two workers each
  --net 100mbit          bandwidth of each host's link, both ways: kbit, mbit, gbit (bits per second)
  --net 100mbit,20ms     and the latency from host to host: us, ms, s; --net 20ms alone works too
  --net 3x1gbit/100mbit  a link for each host, separated by /: three fast hosts and a slow one
  The run measures the links first and prints what it found. --net without --hosts emulates a host for each worker.

faults, separated by ; (docs/faults.md)
  kill 2@40              rank 2 kills itself (SIGKILL) at step 40
  kill 2@40 in save      the same, in forward, backward, exchange, step (default: when it is counted), save, healing
  stop 1@60 for 5s       SIGSTOP, and SIGCONT five seconds later
  slow 3 x4@80-120       each of these steps takes four times as long
  full-disk@200          the next write of un.save or of an offload fails; on one rank: full-disk 1@200

before the run (docs/dry_runs.md)
  --dry -n 64            one worker's steps in a simulated world of 64, in one process: shapes, memory, traffic, and
                         what would fail; exit status 0 if it would work, 3 if memory is short, otherwise 1
  --small -n 2           a few real steps with one worker and with two: do they agree, and if not, what differs

exit status: that of the worker that failed first, 128 + the number of a signal; 0 if all ended well; 2 for a mistake on
the command line; 130 after Ctrl-C; 143 after SIGTERM.

examples:
  unisono run -n 4 train.py --epochs 3
  unisono run --dry -n 64 --workers-per-host 8 train.py
  unisono run --small -n 2 train.py
  unisono run -n 4 --pdb train.py
  unisono run -n 4 --faults "kill 2@40" train.py
  unisono run -n 2:4 train.py
  unisono run -n 1:8 --target 12 train.py
  unisono run -n 1:4 --later 3 train.py
  unisono run -n 4 --output files --output-dir logs train.py
  unisono run -n 2 -m project.train --lr 0.1
  unisono run -n 4 --hosts 4 --net 100mbit train.py
  unisono run --on mpi -n 8 --hosts a:4,b:4 train.py
  unisono run --on slurm -n 8 --script job.sh --options=--time=1:00:00 train.py
  unisono run --on torchrun -n 4 --max-restarts 2 train.py
  unisono run --on ray -n 4 --address auto train.py
  unisono run --on spark -n 4 --master spark://host:7077 train.py
  unisono run --on kubernetes --print -n 4 --image registry/train:1 train.py | kubectl apply -f -
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`: the common ones in the group of all options, first; the rest in groups of their own."""
    parser.usage = f"{parser.prog} [options] script.py ..."
    parser.add_argument(
        "-n",
        "--workers",
        type=_parse_workers,
        metavar="N",
        help="number of workers; MIN:MAX: an elastic run, in which lost workers are replaced; default with emulated "
        "hosts: one per host",
    )
    _add_course_options(parser)
    _add_record_options(parser)
    _add_engine_options(parser)
    rehearsal.add_options(parser)
    _add_process_options(parser)
    _add_elastic_options(parser)
    _add_network_options(parser)
    parser.add_argument("program", nargs="?", metavar="script.py", help="the program (a module's name with -m)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `run`; gives the exit status."""
    if options.program is None:
        parser.error("no program given; as in: unisono run -n 2 train.py")
    if options.output_dir is not None and options.output != "files":
        parser.error("--output-dir goes with --output files")
    if options.run_dir is not None and not options.record:
        parser.error("--run-dir does not go with --no-record")
    _check_log(options, parser)
    check_program(options.program, parser, module=options.module)
    check_strategy(options, parser)

    from unisono.launchers.terminal import run_in_terminal

    _read_lab(options, parser)
    rehearsal.check_options(options, parser)
    least, most = options.workers
    if options.strategy is not None:
        os.environ["UNISONO_STRATEGY"] = options.strategy
    for name, value in (("INTERFACE", options.interface), ("PORTS", options.ports)):
        if value is not None:
            os.environ[f"UNISONO_{name}"] = value
    if options.encrypt is not None:
        os.environ["UNISONO_ENCRYPT"] = str(int(options.encrypt))
    if options.balance:
        os.environ["UNISONO_BALANCE"] = "1"  # the workers' environment is made from this one
    if options.dry or options.small:
        return rehearsal.rehearse(options, parser)
    elastic = _read_elastic(options, parser, least, most)
    if options.output == "files" and not _only_writes(options):
        _make_output_folder(options.output_dir or FOLDER, parser)
    job = Job(
        [*(["-m"] if options.module else []), options.program, *options.arguments],
        most if elastic is None or elastic.adapt is None else elastic.least,
        elastic=elastic,
        threads=options.threads,
        output=options.output,
        output_dir=options.output_dir,
        start="warm" if options.warm else "fresh",
        faults=options.faults,
        pdb=options.pdb,
        debugpy=open_ports(options, parser, most),
        grace_s=options.grace,
    )
    with _recorded(options, job) as job:
        status = _run_on_engine(options, parser, job)
        return run_in_terminal(job) if status is None else status


def _make_output_folder(folder: str | Path, parser: argparse.ArgumentParser) -> None:
    """End with an error where workers could not write their output."""
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(0, "you have no permission to write there")
    except OSError as error:
        parser.error(f"--output-dir {folder}: {error.strerror}; name a folder that you can create and write to")


def _only_writes(options: argparse.Namespace) -> bool:
    """Whether no worker is started: what a cluster is to start is written."""
    return bool(options.script or options.submit or options.print)


@contextlib.contextmanager
def _recorded(options: argparse.Namespace, job: Job) -> Iterator[Job]:
    """The job with the folder that it is recorded in; at the end a line says where that is.

    Runs that measure something (`unisono plan`, `compare`) have an observer, and are not recorded.
    """
    if _only_writes(options):
        yield job
        return
    record = None
    wanted = options.record and "UNISONO_OBSERVER" not in os.environ
    if wanted and (options.run_dir is not None or find_runs_folder() is not None):
        record = RunFolder.create(
            job.program,
            folder=options.run_dir,
            workers=job.workers,
            command=["unisono", *sys.argv[1:]],
            engine=options.on,
            **({} if job.elastic is None else {"least": job.elastic.least, "most": job.elastic.most}),
        )
    with show_page(options, record):
        if record is None:
            yield job
            return
        feeding = None  # the process that hands metrics on, until the record says that the run has ended
        try:
            if options.log:
                from unisono.observe.runs.feeding import start_feeding, stop_feeding

                feeding = start_feeding(record.path, options.log)
            yield dataclasses.replace(job, record=record)
        finally:
            record.end()
            if feeding is not None:
                stop_feeding(feeding)
            record.close(keep=options.run_dir is not None)


def _check_log(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with an error where metrics cannot be handed on as asked; the environment's word goes with records only."""
    recorded = options.record and (options.run_dir is not None or find_runs_folder() is not None)
    if options.log and not recorded:
        parser.error("--log reads the run's record: it does not go with --no-record or UNISONO_RUNS=off")
    name = "--log" if options.log is not None else "UNISONO_LOG"
    options.log = (os.environ.get(name, "") if options.log is None else options.log) if recorded else ""
    if options.log:
        from unisono.observe.runs.sinks import read_asked

        try:
            read_asked(options.log)
        except ValueError as error:
            parser.error(f"{name}: {error}")


def _read_lab(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """`--hosts 4` and `--net` mean emulated hosts, unless another engine is named."""
    is_number = options.hosts is not None and len(options.hosts) == 1 and options.hosts[0].lstrip("-").isdigit()
    if options.on == "local" and (is_number or options.net is not None or options.shaper is not None):
        options.on = "lab"
    if options.on == "lab" and options.hosts is not None:
        if not is_number or int(options.hosts[0]) < 1:
            parser.error(f"got --hosts {','.join(options.hosts)}; expected a number of emulated hosts, such as 4")
        options.hosts = int(options.hosts[0])
        options.workers = options.workers or (None, options.hosts)
    if options.workers is None:
        parser.error(f"no number of workers given; as in: {parser.prog} -n 2 train.py")


class _NotWritten(Exception):
    """The job script cannot be written."""


def _parse_workers(text: str) -> tuple[int | None, int]:
    """The least and the most workers; None: they stay as many as they are.

    >>> _parse_workers("4"), _parse_workers("2:8")
    ((None, 4), (2, 8))
    """
    least, _, most = text.rpartition(":")
    found = (parse_count(least) if ":" in text else None), parse_count(most)
    if found[0] is not None and found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected MIN:MAX with MIN not above MAX, such as 2:8")
    return found


def _read_elastic(
    options: argparse.Namespace, parser: argparse.ArgumentParser, least: int | None, most: int
) -> ElasticSettings | None:
    given = {
        field: getattr(options, name)
        for name, field in (("heartbeat", "heartbeat_s"), ("deadline", "stuck_s"), ("patience", "patience_s"))
        if getattr(options, name) is not None
    }
    adapt = _read_adapt(options, parser)
    if least is None:
        for name in ("heartbeat", "deadline", "patience", "adapt", "target", "later"):
            value = getattr(options, name)
            if value is not None and value is not False:
                parser.error(f"--{name} goes with -n MIN:MAX")
        return None
    if options.max_restarts:
        parser.error("--max-restarts starts all workers again; with -n MIN:MAX those that are lost are replaced")
    if options.later and adapt is not None:
        parser.error(
            "--adapt and --target start workers as they pay, and those of --later come by themselves: give one of them"
        )
    try:
        if options.on == "local":
            check_elastic_on_one_host()
        return ElasticSettings(least, most, adapt=adapt, later=options.later or 0, **given)
    except ValueError as error:
        parser.error(str(error))


def _read_adapt(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Adapt | None:
    if not options.adapt and options.target is None:
        if options.window is not None:
            parser.error("--window goes with --adapt or --target")
        return None
    return Adapt(options.target, Adapt.window_s if options.window is None else options.window)


def _parse_rate(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected steps per second, such as 12 or 0.5")
    return float(text)


# Options that a job script has in lines for sbatch, or in a place of its own, or not at all.
_NOT_REPEATED = ("workers", "module", "on", "hosts", "options", "python", "methods", "script", "submit")


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    """Options on the workers' processes and their output."""
    group = parser.add_argument_group("processes and output")
    group.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in `python -m`")
    group.add_argument(
        "--threads",
        type=parse_count,
        metavar="K",
        help="computing threads per worker (OMP_NUM_THREADS); default: the variable, or the usable cores divided by N",
    )
    group.add_argument(
        "--output",
        choices=("auto", "prefix", "rank0", "files"),
        default="auto",
        help="where the workers' output goes, see below; default: auto",
    )
    group.add_argument(
        "--output-dir", type=parse_folder, metavar="DIR", help="folder of --output files; default: unisono-output"
    )
    group.add_argument(
        "--warm",
        action="store_true",
        help="fork the workers from a process that has imported torch, kept for 10 minutes for the next such run",
    )


def _add_record_options(parser: argparse.ArgumentParser) -> None:
    """Options that say where the run is recorded."""
    add_page_options(parser)
    group = parser.add_argument_group("the record of the run (docs/reports.md)")
    group.add_argument(
        "--run-dir",
        type=parse_folder,
        metavar="DIR",
        help="record the run in this folder; default: a new one in $UNISONO_RUNS, or in ~/.local/state/unisono/runs. "
        "`unisono report last` shows it",
    )
    group.add_argument(
        "--no-record", dest="record", action="store_false", help="record nothing; the same as UNISONO_RUNS=off"
    )
    group.add_argument(
        "--log",
        metavar="WHERE",
        help="export metrics during training: tensorboard, prometheus:9400, wandb, mlflow, or several separated by "
        "commas; default: UNISONO_LOG",
    )


def _add_course_options(parser: argparse.ArgumentParser) -> None:
    """Options on how the program trains, and how it ends."""
    parser.add_argument(
        "--strategy",
        metavar="SPEC",
        help="train by this method, whatever the program gives to un.parallel: allreduce, 'powersgd(rank=4)', ...; "
        "the same as UNISONO_STRATEGY=SPEC",
    )
    group = parser.add_argument_group("training, debugging, shutdown")
    add_methods_option(group)
    group.add_argument(
        "--pdb",
        action="store_true",
        help="if a worker raises, stop all workers and open the debugger's prompt there (docs/debugger.md)",
    )
    group.add_argument(
        "--debugpy",
        action="store_true",
        help="each worker waits for an editor's debugger; writes .vscode/launch.json (docs/debugger.md)",
    )
    group.add_argument(
        "--debug-port",
        type=parse_count,
        metavar="PORT",
        help=f"port at 127.0.0.1 where rank 0 waits for it; the others use the next ports; default: {PORT}",
    )
    group.add_argument(
        "--faults",
        metavar="TEXT",
        help="inject faults at given steps, see below; a fault that did not fire is an error; default: UNISONO_FAULTS",
    )
    group.add_argument(
        "--balance",
        action="store_true",
        help="divide each batch of un.shard by the workers' measured speeds, so that slow ones get fewer samples; the "
        "same as UNISONO_BALANCE=1",
    )
    group.add_argument(
        "--grace",
        type=parse_seconds,
        default=Job.grace_s,
        metavar="S",
        help="after SIGTERM, how long workers that use un.Trainer with a checkpoint folder, or un.preempted(), may "
        "take to save and leave: 90, 90s, 2m; 0: stop at once; default: 25s, since Slurm and Kubernetes kill after 30",
    )


def _add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """Options that go with `-n MIN:MAX`."""
    group = parser.add_argument_group("elastic runs (-n MIN:MAX, docs/elastic.md)")
    for name, default, what in (
        ("heartbeat", ElasticSettings.heartbeat_s, "replace a worker that has been stopped for so long"),
        ("deadline", ElasticSettings.stuck_s, "replace a worker that others have waited for so long"),
        (
            "patience",
            ElasticSettings.patience_s,
            "how long fewer than MIN workers wait for others before they save and leave",
        ),
    ):
        group.add_argument(f"--{name}", type=parse_seconds, metavar="S", help=f"{what}; default: {default:g}s")
    group.add_argument(
        "--adapt",
        action="store_true",
        help="start MIN workers, and add workers as long as each makes training faster, see below",
    )
    group.add_argument(
        "--target",
        type=_parse_rate,
        metavar="R",
        help="the same, up to R steps per second; fewer workers if the run is faster",
    )
    group.add_argument(
        "--window",
        type=parse_seconds,
        metavar="S",
        help=f"length of one measurement of speed; a decision takes three or more; default: {Adapt.window_s:g}s",
    )
    group.add_argument(
        "--later",
        type=parse_count,
        metavar="K",
        help="reserve K of the MAX places for hosts that join later; prints the command for them, `unisono join`",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """`--on` and the engines' settings."""
    choices = ("local", *on.__all__)
    known = f"the engine that starts the workers: {', '.join(choices)}; default: local"
    parser.add_argument("--on", choices=choices, default="local", metavar="ENGINE", help=known)
    group = parser.add_argument_group("engines (docs/engines/index.md)")
    for name, how in FIELDS.items():
        group.add_argument(f"--{name.removesuffix('_s').replace('_', '-')}", dest=name, **how)
    group.add_argument("--script", metavar="JOB.SH", help="write a script for sbatch instead of running (slurm)")
    group.add_argument("--submit", action="store_true", help="submit the script with sbatch (slurm)")
    group.add_argument(
        "--print",
        action="store_true",
        help="print the cluster's manifest instead of running (kubernetes, skypilot)",
    )


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    """Options on what passes between hosts."""
    group = parser.add_argument_group("the network between hosts (docs/networks.md)")
    group.add_argument(
        "--encrypt",
        action=argparse.BooleanOptionalAction,
        help="encrypt everything between hosts, or nothing (UNISONO_ENCRYPT=1 or 0); default: tensors if hosts are on "
        "different networks or have public addresses, everything else always",
    )
    group.add_argument(
        "--interface",
        metavar="CARD",
        help="the workers' network card: name, address or network (10.0.0.0/24); separated by commas: several cards",
    )
    group.add_argument(
        "--ports",
        type=parse_ports,
        metavar="A-B",
        help="ports on which workers and the launcher may listen for other hosts: 40000-40100; default: any",
    )


def _run_on_engine(options: argparse.Namespace, parser: argparse.ArgumentParser, job: Job) -> int | None:
    """Run the job as the options say; None where it is a local one."""
    given = {name: getattr(options, name) for name in FIELDS if getattr(options, name) is not None}
    known = set() if options.on == "local" else {field.name for field in dataclasses.fields(getattr(on, options.on))}
    for name in given:
        if name not in known:
            hint = "; names of hosts go with --on ssh, mpi or slurm" if (name, options.on) == ("hosts", "local") else ""
            parser.error(f"--{name.removesuffix('_s').replace('_', '-')} does not go with --on {options.on}{hint}")
    if options.on != "slurm" and (options.script or options.submit):
        parser.error("--script and --submit go with --on slurm")
    if options.print and options.on not in ("kubernetes", "skypilot"):
        parser.error("--print goes with --on kubernetes or --on skypilot")
    if options.later and (options.script or options.submit or options.on in ("kubernetes", "skypilot")):
        parser.error(
            "--later is for a launcher that runs here: not with --script, --submit, --on kubernetes or skypilot"
        )
    if options.on == "local" and not options.later:
        _check_faults(job, parser, job.restarts)
        return None
    from unisono.launchers.engines.engine import EngineError
    from unisono.launchers.engines.here import Here

    engine: Engine = Here() if options.on == "local" else getattr(on, options.on)(**given)
    _check_faults(job, parser, max(engine.restarts, job.restarts))
    try:
        if options.script or options.submit:
            return _write_script(engine, options, parser, job)
        if options.print:
            print(engine.manifest(job), end="")
            return 0
        return engine.run(job.program, job.workers, job=job)
    except KeyboardInterrupt:  # before the workers are started; from then on the run handles it
        print("unisono: interrupted (SIGINT) before the workers were started", file=sys.stderr)
        return 130
    except (EngineError, ImportError, _NotWritten) as error:
        print(f"unisono run: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))


def _check_faults(job: Job, parser: argparse.ArgumentParser, restarts: int = 0) -> None:
    """End with an error where the fault script cannot be read, or cannot happen in this run."""
    from unisono.launchers.failures import read_faults

    try:
        read_faults(job.faults, job.places, restarts=restarts)
    except ValueError as error:
        parser.error(str(error))


def _list_given(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The options that were given and that `unisono run` in a job script needs too."""
    words = ["--methods", methods] if (methods := os.environ.get("UNISONO_METHODS")) else []
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.option_strings and action.dest not in _NOT_REPEATED and value not in (None, "", action.default):
            name = action.option_strings[0 if value is True else -1]  # --encrypt, --no-encrypt
            words += [name, *([] if action.nargs == 0 else [str(value)])]
    return words


def _write_script(engine: Engine, options: argparse.Namespace, parser: argparse.ArgumentParser, job: Job) -> int:
    from unisono.launchers.engines.slurm import Slurm, job_script, submit

    assert isinstance(engine, Slurm)
    least = None if job.elastic is None else job.elastic.least
    text = job_script(engine, job.program, job.places, least=least, run_options=_list_given(options, parser))
    if options.script:
        path = Path(options.script)
        try:
            path.write_text(text)
            path.chmod(0o755)
        except OSError as error:
            raise _NotWritten(f"the job script could not be written to {path}: {error.strerror}") from None
    if options.submit:
        print(submit(text))
    else:
        print(f"{options.script} is written; submit it with: sbatch {shlex.quote(options.script)}")
    return 0


COMMANDS = {"run": Command(_DESCRIPTION, _EPILOG, add_arguments, run)}
