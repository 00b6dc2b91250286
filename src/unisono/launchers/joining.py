"""Hosts that come to an elastic run under way: `unisono join ADDRESS`, and the launcher's side of it.

1. The host proves that it knows the run's secret (runtime/channel.py), and asks for places.
2. The launcher gives it free ones, and says what the run is: versions, folder and program.
3. The host compares. If something differs, it says so and leaves, and its places are free again.
4. It starts an agent for each place (worker/elastic_agent.py). From here on these are agents like the engine's: their
   workers' output and reports go to the launcher, and their loss is a loss like any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.launchers import guard
from unisono.launchers.engines.engine import AGENT, UNREACHED, agent_command, split_host
from unisono.launchers.engines.ssh import HostAgents
from unisono.launchers.runtime.channel import SECRET, Channel, NotProven, connect_once
from unisono.launchers.runtime.files import NotPrivate, find_private_folder
from unisono.launchers.runtime.run_folder import find_version

if TYPE_CHECKING:
    from unisono.launchers.elastic_hosts import ElasticHostsRun

__all__ = ["CannotJoin", "OpenPlaces", "describe_run", "join_run", "parse_address", "read_secret", "read_versions"]

_WAIT_S = 2.0  # between two requests for a place
_ANSWER_S = 10.0


class CannotJoin(Exception):
    """Why this host cannot join the run; `is_full`: for now, as all places are taken."""

    def __init__(self, why: str, *, is_full: bool = False) -> None:
        super().__init__(why)
        self.is_full = is_full


def read_versions() -> dict[str, str]:
    """What must be the same on all hosts of a run; torch's build for a kind of device may differ."""
    try:
        torch = metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        torch = "none"
    return {"Unisono": find_version(), "Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch}


def describe_run(program: Sequence[str]) -> dict[str, Any]:
    """The program of a run as it lies in the working directory: its files have to be the same on a host that joins.

    The file of the program alone is compared. A model, an optimizer or a strategy that differs is found when the worker
    joins the others (methods/strategy/healing.py).
    """
    folder, digest = os.getcwd(), None
    if (file := _find_file(program)) is not None:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"folder": folder, "program": list(program), "file": file and str(file), "digest": digest}


def _find_file(program: Sequence[str]) -> Path | None:
    """The file that a program begins with; None for a function, or a module that is not below this folder."""
    if program[:1] == ["--function"] or not program:
        return None
    names = [Path(program[0])]
    if program[0] == "-m":
        path = Path(*program[1].split("."))
        names = [path.with_suffix(".py"), path / "__main__.py"]
    return next((name for name in names if name.is_file()), None)


# The launcher's side -------------------------------------------------------------------------------------------------


