"""The inner loop of a fused step, tile by tile: cast the gradient, step, round the moments, cast the new values out.

The function is plain Python that TorchScript can also compile: then it runs without Python's lock, so that several
threads step at once and the program's own thread is not held up. Where TorchScript is missing it runs as it is.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from unisono.methods.kernels.noise import noise

_PERIOD = 1 << 14  # random numbers for rounding: all elements use them in turn, from a place that changes every step
ADAM, ADAMW, SGD, ADAGRAD = 0, 1, 2, 3


def step_tiles(
    kind: int,
    numbers: list[float],
    flags: list[bool],
    step: Tensor,
    fresh: bool,
    first: list[float],
    spans: list[int],
    master: Tensor,
    gradient: Tensor,
    scale: float,
    lines: list[Tensor],
    out: Tensor | None,
    scratch: list[Tensor],
    bits: list[Tensor],
    table: Tensor,
    places: list[int],
    tile: int,
    held: list[Tensor],
    before: list[Tensor],
    ratios: list[float],
    each: int,
    first_ratio: int,
) -> int:
    """Step elements of `master` and of the state `lines` in place, with those of `gradient`; all are of one length.

    spans: which elements, as start, stop, start, stop, ...
    numbers: learning rate, weight decay, then those of the kind (see `call_kernel`). flags: maximize, then the kind's.
    first: what lines hold before the first step (`fresh`). scratch: memory of `tile` elements in the precision of
    master, for the gradient and for each line; `bits`: that of the lines as int32. Lines in bfloat16 are computed with
    there and rounded back; `places`: where each begins in `table`. held: a list of one tensor; TorchScript takes a call
    that changes only lists made in the function itself for one without effect, and drops it. before: what `master` and
    `lines` are before the step, if they are to be written and not changed in place; else empty. ratios: by how much
    larger than a gradient those are that the second line takes the squares of (Adam's), one for every `each` elements,
    the first of them for those at `first_ratio * each`; each = 0: there are none.
    """
    done = 0
    for k in range(len(spans) // 2):
        at = spans[2 * k]
        while at < spans[2 * k + 1]:
            end = min(at + tile, spans[2 * k + 1])
            ratio = 1.0
            if each > 0:
                end = min(end, (at // each + 1) * each)
                ratio = ratios[at // each - first_ratio]
            size = end - at
            p = master[at:end]
            if len(before) > 0:
                p.copy_(before[0][at:end])
            g = gradient[at:end]
            factor = scale * ratio
            if g.dtype != p.dtype or factor != 1.0:
                g = scratch[0][:size]
                g.copy_(gradient[at:end])
                if factor != 1.0:
                    g.mul_(factor)
            state: list[list[Tensor]] = []
            for i in range(len(lines)):
                line = lines[i][at:end]
                old = before[i + 1][at:end] if len(before) > 0 else line
                if line.dtype != p.dtype:
                    line = scratch[i + 1][:size]
                if len(before) > 0 or lines[i].dtype != p.dtype:
                    line.copy_(old)
                if fresh:
                    line.fill_(first[i])
                state.append([line])
            held[0] = p
            if ratio == 1.0:
                call_kernel(kind, numbers, flags, [step], fresh, held, [g], state)
            else:  # a step with larger gradients, a first moment as much larger and as much smaller a rate
                state[0][0].mul_(ratio)
                numbers_now = numbers.copy()
                numbers_now[0], numbers_now[1] = numbers[0] / ratio, numbers[1] * ratio
                call_kernel(kind, numbers_now, flags, [step], fresh, held, [g], state)
                state[0][0].mul_(1.0 / ratio)
            for i in range(len(lines)):
                if lines[i].dtype != p.dtype:
                    round_bits(bits[i][:size], table, places[i] + at)
                    lines[i][at:end].copy_(state[i][0])
            if out is not None:
                out[at:end].copy_(p)
            done += size
            at = end
    return done


def call_kernel(
    kind: int,
    numbers: list[float],
    flags: list[bool],
    steps: list[Tensor],
    fresh: bool,
    values: list[Tensor],
    grads: list[Tensor],
    state: list[list[Tensor]],
) -> None:
    """One call of a fused kernel on tensors that are stepped alike.

    steps: for each tensor, how many steps it has taken after this one. state: a list of tensors for each line. The
    other arguments are those of `step_tiles`.
    """
    lr, decay, maximize = numbers[0], numbers[1], flags[0]
    if kind == 0:  # beta1, beta2, eps; amsgrad
        torch._fused_adam_(
            values, grads, state[0], state[1], state[2] if flags[1] else [], steps, lr=lr, beta1=numbers[2],
            beta2=numbers[3], weight_decay=decay, eps=numbers[4], amsgrad=flags[1], maximize=maximize,
        )  # fmt: skip
    elif kind == 1:
        torch._fused_adamw_(
            values, grads, state[0], state[1], state[2] if flags[1] else [], steps, lr=lr, beta1=numbers[2],
            beta2=numbers[3], weight_decay=decay, eps=numbers[4], amsgrad=flags[1], maximize=maximize,
        )  # fmt: skip
    elif kind == 2:  # momentum, dampening; nesterov
        torch._fused_sgd_(
            values, grads, state[0] if len(state) > 0 else [], weight_decay=decay, momentum=numbers[2], lr=lr,
            dampening=numbers[3], nesterov=flags[1], maximize=maximize, is_first_step=fresh and len(state) > 0,
        )  # fmt: skip
    else:  # decay of the learning rate, eps
        torch._fused_adagrad_(
            values, grads, state[0], steps, lr=lr, lr_decay=numbers[2], weight_decay=decay, eps=numbers[3],
            maximize=maximize,
        )  # fmt: skip


def round_bits(bits: Tensor, table: Tensor, place: int) -> None:
    """Round float32 numbers, given as their bits, to numbers that fit in bfloat16.

    A random number under 2^16 is added to the bits and the lower half is cut off: so a number is rounded up with the
    probability that is right on average. `table` holds the random numbers, twice in a row.
    """
    period = table.numel() // 2
    place = place % period
    added = table[place : place + period]
    n = bits.numel()
    rows = n // period * period
    if rows > 0:
        bits[:rows].view(-1, period).add_(added)
    if rows < n:
        bits[rows:].add_(added[: n - rows])
    bits.bitwise_and_(-65536)


class Rounding:
    """Random numbers with which float32 numbers are rounded to bfloat16, up or down in proportion.

    Rounded to nearest, an average whose change is under 1/512 of itself stands still: Adam's second moment would never
    decay at beta2 = 0.999. Rounded at random, it is right on average. Numbers that fit in bfloat16 stay as they are.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        order = torch.randperm(_PERIOD, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        self.table = (order * (65536 // _PERIOD) + 65536 // _PERIOD // 2).repeat(2).to(device)

    def find_place(self, step: int, block: int, stream: int) -> int:
        """Where in the table the first element of a block begins, for one of its lines in one step."""
        return noise(self._seed, step, bucket=block, stream=stream).shift % _PERIOD


@functools.cache
def compile_step_tiles() -> Callable[..., int]:
    """`step_tiles` by TorchScript; as it is where that fails or gives other results, in PyTorch's versions to come."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is on its way out of PyTorch
            script: Callable[..., int] = torch.jit.script(step_tiles)
        same = all(agrees(script, kind) for kind in (ADAM, ADAMW, SGD, ADAGRAD) for _ in range(3))
    except Exception:
        return step_tiles
    return script if same else step_tiles


def agrees(other: Callable[..., int], kind: int) -> bool:
    """Whether another form of `step_tiles` steps a few numbers exactly as it does."""
    results = []
    parts: tuple[list[float], int, int] = ([0.5, 2.0, 1.0], 16, 0) if kind == ADAMW else ([], 0, 0)
    for form, away in itertools.product((step_tiles, other), (False, True)):
        values = torch.linspace(-1.0, 1.0, 40, dtype=torch.float32)
        out = torch.zeros(40, dtype=torch.bfloat16)
        lines = [values.abs().to(torch.bfloat16) for _ in range(1 if kind >= SGD else 2)]
        scratch = [torch.empty(16, dtype=torch.float32) for _ in range(3)]
        bits = [line.view(torch.int32) for line in scratch[1:]]
        numbers, flags = [0.1, 0.1, 0.5, 0.5, 0.1], [False, False]
        arguments = (kind, numbers, flags, torch.tensor(3.0, dtype=torch.float32), False, [0.0, 0.0])
        table = torch.arange(64, dtype=torch.int32) * 1000
        given = ([0, 20, 24, 40], values, values.to(torch.bfloat16), 0.5, lines, out)
        before = [x.clone() for x in (values, *lines)] if away else []
        for x in (values, *lines) if away else ():
            x[:20].fill_(7.0)  # what is stepped
            x[24:].fill_(7.0)
        with torch.no_grad():
            form(*arguments, *given, scratch, bits, table, [3, 5], 16, [values], before, *parts)
        results.append([values, out, *lines])
    return all(torch.equal(a, b) for every in results[1:] for a, b in zip(results[0], every, strict=True))
