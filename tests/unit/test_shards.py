"""`un.shard`: exactly once, the same global batches for every world size, exact uneven ends, resuming."""

from __future__ import annotations

import contextlib
import copy
import doctest
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import unisono as un
from unisono.training import data as data_module
from unisono.training.data import Shard, shard
from unisono.world.batch_weights import BatchWeights
from unisono.world.virtual import run_threads

SIZES = range(1, 6)


class FakeLedger:
    def __init__(self) -> None:
        self.spans: list[str] = []
        self.listener = None

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        self.spans.append(kind)
        yield


class FakeWorld:
    """As much of a world as a shard sees."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, self.batch_weights = rank, size, BatchWeights()
        self.device = torch.device("cpu")
        self.ledger = FakeLedger()
        self.shards: dict[str, Shard] = {}
        self.pending_shards: dict[str, Any] = {}
        self.elastic = None

    @property
    def weight(self) -> float:
        return self.batch_weights.weight

    def gather_objects(self, obj: Any) -> list[Any]:
        """The other ranks have the same."""
        return [obj] * self.size


class Squares(Dataset[tuple[int, int]]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i, i * i


class Count(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def shards(data: Any, size: int, *args: Any, **options: Any) -> list[Any]:
    """One shard for each rank of a world of `size`."""
    return [shard(data, *args, world=FakeWorld(rank, size), **options) for rank in range(size)]


def values(batch: Any) -> list[int]:
    x = batch[0] if isinstance(batch, list | tuple) else batch
    return [int(v) for v in x]


def read(ranks: list[Any]) -> list[list[tuple[list[int], float]]]:
    """One epoch: for every global batch, for every rank, its samples and its weight."""
    return [
        [(values(b), s.world.weight) for b, s in zip(batches, ranks, strict=True)]
        for batches in zip(*ranks, strict=True)
    ]


def counted(one_round: list[tuple[list[int], float]]) -> list[int]:
    """The samples of a global batch that count."""
    return sorted(v for part, weight in one_round if weight for v in part)


def kinds_of_data(n: int) -> dict[str, Any]:
    return {
        "tensor": torch.arange(n),
        "tensors": (torch.arange(n), torch.zeros(n, 3)),
        "array": np.arange(n),
        "map": Squares(n),
        "list": list(range(n)),
        "stream": Count(n),
        "loader": DataLoader(TensorDataset(torch.arange(n)), batch_size=7, shuffle=True),
        "sampler": DataLoader(Squares(n), batch_size=7, sampler=SubsetRandomSampler(range(n))),
        "batch_sampler": DataLoader(
            Squares(n), batch_sampler=BatchSampler(SequentialSampler(range(n)), batch_size=7, drop_last=False)
        ),
    }


KINDS = list(kinds_of_data(7))


def test_docstring_examples_hold() -> None:
    assert doctest.testmod(data_module).failed == 0


# Exactly once, and the same for every world size ---------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_counts_exactly_once_whatever_the_data(kind: str) -> None:
    for n, size in itertools.product([5, 7, 23], [1, 2, 5]):
        rounds = read(shards(kinds_of_data(n)[kind], size, 7))
        assert sorted(itertools.chain(*map(counted, rounds))) == list(range(n))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False},
        {"partition": "strided"},
        {"stratify": True},
        {"stratify": True, "shuffle": False},
        {"cost": True},
        {"cost": True, "weigh_by": "cost"},
    ],
    ids=str,
)
def test_global_batches_do_not_depend_on_the_number_of_workers(options: dict[str, Any]) -> None:
    for n, batch_size in itertools.product([5, 6, 17, 64, 101], [5, 8, 32]):
        rng = np.random.default_rng(n)
        given = dict(options)
        if "stratify" in given:
            given["stratify"] = rng.integers(0, 3, n)
        if "cost" in given:
            given["cost"] = rng.integers(1, 50, n)
        alone = [counted(r) for r in read(shards(torch.arange(n), 1, batch_size, **given))]
        assert sorted(itertools.chain(*alone)) == list(range(n))
        for size in SIZES:
            rounds = read(shards(torch.arange(n), size, batch_size, **given))
            assert [counted(r) for r in rounds] == alone
            for r in rounds:
                assert sum(weight for _, weight in r) == pytest.approx(size)


def test_full_even_batches_weigh_exactly_one() -> None:
    for r in read(shards(torch.arange(40), 4, 8)):
        assert [weight for _, weight in r] == [1.0] * 4


def test_unshuffled_parts_lie_as_the_partition_says() -> None:
    contiguous = read(shards(torch.arange(7), 2, 7, shuffle=False))
    assert contiguous == [[([0, 1, 2, 3], 8 / 7), ([4, 5, 6], 6 / 7)]]
    strided = read(shards(torch.arange(7), 2, 7, shuffle=False, partition="strided"))
    assert [part for part, _ in strided[0]] == [[0, 2, 4, 6], [1, 3, 5]]


def test_ranks_without_a_sample_get_the_first_one_with_weight_nought() -> None:
    rounds = read(shards(torch.arange(10), 4, 4, shuffle=False))
    assert rounds[-1] == [([8], 2.0), ([9], 2.0), ([8], 0.0), ([8], 0.0)]


def test_batches_of_arrays_are_pinned_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x.tolist()) or x)
    given = {"x": torch.arange(4), "y": np.arange(4.0)}
    for batch in shard(given, 2, shuffle=False, pin_memory=True, world=un.World()):
        assert pinned[-2:] == [batch["x"].tolist(), batch["y"].tolist()]
    assert len(pinned) == 4


def test_drop_last_leaves_out_the_short_batch_only() -> None:
    ranks = shards(torch.arange(10), 2, 4, shuffle=False, drop_last=True)
    assert len(ranks[0]) == 2
    assert [counted(r) for r in read(ranks)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_each_rank_has_the_class_mix_and_costs_are_even() -> None:
    labels = torch.arange(120) % 4  # 4 classes, equally often
    for r in read(shards(torch.arange(120), 3, 24, stratify=labels)):
        for part, _ in r:
            assert torch.bincount(labels[part]).tolist() == [2, 2, 2, 2]
    lengths = np.random.default_rng(0).integers(1, 500, 256)
    for r in read(shards(torch.arange(256), 4, 64, cost=lengths)):
        loads = [lengths[part].sum() for part, _ in r]
        assert max(loads) <= 1.05 * np.mean(loads)


# The gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"partition": "strided"}, {"cost": np.arange(1.0, 24.0)}], ids=str)
def test_weighted_mean_gradient_equals_the_one_process_gradient(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(23, 4, dtype=torch.float64), torch.randn(23, dtype=torch.float64)
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def gradient(batch: Any) -> torch.Tensor:
        return torch.autograd.grad((batch[0] @ w - batch[1]).square().mean(), w)[0]

    for size in SIZES:
        ranks = shards((x, y), size, 10, **options)
        alone = shards((x, y), 1, 10, **options)[0]
        for whole, *parts in zip(alone, *ranks, strict=True):
            mean = sum(gradient(p) * s.world.weight for p, s in zip(parts, ranks, strict=True)) / size
            torch.testing.assert_close(mean, gradient(whole), rtol=1e-12, atol=1e-14)


def test_weighing_by_cost_makes_a_mean_over_tokens_exact() -> None:
    torch.manual_seed(0)
    lengths = np.random.default_rng(1).integers(1, 9, 21)
    texts = [torch.randn(int(n), 3, dtype=torch.float64) for n in lengths]
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def gradient(batch: Any) -> torch.Tensor:
        return torch.autograd.grad((batch @ w).square().mean(), w)[0]  # the mean over tokens

    class Texts(Squares):
        def __getitem__(self, i: int) -> Any:
            return texts[i]

    data, options = Texts(21), {"cost": len, "weigh_by": "cost", "collate_fn": torch.cat}
    for size in (2, 3, 5):
        ranks = shards(data, size, 8, **options)
        for whole, *parts in zip(shards(data, 1, 8, **options)[0], *ranks, strict=True):
            mean = sum(gradient(p) * s.world.weight for p, s in zip(parts, ranks, strict=True)) / size
            torch.testing.assert_close(mean, gradient(whole), rtol=1e-12, atol=1e-14)


# WebDataset: stand-ins with the shape of webdataset 1.0 -----------------------------------------------------------


class Pipeline(IterableDataset[int]):
    """Of a source and stages, as its DataPipeline: each a function of an iterator, or a loader at the beginning."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)

    def __iter__(self) -> Iterator[Any]:
        found: Any = iter(self.pipeline[0])
        for stage in self.pipeline[1:]:
            found = stage(found)
        return iter(found)


