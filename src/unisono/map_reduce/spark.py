"""MapReduce on Spark itself: the state broadcast, the parts mapped, the values reduced up Spark's tree.

1. Load: each partition becomes a block in the Python process of an executor, prepared, and stays there. What Spark
   keeps is a marker of a few bytes, whose place says which executor has the block.
2. A round is one job over the markers: find the block, map it with the state, aggregate.
3. Where a process has lost its block (an executor died, or another of its processes was chosen), the part is read again
   from where it came from, mapped in the same task, and kept there.

An RDD of the blocks themselves would send them to Python in every round: three to four times as slow.
"""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from unisono.data.tables import Part
from unisono.launchers.engines.pickled import Packed
from unisono.launchers.engines.spark import is_frame, is_rdd
from unisono.launchers.table_files import arrow_columns
from unisono.map_reduce.combining import Found, answered, in_order, merged, opened
from unisono.map_reduce.parcel import split
from unisono.map_reduce.rounds import Job, Round

__all__ = ["run"]

_IN_CLOSURE_BYTES = 1 << 16  # a smaller state travels with the task
_TURNS = 4  # so often the same part is loaded in one round
_blocks: dict[tuple[str, int], Any] = {}  # of this Python process of an executor


def run(job: Job, data: Any, workers: int | None, on: Any) -> Any:
    """Run the job on the Spark that `on` names; `workers` is the number of parts (default: a DataFrame's own, or the
    tasks that can run at once)."""
    on.check(workers or 1)
    session, ours = on.open_session(workers or 1)
    try:
        parts = workers or (_partitions(data) if is_frame(data) or is_rdd(data) else _slots(session))
        link = _Link(job, data, session.sparkContext, parts)
        try:
            return job.drive(link)
        finally:
            link.close()
    finally:
        if ours:
            session.stop()


class _Link:
    """The server's connection to the blocks; see rounds.Ask."""

    def __init__(self, job: Job, data: Any, context: Any, parts: int) -> None:
        self.workers, self.log = parts, list[Round]()
        self._job, self._context = job, context
        self._run = secrets.token_hex(8)
        self._program = Packed((job.map, job.reduce, job.prepare))
        self._source: Any = None  # an RDD with one partition a part,
        self._sent: list[Any] = []  # or a broadcast for each: a task fetches its own only, whenever it must
        if is_frame(data) or is_rdd(data):
            self._source = data if _partitions(data) == parts else data.repartition(parts)
            if is_frame(data):
                self._source = self._source.mapInArrow(_as_bytes, "piece binary").rdd.map(_first)
        else:
            self._sent = [context.broadcast(split(data, part, parts)) for part in range(parts)]
        self._markers = self._over(list(range(parts)), partial(_load, self._run, self._program)).persist()
        problem = [text for text in self._markers.collect() if text]
        if problem:
            self.close()
            raise ValueError(problem[0])

    def __call__(self, state: Any, *, reduce: Literal["sum"] | None = None) -> Any:
        start = time.perf_counter()
        how = reduce or self._job.reduce
        small = _size(state) <= _IN_CLOSURE_BYTES
        sent = state if small else self._context.broadcast(state)
        step = partial(_step, self._run, self._program, small, sent)
        combine = partial(_combine, self._program, how == "sum")
        found = self._markers.mapPartitionsWithIndex(step).treeAggregate(Found(), combine, combine)
        if found.missing and not found.errors:
            again = self._over(found.missing, partial(_load_and_step, *step.args))
            rest = again.collect()
            self._spread({part for each in rest for part in each.missing})
            found = in_order([found, *rest], how)
        if not small:
            sent.destroy()
        value = opened(found, self.workers)
        seconds = [found.seconds[part] for part in range(self.workers)]
        self.log.append(Round(time.perf_counter() - start, seconds))
        return value

    def _spread(self, parts: set[int]) -> None:
        """Load parts also in the process that lacked them: an executor's processes take turns, and the job that was to
        load them there came to another that had them."""
        for _ in range(_TURNS):
            if parts:
                loading = self._over(sorted(parts), partial(_load_where_missing, self._run, self._program))
                parts = parts - set(loading.collect())

    def close(self) -> None:
        """Let go of the blocks, and of what they came from."""
        self._markers.mapPartitions(partial(_forget, self._run)).collect()
        self._markers.unpersist()
        for sent in self._sent:
            sent.destroy()

    def _over(self, parts: Sequence[int], work: Callable[[int, Iterable[Any]], Iterator[Any]]) -> Any:
        """An RDD of `work(part, its elements)`, in the Python process that reads the part."""
        if self._source is not None:
            return self._source.mapPartitionsWithIndex(partial(_only, frozenset(parts), work))
        each = [
            self._context.parallelize([0], 1).mapPartitions(partial(_on_part, part, self._sent[part], work))
            for part in parts
        ]
        return self._context.union(each)


