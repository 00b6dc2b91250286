"""The `unisono` command."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

_DESCRIPTION = "Data-parallel training under one unchanged PyTorch loop."
_EPILOG = """\
examples:
  unisono run -n 4 train.py --epochs 3     the same program in four workers on this machine
  unisono run -n 2 -m project.train        a module instead of a file
  unisono export run/save m.safetensors    a checkpoint's model as one file
  unisono memory train.py --workers 4      what each worker will need, and the settings that fit
  unisono strategies                       the methods that un.parallel knows
  unisono demo                             train a small network with 1 and 2 workers, and see where the time goes
"""
_RUN_DESCRIPTION = """\
Run a program in N workers, on this machine or on an engine (--on): MPI, Slurm, Ray, Spark, torchrun, ssh to hosts.

Options for unisono come before the program; everything after it is the program's own. When a worker fails, the others
are stopped, one report says which and why, and the exit status is that worker's (128 + number after a signal). Ctrl-C
stops everything within 2 seconds (a second Ctrl-C at once). No process that a worker started outlives the run.
"""
_RUN_EPILOG = """\
output:
  auto     one worker: as it is. Several: lines with the rank in front, "[1] loss 0.31"; on a terminal rank 0 writes
           directly and without a prefix, so that a progress bar works
  prefix   all ranks by lines, with the rank in front, also on a terminal
  rank0    rank 0 only, as it is; of the others, a failed one's last 40 lines are shown
  files    DIR/rank-0.out, DIR/rank-1.out, ... (both streams), nothing on the terminal but a failure

examples:
  unisono run -n 4 train.py --epochs 3
  unisono run -n 4 --output files --output-dir logs train.py
  unisono run -n 2 -m project.train --lr 0.1
  unisono run --on mpi -n 8 --hosts a:4,b:4 train.py
  unisono run --on slurm -n 8 --script job.sh --options=--time=1:00:00 train.py
  unisono run --on torchrun -n 4 --max-restarts 2 train.py
  unisono run --on ssh -n 8 --hosts a:4,b:4 train.py
  unisono run --on ray -n 4 --address auto train.py
  unisono run --on spark -n 4 --master spark://host:7077 train.py
"""
_EXPORT_DESCRIPTION = """\
Write the model of the newest whole checkpoint as one safetensors file, names as in the model's state_dict.

It may be of any strategy, placement and number of workers. The tensors stream, in some ten MiB of memory. Model and
optimizer in Python: un.read_checkpoint.
"""
_MEMORY_DESCRIPTION = """\
What each worker of a program will need, for every stage and placement of zero, then the settings that fit.

The program runs up to its first optimizer step, on parameters without memory; nothing is trained or exchanged, but what
it does before is done (its data is read, its folders are made). What it prints goes to standard error.
"""
_MEMORY_EPILOG = """\
Long options may also follow the program; what follows a -- is the program's in any case.
Sizes: 24GiB (powers of 1024), 500MB (powers of 1000), or bytes. What is not given is this machine's; without a GPU
and --device-memory, the workers compute in the host's memory. The exit status is 3 where nothing fits.

