"""The debugger: its messages, its promises about who is let go, and its prompt on ranks that are threads."""

from __future__ import annotations

import io
import linecache
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import unisono as un
from unisono.launchers.runtime import debug_pause, debugger
from unisono.launchers.runtime.channel import Channel, NotProven
from unisono.launchers.runtime.debugger import prompt as terminal
from unisono.launchers.runtime.debugger.agent import Agent, RankThread
from unisono.launchers.runtime.debugger.hub import Hub, HubConnection, connect_to_hub, list_announced, read_wait_s
from unisono.launchers.runtime.debugger.prompt import Prompt
from unisono.launchers.runtime.debugger.rank_pdb import RankPdb
from unisono.launchers.runtime.files import find_private_folder
from unisono.units import parse_ranks, show_ranks
from unisono.world import World
from unisono.world.transports.threads import Hub as ThreadHub
from unisono.world.transports.threads import Member

TOKEN = b"t" * 32
LIMIT_S = 30.0  # for a message; nothing here takes that long


class Typed:
    """A console on which these lines are typed, and then no more (Ctrl-D)."""

    def __init__(self, lines: Sequence[str | Callable[[], str]]) -> None:
        self._lines, self.shown = list(lines), ""

    def read(self, prompt: str) -> str:
        self.shown += prompt
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        line = line() if callable(line) else line
        self.shown += line + "\n"
        return line

    def write(self, text: str) -> None:
        self.shown += text + "\n"

    def close(self) -> None:
        pass

    @property
    def answers(self) -> list[str]:
        """What was shown between the lines that were typed, without these."""
        return [part.partition("\n")[2].rstrip("\n") for part in self.shown.split("(unisono) ")[1:]]


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Typed]]:
    """Have these lines typed when ranks stop; without any there is no console."""

    def use(*lines: str | Callable[[], str]) -> Typed:
        console = Typed(lines)
        monkeypatch.setattr(terminal, "_find_console", lambda: console)
        return console

    monkeypatch.setattr(terminal, "_find_console", lambda: None)
    yield use
    assert debug_pause.active is False
    assert sys.gettrace() is None


def line_of(text: str) -> int:
    """The line of this file that ends so."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}")]
    return found


# On ranks -------------------------------------------------------------------------------------------------------------


def test_differences_are_shown_by_rank_and_equal_answers_once(type_lines: Callable[..., Typed]) -> None:
    def work(world: World) -> float:
        mine, ours = 7 if world.rank == 2 else 1, 5
        un.breakpoint()
        assert ours == 5
        return float(world.all_reduce(torch.tensor(float(mine)), "sum").wait())

    console = type_lines("p mine", "@2 p mine;;p ours", "@0,3 p ours", "p ours", "p nothing", "c")
    assert un.run_threads(work, 4) == [10.0] * 4
    assert console.shown.startswith("ranks 0-3 at test_debugger.py:")
    assert "-> un.breakpoint()" in console.shown
    mine, of_2, of_two, ours, nothing, _ = console.answers
    assert mine == "ranks 0-1, 3: 1\nrank 2: 7"
    assert (of_2, of_two, ours) == ("7\n5", "5", "5")
    assert nothing == "*** NameError: name 'nothing' is not defined"


def test_steps_are_made_together_over_a_collective_too(type_lines: Callable[..., Typed]) -> None:
    def work(world: World) -> float:
        x = torch.tensor(1.0)
        un.breakpoint()  # begin
        world.all_reduce(x, "sum").wait()
        x += 1
        return float(x)

    begin = line_of("begin")
    console = type_lines("n", "n", "p x", "l", "u", "d", "c")
    assert un.run_threads(work, 3) == [4.0] * 3
    first, second, x, source, _, _, _ = console.answers
    assert first.startswith(f"ranks 0-2 at test_debugger.py:{begin + 1} in work")
    assert second.startswith(f"ranks 0-2 at test_debugger.py:{begin + 2} in work")
    assert x == "tensor(3.)"
    assert f"{begin + 2}  ->" in source


def test_a_file_that_another_thread_drops_from_linecache_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's debugger checks all files there when it begins, and drops those that are gone."""

    class Shared(dict[str, object]):
        def __getitem__(self, name: str) -> object:
            if name == "first.py":
                self.pop("second.py", None)  # as another rank would, between two files of this one
            return super().__getitem__(name)

    files = {name: (1, 1.0, ["x\n"], f"/absent/{name}") for name in ("first.py", "second.py")}
    monkeypatch.setattr(linecache, "cache", Shared(files))
    RankPdb(SimpleNamespace(is_off=False)).reset()
    assert "second.py" not in linecache.cache


