"""What runs in a worker process around the user's program.

Started by file (`python program.py script.py args…`, `-m module args…`, `--function`), so that
nothing of Unisono, and no torch, is imported before the user's program asks for it.

1. Tie this process to the launcher: it dies when the launcher does.
2. Make the process look as if Python had started the program itself: arguments, import path, `__main__`.
3. Run it. An error goes to the launcher as one JSON line, because only the launcher knows which error came first.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.abc
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["die_with", "main"]

_HERE = os.path.abspath(__file__)
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
_MESSAGE_CHARACTERS = 100_000
_STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else 0  # as runtime/stacks.py has it


class _Reports:
    """The pipe to the launcher, one JSON object a line."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "time": time.monotonic(), **fields}) + "\n"
        data = line.encode()
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError:  # the launcher is gone, and this process is about to go
            pass


def main(arguments: Sequence[str]) -> int:
    """Run the program that `arguments` name, and return this process's exit status."""
    die_with(int(os.environ.pop("UNISONO_LAUNCHER_PID")))
    _fix_import_path()
    for (
        name,
        value,
    ) in os.environ.items():  # programs that this worker starts get the variables, but not the descriptors
        if name.startswith("UNISONO_") and name.endswith("_FD"):
            os.set_inheritable(int(value), False)
    # Groups that the program makes itself, by torch.distributed, meet in the launcher's store, with its secret.
    if _RENDEZVOUS in sys.modules:
        _replace_opening(sys.modules[_RENDEZVOUS])
    else:
        sys.meta_path.insert(0, _WhenImported())
    _replace_breakpoints()
    reports = _Reports(int(os.environ["UNISONO_REPORT_FD"]))
    # Ignored where the launcher was started in the background of a script; only the launcher can send it here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=reports.fd, all_threads=False)
    if _STACKS_SIGNAL and "UNISONO_STACKS_FD" in os.environ:  # answers from C, while native code holds Python's lock
        faulthandler.register(_STACKS_SIGNAL, file=int(os.environ["UNISONO_STACKS_FD"]), all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # so that lines show as they are printed, also in a pipe or a file
            stream.reconfigure(line_buffering=True)
    _await_editor()
    return _run_guarded(_program(arguments), reports)


# -- 1. this process and the launcher ------------------------------------------------------------------------------


def die_with(launcher: int) -> None:
    """Have the kernel kill this process when its parent, the launcher, ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the request was made
        os._exit(1)


_RENDEZVOUS = "torch.distributed.rendezvous"
_GROUPS = "unisono.world.torch_groups"  # a name, as it is the program that uses it, where it makes a group


class _WhenImported(importlib.abc.MetaPathFinder):
    """Sees torch's module when the program imports it, and only then: nothing is imported for it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _RENDEZVOUS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_replace(module: types.ModuleType) -> None:
                run(module)
                _replace_opening(module)

            spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _replace_opening(rendezvous: types.ModuleType) -> None:
    torchs = rendezvous._create_c10d_store

    def open_store(*arguments: Any, **keywords: Any) -> Any:
        groups = importlib.import_module(_GROUPS)
        return groups.open_group_store(torchs, *arguments, **keywords)

    rendezvous._create_c10d_store = open_store  # type: ignore[attr-defined]


def _replace_breakpoints() -> None:
    """`breakpoint()` of the program means un.breakpoint(): pdb would ask a terminal that a worker does not have."""

    def stop(*_: object, **__: object) -> None:
        importlib.import_module("unisono.launchers.runtime.debugger").breakpoint()

    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = stop


def _await_editor() -> None:
    """With `unisono run --debugpy`: listen at this rank's port until an editor's debugger is attached."""
    kind, _, port = os.environ.get("UNISONO_PDB", "").partition(":")
    if kind == "debugpy":
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # it warns of Python's own frozen modules
        debugpy = importlib.import_module("debugpy")
        debugpy.listen(("127.0.0.1", int(port) + int(os.environ.get("RANK", "0"))))
        debugpy.wait_for_client()
        os.environ.pop("PYTHONBREAKPOINT", None)
        sys.breakpointhook = debugpy.breakpoint  # the editor's, not our prompt


# -- 2. as if Python had started it ----------------------------------------------------------------------------------


def _fix_import_path() -> None:
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(_HERE):
        del sys.path[0]
    if _PACKAGE_ROOT not in sys.path:  # the launcher may have found Unisono by a path set in the program
        sys.path.append(_PACKAGE_ROOT)


def _program(arguments: Sequence[str]) -> Callable[[], None]:
    if arguments[0] == "--function":
        return _run_function
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(arguments[1:])
        return lambda: _discard(runpy.run_module(arguments[1], run_name="__main__", alter_sys=True))
    script = os.path.abspath(arguments[0])
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    sys.argv = [arguments[0], *arguments[1:]]
    return lambda: _discard(runpy.run_path(script, run_name="__main__"))


def _discard(_: object) -> None:
    """Drop the program's globals as soon as it is over."""


def _run_function() -> None:
    """Run the function in the launcher's payload, and leave its result in this worker's result file."""
    payload = _read_all(int(os.environ["UNISONO_PAYLOAD_FD"]))
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    sys.path[:] = header["path"]
    _fix_import_path()
    sys.argv = header["argv"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    import linecache

    for name, text in header["sources"].items():  # a notebook's cells: tracebacks show their lines
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    pickler = importlib.import_module(header["pickler"])
    function, arguments, keywords = pickler.loads(payload[8 + length :])
    del payload
    try:
        result = function(*arguments, **keywords)
    except SystemExit as stop:  # as a parameter server that has a rank of its own ends
        if stop.code:
            raise
        result = None
    try:
        data = pickler.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the function returned {type(result).__name__}, which cannot be sent back to the launcher ({error}); "
            "return plain data, arrays or tensors"
        ) from None
    fd, view = int(os.environ["UNISONO_RESULT_FD"]), memoryview(b"\1" + data)
    os.ftruncate(fd, 0)  # a worker that had this place before may have left its None
    os.lseek(fd, 0, os.SEEK_SET)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int) -> bytes:
    """The whole file, read without moving the position that all workers share."""
    parts: list[bytes] = []
    size, done = os.fstat(fd).st_size, 0
    while done < size:
        parts.append(os.pread(fd, size - done, done))
        done += len(parts[-1])
    return b"".join(parts)


