"""ZeRO in worlds of threads, against plain PyTorch in one process, in fp64."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono as un
from pairs import cover_pairs
from unisono.methods.strategies.zero.units import choose_modules, units_by_module
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()  # torch.manual_seed is the process's
WIDTH, VOCABULARY, LENGTH = 8, 11, 5
stages = pytest.mark.parametrize("stage", [1, 2, 3])


class Block(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a bias of the keys would have no gradient but rounding
        self.out = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def inside(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        return x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.inside, x, use_reentrant=False)
        return self.inside(x)


class Text(nn.Module):
    """A small transformer, with the options that trouble sharding."""

    def __init__(self, *, tied: bool = False, recompute: bool = False, frozen: str = "", around: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(recompute=recompute) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.around = around
        if tied:
            self.head.weight = self.embed.weight
        for name, param in self.named_parameters():
            if frozen and frozen in name:
                param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False) if self.around else block(y)
        return self.head(y)


def text(**options: Any) -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        return Text(**options).double()


def words(step: int, rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch[:, :-1])
    return nn.functional.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as people have them: no decay for vectors."""
    flat = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=0.01)


def train(model: nn.Module, optimizer: Any, batches: Callable[[int], Tensor], steps: range, clip: float = 0.0) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, batches(t)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def reference(size: int, steps: int, clip: float = 0.0, **options: Any) -> dict[str, Tensor]:
    model = text(**options)
    train(model, adam(model), lambda t: torch.cat([words(t, r) for r in range(size)]), range(steps), clip)
    return model.state_dict()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "frozen embedding": {"frozen": "embed"},
    "frozen parts of blocks": {"frozen": "mix"},
    "frozen blocks": {"frozen": "blocks.1"},
    "recomputed inside": {"recompute": True},
    "recomputed around": {"around": True},
    "recomputed, tied, partly frozen": {"around": True, "tied": True, "frozen": "norm"},
}


@pytest.mark.parametrize(("stage", "overlap", "which"), cover_pairs([1, 2, 3], [False, True], list(OPTIONS)))
def test_it_trains_as_one_process(stage: int, overlap: bool, which: str) -> None:
    options = OPTIONS[which]

    def work(world: World) -> dict[str, Tensor]:
        model = text(**options)
        optimizer = adam(model)
        spec = f"zero(stage={stage}, unit_bytes=1500, overlap={overlap})"
        replica: Any = un.parallel(model, optimizer, spec, world=world)
        assert len(replica.units) > 2
        train(model, optimizer, lambda t: words(t, world.rank), range(4), clip=0.5)
        return dict(model.state_dict())

    for found in run_threads(work, 3):
        assert_same(found, reference(3, 4, 0.5, **options))


def test_units_are_the_largest_modules_that_fit_and_shared_parameters_lie_above_their_users() -> None:
    model = text(tied=True)
    nbytes = sum(p.numel() * 8 for p in model.blocks[0].parameters())  # type: ignore[index, union-attr]
    assert choose_modules(model, nbytes) == {*model.blocks, model.head}  # type: ignore[misc]
    units = units_by_module(model, nbytes, dtype=None, size=2, rank=0)
    owners = {name: unit.owner for unit in units for name in unit.names}
    assert owners["embed.weight"] is None
    assert owners["blocks.1.mix.weight"] is model.blocks[1]  # type: ignore[index]
    assert sorted(n for unit in units for n in unit.names) == sorted(n for n, _ in model.named_parameters())