def test_a_step_goes_into_code_of_the_user_alone(type_lines: Callable[..., Typed]) -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x  # inside

    def work(world: World) -> float:
        model = Double()
        un.breakpoint()
        return float(model(torch.tensor(2.0)))

    console = type_lines("n", "s", "s", "r", "c")
    assert un.run_threads(work, 2) == [4.0, 4.0]
    assert f"ranks 0-1 at test_debugger.py:{line_of('inside')} in forward" in console.answers[2]


def test_all_stop_when_one_rank_reaches_a_breakpoint(type_lines: Callable[..., Typed]) -> None:
    def work(world: World) -> float:
        total = 0.0
        for step in range(4):
            un.breakpoint(rank=1, when=step == 2)  # one
            total += float(world.all_reduce(torch.tensor(float(step)), "mean").wait())  # meet
        return total

    console = type_lines("p step", "w", "n", "n", "w", "c")
    assert un.run_threads(work, 3) == [6.0] * 3
    one, meet = line_of("one"), line_of("meet")
    step, where, *_, after, _ = console.answers
    assert step == "2"
    assert f"rank 1 at test_debugger.py:{one} in work" in where
    assert f"test_debugger.py:{meet} in work" in where  # the others, stopped there or waiting
    assert after == f"ranks 0-2 at test_debugger.py:{one - 1} in work"


def test_breakpoints_of_the_prompt_stop_all(type_lines: Callable[..., Typed]) -> None:
    def work(world: World) -> int:
        un.breakpoint()
        count = 0
        for _ in range(3):
            count += 1  # again
            world.barrier()
        return count

    again = line_of("again")
    console = type_lines(f"b {__file__}:{again}", "c", "p count", "c", "p count", "cl", "c")
    assert un.run_threads(work, 2) == [3, 3]
    assert f"ranks 0-1 at test_debugger.py:{again} in work" in console.shown
    assert [answer for answer in console.answers if answer in ("0", "1")] == ["0", "1"]


@pytest.mark.parametrize("last", [["q"], []], ids=["q", "end of input"])
def test_leaving_lets_all_go_on_and_pass_over_breakpoints(last: list[str], type_lines: Callable[..., Typed]) -> None:
    def work(world: World) -> int:
        for step in range(3):
            un.breakpoint(rank=step)
            world.barrier()
        return world.rank

    console = type_lines("w", *last)
    assert un.run_threads(work, 3) == [0, 1, 2]
    assert console.shown.count("(unisono) ") == 2
    assert console.shown.endswith("left: all workers continue, and ignore further breakpoints\n")