# -- 3. run it ---------------------------------------------------------------------------------------------------------


def _run_guarded(program: Callable[[], None], reports: _Reports) -> int:
    try:
        reports.send("ready")  # from here on SIGINT is handled quietly, and the launcher may send it
        try:
            program()
        except SystemExit:
            _end_saves()
            raise
        _end_saves()
    except SystemExit as stop:
        if _is_preempted(stop):
            _note_ending("note_ending", "has saved and left, told by SIGTERM")
            reports.send("preempted")
            return int(str(stop.code))
        status = _exit_status(stop, reports)
        _note_ending("note_ending", f"has ended its program with status {status}")
        if not status:
            reports.send("done")
        return status
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _note_ending("note_ending", "was interrupted")
        reports.send("interrupt", code=130)
        return 130
    except BaseException as error:
        _open_debugger(error)
        _report_error(error, reports)
        _note_ending("note_failure", error)
        return 1
    _note_ending("note_ending", "has ended its program with status 0")
    reports.send("done")
    return 0


def _end_saves() -> None:
    """Wait for checkpoints in the background, as a part of the program: its process may take minutes, and may fail."""
    saves = sys.modules.get("unisono.training.checkpoint.behind")
    if saves is not None:
        saves.end_saves()


def _open_debugger(error: BaseException) -> None:
    """With `unisono run --pdb`: open the prompt where the error was raised, and return when it is left."""
    if os.environ.get("UNISONO_PDB") == "1":
        _cut_frames(error)
        try:
            importlib.import_module("unisono.launchers.runtime.debugger").post_mortem(error)
        except SystemExit:  # the run was ended from the prompt; the error is reported as ever
            return


def _cut_frames(error: BaseException) -> types.TracebackType | None:
    """Cut the frames that started the program from the traceback."""
    frames = error.__traceback__
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file not in (_HERE, __file__, runpy.__file__) and not file.startswith("<frozen "):
            break
        frames = frames.tb_next
    error.__traceback__ = frames
    return frames


def _note_ending(call: str, how: object) -> None:
    """Note how the program ended, for ranks that still wait for this one, if it used any."""
    ending = sys.modules.get("unisono.launchers.runtime.status")
    if ending is not None:
        getattr(ending, call)(how)


def _is_preempted(stop: SystemExit) -> bool:
    """Whether the ranks have agreed to leave after SIGTERM, and the program does so with the status for it."""
    sigterm = sys.modules.get("unisono.launchers.runtime.sigterm")
    return sigterm is not None and sigterm.has_agreed() and stop.code == sigterm.PREEMPTED


def _exit_status(stop: SystemExit, reports: _Reports) -> int:
    """The status that Python would exit with after `sys.exit(...)`; a failure is reported without a traceback."""
    if stop.code is None:
        return 0
    number = stop.code if isinstance(stop.code, int) else 1
    message = "" if isinstance(stop.code, int) else str(stop.code)  # the launcher's report shows it
    if number & 0xFF:
        reports.send("exit", code=number & 0xFF, message=message[:_MESSAGE_CHARACTERS])
    return number & 0xFF


def _report_error(error: BaseException, reports: _Reports) -> None:
    frames = _cut_frames(error)
    if hasattr(error, "hide_frames"):  # it is about the ranks or a spec, and our frames say nothing of it
        error.hide_frames()
    text = "".join(traceback.format_exception(type(error), error, frames))
    types_ = [kind.__name__ for kind in type(error).__mro__]
    message = str(error)[:_MESSAGE_CHARACTERS]
    reports.send("exception", code=1, types=types_, message=message, traceback=text[-_MESSAGE_CHARACTERS:])
    import inspect  # costs a start that goes well nothing

    hook = sys.excepthook
    while getattr(hook, "__name__", "") == "_distributed_excepthook":  # torch's: prints the traceback a second time
        hook = inspect.getclosurevars(hook).nonlocals["old_hook"]
    if hook is not sys.__excepthook__:  # the program, or a library of its, asked to be told
        hook(type(error), error, frames)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