# -- in the executors' Python ------------------------------------------------------------------------------------------


def _load(run_id: str, program: Packed, part: int, elements: Iterable[Any]) -> Iterator[str]:
    """Make the block and keep it; what is left for Spark to keep is a word on what went wrong, or none."""
    try:
        _keep(run_id, program, part, elements)
        yield ""
    except ValueError as error:
        yield str(error) or type(error).__name__


def _step(run_id: str, program: Packed, small: bool, sent: Any, part: int, markers: Iterable[Any]) -> Iterator[Found]:
    if (run_id, part) not in _blocks:
        found = Found(missing=[part])
    else:
        found = answered(part, program.open()[0], _blocks[run_id, part], sent if small else sent.value)
    _read(markers)  # after the work: over TCP they come some 40 ms behind the task (a delayed acknowledgement)
    yield found


def _load_and_step(
    run_id: str, program: Packed, small: bool, sent: Any, part: int, elements: Iterable[Any]
) -> Iterator[Found]:
    """One part's answer; it is noted as missing where this process had it, and another did not."""
    had = (run_id, part) in _blocks
    if had:
        _read(elements)
    else:
        _keep(run_id, program, part, elements)
    for found in _step(run_id, program, small, sent, part, ()):
        yield replace(found, missing=[part] if had else [])


def _load_where_missing(run_id: str, program: Packed, part: int, elements: Iterable[Any]) -> Iterator[int]:
    if (run_id, part) in _blocks:
        _read(elements)
    else:
        _keep(run_id, program, part, elements)
        yield part


def _only(parts: frozenset[int], work: Any, part: int, elements: Iterable[Any]) -> Iterator[Any]:
    if part in parts:
        yield from work(part, elements)
    else:
        _read(elements)


def _on_part(part: int, sent: Any, work: Any, placeholder: Iterable[Any]) -> Iterator[Any]:
    _read(placeholder)
    yield from work(part, [_Whole(sent.value)])


def _read(elements: Iterable[Any]) -> None:
    """Take all of a task's input: a Python process that has not is thrown away by Spark, and its blocks with it."""
    for _ in elements:
        pass


def _keep(run_id: str, program: Packed, part: int, elements: Iterable[Any]) -> None:
    rows = list(elements)
    if len(rows) == 1 and isinstance(rows[0], _Whole):
        data = rows[0].data
    elif rows and all(isinstance(row, _Piece) for row in rows):
        data = _table(part, rows)
    else:
        data = rows
    prepare = program.open()[2]
    _blocks[run_id, part] = data if prepare is None else prepare(data)
    # PySpark's process collects garbage after every task, and the next one waits for it: 0.1 s and more to look through
    # the objects of the imported modules and of the block. They stay: it need not look at them again.
    gc.collect()
    gc.freeze()


def _forget(run_id: str, markers: Iterable[Any]) -> Iterator[int]:
    _read(markers)
    for key in [key for key in _blocks if key[0] == run_id]:
        del _blocks[key]
    if not _blocks:
        gc.unfreeze()
    yield 0


def _combine(program: Packed, plain_sum: bool, a: Found, b: Found) -> Found:
    return merged(a, b, "sum" if plain_sum else program.open()[1])


class _Whole:
    """A part that the driver split off."""

    def __init__(self, data: Any) -> None:
        self.data = data


class _Piece(bytes):
    """An Arrow stream of some rows of a DataFrame."""


def _first(row: Any) -> _Piece:
    return _Piece(row[0])


def _as_bytes(batches: Iterable[Any]) -> Iterator[Any]:
    import pyarrow as pa

    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["piece"])


def _table(part: int, rows: list[Any]) -> Part:
    import pyarrow as pa

    name = f"partition {part} of the DataFrame"
    columns: dict[str, list[Any]] = {}
    for piece in rows:
        with pa.ipc.open_stream(piece) as stream:
            for batch in stream:
                for column, values in arrow_columns(name, batch).items():
                    columns.setdefault(column, []).append(values)
    whole = {
        column: np.concatenate(values)
        if isinstance(values[0], np.ndarray)
        else [item for some in values for item in some]
        for column, values in columns.items()
    }
    return Part.from_columns(whole, name=name)


# -- small things ------------------------------------------------------------------------------------------------------


def _partitions(data: Any) -> int:
    return int(data.rdd.getNumPartitions() if is_frame(data) else data.getNumPartitions())


def _slots(session: Any) -> int:
    return int(session.sparkContext.defaultParallelism)


def _size(state: Any) -> int:
    """About how many bytes it has."""
    if isinstance(state, dict):
        return sum(_size(value) for value in state.values())
    if isinstance(state, tuple | list):
        return sum(_size(value) for value in state)
    return int(getattr(state, "nbytes", 64))
