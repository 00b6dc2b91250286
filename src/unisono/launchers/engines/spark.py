"""Workers started by Spark: the tasks of one barrier stage, all at once or not at all; the launcher is the driver.

1. Session: the one given, the active one, or one made for the run and stopped after it.
2. Slots are counted first: Spark itself would look for too few of them for ten minutes.
3. Each task runs its worker's agent (agent.py). A DataFrame (by Arrow) or an RDD among a function's arguments is the
   stage's own input, so each task reads the partition that it was scheduled for; nothing passes through the driver.
4. After a failure, where restarts are left, the job is submitted again: Spark does not repeat a barrier result stage.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from unisono.launchers.engines.engine import FAILED, Engine, EngineError, Work, import_engine, run_agent, signals_kept
from unisono.launchers.runtime.table_part import TableFiles, arrow_columns

__all__ = ["Spark", "is_frame", "is_rdd"]

_PROBE_S = 3.0
_JAVA = (
    "Spark needs Java 17 or newer, found by PATH or JAVA_HOME (Debian and Ubuntu: apt-get install "
    "openjdk-17-jre-headless)"
)
# What a session made here is set to, unless `settings` say otherwise.
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "5",
}


@dataclass(frozen=True)
class Spark(Engine):
    """Tasks of a Spark barrier stage, one a worker.

    Arguments:
        session: a SparkSession, or the settings of the others hold: the active session, or one made for the run.
        master: where to make it: "spark://host:7077", "yarn", "local[4]". Without it SPARK_MASTER or what spark-submit
            says, else "local[N]" with one task a worker on this host.
        settings: of the session that is made, as in {"spark.executor.memory": "8g"}.
        max_restarts: how often all workers are started again after one has failed or was lost.
        wait_s: how long executors may take to come before there are too few slots.
    """

    name: ClassVar[str] = "Spark"

    session: Any = None
    master: str | None = None
    settings: Mapping[str, str] | None = None
    max_restarts: int = 0
    wait_s: float = 5.0
    tables: Sequence[Any] = field(default=(), init=False, repr=False, compare=False)

    @property
    def local(self) -> bool:
        session = self._find_session()
        master = session.sparkContext.master if session is not None else self._master(1)
        return master.startswith("local")

    @property
    def restarts(self) -> int:
        return self.max_restarts

    def environment(self) -> str:
        return "torchrun"  # the same variables

    def hosts_to_reach(self) -> Sequence[str]:
        session = self._find_session()
        master = session.sparkContext.master if session is not None else self._master(1)
        return [host for host, _ in _addresses(master)]

    def check(self, workers: int) -> None:
        import_engine("pyspark", "PySpark")
        master = self._master(workers)
        if not master.startswith(("local", "spark://", "k8s://")) and master != "yarn":
            raise ValueError(
                f"un.on.spark got master={master!r}; expected local[N], local-cluster[N,CORES,MB], spark://HOST:PORT, "
                "yarn or k8s://..."
            )
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ValueError(f"un.on.spark got max_restarts={self.max_restarts!r}; expected a whole number from 0 up")
        session = self._find_session()
        if session is None:
            return
        if self.session is None and self.master is not None and session.sparkContext.master != self.master:
            raise ValueError(
                f"un.on.spark got master={self.master!r}, but this program has a session at "
                f"{session.sparkContext.master!r}: stop it first, or leave master out to use it"
            )

    def start(self, work: Work) -> _Stage:
        session, ours = self.open_session(work.workers)
        try:
            return _Stage(self, work, session, ours)
        except BaseException:
            if ours:
                session.stop()
            raise

    def explain(self, words: str, workers: int) -> str:
        if "No module named 'unisono'" in words:
            return "Install unisono in the Python of the executors (PYSPARK_PYTHON names it)"
        return ""

    def is_table(self, value: Any) -> bool:
        return is_frame(value) or is_rdd(value)

    # -- 1. session --------------------------------------------------------------------------------------------------

    def open_session(self, workers: int) -> tuple[Any, bool]:
        """A session that can run so many tasks at once, and whether it was made for this and is to be stopped."""
        session, ours = self._find_session(), False
        if session is None:
            session, ours = self._make(workers), True
        try:
            self._count(session.sparkContext, workers)
        except BaseException:
            if ours:
                session.stop()
            raise
        return session, ours

    def _find_session(self) -> Any:
        """The session to use, None where one is to be made."""
        if self.session is not None:
            session = self.session
        else:
            sql = sys.modules.get("pyspark.sql")
            session = sql.SparkSession.getActiveSession() if sql is not None else None
        if session is not None and not hasattr(session, "_jsparkSession"):
            raise EngineError(
                "un.on.spark got a Spark Connect session, whose program is outside the cluster, where workers cannot "
                "reach it. Run the program as the driver: spark-submit, or SparkSession.builder.master(...)."
            )
        return session

    def _master(self, workers: int) -> str:
        configured = (self.settings or {}).get("spark.master")
        return self.master or configured or os.environ.get("SPARK_MASTER") or f"local[{workers}]"

    def _make(self, workers: int) -> Any:
        pyspark = import_engine("pyspark", "PySpark")
        from pyspark.sql import SparkSession

        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of the workers: Spark's own default is any python3
        submitted = pyspark.SparkConf().get("spark.master")  # by spark-submit, or conf/spark-defaults.conf
        master = self._master(workers) if self.master or not submitted else submitted
        for host, port in _addresses(master):
            _probe(master, host, port)
        builder = SparkSession.builder.master(master).appName("unisono")
        for name, value in {**_default_settings(master), **(self.settings or {})}.items():
            builder = builder.config(name, value)
        try:
            with signals_kept():
                return builder.getOrCreate()
        except Exception as error:
            text = _brief(error)
            if "JAVA_" in text:
                home = os.environ.get("JAVA_HOME")
                java = shutil.which(os.path.join(home, "bin", "java") if home else "java")
                reason = f"Java ({java}) ended at once; why, it says above" if java else _JAVA
                raise EngineError(f"Spark could not start: {reason}. It said: {text}") from error
            raise EngineError(f"Spark at {master} could not be reached or started: {text}") from error

    # -- 2. slots ----------------------------------------------------------------------------------------------------

    def _count(self, context: Any, workers: int) -> None:
        """Wait a little for executors to register, then say what is missing."""
        deadline = time.monotonic() + (0.0 if context.master.startswith("local[") else self.wait_s)
        while (slots := _slots(context)) < workers:
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"Spark at {context.master} has too few slots for {workers} workers: {slots} tasks can run at "
                    "once. Use fewer workers, or more executors or cores (spark.executor.instances, "
                    "spark.executor.cores; spark.task.cpus is what a worker takes). Executors were waited for "
                    f"{self.wait_s:g} s (wait_s)."
                )
            time.sleep(0.1)


def _slots(context: Any) -> int:
    """Tasks that can run at the same time on the executors that are there."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


