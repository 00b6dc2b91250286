"""The debugger inside a worker: a thread that is connected to the hub, and the rank's program, which it may stop.

The program stops by itself: at `un.breakpoint()`, and where it looks (debug_pause.py) after the hub has asked for it. A
rank that waits in a collective for others does not come that far; the thread then answers for it.
"""

from __future__ import annotations

import atexit
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.launchers.runtime import debug_pause
from unisono.launchers.runtime.debugger.hub import HubConnection
from unisono.launchers.runtime.frames import describe_place, find_user_frame, is_ours

if TYPE_CHECKING:
    from unisono.launchers.runtime.debugger.rank_pdb import RankPdb

__all__ = ["Agent", "Ended", "RankThread", "end_agent", "find_agent", "has_agents", "is_waiting", "start_agent"]

_RESUMING = {"c", "cont", "continue", "n", "next", "s", "step", "r", "return", "unt", "until", "j", "jump"}


class Ended(SystemExit):
    """The run was ended from the debugger's prompt."""


class RankThread(NamedTuple):
    """Who is to be debugged: a rank, whose program runs in that thread."""

    rank: int
    size: int
    thread: int


class Agent:
    """Debugger endpoint of one rank: connected to the hub, and able to stop the rank's program."""

    def __init__(self, seat: RankThread, connect: Callable[[], HubConnection]) -> None:
        self.seat, self._connect = seat, connect
        self._link: HubConnection | None = None
        self.problem = ""  # why there is no connection
        self._has_tried = threading.Event()
        self.is_off = False
        self._asked = False  # to stop where the program looks next
        self._may_come = 0  # to the breakpoint that another has come to: so many ends of steps are passed over
        self._lock = threading.Lock()  # of what follows: the program and the debugger's thread both change it
        self._is_stopped = False  # and not let go
        self._stops = 0  # so far
        self._releases = 0  # that have come
        self._is_canceled = False  # a step is under way that is not to stop any more
        self._asked_alone: int | None = None  # the thread in which an expression is evaluated that not all ranks have
        self._every = False
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        debug_pause.on_look(self.look)
        self._thread = threading.Thread(target=self._listen, name="unisono debugger", daemon=True)
        self._thread.start()

    @cached_property
    def _pdb(self) -> RankPdb:
        from unisono.launchers.runtime.debugger.rank_pdb import RankPdb  # pdb is imported where somebody debugs

        return RankPdb(self)

    @cached_property
    def _beside(self) -> RankPdb:
        """A debugger for commands that come while the program is not stopped."""
        from unisono.launchers.runtime.debugger.rank_pdb import RankPdb

        return RankPdb(self)

    # In the thread of the program -------------------------------------------------------------------------------------

    def stop_at(self, frame: FrameType, why: str, *, every: bool = False) -> None:
        """Stop the program here, in `frame`; `every`: other ranks will come here too."""
        self._every = every
        self._has_tried.wait()
        if not self.is_off:
            self._pdb.stop_at(frame, why)

    def stop_after(self, error: BaseException) -> None:
        """Stop the program where it has failed."""
        self._every = False
        self._has_tried.wait()
        if not self.is_off and error.__traceback__ is not None:
            self._pdb.stop_after(error, error.__traceback__)

    def look(self, moment: debug_pause.Moment) -> None:
        """Stop where this has been asked for. After an operation: at the next line, as what was done here is done.

        Where another has come to a breakpoint that all ranks come to, this one is given the time to: it waits for the
        other in the next operation anyway, so only there, or at the second end of a step, it stops.
        """
        if self._asked_alone == threading.get_ident():
            raise RuntimeError("other ranks would have to take part, and they were not asked: leave the @ out")
        if self._asked and threading.get_ident() == self.seat.thread and not self._is_stopped:
            if self._may_come and moment != "before":
                self._may_come -= moment == "step"
                return
            frame = find_user_frame(sys._getframe())
            if frame is not None:
                self._set_asked(False)
                if moment == "after":
                    self._pdb.stop_soon(frame)
                else:
                    self._pdb.stop_at(frame, "asked")

    def may_stop(self, why: str) -> bool:
        """Whether there is still someone who wants this rank to stop."""
        return not self.is_off and not (why in ("step", "asked") and self._is_canceled)

    def stopped(self, place: str, why: str, text: str) -> None:
        """Called when this rank has stopped."""
        with self._lock:
            debug_pause.begin_pause()
            self._stops += 1
            self._is_stopped = True
            self._set_asked(False)
            self._is_canceled = False
            self._commands = queue.SimpleQueue()  # what is left is of an earlier stop
            after = self._releases
        if not self._send(kind="stopped", place=place, why=why, text=text, every=self._every, after=after):
            self._take({"kind": "leave"})

    def next_command(self) -> tuple[int, str] | None:
        """The next command, with its number; None: go on, and stop no more. Blocks."""
        while True:
            message = self._commands.get()
            match message["kind"]:
                case "line":
                    self._evaluate_alone(message["alone"])
                    return message["id"], message["text"]
                case "continue" | "leave":
                    return None
                case "abort":
                    raise Ended("the run was ended from the debugger's prompt")

    def answer(self, number: int, text: str, *, goes_on: bool) -> None:
        """Send what a command printed."""
        self._evaluate_alone(False)
        with self._lock:
            self._is_stopped = self._is_stopped and not goes_on
        self._send(kind="answer", id=number, text=text, goes_on=goes_on)

    # In the thread of the debugger ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        who = self.seat
        try:
            self._link = self._connect()
            self._send(kind="worker", rank=who.rank, size=who.size, pid=os.getpid(), host=socket.gethostname())
        except OSError as error:
            self.is_off, self.problem = True, str(error)
            return
        finally:
            self._has_tried.set()
        for message in self._link.messages():
            self._take(message)
        self._take({"kind": "leave"})  # the hub is gone: nobody could let this rank go on
        self._link.close()

    def _send(self, **fields: Any) -> bool:
        return self._link is not None and self._link.send(**fields)

    def _take(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "stop":
                with self._lock:
                    debug_pause.begin_pause()
                    self._is_canceled = False
                    self._may_come = 2 if message.get("every") else 0
                    self._set_asked(not self._is_stopped)
            case "on":
                self.is_off = False
            case "line":
                with self._lock:
                    is_stopped = self._is_stopped
                    if is_stopped:
                        self._commands.put(message)
                if not is_stopped:
                    self._evaluate_alone(True)
                    found = self._answer_beside(message["text"])
                    self._evaluate_alone(False)
                    self._send(kind="answer", id=message["id"], **found)
            case "continue" | "leave" | "abort":
                with self._lock:
                    self._let_go(message)

    def _let_go(self, message: dict[str, Any]) -> None:
        """Of a stop that the hub knew of when it said so. One that it has yet to be told of stays: it then decides."""
        how = message["kind"]
        self.is_off = self.is_off or how == "leave"
        self._releases += 1
        if message.get("stops", self._stops) < self._stops and self._is_stopped and how != "abort":
            return
        debug_pause.end_pause()
        self._is_canceled = True
        self._set_asked(False)
        if self._is_stopped:
            self._is_stopped = False
            self._commands.put(message)
        elif how == "abort":
            os._exit(1)  # it waits in native code, perhaps for ever

    def _set_asked(self, asked: bool) -> None:
        self._asked = asked
        _set_active()

    def _evaluate_alone(self, is_alone: bool) -> None:
        self._asked_alone = threading.get_ident() if is_alone else None
        _set_active()

    @property
    def looks(self) -> bool:
        """Whether `look` has something to do."""
        return self._asked or self._asked_alone is not None

    def _answer_beside(self, line: str) -> dict[str, Any]:
        """What a command prints for a program that is not stopped; `running`: where it is, and whether it waits."""
        innermost = sys._current_frames().get(self.seat.thread)
        frame = find_user_frame(innermost)
        if innermost is None or frame is None:
            return {"text": "*** its program does not run", "running": "outside the program"}
        place = describe_place(frame)
        call = "" if innermost is frame else _describe_call(innermost, frame)
        running = f"{'waiting' if is_waiting(innermost) else 'running'} at {place}{call}"
        word = line.split(maxsplit=1)[0] if line.split() else ""
        if word in _RESUMING or not word:
            return {"text": "", "running": running, "waits": is_waiting(innermost)}
        return {"text": self._beside.look_at(frame, line), "running": running, "waits": is_waiting(innermost)}

    # Its end ----------------------------------------------------------------------------------------------------------

    def say_goodbye(self) -> None:
        """Tell the hub that the program is over, and disconnect."""
        if self._link is not None:
            self._send(kind="bye")
            self._link.shut()

    def disown(self) -> None:
        """Called in a forked child, to which the connection does not belong: close the descriptor."""
        if self._link is not None:
            self._link.close()


def is_waiting(innermost: FrameType) -> bool:
    """Whether a thread is in a call of ours, as one that waits for other ranks is."""
    frame: FrameType | None = innermost
    while frame is not None and not is_ours(frame):
        if find_user_frame(frame) is frame:
            return False
        frame = frame.f_back
    return frame is not None


def _describe_call(innermost: FrameType, user: FrameType) -> str:
    """ ", in all_reduce" """
    frame: FrameType | None = innermost
    name, op = "", ""
    while frame is not None and frame is not user:
        if is_ours(frame):
            name = frame.f_code.co_name
            op = op or getattr(frame.f_locals.get("record"), "op", "")  # of operations.py
        frame = frame.f_back
    return f", in {op or name}" if op or name else ""


_agents: dict[int, Agent] = {}  # by the thread that runs the rank's program
is_child = False  # of a worker, by fork


def _set_active() -> None:
    debug_pause.active = any(agent.looks for agent in list(_agents.values()))


def find_agent() -> Agent | None:
    """The agent of the rank whose program runs in this thread."""
    return _agents.get(threading.get_ident())


def has_agents() -> bool:
    """Whether this process has ranks that can be stopped."""
    return bool(_agents)


def start_agent(seat: RankThread, connect: Callable[[], HubConnection]) -> Agent:
    """Have a rank of this process debugged: `connect` gives the connection to the hub, in the debugger's thread."""
    agent = _agents[seat.thread] = Agent(seat, connect)
    return agent


def end_agent(thread: int) -> None:
    """Disconnect the agent of a thread whose program is over."""
    agent = _agents.pop(thread, None)
    if agent is not None:
        agent.say_goodbye()


@atexit.register
def _say_goodbye() -> None:
    for thread in list(_agents):
        end_agent(thread)


def _begin_anew_in_child() -> None:
    global is_child
    is_child = is_child or bool(_agents)
    for agent in _agents.values():
        agent.disown()
    _agents.clear()
    debug_pause.active = False


os.register_at_fork(after_in_child=_begin_anew_in_child)
