"""MapReduce on Ray: an actor for each part keeps its data between rounds.

The state is put into the object store once a round. Actors combine values in pairs, so that the driver gets few. An
actor that dies is started again with its part, and the round goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal

from unisono.launchers.engines.engine import Packed
from unisono.launchers.engines.ray import is_dataset, read_dataset, split_dataset
from unisono.tables.map_reduce.answers import Answers, answer_part, end_round, merge_all, merge_answers
from unisono.tables.map_reduce.map_reduce import MapReduce, Round
from unisono.tables.map_reduce.worker_data import join_batches, split

_DRIVER_COMBINES = 8  # up to so many values are combined by the driver, without the actors
_MOST_LOSSES = 3  # how often the actor of a part may die in one round


def run(program: MapReduce, data: Any, workers: int | None, on: Any) -> Any:
    """Run the program on the Ray that `on` names, with `workers` parts (default: 2)."""
    parts = workers or 2
    on.check(parts)
    if is_dataset(data):
        data = read_dataset(data, parts)  # before the actors take the slots
    ray, group, ours = on.open_group(parts)
    try:
        rounds = _RayRounds(program, data, ray, parts, lambda part: on.actor_options(group, part))
        try:
            return program.drive(rounds)
        finally:
            rounds.close()
    finally:
        on.close_group(ray, group, ours)


class _RayRounds:
    """Runs rounds on the actors; an `Ask` (see rounds.py)."""

    def __init__(
        self, program: MapReduce, data: Any, ray: Any, parts: int, options: Callable[[int], dict[str, Any]]
    ) -> None:
        self.workers, self.log = parts, list[Round]()
        self._program, self._ray, self._options = program, ray, options
        self._packed = ray.put(Packed((program.map, program.reduce, program.prepare)))
        self._kind = ray.remote(_PartActor)
        self._actors = [self._kind.options(**options(part)).remote() for part in range(parts)]
        if is_dataset(data):
            self._parts: list[Any] = [table for _, table in split_dataset(data, 0, self._actors)]
        else:
            self._parts = [ray.put(split(data, part, parts)) for part in range(parts)]
        problem = [text for text in ray.get([self._load(part) for part in range(parts)]) if text]
        if problem:
            self.close()
            raise ValueError(problem[0])

    def __call__(self, state: Any, *, reduce: Literal["sum"] | None = None) -> Any:
        start = time.perf_counter()
        how = reduce or self._program.reduce
        sent = self._ray.put(state)
        refs = [actor.step.remote(sent) for actor in self._actors]
        try:
            found = self._reduce(refs, how)
        except self._ray.exceptions.RayError:
            found = self._retry_lost(refs, sent, how)
        return end_round(found, self, start)

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    def _load(self, part: int) -> Any:
        return self._actors[part].load.remote(part, self._packed, self._parts[part])

    def _reduce(self, refs: list[Any], how: Any) -> Answers:
        while len(refs) > _DRIVER_COMBINES:  # in pairs, by the actors
            pairs = [refs[i : i + 2] for i in range(0, len(refs), 2)]
            refs = [self._actors[i].combine.remote(how == "sum", *pair) for i, pair in enumerate(pairs)]
        return merge_all(self._ray.get(refs), how)

    def _retry_lost(self, refs: list[Any], sent: Any, how: Any) -> Answers:
        """The answers of all parts. A part whose actor has died gets a new actor, which runs the round again."""
        ray = self._ray
        founds = []
        for part, ref in enumerate(refs):
            for attempt in range(_MOST_LOSSES + 1):
                try:
                    founds.append(ray.get(ref))
                    break
                except ray.exceptions.RayActorError:
                    if attempt == _MOST_LOSSES:
                        raise
                    self._actors[part] = self._kind.options(**self._options(part)).remote()
                    ray.get(self._load(part))
                    ref = self._actors[part].step.remote(sent)
        return merge_all(founds, how)


class _PartActor:
    """The Ray actor that holds one part."""

    def load(self, part: int, packed: Packed, data: Any) -> str:
        """Prepare this part and keep it. Returns the text of a ValueError, or an empty text."""
        self.part = part
        self.map, self.reduce, prepare = packed.open()
        try:
            block = data
            if hasattr(data, "iter_batches") and type(data).__module__.startswith("ray."):  # a part of a Dataset
                batches = data.iter_batches(batch_size=None, batch_format="numpy")
                block = join_batches(f"part {part} of the Ray Dataset", batches)
            self.block = block if prepare is None else prepare(block)
        except ValueError as error:
            return str(error) or type(error).__name__
        return ""

    def step(self, state: Any) -> Answers:
        """One round's answer."""
        return answer_part(self.part, self.map, self.block, state)

    def combine(self, plain_sum: bool, a: Answers, b: Answers | None = None) -> Answers:
        """Merge two answers."""
        return a if b is None else merge_answers(a, b, "sum" if plain_sum else self.reduce)
