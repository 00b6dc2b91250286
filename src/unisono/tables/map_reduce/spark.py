"""MapReduce on Spark itself: the state broadcast, the parts mapped, the values reduced up Spark's tree.

1. Load: each partition becomes a block in the Python process of an executor, prepared, and stays there. What Spark
   keeps is a marker of a few bytes, whose place says which executor has the block.
2. A round is one job over the markers: find the block, map it with the state, aggregate.
3. If a process does not have the block (an executor died, or Spark chose another of its processes), the part is read
   again from its source, mapped in the same task, and kept there.

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

from unisono.launchers.engines.engine import Packed
from unisono.launchers.engines.spark import is_frame, is_rdd
from unisono.launchers.runtime.table_part import arrow_columns
from unisono.tables.map_reduce.answers import Answers, answer_part, end_round, merge_all, merge_answers
from unisono.tables.map_reduce.map_reduce import MapReduce, Round
from unisono.tables.map_reduce.worker_data import join_batches, split

_IN_CLOSURE_BYTES = 1 << 16  # a state of up to so many bytes travels with the task, a larger one as a broadcast
_TURNS = 4  # how often a round tries to load a part in the process that lacked it
_prepared: dict[tuple[str, int], Any] = {}  # the blocks that this executor's process holds, by run and part


def run(program: MapReduce, data: Any, workers: int | None, on: Any) -> Any:
    """Run the program on the Spark that `on` names; `workers` is the number of parts (default: a DataFrame's own, or
    the tasks that can run at once)."""
    on.check(workers or 1)
    session, ours = on.open_session(workers or 1)
    try:
        parts = workers or (
            _count_partitions(data) if is_frame(data) or is_rdd(data) else session.sparkContext.defaultParallelism
        )
        rounds = _SparkRounds(program, data, session.sparkContext, parts)
        try:
            return program.drive(rounds)
        finally:
            rounds.close()
    finally:
        if ours:
            session.stop()


class _SparkRounds:
    """Runs rounds as Spark jobs; an `Ask` (see rounds.py)."""

    def __init__(self, program: MapReduce, data: Any, context: Any, parts: int) -> None:
        self.workers, self.log = parts, list[Round]()
        self._program, self._context = program, context
        self._run = secrets.token_hex(8)
        self._packed = Packed((program.map, program.reduce, program.prepare))
        self._source: Any = None  # an RDD with one partition a part,
        self._sent: list[Any] = []  # or a broadcast for each: a task fetches its own only, whenever it must
        if is_frame(data) or is_rdd(data):
            self._source = data if _count_partitions(data) == parts else data.repartition(parts)
            if is_frame(data):
                self._source = self._source.mapInArrow(_encode_batches, "piece binary").rdd.map(_wrap_piece)
        else:
            self._sent = [context.broadcast(split(data, part, parts)) for part in range(parts)]
        self._markers = self._make_rdd(list(range(parts)), partial(_load, self._run, self._packed)).persist()
        problem = [text for text in self._markers.collect() if text]
        if problem:
            self.close()
            raise ValueError(problem[0])

    def __call__(self, state: Any, *, reduce: Literal["sum"] | None = None) -> Any:
        start = time.perf_counter()
        how = reduce or self._program.reduce
        small = _estimate_bytes(state) <= _IN_CLOSURE_BYTES
        sent = state if small else self._context.broadcast(state)
        step = partial(_step, self._run, self._packed, small, sent)
        combine = partial(_combine, self._packed, how == "sum")
        found = self._markers.mapPartitionsWithIndex(step).treeAggregate(Answers(), combine, combine)
        if found.missing and not found.errors:
            again = self._make_rdd(found.missing, partial(_load_and_step, *step.args))
            rest = again.collect()
            self._load_where_lacking({part for each in rest for part in each.missing})
            found = merge_all([found, *rest], how)
        if not small:
            sent.destroy()
        return end_round(found, self, start)

    def _load_where_lacking(self, parts: set[int]) -> None:
        """Load parts in the processes that lacked them.

        An executor's processes take turns: the job that was to load a part there may have run in one that had it.
        """
        for _ in range(_TURNS):
            if parts:
                loading = self._make_rdd(sorted(parts), partial(_load_where_missing, self._run, self._packed))
                parts = parts - set(loading.collect())

    def close(self) -> None:
        """Drop the blocks, and what they came from."""
        self._markers.mapPartitions(partial(_forget, self._run)).collect()
        self._markers.unpersist()
        for sent in self._sent:
            sent.destroy()

    def _make_rdd(self, parts: Sequence[int], work: Callable[[int, Iterable[Any]], Iterator[Any]]) -> Any:
        """An RDD of `work(part, its elements)`, in the Python process that reads the part."""
        if self._source is not None:
            return self._source.mapPartitionsWithIndex(partial(_filter_parts, frozenset(parts), work))
        each = [
            self._context.parallelize([0], 1).mapPartitions(partial(_run_on_part, part, self._sent[part], work))
            for part in parts
        ]
        return self._context.union(each)


# -- in the executors' Python ------------------------------------------------------------------------------------------


def _load(run_id: str, packed: Packed, part: int, elements: Iterable[Any]) -> Iterator[str]:
    """Prepare the block and keep it in this process; Spark keeps the text of a ValueError, or an empty text."""
    try:
        _keep(run_id, packed, part, elements)
        yield ""
    except ValueError as error:
        yield str(error) or type(error).__name__


def _step(run_id: str, packed: Packed, small: bool, sent: Any, part: int, markers: Iterable[Any]) -> Iterator[Answers]:
    if (run_id, part) not in _prepared:
        found = Answers(missing=[part])
    else:
        found = answer_part(part, packed.open()[0], _prepared[run_id, part], sent if small else sent.value)
    _drain(markers)  # after the work: over TCP they come some 40 ms behind the task (a delayed acknowledgement)
    yield found


def _load_and_step(
    run_id: str, packed: Packed, small: bool, sent: Any, part: int, elements: Iterable[Any]
) -> Iterator[Answers]:
    """One part's answer. It lists the part as missing if this process had it: then another process still lacks it."""
    had = (run_id, part) in _prepared
    if had:
        _drain(elements)
    else:
        _keep(run_id, packed, part, elements)
    for found in _step(run_id, packed, small, sent, part, ()):
        yield replace(found, missing=[part] if had else [])