def test_stage_3_holds_a_part_of_the_values_and_lets_go_of_what_it_gathers() -> None:
    def work(world: World) -> None:
        model = text()
        optimizer = adam(model)
        replica: Any = un.parallel(model, optimizer, "zero(stage=3, unit_bytes=2500)", world=world)
        total = sum(p.numel() for p in model.parameters())

        def held() -> int:
            return sum(unit.full.untyped_storage().nbytes() // 8 for unit in replica.units)

        assert held() == 0
        assert sum(unit.shard.numel() for unit in replica.units) < 0.7 * total
        assert "come when it is used" in repr(model.embed.weight)  # type: ignore[union-attr]
        most = []
        model.blocks[1].out.register_forward_hook(lambda *_: most.append(held()))  # type: ignore[index, union-attr]
        loss = loss_of(model, words(0, world.rank))
        assert most[0] < 0.8 * total
        loss.backward()
        assert held() == 0
        with torch.no_grad():
            loss_of(model, words(0, world.rank))
        assert held() == 0, "evaluation lets go as well"

    run_threads(work, 2)


@stages
def test_gradients_show_norms_and_can_be_gathered_but_not_touched_otherwise(stage: int) -> None:
    def work(world: World) -> None:
        model = text()
        replica = un.parallel(model, adam(model), f"zero(stage={stage}, unit_bytes=2500)", world=world)
        loss_of(model, words(0, world.rank)).backward()
        plain = text()
        loss_of(plain, torch.cat([words(0, r) for r in range(2)])).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(p.grad.norm(), q.grad.norm())
            torch.testing.assert_close(torch.linalg.vector_norm(p.grad, torch.inf), q.grad.abs().max())
            torch.testing.assert_close(p.grad.full(), q.grad)  # type: ignore[attr-defined]
        first = next(model.parameters()).grad
        assert first is not None
        assert "full()" in repr(first)
        with pytest.raises(NotImplementedError, match="full"):
            first + 1
        with pytest.raises(NotImplementedError, match="dimension"):
            first.norm(dim=0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=1)
        q = next(plain.parameters()).grad
        torch.testing.assert_close(first.full(), q)  # type: ignore[attr-defined]
        replica.close()

    run_threads(work, 2)


@stages
@pytest.mark.parametrize("how", ["accumulate", "no_sync", "no zero_grad"])
def test_passes_add_up(stage: int, how: str) -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = text()
        optimizer = adam(model)
        spec = f"zero(stage={stage}, unit_bytes=2500, accumulate={2 if how == 'accumulate' else 1})"
        replica = un.parallel(model, optimizer, spec, world=world)
        for t in range(3):
            if how != "no zero_grad" or t == 0:
                model.zero_grad() if t % 2 else optimizer.zero_grad()
            if how == "no_sync":
                with replica.no_sync():
                    loss_of(model, words(10 + t, world.rank)).backward()
            elif how == "accumulate":
                loss_of(model, words(10 + t, world.rank)).backward()
            loss_of(model, words(t, world.rank)).backward()
            optimizer.step()
        assert replica.step == 3
        return dict(model.state_dict())

    model = text()
    optimizer = adam(model)
    for t in range(3):
        if how != "no zero_grad" or t == 0:
            optimizer.zero_grad()
        if how != "no zero_grad":
            loss_of(model, torch.cat([words(10 + t, r) for r in range(2)])).backward()
        loss_of(model, torch.cat([words(t, r) for r in range(2)])).backward()
        optimizer.step()
    for found in run_threads(work, 2):
        assert_same(found, dict(model.state_dict()))


@stages
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bf16_computes_in_16_bits_and_steps_in_fp32(stage: int, size: int) -> None:
    """The reference keeps fp32 values beside a bf16 model, and gives the mean of bf16 gradients to the optimizer."""

    def work(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = text().float()
        optimizer = adam(model)
        replica: Any = un.parallel(
            model, optimizer, f"zero(stage={stage}, precision=bf16)", unit_bytes=2500, world=world
        )
        train(model, optimizer, lambda t: words(t, world.rank), range(5))
        computed = dict(model.state_dict())
        replica.restore()
        return computed, dict(model.state_dict())

    wide = text().float()
    optimizer = adam(wide)
    for t in range(5):
        narrow = [text().bfloat16() for _ in range(size)]
        for rank, model in enumerate(narrow):
            model.load_state_dict(wide.state_dict())
            loss_of(model, words(t, rank)).backward()
        for p, *grads in zip(wide.parameters(), *(m.parameters() for m in narrow), strict=True):
            mean = torch.stack([g.grad.float() / size for g in grads]).sum(0)  # type: ignore[union-attr]
            p.grad = mean.bfloat16().float()
        optimizer.step()
    for computed, found in run_threads(work, size):
        assert all(x.dtype == torch.bfloat16 for x in computed.values())
        for name, value in wide.state_dict().items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], value, rtol=0, atol=0.002, msg=name)
            torch.testing.assert_close(computed[name], found[name].bfloat16())


