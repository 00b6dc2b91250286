"""FlatLayout: where tensors lie in a line, and how they are seen there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unisono.methods.buckets import FlatLayout, view_like

SHAPES = [(3, 5), (), (0, 4), (7,), (2, 3, 4, 4), (1, 6)]


def tensors() -> list[Tensor]:
    return [torch.randn(shape) for shape in SHAPES]


def assert_round_trip(layout: FlatLayout, line: Tensor, given: list[Tensor]) -> None:
    views = layout.views(line)
    for view, x in zip(views, given, strict=True):
        view.copy_(x)
    for view, x in zip(views, given, strict=True):  # what was written to one has not been written over by another
        assert view.shape == x.shape
        assert view.dtype == line.dtype if line.dtype != torch.uint8 else view.dtype == x.dtype
        assert torch.equal(view, x.to(view.dtype))


@pytest.mark.parametrize("align_bytes", [0, 64, 4096])
@pytest.mark.parametrize("offset", [0, 3])
def test_every_tensor_has_elements_of_its_own_on_a_boundary(align_bytes: int, offset: int) -> None:
    given = tensors()
    layout = FlatLayout(given, align_bytes=align_bytes)
    assert all(start * 4 % max(align_bytes, 4) == 0 for start in layout.starts)
    assert_round_trip(layout, torch.zeros(layout.numel + offset)[offset:], given)


def test_a_line_may_have_another_dtype_than_the_tensors() -> None:
    given = tensors()
    layout = FlatLayout(given, torch.bfloat16)
    assert all(start * 2 % 64 == 0 for start in layout.starts)
    assert_round_trip(layout, torch.zeros(layout.numel, dtype=torch.bfloat16), given)


def test_a_line_of_bytes_holds_tensors_of_several_dtypes() -> None:
    dtypes = [torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8]
    given = [x.to(dtype) for x, dtype in zip(tensors(), dtypes, strict=True)]
    layout = FlatLayout(given, torch.uint8, contiguous=True)
    assert layout.lengths == [x.nbytes for x in given]
    assert_round_trip(layout, torch.zeros(layout.numel, dtype=torch.uint8), given)


def test_views_have_the_memory_order_of_tensors_that_are_dense_unless_rows_are_asked_for() -> None:
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    given = [channels_last, torch.randn(6, 4).t(), torch.randn(8, 4)[:, :3]]
    line = torch.zeros(FlatLayout(given).numel)
    strides = [view.stride() for view in FlatLayout(given).views(line)]
    assert strides == [given[0].stride(), given[1].stride(), (3, 1)]  # the last has gaps in memory of its own
    assert [view_like(torch.zeros(x.numel()), x).stride() for x in given] == strides
    assert all(view.is_contiguous() for view in FlatLayout(given, contiguous=True).views(line))


def test_overlaps_and_gaps_make_up_the_line() -> None:
    layout = FlatLayout(tensors())
    line = torch.zeros(layout.numel + 16)  # padded, as for a number of ranks
    each = line.numel() // 4
    for rank in range(4):
        for i, first, last in layout.overlaps(rank * each, (rank + 1) * each):
            assert layout.starts[i] <= first < last <= layout.starts[i] + layout.lengths[i]
            line[first:last] += 1
    for gap in layout.gaps(line):
        gap += 1
    assert torch.equal(line, torch.ones_like(line))