class Filter:
    """A stage with arguments, as its FilterFunction."""

    def __init__(self, f: Any, *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def __call__(self, data: Any) -> Any:
        return self.f(data, *self.args, **self.kw)


def single_node_only(data: Any) -> Iterator[Any]:
    raise ValueError("you need to add an explicit nodesplitter to your input pipeline")
    yield from data


def split_by_node(data: Any) -> Any:
    return data


def _batched(data: Any, _size: int) -> Any:
    return data


def _shuffle(data: Any, size: int, seed: int | None = None, rng: random.Random | None = None) -> Any:
    chosen = rng or random.Random(seed)
    return iter(sorted(data, key=lambda _: chosen.random()) if size else data)


def pipelined(data: Any, **options: Any) -> list[list[int]]:
    """What each of two ranks gets in an epoch."""
    return run_threads(lambda world: [x for b in shard(data(), world=world, **options) for x in b.tolist()], 2)


@pytest.mark.parametrize(
    "stages",
    [
        (),
        (Filter(_shuffle, False, seed=None),),
        (Filter(_shuffle, 5, seed=1),),
        (Filter(_shuffle, 5, rng=random.Random(4)),),
    ],
)
@pytest.mark.parametrize("loader", [False, True])
def test_every_sample_of_a_webdataset_comes_once(stages: tuple[Any, ...], loader: bool) -> None:
    def make() -> Any:
        dataset = Pipeline(range(11), single_node_only, *copy.deepcopy(stages))
        return Pipeline(DataLoader(dataset, batch_size=4)) if loader else dataset

    found = pipelined(make) if loader else pipelined(make, batch_size=4)
    assert sorted(found[0] + found[1]) == list(range(11))
    assert len(found[0]) == 6


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: Pipeline(range(8), split_by_node), "leave the nodesplitter out"),
        (lambda: Pipeline(range(8), Filter(_batched, 4)), "makes the batches"),
        (lambda: Pipeline(range(8), Filter(_shuffle, 4)), "shuffle with different seeds"),
        (lambda: Pipeline(DataLoader(Pipeline(range(8))), Filter(_shuffle, 4)), "Give the WebDataset itself"),
    ],
)
def test_a_webdataset_that_ranks_would_read_in_different_ways_is_refused(data: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        pipelined(data, batch_size=4)


def test_one_worker_may_shuffle_a_webdataset_as_it_likes() -> None:
    found = [x for b in shard(Pipeline(range(8), Filter(_shuffle, 4)), 4, world=un.World()) for x in b.tolist()]
    assert sorted(found) == list(range(8))


# The weight, the ledger ----------------------------------------------------------------------------------


def test_weight_is_one_again_after_the_end_a_break_and_an_error() -> None:
    world = FakeWorld(0, 2)
    s = shard(torch.arange(7), 7, world=world)
    for _ in s:
        assert world.weight == 8 / 7
    assert world.weight == 1.0
    for _ in s:
        break
    assert world.weight == 1.0
    with contextlib.suppress(KeyError):
        for _ in s:
            raise KeyError
    assert world.weight == 1.0


def test_a_loop_inside_a_loop_gives_the_outer_weight_back() -> None:
    world = FakeWorld(0, 2)
    for _ in shard(torch.arange(7), 7, world=world):
        for _ in shard(torch.arange(5), 5, world=world):
            assert world.weight == 6 / 5
        assert world.weight == 8 / 7
    assert world.weight == 1.0


def test_reading_is_recorded_as_data_time() -> None:
    world = FakeWorld()
    list(shard(torch.arange(6), 2, world=world))
    assert set(world.ledger.spans) == {"data"}
    assert len(world.ledger.spans) == 4


# Epochs and the same shard -------------------------------------------------------------------------------


def test_a_loop_over_epochs_gets_one_shard_in_another_order_each_time() -> None:
    world, x, y, labels = FakeWorld(), torch.arange(20), torch.zeros(20), np.arange(20) % 2
    orders = []
    for epoch in range(3):
        made = shard((x[:16], y[:16]), 4, stratify=labels[:16], collate_fn=lambda s: s, world=world)
        assert made.epoch == epoch
        orders.append([int(v[0]) for batch in made for v in batch])
    assert len(world.shards) == 1
    assert len({tuple(o) for o in orders}) == 3


@pytest.mark.parametrize("wrap", [TensorDataset, lambda x: DataLoader(TensorDataset(x), 4), lambda x: {"x": x}])
def test_a_fresh_wrapper_around_the_same_tensor_is_the_same_data(wrap: Any) -> None:
    world, x = FakeWorld(), torch.arange(8)
    assert shard(wrap(x), 4, world=world) is shard(wrap(x), 4, world=world)
    assert shard(wrap(x), 4, world=world) is not shard(wrap(x + 1), 4, world=world)
    assert list(world.shards) == ["shard0", "shard1"]


def test_a_copy_made_in_every_epoch_is_the_same_data() -> None:
    world = FakeWorld()
    made = {id(shard((np.arange(8), torch.arange(8)), 4, world=world)) for _ in range(3)}
    assert len(made) == 1


def test_a_copy_with_missing_values_is_the_same_data() -> None:
    gaps = np.array([1.0, np.nan, 3.0, np.inf, 5.0])
    world = FakeWorld()
    made = {id(shard((gaps.copy(), torch.tensor(gaps)), 2, world=world)) for _ in range(3)}
    assert len(made) == 1
    assert id(shard((np.nan_to_num(gaps), torch.tensor(gaps)), 2, world=world)) not in made
    assert id(shard((gaps, torch.tensor(gaps).nan_to_num()), 2, world=world)) not in made


def test_other_settings_make_another_shard() -> None:
    world, x = FakeWorld(), torch.arange(8)
    made = {id(shard(x, 4, world=world, **o)) for o in ({}, {"shuffle": False}, {"seed": 1}, {"name": "a"})}
    assert len(made) == 4


def test_set_epoch_repeats_an_order_and_keeps_a_place_in_the_same_epoch() -> None:
    s = shard(torch.arange(20), 4, world=FakeWorld())
    first = [values(b) for b in s]
    second = [values(b) for b in s]
    assert first != second
    s.set_epoch(0)
    assert [values(b) for b in s] == first
    s.load_state_dict({**s.state_dict(), "epoch": 0, "batch": 3})
    s.set_epoch(0)
    assert [values(b) for b in s] == first[3:]


def test_looking_at_a_batch_changes_nothing() -> None:
    s = shard(torch.arange(20), 4, world=FakeWorld())
    seen = values(next(iter(s)))
    batches = [values(b) for b in s]
    assert batches[0] == seen
    assert (len(batches), s.epoch) == (5, 1)


def test_two_iterators_over_one_shard_are_refused() -> None:
    s = shard(torch.arange(20), 4, world=FakeWorld())
    with pytest.raises(RuntimeError, match="newer iterator"):
        list(zip(s, s, strict=True))


def test_a_name_stands_for_data_made_anew_and_for_nothing_else() -> None:
    world = FakeWorld()
    first = shard(Squares(8), 4, name="train", world=world)
    list(first)
    assert shard(Squares(8), 4, name="train", world=world) is first
    assert first.epoch == 1
    with pytest.raises(ValueError, match=r"name='train'.*9 samples.*8 samples"):
        shard(Squares(9), 4, name="train", world=world)


def test_datasets_made_anew_every_epoch_without_a_name_get_a_warning() -> None:
    world = FakeWorld()
    for _ in range(4):
        shard(Squares(8), 4, world=world)
    with pytest.warns(UserWarning, match="Make the dataset once"):
        shard(Squares(8), 4, world=world)


# State ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 5), (5, 1)])
def test_resuming_in_mid_epoch_at_another_size_reads_each_sample_once(kind: str, before: int, after: int) -> None:
    n = 59
    expected = read(shards(kinds_of_data(n)[kind], 1, 7, seed=3))
    seen, states = [], []
    ranks = shards(kinds_of_data(n)[kind], before, 7, seed=3)
    for k, batches in enumerate(zip(*ranks, strict=True)):
        seen.append(counted([(values(b), s.world.weight) for b, s in zip(batches, ranks, strict=True)]))
        if k == 3:
            states = [s.state_dict() for s in ranks]  # inside the loop: the batch that is out counts as read
            break
    assert all(state == states[0] for state in states)
    assert states[0]["batch"] == 4
    later = shards(kinds_of_data(n)[kind], after, 7)
    for s in later:
        s.load_state_dict(states[0])
    rounds = read(later)
    assert seen + [counted(r) for r in rounds] == [counted(r) for r in expected]
    assert all(s.epoch == 1 and s.batch == 0 for s in later)
    if kind not in ("stream", "batch_sampler"):
        assert read(later)[0] != rounds[0]  # the next epoch is whole and in another order
        assert later[0].epoch == 2


def test_a_state_that_was_left_pending_is_taken_up() -> None:
    old = shard(torch.arange(20), 4, world=FakeWorld())
    expected = [values(b) for b in old]
    world = FakeWorld()
    world.pending_shards["shard0"] = {**old.state_dict(), "epoch": 0, "batch": 2}
    assert [values(b) for b in shard(torch.arange(20), 4, world=world)] == expected[2:]
    assert not world.pending_shards


def test_a_state_of_the_last_batch_ends_its_epoch_without_a_batch() -> None:
    s = shard(torch.arange(8), 4, world=FakeWorld())
    states = [s.state_dict() for _ in s]
    assert (states[-1]["epoch"], states[-1]["batch"]) == (0, 2)
    s.load_state_dict(states[-1])
    assert list(s) == []
    assert (s.epoch, len(list(s))) == (1, 2)


def test_a_state_of_other_data_or_settings_is_refused_by_name() -> None:
    state = shard(torch.arange(20), 4, world=FakeWorld()).state_dict()
    with pytest.raises(ValueError, match=r"samples: 20.*samples: 21"):
        shard(torch.arange(21), 4, world=FakeWorld()).load_state_dict(state)
    with pytest.raises(ValueError, match=r"batch_size=4.*batch_size=5"):
        shard(torch.arange(20), 5, world=FakeWorld()).load_state_dict(state)
    with pytest.raises(ValueError, match="stratify="):
        shard(torch.arange(20), 4, stratify=np.arange(20) % 2, world=FakeWorld()).load_state_dict(state)


@pytest.mark.parametrize("kind", ["tensor", "map", "stream"])
def test_a_world_that_changes_in_mid_epoch_loses_and_repeats_nothing(kind: str) -> None:
    """4 ranks read 3 batches, rank 3 is lost, 3 ranks go on in the same loops."""
    ranks = shards(kinds_of_data(50)[kind], 4, 8, seed=1)
    running = [iter(s) for s in ranks]
    seen: list[int] = []
    for k in itertools.count():
        batches = [next(it, None) for it in running]
        if batches[0] is None:
            break
        seen += counted([(values(b), s.world.weight) for b, s in zip(batches, ranks, strict=True)])
        if k == 2:
            ranks, running = ranks[:3], running[:3]
            for rank, s in enumerate(ranks):
                s.rebind(FakeWorld(rank, 3))
    assert sorted(seen) == list(range(50))


# Kinds of data -------------------------------------------------------------------------------------------


def test_arrays_keep_their_structure_and_become_tensors() -> None:
    x = np.arange(12.0).reshape(6, 2)
    x.flags.writeable = False
    (batch,) = shard({"x": x, "name": np.array(list("abcdef"))}, 6, shuffle=False, world=FakeWorld())
    torch.testing.assert_close(batch["x"], torch.arange(12.0, dtype=torch.float64).reshape(6, 2))
    assert batch["name"].tolist() == list("abcdef")
    (alone,) = shard(torch.arange(6), 6, world=FakeWorld())
    assert isinstance(alone, torch.Tensor)


def test_batches_are_on_the_device_of_the_world() -> None:
    world = FakeWorld()
    world.device = torch.device("meta")
    for source in ({"x": torch.zeros(4), "y": np.zeros(4)}, Squares(4), Count(4)):
        for batch in shard(source, 4, world=world):
            tensors = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
            assert all(t.device.type == "meta" for t in tensors)


def test_a_batch_is_a_copy_that_may_be_written_to() -> None:
    x = torch.arange(4)
    for batch in shard(x, 4, shuffle=False, world=FakeWorld()):
        batch += 1
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(23), torch.zeros(23, 2)), Squares(23)])
def test_one_worker_gets_what_a_dataloader_gives(data: Any) -> None:
    ours = list(shard(DataLoader(data, batch_size=5), world=FakeWorld()))
    theirs = list(DataLoader(data, batch_size=5))
    assert [type(b) for b in ours] == [type(b) for b in theirs]
    torch.testing.assert_close(ours, theirs)


