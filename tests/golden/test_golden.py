"""Every deterministic method's trajectory is the recorded one: losses and weights of ten windows of three workers.

A number here changes if the maths of a method does. Where that is meant, `pytest tests/golden --rewrite-golden` writes
the files anew, and the commit shows what moved. Training is in float64; TOLERANCE is room for another machine's
arithmetic (some methods round through float32 on the way), far below what another formula would do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.spec import names, read_facts
from unisono.methods.spec.methods import Kind
from unisono.world import World

FOLDER = Path(__file__).parent
WINDOWS, RANKS = 10, 3
TOLERANCE = 1e-6  # relative
KINDS: list[Kind] = ["reducer", "strategy"]
METHODS = [(kind, name) for kind in KINDS for name in names(kind)]


def specs(kind: Kind, name: str) -> list[str]:
    """What is recorded of a method: its examples, reducers under allreduce; what depends on time is left out."""
    facts = read_facts(name, kind)
    found = [example.spec for example in facts.examples if not example.varies and not example.by_clock]
    return found if kind == "strategy" else [*(f"allreduce(reducer={spec})" for spec in found), *facts.trains_as]


def train(world: World, kind: Kind, name: str, spec: str) -> dict[str, list[float]]:
    """The losses of all windows, and some of the weights in the end."""
    model = build_model()
    if kind == "strategy" and read_facts(name, kind).needs_adam:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:  # some reducers bring a momentum of their own
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if kind == "strategy" else 0.0)
    replica = un.parallel(model, optimizer, spec, world=world)
    losses = []
    for window in range(WINDOWS):
        x = draw_batch(window, world.rank)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([x.detach().flatten() for x in replica.consolidate().state_dict().values()])
    replica.close()
    return {"losses": losses, "weights": [weights.norm().item(), weights.sum().item(), *weights[::16].tolist()]}


def build_model() -> nn.Module:
    """The same on every rank, without the process's generator: ranks are threads here."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator, dtype=torch.float64) - 0.5)
    return model


def draw_batch(window: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * window + rank), dtype=torch.float64)


@pytest.mark.parametrize(("kind", "name"), METHODS, ids=[f"{kind}-{name}" for kind, name in METHODS])
@pytest.mark.filterwarnings("ignore:.*sends .* bytes per rank and step.*:UserWarning")  # of models as small as this
def test_a_trajectory_is_the_recorded_one(kind: Kind, name: str, request: pytest.FixtureRequest) -> None:
    recorded = specs(kind, name)
    if not recorded:
        pytest.skip("what it does depends on time")
    found = {
        spec: un.run_threads(lambda world, spec=spec: train(world, kind, name, spec), RANKS)  # type: ignore[misc]
        for spec in dict.fromkeys(recorded)
    }
    file = FOLDER / f"{kind}-{name}.json"
    if request.config.getoption("--rewrite-golden"):
        file.write_text(write_rows(found))
    wanted = json.loads(file.read_text())
    assert list(found) == list(wanted), "other examples than recorded: run pytest tests/golden --rewrite-golden"
    for spec, ranks in found.items():
        for mine, golden in zip(ranks, wanted[spec], strict=True):
            assert mine["losses"] == pytest.approx(golden["losses"], rel=TOLERANCE, abs=1e-12), spec
            assert mine["weights"] == pytest.approx(golden["weights"], rel=TOLERANCE, abs=1e-9), spec


def write_rows(found: dict[str, list[Any]]) -> str:
    """JSON with a line for each rank, so that a diff shows which moved."""
    rows = {spec: ",\n  ".join(json.dumps(rank) for rank in ranks) for spec, ranks in found.items()}
    return "{\n" + ",\n".join(f" {json.dumps(spec)}: [\n  {text}\n ]" for spec, text in rows.items()) + "\n}\n"


def test_no_file_is_left_of_a_method_that_is_gone() -> None:
    wanted = {f"{kind}-{name}.json" for kind, name in METHODS if specs(kind, name)}
    assert {file.name for file in FOLDER.glob("*.json")} == wanted
