"""What some methods do outside of messages: by the clock, in a server, in memory that all share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from drawings.causes import RANKS, Atom, Causes
from drawings.svg import Picture

ROUNDS = 2
SERVER = RANKS - 1


@contextmanager
def nothing() -> Iterator[None]:
    """Train as it is."""
    yield


def keep_rounds(causes: Causes) -> None:
    """`async_average`: how many rounds there were depends on the machine; the first ones are drawn."""
    for lane, atoms in causes.atoms.items():
        if not isinstance(lane, int):
            del atoms[4 * ROUNDS :]  # a round: begin and wait, to agree and to average


def mark_additions(picture: Picture, causes: Causes) -> None:
    """`async_average`: each rank adds what a round found between its next two windows."""
    means = [p for p in picture.layout.passing if p.message.tag == "average"]
    for rank, begins in picture.layout.windows.items():
        for mean in means:
            later = [begin for begin in begins if begin >= mean.end]
            if later:
                picture.marks.append((rank, later[0], "models"))


def mark_writes(picture: Picture, causes: Causes) -> None:
    """`hogwild`: every step writes to the memory that all ranks' parameters are in."""
    if len({tuple(note["places"]) for note in causes.notes}) != 1:
        raise ValueError("the ranks' parameters are not in one memory")
    for box in picture.layout.boxes:
        if box.kind == "step":
            picture.writes.append((box.rank, (box.start + box.end) / 2, "models"))


Window = tuple[int, int]  # of a worker: its number, and that of the window


def serve(causes: Causes) -> None:
    """`parameter_server(staleness=0)`: by the windows that the server knew of when it answered."""
    known = [[min(e["clocks"]) for e in note["events"] if e["kind"] == "staleness"] for note in causes.notes[:SERVER]]
    if any(clocks != list(range(1, len(clocks) + 1)) for clocks in known):
        raise ValueError(f"a worker was answered before all had pushed, or late: {known}")
    windows = [atom.about for atom in causes.atoms[0] if atom.what == "window"]
    everyone = [[(worker, window) for worker in range(SERVER)] for window in windows]
    _serve(causes, [(pushed, pushed) for pushed in everyone])


TURNS: list[Window] = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (1, 2), (2, 1), (2, 2)]
_answered: list[tuple[list[Window], list[Window]]] = []  # a push, and who may go on after it


