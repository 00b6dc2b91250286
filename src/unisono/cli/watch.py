"""`unisono watch`: the live page of a run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from unisono.launchers.runtime.run_folder import RunFolder

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "add_page_options", "run", "show_page"]

DESCRIPTION = """\
Serve the live page of a run, one that goes on or one that has ended: losses and metrics, where the time of a step goes,
what every rank does, verdicts, and the stack of any rank on a click. Ctrl-C ends the page; the run does not notice.

The page is at the printed address, on this machine alone (--bind changes that). The address holds a token: whoever does
not know it sees nothing. From another machine: ssh -L 8080:127.0.0.1:8080 HOST, and --port 8080 here.
"""
EPILOG = """\
examples:
  unisono watch                    the newest run of this folder, at a free port of this machine
  unisono watch last --port 8080 --open
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `watch`."""
    parser.add_argument("run_name", nargs="?", default="last", metavar="RUN", help="a name or a folder; default: last")
    parser.add_argument("--port", type=_parse_port, metavar="P", help="default: a free one")
    parser.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine alone")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def _parse_port(text: str) -> int:
    """An argument that is a port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a port from 1 to 65535")
    return int(text)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `watch`; gives the exit status."""
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
    group = parser.add_argument_group("the live page (docs/page.md)")
    group.add_argument(
        "--page", action="store_true", help="serve a page of the run while it goes on; its address is printed"
    )
    group.add_argument("--page-port", type=_parse_port, metavar="P", help="its port; default: a free one")
    group.add_argument(
        "--page-bind", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine alone"
    )
    group.add_argument("--page-open", action="store_true", help="open it in a browser")
    group.add_argument("--page-stay", action="store_true", help="when the run is over, serve the page until Ctrl-C")


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
