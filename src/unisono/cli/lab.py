"""`unisono lab`: what emulated hosts can be here, and `unisono lab clean`, which removes what killed runs left."""

from __future__ import annotations

import argparse

from unisono.cli.arguments import Commands
from unisono.cli.help_text import HelpFormatter

__all__ = ["add_command"]

_ABOUT = """\
Emulated hosts are asked for by `unisono run`:

  unisono run -n 4 --hosts 4 --net 100mbit train.py

Each has an address and a link of its own on this machine. They end with the run, also when its launcher is killed
(SIGKILL). `unisono lab clean` is for processes of runs whose launcher and guard were both killed, and for the named
network namespaces of earlier versions. See docs/lab.md.
"""
_EPILOG = f"""\
{_ABOUT}
examples:
  unisono lab
  unisono lab clean
"""


def add_command(commands: Commands) -> None:
    """Add `lab` to the command line."""
    parser = commands.add_parser(
        "lab",
        help="emulated hosts: what is possible on this machine; cleaning up",
        description="Say whether this machine can make hosts of network namespaces, or remove what killed runs left.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "action", choices=("status", "clean"), nargs="?", default="status", help="what to do; default: status"
    )
    parser.set_defaults(run=_lab)


def _lab(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from unisono.lab.cleanup import clean, find_processes
    from unisono.lab.hosts import find_obstacle

    if options.action == "clean":
        for line in clean() or ["nothing was left"]:
            print(line)
        return 0
    if obstacle := find_obstacle():
        print(f"Hosts cannot be network namespaces here: {obstacle}.")
        print("`unisono run --hosts` works, and the workers' own transport holds bytes back.")
    else:
        print("Hosts can be network namespaces here, with links that the kernel holds back.")
    left = find_processes()
    if left:
        print(f"{len(left)} process(es) of runs whose launcher is gone: `unisono lab clean` ends them.")
    print(_ABOUT, end="")
    return 0
