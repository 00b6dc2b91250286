"""Commands for a run that is under way: its debugger, its number of workers, hosts that join it, what its workers do,
and its live page."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator

from unisono.cli.arguments import Command, find_only_run, parse_count
from unisono.launchers.runtime.run_folder import RunFolder

__all__ = ["COMMANDS", "add_page_options", "show_page"]

# unisono debug ----------------------------------------------------------------------------------------------------

_DEBUG = """\
Open the debugger's prompt for your run on this host: for workers stopped at un.breakpoint(), or that have raised
under --pdb. If none is stopped, all stop at their next collective or step. `h` at the prompt lists its commands;
leaving it lets all workers continue. See docs/debugger.md.
"""
_DEBUG_MORE = """\
examples:
  unisono debug              the only active run
  unisono debug 2026-11-16_15-40-12_train
"""


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("debugged", nargs="?", metavar="RUN", help="name of the run, if there are several")


def _run_debug(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.runtime.channel import Unreachable
    from unisono.launchers.runtime.debugger.hub import attach, list_announced
    from unisono.launchers.runtime.debugger.prompt import Prompt
    from unisono.launchers.runtime.files import NotPrivate

    try:
        runs = list_announced()
        found = [run for run in runs if options.debugged in (None, run.run, str(run.pid))]
        if len(found) != 1:
            print(f"unisono debug: {_explain(options.debugged, [(r.run, r.program) for r in runs])}", file=sys.stderr)
            return 1
        link = attach(found[0])
    except (NotPrivate, Unreachable) as error:
        print(f"unisono debug: {error}", file=sys.stderr)
        return 1
    if sys.stdin.isatty():
        import readline  # noqa: F401  # lines can be edited, and come again
    try:
        Prompt(link, input, lambda text: print(text, flush=True)).run(stop=True)
    except KeyboardInterrupt:  # the connection ends with this process, and all workers go on
        print()
        return 130
    return 0


def _explain(asked: str | None, runs: list[tuple[str, str]]) -> str:
    listed = "".join(f"\n  unisono debug {name}   {program}" for name, program in runs)
    if not runs:
        return "no run of this user with workers that have joined is active on this host"
    if asked is None:
        return f"there are {len(runs)} runs; name one:{listed}"
    return f"there is no run {asked!r}; choose one of:{listed}"


# unisono scale ----------------------------------------------------------------------------------------------------

_SCALE = """\
Change the number of workers of a run that was started with `unisono run -n MIN:MAX` by you on this host; without N,
show it. New workers take part as soon as they have caught up with the others; surplus workers leave after
a step. The command returns when the run has accepted the number (with --wait: when it has that many workers).
"""
_SCALE_MORE = """\
exit status: 0 if the run has accepted the number, 1 if there is no such run or it refuses.

examples:
  unisono scale                    how many workers the run has
  unisono scale 3 --wait           three, and return when they are there
  unisono scale 3 --run 4711       of the run whose `unisono run` has this process id
"""
_POLL_S = 0.1


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workers", type=parse_count, nargs="?", metavar="N", help="how many workers, from MIN to MAX")
    parser.add_argument(
        "--run",
        dest="pid",
        type=parse_count,
        metavar="PID",
        help="process id of `unisono run`, if there are several",
    )
    parser.add_argument("--wait", action="store_true", help="wait until the run has that many workers")


def _run_scale(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.control import Gone
    from unisono.launchers.runtime.files import NotPrivate

    try:
        _change(options)
    except (Gone, NotPrivate, ValueError) as error:
        print(f"unisono scale: {error}", file=sys.stderr)
        return 1
    return 0


def _change(options: argparse.Namespace) -> None:
    """Do what the command line asks for. Raises Gone or NotPrivate, and ValueError where the run refuses."""
    from unisono.launchers.control import Gone, ask

    pid = find_only_run("--run", elastic=True) if options.pid is None else options.pid
    if options.workers is None:
        status = ask(pid, {"do": "status"})
        print(status.describe())
        if status.join:
            print(f"other hosts: {status.join}")
        return
    now = ask(pid, {"do": "scale", "workers": options.workers})
    while options.wait and now.workers != options.workers:
        time.sleep(_POLL_S)
        now = ask(pid, {"do": "status"})
        if now.wanted != options.workers:
            raise Gone(f"the run aims at {now.wanted} workers now: someone has asked for another number")
    print(now.describe())


# unisono join -----------------------------------------------------------------------------------------------------

_JOIN = """\
Let this host join a run that is active on others, and was started with `unisono run -n MIN:MAX` and an engine, or
--later K. The command with the run's address and secret is what `unisono scale` shows on the run's host, and what
`unisono run --later` prints. This host needs the same folder with the same program, and the same versions of Python,
torch and Unisono. The output of its workers appears where the run was started. Ctrl-C leaves the run, which continues.

