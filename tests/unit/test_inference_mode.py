"""Collectives inside `torch.inference_mode()`, and outside it again."""

from __future__ import annotations

import torch

import unisono as un
from unisono.world import World

LARGE = 100_000


def exchange(world: World) -> list[float]:
    """Some of each kind, by their first values."""
    x, y = torch.full((3,), world.rank + 1.0), torch.full((LARGE,), world.rank + 1.0)
    rows = torch.full((2 * world.size, 2), world.rank + 1.0)
    found = [
        world.all_reduce(x, "sum").wait(),
        world.all_reduce([y], "sum").wait()[0],
        *world.all_gather(rows).wait(),
        world.reduce_scatter(rows, "sum").wait(),
        world.all_to_all(list(rows.split(2))).wait()[-1],
        world.broadcast(rows, 1).wait(),
    ]
    assert found[0] is x
    assert found[-1] is rows
    assert float(x[0]) == float(y[-1]) == 3.0
    world.barrier()
    [first, _] = world.gather_objects({"x": x})
    return [float(z.reshape(-1)[0]) for z in found] + [float(first["x"][0])]


def test_collectives_give_the_same_inside_and_after_inference_mode() -> None:
    def work(world: World) -> None:
        expected = [3.0, 3.0, 1.0, 2.0, 3.0, 2.0, 2.0, 3.0]
        channels = []
        with torch.inference_mode():
            assert exchange(world) == expected
            channels.append(world.channel(inline=False))
            assert exchange(channels[0]) == expected
        for other in (world, channels[0]):  # memory that was made inside is used again
            for _ in range(40):
                assert exchange(other) == expected

    un.run_threads(work, 2)
