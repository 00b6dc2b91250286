"""What `un.shard` can read: arrays, datasets, streams, DataLoaders, lists of files; all as one `SampleSource`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono import rng
from unisono.training.data.arrays import Arrays, is_arrays, is_same_array, list_arrays, pin
from unisono.training.data.libraries import as_source, name_stage
from unisono.training.data.order import Indices, TablePart, choose_index_dtype
from unisono.training.data.parts import Source
from unisono.training.data.record_files import Records

_LOADER_OPTIONS = (  # what the DataLoader that reads here takes over from one that was given
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


@dataclass
class SampleSource:
    """A dataset, and how its samples are read.

    Attributes:
        dataset: Map-style (`dataset[i]`), or iterable if `samples` is None.
        samples: Number of samples; None for a stream.
        collate: Turns a list of samples into a batch.
        options: Further arguments of the DataLoader that reads the dataset (num_workers, pin_memory, ...).
        sampler: A DataLoader's own sampler, if it decides the order; None if `un.shard` does.
        batch_sampler: A DataLoader's own batch sampler, if it decides the global batches.
        batch_size, shuffle, drop_last: What a DataLoader was set to; None if it was not.
        divided: Whether the samples are this rank's own, and other ranks have others.
        seeds: Those of a stream that shuffles itself, if they are known: all ranks must have the same.
        parts: The dataset again if it is a stream whose parts are read by one rank each; None if all read all of it.
        why_whole: Why a stream of a library that we know is read whole by all ranks.
    """

    dataset: Any
    samples: int | None
    collate: Callable[[list[Any]], Any]
    options: dict[str, Any] = field(default_factory=dict)
    sampler: Any = None
    batch_sampler: Any = None
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    divided: bool = False
    seeds: list[str] = field(default_factory=list)
    parts: Source | None = None
    why_whole: str = ""

    def __post_init__(self) -> None:
        self._lists = _IndexLists()
        self._loader: Any = None

    def compute_costs(self, cost: Callable[[Any], float]) -> NDArray[np.float64]:
        """`cost(sample)` of every sample, in order; `cost(path)` if the samples are files."""
        assert self.samples is not None
        items = self.dataset.paths if isinstance(self.dataset, FileList) else self.dataset
        return np.fromiter((float(cost(items[i])) for i in range(self.samples)), np.float64, self.samples)

    def draw_batches(self, batch_size: int, *, seed: int, epoch: int) -> list[Indices]:
        """One epoch of global batches as the DataLoader's own sampler or batch sampler gives them."""
        chosen = self.batch_sampler if self.batch_sampler is not None else self.sampler
        _set_epoch(chosen, epoch)
        _set_epoch(getattr(chosen, "sampler", None), epoch)
        drawing: Any = next((s for s in (chosen, getattr(chosen, "sampler", None)) if hasattr(s, "generator")), None)
        if drawing is None:
            drawn = list(chosen)
        else:  # a sampler of torch's, which is to draw the same on every rank
            kept = drawing.generator
            drawing.generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
            try:
                drawn = list(chosen)
            finally:
                drawing.generator = kept
        if self.batch_sampler is not None:
            return [np.asarray(batch, dtype=np.int64) for batch in drawn]
        order = np.asarray(drawn, dtype=np.int64)
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    def read(self, parts: Iterator[tuple[Indices, int]], *, seed: int) -> Iterator[Any]:
        """Yields the collated batch of each list of indices that `parts` gives, in order.

        Each comes with a seed for the processes that read ahead: what they draw depends on the batch alone.
        """
        if isinstance(self.dataset, Arrays) and self.dataset.whole and not self.options.get("num_workers"):
            batches = (self.dataset.take(part) for part, _ in parts)
            return map(pin, batches) if self.options.get("pin_memory") else batches
        if self._loader is None:
            from torch.utils.data import DataLoader

            dataset: Any = _ReseededDataset(self.dataset) if self.options.get("num_workers") else self.dataset
            self._loader = DataLoader(
                dataset,
                batch_sampler=self._lists,
                collate_fn=self.collate,
                generator=torch.Generator(),
                **self.options,
            )
        # Its own generator: a DataLoader draws from torch's global one at every start, so that a run resumed
        # in mid-epoch would see other dropout masks than one that was never stopped.
        self._loader.generator.manual_seed(seed)
        self._lists.parts = parts
        return iter(self._loader)

    def read_stream(self, *, epoch: int, state: Any = None) -> Iterator[Any]:
        """Yields the samples of an iterable dataset one by one, from the beginning or from a state of its own."""
        _set_epoch(self.dataset, epoch)
        if state is not None:
            self.dataset.load_state_dict(state)
        if not self.options.get("num_workers"):
            return iter(self.dataset)
        from torch.utils.data import DataLoader

        generator = torch.Generator().manual_seed(epoch)
        return iter(DataLoader(self.dataset, batch_size=None, collate_fn=identity, generator=generator, **self.options))


