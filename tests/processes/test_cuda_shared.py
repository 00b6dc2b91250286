"""Workers on one CUDA device, who map each other's tensors: against plain PyTorch on the CPU, in fp64."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import unisono as un
from unisono.world import PeerLost
from unisono.world.transports.arithmetic import STEPS, check_op

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
DTYPES += [torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.float8_e4m3fn]
SIZES = [0, 1, 5, 999, 100_003]


def maps_device(world: un.World) -> bool:
    fast = world._operations.accelerated
    return fast is not None and fast.name == "CUDA IPC"


def join() -> un.World:
    world = un.join(device="cuda:0")
    assert maps_device(world)
    assert not world.has_nccl
    return world


def numbers(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(0, 2 if dtype == torch.bool else 6, (n,), generator=generator)
    if dtype.is_floating_point or dtype.is_complex:
        return (whole.double() - 2.5 + torch.rand(n, generator=generator, dtype=torch.float64)).to(dtype)
    return whole.to(dtype)


def reference(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    is_float = parts[0].dtype.is_floating_point
    wide = torch.complex128 if parts[0].dtype.is_complex else torch.float64 if is_float else torch.int64
    values = [p.to(wide) for p in parts]
    total = values[0]
    for value in values[1:]:
        total = STEPS[op](total, value)
    return total / len(parts) if op == "mean" else total


def is_close(found: torch.Tensor, right: torch.Tensor) -> bool:
    found = found.cpu()
    if not found.dtype.is_floating_point and not found.dtype.is_complex:
        whole = torch.uint8 if found.dtype == torch.bool else found.dtype
        return torch.equal(found.to(torch.int64), right.to(whole).to(torch.int64))
    rough = {1: 0.13, 2: 1e-2}.get(found.dtype.itemsize, 1e-5)
    wide = right.dtype
    return torch.allclose(found.to(wide), right, rtol=rough, atol=rough / 4)


def is_allowed(dtype: torch.dtype, op: str) -> bool:
    try:
        check_op(dtype, op)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def collectives() -> list[str]:
    """What came out wrong, in words."""
    world, wrong = join(), []
    rank, size, device = world.rank, world.size, world.device

    def check(what: Any, found: torch.Tensor, right: torch.Tensor) -> None:
        if found.device != device or found.shape != right.shape or not is_close(found, right):
            wrong.append(f"{what}: {found.flatten()[:4].tolist()} for {right.flatten()[:4].tolist()}")

    def check_bits(what: Any, found: torch.Tensor, right: torch.Tensor) -> None:
        if found.device != device or not torch.equal(found.cpu().view(torch.uint8), right.view(torch.uint8)):
            wrong.append(f"{what}: other bits")

    for dtype in DTYPES:
        for n in SIZES:
            every = [numbers(r, n, dtype) for r in range(size)]
            for op in STEPS:
                if not is_allowed(dtype, op):
                    continue
                if n > 999 and op not in ("sum", "mean", "max"):
                    continue
                try:
                    x = numbers(rank, n, dtype).to(device)
                    check((dtype, n, op), world.all_reduce(x, op).wait(), reference(every, op))  # type: ignore[arg-type]
                    bits = world.gather_objects(x.view(torch.uint8).cpu().numpy().tobytes())
                    if len(set(bits)) > 1:
                        wrong.append(f"{dtype} {n} {op}: bits differ")
                except Exception as error:
                    wrong.append(f"{dtype} {n} {op}: {type(error).__name__} {error}")
            gathered = world.all_gather(numbers(rank, n + rank, dtype).to(device)).wait()
            for r, found in enumerate(gathered):
                check_bits(("all_gather", dtype, n), found, numbers(r, n + r, dtype))
            swapped = world.all_to_all([numbers(10 * rank + r, n + r, dtype).to(device) for r in range(size)]).wait()
            for r, found in enumerate(swapped):
                check_bits(("all_to_all", dtype, n), found, numbers(10 * r + rank, n + rank, dtype))
            sent = world.broadcast(numbers(rank, n, dtype).to(device), size - 1).wait()
            check_bits(("broadcast", dtype, n), sent, numbers(size - 1, n, dtype))
        parts = [numbers(rank + 7 * r, 50 + r, dtype).to(device) for r in range(size)]
        op = "sum" if is_allowed(dtype, "sum") else "max"
        mine = world.reduce_scatter(parts, op).wait()  # type: ignore[arg-type]
        every = [numbers(r + 7 * rank, 50 + rank, dtype) for r in range(size)]
        check(("reduce_scatter", dtype), mine, reference(every, op))
    apart = torch.arange(24.0, device=device).view(4, 6)[:, ::2] * (rank + 1)
    strided = torch.zeros(4, 6, device=device)[:, ::2].copy_(apart)
    world.all_reduce(strided, "sum").wait()
    right = torch.arange(24.0, dtype=torch.float64).view(4, 6)[:, ::2] * sum(range(1, size + 1))
    check("strided", strided, right)
    some = [torch.full((n,), float(rank), device=device) for n in (3, 0, 70_000)]
    world.all_reduce(some, "mean").wait()
    for x in some:
        check("list", x, torch.full(x.shape, (size - 1) / 2, dtype=torch.float64))
    for n in (9, 1_000_001):
        to, of = (rank + 1) % size, (rank - 1) % size
        sending = world.send(torch.full((n,), float(rank), device=device), to)
        came = world.recv(torch.empty(n, device=device), of).wait()
        sending.wait()
        check("message", came, torch.full((n,), float(of), dtype=torch.float64))
    pairs = world.split([list(range(r, min(r + 2, size))) for r in range(0, size, 2)])
    x = torch.full((5000,), float(rank), device=device)
    pairs.all_reduce(x, "sum").wait()
    pair = range(rank // 2 * 2, min(rank // 2 * 2 + 2, size))
    check("split", x, torch.full((5000,), float(sum(pair)), dtype=torch.float64))
    return wrong


@pytest.mark.parametrize("workers", [2, 4])
def test_every_collective_and_dtype(workers: int) -> None:
    assert un.launch(collectives, workers=workers) == [[]] * workers


def expandable() -> tuple[list[str], int]:
    wrong = collectives()
    return wrong, torch.cuda.memory_stats()["num_alloc_retries"]


def test_memory_that_others_cannot_map_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("UNISONO_WARM", "0")
    assert un.launch(expandable, workers=2) == [([], 0)] * 2


def orders() -> list[float]:
    """Gradients that come late, on a stream of the program's own; results that are read at once, and written over."""
    world = join()
    found = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x = torch.zeros(3_000_000, device=world.device)
            for i in range(20):
                torch.cuda._sleep(2_000_000 * (1 + (i + world.rank) % 3))
                x.fill_(i + world.rank)
                handle = world.all_reduce(x, "sum")
                y = torch.ones(1000, device=world.device) * world.rank
                other = world.all_gather(y, even=True)
                handle.wait()
                found.append(float((x - (world.size * i + sum(range(world.size)))).abs().max()))
                x.fill_(-1.0)
                found.append(float(sum(t.sum() for t in other.wait()) - 1000 * sum(range(world.size))))
    return found


