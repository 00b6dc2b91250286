"""Parameters whose values are not here, or not up to date: whatever uses one, its values are brought first.

While a module's forward runs, its parameters are ordinary ones. While they are hidden they are of a class made here,
which stands between them and every function of torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from unisono.methods.strategies.zero.units import Unit

Use = Callable[[list[Parameter], Any, Callable[[], Any]], Any]

_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}  # properties that show values
_METHODS = """
    size dim ndimension numel nelement element_size is_floating_point is_complex is_signed is_inference is_same_size
    get_device requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook is_shared __len__
    new_empty new_zeros new_ones new_full new_tensor
"""
_FUNCTIONS = """
    numel is_floating_point is_complex is_same_size get_device empty_like zeros_like ones_like full_like rand_like
    randn_like randint_like result_type
"""


def _find_shape_only() -> frozenset[Any]:
    """What can be asked of a parameter without its values."""
    found = [getattr(Tensor, name) for name in _METHODS.split()] + [getattr(torch, name) for name in _FUNCTIONS.split()]
    for name in set(dir(Tensor)) - _VALUES:
        attribute = getattr(Tensor, name)
        if hasattr(type(attribute), "__set__"):  # a property
            found += [attribute.__get__, attribute.__set__, attribute.__delete__]
    return frozenset(found)


_SHAPE_ONLY = _find_shape_only()
_LAYOUT = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset})  # a stand-in has one of its own


class Watched:
    """Parameters of some units, whose uses are looked at while they are hidden.

    find_use: gives a function `use(params, function, call)` that does `call`, which calls `function`, while `params`
        have their values and are not hidden; None if nothing watches the parameters any more.
    """

    def __init__(self, units: Sequence[Unit], find_use: Callable[[], Use | None]) -> None:
        self.unit_of = {param: unit for unit in units for param in unit.params}
        self._present = {param: type(param) for param in self.unit_of}
        layouts = {id(p): torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in self.unit_of}
        self._absent = {kind: _make_absent_class(kind, find_use, layouts) for kind in set(self._present.values())}

    def hide(self, unit: Unit) -> None:
        """From here on uses of a unit's parameters are looked at."""
        for param in unit.params:
            param.__class__ = self._absent[self._present[param]]

    def show(self, unit: Unit) -> None:
        """Make a unit's parameters ordinary ones again."""
        for param in unit.params:
            param.__class__ = self._present[param]


def _make_absent_class(
    base: type[Parameter], find_use: Callable[[], Use | None], layouts: Mapping[int, Tensor]
) -> type[Parameter]:
    class Absent(base):  # type: ignore[misc, valid-type]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in _LAYOUT:
                return func(layouts[id(args[0])], *args[1:], **kwargs)
            if func in _SHAPE_ONLY:
                return super().__torch_function__(func, types, args, kwargs)
            use = find_use()
            if use is None:
                raise RuntimeError(
                    f"{name_function(func)} of a parameter whose values zero has split over the ranks, and its replica "
                    "is gone: keep what un.parallel returned, or call restore() and close() of it on every rank before"
                )
            params: list[Any] = [x for x in tree_leaves((args, kwargs)) if type(x) is cls]
            return use(params, func, lambda: func(*args, **kwargs))

        def __deepcopy__(self, memo: Any) -> Any:
            use = find_use()
            if use is None:
                return super().__deepcopy__(memo)
            return use([self], copy.deepcopy, lambda: copy.deepcopy(self, memo))

        def __repr__(self) -> str:
            """Without the values: a look from one rank, in a debugger say, must not wait for the others."""
            return f"Parameter of shape {list(self.shape)}, dtype {self.dtype}, whose values come when it is used"

    Absent.__name__ = Absent.__qualname__ = base.__name__
    return Absent


def name_function(function: Any) -> str:
    """The name of a function of torch, or of a property: `norm`, `data`."""
    name = str(getattr(function, "__name__", function))
    return str(getattr(function.__self__, "__name__", name)) if name in ("__get__", "__set__") else name