Whoever has the secret can join the run and run code in it. So it is not an argument: it comes from a file (--secret
FILE), from standard input (--secret -), or from UNISONO_SECRET.
"""
_JOIN_MORE = """\
exit status: 0 if the run has ended well, 1 if it has failed or this host is refused, 97 if its launcher
is gone.

examples:
  unisono join 10.0.0.5:40123 --secret /shared/runs/train/secret
  unisono join 10.0.0.5:40123 --secret secret -n 2 --wait
  ssh c 'cd project && unisono join 10.0.0.5:40123 --secret -' < secret
"""


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", help="address of the run's launcher, HOST:PORT")
    parser.add_argument("-n", "--workers", type=parse_count, default=1, metavar="N", help="workers here; default: 1")
    parser.add_argument(
        "--secret", metavar="FILE", help="file with the run's secret, - for standard input; default: UNISONO_SECRET"
    )
    parser.add_argument("--wait", action="store_true", help="while the run has all its workers, wait for a free place")


def _run_join(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.joining import CannotJoin, join_run, parse_address, read_secret

    try:
        address = parse_address(options.address)
    except ValueError as error:
        parser.error(str(error))
    try:
        return join_run(address, read_secret(options.secret), workers=options.workers, wait=options.wait)
    except CannotJoin as error:
        print(f"unisono join: {error}", file=sys.stderr)
        return 1


# unisono stacks ---------------------------------------------------------------------------------------------------

_STACKS = """\
Show what every worker of a run is doing: workers in the same place are listed together, and those that keep the
others waiting are named. It needs no root, and works while native code holds Python's lock. The run continues.

RUN is the folder in which the run is recorded or its name, `last`, or the process id of `unisono run`; it may be left
out if you have only one active run on this host.
"""
_STACKS_MORE = """\
exit status: 0, or 1 if there is no such run.

examples:
  unisono stacks                   of the only active run
  unisono stacks last --full
"""


def _add_stacks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN", help="a run: its folder, its name, last, or a process id")
    parser.add_argument("--full", action="store_true", help="the whole stacks of all threads, too")


def _run_stacks(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.control import Gone, ask_for_report
    from unisono.launchers.runtime.files import NotPrivate

    try:
        found = ask_for_report(find_only_run("unisono stacks") if options.name is None else options.name)
    except (Gone, NotPrivate, ValueError, LookupError) as error:
        print(f"unisono stacks: {error}", file=sys.stderr)
        return 1
    print("\n".join(found["text"].split("; ")))
    if options.full:
        for rank in sorted(found["stacks"], key=int):
            print(f"\n{found['stacks'][rank]}")
    return 0


# unisono top ------------------------------------------------------------------------------------------------------

_TOP = """\
Show what every rank of a run does: its step, how fast it is, where its time goes, who is slow, lost or silent; the
loss, and verdicts. It follows the run to its end. If there are more ranks than lines, the worst come first.
"""
_TOP_MORE = """\
examples:
  unisono top                      the newest run of this folder, until it is over
  unisono top last --once          the current state, for a log
"""


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", nargs="?", default="last", metavar="RUN", help="a name or a folder; default: last")
    parser.add_argument("--once", action="store_true", help="print the current state and exit, as without a terminal")


def _run_top(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.runtime.run_folder import NoSuchRun, find_run
    from unisono.observe.live.terminal import show_top

    try:
        folder = find_run(options.run_name)
    except NoSuchRun as error:
        parser.error(str(error))
    show_top(folder, once=options.once)
    return 0


# unisono watch ----------------------------------------------------------------------------------------------------

_WATCH = """\
Serve the live page of a run, active or ended: losses and metrics, where the time of a step goes,
what every rank does, verdicts, and the stack of any rank on a click. Ctrl-C ends the page; the run is not affected.

