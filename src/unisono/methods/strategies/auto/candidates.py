"""What there is to choose from, where the user names nothing: methods that train like all-reduce."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from unisono.methods.exchange.reduction import overlap_pays
from unisono.methods.spec import build
from unisono.methods.strategy import Strategy
from unisono.world import World

_SMALL_BUCKET, _LARGE_BUCKET = 4 << 20, 100 << 20
_COMPRESSING = ["bf16", "bytegrad", "powersgd(rank=4)"]  # those that lost no accuracy on our tasks as they are
_OVER_HOSTS = ["bf16", "hierarchical(bytegrad)", "powersgd(rank=4)", "hierarchical(powersgd(rank=4))"]


def list_candidates(model: nn.Module, world: World) -> list[Strategy]:
    """Exact ones first: of those about as fast, the first one named is taken."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    nbytes = sum(p.numel() * p.element_size() for p in trainable)
    specs = ["allreduce(order=ready)"]
    if overlap_pays(world):
        if nbytes > 2 * _SMALL_BUCKET:
            specs.append(f"allreduce(order=ready, bucket_bytes={_SMALL_BUCKET})")
        specs.append(f"allreduce(overlap=False, bucket_bytes={_LARGE_BUCKET})")
    if not any(p.is_complex() for p in trainable):
        specs += _OVER_HOSTS if 1 < len(set(world.hosts)) < world.size else _COMPRESSING
    return [build(spec, kind="strategy") for spec in specs]


def with_settings(strategy: Strategy, **settings: Any) -> Strategy:
    """The strategy with these settings, as far as it has them."""
    known: list[str] = [f.name for f in dataclasses.fields(strategy)] if dataclasses.is_dataclass(strategy) else []
    given = {name: value for name, value in settings.items() if name in known}
    changed: Strategy = dataclasses.replace(strategy, **given) if given else strategy  # type: ignore[type-var]
    return changed