def test_a_dataloader_brings_its_settings() -> None:
    loader = DataLoader(Squares(23), batch_size=5, shuffle=True, drop_last=True, collate_fn=sum_of_first)
    s = shard(loader, world=FakeWorld())
    assert (s.batch_size, s.shuffle, s.drop_last, len(s)) == (5, True, True, 4)
    assert all(isinstance(batch, int) for batch in s)
    assert not shard(DataLoader(Squares(23), batch_size=5), world=FakeWorld()).shuffle


def sum_of_first(samples: list[tuple[int, int]]) -> int:
    return sum(i for i, _ in samples)


def test_a_random_sampler_draws_the_same_on_every_rank_and_another_way_each_epoch() -> None:
    ranks = []
    for rank in range(2):
        torch.manual_seed(rank)  # as scripts that seed each rank differently do
        sampler = WeightedRandomSampler([1.0] * 20, 20)
        ranks.append(shard(DataLoader(Squares(20), 20, sampler=sampler), world=FakeWorld(rank, 2)))
    alone = shard(DataLoader(Squares(20), 20, sampler=WeightedRandomSampler([1.0] * 20, 20)), world=FakeWorld())
    epochs = [counted(read(ranks)[0]) for _ in range(2)]
    assert epochs == [counted(read([alone])[0]) for _ in range(2)]
    assert epochs[0] != epochs[1]


