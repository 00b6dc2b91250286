"""`unisono watch`: the live page of a run."""

from __future__ import annotations

import argparse
import sys

from unisono.cli.arguments import Commands

__all__ = ["add_command", "parse_port"]

_DESCRIPTION = """\
Serve the live page of a run, one that goes on or one that has ended: losses and metrics, where the time of a step goes,
what every rank does, verdicts, and the stack of any rank on a click. Ctrl-C ends the page; the run does not notice.

The page is at the printed address, on this machine alone (--bind changes that). The address holds a token: whoever does
not know it sees nothing. From another machine: ssh -L 8080:127.0.0.1:8080 HOST, and --port 8080 here.
"""


def add_command(commands: Commands) -> None:
    """Add `watch` to the command line."""
    parser = commands.add_parser(
        "watch",
        help="the live page of a run, in a browser",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_name", nargs="?", default="last", metavar="RUN", help="a name or a folder; default: last")
    parser.add_argument("--port", type=parse_port, metavar="P", help="default: a free one")
    parser.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine alone")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=_run, parser=parser)


def parse_port(text: str) -> int:
    """An argument that is a port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a port from 1 to 65535")
    return int(text)


def _run(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from unisono.live.beside import NoPage, open_address, open_in_browser
    from unisono.runtime.run_folder import NoSuchRun, find_run

    try:
        folder = find_run(options.run_name)
        opened = open_address(options.bind, options.port)
    except (NoSuchRun, NoPage) as error:
        options.parser.error(str(error))
    for line in (opened.note, f"{folder.name}: {opened.url} (Ctrl-C ends the page)"):
        if line:
            print(f"unisono: {line}", file=sys.stderr, flush=True)
    if options.open and (note := open_in_browser(opened.url)):
        print(f"unisono: {note}", file=sys.stderr, flush=True)

    from unisono.live.server import serve_page
    from unisono.live.stacks import ask_for_stacks

    serve_page(folder, opened.listener, opened.token, bound=opened.bound, stays=True, ask_for_stacks=ask_for_stacks)
    return 0
