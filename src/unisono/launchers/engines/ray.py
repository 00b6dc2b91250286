"""Workers started by Ray: one plain actor each, in one placement group; the launcher is the Ray driver.

1. Connect: to the Ray that this program uses, to the one at `address`, or to one started for the run.
2. Reserve a slot for every worker at once, or say within seconds what is missing.
3. One actor a slot runs the worker's agent (agent.py); a Ray Dataset among a function's arguments is split to them.
4. After a failure, where restarts are left, all actors are made anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, ClassVar

from unisono.launchers.engines.engine import FAILED, Engine, EngineError, Work, import_engine, run_agent, signals_kept
from unisono.launchers.runtime.table_part import TableFiles

__all__ = ["Ray", "is_dataset", "read_dataset", "split_dataset"]

_PROBE_S = 3.0
_PLACING_S = 20.0
_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Ray(Engine):
    """Ray actors, one a worker.

    Arguments:
        address: of a running Ray, "10.0.0.5:6379", or "auto" to find one on this host. Without it: the one that this
            program or RAY_ADDRESS names, or one started on this host and ended after the run.
        cpus, gpus: what a worker takes of the cluster's CPUs and GPUs.
        resources: further resources that a worker takes, by name.
        placement: "PACK" puts workers on few hosts, "SPREAD" on many; STRICT_ in front makes it a condition.
        max_restarts: how often all workers are started again after one has failed or was lost.
        wait_s: how long to wait for slots that others use, or that a cluster which grows will have.
        runtime_env: Ray's description of files and packages that the actors need.
    """

    name: ClassVar[str] = "Ray"

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] | None = None
    placement: str = "PACK"
    max_restarts: int = 0
    wait_s: float = 5.0
    runtime_env: Mapping[str, Any] | None = None
    tables: Sequence[Any] = field(default=(), init=False, repr=False, compare=False)

    @property
    def local(self) -> bool:
        return self._address == "local"

    @property
    def restarts(self) -> int:
        return self.max_restarts

    def environment(self) -> str:
        return "torchrun"  # the same variables

    def hosts_to_reach(self) -> Sequence[str]:
        host = (self._address or "").rpartition(":")[0]
        return [host] if host else []

    @property
    def _address(self) -> str | None:
        """What to connect to; None for the Ray that this program is connected to."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            return None
        return self.address or os.environ.get("RAY_ADDRESS") or "local"

    def check(self, workers: int) -> None:
        import_engine("ray", "Ray")
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus), *(self.resources or {}).items()):
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise ValueError(f"un.on.ray got {name}={value!r}; expected a number, 0 or more, for each worker")
        if self.placement not in _PLACEMENTS:
            raise ValueError(f"un.on.ray got placement={self.placement!r}; expected one of {', '.join(_PLACEMENTS)}")
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ValueError(f"un.on.ray got max_restarts={self.max_restarts!r}; expected a whole number from 0 up")
        if self.address not in (None, "auto", "local") and self._address is None:
            here = str(import_engine("ray", "Ray").get_runtime_context().gcs_address)
            if here.rpartition(":")[2] != self.address.rpartition(":")[2]:
                raise ValueError(
                    f"un.on.ray got address={self.address!r}, but this program is connected to Ray at {here}: "
                    "ray.shutdown() first, or leave the address out to use it"
                )

    def start(self, work: Work) -> _Actors:
        ready = [read_dataset(table, work.workers) for table in self.tables]  # before the workers take the slots
        ray, group, ours = self.open_group(work.workers)
        try:
            return _Actors(self, work, ray, group, ours, ready)
        except BaseException:
            self.close_group(ray, group, ours)
            raise

    def explain(self, words: str, workers: int) -> str:
        if "No module named 'unisono'" in words:
            return "Install unisono in the Python of the Ray workers, or name it in runtime_env={'pip': ['unisono']}"
        return ""

    def is_table(self, value: Any) -> bool:
        return is_dataset(value)

    def open_group(self, workers: int) -> tuple[Any, Any, bool]:
        """Ray, connected; a placement group with a slot for each worker; and whether Ray was started for this."""
        ray = import_engine("ray", "Ray")
        wait_s = 0.0 if self.local else self.wait_s  # our own Ray will not grow
        ours = self._connect(ray)
        try:
            return ray, self._reserve(ray, workers, wait_s), ours
        except BaseException:
            if ours:
                ray.shutdown()
            raise

    def close_group(self, ray: Any, group: Any, ours: bool) -> None:
        """Give back what `open_group` gave."""
        if group is not None:
            from ray.util import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(group)
        if ours:
            ray.shutdown()

    def actor_options(self, group: Any, rank: int) -> dict[str, Any]:
        """The options of the actor in slot `rank`."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0}
        options["resources"] = dict(self.resources or {})
        if self.runtime_env:
            options["runtime_env"] = dict(self.runtime_env)
        if group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, rank)
        return options

    # -- 1. connect --------------------------------------------------------------------------------------------------

    def _connect(self, ray: Any) -> bool:
        """Connect where this program is not connected; whether that was done, and must be undone."""
        address = self._address
        if address is None:
            return False
        if address.startswith("ray://"):
            raise EngineError(
                f"Ray at {address}: that is Ray Client, whose program is outside the cluster, where workers cannot "
                "reach it. Run the program on a host of the cluster (ray job submit), with address='auto'."
            )
        if address not in ("local", "auto"):
            _probe(address)
        options = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
        if address != "local":
            del options["include_dashboard"]
        try:
            with signals_kept():
                ray.init(address=address, **options)
        except Exception as error:
            where = "on this host (address='auto')" if address == "auto" else f"at {address}"
            hint = "start one with `ray start --head`, or leave the address out"
            if address != "auto":
                hint = "if its log says that a token is missing, set RAY_AUTH_MODE=token"
            raise EngineError(
                f"Ray is not reachable {where}: {_brief(error).rstrip('.')}. Expected a running Ray: {hint}."
            ) from error
        return True

    # -- 2. reserve --------------------------------------------------------------------------------------------------

    @property
    def _bundle(self) -> dict[str, float]:
        asked = {"CPU": self.cpus, "GPU": self.gpus, **(self.resources or {})}
        return {name: value for name, value in asked.items() if value}

    def _reserve(self, ray: Any, workers: int, wait_s: float) -> Any:
        """A placement group with a slot for every worker; None where a worker takes nothing."""
        bundle = self._bundle
        if not bundle:
            return None
        deadline = time.monotonic() + wait_s
        while short := self._short_of(ray.cluster_resources(), workers):
            if time.monotonic() >= deadline:
                raise EngineError(f"Ray has too few slots for {workers} workers: {short}. {self._advice()}")
            time.sleep(0.2)
        from ray.util import placement_group, remove_placement_group

        # Looked at before: afterwards what the group has taken counts as in use.
        busy = self._short_of(ray.available_resources(), workers) if wait_s else ""
        group = placement_group([bundle] * workers, strategy=self.placement)
        if not group.wait(max(wait_s, 0.5 if busy else _PLACING_S)):  # what is free is given within moments
            remove_placement_group(group)
            raise EngineError(
                f"Ray had no room for {workers} workers within {wait_s:g} s: "
                f"{busy or f'no placement {self.placement} fits'} (the rest is in use). "
                f"{self._advice()} Or wait longer: wait_s=600."
            )
        return group

    def _short_of(self, there: Mapping[str, float], workers: int) -> str:
        short = [
            f"{name}: {value * workers:g} needed ({value:g} a worker), {there.get(name, 0):g} there"
            for name, value in self._bundle.items()
            if there.get(name, 0) < value * workers - 1e-9
        ]
        return "; ".join(short)

    def _advice(self) -> str:
        return "Use fewer workers, give each less (cpus=0.5, --cpus 0.5), or a larger cluster."


class _Actors:
    """The actors of a run; see engine.Started. One thread waits for them, and starts them again where that is due."""

    def __init__(self, engine: Ray, work: Work, ray: Any, group: Any, ours: bool, tables: Sequence[Any]) -> None:
        self._engine, self._work, self._ray, self._group, self._ours = engine, work, ray, group, ours
        self._tables = tables
        self._left = engine.max_restarts
        self._words: list[str] = []
        self._status: int | None = None
        self._stopped = threading.Event()
        self._actors: list[Any] = []
        self._pending: dict[Any, int] = {}
        self._missing: AbstractSet[int] = frozenset()  # places without an agent, as the launcher sees it
        self._begin()
        self._thread = threading.Thread(target=self._wait, name="unisono-ray", daemon=True)
        self._thread.start()

    # -- 3. run ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        ray, engine, work = self._ray, self._engine, self._work
        kind = ray.remote(_Actor)
        self._actors = [
            kind.options(**engine.actor_options(self._group, rank)).remote() for rank in range(work.workers)
        ]
        parts = [split_dataset(table, number, self._actors) for number, table in enumerate(self._tables)]
        self._pending = {
            actor.run.remote(dict(work.env), rank, work.workers, [part[rank] for part in parts]): rank
            for rank, actor in enumerate(self._actors)
        }

    def _wait_elastic(self) -> None:
        """Until all actors are done; one that failed is made anew where its place is missed."""
        failed: set[int] = set()
        while (self._pending or failed) and not self._stopped.is_set():
            done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=0.5) if self._pending else ([], [])
            for ref in done:
                rank = self._pending.pop(ref)
                if not self._take(ref, rank):
                    failed.add(rank)
            for rank in sorted(failed & self._missing):
                failed.remove(rank)
                options = self._engine.actor_options(self._group, rank)
                self._actors[rank] = self._ray.remote(_Actor).options(**options).remote()
                run = self._actors[rank].run.remote(dict(self._work.env), rank, self._work.workers, [])
                self._pending[run] = rank
            if not self._pending:
                self._stopped.wait(0.5)
        self._status = 0

    def _wait(self) -> None:
        """Until all actors are done, and no restart is left or needed."""
        if self._work.elastic:
            self._wait_elastic()
            return
        ray = self._ray
        while not self._stopped.is_set():
            failed = False
            while self._pending and not self._stopped.is_set():
                done, _ = ray.wait(list(self._pending), num_returns=1, timeout=0.5)
                for ref in done:
                    failed |= not self._take(ref, self._pending.pop(ref))
            if not failed or not self._left or self._stopped.is_set():
                self._status = int(failed)
                return
            self._left -= 1
            self._kill()
            try:
                self._begin()
            except Exception as error:
                self._words.append(_brief(error))
                self._status = FAILED
                return

    def _take(self, ref: Any, rank: int) -> bool:
        """Whether the worker ended well."""
        try:
            status, words = self._ray.get(ref)
        except Exception as error:  # the actor or its host is gone, or it could not begin
            status, words = FAILED, _brief(error)
        if words:
            self._words.append(f"worker {rank}: {words}")
        return bool(status == 0)

    def _kill(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    # -- as the launcher sees it ---------------------------------------------------------------------------------------

    def poll(self) -> int | None:
        return self._status

    def revive(self, missing: AbstractSet[int]) -> None:
        """See Started: another actor, where Ray has room."""
        self._missing = frozenset(missing)

    def stop(self, signum: signal.Signals) -> None:
        self._stopped.set()
        self._kill()

    def words(self) -> str:
        return "\n".join(self._words[-8:])

    def sessions(self) -> Sequence[int]:
        """None of the actors' processes is ours."""
        return ()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(5)
        self._kill()
        self._engine.close_group(self._ray, self._group, self._ours)