def test_workers_that_read_ahead_change_neither_batches_nor_state() -> None:
    plain = shards(Squares(23), 2, 6)
    ahead = shards(Squares(23), 2, 6, num_workers=2)
    expected = read(plain)
    first = iter(ahead[0])
    got = [values(next(first)), values(next(first))]
    assert ahead[0].state_dict()["batch"] == 2  # given out, not fetched
    first.close()
    assert got == [r[0][0] for r in expected[:2]]
    assert read(ahead) == expected


class Noisy(Dataset[torch.Tensor]):
    """Augments from torch's, numpy's and Python's global generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, torch.rand(()).item(), np.random.rand(), random.random()])


@pytest.mark.parametrize("workers", [1, 2])
def test_augmentation_in_workers_is_the_same_in_a_resumed_epoch(workers: int) -> None:
    straight = [b.clone() for b in shard(Noisy(), 6, num_workers=2, world=FakeWorld())]
    assert len({float(x) for b in straight for x in b[:, 1:].flatten()}) == 23 * 3, "no number is drawn twice"
    resumed = shard(Noisy(), 6, num_workers=workers, world=FakeWorld())
    resumed.load_state_dict({**resumed.state_dict(), "batch": 2})
    got = [b.clone() for b in resumed]
    assert len(got) == 2
    assert all(torch.equal(a, b) for a, b in zip(got, straight[2:], strict=True))


def test_a_loader_leaves_the_global_generator_alone() -> None:
    """Else a run resumed in mid-epoch would see other dropout masks than one that was never stopped."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(shard(Squares(23), 6, world=FakeWorld()))
    list(shard(DataLoader(Squares(20), 20, sampler=SubsetRandomSampler(range(20))), world=FakeWorld()))
    torch.testing.assert_close(torch.rand(3), expected)


