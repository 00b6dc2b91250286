"""The part of `unisono run` that chooses an engine: `--on mpi`, and the options that are the engine's settings.

An option is the engine's field of the same name, so an engine that has no such field does not take the option.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.launchers import on
from unisono.launchers.engines.engine import Engine, EngineError

if TYPE_CHECKING:
    from unisono.launchers.job import Job

__all__ = ["add_engine_options", "run_on_engine"]


class _NotWritten(Exception):
    """The file that was asked for cannot be written."""


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number from 0 up")
    return int(text)


_FIELDS: dict[str, dict[str, Any]] = {
    "address": {"metavar": "HOST:PORT", "help": "a running Ray; default: one for this run (ray)"},
    "master": {"metavar": "URL", "help": "spark://HOST:PORT, yarn, ...; default: local (spark)"},
    "cpus": {"type": float, "metavar": "X", "help": "CPUs that a worker takes; default: 1 (ray)"},
    "gpus": {"type": float, "metavar": "X", "help": "GPUs that a worker takes; default: 0 (ray)"},
    "hosts": {"type": _names, "metavar": "A,B", "help": "hosts, with slots where given: a:4,b:4 (mpi, slurm, ssh)"},
    "max_restarts": {
        "type": _count,
        "metavar": "K",
        "help": "start all again after a failure (torchrun, ssh, ray, spark)",
    },
    "python": {"metavar": "PATH", "help": "the hosts' Python, where it is another than here (mpi, slurm, ssh)"},
    "wait_s": {"type": _count, "metavar": "S", "help": "how long to wait for room (slurm, ray, spark)"},
    "options": {"type": shlex.split, "metavar": "TEXT", "help": "more options for mpirun, srun, torchrun or ssh"},
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """`--on` and the engines' settings."""
    group = parser.add_argument_group("engines")
    choices = ("local", *on.__all__)
    group.add_argument("--on", choices=choices, default="local", help="what starts the workers; default: local")
    for name, how in _FIELDS.items():
        group.add_argument(f"--{name.removesuffix('_s').replace('_', '-')}", dest=name, **how)
    group.add_argument("--script", metavar="JOB.SH", help="write a script for sbatch and do not run (slurm)")
    group.add_argument("--submit", action="store_true", help="hand the script to sbatch (slurm)")


def run_on_engine(options: argparse.Namespace, parser: argparse.ArgumentParser, job: Job) -> int | None:
    """Run the job as the options say; None where it is a local one."""
    given = {name: getattr(options, name) for name in _FIELDS if getattr(options, name) is not None}
    known = set() if options.on == "local" else {field.name for field in dataclasses.fields(getattr(on, options.on))}
    for name in given:
        if name not in known:
            parser.error(f"--{name.removesuffix('_s').replace('_', '-')} does not go with --on {options.on}")
    if options.on != "slurm" and (options.script or options.submit):
        parser.error("--script and --submit go with --on slurm")
    if options.on == "local":
        return None
    engine: Engine = getattr(on, options.on)(**given)
    try:
        if options.script or options.submit:
            return _write_script(engine, options, job)
        return engine.run(job.program, job.workers, job=job)
    except (EngineError, ImportError, _NotWritten) as error:
        print(f"unisono run: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))


def _write_script(engine: Engine, options: argparse.Namespace, job: Job) -> int:
    from unisono.launchers.engines.slurm import Slurm, job_script, submit

    assert isinstance(engine, Slurm)
    more: dict[str, object] = {"--threads": job.threads, "--output": None if job.output == "auto" else job.output}
    more["--output-dir"] = None if job.output_dir is None else str(job.output_dir)
    run_options = [word for name, value in more.items() if value is not None for word in (name, str(value))]
    text = job_script(engine, job.program, job.workers, run_options=run_options)
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
