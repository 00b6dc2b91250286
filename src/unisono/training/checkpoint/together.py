"""What all ranks do alike: steps that fail on every rank if they fail on one, and finding the newest checkpoint."""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.training.checkpoint.folder import Contents, find_candidates, is_visible
from unisono.training.checkpoint.remote import Place, RemotePath
from unisono.world import World

_VISIBLE_WITHIN_S = 5.0  # a network disk may show a new folder late


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; raised on every rank alike."""


def do_together(gather: Callable[[Any], list[Any]], what: str, do: Callable[[], Any]) -> list[Any]:
    """Every rank's result of `do`, which must not talk to others; if it fails on any rank, all ranks raise.

    A TypeError or ValueError stays itself on its own rank, as it is about what the caller gave.
    """
    result, error = None, None
    try:
        result = do()
    except Exception as caught:
        error = caught
    answers = gather([result, None if error is None else shorten(error)])
    failed = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem is not None]
    if isinstance(error, TypeError | ValueError):
        raise error
    if failed:
        same = len(failed) == len(answers) > 1 and len({problem for _, problem in answers}) == 1
        raise CheckpointError(f"{what}: {f'every rank: {answers[0][1]}' if same else '; '.join(failed)}") from error
    return [answer[0] for answer in answers]


def shorten(error: BaseException) -> str:
    """An error in a line."""
    plain = isinstance(error, ValueError | CheckpointError)
    return str(error) if plain else f"{type(error).__name__}: {error}"


def digest_state(tree: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Two checksums of every tensor (dtype, shape, bytes) by name, and of the tree under the empty name.

    They are to tell ranks' tensors apart, against no adversary: five times as fast as a cryptographic digest.
    """

    def digest(*parts: Any) -> str:
        crc, adler = 0, 1
        for part in parts:
            crc, adler = zlib.crc32(part, crc), zlib.adler32(part, adler)
        return f"{crc:08x}{adler:08x}"

    found = {"": digest(json.dumps(tree).encode())}
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
        found[name] = digest(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), raw)
    return found


def wait_until_visible(folder: Place, host: str) -> None:
    """Wait until this rank sees the folder that rank 0 has made; CheckpointError if it does not."""
    if isinstance(folder, RemotePath):
        return
    end = time.monotonic() + _VISIBLE_WITHIN_S
    while not folder.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{folder.parent} on {host} does not show the folder that rank 0 just made there; "
                "give every rank a path on one disk that all hosts share"
            )
        time.sleep(0.05)


def find_newest(
    root: Place, world: World, read: Callable[[Place], Contents]
) -> tuple[Contents, Place, list[tuple[str, str]]]:
    """The newest checkpoint that every rank could `read`, its folder, and the skipped ones with reasons."""

    def list_candidates() -> list[list[str]]:
        found = find_candidates(root) if world.rank == 0 else []
        if newer := [c.problem for c in found if c.is_newer]:
            raise CheckpointError(newer[0])
        return [[str(c.path.relative_to(root)), c.problem] for c in found]

    names = do_together(world.gather_objects, f"{root} could not be read", list_candidates)[0]
    if not names:
        raise FileNotFoundError(f"no checkpoint at {root}: expected a folder that un.save has written to")
    skipped: list[tuple[str, str]] = []
    for name, problem in names:
        result: Contents | str = problem
        if not problem and not is_visible(root / name):
            result = f"it cannot be seen from {world.host}; give a path on one disk that all hosts share"
        elif not problem:
            try:
                result = read(root / name)
            except (OSError, ValueError) as error:
                result = shorten(error)
        reasons = world.gather_objects(result if isinstance(result, str) else "")
        if isinstance(result, Contents) and not any(reasons):
            return result, root / name, skipped
        why = {reason: rank for rank, reason in reversed(list(enumerate(reasons))) if reason}
        found_by = [reason if reasons[0] == reason else f"rank {rank}: {reason}" for reason, rank in why.items()]
        skipped.append((str(root / name), "; ".join(reversed(found_by))))
    lines = "".join(f"\n  {where}: {why}" for where, why in skipped)
    raise CheckpointError(f"no intact checkpoint at {root}; restore one from a copy, or give another path:{lines}")


def warn_of_damage(found: Contents, folder: Place, skipped: list[tuple[str, str]], *, stacklevel: int) -> None:
    """Warn of damaged checkpoints, and of tensors that became the mean over ranks."""
    if skipped:
        lines = "".join(f"\n  skipped {where}: {why}" for where, why in skipped)
        warnings.warn(f"loaded {folder}; others beside it are damaged:{lines}", stacklevel=stacklevel)
    if found.averaged:
        some = ", ".join(found.averaged[:3]) + (", ..." if len(found.averaged) > 3 else "")
        warnings.warn(
            f"{folder} is of another world size or strategy, and {len(found.averaged)} tensors differed between its "
            f"ranks ({some}): each became their mean",
            stacklevel=stacklevel,
        )
