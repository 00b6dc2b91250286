"""Launches of Triton kernels without Triton's own look-up, which takes longer than small kernels do."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor, ...],
    *constants: Any,
    numbers: tuple[int, ...] = (),
    warps: int = 4,
    **options: Any,
) -> None:
    """Run a kernel whose arguments are tensors, then `numbers`, then constants. Numbers are those that ask for no
    compilation of their own (`do_not_specialize`).

    Triton looks at every argument at every launch; here it does so once for each way in which they can differ: their
    dtypes, whether they lie at 16 bytes, and whether a number takes 64 bits.
    """
    places = [(x.dtype, x.data_ptr() % 16) for x in tensors]
    key = (kernel.__name__, tensors[0].device, constants, warps, *places, *[n.bit_length() > 31 for n in numbers])
    found = _compiled.get(key)
    if found is not None:
        found[(programs, 1, 1)](*tensors, *numbers, *constants)
        return
    compiled = kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps, **options)
    if compiled is not None:  # None: Triton's interpreter
        _compiled[key] = compiled