def test_where_nobody_can_answer_it_says_how_to_attach_and_goes_on(
    type_lines: Callable[..., Typed], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNISONO_DEBUG_WAIT_S", "0")

    def work(world: World) -> int:
        un.breakpoint()
        world.barrier()
        return world.rank

    assert un.run_threads(work, 2) == [0, 1]
    said = capfd.readouterr().err
    assert "Attach with: unisono debug" in said
    assert "nobody has attached within 0 s (UNISONO_DEBUG_WAIT_S): the workers continue" in said
    assert [one for one in list_announced() if one.pid == os.getpid()] == []  # other tests have runs of their own


def test_a_collective_that_not_all_are_asked_for_is_refused(type_lines: Callable[..., Typed]) -> None:
    def work(world: World) -> float:
        x = torch.tensor(1.0)
        un.breakpoint()
        return float(x)

    console = type_lines("@1 p world.all_reduce(x)", "p world.all_reduce(x, 'sum').wait()", "c")
    assert un.run_threads(work, 2) == [2.0, 2.0]
    alone, together, _ = console.answers
    assert alone.startswith("*** RuntimeError: other ranks would have to take part")
    assert together == "tensor(2.)"


def test_after_an_error_the_prompt_is_where_it_was_raised(type_lines: Callable[..., Typed]) -> None:
    def fail(value: int) -> None:
        raise ValueError(f"bad value {value}")  # raised

    def work(world: World) -> int:
        if world.rank == 1:
            try:
                fail(3)
            except ValueError as error:
                debugger.post_mortem(error)
        world.barrier()
        return world.rank

    console = type_lines("@1 p value", "@1 u", "@1 p world.rank", "q")
    assert un.run_threads(work, 2) == [0, 1]
    assert f"rank 1 at test_debugger.py:{line_of('raised')} in fail" in console.shown
    assert "ValueError: bad value 3" in console.shown.partition("(unisono)")[0]
    assert (console.answers[0], console.answers[2]) == ("3", "1")


def test_an_unknown_rank_and_unknown_words_are_answered(type_lines: Callable[..., Typed]) -> None:
    console = type_lines("@7 p 1", "@x p 1", "interact", "@1", "p 1 + 1", "@all", "h", "", "c")
    assert un.run_threads(lambda world: un.breakpoint(), 2) == [None, None]
    seven, x, interact, chosen, two, every, words, again, _ = console.answers
    assert seven == "*** rank 7 not here; there are ranks 0-1"
    assert x == "*** got @x; expected ranks, such as @2, @0,3 or @0-2, or @all"
    assert interact.startswith("*** interact: ")
    assert (chosen, two, every) == ("commands go to rank 1", "2", "commands go to all ranks")
    assert "where each rank is" in words
    assert again == words  # an empty line repeats


def test_the_debugger_does_not_come_where_when_is_false(type_lines: Callable[..., Typed]) -> None:
    console = type_lines("c")

    def work(world: World) -> int:
        un.breakpoint(when=False)
        un.breakpoint(when=lambda: False)
        un.breakpoint(rank=5)
        return 1

    assert un.run_threads(work, 2) == [1, 1]
    assert console.shown == ""


def test_a_program_that_runs_alone_has_pdb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("UNISONO_DEBUGGER", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("p alone\nc\n"))
    alone = 42
    before = signal.getsignal(signal.SIGINT)
    un.breakpoint(rank=1)  # of another
    un.breakpoint()
    signal.signal(signal.SIGINT, before)  # pdb has taken it, as it does
    assert "(Pdb) 42\n(Pdb) " in capsys.readouterr().out
    assert alone == 42


def join_agents() -> None:
    """Those of earlier tests that are about to leave would end a pause, which is the whole process's."""
    for thread in threading.enumerate():
        if thread.name == "unisono debugger":
            thread.join(1.0)  # one whose hub is still there stays


def test_limits_of_waiting_do_not_count_while_people_think() -> None:
    join_agents()
    looks = iter(range(100))
    debug_pause.begin_pause()
    try:  # five looks of 0.02 s: far over the limit
        wait_in_vain(lambda: next(looks) > 8)
    finally:
        debug_pause.end_pause()
    with pytest.raises(un.PeerLost, match=r"no answer within 0.02 s"):
        wait_in_vain(lambda: False)


def test_the_clock_stands_still_however_long_a_thread_waits_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 7))
    monkeypatch.setattr(debug_pause.time, "perf_counter", lambda: float(next(ticks)))
    join_agents()
    debug_pause.begin_pause()
    try:
        assert debug_pause.clock() == debug_pause.clock()
    finally:
        debug_pause.end_pause()


def wait_in_vain(is_ready: Callable[[], bool]) -> None:
    """For rank 1, as rank 0 of two, for 0.02 s at most."""
    hub = ThreadHub(2, timeout_s=0.02)
    hub.members[0] = Member()
    with hub.changed:
        hub.wait_for(is_ready, "all_reduce", [1], 0)


# The hub --------------------------------------------------------------------------------------------------------------


_opened: list[HubConnection] = []