class _Actor:
    """Runs in Ray's process."""

    def run(self, env: Mapping[str, str], rank: int, workers: int, tables: Sequence[Any]) -> tuple[int, str]:
        """One worker, from the beginning to its end."""
        parts = []
        for name, table in tables:
            part = TableFiles(name)
            for batch in table.iter_batches(batch_size=None, batch_format="numpy"):
                part.add(batch)
            parts.append(part)
        return run_agent(env, rank, workers, parts)


def read_dataset(table: Any, workers: int) -> Any:
    """The dataset with its blocks in the object store, a block a worker or more. It takes slots while it is read."""
    whole = table.materialize()
    return whole if whole.num_blocks() >= workers else whole.repartition(workers).materialize()


def split_dataset(table: Any, number: int, actors: Sequence[Any]) -> list[tuple[str, Any]]:
    """The dataset's blocks dealt to the actors, near ones first; nothing comes to this process."""
    whole = read_dataset(table, len(actors))
    return [(f"Ray Dataset {number}", part) for part in whole.split(len(actors), locality_hints=list(actors))]


def is_dataset(value: Any) -> bool:
    """Whether it is a Ray Dataset."""
    data = sys.modules.get("ray.data")
    return data is not None and isinstance(value, data.Dataset)


def _probe(address: str) -> None:
    """Try a plain connection first: Ray itself would go on trying for long."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise EngineError(f"Ray at {address!r}: expected host:port, as in 10.0.0.5:6379, or 'auto'")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except OSError as error:
        raise EngineError(
            f"Ray is not reachable at {address}: a connection was tried for up to {_PROBE_S:g} s ({error}). Expected "
            "the address that `ray start --head` printed, and that its port is open to this host."
        ) from error


def _brief(error: BaseException) -> str:
    """The words of Ray's error, without its long frames."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, BaseException) else error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:4])[:600] or type(error).__name__
