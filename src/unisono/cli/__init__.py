"""The `unisono` command: one file for each of its commands."""

from __future__ import annotations

from unisono.cli.command_line import main

__all__ = ["main"]
