"""Options of `unisono run` that are settings of engines: each is the engine's field of the same name."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

__all__ = ["FIELDS", "parse_names", "parse_whole"]


def parse_names(text: str) -> list[str]:
    """Names separated by commas."""
    return [name for name in text.split(",") if name]


def parse_whole(text: str) -> int:
    """A whole number, from 0 up."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number from 0 up")
    return int(text)


FIELDS: dict[str, dict[str, Any]] = {
    "address": {"metavar": "HOST:PORT", "help": "a running Ray; default: one for this run (ray)"},
    "master": {"metavar": "URL", "help": "spark://HOST:PORT, yarn, ...; default: local (spark)"},
    "cpus": {"type": float, "metavar": "X", "help": "CPUs per worker; default: 1 (ray, kubernetes, skypilot)"},
    "gpus": {"type": float, "metavar": "X", "help": "GPUs per worker; default: 0 (ray, kubernetes)"},
    "hosts": {
        "type": parse_names,
        "metavar": "A,B",
        "help": "hosts, optionally with slots: a:4,b:4 (mpi, slurm, ssh); a number: emulated hosts, see below (lab)",
    },
    "net": {"metavar": "LINK", "help": "links of emulated hosts, such as 100mbit or 1gbit,20ms, see below (lab)"},
    "shaper": {
        "choices": ("auto", "kernel", "transport"),
        "help": "what throttles the links: the kernel (namespaces and tc) or the workers' transport; default: the "
        "kernel, if it can (lab)",
    },
    "max_restarts": {
        "type": parse_whole,
        "metavar": "K",
        "help": "restarts of all workers after a failure (torchrun, ssh, ray, spark, lab)",
    },
    "python": {"metavar": "PATH", "help": "Python on the hosts, if it differs from this one (mpi, slurm, ssh)"},
    "wait_s": {"type": parse_whole, "metavar": "S", "help": "how long to wait for free resources (slurm, ray, spark)"},
    "image": {"metavar": "NAME", "help": "container image with the program in it (kubernetes)"},
    "kind": {"choices": ("job", "jobset", "trainjob"), "help": "kind of manifest; default: job (kubernetes)"},
    "namespace": {"metavar": "NAME", "help": "default: kubectl's own (kubernetes)"},
    "memory": {"metavar": "8Gi", "help": "memory per worker (kubernetes)"},
    "claim": {"metavar": "NAME:/PATH", "help": "volume claim, and its path in the pods (kubernetes)"},
    "accelerators": {"metavar": "A100:1", "help": "GPUs per machine (skypilot)"},
    "options": {"type": shlex.split, "metavar": "TEXT", "help": "more options for mpirun, srun, torchrun or ssh"},
}