def read_in_threads(lists: list[list[Any]]) -> list[Any]:
    """What each rank reads of its own list of files; or why it was refused."""

    def work(world: Any) -> Any:
        try:
            batches = shard(lists[world.rank], batch_size=2, shuffle=False, world=world)
            return [name for batch in batches for name in batch]
        except ValueError as error:
            return str(error)

    return un.run_threads(work, len(lists))


def test_files_in_another_order_on_a_rank_are_refused_on_all() -> None:
    names = [f"/data/{name}.txt" for name in "abcd"]
    found = read_in_threads([names, [*names[:2], names[3], names[2]]])
    for why in found:
        assert "the same 4 files in different orders: as number 2, rank 0 on" in why
        assert "has c.txt; rank 1 on" in why
        assert "has d.txt" in why
        assert "un.shard(sorted(files)" in why


def test_other_files_on_a_rank_are_refused_on_all() -> None:
    names = [f"/data/{name}.txt" for name in "abcd"]
    for other in (names[:3], [*names[:3], "/data/x.txt"]):
        for why in read_in_threads([names, other]):
            assert f"different files on the ranks (4, {len(other)} of them): as number 3" in why
            assert f"has {'no more' if len(other) == 3 else 'x.txt'}" in why


def test_the_same_files_may_lie_in_another_folder_on_each_host() -> None:
    lists = [[Path(f"/{host}/data/{part}/x.txt") for part in "abcd"] for host in ("one", "two/three")]
    mine, others = read_in_threads([*lists])
    assert mine + others == [lists[0][0], lists[0][2], lists[1][1], lists[1][3]]


