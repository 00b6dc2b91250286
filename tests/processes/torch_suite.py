"""PyTorch's own distributed tests, as its wheel has them, over a backend of our choice.

    python tests/processes/torch_suite.py unisono 3 [NAME ...]     # a process group for each test; all without names

prints one JSON object: the names that passed, failed and were skipped (most skipped ones need GPUs). torch's module
skips what it does not know of a backend, so it is told that this is gloo, and groups are made with the backend asked
for. `--together` runs all tests in one group, which is faster: one that fails ends the run.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

LIMIT_S = 25.0  # a test that takes longer hangs


def _make_folder() -> str:
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)  # the ranks, forked, end without this
    return made


def load(backend: str, size: int) -> Any:
    """torch's test case, whose groups are of `backend`."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=_make_folder(), MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("ignore")
    if "expecttest" not in sys.modules:  # it prints expectations, and is not always installed
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = stub
    import torch
    import torch.distributed as dist

    import unisono  # noqa: F401 (registers the backend)

    torch.set_num_threads(1)
    make = dist.init_process_group

    def make_with(*args: Any, **settings: Any) -> Any:
        chosen = (backend, *args[1:]) if args and args[0] == "gloo" else args
        return make(*chosen, **{k: backend if (k, v) == ("backend", "gloo") else v for k, v in settings.items()})

    dist.init_process_group = make_with
    from torch.testing._internal.distributed import distributed_test

    class Case(distributed_test.DistributedTest._DistTestBase, distributed_test.TestDistBackend):  # type: ignore[misc]
        pass

    return Case


def run_one(case: Any, name: str, rank: int, file: str) -> tuple[str, str]:
    """How a test ended on this rank, and why."""
    test = case(name)
    test.rank, test.file_name = rank, file
    method = getattr(case, name)
    try:
        test._barrier()
        while hasattr(method, "__wrapped__") and method.__qualname__.startswith("MultiProcessTestCase"):
            method = method.__wrapped__  # not to be started in processes again
        method(test)
        test._barrier()
    except unittest.SkipTest as why:
        return "skipped", str(why)
    except SystemExit as end:
        return ("skipped" if end.code else "passed"), f"exit status {end.code}"
    except BaseException:
        return "failed", traceback.format_exc()
    return "passed", ""


def work(case: Any, names: Sequence[str], rank: int, size: int, file: str, pipe: int) -> None:
    """In a child: the tests, one after the other in one group."""
    import torch.distributed as dist

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    found: dict[str, tuple[str, str]] = {}
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", world_size=size, rank=rank, timeout=timedelta(seconds=10)
        )
        for name in names:
            found[name] = run_one(case, name, rank, file)
            if found[name][0] == "failed":
                break
        else:
            dist.destroy_process_group()
    except BaseException:
        found[names[-1]] = ("failed", traceback.format_exc())
    finally:
        os.write(pipe, json.dumps(found).encode())
        os._exit(0)


def run(case: Any, names: Sequence[str], size: int) -> dict[str, tuple[str, str]]:
    """The tests in `size` forked processes; the worst of the ranks' ends counts."""
    from torch.testing._internal.distributed import distributed_test

    distributed_test.initialize_temp_directories()
    distributed_test.Barrier.init()
    file, children = tempfile.mktemp(), []
    for rank in range(size):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            work(case, names, rank, size, file, theirs)
        os.close(theirs)
        children.append((pid, ours))
    deadline = time.monotonic() + LIMIT_S + len(names)
    every: list[dict[str, tuple[str, str]]] = []
    for pid, pipe in children:
        data = b""
        while select.select([pipe], [], [], max(0.1, deadline - time.monotonic()))[0]:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                break
            data += chunk
        if not data:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)
        every.append({k: tuple(v) for k, v in json.loads(data or b"{}").items()})
    order = ("failed", "skipped", "passed")
    missing = ("failed", "it hung, or its process died")
    return {
        name: min((each.get(name, missing) for each in every), key=lambda end: order.index(end[0])) for name in names
    }


def main() -> None:
    arguments = [a for a in sys.argv[1:] if a != "--together"]
    backend, size, names = arguments[0], int(arguments[1]), arguments[2:]
    together = "--together" in sys.argv
    sys.argv = sys.argv[:1]  # torch's module reads it, too
    case = load(backend, size)
    names = names or sorted(n for n in dir(case) if n.startswith("test_"))
    found: dict[str, tuple[str, str]] = {}
    for group in [names] if together else [[name] for name in names]:
        found |= run(case, group, size)
    ends = {kind: [n for n, end in found.items() if end[0] == kind] for kind in ("passed", "failed", "skipped")}
    why = {n: end[1].strip().splitlines()[-1:] for n, end in found.items() if end[0] == "failed"}
    print(json.dumps({**ends, "why": why}))


if __name__ == "__main__":
    main()
