"""A run on an engine whose workers stay: at the first failure all are stopped, or all are started again.

When the agents of all workers are there, they are told to start them, with a name for this attempt that no other
attempt has.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from unisono.launchers.engine_run import EngineRun
from unisono.launchers.engines.engine import Engine
from unisono.launchers.failures import Failure, first_failure
from unisono.launchers.job import Job, TimedOut
from unisono.launchers.supervisor import after_failure

__all__ = ["RemoteRun", "open_remote_run"]

_TICK_S = 0.1


class RemoteRun(EngineRun):
    """One run of one job on one engine, in one attempt or several."""

    def _watch(self) -> None:
        """Return when all workers have ended, or one has failed for good."""
        while not self.workers or self.running:
            now = time.monotonic()
            failures = self.failures
            if failures and now >= self.find_settling(failures):
                if self._attempt >= self.engine.restarts or self._engine_ended is not None:
                    return
                self._restart(failures)
            if not self.workers and len(self.waiting) == self.job.places:
                self._begin_attempt()
            self._pass_word_on()
            self._check_start(now)
            if self.deadline is not None and now >= self.deadline:
                raise TimedOut(self.describe_activities())
            self._check_engine(now)
            self._pump(_TICK_S)

    def _begin_attempt(self) -> None:
        """All agents are there: tell each its worker's rank on its host, and to start the worker."""
        self.workers = [self.waiting[rank] for rank in range(self.job.workers)]
        self.waiting = {}
        hosts = list(dict.fromkeys(worker.identity for worker in self.workers))
        pages = {worker.page for worker in self.workers} if len(hosts) == 1 else set()
        on_page = pages == {self._meeting_page.number} and len({worker.host for worker in self.workers}) == 1
        store_port = self._fresh_store().address[1]
        attempt = {"attempt": self._attempt, "attempt_id": secrets.token_hex(8)}
        for worker in self.workers:
            near = [other.rank for other in self.workers if other.identity == worker.identity]
            self.start_worker(
                worker,
                local_rank=near.index(worker.rank),
                local_size=len(near),
                host_number=hosts.index(worker.identity),
                hosts=len(hosts),
                store_port=store_port,
                page=on_page,
                **attempt,
            )

    def _restart(self, failures: Sequence[Failure]) -> None:
        """Have the agents end; the engine sees it and starts all workers again."""
        first = first_failure(failures)
        message = " ".join(first.message.split()) if first.kind == "exception" else ""
        self._attempt += 1
        self._meeting_page.renew()
        self.output.say(
            f"unisono: worker {first.rank} failed: {first.headline}{': ' if message else ''}{message[:200]}; "
            f"all workers start again (restart {self._attempt} of {self.engine.restarts})"
        )
        self._send_stop(after_failure)
        for channel in self._hosts:  # one whose workers have all ended well would not know
            self.server.send(channel, kind="again", attempt=self._attempt)
        self.workers = []
        self._since = time.monotonic()

    def _take_results(self) -> list[bytes]:
        return [b"".join(worker.result) for worker in self.workers]


def open_remote_run(job: Job, engine: Engine, payload: bytes | None = None) -> EngineRun:
    """The run of a job on an engine."""
    if job.elastic is None:
        return RemoteRun(job, engine, payload)
    from unisono.launchers.elastic_hosts import ElasticHostsRun

    return ElasticHostsRun(job, engine, payload)