def test_files_are_read_one_a_sample(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.txt" for i in range(6)]
    for i, path in enumerate(paths):
        path.write_text(str(i))
    (names,) = shard([str(p) for p in paths], 6, shuffle=False, world=FakeWorld())
    assert names == [str(p) for p in paths]
    options = {"read": lambda p: int(p.read_text()), "cost": lambda p: p.stat().st_size}
    rounds = read(shards(paths, 2, 4, **options))
    assert sorted(itertools.chain(*map(counted, rounds))) == list(range(6))


def test_a_stream_has_no_length_and_is_told_its_epoch() -> None:
    class Told(Count):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    s = shard(Told(10), 4, world=FakeWorld())
    assert [values(b) for b in s] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    list(s)
    assert Told.epochs == [0, 1]
    with pytest.raises(TypeError, match="iterable dataset"):
        len(s)


# Bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (torch.arange(3), {"batch_size": 8}, "3 samples for 4 workers"),
        (torch.arange(9), {"batch_size": 3}, r"batch_size=3 for 4 workers.*at least 4.*12"),
        (torch.arange(9), {}, "no batch_size"),
        (torch.arange(9), {"batch_size": 0}, "batch_size=0"),
        (torch.arange(9), {"batch_size": -4}, "batch_size=-4"),
        (torch.arange(9), {"batch_size": 4.0}, r"batch_size=4\.0"),
        (torch.arange(9), {"batch_size": True}, "batch_size=True"),
        (torch.arange(9), {"batch_size": 10, "drop_last": True}, "leaves no batch"),
        (torch.arange(0), {"batch_size": 4}, "empty Tensor"),
        ([], {"batch_size": 4}, "empty list"),
        (torch.tensor(3), {"batch_size": 4}, "without dimensions"),
        ((torch.arange(9), torch.arange(8)), {"batch_size": 4}, r"\[0\] has 9, \[1\] has 8"),
        ({"x": torch.arange(9), "y": np.arange(8)}, {"batch_size": 4}, r"\['x'\] has 9, \['y'\] has 8"),
        (torch.arange(9), {"batch_size": 4, "stratify": [0, 1]}, r"stratify= of shape \(2,\) for 9 samples"),
        (torch.arange(9), {"batch_size": 4, "cost": np.ones(8)}, r"cost= of shape \(8,\)"),
        (torch.arange(2), {"batch_size": 4, "cost": [1.0, -2.0]}, "2 samples for 4 workers"),
        (torch.arange(4), {"batch_size": 4, "cost": [1.0, -2.0, 1, 1]}, r"cost=-2\.0 for sample 1"),
        (torch.arange(4), {"batch_size": 4, "cost": [1.0, 1, float("nan"), 1]}, "cost=nan for sample 2"),
        (torch.arange(4), {"batch_size": 4, "cost": lambda x: float("inf")}, r"sample 0 \(4 such"),
        (torch.arange(4), {"batch_size": 4, "weigh_by": "cost"}, "without cost="),
        (torch.arange(4), {"batch_size": 4, "weigh_by": "luck"}, "weigh_by='luck'"),
        (torch.arange(4), {"batch_size": 4, "partition": "odd"}, "partition='odd'"),
        (torch.arange(4), {"batch_size": 4, "cost": np.ones(4), "stratify": np.ones(4)}, "stratify= and cost="),
        (torch.arange(4), {"batch_size": 4, "epoch": -1}, "epoch=-1"),
        (torch.arange(4), {"batch_size": 4, "seed": 0.5}, r"seed=0\.5"),
        (Count(9), {"batch_size": 4, "shuffle": True}, "shuffle=True for an iterable dataset"),
        (Count(9), {"batch_size": 4, "cost": np.ones(9)}, "cost= for an iterable dataset"),
        (Count(9), {"batch_size": 4, "stratify": np.ones(9)}, "stratify= for an iterable dataset"),
        (DataLoader(Squares(9), batch_size=None), {}, "no batch_size"),
        (
            DataLoader(Squares(9), batch_size=4, sampler=DistributedSampler(Squares(9), 2, 0)),
            {},
            "DistributedSampler",
        ),
        (DataLoader(Squares(9), 4, sampler=SubsetRandomSampler(range(9))), {"shuffle": True}, "own sampler"),
        (
            DataLoader(Squares(9), 4, sampler=SubsetRandomSampler(range(9))),
            {"stratify": np.ones(9)},
            "own sampler",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_values_are_refused_with_what_was_got(data: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shard(data, world=FakeWorld(0, 4), **options)


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ("data.csv", {}, "a str.*list of files"),
        ({"a": 1}, {}, "a dict"),
        (3, {}, "a int.*Expected a dataset"),
        (iter(range(9)), {}, "read only once"),
        (torch.arange(9), {"read": len}, "read= for a Tensor"),
    ],
)
def test_data_of_no_known_kind_is_refused(data: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        shard(data, 4, world=FakeWorld(), **options)


def test_an_empty_stream_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples from Count"):
        list(shard(Count(0), 4, world=FakeWorld()))


def test_a_world_that_grew_beyond_the_batch_is_refused() -> None:
    s = shard(torch.arange(9), 4, world=FakeWorld())
    with pytest.raises(ValueError, match="batch_size=4 for 5 workers"):
        s.rebind(FakeWorld(0, 5))


def test_each_rank_counts_what_it_was_given_and_stand_ins_are_other_ranks() -> None:
    """21 samples in batches of 5: the last has one, so that three of four ranks get a stand-in."""

    def work(world: un.World) -> tuple[int, dict[str, int]]:
        world.ledger.listener = listener
        mine = shard((torch.zeros(21, 1), torch.arange(21) % 3), batch_size=5, world=world, shuffle=False)
        for _ in range(2):
            list(mine)
        return mine.dealt.samples, mine.dealt.by_class()

    class Listener:
        def on_row(self, row: object) -> None: ...

        def on_event(self, event: object) -> None: ...

    listener = Listener()
    every = un.run_threads(work, 4)
    assert sum(samples for samples, _ in every) == 2 * 21
    assert [sum(classes.values()) for _, classes in every] == [samples for samples, _ in every]
    assert {name: sum(classes.get(name, 0) for _, classes in every) for name in "012"} == {"0": 14, "1": 14, "2": 14}


def test_the_mean_over_an_epoch_counts_every_sample_once() -> None:
    """Batches of 4, 4 and 1 samples on three ranks, of which two have none of the last."""
    x = torch.linspace(0.0, 1.0, 9, dtype=torch.float64) ** 2

    def run(world: un.World) -> list[Any]:
        shard, found = un.shard(x, 4, world=world), []
        for _ in range(2):
            for part in shard:
                shard.add(part.mean(), (part > 0.5).double().mean())
            found.append(shard.mean())
        with pytest.raises(ValueError, match="inside the loop"):
            shard.add(1.0)
        return found

    expected = (float(x.mean()), float((x > 0.5).double().mean()))
    for found in [*un.run_threads(run, 3), run(un.World())]:
        assert found == [pytest.approx(expected)] * 2
