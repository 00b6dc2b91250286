"""Divided streams: each sample read by one worker, exactly once an epoch, resumed where they were."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_data import join_batches, read_ids, take_ids, write_csv, write_jsonl, write_parquet, write_tars
from torch.utils.data import DataLoader, IterableDataset

import unisono as un
from unisono.training.data.parts import Part
from unisono.world.virtual import run_threads

COUNTS = [23, 0, 31, 17, 40, 9]  # 120 samples; one file has none
SIZES = (1, 2, 3, 4)


class Own(IterableDataset[int]):
    """A stranger's dataset that says what its parts are; parts of different lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.read: list[int] = []  # numbers that were read

    def __iter__(self) -> Iterator[int]:
        return iter(range(sum(self.lengths)))

    def parts(self) -> list[str]:
        return [str(i) for i in range(len(self.lengths))]

    def read_part(self, name: str, at: int | None) -> Iterator[tuple[int, int]]:
        first = sum(self.lengths[: int(name)])
        for i in range(at or 0, self.lengths[int(name)]):
            self.read.append(first + i)
            yield first + i, i + 1


def make_jsonl(folder: Path) -> Any:
    write_jsonl(folder, COUNTS, width=600)
    return lambda: un.records(folder)


def make_csv(folder: Path) -> Any:
    write_csv(folder, COUNTS)
    return lambda: un.records(str(folder / "*.csv"))


def make_parquet(folder: Path) -> Any:
    write_parquet(folder, COUNTS)
    return lambda: un.records(folder, columns=["id"])


def make_own(folder: Path) -> Any:
    return lambda: Own(COUNTS)


def make_webdataset(folder: Path) -> Any:
    wds = pytest.importorskip("webdataset")
    write_tars(folder, [n or 1 for n in COUNTS])
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    return lambda: wds.WebDataset(urls, shardshuffle=100).shuffle(50).map(lambda s: {"id": s["id"]})


def make_hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    write_jsonl(folder, [n or 1 for n in COUNTS])
    files = sorted(str(path) for path in folder.glob("*.jsonl"))

    def read(files: list[str]) -> Iterator[dict[str, Any]]:
        for path in files:
            with open(path, encoding="utf-8") as lines:
                yield from map(json.loads, lines)

    return lambda: datasets.IterableDataset.from_generator(read, gen_kwargs={"files": files}).filter(lambda x: True)


def make_litdata(folder: Path) -> Any:
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True, exist_ok=True)
    writer = BinaryWriter(str(folder), chunk_size=11)
    for i in range(120):
        writer[i] = {"id": i}
    writer.done()
    writer.merge()
    return lambda: litdata.StreamingDataset(str(folder), shuffle=True)


def make_mosaic(folder: Path) -> Any:
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=200) as writer:
        for i in range(120):
            writer.write({"id": i})
    dataset = streaming.StreamingDataset(local=str(folder), batch_size=1)  # one a process
    return lambda: dataset


MAKERS: dict[str, Callable[[Path], Any]] = {
    "jsonl": make_jsonl,
    "csv": make_csv,
    "parquet": make_parquet,
    "own": make_own,
    "webdataset": make_webdataset,
    "hugging face": make_hugging_face,
    "litdata": make_litdata,
    "mosaic": make_mosaic,
}


def count_samples(kind: str) -> int:
    return sum(n or 1 for n in COUNTS) if kind in ("webdataset", "hugging face") else 120


@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize("kind", MAKERS)
def test_each_sample_comes_once_and_batches_are_the_same_at_every_size(kind: str, tmp_path: Path) -> None:
    make, n = MAKERS[kind](tmp_path / "data"), count_samples(kind)
    found = {}
    for size in SIZES:
        ranks = run_threads(lambda w: read_ids(w, make(), 7, shuffle=True, buffer=20), size)
        found[size] = join_batches(ranks)
        assert sorted(x for batch in found[size] for x in batch) == list(range(n)), size
        assert all(len(batch) == 7 for batch in found[size][:-1])
    assert all(found[size] == found[1] for size in SIZES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MAKERS)
