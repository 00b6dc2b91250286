"""`optimizer.state` as the program sees it between steps: by its own parameters, whose state is split over the ranks.

A parameter's state can be cleared, by which its next step is its first. What it consists of cannot be read or changed
by itself, as no rank has all of it; counts of steps, which every part has alike, can be read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

Scalars = dict[str, Any]
_REMEDY = (
    "under zero each rank has only a part of the optimizer's state. Read it with optimizer.state_dict(), called on "
    "every rank, and change it by optimizer.load_state_dict(changed); to start anew clear all of it, "
    "optimizer.state.clear(), or that of a parameter, optimizer.state.pop(p, None), on every rank"
)


def refuse(what: str) -> ValueError:
    """What the program does with state that is split."""
    return ValueError(f"{what}: {_REMEDY}")


class ProgramState(MutableMapping[Tensor, Any]):
    """The state of one optimizer by the program's parameters.

    own: by leaf, and that of parameters which are not split. split: those that are; with state: those of `known`.
    look(param): what is kept once for a parameter, and the names of what is kept for each element; None where this rank
        does not know. reset(params): forget the state of these.
    """

    def __init__(
        self,
        own: defaultdict[Tensor, Any],
        split: Mapping[Tensor, list[Any]],
        known: Mapping[Tensor, float],
        look: Callable[[Tensor], tuple[Scalars, set[str]] | None],
        reset: Callable[[list[Tensor], str], None],
    ) -> None:
        self.own, self.known, self.look, self._reset = own, known, look, reset
        self._split, self._leaves = split, {leaf for leaves in split.values() for leaf in leaves}
        self._lent: list[tuple[Tensor, int, str]] = []  # copies that the program has, and their versions

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.own.items())

    def __repr__(self) -> str:
        return f"<the state of {len(self)} parameters, split over the ranks>"

    def __iter__(self) -> Iterator[Tensor]:
        yield from (p for p in self._split if p in self.known)
        yield from (p for p in self.own if p not in self._leaves)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        return param in (self.known if param in self._split else self.own)

    def __getitem__(self, param: Tensor) -> Any:
        return _Entry(self, param) if param in self._split else self.own[param]

    def get(self, param: Tensor, default: Any = None) -> Any:
        """Without making an entry, which `[]` does."""
        return super().get(param, default) if param in self else default

    def __setitem__(self, param: Tensor, value: Any) -> None:
        if param not in self._split:
            self.own[param] = value
        elif isinstance(value, _Entry) or value:
            raise refuse("optimizer.state[p] = ...")
        else:
            self._reset([param], "optimizer.state[p] = {}")

    def __delitem__(self, param: Tensor) -> None:
        if param not in self:
            raise KeyError(param)
        self.pop(param)

    def pop(self, param: Tensor, *default: Any) -> Any:
        """What is popped of a parameter that is split cannot be read any more."""
        if param not in self._split or (default and param not in self.known):
            return self.own.pop(param, *default) if param not in self._split else default[0]
        if param not in self.known:
            raise KeyError(param)
        self._reset([param], "optimizer.state.pop(p)")
        return _Entry(self, param, is_gone=True)

    def clear(self) -> None:
        for param in [p for p in self.own if p not in self._leaves]:
            del self.own[param]
        self._reset(list(self._split), "optimizer.state.clear()")

    def lend(self, value: Any, key: str) -> Any:
        """A copy for the program: see `check_lent`."""
        if isinstance(value, Tensor):
            value = value.clone()
            self._lent.append((value, value._version, key))
        return value

    def check_lent(self) -> None:
        """Refuse what the program has written to copies."""
        lent, self._lent = self._lent, []
        for value, version, key in lent:
            if value._version != version:
                raise refuse(f"optimizer.state[p][{key!r}] was written to")


class _Entry(MutableMapping[str, Any]):
    """The state of one parameter that is split; `is_gone`: of a former one."""

    def __init__(self, state: ProgramState, param: Tensor, *, is_gone: bool = False) -> None:
        self._state, self._param, self._is_gone = state, param, is_gone

    def _look(self, what: str) -> tuple[Scalars, set[str]]:
        if not self._is_gone and self._param not in self._state.known:
            return {}, set()
        found = None if self._is_gone else self._state.look(self._param)
        if found is None:
            raise refuse(f"{what} of a parameter of shape {list(self._param.shape)}")
        return found

    def __getitem__(self, key: str) -> Any:
        scalars, lines = self._look(f"optimizer.state[p][{key!r}]")
        if key in lines:
            raise refuse(f"optimizer.state[p][{key!r}] of a parameter of shape {list(self._param.shape)}")
        return self._state.lend(scalars[key], key)

    def __setitem__(self, key: str, value: Any) -> None:
        raise refuse(f"optimizer.state[p][{key!r}] = ...")

    def __delitem__(self, key: str) -> None:
        raise refuse(f"del optimizer.state[p][{key!r}]")

    def __iter__(self) -> Iterator[str]:
        scalars, lines = self._look("the keys of optimizer.state[p]")
        return iter([*scalars, *sorted(lines)])

    def __len__(self) -> int:
        scalars, lines = self._look("the keys of optimizer.state[p]")
        return len(scalars) + len(lines)

    def __contains__(self, key: object) -> bool:
        return any(key in some for some in self._look(f"{key!r} in optimizer.state[p]"))

    def __repr__(self) -> str:
        return "<the state of a parameter, split over the ranks>"

    def clear(self) -> None:
        self._state.pop(self._param, None)
