"""`unisono warm`: the process that `unisono run --warm` keeps for the next run."""

from __future__ import annotations

import argparse

from unisono.cli.arguments import Commands

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Add `warm` to the command line."""
    parser = commands.add_parser("warm", help="show or stop the process that `unisono run --warm` keeps")
    parser.add_argument("action", choices=("status", "stop"), nargs="?", default="status")
    parser.set_defaults(run=_warm)


def _warm(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from unisono.launchers.warm import list_warm, stop_warm

    servers = stop_warm() if options.action == "stop" else list_warm()
    for server in servers:
        text = f"process {server.pid}, started {server.age_s:.0f} s ago, {server.runs} runs"
        print(f"warm server: {text}{'; it ends after them' if options.action == 'stop' else ''}")
    if not servers:
        print("no warm server is running")
    return 0