class Connected:
    """One end of a connection, with its messages in order."""

    def __init__(self, hub: Hub, **hello: object) -> None:
        self.link: HubConnection = connect_to_hub([hub.address], TOKEN)
        self.link.channel.sock.settimeout(LIMIT_S)
        self.link.send(**hello)
        self._messages = self.link.messages()
        _opened.append(self.link)

    def next(self) -> dict[str, object]:
        return next(self._messages)

    def await_kind(self, kind: str) -> dict[str, object]:
        return next(message for message in self._messages if message["kind"] == kind)

    def stop(self, why: str = "breakpoint", after: int = 0) -> None:
        """`after`: how many releases have come to it."""
        self.link.send(kind="stopped", place="train.py:1", why=why, text="", after=after)


@pytest.fixture
def hub() -> Iterator[Hub]:
    said: list[str] = []
    made = Hub(socket.create_server(("127.0.0.1", 0)), TOKEN, said.append, open_prompt=lambda: True)
    made.start()
    yield made
    made.close()
    while _opened:
        _opened.pop().close()


def connect(hub: Hub, rank: int) -> Connected:
    return Connected(hub, kind="worker", rank=rank, size=2, pid=1, host="here")


def test_a_worker_that_stops_stops_the_others_and_the_prompt_is_told(hub: Hub) -> None:
    first, second = connect(hub, 0), connect(hub, 1)
    prompt = Connected(hub, kind="prompt")
    prompt.await_kind("ready")
    first.stop()
    assert second.next()["kind"] == "stop"
    assert prompt.await_kind("stopped")["rank"] == 0
    assert hub.is_paused
    prompt.link.send(kind="continue")
    assert [worker.next()["kind"] for worker in (first, second)] == ["continue", "continue"]


def test_a_worker_that_dies_frees_the_others(hub: Hub) -> None:
    first, second = connect(hub, 0), connect(hub, 1)
    prompt = Connected(hub, kind="prompt")
    first.stop()
    second.await_kind("stop")
    first.link.shut()
    assert second.next()["kind"] == "continue"
    gone = prompt.await_kind("gone")
    assert (gone["rank"], gone["died"]) == (0, True)


def test_a_worker_that_has_ended_well_frees_nobody(hub: Hub) -> None:
    first, second = connect(hub, 0), connect(hub, 1)
    prompt = Connected(hub, kind="prompt")
    second.stop()
    first.await_kind("stop")
    first.link.send(kind="bye")
    first.link.shut()
    assert prompt.await_kind("gone")["died"] is False
    assert hub.is_paused
    prompt.link.send(kind="line", id=1, text="p 1", ranks=[1], alone=True)
    assert second.next()["text"] == "p 1"


def test_a_prompt_that_is_killed_frees_all(hub: Hub) -> None:
    first, second = connect(hub, 0), connect(hub, 1)
    prompt = Connected(hub, kind="prompt")
    first.stop()
    second.await_kind("stop")
    prompt.await_kind("stopped")
    prompt.link.shut()
    assert [worker.next()["kind"] for worker in (first, second)] == ["leave", "leave"]
    second.stop()  # further breakpoints are passed over
    assert second.next()["kind"] == "leave"


def test_a_worker_that_stops_too_late_goes_on(hub: Hub) -> None:
    first, second = connect(hub, 0), connect(hub, 1)
    prompt = Connected(hub, kind="prompt")
    first.stop()
    second.await_kind("stop")
    prompt.link.send(kind="continue")
    assert second.next()["kind"] == "continue"
    second.stop(why="asked")
    assert second.next()["kind"] == "continue"


def test_a_release_says_which_stop_it_ends(hub: Hub) -> None:
    first, second = connect(hub, 0), connect(hub, 1)
    prompt = Connected(hub, kind="prompt")
    for number in (1, 2):
        first.stop()
        second.await_kind("stop")
        prompt.link.send(kind="continue")
        assert (first.await_kind("continue")["stops"], second.await_kind("continue")["stops"]) == (number, 0)


def test_a_worker_that_ends_a_step_too_late_goes_on(hub: Hub) -> None:
    first, second = connect(hub, 0), connect(hub, 1)
    prompt = Connected(hub, kind="prompt")
    first.stop()
    second.await_kind("stop")
    prompt.link.send(kind="continue")
    first.await_kind("continue")
    first.stop(why="step", after=0)
    assert first.next()["kind"] == "continue"
    assert not hub.is_paused