examples:
  unisono memory train.py --workers 4
  unisono memory train.py --workers 8 --device-memory 24GiB --host-memory 256GiB --disk /scratch --epochs 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["demo"]:  # has a command line of its own
        from unisono.demo import main as demo

        return demo(argv[1:])
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 2
    status: int = options.run(options, parser)
    return status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="unisono", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")

    run = commands.add_parser(
        "run",
        help="run a program in N workers, on this machine or on an engine",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    _add_run_options(run)
    run.set_defaults(run=_run, parser=run)

    export = commands.add_parser(
        "export",
        help="write a checkpoint's model as one safetensors file",
        description=_EXPORT_DESCRIPTION,
        formatter_class=raw,
        allow_abbrev=False,
    )
    export.add_argument("checkpoint", help="a folder that un.save wrote to, or one checkpoint in it")
    export.add_argument("out", metavar="out.safetensors", help="the file to write")
    export.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    export.set_defaults(run=_export)

    memory = commands.add_parser(
        "memory",
        help="what each worker will need, and the settings that fit",
        description=_MEMORY_DESCRIPTION,
        epilog=_MEMORY_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    _add_memory_options(memory)
    memory.set_defaults(run=_memory, parser=memory)

    strategies = commands.add_parser("strategies", help="list the strategies and reducers")
    strategies.set_defaults(run=_strategies)

    warm = commands.add_parser("warm", help="show or stop the process that `unisono run --warm` keeps")
    warm.add_argument("action", choices=("status", "stop"), nargs="?", default="status")
    warm.set_defaults(run=_warm)

    commands.add_parser("demo", help="train a small network with 1 and 2 workers; shows where the time goes")
    return parser


def _add_run_options(run: argparse.ArgumentParser) -> None:
    from unisono.cli.engines import add_engine_options

    count = _whole_number
    run.add_argument("-n", "--workers", type=count, required=True, metavar="N", help="how many workers")
    run.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in `python -m`")
    run.add_argument(
        "--threads",
        type=count,
        metavar="K",
        help="computing threads a worker (OMP_NUM_THREADS); default: what is set, or the usable cores divided by N",
    )
    run.add_argument(
        "--output",
        choices=("auto", "prefix", "rank0", "files"),
        default="auto",
        help="what becomes of the workers' output, see below; default: auto",
    )
    run.add_argument(
        "--warm",
        action="store_true",
        help="fork the workers from a process that has imported torch, kept for 10 minutes for the next such run",
    )
    run.add_argument("--output-dir", metavar="DIR", help="where --output files writes; default: unisono-output")
    add_engine_options(run)
    run.add_argument("program", nargs="?", metavar="script.py", help="the program (a module's name with -m)")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")


def _add_memory_options(memory: argparse.ArgumentParser) -> None:
    memory.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in `python -m`")
    _add_memory_sizes(memory, "-n")
    memory.add_argument("program", nargs="?", metavar="script.py", help="the program (a module's name with -m)")
    memory.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments, and our long options"
    )


def _add_memory_sizes(parser: argparse.ArgumentParser, *short: str) -> None:
    add = parser.add_argument
    add(*short, "--workers", type=_whole_number, metavar="N", help="how many workers in all; default: 1")
    add("--workers-per-host", type=_whole_number, metavar="K", help="how many share a host; default: all")
    add("--device-memory", metavar="SIZE", help="what each worker's device has")
    add("--host-memory", metavar="SIZE", help="what a host has, for all of its workers")
    add("--disk", metavar="SIZE|DIR", help="room on a host's disk, or a folder on that disk")


def _whole_number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number from 1 up")
    return number


class _Version(argparse.Action):
    """Shows the version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from unisono import __version__

        print(f"unisono {__version__}")
        parser.exit()


def _run(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    parser: argparse.ArgumentParser = options.parser
    if options.program is None:
        parser.error("no program given; as in: unisono run -n 2 train.py")
    if options.output_dir is not None and options.output != "files":
        parser.error("--output-dir goes with --output files")
    if options.module:
        _check_module(options.program, parser)
        program = ["-m", options.program]
    else:
        _check_script(options.program, parser)
        program = [options.program]

    from unisono.cli.engines import run_on_engine
    from unisono.launchers.job import Job
    from unisono.launchers.terminal import run_in_terminal

    job = Job(
        [*program, *options.arguments],
        options.workers,
        threads=options.threads,
        output=options.output,
        output_dir=options.output_dir,
        start="warm" if options.warm else "fresh",
    )
    status = run_on_engine(options, parser, job)
    return run_in_terminal(job) if status is None else status


def _warm(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from unisono.launchers.warm import list_warm, stop_warm

    servers = stop_warm() if options.action == "stop" else list_warm()
    for server in servers:
        text = f"process {server.pid}, started {server.age_s:.0f} s ago, {server.runs} runs"
        print(f"warm server: {text}{'; it ends after them' if options.action == 'stop' else ''}")
    if not servers:
        print("no warm server is running")
    return 0


def _memory(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    parser: argparse.ArgumentParser = options.parser
    if options.program is None:
        parser.error("no program given; as in: unisono memory train.py --workers 2")
    (_check_module if options.module else _check_script)(options.program, parser)
    sizes, arguments = _memory_sizes(options)

    from unisono.footprint.script import ScriptError, of_script

    try:
        report = of_script(options.program, arguments, module=options.module, **sizes)
    except ScriptError as error:
        print(f"unisono memory: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    print(report)
    return 0 if report.fits() else 3


def _memory_sizes(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Our options before and behind the program, and the arguments that are the program's."""
    behind: list[str] = options.arguments
    cut = behind.index("--") if "--" in behind else len(behind)
    parser = argparse.ArgumentParser(prog="unisono memory", add_help=False, allow_abbrev=False)
    _add_memory_sizes(parser)
    found, rest = parser.parse_known_args(behind[:cut])
    sizes = {k: v if v is not None else getattr(options, k) for k, v in vars(found).items()}
    sizes["workers"] = sizes["workers"] or 1
    return sizes, [*rest, *behind[cut + 1 :]]


def _check_script(name: str, parser: argparse.ArgumentParser) -> None:
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").exists():
        parser.error(f"{name} is a folder without __main__.py; name the script in it")
    if path.exists():
        return
    folder = path.parent if path.parent.is_dir() else Path()
    near = {str(file): file.name for file in [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))]}
    names = difflib.get_close_matches(path.name, near.values(), n=1, cutoff=0.6)
    hint = next((f"; did you mean {file}?" for file, short in near.items() if names and short == names[0]), "")
    if not hint and path.suffix != ".py" and os.sep not in name:
        hint = "; a module is run with -m"
    parser.error(f"no such script: {name} (looked in {path.absolute().parent}){hint}")


