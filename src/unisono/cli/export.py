"""`unisono export`: a checkpoint's model as one safetensors file."""

from __future__ import annotations

import argparse
import sys

from unisono.units import show_bytes

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Write the model of the newest whole checkpoint as one safetensors file, names as in the model's state_dict.

It may be of any strategy, placement and number of workers. The tensors stream, in some ten MiB of memory. Model and
optimizer in Python: un.read_checkpoint.
"""
EPILOG = """\
exit status: 0; 1 where there is no whole checkpoint; 2 where the file exists.

examples:
  unisono export run/checkpoint model.safetensors
  unisono export run/checkpoint/step-1200 model.safetensors --overwrite
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `export`."""
    parser.add_argument("checkpoint", help="a folder that un.save wrote to, or one checkpoint in it")
    parser.add_argument("out", metavar="out.safetensors", help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `export`; gives the exit status."""
    from unisono.training.checkpoint import CheckpointError
    from unisono.training.checkpoint.plain import export_model

    try:
        done = export_model(options.checkpoint, options.out, overwrite=options.overwrite)
    except FileExistsError:
        parser.error(f"{options.out} exists: give another name, or --overwrite")
    except (CheckpointError, OSError, ValueError) as error:
        print(f"unisono export: {error}", file=sys.stderr)
        return 1
    print(
        f"{done.path}: {done.tensors} tensors, {show_bytes(done.size_bytes)}, from {done.checkpoint} (step {done.step})"
    )
    return 0