def test_a_stream_is_resumed_at_any_batch_at_another_size(kind: str, tmp_path: Path) -> None:
    make, n = MAKERS[kind](tmp_path / "data"), count_samples(kind)
    draw = random.Random(1)
    for before, after in ((1, 3), (3, 2), (2, 2)):
        stop = draw.randint(1, n // 7)

        def begin(world: un.World, stop: int = stop) -> tuple[list[list[int]], dict[str, Any]]:
            shard = un.shard(make(), 7, shuffle=True, seed=5, buffer=20, collate_fn=take_ids, world=world)
            got = []
            for batch in shard:
                got.append(batch if world.weight else [])
                if len(got) == stop:
                    return got, shard.state_dict()
            raise AssertionError

        def resume(world: un.World, state: dict[str, Any]) -> list[list[int]]:
            shard = un.shard(make(), 7, shuffle=True, seed=5, buffer=20, collate_fn=take_ids, world=world)
            shard.load_state_dict(state)
            return [batch if world.weight else [] for batch in shard]

        first = run_threads(begin, before)
        states = [state for _, state in first]
        assert all(state == states[0] for state in states)
        state = json.loads(json.dumps(states[0]))  # plain values only
        rest = run_threads(lambda w, state=state: resume(w, state), after)
        whole = join_batches(run_threads(lambda w: read_ids(w, make(), 7, shuffle=True, seed=5, buffer=20), 2))
        assert join_batches([got for got, _ in first]) + join_batches(rest) == whole


def test_a_checkpoint_keeps_the_place_of_a_stream(tmp_path: Path) -> None:
    n = write_jsonl(tmp_path / "data", [30, 20, 31], width=300)

    def go(world: un.World, batches: int) -> list[list[int]]:
        model = torch.nn.Linear(1, 1)
        replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        shard = un.shard(un.records(tmp_path / "data"), 9, buffer=20, collate_fn=take_ids, world=world)
        if batches == 0:
            un.load(tmp_path / "run", replica)
        got = []
        for batch in shard:
            got.append(batch if world.weight else [])
            if len(got) == batches:
                un.save(tmp_path / "run", replica)
                break
        return got

    first = join_batches(run_threads(lambda world: go(world, 4), 2))
    rest = join_batches(run_threads(lambda world: go(world, 0), 3))
    assert sorted(x for batch in first + rest for x in batch) == list(range(n))


def test_what_was_seen_is_not_read_again_and_nobody_reads_what_another_reads() -> None:
    lengths = [100] * 12
    sources = [Own(lengths) for _ in range(2)]

    def begin(world: un.World) -> dict[str, Any]:
        shard = un.shard(sources[world.rank], 20, buffer=48, collate_fn=take_ids, world=world)
        batches = iter(shard)
        for _ in range(30):
            next(batches)
        return shard.state_dict()

    state = run_threads(begin, 2)[0]
    seen = sources[0].read + sources[1].read
    assert len(seen) == len(set(seen)) <= 600 + 48
    again = [Own(lengths) for _ in range(3)]

    def resume(world: un.World) -> None:
        shard = un.shard(again[world.rank], 20, buffer=48, collate_fn=take_ids, world=world)
        shard.load_state_dict(state)
        for _ in shard:
            pass

    run_threads(resume, 3)
    rest = [x for source in again for x in source.read]
    assert len(rest) == len(set(rest)) <= 600 + 48  # the window that was under way is read once more
    assert set(seen) | set(rest) == set(range(1200))


def test_epochs_are_shuffled_in_other_ways_and_the_weights_make_means_exact(tmp_path: Path) -> None:
    n = write_jsonl(tmp_path, [50, 40, 31], width=900)

    def go(world: un.World) -> tuple[list[list[int]], float]:
        shard = un.shard(un.records(tmp_path), 10, collate_fn=take_ids, world=world)
        orders = [[x for batch in shard for x in batch] for _ in range(2)]
        total = 0.0
        for batch in shard:
            mean = torch.tensor([float(sum(batch) / len(batch))], dtype=torch.float64) * world.weight
            total += float(world.all_reduce(mean).wait())
        return orders, total

    full, rest = divmod(n, 10)
    one, three = run_threads(go, 1), run_threads(go, 3)
    assert one[0][0][0] != one[0][0][1] != list(range(n))
    assert three[0][1] == pytest.approx(one[0][1])
    assert full
    assert rest


def test_loader_processes_read_parts_of_their_own(tmp_path: Path) -> None:
    n = write_jsonl(tmp_path, [30, 20, 25], width=900)
    source = un.records(tmp_path)
    plain = un.World()
    expected = read_ids(plain, source, 8)
    loader = DataLoader(un.records(tmp_path), batch_size=8, num_workers=2, collate_fn=take_ids)
    shard = un.shard(loader, world=un.World())
    batches = iter(shard)
    first = [next(batches) for _ in range(4)]
    state = shard.state_dict()
    del batches
    other = un.shard(un.records(tmp_path), 8, num_workers=2, collate_fn=take_ids, world=un.World())
    other.load_state_dict(state)
    assert first + list(other) == expected
    assert sum(map(len, expected)) == n


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
def test_a_stateful_dataloader_saves_and_resumes_records(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    n = write_jsonl(tmp_path, [30, 20, 25], width=900)

    def make() -> Any:
        return stateful.StatefulDataLoader(un.records(tmp_path), batch_size=5, num_workers=2, collate_fn=take_ids)

    loader = make()
    batches = iter(loader)
    first = [next(batches) for _ in range(6)]
    state = loader.state_dict()
    del batches
    loader = make()
    loader.load_state_dict(state)
    rest = list(loader)
    assert sorted(x for batch in first + rest for x in batch) == list(range(n))
    taken = un.shard(make(), world=un.World())  # and is taken as the DataLoader that it is
    assert sorted(x for batch in taken for x in batch) == list(range(n))


class Stateful(IterableDataset[int]):
    """A stream that cannot be cut, but knows its place."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.read = n, 0, 0

    def __iter__(self) -> Iterator[int]:
        at, self.at = self.at, 0
        while at < self.n:
            self.at = at = at + 1
            self.read += 1
            yield at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_that_cannot_be_cut_uses_its_own_state() -> None:
    shard = un.shard(Stateful(50), 8, collate_fn=take_ids, world=un.World())
    batches = iter(shard)
    first = [next(batches) for _ in range(3)]
    source = Stateful(50)
    other = un.shard(source, 8, collate_fn=take_ids, world=un.World())
    other.load_state_dict(shard.state_dict())
    assert [x for batch in first + list(other) for x in batch] == list(range(50))
    assert source.read == 26
    assert [x for batch in other for x in batch] == list(range(50))  # the next epoch begins at its start


class Tensors(Own):
    """A local class cannot be sent to loader processes, which Python 3.14 no longer forks."""

    def read_part(self, name: str, at: int | None) -> Iterator[tuple[Any, int]]:
        for i, after in super().read_part(name, at):
            yield (torch.full((2, 3), float(i), dtype=torch.bfloat16), {"n": torch.tensor(i)}), after


def test_tensors_come_from_loader_processes_as_they_are() -> None:
    def read(workers: int) -> list[Any]:
        return list(un.shard(Tensors([9, 8, 7]), 5, num_workers=workers, shuffle=True, world=un.World()))

    for (x, about), (y, other) in zip(read(0), read(2), strict=True):
        assert x.dtype == y.dtype == torch.bfloat16
        assert torch.equal(x, y)
        assert torch.equal(about["n"], other["n"])


def test_every_batch_has_the_shares_of_a_mix(tmp_path: Path) -> None:
    small, large = write_jsonl(tmp_path / "a", [400, 400]), write_jsonl(tmp_path / "b", [1300, 1400])

    def make(stop: Any) -> Any:
        named = {name: un.records(tmp_path / name, read=lambda r, name=name: (name, r["id"])) for name in "ab"}
        return un.mix(named, {"a": 1, "b": 3}, stop=stop)

    def go(world: un.World, stop: str) -> list[list[Any]]:
        return list(un.shard(make(stop), 16, buffer=64, collate_fn=list, world=world))

    one = go(un.World(), "all")
    assert sorted(x for batch in one for x in batch) == [("a", i) for i in range(small)] + [
        ("b", i) for i in range(large)
    ]
    shares = [sum(name == "a" for name, _ in batch) for batch in one[:150]]
    assert all(3 <= share <= 5 for share in shares)
    assert abs(sum(shares) / len(shares) - 4) < 0.2
    two = run_threads(lambda world: go(world, "all"), 2)
    assert [sorted(a + b) for a, b in zip(*two, strict=True)] == [sorted(batch) for batch in one]
    first = [x for batch in go(un.World(), "first") for x in batch]
    assert len(set(first)) == len(first)
    assert sum(name == "a" for name, _ in first) == small
    assert abs(sum(name == "b" for name, _ in first) - 3 * small) < 600  # a buffer


@pytest.mark.parametrize("rest", ["drop", "pad"])
def test_packed_sequences_hold_every_token_once(rest: Any, tmp_path: Path) -> None:
    draw, tokens = random.Random(0), 1
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / "0.jsonl", "w") as file:
        for _ in range(60):
            n = draw.choice([1, 2, 3, 30, 700])
            file.write(json.dumps({"input_ids": list(range(tokens, tokens + n))}) + "\n")
            tokens += n

    def make() -> Any:
        return un.pack(un.records(tmp_path / "a"), 16, eos=0, rest=rest, pad=-1)

    shard = un.shard(make(), 4, shuffle=False, buffer=16, world=un.World())
    whole = [row.tolist() for batch in shard for row in batch]
    given = [x for row in whole for x in row if x > 0]
    lanes = len(make().parts())
    assert all(len(row) == 16 for row in whole)
    assert len(given) == len(set(given))
    if rest == "pad":
        assert sorted(given) == list(range(1, tokens))
    assert tokens - 1 - len(given) <= lanes * 15

    resumed = []
    for stop in (1, 5, 17):
        shard = un.shard(make(), 4, shuffle=False, buffer=16, world=un.World())
        batches = iter(shard)
        first = [next(batches) for _ in range(stop)]
        other = un.shard(make(), 4, shuffle=False, buffer=16, world=un.World())
        other.load_state_dict(shard.state_dict())
        resumed.append([row.tolist() for batch in [*first, *other] for row in batch])
    assert resumed == [whole] * 3


def test_a_file_that_changes_between_epochs_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path, [10, 12])
    shard = un.shard(un.records(tmp_path), 4, collate_fn=take_ids, world=un.World())
    list(shard)
    state = shard.state_dict()
    with open(tmp_path / "001.jsonl", "a") as file:
        file.write('{"id": 99}\n')
    with pytest.raises(RuntimeError, match=r"001\.jsonl has changed since"):
        list(shard)
    other = un.shard(un.records(tmp_path), 4, collate_fn=take_ids, world=un.World())
    with pytest.raises(ValueError, match=r"001\.jsonl.*was missing then, or had another size"):
        other.load_state_dict(state)


def test_a_file_that_was_written_anew_with_the_same_length_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path, [10])
    shard = un.shard(un.records(tmp_path), 4, collate_fn=take_ids, world=un.World())
    os.utime(tmp_path / "000.jsonl", ns=(1, 1))
    with pytest.raises(RuntimeError, match="another time of change"):
        list(shard)


class Failing(Own):
    def read_part(self, name: str, at: int | None) -> Iterator[tuple[int, int]]:
        for sample, after in super().read_part(name, at):
            if sample == 17:
                raise OSError("the disk is gone")
            yield sample, after


def test_an_error_in_the_source_is_raised_on_all_ranks() -> None:
    def go(world: un.World) -> str:
        try:
            read_ids(world, Failing([10] * 6), buffer=12)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = run_threads(go, 3)
    assert (
        sorted(found)
        == ["OSError: the disk is gone"]
        + ["RuntimeError: rank 1 could not read its part of the stream: OSError: the disk is gone"] * 2
    )


def test_ranks_that_have_other_files_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "0", [10, 10])
    write_jsonl(tmp_path / "1", [10, 11])

    def go(world: un.World) -> None:
        read_ids(world, un.records(tmp_path / str(world.rank)))

    with pytest.raises(ValueError, match="different files on the ranks"):
        run_threads(go, 2)


def test_fewer_parts_than_workers_are_read_by_all_and_that_is_said(tmp_path: Path) -> None:
    n = write_parquet(tmp_path, [20], rows=10)

    with pytest.warns(UserWarning, match=r"every rank reads all of the stream.*2 part\(s\).*3 workers"):
        found = run_threads(lambda world: read_ids(world, un.records(tmp_path)), 3)
    assert sorted(x for batch in join_batches(found) for x in batch) == list(range(n))


def test_more_workers_than_lanes_are_told_to_raise_them() -> None:
    with pytest.raises(ValueError, match="Give lanes=3 or more"):
        run_threads(lambda world: read_ids(world, Own([5] * 9), lanes=2), 3)


def test_known_lengths_give_the_shard_a_length_and_others_none(tmp_path: Path) -> None:
    write_parquet(tmp_path / "p", [20, 21])
    write_jsonl(tmp_path / "j", [20])
    shard = un.shard(un.records(tmp_path / "p"), 6, collate_fn=take_ids, world=un.World())
    assert len(shard) == 7
    assert len(list(shard.steps(9))) == 9
    with pytest.raises(TypeError, match="not known beforehand"):
        len(un.shard(un.records(tmp_path / "j"), 6, world=un.World()))


def test_values_with_line_breaks_are_refused_or_read_by_file(tmp_path: Path) -> None:
    n = write_csv(tmp_path, [400, 300], quoted=True)
    with pytest.raises(ValueError, match="newlines_in_values=True"):
        read_ids(un.World(), un.records(tmp_path))
    source = un.records(tmp_path, newlines_in_values=True)
    assert len(source.parts()) == 2
    assert sorted(x for batch in read_ids(un.World(), source) for x in batch) == list(range(n))


def test_files_at_an_address_are_read_through_fsspec() -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    lines = [json.dumps({"id": i, "text": "z" * 200}) for i in range(300)]
    memory.pipe("/streams/a.jsonl", ("\n".join(lines[:100]) + "\n").encode())
    memory.pipe("/streams/b.jsonl", "\n".join(lines[100:]).encode())  # without a last line break
    found = run_threads(lambda world: read_ids(world, un.records("memory://streams/*.jsonl")), 2)
    assert sorted(x for batch in join_batches(found) for x in batch) == list(range(300))
    memory.rm("/streams", recursive=True)


def test_a_local_address_is_a_file_and_the_same_records_are_the_same_shard(tmp_path: Path) -> None:
    n = write_parquet(tmp_path, [20, 21])
    world = un.World()
    shards = [un.shard(un.records(f"file://{tmp_path}/*.parquet"), 6, collate_fn=take_ids, world=world) for _ in "ab"]
    assert shards[0] is shards[1]
    assert sorted(x for batch in shards[0] for x in batch) == list(range(n))
    assert un.shard(un.records(tmp_path), 6, collate_fn=take_ids, world=world) is not shards[0]


def test_a_hugging_face_stream_that_shuffles_itself_is_read_whole_and_told_what_to_say(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"id": list(range(30))}).to_iterable_dataset(num_shards=3)

    shuffled = [rows.shuffle(seed=3, buffer_size=10) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"Leave .shuffle out and say un.shard\(dataset, shuffle=True"):
        found = run_threads(lambda world: read_ids(world, shuffled[world.rank]), 2)
    assert sorted(x for batch in join_batches(found) for x in batch) == list(range(30))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda d: un.records(d / "none.txt"), "Expected files that end in"),
        (lambda d: un.records(d / "*.jsonl"), "found no files at"),
        (lambda d: un.mix([]), "Expected a dict"),
        (lambda d: un.mix({"a": Own([3])}, {"b": 1}), "Expected a number above 0 for each"),
        (lambda d: un.mix({"a": [1, 2]}), "cannot be divided: it has no parts"),
        (lambda d: un.mix({"a": un.mix({"b": Own([3])})}), "it is a mix itself"),
        (lambda d: un.mix({"a": Own([3])}, stop="soon"), "Expected 'all' or 'first'"),
        (lambda d: un.pack(Own([3]), 0), "Expected a whole number, 1 or more"),
        (lambda d: un.pack(un.mix({"a": Own([3])}), 4), "pack each source"),
        (lambda d: Own([]), "Expected at least one part"),
        (lambda d: Own([0, 0]), "got no samples"),
    ],
)
def test_bad_sources_are_refused_with_what_was_got(make: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=says):
        list(un.shard(make(tmp_path), 2, world=un.World()))


def test_settings_that_decide_who_reads_a_sample_are_refused() -> None:
    for options in ({"balance": True}, {"partition": "strided"}):
        with pytest.raises(ValueError, match="where a sample lies decides"):
            un.shard(Own([5]), 2, world=un.World(), **options)


def test_a_part_that_has_fewer_samples_than_it_says_is_named() -> None:
    class Short(Own):
        def parts(self) -> Any:
            return [Part(name, 5, 5) for name in super().parts()]

        def read_part(self, name: Any, at: int | None) -> Iterator[tuple[int, int]]:
            return super().read_part(name.name, at)

    with pytest.raises(ValueError, match="1: 4 samples were found where the index says 5"):
        read_ids(un.World(), Short([5, 4]))