class OpenPlaces:
    """Which places of a run are free, for whom they are kept, and how other hosts are told to join."""

    def __init__(self, run: ElasticHostsRun, token: bytes) -> None:
        self._run, self._token = run, token
        self._kept: dict[Channel, list[int]] = {}  # for hosts that have asked for them
        self._described = describe_run(run.job.program)
        self._secret_file: Path | None = None
        self.how = ""  # the command for other hosts
        self.versions: dict[str, str] = {}  # as an agent has said them, as the launcher's own may be others

    def announce(self, address: tuple[str, int]) -> None:
        """Write the secret to a file that only this user can read, and say how hosts join."""
        job = self._run.job
        try:
            folder = find_private_folder() if job.record is None else job.record.path
            path = folder / (f"{os.getpid()}.secret" if job.record is None else "secret")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(self._token.hex() + "\n")
        except (OSError, NotPrivate) as error:
            self._run.output.say(f"unisono: no host can join later: the run's secret cannot be written: {error}")
            return
        self._secret_file = path
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.how = f"unisono join {host}:{address[1]} --secret {shlex.quote(str(path))}"
        if job.record is not None:
            job.record.update(join=self.how)
        if later := job.places - job.engine_places:
            where = "1 place is" if later == 1 else f"{later} places are"
            self._run.output.say(f"unisono: {where} free for hosts that join later: {self.how}")

    def close(self) -> None:
        """The secret is of no use any more."""
        if self._secret_file is not None:
            self._secret_file.unlink(missing_ok=True)

    def _list_free(self) -> list[int]:
        """Places without an agent, those that the engine does not fill first. The engine's are free if it has lost
        their agents."""
        taken = {worker.rank for worker in self._run.agents.values()}.union(*self._kept.values())
        first = self._run.job.engine_places
        engines = range(first) if self._run.has_begun else range(0)
        return [place for place in (*range(first, self._run.job.places), *engines) if place not in taken]

    def take(self, channel: Channel, message: Mapping[str, Any]) -> None:
        """Answer a host that asks for places."""
        count, host = int(message["workers"]), str(message["host"])
        coordinator = self._run.elastic.coordinator
        free, most = self._list_free(), self._run.job.places
        if coordinator.ending or coordinator.too_few or self._run.stop_time is not None:
            self._refuse(channel, "the run is about to end")
        elif len(free) < count:
            have = "has no free place" if not free else f"has {len(free)} free, and {count} are asked for (-n)"
            self._refuse(
                channel,
                f"the run takes {most} workers at most (MAX of -n MIN:MAX), and {have}: --wait waits, or start the run "
                "with a larger MAX and --later",
                full=True,
            )
        else:
            places = self._kept[channel] = free[:count]
            note = ""
            if coordinator.wanted < len(coordinator.members) + len(self._run.waiting) + count:
                note = f"the run aims at {coordinator.wanted} workers now: those here may wait (unisono scale)"
            self._run.server.send(
                channel,
                kind="places",
                places=places,
                size=most,
                heartbeat_s=self._run.elastic.heartbeat_s,
                page=self._run.offered_page,
                versions=self.versions or read_versions(),
                note=note,
                **self._described,
            )
            self._run.output.say(f"unisono: host {host} joins, for worker {', '.join(map(str, places))}")
            self._run.job.note("host joined", host=host, places=places)

    def _refuse(self, channel: Channel, why: str, *, full: bool = False) -> None:
        self._run.server.send(channel, kind="refused", why=why, full=full)

    def release(self, channel: Channel) -> None:
        """A host that had asked for places is gone, or cut off: agents that still have them keep them."""
        self._kept.pop(channel, None)

    def dismiss(self, *, well: bool) -> None:
        """Tell the hosts that have joined that the run is over."""
        for channel in self._kept:
            self._run.server.send(channel, kind="end", well=well)


# The side of the host that joins --------------------------------------------------------------------------------------