def test_results_are_in_the_order_of_the_programs_streams() -> None:
    for found in un.launch(orders, workers=2):
        assert set(found) == {0.0}


def give_back() -> tuple[list[float], int]:
    """Memory that the allocator gives back to the device, again and again, while others have mapped it."""
    world = join()
    found = []
    for i in range(12):
        x = torch.full((50_000_000,), float(i + world.rank), device=world.device)
        world.all_reduce(x, "sum").wait()
        found += [float(x[0]) - 2 * i - 1, float(x[-1]) - 2 * i - 1]
        del x
        torch.cuda.empty_cache()
        if i % 4 == 3:
            time.sleep(1.1)
    time.sleep(1.1)
    for _ in range(2):
        world.all_reduce(torch.ones(1000, device=world.device)).wait()
    fast: Any = world._operations.accelerated
    return found, sum(line.nbytes for line in fast._theirs[1 - world.rank].lines.values())


def test_memory_given_back_is_unmapped() -> None:
    for found, mapped in un.launch(give_back, workers=2):
        assert set(found) == {0.0}
        assert mapped < 100 << 20


def lose_one() -> str:
    world = join()
    x = torch.ones(25_000_000, device=world.device)
    world.all_reduce(x).wait()
    for i in range(1000):
        if world.rank == 1 and i == 3:
            torch.cuda._sleep(1_000_000_000)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.all_reduce(x, "sum").wait()
        except PeerLost as error:
            torch.cuda.synchronize()
            after = float((x * 0 + 1).sum())
            world.close()
            return f"{error} {after}"
    return "never"


