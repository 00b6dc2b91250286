"""Who is called around an optimizer's step. Those that watch may come and go while they are called, which torch's own
hooks may not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

Begin = Callable[[Optimizer, Any, dict[str, Any]], Any]
_ATTRIBUTE = "_unisono_step_hooks"


class StepHooks:
    """One pair of torch's hooks on one optimizer, and those that they call, in the order in which they came."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._watchers: list[Watcher] = []
        self._handles: list[Any] = []
        self._running = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepHooks:
        """Those of this optimizer (a copy of it has none)."""
        found = getattr(optimizer, _ATTRIBUTE, None)
        if not isinstance(found, StepHooks) or found._optimizer() is not optimizer:
            found = cls(optimizer)
            setattr(optimizer, _ATTRIBUTE, found)
        return found

    def watch(self, begin: Begin | None, end: Callable[[], None]) -> Watcher:
        """Call `begin` before every step, with what a pre-hook of torch gets and returns, and `end` after it."""
        optimizer = self._optimizer()
        if not self._handles and optimizer is not None:
            self._handles = [
                optimizer.register_step_pre_hook(self._begin),
                optimizer.register_step_post_hook(lambda *_: self._end()),
            ]
        watcher = Watcher(self, begin, end)
        self._watchers.append(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Call it no more."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers and not self._running:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        changed = None
        self._running = True
        try:
            for watcher in list(self._watchers):
                if watcher.begin is not None and watcher in self._watchers:
                    answer = watcher.begin(optimizer, args, kwargs)
                    if answer is not None:
                        changed = args, kwargs = answer
        finally:
            self._running = False
        return changed

    def _end(self) -> None:
        self._running = True
        try:
            for watcher in list(self._watchers):  # one that comes meanwhile has not seen this step begin
                if watcher in self._watchers:
                    watcher.end()
        finally:
            self._running = False


class Watcher:
    """What is called, and until when."""

    def __init__(self, hooks: StepHooks, begin: Begin | None, end: Callable[[], None]) -> None:
        self._hooks, self.begin, self.end = hooks, begin, end

    def remove(self) -> None:
        """Call it no more."""
        self._hooks.leave(self)