def read_secret(file: str | None) -> bytes:
    """The run's secret: from a file ("-": standard input), or UNISONO_SECRET. Raises CannotJoin."""
    try:
        text = sys.stdin.readline() if file == "-" else Path(file).read_text() if file else os.environ.get(SECRET, "")
    except OSError as error:
        raise CannotJoin(
            f"the secret cannot be read from {file} ({error.strerror}): the run is over, or the file is on another host"
        ) from None
    where = {None: SECRET, "-": "standard input"}.get(file, file)
    if not text.strip():
        raise CannotJoin(
            f"no secret in {where}: give --secret FILE (the file `secret` in the run's folder on the launcher's host), "
            f"--secret - for standard input, or {SECRET}"
        )
    with contextlib.suppress(ValueError):
        if len(token := bytes.fromhex(text.strip())) == 32:
            return token
    raise CannotJoin(f"what {where} holds is no secret of a run: expected 64 hexadecimal digits")


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, an IPv6 address in brackets. Raises ValueError.

    >>> parse_address("10.0.0.5:40123"), parse_address("[fd00::7]:40123")
    (('10.0.0.5', 40123), ('fd00::7', 40123))
    """
    host, port = split_host(text)
    if not host or port is None or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"got the address {text!r}; expected HOST:PORT, as `unisono scale` shows it on the run's host")
    return host, int(port)


def join_run(address: tuple[str, int], token: bytes, *, workers: int = 1, wait: bool = False) -> int:
    """Serve a run with workers of this host until it is over; the exit status. Raises CannotJoin.

    `wait`: while the run has all its workers, ask again until one has gone.
    """
    os.environ.pop(SECRET, None)  # no worker is to see it: they have a secret of their own
    said = False
    while True:
        channel = _reach(address, token)
        try:
            given = _ask(channel, workers)
            _compare(given)
            break
        except CannotJoin as error:
            channel.close()
            if not (wait and error.is_full):
                raise
            if not said:
                _say(f"waits for a place: {error}")
                said = True
            time.sleep(_WAIT_S)
        except BaseException:
            channel.close()
            raise
    places = ", ".join(map(str, given["places"]))
    program = " ".join(given["program"])[:200]
    _say(f"joins {program}, for worker {places}; what they write appears where the run was started")
    if given["note"]:
        _say(given["note"])
    return _serve(channel, token, given)


def _reach(address: tuple[str, int], token: bytes) -> Channel:
    host, port = address
    try:
        return connect_once(host, port, token, timeout_s=_ANSWER_S)
    except NotProven as error:
        raise CannotJoin(
            f"{host}:{port} does not accept this secret ({error}): are secret and address those of one run, as "
            "`unisono scale` shows them on the run's host?"
        ) from None
    except ConnectionRefusedError:
        raise CannotJoin(f"nothing listens at {host}:{port}: the run is over, or the address is another") from None
    except OSError as error:
        raise CannotJoin(f"{host}:{port} cannot be reached from {socket.gethostname()}: {error}") from None


def _ask(channel: Channel, workers: int) -> dict[str, Any]:
    """Ask for places; what the launcher says of the run."""
    channel.send_json(kind="join", workers=workers, host=os.environ.get("UNISONO_HOST", socket.gethostname()))
    channel.sock.settimeout(_ANSWER_S)
    try:
        frames = channel.receive()
        while frames == []:
            frames = channel.receive()
    except OSError as error:
        raise CannotJoin(f"the launcher does not answer: {error}") from None
    channel.sock.settimeout(None)
    answer = {} if frames is None else frames[0].json()
    if answer.get("kind") == "refused":
        raise CannotJoin(answer["why"], is_full=answer["full"])
    if answer.get("kind") != "places":
        raise CannotJoin("the launcher has closed the connection: the run has just ended")
    return answer


def _compare(run: Mapping[str, Any]) -> None:
    """Whether this host has what the others have. Raises CannotJoin, and moves to the run's folder."""
    for name, mine in read_versions().items():
        theirs = run["versions"].get(name)
        if mine != theirs:
            raise CannotJoin(f"this host has {name} {mine}, the run has {theirs}: install the same version here")
    if run["program"][:1] == ["--function"]:
        return
    folder = run["folder"]
    try:
        os.chdir(folder)
    except OSError as error:
        raise CannotJoin(
            f"the folder {folder}, where the run was started, cannot be used here ({error.strerror}): the program must "
            "lie in the same place on every host"
        ) from None
    found = describe_run(run["program"])["digest"]
    if run["digest"] is not None and found != run["digest"]:
        what = "is missing" if found is None else "differs from that of the run"
        raise CannotJoin(f"{Path(folder, run['file'])} {what}: copy the program of the run to this host")


def _serve(channel: Channel, token: bytes, given: Mapping[str, Any]) -> int:
    address = channel.sock.getpeername()[:2]
    told = {
        "launcher": [address],
        "token": token.hex(),
        "engine": "torchrun",
        "page": given["page"],
        "heartbeat_s": given["heartbeat_s"],
        "joined": True,
    }
    setup = {
        "env": {AGENT: json.dumps(told)},
        "agent": agent_command(None),
        "ranks": given["places"],
        "size": given["size"],
        "elastic": True,
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_id = secrets.token_hex(12)
    host = HostAgents(setup, channel, run_id, stdin=None)
    try:
        status = host.run()
    except KeyboardInterrupt:
        _say("leaves the run: the others continue without this host")
        return 130
    finally:
        host.stop()
        guard.sweep(run_id, host.started, patience_s=0.5)
    if host.ended_well is None:
        _say("the run's launcher has ended, or has given this host's places to others")
        return UNREACHED
    _say("the run is over" if host.ended_well else "the run has failed")
    return status if host.ended_well else 1


def _say(text: str, put: Callable[..., None] = print) -> None:
    put(f"unisono join: {text}", file=sys.stderr, flush=True)
