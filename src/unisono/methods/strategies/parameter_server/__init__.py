"""Parameter servers: workers push gradients to servers that hold the parameters, and pull what these have become.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014); bounded staleness: Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn
from torch.optim import LBFGS, Optimizer

from unisono.methods.checks import AtLeast, Note
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.joined_optimizers import refuse_several
from unisono.methods.reducer import Reducer
from unisono.methods.strategies.parameter_server.replica import ServedReplica
from unisono.methods.strategy import Accumulate, Pattern, Replica, Strategy
from unisono.world import World

FACTS = Facts(
    [
        Example("parameter_server"),
        Example("parameter_server(staleness=2)", varies=True),
        Example("parameter_server(reducer=nuqsgd)"),
    ],
    refuses={
        "servers=0": "servers",
        "servers=9": "servers",
        "staleness=-1": "staleness",
        "delay=-1": "delay",
        "accumulate=0": "accumulate",
        "feedback=True": "feedback",
        "reducer=powersgd": "codec",
    },
    own_gradients=True,
    convergence=Convergence(
        "exact", "as one process while staleness=0; above, gradients are older than the parameters"
    ),
    unpredicted="its servers answer while workers compute, each in its own time",
)


@dataclass(frozen=True)
class parameter_server(Strategy):
    """Workers push gradients to `servers` that hold the parameters and run the optimizer, and pull the result.

    staleness: 0: one step with the mean of all workers' gradients, as all-reduce takes it. s > 0: each push is a
        step at lr/N as it comes, and a worker waits where it is more than s windows ahead of the slowest. None:
        nobody waits.
    delay: a push is applied when so many pushes of others have come after it, and its worker waits until then.
    place: servers are threads "beside" the first ranks' programs, or the last ranks on their "own": there
        `un.parallel` serves until all workers are done and ends the program; the world is then that of the workers.
    reducer: one with a codec (qsgd, nuqsgd, bytegrad, fp16, bf16) compresses the pushes.
    feedback: what the codec did not get through is added to the next push; for codecs that round one way.
    accumulate: backward passes a window; gradients add up locally and are pushed when the optimizer steps.
    """

    servers: Annotated[int, AtLeast(1, "ranks that serve")] = 1
    staleness: Annotated[
        int | None, AtLeast(0, "windows that a worker may be ahead of the slowest"), Note("None: any")
    ] = 0
    delay: Annotated[int, AtLeast(0, "pushes of others that a worker waits for")] = 0
    place: Literal["beside", "own"] = "beside"
    reducer: Reducer | None = None
    feedback: bool = False
    accumulate: Accumulate = 1

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        if self.reducer is not None and self.reducer.codec is None:
            raise ValueError(
                f"{self.reducer.spec or 'this reducer'} has no codec: it needs all ranks at once, and a push is "
                "between two. Use qsgd, nuqsgd, bytegrad, fp16 or bf16; feedback=True adds error feedback"
            )
        if self.feedback and self.reducer is None:
            raise ValueError("feedback keeps what a reducer's codec did not get through: give a reducer, got None")
        own = self.place == "own"
        most = world.size - 1 if own else world.size
        if self.servers > most:
            raise ValueError(
                f"servers={self.servers} in a world of {world.size}: expected at most {most}"
                + (", so that there is a worker" if own else "")
            )
        workers = world.size - (self.servers if own else 0)
        if self.delay > max(0, workers - 1):
            raise ValueError(f"delay={self.delay} of {workers} workers: a worker can wait for {workers - 1} others")
        if self.delay and self.staleness == 0:
            raise ValueError(f"delay={self.delay} needs staleness=None or above 0: with 0 all pushes are one step")
        refuse_several(optimizer, "parameter_server", "a push to its servers is one step of one optimizer")
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if isinstance(optimizer, LBFGS):
            raise TypeError("a server takes one gradient per step, but LBFGS asks for several: use another optimizer")
        if self.servers > len(held):
            raise ValueError(f"servers={self.servers} for {len(held)} parameter tensors: expected at most one for each")
        if self.reducer is not None and any(p.is_complex() for p in held):
            raise ValueError(
                f"{self.reducer.spec or 'the reducer'} compresses real numbers, the model has complex ones"
            )

    def why_torch_optimizer(self) -> str:
        return "its servers step the optimizer"

    def pattern(self) -> Pattern:
        stale = None if self.staleness == 0 else Convergence("other", "gradients are older than the parameters")
        return Pattern("servers", self.reducer, convergence=stale, servers=self.servers, staleness=self.staleness)

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return ServedReplica(model, optimizer, world, self)
