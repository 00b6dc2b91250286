"""Horovod's names: its tutorial's loop against one process on the whole batch, its collectives, its errors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
import unisono.horovod as hvd

STEPS = 3


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data() -> torch.Tensor:
    return torch.randn(STEPS, 2, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def train(passes: int, compression: str, **asked: Any) -> list[torch.Tensor]:
    """As in Horovod's tutorial: every worker begins elsewhere, and gets rank 0's parameters and momenta."""
    model = make(seed=hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=passes,
        **asked,
    )
    for batches in data():
        optimizer.zero_grad()
        for batch in batches[:passes]:
            loss = model(batch[2 * hvd.rank() : 2 * hvd.rank() + 2]).pow(2).mean()
            loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.replica.close()
    return [p.detach().clone() for p in model.parameters()]


def through_collectives(r: int) -> dict[str, float]:
    """The gradient of each rank's x, of a loss that weighs what the ranks have by their number."""
    found = {}
    for name, collect in {
        "mean": hvd.allreduce,
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "gathered": lambda x: hvd.allgather(x)[1 - r],  # the other's
        "from 1": lambda x: hvd.broadcast(x, root_rank=1),
        "sent": lambda x: hvd.alltoall(x.repeat(2))[1 - r],  # the other's, too
    }.items():
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        (collect(x) * (r + 1)).sum().backward()
        assert x.grad is not None
        found[name] = x.grad.item()
    return found


def normalise(r: int) -> list[float]:
    layer = hvd.SyncBatchNorm(1, affine=False)
    return [round(v, 3) for v in layer(torch.tensor([[0.0], [1.0]]) + 2 * r).flatten().tolist()]