@stages
def test_a_model_on_the_meta_device_gets_values(stage: int) -> None:
    def work(world: World) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = Text(tied=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, unit_bytes=2500)", world=world)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(torch.isfinite(x).all() and x.std() < 2 for x in start.values())
        train(model, optimizer, lambda t: words(t, world.rank), range(2))
        assert model.head.weight is model.embed.weight  # type: ignore[union-attr]
        found = dict(model.state_dict())
        assert any(not torch.equal(found[name], start[name]) for name in start)
        replica.close()
        return found

    results = run_threads(work, 2)
    assert_same(results[0], results[1], 0.0)


def test_a_module_that_cannot_make_its_values_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device="meta"))

    model = nn.Sequential(nn.Linear(3, 3, device="meta"), Odd())
    with pytest.raises(ValueError, match=r"1 \(Odd\).*reset_parameters"):
        un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero", world=World())


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_optimizers_that_cannot_be_shared_out_are_refused(kind: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = getattr(torch.optim, kind)(list(model.parameters()))
    with pytest.raises(ValueError, match=f"{kind} cannot be shared out"):
        un.parallel(model, optimizer, "zero", world=World())


def test_a_rank_that_is_lost_is_named_with_the_way_out() -> None:
    def work(world: World) -> None:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "zero", world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(2))
        smaller = world.split([[0, 1], [2]])
        if world.rank < 2:
            with pytest.raises(ValueError, match=r"rank\(s\) 2 of the former 3 .* checkpoint"):
                replica.rebind(smaller)

    run_threads(work, 3)


@stages
def test_a_world_that_grows_splits_anew(stage: int) -> None:
    def work(world: World) -> dict[str, Tensor]:
        smaller = world.split([[0, 1], [2]])
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, unit_bytes=2500)", world=smaller)
        if world.rank < 2:
            train(model, optimizer, lambda t: words(t, world.rank), range(2))
        told = replica.rebind(world)
        assert "split over 3 ranks instead of 2" in told
        assert replica.step == 2
        train(model, optimizer, lambda t: words(t, world.rank), range(2, 4))
        return dict(model.state_dict())

    model = text()
    optimizer = adam(model)
    train(model, optimizer, lambda t: torch.cat([words(t, r) for r in range(2 if t < 2 else 3)]), range(4))
    for found in run_threads(work, 3):
        assert_same(found, dict(model.state_dict()))


@pytest.mark.parametrize("route", [["allreduce", 1, 3, "allreduce"], [3, 2, "local_sgd(every=1, start=0)"]], ids=str)
def test_strategies_can_be_switched_to_and_from_it(route: list[Any]) -> None:
    specs = [f"zero(stage={s}, unit_bytes=2500)" if isinstance(s, int) else s for s in route]

    def work(world: World) -> dict[str, Tensor]:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, specs[0], world=world)
        for i, spec in enumerate(specs):
            if i:
                replica = replica.switch(spec)
            if "local" not in spec:
                train(model, optimizer, lambda t: words(t, world.rank), range(2 * i, 2 * i + 2))
        return dict(replica.consolidate().state_dict())

    steps = 2 * sum("local" not in spec for spec in specs)
    for found in run_threads(work, 2):
        assert_same(found, reference(2, steps))


