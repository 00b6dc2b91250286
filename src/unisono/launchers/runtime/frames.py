"""Which call of the user's program an error comes from, and a report of it without our own frames.

Nothing is noted while all goes well: the call is read from the traceback, once there is an error.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple
from zlib import crc32

__all__ = [
    "Call",
    "CalledByAll",
    "Site",
    "cut_below_user",
    "describe_place",
    "find_call",
    "find_current_call",
    "find_site",
    "find_user_frame",
    "has_user_frame",
    "hide_frames_of_uncaught",
    "is_of_program",
    "is_of_user",
    "is_ours",
    "warn_user",
]

VARIABLE = "UNISONO_TRACEBACK"  # "full": our frames are shown too
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARY = sysconfig.get_paths()["stdlib"]
_SAME_PASSES = (
    "every rank runs as many passes as the others: give each as many batches (un.shard does), and leave the loop on "
    "every rank at the same step"
)


class Call(NamedTuple):
    """A call in the user's program: "un.save", where it stands, and what every rank is meant to do there."""

    name: str
    file: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.name} ({os.path.basename(self.file)}:{self.line})"


_WRAPPERS = ("torch.distributed.c10d_logger", "typing_extensions")  # around functions of torch.distributed


class CalledByAll(Exception):
    """An error of something that all ranks do together. Its text names the call in the program and the rule for it.

    A module has the rules of its functions in a dict `EVERY_RANK`, by name ("*": of all its functions).
    """

    call: Call | None = None
    left_out = 0  # frames that were cut off

    def __str__(self) -> str:
        text = super().__str__()
        call = self.call or find_call(self.__traceback__)
        if call is not None:
            text += f"\nThis rank is in {call}: {call.rule}."
        if self.left_out:
            text += f"\n(Frames of unisono and torch are left out, {self.left_out} here: {VARIABLE}=full shows them.)"
        return text

    def hide_frames(self) -> None:
        """Cut the frames below the user's own off the traceback, unless the environment asks for all. An error of ours
        that this one was made from has nothing but such frames."""
        if os.environ.get(VARIABLE) == "full" or self.left_out:
            return
        if isinstance(self.__cause__, CalledByAll):
            self.__cause__ = None
        call = find_call(self.__traceback__)
        self.left_out = cut_below_user(self)
        if self.left_out:
            self.call = call


def cut_below_user(error: BaseException) -> int:
    """Cut the frames below the user's own off an error's traceback, unless the environment asks for all; how many."""
    parts = list(_list_traceback(error.__traceback__))
    last = _find_last_of_user([part.tb_frame for part in parts])
    if os.environ.get(VARIABLE) == "full" or last is None or last + 1 == len(parts):
        return 0
    parts[last].tb_next = None
    return len(parts) - last - 1


def has_user_frame(error: BaseException) -> bool:
    """Whether an error came through the user's own code."""
    return any(is_of_user(part.tb_frame) for part in _list_traceback(error.__traceback__))


def find_call(traceback: TracebackType | None) -> Call | None:
    """The innermost call of the user's program in a traceback; None where there is none, or it is not of ours."""
    parts = list(_list_traceback(traceback))
    return _name_call([part.tb_frame for part in parts], [part.tb_lineno for part in parts])


def find_current_call() -> Call | None:
    """The same for where this thread is now."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.insert(0, frame)
        frame = frame.f_back
    return _name_call(frames, [frame.f_lineno for frame in frames])


# The place of a call, for what all ranks do alike: found at every collective, so it has to cost little ---------------


class Site(NamedTuple):
    """A line of the program. `number` is the same in every process that runs the same files."""

    number: int
    text: str  # "train.py:88"


_WORLD = os.path.join(_HERE, "world") + os.sep
_JOB = os.path.join(_HERE, "background.py")
_SKIPPED, _BETWEEN, _PROGRAM, _QUEUE = range(4)  # our operations; other library code; the program; a job of a queue
_MOST_SITES = 4096
_kinds: dict[int, tuple[int, CodeType]] = {}  # by the code's address; the code is kept, so that no other has it
_sites: dict[tuple[int, int], Site] = {}


def find_site() -> tuple[Site | None, bool]:
    """The line of the program that this thread is in, and whether it calls the world itself (not un.save, say).

    None in a job of a queue: whoever waits for it may run it, so its line may be another one on each rank.
    """
    frame: FrameType | None = sys._getframe(1)
    direct = True
    while frame is not None:
        code = frame.f_code
        known = _kinds.get(id(code))
        kind = known[0] if known is not None else _note_kind(frame)
        if kind == _PROGRAM:
            key = (id(code), frame.f_lasti)
            site = _sites.get(key)
            return (site if site is not None else _note_site(key, frame)), direct
        if kind == _QUEUE:
            return None, False
        if kind == _BETWEEN:
            direct = False
        frame = frame.f_back
    return None, False


def _note_kind(frame: FrameType) -> int:
    code = frame.f_code
    file = code.co_filename
    if file == _JOB and code.co_name in ("__call__", "_loop"):
        kind = _QUEUE
    elif file.startswith(_WORLD):
        kind = _SKIPPED
    else:
        kind = _PROGRAM if is_of_user(frame) else _BETWEEN
    if len(_kinds) >= _MOST_SITES:
        _kinds.clear()
        _sites.clear()
    _kinds[id(code)] = kind, code
    return kind


def _note_site(key: tuple[int, int], frame: FrameType) -> Site:
    name = os.path.basename(frame.f_code.co_filename).encode("utf-8", "replace").decode()  # in locale C: surrogates
    text = f"{name}:{frame.f_lineno}"
    if len(_sites) >= _MOST_SITES:
        _sites.clear()
    site = _sites[key] = Site(crc32(text.encode()), text)
    return site


def is_of_program(file: str) -> bool:
    """Whether a file is the program's own, by its name: not ours, torch's or Python's."""
    if file.startswith((_HERE + os.sep, "<frozen ")) or f"{os.sep}torch{os.sep}" in file:
        return False
    return not file.startswith(_LIBRARY + os.sep) or "site-packages" in file