def alone(passes: int, factor: int = 1) -> list[torch.Tensor]:
    model = make(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batches in data():
        optimizer.zero_grad()
        for batch in batches[:passes]:
            (factor * model(batch).pow(2).mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def work(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        hvd.rank()
    hvd.init()
    hvd.init()
    hvd.start_timeline(folder / "timeline.json")
    r = hvd.rank()
    x = torch.arange(3.0) + r
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    found: dict[str, Any] = {
        "who": (r, hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        "alike": hvd.is_homogeneous(),
        "mean": hvd.allreduce(x).tolist(),
        "sum": hvd.synchronize(handle).tolist(),
        "largest": hvd.allreduce(x, op=hvd.Max).tolist(),
        "product": hvd.allreduce(x, op=hvd.Product).tolist(),
        "group": [y.tolist() for y in hvd.grouped_allreduce([x, 2 * x])],
        "gathered": hvd.allgather(torch.full((r + 1, 2), float(r))).tolist(),
        "kept": x.tolist(),
        "from 1": hvd.broadcast(x, root_rank=1).tolist(),
        "object": hvd.broadcast_object({"epoch": r + 5}, root_rank=1),
        "objects": hvd.allgather_object(f"rank {r}"),
        "swapped": [y.tolist() for y in hvd.alltoall(torch.arange(3) + 10 * r, splits=[1, 2])],
        "swapped evenly": hvd.alltoall(torch.arange(2) + 10 * r).tolist(),
        "scattered": hvd.reducescatter(torch.arange(3.0) + r, op=hvd.Sum).tolist(),
        "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist(),
        "half": str(hvd.allreduce(x, None, "a name", hvd.Compression.fp16).dtype),
        "later": [
            hvd.synchronize(begun)
            for begun in (
                hvd.allgather_async(x),
                hvd.broadcast_async(x, 1),
                hvd.broadcast_async_(x.clone(), 1),
                hvd.reducescatter_async(x[:2]),
            )
        ],
        "in place": torch.stack(hvd.grouped_allreduce_([x.clone(), x.clone()], op=hvd.Sum)),
        "gradients": through_collectives(r),
        "normalised": normalise(r),
    }
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(x, op=hvd.Adasum)
    with pytest.raises(ValueError, match="add up"):
        hvd.alltoall(x, splits=[1, 1])
    found["trained"] = {passes: train(passes, hvd.Compression.none) for passes in (1, 2)}
    found["fp16"] = train(1, hvd.Compression.fp16)
    found["zero"] = train(1, hvd.Compression.none, strategy="zero(stage=2)")
    found["summed"] = train(1, hvd.Compression.none, op=hvd.Sum, gradient_predivide_factor=2.0)
    hvd.shutdown()
    return found


def test_a_program_for_horovod_trains_as_one_process(tmp_path: Path) -> None:
    every = un.launch(work, workers=2, args=(tmp_path,))
    for r, found in enumerate(every):
        assert found["who"] == (r, 2, r, 2, 0, 1)
        assert found["alike"]
        assert found["mean"] == [0.5, 1.5, 2.5]
        assert found["sum"] == [1, 3, 5]
        assert found["largest"] == [1, 2, 3]
        assert found["product"] == [0, 2, 6]
        assert found["group"] == [[0.5, 1.5, 2.5], [1, 3, 5]]
        assert found["gathered"] == [[0, 0], [1, 1], [1, 1]]
        assert found["kept"] == [r, r + 1, r + 2]
        assert found["from 1"] == [1, 2, 3]
        assert found["object"] == {"epoch": 6}
        assert found["objects"] == ["rank 0", "rank 1"]
        assert found["swapped"] == ([[0, 10], [1, 1]] if r == 0 else [[1, 2, 11, 12], [2, 2]])
        assert found["swapped evenly"] == [r, 10 + r]
        assert found["scattered"] == [[1, 3], [5]][r]  # the first has a row more
        assert found["scaled"] == [2, 6, 10]
        assert found["half"] == "torch.float32"
        assert [y.tolist() for y in found["later"]] == [[0, 1, 2, 1, 2, 3], [1, 2, 3], [1, 2, 3], [[0.5], [1.5]][r]]
        assert found["in place"].tolist() == [[1, 3, 5], [1, 3, 5]]
        # Losses are 1 and 2 times what the ranks have; Horovod takes the mean of gradients, and so do we.
        assert found["gradients"] == {
            "mean": 1.5,
            "sum": 3.0,
            "gathered": [1.0, 0.5][r],
            "from 1": [0.0, 1.5][r],
            "sent": [2.0, 1.0][r],
        }
        assert found["normalised"] == [[-1.342, -0.447], [0.447, 1.342]][r]
        for passes, trained in found["trained"].items():
            for mine, expected in zip(trained, alone(passes), strict=True):
                torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)
        for mine, expected in zip(found["summed"], alone(1, factor=2), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)
        for mine, expected in zip(found["zero"], alone(1), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)
        for mine, expected in zip(found["fp16"], alone(1), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-3)
    names = {event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]}
    assert any("hvd.allreduce" in name for name in names)


def test_settings_that_are_not_offered_are_refused_by_name() -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(make(0).parameters(), lr=0.1)

    with pytest.raises(NotImplementedError, match=r"Adasum of Horovod is not offered here; use hvd\.Average"):
        hvd.DistributedOptimizer(optimizer(), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match=r"zero.* is not offered here; use zero\(stage=2\)"):
        hvd.DistributedOptimizer(optimizer(), strategy="zero(stage=3)")
    with pytest.raises(ValueError, match="'max'; DistributedOptimizer takes"):
        hvd.DistributedOptimizer(optimizer(), op=hvd.Max)
    for owner, name, instead in (
        (hvd, "join", "un.shard"),
        (hvd, "ProcessSet", "split"),
        (hvd.elastic, "ElasticSampler", "un.shard"),
    ):
        with pytest.raises(AttributeError, match=f"{name} of Horovod is not offered here; use .*{instead}"):
            getattr(owner, name)
    with pytest.raises(AttributeError, match="no attribute 'alreduce'"):
        _ = hvd.alreduce  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="lacks 4"):
        hvd.DistributedOptimizer(optimizer(), named_parameters=make(0).named_parameters())
    with pytest.raises(ValueError, match="either"):
        hvd.DistributedOptimizer(optimizer(), compression=hvd.Compression.fp16, strategy="local_sgd")


def test_a_worker_that_comes_is_refused_where_it_would_be_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = un.join()
    monkeypatch.setattr(world, "elastic", SimpleNamespace(is_joining=True, is_inside=True, solo=world))
    monkeypatch.setattr(world, "shards", {})  # of this process, where other tests may have left theirs
    train = hvd.elastic.run(lambda state: state.epoch)
    state = hvd.elastic.TorchState(epoch=3)
    with pytest.raises(RuntimeError, match=r"cannot join the training.* Let un\.shard do it"):
        train(state)
    loader = un.shard(torch.arange(4), batch_size=2)
    assert train(state) == 3
    assert len(loader) == 2


def test_elastic_state_notes_and_restores() -> None:
    model = make(0)
    before = [p.detach().clone() for p in model.parameters()]
    rates = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    state = hvd.elastic.TorchState(model=model, rates=rates, epoch=1)

    @hvd.elastic.run
    def trained(state: hvd.elastic.TorchState, more: int) -> int:
        state.epoch += more
        rates.last_epoch = 7
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        return int(state.epoch)

    assert trained(state, 2) == 3
    state.restore()
    assert state.epoch == 1
    assert state.rates is rates
    assert rates.last_epoch == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    state.epoch = 4
    state.commit()
    state.epoch = 9
    state.restore()
    assert state.epoch == 4
    with pytest.raises(AttributeError, match="no 'batch'; it has epoch"):
        _ = state.batch