def test_a_killed_rank_is_an_error_and_the_others_go_on() -> None:
    program = """
import sys
sys.path[:0] = [PATH]
import test_cuda_shared
print("FOUND", test_cuda_shared.lose_one(), flush=True)
"""
    import subprocess
    import sys
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program.replace("PATH", repr(os.path.dirname(__file__))))
        file.flush()
        command = [sys.executable, "-m", "unisono", "run", "-n", "3", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if "FOUND" in line]
    told = done.stdout + done.stderr
    assert "rank 1" in told, told
    assert all("25000000.0" in line for line in lines), told


# Training ----------------------------------------------------------------------------------------------------


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(16, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 3),
    ]
    return torch.nn.Sequential(*layers).double()


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    return x, torch.randn(64, 3, generator=generator, dtype=torch.float64)


def train(specs: list[str], device: str) -> dict[str, list[torch.Tensor]]:
    world = un.join(device=device)
    assert maps_device(world) == (device != "cpu")
    found = {}
    for spec in specs:
        model = net().to(world.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        un.parallel(model, optimizer, spec)
        for _ in range(3):
            for a, b in un.shard(batches(), batch_size=16, shuffle=False):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(a.to(world.device)), b.to(world.device)).backward()
                optimizer.step()
        found[spec] = [x.detach().cpu() for x in model.state_dict().values()]
    return found


def test_training_on_one_device_equals_training_on_the_cpu() -> None:
    specs = ["allreduce", "zero(stage=1)", "zero(stage=2)", "zero(stage=3)", "local_sgd(every=4)", "crossbow", "gossip"]
    found = un.launch(train, workers=2, args=(specs, "cuda:0"))
    right = un.launch(train, workers=2, args=(specs, "cpu"))
    for some, others in zip(found, right, strict=True):
        for spec in specs:
            for x, y in zip(some[spec], others[spec], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9, msg=lambda text, spec=spec: f"{spec}: {text}")


@pytest.mark.parametrize("workers", [2, 4])
def test_exact_methods_on_one_device_equal_one_process(workers: int) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = batches()
    for _ in range(3):
        for a, b in zip(x.split(16), y.split(16), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    for found in un.launch(train, workers=workers, args=(["allreduce", "zero(stage=2)"], "cuda:0")):
        for weights in found.values():
            for mine, right in zip(weights, model.state_dict().values(), strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-9)


def train_elastically() -> tuple[bool, list[torch.Tensor], int]:
    world = un.join(device="cuda:0")
    model = net().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    replica = un.parallel(model, optimizer, "allreduce")
    shard = un.shard(batches(), batch_size=16, shuffle=False)
    for _ in range(4):
        for a, b in shard:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a.to(world.device)), b.to(world.device)).backward()
            optimizer.step()
            time.sleep(0.01)
    return maps_device(world) or world.size == 1, [x.detach().cpu() for x in model.state_dict().values()], replica.step


def test_workers_that_are_lost_are_replaced() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = batches()
    for _ in range(4):
        for a, b in zip(x.split(16), y.split(16), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    faults = "kill 1@4 in backward; kill 0@8 in exchange; kill 2@12"
    for maps, weights, steps in un.launch(
        train_elastically, workers=3, faults=faults, least=2, threads=1, timeout_s=60
    ):
        assert maps
        assert steps == 16
        for found, right in zip(weights, model.state_dict().values(), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-9)