@contextmanager
def in_turns() -> Iterator[None]:
    """`parameter_server(staleness=1)` takes pushes as they come: here in the order of `TURNS`, with a slow worker 2.
    Whom it lets go on after each is noted."""
    from unisono.strategies.parameter_server.server import GradientServer

    push, step = GradientServer.push, GradientServer._step
    turn, counts, waiting = threading.Condition(), [0] * SERVER, list[Window]()
    _answered.clear()

    def push_in_turn(self: GradientServer, worker: int, *args: Any, **kwargs: Any) -> Any:
        window = (worker, counts[worker])
        with turn:
            turn.wait_for(lambda: TURNS[len(_answered)] == window)
        counts[worker] += 1
        return push(self, worker, *args, **kwargs)

    def step_noted(self: GradientServer, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        assert self.staleness is not None
        with turn:
            pushed = TURNS[len(_answered)]
            waiting.append(pushed)
            free = [one for one in waiting if self._clocks[one[0]] - self._slowest(one[0]) <= self.staleness]
            waiting[:] = [one for one in waiting if one not in free]
            _answered.append(([pushed], free))
            turn.notify_all()

    with patch.object(GradientServer, "push", push_in_turn), patch.object(GradientServer, "_step", step_noted):
        yield


def serve_in_turns(causes: Causes) -> None:
    """The server's part, as noted."""
    _serve(causes, _answered)


def serve_beside(causes: Causes) -> None:
    """`async_diloco`: each thread of the server answers one worker, as soon as that has pushed."""
    for lane in [lane for lane in causes.atoms if not isinstance(lane, int)]:
        begun = [atom.about for atom in causes.atoms[lane] if atom.what == "begin"]
        if not begun:
            continue
        worker = causes.atoms[causes.messages[begun[0]].ranks[1]]
        visits = [(i, keys) for i, keys in enumerate(_list_begun(worker)) if keys]
        server = causes.atoms[lane] = []
        causes.atoms[0].insert(0, Atom("spawn", lane))
        for n, (window, keys) in enumerate(visits):
            answers = begun[2 * n : 2 * n + 2]  # what is said, and the model
            server += [Atom("wait", key) for key in keys] + [Atom("begin", key) for key in answers]
            _hear(worker, window, answers)


def _serve(causes: Causes, rounds: Sequence[tuple[Sequence[Window], Sequence[Window]]]) -> None:
    """In each round some workers push, the server steps, and some get their answers."""
    answers: dict[int, list[Any]] = {rank: [] for rank in range(SERVER)}
    for lane in [lane for lane in causes.atoms if not isinstance(lane, int)]:  # its threads, one for each worker
        for atom in causes.atoms.pop(lane):
            if atom.what == "begin":
                answers[causes.messages[atom.about].ranks[1]].append(atom.about)
    first = next(atom.about for atom in causes.atoms[0] if atom.what == "window")
    asked = {rank: _list_begun(causes.atoms[rank]) for rank in range(SERVER)}
    server = causes.atoms[SERVER]
    for pushed, answered in rounds:
        for rank, window in pushed:
            server += [Atom("wait", key) for key in asked[rank][window - first]]
        server.append(Atom("work", "step", 1.0))
        for rank, window in answered:
            pair = answers[rank][2 * window :][:2]  # what is said, and the parameters
            server += [Atom("begin", key) for key in pair]
            _hear(causes.atoms[rank], window - first, pair)
            _leave_step(causes.atoms[rank], window - first)


def _list_begun(atoms: Sequence[Atom]) -> list[list[Any]]:
    """The messages that each window begins."""
    found: list[list[Any]] = []
    for atom in atoms:
        if atom.what == "window":
            found.append([])
        elif atom.what == "begin":
            found[-1].append(atom.about)
    return found


def _hear(atoms: list[Atom], i: int, keys: list[Any]) -> None:
    """A worker waits in window i for these, which it receives as one."""
    at = _find(atoms, _find_window(atoms, i), "wait")
    atoms[at : at + 1] = [Atom("wait", key) for key in keys]


def _leave_step(atoms: list[Atom], i: int) -> None:
    """The optimizer's step of window i is the server's."""
    del atoms[_find(atoms, _find(atoms, _find_window(atoms, i), "wait"), "work", "step")]


def _find_window(atoms: Sequence[Atom], i: int) -> int:
    return [n for n, atom in enumerate(atoms) if atom.what == "window"][i]


def _find(atoms: Sequence[Atom], start: int, what: str, about: Any = None) -> int:
    return next(n for n in range(start, len(atoms)) if atoms[n].what == what and about in (None, atoms[n].about))


COMPUTE_S, SECONDS_A_BYTE = 0.02, 1e-6


@contextmanager
def fixed_times() -> Iterator[None]:
    """`auto` decides by times: here those of a link of 8 Mbit/s and of 20 ms of compute, on every machine."""
    from unisono.strategies.auto import replica as auto
    from unisono.strategies.auto.decisions import Probed, StepTimes

    estimate, measure = auto.estimate_costs, auto.measure_steps

    def estimate_costs(*arguments: Any) -> Any:
        return estimate(*arguments)._replace(work_s=0.0)

    def measure_steps(world: Any, count: int) -> Any:
        sent = measure(world, count).bytes_sent
        return StepTimes(COMPUTE_S + SECONDS_A_BYTE * sent, COMPUTE_S, 0.0, sent)

    with (
        patch.object(auto, "estimate_costs", estimate_costs),
        patch.object(auto, "measure_steps", measure_steps),
        patch.object(auto, "measure_link", lambda world: Probed(0.0, SECONDS_A_BYTE)),
    ):
        yield
