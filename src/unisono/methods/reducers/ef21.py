"""EF21-SGDM: every worker corrects its own estimate of its momentum, and the estimates' mean is the gradient.

Fatkhullin, Tyurin and Richtárik 2023, "Momentum Provably Improves Error Feedback!" (arXiv:2305.15155).
"""

from __future__ import annotations

from typing import Annotated

import torch

from unisono.methods.buckets import Bucket
from unisono.methods.checks import Range, validate
from unisono.methods.facts import Convergence, Example, Facts, Sizes
from unisono.methods.kernels.select import narrow_to
from unisono.methods.reducer import Reduced, Reducer, SpareLines, Stages, State, residual_like, staged, stages_of
from unisono.methods.reducers._subsets import check_contracts
from unisono.world import World


def _count_bytes(sizes: Sizes) -> int:
    """One exact exchange, then those of the method inside."""
    return sizes.sent_by("topk(k=0.1, feedback=False)") if sizes.step else sizes.all_reduce(4 * sizes.numbers)


FACTS = Facts(
    [Example("ef21(topk(k=0.1, feedback=False), momentum=0.5)", conserves=False, bytes=_count_bytes)],
    refuses={
        "topk(k=0.1, feedback=False), momentum=0": "momentum",
        "topk(k=0.1)": "feedback=False",
        "qsgd(bits=2)": "grow without bound",
    },
    trains_as=["allreduce(reducer=ef21(topk(k=0.3, feedback=False), momentum=0.5))"],
    convergence=Convergence("compressed", "estimates of momenta, corrected by what the reducer inside sends"),
    plans=["ef21(topk(k=0.01, feedback=False))"],
)


@validate
def ef21(
    inner: Reducer,
    *,
    momentum: Annotated[float, Range("the share of the newest gradient in the momentum", above=0, at_most=1)] = 0.1,
) -> Reducer:
    """Send how far the momentum is from what the others know of it, C being what `inner` sends of a line:

        v_i <- (1 - momentum) v_i + momentum g_i,  c_i = C(v_i - u_i),  u_i <- u_i + c_i,  u <- u + mean of c_i

    and u, the mean of all u_i, is the result. It begins with one exact exchange (v_i = u_i = g_i), and does so again
    when ranks were lost or have come. Unlike error feedback it needs no bound on how much the workers' data differ. The
    momentum is here: give an SGD without one. Lines are kept without AMP's loss scale, and do not depend on learning
    rates.

    inner: a reducer that keeps nothing itself: topk(feedback=False), randomk(feedback=False), bytegrad, ...
    momentum: the share of the newest gradient; 1.0 is EF21 without momentum.

    Sends what `inner` sends. Keeps three numbers a parameter, and uses memory for three others.

    >>> from unisono.spec import build
    >>> build("ef21(topk(k=0.01, feedback=False))", kind="reducer").memory
    True
    """
    if inner.memory:
        raise ValueError(
            f"{inner.spec or 'this reducer'} keeps what it does not send, and ef21 would send that twice: pass it with "
            "feedback=False"
        )
    check_contracts(inner)
    spare, names = SpareLines(), ("momentum", "own", "mean")

    def init(bucket: Bucket) -> State:
        lines = {name: {"velocity": residual_like(bucket)} for name in names}
        return {"size": 0, **lines, "inner": inner.init(bucket)}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        before = [state[name]["velocity"] for name in names]
        v, own, mean = [spare.beside(bucket, x, name) for x, name in zip(before, names, strict=True)]
        size = state["size"]  # below zero after an exact exchange, which a window that overflows takes back
        if size != world.size and (size != -world.size or not before[2].any()):  # the first, or ranks are others
            v.copy_(bucket.flat).div_(bucket.scale)
            handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
            yield
            handle.wait()
            mean.copy_(bucket.flat).div_(bucket.scale)
            own.copy_(v)
            size, after = -world.size, state["inner"]
        else:
            torch.mul(before[0], 1.0 - momentum, out=v).add_(bucket.flat, alpha=momentum / bucket.scale)
            bucket.flat.copy_(narrow_to(torch.sub(v, before[1]).mul_(bucket.scale), bucket.dtype))
            given = bucket.views(bucket.flat.clone())
            reduced, after = yield from stages_of(inner, bucket, state["inner"], world)
            own.copy_(before[1])
            mean.copy_(before[2])
            sent = reduced.sent_of(given)
            for line, change in ((own, sent), (mean, reduced.mean)):
                torch._foreach_add_(bucket.views(line), [x.to(line.dtype) for x in change], alpha=1 / bucket.scale)
            bucket.flat.copy_(narrow_to(mean * bucket.scale, bucket.dtype))
            size = world.size
        lines = {name: {"velocity": x} for name, x in zip(names, (v, own, mean), strict=True)}
        return Reduced(bucket.tensors), {"size": size, **lines, "inner": after}

    return staged(init, stages, memory=True, sends=inner.sends, check=inner.check)
