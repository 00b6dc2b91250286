"""Divided streams: what all workers read in an epoch, what a resumed run reads again, and samples per second.

JSONL files, Parquet files and WebDataset tars are written to a temporary folder, `--mb` megabytes of each. Bytes are
those that the workers' processes asked the kernel for (rchar in /proc/self/io), after a pass over a tiny folder. Needs
webdataset and pyarrow; the elastic schedules are those of tests/unit/test_streams_elastic.py.

Keys: bytes_<kind>_<workers>: bytes that all workers read in an epoch / bytes of the data (aim: 1.05 at most);
again_<kind>: bytes that an epoch in two runs, stopped at half, reads more than in one / bytes of data (0.02 at most;
it is up to the buffer of 1024 samples, and for Parquet a row group a lane: 1440 row groups on 48 lanes here);
webdataset_rate: samples per second of un.shard over a WebDataset on 2 workers / of plain WebDataset, split by node
(1.0 at least); ours_per_s, plain_per_s; exactly_once: schedules in which every sample counted once, of `schedules`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "unit"))

from measure import finish, interleaved

KINDS = ("jsonl", "parquet", "webdataset")
BATCH, SAMPLE_BYTES = 64, 3300  # of a tar, with its headers


def write_data(folder: Path, megabytes: float) -> dict[str, int]:
    """The same amount in each format; returns the bytes of each."""
    import pyarrow
    import pyarrow.parquet
    from stream_data import write_jsonl, write_tars

    size = int(megabytes * 1e6)
    write_jsonl(folder / "jsonl", [size // 24 // 330] * 24, width=100)  # about 330 bytes a record
    write_tars(folder / "webdataset", [size // 48 // SAMPLE_BYTES] * 48, payload=3000)
    (folder / "parquet").mkdir()
    draw = random.Random(0)
    for i in range(24):
        rows = size // 24 // 1000
        table = pyarrow.table({"id": list(range(rows)), "text": [draw.randbytes(1000) for _ in range(rows)]})
        path, each = folder / "parquet" / f"{i:03}.parquet", max(1, rows // 60)
        pyarrow.parquet.write_table(table, path, row_group_size=each, write_statistics=False)
    return {kind: sum(file.stat().st_size for file in (folder / kind).iterdir()) for kind in KINDS}


def open_data(folder: str, kind: str) -> Any:
    import unisono as un

    if kind != "webdataset":
        return un.records(Path(folder) / kind)
    import webdataset as wds

    return wds.WebDataset(sorted(map(str, (Path(folder) / kind).glob("*.tar"))), shardshuffle=100)


def count_bytes() -> int:
    """What this process has read so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def read_epoch(folder: str, tiny: str, kind: str, first: int, stop: int | None, state: Any) -> tuple[int, int, Any]:
    """Bytes that this worker reads for the batches from `state` to `stop`; the batches; and the state after them."""
    import unisono as un

    world = un.join()
    for _ in un.shard(open_data(tiny, kind), 4, collate_fn=len, world=world, name="tiny"):
        pass  # imports, and whatever else is read once
    before = count_bytes()
    shard = un.shard(open_data(folder, kind), BATCH, collate_fn=len, world=world, name="data")
    if state is not None:
        shard.load_state_dict(state)
    batches = first
    for _ in shard:
        batches += 1
        if batches == stop:
            return count_bytes() - before, batches, shard.state_dict()
    return count_bytes() - before, batches, None


def measure_bytes(folder: str, tiny: str, kinds: list[str], sizes: dict[str, int]) -> dict[str, float]:
    import unisono as un

    found: dict[str, float] = {}

    def run(kind: str, workers: int, *options: Any) -> tuple[int, int, Any]:
        parts = un.launch(read_epoch, workers=workers, args=(folder, tiny, kind, *options), threads=1)
        return sum(part[0] for part in parts), parts[0][1], parts[0][2]

    for kind in kinds:
        whole, batches = 0, 0
        for workers in (1, 2, 4):
            read, batches, _ = run(kind, workers, 0, None, None)
            found[f"bytes_{kind}_{workers}"] = read / sizes[kind]
            whole = read if workers == 2 else whole
        half, _, state = run(kind, 2, 0, batches // 2, None)
        rest, _, _ = run(kind, 2, batches // 2, None, state)
        found[f"again_{kind}"] = (half + rest - whole) / sizes[kind]
    return found


def compare_rates(folder: str, repeats: int) -> dict[str, float]:
    """Seconds of an epoch on this worker, in turn: un.shard, and WebDataset with its own split."""
    import webdataset as wds

    import unisono as un

    world = un.join()
    urls = sorted(map(str, (Path(folder) / "webdataset").glob("*.tar")))
    ours = wds.WebDataset(urls, shardshuffle=100).decode().to_tuple("id", "bin")
    shard = un.shard(ours, BATCH, collate_fn=len, world=world)
    split = wds.WebDataset(urls, shardshuffle=100, nodesplitter=wds.split_by_node).decode().to_tuple("id", "bin")
    plain = split.batched(BATCH // world.size, collation_fn=len)

    def read(batches: Any) -> None:
        for _ in batches:
            pass
        world.barrier()

    sides = {"ours": partial(read, shard), "plain": partial(read, plain)}
    return interleaved(sides, repeats=repeats, warmup=1, before=world.barrier)


def count_exact(schedules: int) -> int:
    """Of random elastic schedules, those in which each sample counted once."""
    import test_streams_elastic as elastic
    import torch._dynamo  # not in the threads of a run  # noqa: F401
    from elastic_threads import Run

    exact = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        elastic.write_jsonl(folder / "jsonl", elastic.COUNTS)
        elastic.write_parquet(folder / "parquet", elastic.COUNTS, rows=12)
        expected = {kind: elastic.reference(folder, kind) for kind in ("jsonl", "parquet")}
        for seed in range(schedules):
            draw, kind = random.Random(seed), ("jsonl", "parquet")[seed % 2]
            workers = draw.choice([2, 3, 4])
            program = partial(elastic.train, folder=folder, kind=kind)
            try:
                elastic.check(Run(program, workers, elastic.draw_events(draw, workers)).play(), expected[kind])
                exact += 1
            except AssertionError as error:
                print(f"schedule {seed}: {str(error)[:500]}", file=sys.stderr)
    return exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=192.0, help="megabytes of data in each format")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="whose bytes are counted")
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each side for samples per second")
    parser.add_argument("--schedules", type=int, default=50)
    asked = parser.parse_args()
    import unisono as un

    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as tiny:
        sizes = write_data(Path(data), asked.mb)
        write_data(Path(tiny), 0.6)
        results: dict[str, Any] = measure_bytes(data, tiny, asked.kinds, sizes)
        seconds = un.launch(compare_rates, workers=2, args=(data, asked.repeats), threads=1)[0]
        samples = 48 * (int(asked.mb * 1e6) // 48 // SAMPLE_BYTES)
    results |= {f"{side}_per_s": samples / taken for side, taken in seconds.items()}
    results["webdataset_rate"] = seconds["plain"] / seconds["ours"]
    results |= {"exactly_once": count_exact(asked.schedules), "schedules": asked.schedules}
    finish({"benchmark": "streams", "mb": asked.mb, **results})


if __name__ == "__main__":
    main()