class _Stage:
    """The barrier stage of a run; see engine.Started. One thread waits for it, and submits it again where due."""

    def __init__(self, engine: Spark, work: Work, session: Any, ours: bool) -> None:
        self._engine, self._work, self._session, self._ours = engine, work, session, ours
        self._context = session.sparkContext
        self._left = engine.max_restarts
        self._group = f"unisono-{secrets.token_hex(8)}"
        self._words: list[str] = []
        self._status: int | None = None
        self._stopped = threading.Event()
        self._job = self._prepare()
        self._thread = threading.Thread(target=self._run, name="unisono-spark", daemon=True)
        self._thread.start()

    # -- 3. run ------------------------------------------------------------------------------------------------------

    def _prepare(self) -> Callable[[], list[Any]]:
        """The job: what it is called for, [(rank, status, words), ...]."""
        workers, tables = self._work.workers, self._engine.tables
        env = dict(self._work.env)
        names = [f"Spark {'DataFrame' if is_frame(table) else 'RDD'} {i}" for i, table in enumerate(tables)]
        if len(tables) == 1 and is_frame(tables[0]):
            frame = tables[0] if tables[0].rdd.getNumPartitions() == workers else tables[0].repartition(workers)
            task = partial(_arrow_task, env, workers, names[0])
            return frame.mapInArrow(task, "rank int, status int, words string", barrier=True).collect  # type: ignore[no-any-return]
        if not tables:
            stage = self._context.parallelize(range(workers), workers)
            task = partial(_task, env, workers, [], _read_all)
        elif len(tables) == 1:
            stage = tables[0] if tables[0].getNumPartitions() == workers else tables[0].repartition(workers)
            task = partial(_task, env, workers, names, lambda parts, rows: parts[0].add_samples(rows))
        else:
            pieces = [_pieces(table, number, workers) for number, table in enumerate(tables)]
            stage = self._context.union(pieces).partitionBy(workers, int)
            task = partial(_task, env, workers, names, _add_pieces)
        return stage.barrier().mapPartitions(task).collect  # type: ignore[no-any-return]

    def _run(self) -> None:
        while not self._stopped.is_set():
            failed = True
            try:
                self._context.setJobGroup(self._group, "unisono workers", True)
                ended = self._job()
                failed = any(status for _, status, _ in ended)
                self._words += [f"worker {rank}: {words}" for rank, _, words in ended if words]
            except Exception as error:
                self._words.append(_brief(error))
            if not failed or not self._left or self._stopped.is_set():
                self._status = int(failed)
                return
            self._left -= 1
        self._status = FAILED

    # -- as the launcher sees it ---------------------------------------------------------------------------------------

    def poll(self) -> int | None:
        return self._status

    def revive(self, missing: AbstractSet[int]) -> None:
        """See Started: the tasks of a stage are started together, or not at all."""

    def stop(self, signum: signal.Signals) -> None:
        self._stopped.set()
        with contextlib.suppress(Exception):
            self._context.cancelJobGroup(self._group)

    def words(self) -> str:
        return "\n".join(self._words[-8:])

    def sessions(self) -> Sequence[int]:
        """None of the executors' processes is ours."""
        return ()

    def close(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self.stop(signal.SIGTERM)
            self._thread.join(5)
        if self._ours:
            self._session.stop()


# -- in the executors' Python ------------------------------------------------------------------------------------------


def _task(
    env: Mapping[str, str],
    workers: int,
    names: Sequence[str],
    fill: Callable[[list[TableFiles], Iterable[Any]], None],
    rows: Iterable[Any],
) -> Iterator[tuple[int, int, str]]:
    from pyspark import BarrierTaskContext

    parts = [TableFiles(name) for name in names]
    fill(parts, rows)
    rank = BarrierTaskContext.get().partitionId()
    yield (rank, *run_agent(env, rank, workers, parts))


def _read_all(parts: list[TableFiles], rows: Iterable[Any]) -> None:
    """The rows are only there to have partitions; Spark throws a process away that has not read them."""
    for _ in rows:
        pass


def _add_pieces(parts: list[TableFiles], rows: Iterable[Any]) -> None:
    """Pieces of several tables, as `_pieces` made them."""
    for _, (number, piece) in rows:
        if isinstance(piece, bytes):
            _add_arrow(parts[number], piece)
        else:
            parts[number].add_samples(piece)


def _add_arrow(part: TableFiles, piece: bytes) -> None:
    import pyarrow as pa

    with pa.ipc.open_stream(piece) as stream:
        for batch in stream:
            part.add(arrow_columns(part.name, batch))


def _arrow_task(env: Mapping[str, str], workers: int, name: str, batches: Iterable[Any]) -> Iterator[Any]:
    """`_task` for the rows of one DataFrame, which come as Arrow batches."""
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    part = TableFiles(name)
    for batch in batches:
        part.add(arrow_columns(name, batch))
    rank = BarrierTaskContext.get().partitionId()
    status, words = run_agent(env, rank, workers, [part])
    columns = [pa.array([rank], pa.int32()), pa.array([status], pa.int32()), pa.array([words], pa.string())]
    yield pa.RecordBatch.from_arrays(columns, names=["rank", "status", "words"])


def _pieces(table: Any, number: int, workers: int) -> Any:
    """An RDD of (rank, (number, piece)): the table dealt to the ranks, to be joined with other tables."""
    if is_frame(table):
        frame = table.repartition(workers)
        packed = frame.mapInArrow(_pack_arrow, "rank int, piece binary").rdd
        return packed.map(lambda row: (row[0], (number, bytes(row[1]))))
    return table.repartition(workers).mapPartitionsWithIndex(partial(_pack_samples, number))


def _pack_arrow(batches: Iterable[Any]) -> Iterator[Any]:
    import pyarrow as pa
    from pyspark import TaskContext

    context = TaskContext.get()
    rank = context.partitionId() if context is not None else 0
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        piece = pa.array([sink.getvalue().to_pybytes()], pa.binary())
        yield pa.RecordBatch.from_arrays([pa.array([rank], pa.int32()), piece], names=["rank", "piece"])


def _pack_samples(number: int, rank: int, samples: Iterable[Any]) -> Iterator[Any]:
    yield (rank, (number, list(samples)))


# -- small things ------------------------------------------------------------------------------------------------------


def is_frame(value: Any) -> bool:
    """Whether it is a Spark DataFrame."""
    sql = sys.modules.get("pyspark.sql")
    return sql is not None and isinstance(value, sql.DataFrame)


def is_rdd(value: Any) -> bool:
    """Whether it is a Spark RDD."""
    pyspark = sys.modules.get("pyspark")
    return pyspark is not None and isinstance(value, pyspark.RDD)


def _default_settings(master: str) -> dict[str, str]:
    """Of a session at that master; all in one process listens to no other host.

    >>> _default_settings("local[2]")["spark.driver.bindAddress"]
    '127.0.0.1'
    """
    alone = master == "local" or master.startswith("local[")
    names = ("spark.driver.host", "spark.driver.bindAddress") if alone else ()
    return {**_SETTINGS, **dict.fromkeys(names, "127.0.0.1")}


def _addresses(master: str) -> list[tuple[str, int]]:
    """The hosts of a standalone master, "spark://a:7077,b:7077"."""
    if not master.startswith("spark://"):
        return []
    found = [text.rpartition(":") for text in master.removeprefix("spark://").split(",")]
    return [(host or port, int(port) if host and port.isdigit() else 7077) for host, _, port in found]


def _probe(master: str, host: str, port: int) -> None:
    """Try a plain connection first: Spark itself would go on trying for a minute."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except OSError as error:
        raise EngineError(
            f"Spark is not reachable at {master}: a connection to {host}:{port} was tried for up to {_PROBE_S:g} s "
            f"({error}). Expected a running master, as `start-master.sh` starts it, whose port is open to this host."
        ) from error


def _brief(error: BaseException) -> str:
    """The words of Spark's error, without the Java frames."""
    text = str(error).split("Driver stacktrace")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(("at ", "..."))]
    python = [line for line in lines if "Error:" in line and not line.startswith(("py4j", "org.apache"))]
    return " ".join(python[-1:] or lines[-3:])[:600] or type(error).__name__
