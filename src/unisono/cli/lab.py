"""`unisono lab`: what emulated hosts can be here, and `unisono lab clean`, which removes what killed runs left."""

from __future__ import annotations

import argparse

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Say whether this machine can make hosts of network namespaces, or remove what killed runs left.
"""
_ABOUT = """\
Emulated hosts are asked for by `unisono run`:

  unisono run -n 4 --hosts 4 --net 100mbit train.py

Each has an address and a link of its own on this machine. They end with the run, also when its launcher is killed
(SIGKILL). `unisono lab clean` is for processes of runs whose launcher and guard were both killed, and for the named
network namespaces of earlier versions. See docs/lab.md.
"""
EPILOG = f"""\
{_ABOUT}
examples:
  unisono lab
  unisono lab clean
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lab`."""
    parser.add_argument(
        "action", choices=("status", "clean"), nargs="?", default="status", help="what to do; default: status"
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `lab`; gives the exit status."""
    from unisono.launchers.lab.hosts import clean, find_obstacle, find_processes

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