class _IndexLists:
    """The batch sampler of our DataLoader: this rank's indices of each global batch."""

    parts: Iterator[tuple[Indices, int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return (_SeededList(part.tolist(), seed) for part, seed in self.parts)


class _SeededList(list[int]):
    """A batch's indices, with its seed."""

    def __init__(self, indices: Iterable[int] = (), seed: int = 0) -> None:
        super().__init__(indices)
        self.seed = seed


class _ReseededDataset:
    """A dataset in a process that reads ahead; its random numbers start anew with every batch.

    Torch seeds such a process once an epoch: a run resumed in mid-epoch would augment its samples in another way
    than one that was never stopped.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: _SeededList) -> Any:
        rng.seed_all(indices.seed)
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(indices) if callable(fetch) else [self.dataset[i] for i in indices]


class FileList:
    """A list of files, each one sample: `read(path)`, or the path itself."""

    def __init__(self, paths: Sequence[Any], read: Callable[[Any], Any] | None) -> None:
        self.paths, self.read_file = paths, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index]
        return path if self.read_file is None else self.read_file(path)


def identity(x: Any) -> Any:
    """Return the argument. A named function, because worker processes cannot be sent a lambda."""
    return x


def open_source(
    data: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    read: Callable[[Any], Any] | None,
    options: dict[str, Any],
) -> SampleSource:
    """The source of the user's `data`, whatever kind it is, read by the user's `collate_fn`, `read` and DataLoader
    `options`. TypeError or ValueError for data that cannot be read."""
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

    collate = collate_fn or default_collate
    seeds: list[str] = []
    if isinstance(data, IterableDataset) and isinstance(getattr(data, "pipeline", None), list):
        data, seeds = _open_pipeline(data)
    parts, why_whole = as_source(data)
    if parts is not None and read is None:
        return SampleSource(parts, None, collate, options, shuffle=parts.shuffles, parts=parts)
    if read is not None and not is_files(data):
        raise TypeError(
            f"un.shard got read= for a {type(data).__name__}. Expected a list of files (str or Path) with it."
        )
    if isinstance(data, DataLoader):
        return _open_loader(data, collate_fn, options)
    if isinstance(data, TablePart):
        columns = data.arrays
        if columns is None:  # read row by row, else by columns
            return SampleSource(data, len(data), collate, options, divided=True)
        rows = Arrays(columns, whole=collate_fn is None)
        return SampleSource(rows, len(data), collate_fn or identity, options, divided=True)
    if is_files(data):
        files = FileList(data, read)
        return SampleSource(files, len(data), collate if read or collate_fn else identity, options)
    if is_arrays(data) or type(data) is TensorDataset:
        arrays = Arrays(list(data.tensors) if type(data) is TensorDataset else data, whole=collate_fn is None)
        return SampleSource(arrays, len(arrays), collate_fn or identity, options)
    if hasattr(data, "iloc") or isinstance(data, str | bytes | os.PathLike | Mapping | set):
        raise TypeError(
            f"un.shard got a {type(data).__name__}. Expected tensors or arrays (or a tuple, list or dict of them), a "
            "map-style or iterable dataset, a DataLoader, or a list of files. A table becomes arrays with "
            "its to_numpy()."
        )
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        if isinstance(data, Iterator):
            raise TypeError(
                f"un.shard got a {type(data).__name__}, which can be read only once. Expected an iterable dataset: an "
                "object whose __iter__ restarts the stream for every epoch."
            )
        return SampleSource(data, None, collate, options, seeds=seeds, why_whole=why_whole)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return SampleSource(data, len(data), collate, options)
    raise TypeError(f"un.shard got a {type(data).__name__}. Expected a dataset: __getitem__ and __len__, or __iter__.")


def _open_pipeline(data: Any) -> tuple[Any, list[str]]:
    """A dataset of webdataset's, whole: every rank reads all of it, and un.shard divides. Returns the seeds of its
    shuffles too. A WebLoader is the DataLoader in it.

    Refused is what would give the ranks different samples, or batches in the place of samples.
    """
    from torch.utils.data import DataLoader

    stages, kind = data.pipeline, type(data).__name__
    if stages and isinstance(stages[0], DataLoader):
        if len(stages) == 1:
            return stages[0], []
        raise TypeError(
            f"un.shard got a {kind} with {len(stages) - 1} stage(s) after its DataLoader (.shuffle, .batched and the "
            "like), which make batches that un.shard cannot divide. Give the WebDataset itself, with these stages and "
            "without .batched: un.shard(dataset, batch_size=..., num_workers=...)."
        )
    kept, seeds = [], []
    for stage in stages:
        name = name_stage(stage)
        if name == "split_by_node":
            raise ValueError(
                f"un.shard got a {kind} with nodesplitter=split_by_node, which keeps one worker's samples only. "
                "Expected the whole data: leave the nodesplitter out."
            )
        if name == "batched":
            raise ValueError(
                f"un.shard got a {kind} with .batched(...), whose samples are batches. Leave it out: un.shard(dataset, "
                "batch_size=...) makes the batches, of the samples of all workers."
            )
        if name in ("shuffle", "detshuffle"):
            seeds.append(_find_seed(stage))
        if name != "single_node_only":  # webdataset's default: refuses to run on several workers
            kept.append(stage)
    whole = copy.copy(data)
    whole.pipeline = kept
    return whole, seeds


def _find_seed(stage: Any) -> str:
    """What decides the order that a stage shuffles into; without a seed each process has its own."""
    given, arguments = getattr(stage, "kw", vars(stage)), getattr(stage, "args", ())
    if arguments and not arguments[0]:  # a buffer of no samples
        return ""
    if (generator := given.get("rng")) is not None:
        return repr(generator.getstate())
    return str(given["seed"]) if given.get("seed") is not None else os.urandom(8).hex()


def _open_loader(loader: Any, collate_fn: Callable[[list[Any]], Any] | None, options: dict[str, Any]) -> SampleSource:
    from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, default_collate

    own = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
    own["pin_memory"] = own["pin_memory"] and torch.cuda.is_available()
    own |= options
    # A loader without batches (batch_size=None) converts single samples: its collate_fn is not for batches.
    collates = loader.batch_sampler is not None or loader.batch_size is not None
    collate_fn = collate_fn or (loader.collate_fn if collates else None)
    collate_fn = None if collate_fn is default_collate else collate_fn
    source = open_source(loader.dataset, collate_fn=collate_fn, read=None, options=own)
    source.batch_size, source.drop_last = loader.batch_size, bool(loader.drop_last)
    if source.samples is None:
        return source
    sampler = loader.sampler
    for each in (sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(each, DistributedSampler):
            raise ValueError(
                "un.shard got a DataLoader with a DistributedSampler, which already keeps one worker's "
                "samples only. Expected the whole data: leave that sampler out (shuffle=True for a shuffled "
                "order)."
            )
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        source.batch_sampler = loader.batch_sampler
        source.batch_size, source.drop_last = None, None
    elif loader.batch_sampler is not None and loader.batch_size is None:
        # A plain BatchSampler given by hand: the same settings, in another place.
        sampler = loader.batch_sampler.sampler
        source.batch_size = loader.batch_sampler.batch_size
        source.drop_last = bool(loader.batch_sampler.drop_last)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == source.samples:
        source.shuffle = True
    elif type(sampler) is SequentialSampler:
        source.shuffle = False
    elif source.batch_sampler is None:
        source.sampler = sampler
    return source


def read_numbers(name: str, values: Any, samples: int) -> NDArray[Any]:
    """`values` as a numpy array of shape (samples,), or an error that names the argument."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.shape != (samples,):
        raise ValueError(
            f"un.shard got {name}= of shape {tuple(array.shape)} for {samples} samples. "
            f"Expected one value a sample, in the order of the data: shape ({samples},)."
        )
    return array


def read_classes(labels: Any, samples: int) -> Indices:
    """Class numbers 0, 1, ... of labels of any kind (numbers, strings), shape (samples,)."""
    values = read_numbers("stratify", labels, samples)
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(choose_index_dtype(samples))


def read_costs(cost: Any, source: SampleSource) -> NDArray[np.float64]:
    """The cost of every sample, given as an array or as a function of a sample; finite and 0 or more."""
    assert source.samples is not None
    costs = source.compute_costs(cost) if callable(cost) else read_numbers("cost", cost, source.samples)
    costs = costs.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"un.shard got cost={costs[first]} for sample {first} ({wrong.size} such in all). "
            "Expected a finite number, 0 or more, for every sample."
        )
    return costs


def is_same_data(a: Any, b: Any) -> bool:
    """Whether both are the same data: the same object, the same numbers, or another wrapper around them."""
    from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if is_arrays(a):
        ours, theirs = list(list_arrays(a)), list(list_arrays(b))
        return [n for n, _ in ours] == [n for n, _ in theirs] and all(
            is_same_array(x, y) for (_, x), (_, y) in zip(ours, theirs, strict=True)
        )
    if is_files(a):
        return bool(a == b)
    if isinstance(a, Records):
        return a.matches(b) and is_same_values(a.read, b.read)
    if isinstance(a, TablePart):
        return bool(a.number == b.number)
    if type(a) is TensorDataset:
        return is_same_data(a.tensors, b.tensors)
    if isinstance(a, DataLoader):
        plain = type(a.sampler) in (RandomSampler, SequentialSampler) and type(a.sampler) is type(b.sampler)
        settings = ("batch_size", "drop_last", "num_workers", "pin_memory")
        return (
            plain
            and all(getattr(a, s) == getattr(b, s) for s in settings)
            and is_same_function(a.collate_fn, b.collate_fn)
            and is_same_data(a.dataset, b.dataset)
        )
    return False


def is_same_function(a: Any, b: Any) -> bool:
    """Whether two callables are one, also when a lambda in a loop was made anew."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        inside = len(cells[0]) == len(cells[1]) and all(x is y for x, y in zip(*cells, strict=True))
        return a is b or (a.__code__ == b.__code__ and a.__defaults__ == b.__defaults__ and inside)
    return bool(a == b)


def is_same_values(a: Any, b: Any) -> bool:
    """Whether two arguments that are None, a function or one number a sample say the same."""
    if a is b:
        return True
    if a is None or b is None or callable(a) or callable(b):
        return callable(a) and callable(b) and is_same_function(a, b)
    ours, theirs = (v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for v in (a, b))
    return bool(np.array_equal(ours, theirs))


def move_to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; what is no tensor stays as it is."""
    if isinstance(batch, Mapping):
        return {key: move_to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_to_device(value, device) for value in batch)
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=batch.device.type == "cpu" and batch.is_pinned())
    move = getattr(batch, "to", None)
    return move(device) if callable(move) else batch


def is_files(data: Any) -> bool:
    """Whether `data` is a list or tuple of paths."""
    return isinstance(data, list | tuple) and len(data) > 0 and all(isinstance(p, str | os.PathLike) for p in data)


def _set_epoch(thing: Any, epoch: int) -> None:
    hook = getattr(thing, "set_epoch", None)
    if callable(hook):
        hook(epoch)