The page is at the printed address, on this machine only (--bind changes that). The address contains a token: without
it nobody sees anything. From another machine: ssh -L 8080:127.0.0.1:8080 HOST, and --port 8080 here.
"""
_WATCH_MORE = """\
examples:
  unisono watch                    the newest run of this folder, at a free port of this machine
  unisono watch last --port 8080 --open
"""


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", nargs="?", default="last", metavar="RUN", help="a name or a folder; default: last")
    parser.add_argument("--port", type=_parse_port, metavar="P", help="default: a free one")
    parser.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine alone")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def _parse_port(text: str) -> int:
    """An argument that is a port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a port from 1 to 65535")
    return int(text)


def _run_watch(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.runtime.run_folder import NoSuchRun, find_run
    from unisono.observe.live.beside import NoPage, open_address, open_in_browser

    try:
        folder = find_run(options.run_name)
        opened = open_address(options.bind, options.port)
    except (NoSuchRun, NoPage) as error:
        parser.error(str(error))
    _say(opened.note)
    _say(f"{folder.name}: {opened.url} (Ctrl-C ends the page)")
    if options.open:
        _say(open_in_browser(opened.url))

    from unisono.launchers.control import ask_for_stacks
    from unisono.observe.live.server import serve_page

    serve_page(folder, opened.listener, opened.token, bound=opened.bound, stays=True, ask_for_stacks=ask_for_stacks)
    return 0


# Beside a run ---------------------------------------------------------------------------------------------------------


def add_page_options(parser: argparse.ArgumentParser) -> None:
    """The options of `unisono run` for a page of the run."""
    parser.add_argument("--page", action="store_true", help="serve a live page of the run, and print its address")
    group = parser.add_argument_group("the live page (docs/page.md)")
    group.add_argument("--page-port", type=_parse_port, metavar="P", help="port of the page; default: a free one")
    group.add_argument(
        "--page-bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address that it listens on; default: 127.0.0.1, this machine only",
    )
    group.add_argument("--page-open", action="store_true", help="open the page in a browser")
    group.add_argument("--page-stay", action="store_true", help="after the run, serve the page until Ctrl-C")


@contextlib.contextmanager
def show_page(options: argparse.Namespace, record: RunFolder | None) -> Iterator[None]:
    """A page of the run, if one was asked for. Where there can be none, that is said, and the run goes on without."""
    page = None
    if options.page or options.page_port is not None or options.page_open or options.page_stay:
        from unisono.observe.live.beside import NoPage, PageBeside, open_address, open_in_browser

        try:
            if record is None:
                raise NoPage("no page: it shows what is recorded, and this run is not")
            opened = open_address(options.page_bind, options.page_port)
            page = PageBeside(record.path, opened, stays=options.page_stay)
        except (NoPage, OSError) as error:
            _say(str(error) if isinstance(error, NoPage) else f"no page: {error}")
        else:
            record.update(page=opened.url)
            _say(opened.note)
            _say(f"page: {opened.url}")
            if options.page_open:
                _say(open_in_browser(opened.url))
    try:
        yield
    finally:
        if page is not None:
            if options.page_stay:
                _say("the run is over; the page stays until Ctrl-C")
            page.end()


def _say(text: str) -> None:
    if text:
        print(f"unisono: {text}", file=sys.stderr, flush=True)


COMMANDS = {
    "debug": Command(_DEBUG, _DEBUG_MORE, _add_debug, _run_debug),
    "join": Command(_JOIN, _JOIN_MORE, _add_join, _run_join),
    "scale": Command(_SCALE, _SCALE_MORE, _add_scale, _run_scale),
    "stacks": Command(_STACKS, _STACKS_MORE, _add_stacks, _run_stacks),
    "top": Command(_TOP, _TOP_MORE, _add_top, _run_top),
    "watch": Command(_WATCH, _WATCH_MORE, _add_watch, _run_watch),
}