def _check_module(name: str, parser: argparse.ArgumentParser) -> None:
    if name.endswith(".py") and Path(name).exists():
        parser.error(f"{name} is a file, -m takes a module; a file is run without -m: unisono run -n 2 {name}")
    top = name.split(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        del sys.path[0]
    if not found:
        hint = f"; a file is run without -m: unisono run -n 2 {name}" if name.endswith(".py") else ""
        parser.error(f"no module named {top!r} here or among the installed ones{hint}")


def _export(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.checkpoint import CheckpointError
    from unisono.checkpoint.plain import export_model

    try:
        done = export_model(options.checkpoint, options.out, overwrite=options.overwrite)
    except FileExistsError:
        parser.error(f"{options.out} exists: give another name, or --overwrite")
    except (CheckpointError, OSError, ValueError) as error:
        print(f"unisono export: {error}", file=sys.stderr)
        return 1
    size = f"{done.size_bytes / 1e6:.1f} MB" if done.size_bytes >= 1e5 else f"{done.size_bytes} bytes"
    print(f"{done.path}: {done.tensors} tensors, {size}, from {done.checkpoint} (step {done.step})")
    return 0


def _strategies(_: argparse.Namespace, __: argparse.ArgumentParser) -> int:
    for title, folder in (("strategies", "strategies"), ("reducers", "reducers")):
        here = Path(__file__).parents[1] / folder
        found = {file.stem: file for file in here.glob("*.py")}
        found |= {file.parent.name: file for file in here.glob("*/__init__.py")}
        methods = {name: file for name, file in sorted(found.items()) if not name.startswith("_")}
        width = max(map(len, methods), default=0)
        print(f"{title}:")
        for name, file in methods.items():
            print(f"  {name:<{width}}  {_summary(file)}")
    return 0


def _summary(file: Path) -> str:
    """First line of the docstring, read without importing the file (and torch)."""
    import ast

    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