def _load_where_missing(run_id: str, packed: Packed, part: int, elements: Iterable[Any]) -> Iterator[int]:
    if (run_id, part) in _prepared:
        _drain(elements)
    else:
        _keep(run_id, packed, part, elements)
        yield part


def _filter_parts(parts: frozenset[int], work: Any, part: int, elements: Iterable[Any]) -> Iterator[Any]:
    if part in parts:
        yield from work(part, elements)
    else:
        _drain(elements)


def _run_on_part(part: int, sent: Any, work: Any, placeholder: Iterable[Any]) -> Iterator[Any]:
    _drain(placeholder)
    yield from work(part, [_WholePart(sent.value)])


def _drain(elements: Iterable[Any]) -> None:
    """Read all of a task's input: Spark throws away a Python process that has not, and its blocks with it."""
    for _ in elements:
        pass


def _keep(run_id: str, packed: Packed, part: int, elements: Iterable[Any]) -> None:
    rows = list(elements)
    if len(rows) == 1 and isinstance(rows[0], _WholePart):
        data = rows[0].data
    elif rows and all(isinstance(row, _ArrowPiece) for row in rows):
        name = f"partition {part} of the DataFrame"
        data = join_batches(name, _read_pieces(name, rows))
    else:
        data = rows
    prepare = packed.open()[2]
    _prepared[run_id, part] = data if prepare is None else prepare(data)
    # PySpark's process collects garbage after every task, and the next one waits for it: 0.1 s and more to look through
    # the objects of the imported modules and of the block. They stay: it need not look at them again.
    gc.collect()
    gc.freeze()


def _forget(run_id: str, markers: Iterable[Any]) -> Iterator[int]:
    _drain(markers)
    for key in [key for key in _prepared if key[0] == run_id]:
        del _prepared[key]
    if not _prepared:
        gc.unfreeze()
    yield 0


def _combine(packed: Packed, plain_sum: bool, a: Answers, b: Answers) -> Answers:
    return merge_answers(a, b, "sum" if plain_sum else packed.open()[1])


class _WholePart:
    """Marks data that is a whole part, split off by the driver."""

    def __init__(self, data: Any) -> None:
        self.data = data


class _ArrowPiece(bytes):
    """Some rows of a DataFrame, as an Arrow stream."""


def _wrap_piece(row: Any) -> _ArrowPiece:
    return _ArrowPiece(row[0])


def _encode_batches(batches: Iterable[Any]) -> Iterator[Any]:
    import pyarrow as pa

    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["piece"])


def _read_pieces(name: str, pieces: Iterable[_ArrowPiece]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    for piece in pieces:
        with pa.ipc.open_stream(piece) as stream:
            for batch in stream:
                yield arrow_columns(name, batch)


# -- small things ------------------------------------------------------------------------------------------------------


def _count_partitions(data: Any) -> int:
    return int(data.rdd.getNumPartitions() if is_frame(data) else data.getNumPartitions())


def _estimate_bytes(state: Any) -> int:
    """About how many bytes it has."""
    if isinstance(state, dict | tuple | list):
        return sum(_estimate_bytes(value) for value in (state.values() if isinstance(state, dict) else state))
    return int(getattr(state, "nbytes", 64))