def test_a_stop_of_an_earlier_pause_is_made_anew_in_the_next(hub: Hub) -> None:
    """Rank 1 obeys while its release is on its way; meanwhile rank 0 has come to its next breakpoint."""
    first, second = connect(hub, 0), connect(hub, 1)
    prompt = Connected(hub, kind="prompt")
    first.stop()
    second.await_kind("stop")
    prompt.link.send(kind="continue")
    first.await_kind("continue")
    first.stop(after=1)
    assert [prompt.await_kind("stopped")["pause"] for _ in range(2)] == [1, 2]
    second.stop(why="asked", after=0)
    assert [second.next()["kind"] for _ in range(4)] == ["continue", "stop", "continue", "stop"]
    second.stop(why="asked", after=2)
    told = prompt.await_kind("stopped")
    assert (told["rank"], told["pause"]) == (1, 2)


def test_a_word_to_continue_ends_the_pause_that_it_was_said_in(hub: Hub) -> None:
    first = connect(hub, 0)
    prompt = Connected(hub, kind="prompt")
    for number in (1, 2):
        first.stop()
        assert prompt.await_kind("stopped")["pause"] == number
        prompt.link.send(kind="continue", pause=1)
        prompt.link.send(kind="line", id=number, text="p 1", ranks=[0], alone=True)
        assert first.next()["kind"] == ("continue" if number == 1 else "line")
        if number == 1:
            first.await_kind("line")
    assert hub.is_paused


def test_a_prompt_does_not_show_a_stop_that_it_has_ended() -> None:
    """Rank 0's was on its way to the prompt when all were let go: the next command would be for the next stop."""
    link = Scripted(
        *({"kind": "worker", "rank": rank, "size": 2} for rank in (0, 1)),
        {"kind": "ready"},
        {"kind": "stopped", "rank": 1, "place": "train.py:3", "why": "breakpoint", "text": "", "pause": 1},
    )
    late = {"kind": "stopped", "rank": 0, "place": "train.py:4", "why": "asked", "text": "", "pause": 1}
    next_one = {**late, "why": "breakpoint", "place": "train.py:7", "pause": 2}
    link.answers["continue"] = [late, next_one, {**next_one, "rank": 1}]
    console = Typed(["c", "q"])
    Prompt(link, console.read, console.write).run()
    assert console.answers[0] == "ranks 0-1 at train.py:7"
    assert [message["pause"] for message in link.sent if "pause" in message] == [1, 2]


class Scripted(HubConnection):
    """Its other end has said this; it answers a kind with `answers`, and questions for all ranks that they go to."""

    def __init__(self, *said: dict[str, object]) -> None:
        self._said: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self.answers: dict[str, list[dict[str, object]]] = {}
        self.sent: list[dict[str, object]] = []
        for message in said:
            self._said.put(message)

    def send(self, **fields: object) -> bool:
        self.sent.append(fields)
        for message in self.answers.get(str(fields["kind"]), []):
            self._said.put(message)
        for rank in fields.get("ranks", ()):  # type: ignore[attr-defined]
            answer = {"kind": "answer", "id": fields["id"], "rank": rank, "text": ""}
            self._said.put({**answer, "running": "waiting", "waits": True})
        return True

    def messages(self) -> Iterator[dict[str, object]]:
        while (message := self._said.get()) != {}:
            yield message

    def shut(self) -> None:
        self._said.put({})


@pytest.fixture
def agent() -> Iterator[Agent]:
    """Of a rank whose program is this thread, and to which the test says what the hub would."""
    mine, other = socket.socketpair()
    made = Agent(RankThread(0, 1, threading.get_ident()), lambda: HubConnection(Silent(mine)))
    made._has_tried.wait(LIMIT_S)
    yield made
    other.close()
    made._thread.join(LIMIT_S)
    debug_pause._looks.remove(made.look)
    debug_pause.end_pause()


