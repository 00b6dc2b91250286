"""The `unisono` command."""

from __future__ import annotations

from unisono.cli.commands import main

__all__ = ["main"]
