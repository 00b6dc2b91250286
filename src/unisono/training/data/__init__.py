"""`un.shard`: which samples are mine. Even, stratified, balanced by cost; each sample once an epoch."""

from __future__ import annotations

from unisono.training.data.parts import mix, pack
from unisono.training.data.record_files import records
from unisono.training.data.shards import Shard, shard

__all__ = ["Shard", "mix", "pack", "records", "shard"]
