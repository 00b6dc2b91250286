"""Muon: `benchmarks/zero.py --optimizer muon`. Hidden matrices of a transformer of 25 M parameters, on the CPU.

Keys, for N workers: peer_over_ours_N, a training step with nanochat's own distributed Muon (its optimizer over gloo, as
it is; its polynomial in fp32, its choice without a GPU) over ours with torch.optim.Muon (in bf16, torch's choice);
peer_bf16_over_ours_N, both in bf16; muon_step_scaling_N, the optimizer's part of our step times N, over that of one
worker who steps everything, while the other workers do the same.
--peer (or NANOCHAT) is a checkout of karpathy/nanochat, of which nanochat/optim.py is imported; without it, the peer is
left out. With --gpu: a GPT of 124 M parameters, compiled, one worker: zero_over_plain.

There, and with --offload without a GPU on a small GPT: offload_wrong_elements, of the matrices of a run with its
optimizers on the host, those that are not, bit by bit, what plain torch.optim.Muon makes there of the same gradients
in three steps; offload_difference, how far the changes of its parameters are from those of a plain run (the norm of the
difference over that of the change, of the parameter that differs most); order_difference, the same between two plain
runs that read the rows of a batch in another order. Muon's bf16, and AdamW of gradients near zero, turn what rounding
does into as much.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import finish, interleaved

WIDTH, TOKENS = 512, 64


def make_blocks(width: int = WIDTH, layers: int = 8) -> Any:
    """25.2 M parameters, all of them hidden matrices: attention and MLP as nanochat has them."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.rms_norm(x, (width,))
            q, k, v = (m(y).unflatten(-1, (width // 64, 64)).transpose(1, 2) for m in (self.q, self.k, self.v))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.relu(self.up(F.rms_norm(x, (width,)))).square())

    return nn.Sequential(*(Block() for _ in range(layers)))


# The peer: as it is, with what gloo cannot do done by what it can -----------------------------------------------------


class _Summed:
    """A sum under way that becomes a mean: gloo has no mean, and no futures of a reduce-scatter."""

    def __init__(self, work: Any, out: Any, ranks: int) -> None:
        self._work, self._out, self._ranks = work, out, ranks

    def get_future(self) -> _Summed:
        return self

    def wait(self) -> None:
        self._work.wait()
        if self._ranks > 1:
            self._out.div_(self._ranks)


def load_peer(root: str, dtype: str) -> Any:
    """The module nanochat/optim.py of a checkout, over gloo; `dtype`: that its polynomial is computed in."""
    import torch
    import torch.distributed as dist

    package, common = types.ModuleType("nanochat"), types.ModuleType("nanochat.common")
    common.COMPUTE_DTYPE = getattr(torch, dtype)  # type: ignore[attr-defined]
    sys.modules |= {"nanochat": package, "nanochat.common": common}
    spec = importlib.util.spec_from_file_location(f"nanochat_optim_{dtype}", Path(root) / "nanochat" / "optim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ranks = dist.get_world_size()

    def reduce_scatter(out: Any, given: Any, **_: Any) -> _Summed:
        return _Summed(dist.reduce_scatter(out, list(given.chunk(ranks)), async_op=True), out, ranks)

    def all_gather(out: Any, given: Any, **_: Any) -> _Summed:
        return _Summed(dist.all_gather(list(out.chunk(ranks)), given, async_op=True), out, 1)

    shim = types.SimpleNamespace(**{name: getattr(dist, name) for name in ("get_rank", "get_world_size", "ReduceOp")})
    shim.is_available = shim.is_initialized = lambda: True
    shim.reduce_scatter_tensor, shim.all_gather_into_tensor = reduce_scatter, all_gather
    module.dist = shim  # type: ignore[attr-defined]
    return module


def make_peer(root: str, dtype: str, model: Any) -> Any:
    by_shape: dict[Any, list[Any]] = {}
    for p in model.parameters():
        by_shape.setdefault(p.shape, []).append(p)
    settings = {"kind": "muon", "lr": 0.02, "momentum": 0.95, "ns_steps": 5, "beta2": 0.95, "weight_decay": 0.1}
    return load_peer(root, dtype).MuonAdamW([{"params": some, **settings} for some in by_shape.values()])


# In each worker -------------------------------------------------------------------------------------------------------


class Side:
    """A training step, and how long the optimizer took in each."""

    def __init__(self, name: str, strategy: str, peer: str, layers: int) -> None:
        import torch

        import unisono as un

        torch.manual_seed(0)
        self.model = make_blocks(layers=layers)
        self.x = torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
        self.optimizer_s: list[float] = []
        if name.startswith("peer"):
            self.optimizer = make_peer(peer, "bfloat16" if name.endswith("bf16") else "float32", self.model)
        else:
            self.optimizer = torch.optim.Muon(self.model.parameters(), lr=0.02, momentum=0.95, weight_decay=0.1)
        if name == "ours":
            un.parallel(self.model, self.optimizer, strategy)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer_s.append(time.perf_counter() - start)


def compare(strategy: str, peer: str, repeats: int, layers: int) -> dict[str, Any]:
    """All sides in turn."""
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cpu")
    dist.init_process_group("gloo")
    names = ["ours", "alone", *(["peer", "peer_bf16"] if peer else [])]
    try:
        sides = {name: Side(name, strategy, peer, layers) for name in names}
    except ValueError as error:  # on every rank alike
        return {"refused": str(error)}
    seconds = interleaved(sides, repeats=repeats, warmup=2, before=world.barrier)
    found: dict[str, Any] = {f"{name}_s": taken for name, taken in seconds.items()}
    found |= {f"{name}_optimizer_s": statistics.median(side.optimizer_s[2:]) for name, side in sides.items()}
    dist.destroy_process_group()
    return found


def run_on_cpu(options: Any) -> dict[str, Any]:
    import unisono as un

    results: dict[str, Any] = {"strategy": options.strategy}
    peer = options.peer or os.environ.get("NANOCHAT", "")
    if not (peer and (Path(peer) / "nanochat" / "optim.py").exists()):
        print(f"no peer: {peer or '--peer'} is no checkout of karpathy/nanochat with nanochat/optim.py")
        results["peer_left_out"], peer = "no checkout of nanochat", ""
    given = (options.strategy, peer, options.repeats, options.layers)
    for workers in options.workers:
        each = un.launch(compare, workers=workers, args=given, threads=1)
        if "refused" in each[0]:
            print(f"{workers} workers: {options.strategy} refuses Muon: {each[0]['refused']}")
            results[f"refused_{workers}"] = each[0]["refused"]
            continue
        slowest = {name: max(found[name] for found in each) for name in each[0]}
        for name, taken in slowest.items():
            print(f"{workers} workers {name}: {1e3 * taken:.0f} ms")
            results[f"{name}_{workers}"] = taken
        for name in ("peer", "peer_bf16") if peer else ():
            results[f"{name}_over_ours_{workers}"] = slowest[f"{name}_s"] / slowest["ours_s"]
        results[f"muon_step_scaling_{workers}"] = slowest["ours_optimizer_s"] * workers / slowest["alone_optimizer_s"]
    return results


# On a GPU -------------------------------------------------------------------------------------------------------------

SMALL = {"width": 128, "layers": 2, "vocabulary": 2000}  # without a GPU


def make_gpt(width: int = 768, layers: int = 12, vocabulary: int = 50_304) -> Any:
    """124 M parameters: 12 layers of width 768, a vocabulary of 50,304, tied."""
    import torch
    from torch import nn

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(vocabulary, width), make_blocks(width, layers)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.embed(text)) @ self.embed.weight.T

    return GPT()


class GPTSide:
    """A training step of that GPT with Muon and AdamW. Rows of the batch may be reversed, which changes the order of
    sums alone. Before each step `look` is called."""

    def __init__(self, strategy: str, device: str = "cuda", *, is_reversed: bool = False) -> None:
        import torch

        import unisono as un

        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        sizes = {} if device == "cuda" else SMALL
        self.model, self.device = make_gpt(**sizes).to(device), device
        self.first = self.values()
        self.hidden = torch.optim.Muon(self.model.blocks.parameters(), lr=0.02)
        self.rest = torch.optim.AdamW(self.model.embed.parameters(), lr=3e-4)
        if strategy:
            un.parallel(self.model, [self.hidden, self.rest], strategy)
        self.called = torch.compile(self.model) if device == "cuda" else self.model
        vocabulary = sizes.get("vocabulary", 50_304)
        shape = (8, 1025) if device == "cuda" else (8, 65)
        text = torch.randint(0, vocabulary, shape, generator=torch.Generator(device).manual_seed(1), device=device)
        self.text = text.flip(0) if is_reversed else text
        self.look: Callable[[], None] = lambda: None

    def values(self) -> list[Any]:
        return [p.detach().float().cpu().clone() for p in self.model.parameters()]

    def __call__(self) -> None:
        import torch

        self.hidden.zero_grad()
        self.rest.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            out = self.called(self.text[:, :-1])
        torch.nn.functional.cross_entropy(out.float().flatten(0, 1), self.text[:, 1:].flatten()).backward()
        self.look()
        self.hidden.step()
        self.rest.step()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def train(self, steps: int = 3) -> list[Any]:
        """The changes of all parameters."""
        for _ in range(steps):
            self()
        return [p - first for p, first in zip(self.values(), self.first, strict=True)]


def compare_offloaded(device: str) -> dict[str, Any]:
    """Muon off the device: bit by bit against plain Muon on the host with the same gradients; and how far such a run is
    from a plain one, beside how far rounding alone takes two plain ones apart."""
    import torch

    side = GPTSide("zero(stage=2, optimizer_on=cpu)", device)
    theirs = [p for group in side.hidden.param_groups for p in group["params"]]
    twins = [torch.nn.Parameter(p.detach().float().cpu().clone()) for p in theirs]
    plain = torch.optim.Muon(twins, lr=0.02)

    def step_twins() -> None:
        for twin, p in zip(twins, theirs, strict=True):
            twin.grad = p.grad.full().float().cpu()
        plain.step()

    side.look = step_twins
    offloaded, alone = side.train(), GPTSide("", device).train()
    wrong = sum(int((twin != p.detach().float().cpu()).sum()) for twin, p in zip(twins, theirs, strict=True))
    in_another_order = GPTSide("", device, is_reversed=True).train()
    found = {"offload_difference": offloaded, "order_difference": in_another_order}
    largest = {key: max(map(relative_difference, changes, alone)) for key, changes in found.items()}
    return {"offload_wrong_elements": wrong, **largest}


def relative_difference(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


def run_on_gpu(options: Any) -> dict[str, Any]:
    import torch

    sides = {"plain": "", "zero": "zero(stage=2)"}
    steps = {name: GPTSide(strategy) for name, strategy in sides.items()}
    seconds = interleaved(steps, repeats=4 * options.repeats, warmup=5)
    results: dict[str, Any] = {f"{name}_s": taken for name, taken in seconds.items()}
    results |= {"zero_over_plain": seconds["zero"] / seconds["plain"], "gpu": torch.cuda.get_device_name()}
    return results | compare_offloaded("cuda")


def main(options: Any) -> None:
    """Called by zero.py."""
    if options.offload:
        finish(compare_offloaded("cpu"))
    else:
        finish(run_on_gpu(options) if options.gpu else run_on_cpu(options))
