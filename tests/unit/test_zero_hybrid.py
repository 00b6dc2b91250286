"""ZeRO inside groups of ranks with a mean between them, in worlds of threads, against plain PyTorch in one process, in
fp64."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_zero import adam, assert_same, loss_of, reference, text, train, words
from torch import Tensor, nn

import unisono as un
from pairs import cover_pairs
from unisono.world import World
from unisono.world.virtual import run_threads

HOSTS = ["a", "a", "b", "b"]
stages = pytest.mark.parametrize("stage", [1, 2, 3])


def train_under(spec: str, size: int, hosts: list[str] | None = None, *, steps: int = 4, clip: float = 0.5) -> None:
    """Train under a spec, and compare with one process."""

    def work(world: World) -> dict[str, Tensor]:
        model = text()
        optimizer = adam(model)
        un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(steps), clip)
        return dict(model.state_dict())

    for found in run_threads(work, size, hosts=hosts):
        assert_same(found, reference(size, steps, clip))


@pytest.mark.parametrize(
    ("stage", "overlap", "across"),
    cover_pairs([1, 2, 3], [False, True], ["", ", across=dense", ", across=warmup(powersgd, steps=9)"]),
)
def test_two_hosts_of_two_train_as_one_process(stage: int, overlap: bool, across: str) -> None:
    """Clipping too: a norm counts every shard once, though two ranks have each."""
    train_under(f"zero(stage={stage}, within=host, unit_bytes=1500, overlap={overlap}{across})", 4, HOSTS)


@pytest.mark.parametrize(("size", "within"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 1)])
def test_groups_of_any_size_train_as_one_process(size: int, within: int) -> None:
    train_under(f"zero(stage={1 + size % 3}, within={within}, unit_bytes=1500)", size)


def test_the_data_axis_of_a_mesh_has_groups_too(tmp_path: Path) -> None:
    def work(world: World) -> dict[str, Tensor]:
        mesh = un.mesh(data=4, world=world)
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "zero(stage=3, within=host, unit_bytes=1500)", world=mesh.data)
        for t in range(4):
            optimizer.zero_grad()
            loss_of(model, words(t, world.rank)).backward()
            mesh.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        un.save(tmp_path, replica)
        return dict(model.state_dict())

    wanted = reference(4, 4, 0.5)
    for found in run_threads(work, 4, hosts=HOSTS):
        assert_same(found, wanted)
    assert_same(dict(un.read_checkpoint(tmp_path)["model"]), wanted)


@pytest.mark.parametrize("spec", ["stage=2, optimizer_on=cpu", "stage=3, optimizer_on=cpu, params_on=cpu"])
def test_a_step_off_the_device_has_the_mean_over_all_groups(spec: str) -> None:
    train_under(f"zero({spec}, within=host, unit_bytes=1500)", 4, HOSTS)


@stages
def test_memory_is_that_of_a_world_of_one_group(stage: int) -> None:
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.randn(4, 64), torch.randn(4, 64))
    eight, two = (
        un.memory(model, optimizer, batch=batch, loss=nn.functional.mse_loss, workers=n, device_memory="8GiB")
        for n in (8, 2)
    )
    assert eight.need(f"zero(stage={stage}, within=2)") == two.need(f"zero(stage={stage})")
    more = eight.need(f"zero(stage={stage}, within=2, across=error_feedback(bf16))")
    assert more.buffers == sum(2 * 4 * p.numel() for p in model.parameters()) // 2, "a residual of a shard, twice"
    kept = eight.need(f"zero(stage={stage}, reducer=error_feedback(bf16))")
    assert kept.buffers == sum(2 * 4 * p.numel() for p in model.parameters()), "of everything"


def test_groups_may_have_ranks_of_several_hosts_and_hosts_need_not_be_in_order() -> None:
    train_under("zero(stage=3, within=2, unit_bytes=1500)", 4, ["a", "b", "a", "b"])
    train_under("zero(stage=2, within=host, unit_bytes=1500)", 4, ["a", "b", "a", "b"])


@stages
@pytest.mark.parametrize("how", ["accumulate", "no_sync", "short"])
def test_passes_add_up_and_cross_once_a_window(stage: int, how: str) -> None:
    def work(world: World) -> tuple[dict[str, Tensor], int]:
        model = text()
        optimizer = adam(model)
        spec = f"zero(stage={stage}, within=host, unit_bytes=2500, accumulate={1 if how == 'no_sync' else 2})"
        replica: Any = un.parallel(model, optimizer, spec, world=world)
        for t in range(2):
            optimizer.zero_grad()
            if how == "no_sync":
                with replica.no_sync():
                    loss_of(model, words(10 + t, world.rank)).backward()
            elif how == "accumulate":
                loss_of(model, words(10 + t, world.rank)).backward()
            loss_of(model, words(t, world.rank)).backward()
            optimizer.step()
        crossed = sum(record.tag.startswith("across/") for record in world.ledger.records)
        assert crossed == 2 * len(replica.units), "once a unit and window"
        return dict(model.state_dict()), replica.step

    model = text()
    optimizer = adam(model)
    for t in range(2):
        optimizer.zero_grad()
        if how != "short":
            loss_of(model, torch.cat([words(10 + t, r) for r in range(4)])).backward()
        loss_of(model, torch.cat([words(t, r) for r in range(4)])).backward()
        optimizer.step()
    for found, step in run_threads(work, 4, hosts=HOSTS):
        assert step == 2
        assert_same(found, dict(model.state_dict()))


@stages
@pytest.mark.parametrize("across", ["", ", across=topk(k=0.2)"])
def test_an_overflow_on_one_rank_skips_the_step_of_all(stage: int, across: str) -> None:
    """With a GradScaler; and what the reducer between groups had still to send is what it was."""

    def work(world: World, overflows: bool) -> dict[str, Tensor]:
        model = text().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, within=host{across})", world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        replica.watch(scaler)
        for t in range(5):
            if t == 2 and not overflows:
                scaler.update(2.0)
                continue
            optimizer.zero_grad()
            bad = torch.inf if t == 2 and world.rank == 3 else 1.0
            scaler.scale(loss_of(model, words(t, world.rank)) * bad).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        return dict(model.state_dict())

    found, wanted = (run_threads(lambda w, bad=bad: work(w, bad), 4, hosts=HOSTS) for bad in (True, False))
    for mine, other in zip(found, wanted, strict=True):
        assert_same(mine, other, 1e-6)
        assert_same(mine, found[0], 0.0)


@stages
def test_bf16_computes_in_16_bits_and_all_groups_have_the_same(stage: int) -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = text().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, within=2, precision=bf16)", world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(4))
        replica.restore()
        return dict(model.state_dict())

    found, plain = run_threads(work, 4), text()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, optimizer, lambda t: torch.cat([words(t, r) for r in range(4)]), range(4))
    for one in found:
        assert_same(one, found[0], 0.0)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(one[name].double(), value, rtol=0, atol=0.004)


# Bytes ---------------------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def find_ranks(channel: str, size: int) -> list[int]:
    """The ranks of a world split from a world of `size`, by its name: "world/1[2,3]/1[0,1]"."""
    ranks = list(range(size))
    for part in re.findall(r"\[([\d,]+)\]", channel):
        ranks = [ranks[int(r)] for r in part.split(",")]
    return ranks


@stages
@pytest.mark.parametrize("across", ["", ", across=bf16"])
def test_only_means_of_shards_cross_the_network(stage: int, across: str) -> None:
    """By the ledger: between hosts each rank sends 2 (G - 1)/G of its shard for G groups, and flags of some bytes;
    gathers and reduce-scatters stay inside a host."""

    def work(world: World) -> None:
        model = wide()
        optimizer = torch.optim.AdamW(model.parameters())
        spec = f"zero(stage={stage}, within=host, buffers=local{across})"
        replica: Any = un.parallel(model, optimizer, spec, world=world)
        shard = sum(unit.shard_length for unit in replica.units)
        begun = len(world.ledger.records)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
        crossed: dict[str, int] = {}
        inside: dict[str, int] = {}
        for record in list(world.ledger.records)[begun:]:
            hosts = {HOSTS[r % 4] for r in find_ranks(record.channel, world.size)}
            sent = crossed if len(hosts) > 1 else inside
            kind = record.tag.partition("/")[0]
            sent[kind] = sent.get(kind, 0) + record.bytes_sent
        means = crossed.pop("gradients" if across else "across")
        assert means == 3 * shard * (2 if across else 4), "2 (G - 1)/G of the shard, G = 2"
        assert crossed.keys() <= {"used", "spare"}
        assert sum(crossed.values()) < 3 * 64, "flags"
        assert stage < 3 or inside["unit"] >= 3 * 4 * shard * 2, "a gather and a reduce-scatter, at least"

    run_threads(work, 4, hosts=HOSTS)


# Checkpoints and other worlds ----------------------------------------------------------------------------------------

LAYOUTS = {
    "zero(stage=1)": 2,
    "zero(stage=3)": 3,
    "allreduce": 2,
    "zero(stage=2, within=2)": 4,
    "zero(stage=3, within=1)": 3,
    "zero(stage=1, within=2, across=bf16)": 2,
}


def pass_over(spec: str, size: int, steps: range, load: Path | None, save: Path) -> None:
    def work(world: World) -> None:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        if load is not None:
            un.load(load, replica)
        rows = lambda t: torch.cat([words(t, r) for r in range(12)]).chunk(size)[world.rank]  # noqa: E731
        train(model, optimizer, rows, steps, 0.5)
        un.save(save, replica)

    run_threads(work, size)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """What two steps under a layout have saved."""

    @cache
    def begin(spec: str, size: int) -> Path:
        folder = tmp_path_factory.mktemp("begun")
        pass_over(spec, size, range(2), None, folder)
        return folder

    return begin


@stages
def test_a_checkpoint_goes_to_and_comes_from_every_other_layout(
    stage: int, tmp_path: Path, begun: Callable[[str, int], Path]
) -> None:
    """Two steps under one, saved; two more under another: as four in one process on the same batches."""
    mine = f"zero(stage={stage}, within=2, unit_bytes=1500)"

    wanted = reference(12, 4, 0.5)
    for number, (other, size) in enumerate(LAYOUTS.items()):
        for first, second in (((mine, 4), (other, size)), ((other, size), (mine, 4))):
            if "bf16" in first[0] + second[0] and first[0] != mine:
                continue  # trains with rounded means
            ended = tmp_path / f"{number}-{first[0] == mine}"
            exact = "bf16" not in second[0]
            pass_over(*second, range(2, 4), begun(*first), ended)
            found = un.read_checkpoint(ended)["model"]
            assert_same(dict(found), wanted, 1e-11 if exact else 1e-2)  # type: ignore[union-attr]


@stages
def test_a_run_that_is_resumed_has_what_was_still_to_be_sent(stage: int, tmp_path: Path) -> None:
    def work(world: World, resumed: bool) -> dict[str, Tensor]:
        spec = f"zero(stage={stage}, within=host, across=powersgd(rank=1))"
        model = text().float()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        if resumed:
            un.load(tmp_path, replica)
        train(model, optimizer, lambda t: words(t, world.rank), range(3, 6) if resumed else range(6))
        return dict(model.state_dict())

    def save(world: World) -> None:
        model = text().float()
        optimizer = adam(model)
        spec = f"zero(stage={stage}, within=host, across=powersgd(rank=1))"
        replica: Any = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(3))
        un.save(tmp_path, replica)
        assert replica.local_state()["across"]["local"]

    run_threads(save, 4, hosts=HOSTS)
    whole, resumed = (run_threads(lambda w, r=r: work(w, r), 4, hosts=HOSTS)[0] for r in (False, True))
    assert_same(resumed, whole, 0.0)


@stages
def test_a_lost_host_leaves_the_others_whole(stage: int) -> None:
    """Six ranks on three hosts, then the four of two; then five, which groups of two do not divide."""

    def work(world: World) -> None:
        model = text()
        optimizer = adam(model)
        replica: Any = un.parallel(model, optimizer, f"zero(stage={stage}, within=host, unit_bytes=1500)", world=world)
        rows = lambda t, w: torch.cat([words(t, r) for r in range(60)]).chunk(w.size)[w.rank]  # noqa: E731
        train(model, optimizer, lambda t: rows(t, world), range(2))
        smaller = world.split([[0, 1, 4, 5], [2, 3]])
        if world.rank in (2, 3):
            replica.close()
        else:
            told = replica.rebind(smaller, source=2)
            assert "2 group(s) of 2 rank(s)" in told
            train(model, optimizer, lambda t: rows(t, smaller), range(2, 3))
        odd = world.split([[0, 1, 2, 4, 5], [3]])
        if world.rank == 2:
            model = text()
            optimizer = adam(model)
            replica = un.parallel(model, optimizer, replica.strategy, world=World())
        if world.rank == 3:
            return
        told = replica.rebind(odd, source=0)
        assert "b has 1" in told
        assert "all 5 ranks are one group" in told
        train(model, optimizer, lambda t: rows(t, odd), range(3, 4))
        assert_same(dict(model.state_dict()), wanted, 1e-11)
        replica.restore()
        replica.close()
        assert_same(dict(model.state_dict()), wanted, 1e-11)

    wanted = reference(60, 4)
    run_threads(work, 6, hosts=["a", "a", "b", "b", "c", "c"])


def test_a_lost_shard_that_no_group_has_is_named() -> None:
    def work(world: World) -> None:
        model = text()
        replica = un.parallel(model, adam(model), "zero(stage=3, within=2)", world=world)
        smaller = world.split([[0, 2], [1, 3]])
        if world.rank in (0, 2):
            with pytest.raises(ValueError, match=r"in no group is a rank left that had part\(s\) 1 of the 2"):
                replica.rebind(smaller)

    run_threads(work, 4)


def test_a_run_switches_to_and_from_groups() -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "zero(stage=3)", world=world)
        for t, spec in enumerate(["zero(stage=3, within=host)", "allreduce", "zero(stage=1, within=2)", "zero"]):
            train(model, optimizer, lambda t: words(t, world.rank), range(t, t + 1))
            replica = replica.switch(spec)
        return dict(model.state_dict())

    for found in run_threads(work, 4, hosts=HOSTS):
        assert_same(found, reference(4, 4))


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "hosts", "said"),
    [
        ("zero(within=3)", HOSTS, r"within=3 does not divide the 4 ranks.*within=2 or 4"),
        ("zero(within=host)", ["a", "a", "a", "b"], r"a has 3, b has 1.*start as many on each"),
        ("zero(across=bf16)", HOSTS, r"across=bf16 .* without within"),
        ("zero(within=rack)", HOSTS, r"within='rack': expected 'host'"),
        ("zero(within=-1)", HOSTS, r"within=-1: expected 'host'"),
        ("zero(within=2, spare=True)", HOSTS, r"spare=True says nothing with within=2"),
    ],
)
def test_groups_that_cannot_be_are_refused(spec: str, hosts: list[str], said: str) -> None:
    def work(world: World) -> None:
        model = text()
        with pytest.raises(ValueError, match=said):
            un.parallel(model, adam(model), spec, world=world)

    run_threads(work, 4, hosts=hosts)


def test_a_step_inside_no_sync_is_refused() -> None:
    """Each group would step with its own gradients."""

    def work(world: World) -> None:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "zero(within=2)", world=world)
        with replica.no_sync():
            loss_of(model, words(0, world.rank)).backward()
            with pytest.raises(RuntimeError, match="no_sync"):
                optimizer.step()

    run_threads(work, 4)