@stages
def test_load_state_dict_of_the_model_reaches_what_the_optimizer_steps(stage: int) -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = text()
        optimizer = adam(model)
        un.parallel(model, optimizer, f"zero(stage={stage}, unit_bytes=2500)", world=world)
        start = {name: value * 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(start)
        train(model, optimizer, lambda t: words(t, world.rank), range(2))
        return dict(model.state_dict())

    model = text()
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    train(model, adam(model), lambda t: torch.cat([words(t, r) for r in range(2)]), range(2))
    for found in run_threads(work, 2):
        assert_same(found, dict(model.state_dict()))


@stages
def test_a_parameter_that_is_unfrozen_later_is_refused_by_name(stage: int) -> None:
    def work(world: World) -> None:
        model = text(frozen="head")
        un.parallel(model, adam(model), f"zero(stage={stage})", world=world)
        gc.collect()  # the model keeps the replica that nobody holds
        model.head.weight.requires_grad_(True)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match=r"'head\.weight' was frozen"):
            loss_of(model, words(0, world.rank)).backward()

    run_threads(work, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at gradients of what it traces
def test_a_model_that_is_compiled_trains_as_one_that_is_not() -> None:
    model = text()
    optimizer = adam(model)
    compiled = torch.compile(model, backend="aot_eager")
    un.parallel(model, optimizer, "zero(stage=3, optimizer_on=cpu, unit_bytes=2500)", world=World())
    for t in range(3):
        optimizer.zero_grad()
        loss_of(compiled, words(t, 0)).backward()
        optimizer.step()
    assert_same(dict(model.state_dict()), reference(1, 3))


@stages
def test_batch_normalisation_computes_in_fp32_beside_bf16(stage: int) -> None:
    def work(world: World) -> None:
        with MODELS:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, precision=bf16)", world=world)
        for t in range(3):
            optimizer.zero_grad()
            x = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(t))
            model(x).float().square().mean().backward()
            optimizer.step()
        state = model.state_dict()
        assert {state[name].dtype for name in ("1.weight", "1.running_mean")} == {torch.float32}
        assert {state[name].dtype for name in ("0.weight", "4.weight")} == {torch.bfloat16}
        assert all(torch.isfinite(x).all() for x in state.values())
        replica.close()

    run_threads(work, 2)


class Borrowing(nn.Module):
    """Uses parameters of modules that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.embed(x))
        return nn.functional.linear(self.attend(y, y, y, need_weights=False)[0], self.embed.weight)


def test_embeddings_used_by_others_and_attention_work_at_stage_3() -> None:
    def make() -> nn.Module:
        with MODELS:
            torch.manual_seed(0)
            return Borrowing().double()

    def work(world: World) -> dict[str, Tensor]:
        model = make()
        optimizer = adam(model)
        replica: Any = un.parallel(model, optimizer, "zero(stage=3, unit_bytes=600)", world=world)
        assert len(replica.units) > 3
        train(model, optimizer, lambda t: words(t, world.rank), range(3))
        return dict(model.state_dict())

    model = make()
    train(model, adam(model), lambda t: torch.cat([words(t, r) for r in range(2)]), range(3))
    for found in run_threads(work, 2):
        assert_same(found, dict(model.state_dict()))


def test_the_first_forward_lets_go_of_units_as_well() -> None:
    def work(world: World) -> None:
        model = text()
        replica: Any = un.parallel(model, adam(model), "zero(stage=3, unit_bytes=2500)", world=world)
        loss_of(model, words(0, world.rank))
        held = sum(unit.full.untyped_storage().nbytes() for unit in replica.units if unit.owner is not None)
        assert held == 0

    run_threads(work, 2)


@stages
def test_frozen_parameters_compute_in_bf16_as_well(stage: int) -> None:
    def work(world: World) -> None:
        model = text(frozen="mix").float()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, precision=bf16)", world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(2))
        replica.restore()
        assert {x.dtype for x in model.state_dict().values()} == {torch.float32}

    run_threads(work, 2)
