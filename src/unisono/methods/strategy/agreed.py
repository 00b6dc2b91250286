"""The model that all ranks agree on, in the place of each rank's own: for libraries that evaluate and save what they
were given."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.methods.strategy.replica import Replica
from unisono.packing import pack
from unisono.training.checkpoint import save

__all__ = ["Agreed", "save_own"]


class Agreed:
    """Puts the values of `replica.consolidate()` into the model, and brings this rank's own back.

    Where model and optimizer are split over the ranks, they are whole meanwhile. Every rank calls each method, inside
    `torch.inference_mode()` too: memory that is made here is used outside it.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._own: list[tuple[Tensor, Tensor]] | None = None  # tensors that were changed, and what they held
        self._is_whole = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, *, whole: bool = True) -> None:
        """Let the model be the agreed one. `whole`: with all values of a model that is split, as saving needs it."""
        if whole and not self._is_whole:
            self.replica.restore()
            self._is_whole = True
        if self._own is None:
            self._own = []
            agreed = self.replica.consolidate()
            if agreed is not self.replica.model:
                for mine, theirs in zip(_tensors(self.replica.model), _tensors(agreed), strict=True):
                    if not torch.equal(mine, theirs):
                        self._own.append((mine, mine.clone()))
                        mine.copy_(theirs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_back(self) -> None:
        """Let the model be this rank's own again, as it was before `put`."""
        for mine, before in self._own or []:
            mine.copy_(before)
        self._own = None
        if self._is_whole:
            self._is_whole = False
            self.replica.split_again()

    @torch.inference_mode(False)
    def finish(self, *, keep: bool = False) -> None:
        """End the training: the model is an ordinary one, with the agreed values (`keep`: with those that it has)."""
        if not keep:
            self.put()
        elif not self._is_whole:
            self.replica.restore()
        self.replica.close()
        self._own, self._is_whole = None, False


@torch.inference_mode(False)
def save_own(folder: Path, replica: Replica) -> bool:
    """Write what a library's checkpoint of the agreed model and rank 0's optimizer does not hold, where there is any:
    what a reducer has kept back, ranks' own models and optimizers. Every rank calls it."""
    mine = replica.own_optimizer or getattr(replica, "own_models", False) or bool(pack(replica.state_dict())[1])
    if not any(replica.world.gather_objects(mine)):
        if replica.world.rank == 0:  # what another method left there
            shutil.rmtree(folder, ignore_errors=True)
        return False
    save(folder, replica, keep=1)
    return True


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for x in (*model.parameters(), *model.buffers()):
        yield x.detach()