def warn_user(text: str) -> None:
    """A warning that points at the line of the user's program that this thread is in."""
    call = find_current_call()
    if call is None:  # a thread of ours
        warnings.warn(text, stacklevel=2)
    else:
        warnings.warn_explicit(text, UserWarning, call.file, call.line)


def hide_frames_of_uncaught() -> None:
    """Where Python itself will print an error that nobody caught: without our frames."""
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, CalledByAll):
            error.hide_frames()
        former(kind, error, traceback)

    if not getattr(former, "hides_frames", False):
        hook.hides_frames = True  # type: ignore[attr-defined]
        sys.excepthook = hook


def _list_traceback(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _name_call(frames: Sequence[FrameType], lines: Sequence[int]) -> Call | None:
    last = _find_last_of_user(frames)
    if last is None or last + 1 == len(frames):
        return None
    below = frames[last + 1 :]
    if not any(is_ours(frame) for frame in below):
        return None
    entry = next((frame for frame in below if frame.f_globals.get("__name__") not in _WRAPPERS), below[0])
    name, rule = _describe_entry(entry)
    rule = next(filter(None, map(_find_rule, below)), rule)
    return Call(name, frames[last].f_code.co_filename, lines[last], rule)


def _find_last_of_user(frames: Sequence[FrameType]) -> int | None:
    return next((i for i in reversed(range(len(frames))) if is_of_user(frames[i])), None)


def is_ours(frame: FrameType) -> bool:
    """Whether a frame is of unisono's own code."""
    return frame.f_code.co_filename.startswith(_HERE + os.sep)


def describe_place(frame: FrameType, line: int | None = None) -> str:
    """ "train.py:40 in train" """
    name = frame.f_code.co_name
    inside = "" if name == "<module>" else f" in {name}"
    return f"{os.path.basename(frame.f_code.co_filename)}:{line or frame.f_lineno}{inside}"


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program, from `frame` on outwards; None where there is none."""
    while frame is not None and not is_of_user(frame):
        frame = frame.f_back
    return frame


def is_of_user(frame: FrameType) -> bool:
    """Whether a frame is neither ours, nor torch's or Python's own."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    is_torchs = module.partition(".")[0] == "torch" or module in _WRAPPERS
    if is_ours(frame) or is_torchs or file.startswith("<frozen "):
        return False
    return not file.startswith(_LIBRARY + os.sep) or "site-packages" in file


def _find_rule(frame: FrameType) -> str:
    rules: Any = frame.f_globals.get("EVERY_RANK") if is_ours(frame) else None
    return str(rules.get(frame.f_code.co_name) or rules.get("*", "")) if rules else ""


def _describe_entry(frame: FrameType) -> tuple[str, str]:
    """What the user called, by the first frame that is not the user's; and the rule for it, where no module has one."""
    name = frame.f_code.co_name
    if not is_ours(frame):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.nn"):
            return ("a forward pass" if name.endswith("_call_impl") else f"{name}()"), _SAME_PASSES
        return "optimizer.step()" if module.startswith("torch.optim") else f"{name}()", _SAME_PASSES
    owner = frame.f_locals.get("self")
    kind = type(owner).__name__
    if kind == "Handle":  # of a collective that was begun elsewhere
        return f"{name}()", "every rank calls the same collectives in the same order"
    if owner is None:
        name = f"un.{name}"
    else:
        parent = "replica" if kind.endswith("Replica") else "world" if kind == "World" else kind
        name = f"{parent}.{name}"
    return name, f"every rank calls {name}, as often as the others and in the same order"
