"""Small data in many formats, in which every sample has a number, and readers of it."""

from __future__ import annotations

import csv
import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import unisono as un


def write_jsonl(folder: Path, counts: list[int], *, width: int = 60, seed: int = 0) -> int:
    """Files with so many records each, of up to `width` further characters; returns how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, number = random.Random(seed), 0
    for i, n in enumerate(counts):
        with open(folder / f"{i:03}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(n):
                file.write(json.dumps({"id": number, "text": "é" * draw.randint(0, width)}) + "\n")
                number += 1
    return number


def write_csv(folder: Path, counts: list[int], *, quoted: bool = False) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for i, n in enumerate(counts):
        with open(folder / f"{i:03}.csv", "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["id", "text"])
            for _ in range(n):
                rows.writerow([number, "two\nlines, so" if quoted and number % 3 == 0 else "x" * (number % 50)])
                number += 1
    return number


def write_parquet(folder: Path, counts: list[int], *, rows: int = 7) -> int:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for i, n in enumerate(counts):
        table = pyarrow.table({"id": list(range(number, number + n)), "text": ["y" * (k % 9) for k in range(n)]})
        pyarrow.parquet.write_table(table, folder / f"{i:03}.parquet", row_group_size=rows)
        number += n
    return number


def write_tars(folder: Path, counts: list[int], *, payload: int = 40) -> int:
    """Tars of samples with two files each, as WebDataset has them."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for i, n in enumerate(counts):
        with tarfile.open(folder / f"{i:03}.tar", "w") as tar:
            for _ in range(n):
                for ending, data in (("id", str(number).encode()), ("bin", bytes(number % payload))):
                    about = tarfile.TarInfo(f"s{number:06}.{ending}")
                    about.size = len(data)
                    tar.addfile(about, io.BytesIO(data))
                number += 1
    return number


def take_id(sample: Any) -> int:
    """The number of a sample, whatever form it has."""
    if isinstance(sample, dict):
        return int(sample["id"])
    return int(sample)


def take_ids(samples: list[Any]) -> list[int]:
    return [take_id(sample) for sample in samples]


def read_ids(world: un.World, data: Any, batch_size: int = 6, **options: Any) -> list[list[int]]:
    """The numbers of this rank's samples in each batch of an epoch, without stand-ins."""
    shard = un.shard(data, batch_size, collate_fn=take_ids, world=world, **options)
    return [batch if world.weight else [] for batch in shard]


def join_batches(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Each global batch, sorted."""
    return [sorted(x for part in parts for x in part) for parts in zip(*ranks, strict=True)]