def test_a_release_of_an_earlier_stop_does_not_end_this_one(agent: Agent) -> None:
    """It was on its way when the rank, which others had let go on, came to its next breakpoint."""
    agent.stopped("train.py:2", "breakpoint", "")
    agent._take({"kind": "continue", "stops": 0})
    assert agent.may_stop("step")  # as somebody may ask for now
    assert debug_pause._since is not None  # and the clock stands still
    agent._take({"kind": "line", "id": 1, "text": "p 1", "alone": False})
    assert agent.next_command() == (1, "p 1")
    agent._take({"kind": "continue", "stops": 1})
    assert agent.next_command() is None


def test_a_stop_that_is_ended_twice_does_not_end_the_next_one(agent: Agent) -> None:
    agent.stopped("train.py:2", "breakpoint", "")
    for _ in range(2):  # before the program has taken the first
        agent._take({"kind": "continue", "stops": 1})
    assert agent.next_command() is None
    agent.stopped("train.py:3", "breakpoint", "")
    agent._take({"kind": "line", "id": 2, "text": "p 2", "alone": False})
    assert agent.next_command() == (2, "p 2")


def test_who_is_let_go_while_it_steps_stops_at_the_next_breakpoint(agent: Agent) -> None:
    agent.stopped("train.py:2", "breakpoint", "")
    agent._take({"kind": "line", "id": 1, "text": "n", "alone": False})
    assert agent.next_command() == (1, "n")
    agent._take({"kind": "continue", "stops": 1})  # another rank has died
    agent.answer(1, "", goes_on=True)
    assert not agent.may_stop("step")
    agent.stopped("train.py:9", "breakpoint", "")
    agent._take({"kind": "line", "id": 2, "text": "p 2", "alone": False})
    assert agent.next_command() == (2, "p 2")


def test_who_is_asked_to_stop_before_it_has_gone_on_does_so(agent: Agent) -> None:
    agent.stopped("train.py:2", "breakpoint", "")
    agent._take({"kind": "continue", "stops": 1})
    agent._take({"kind": "stop"})  # the program has not yet taken the word to go on
    assert agent.next_command() is None
    assert agent.looks
    agent._take({"kind": "continue", "stops": 1})


class Silent(Channel):
    """One that is proven at once, and whose other end says nothing."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, TOKEN, server=False)
        self.proven = True


def test_there_is_one_prompt(hub: Hub) -> None:
    first = Connected(hub, kind="prompt")
    assert first.next()["kind"] == "ready"
    assert Connected(hub, kind="prompt").next()["kind"] == "busy"


def test_who_does_not_know_the_token_is_not_heard(hub: Hub) -> None:
    with pytest.raises(ConnectionError) as caught:
        connect_to_hub([hub.address], b"x" * 32, timeout_s=0.1)
    assert "another run's" in str(caught.value) or isinstance(caught.value, NotProven)


def test_a_hub_that_ends_frees_all(hub: Hub) -> None:
    worker = connect(hub, 0)
    worker.stop()
    hub._is_closing = True
    hub._loop.wake()
    assert list(worker.link.messages()) == []  # the connection ends, which a worker takes as a word to go on


# Words ----------------------------------------------------------------------------------------------------------------


def test_ranks_are_read_and_shown() -> None:
    assert show_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert parse_ranks("3,0-1", range(4)) == [0, 1, 3]
    with pytest.raises(ValueError, match="ranks 4-5 not here"):
        parse_ranks("4-5", range(4))
    with pytest.raises(ValueError, match="got @3-1; expected ranks"):
        parse_ranks("3-1", range(4))
    with pytest.raises(ValueError, match="not here; there are ranks 0-3"):
        parse_ranks("0-99999999999999", range(4))


def test_a_wait_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_DEBUG_WAIT_S", "soon")
    with pytest.raises(ValueError, match=r"UNISONO_DEBUG_WAIT_S='soon'; expected seconds"):
        read_wait_s()


def test_a_runtime_folder_that_is_set_and_missing_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_WARM", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert find_private_folder() == Path(f"/tmp/unisono-{os.getuid()}")
    (tmp_path / "missing").mkdir()
    assert find_private_folder() == tmp_path / "missing" / "unisono"
