"""Bytes of pieces beside what the allocator's events say about real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.truth.cpu_allocator import allocations, peak_of
from torch import nn

from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.segments import Segment, Segments
from memplan.planning.tiles.tiled import Axis

SAMPLES, SPACE = Axis(0, samples=8), Axis(2)


class Bottleneck(nn.Module):
    """A convolution, and a residual block whose shortcut has a norm, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.narrow = nn.Sequential(nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.wide = nn.Sequential(nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64))
        self.shortcut = nn.Sequential(nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64))
        self.last = nn.Conv2d(64, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of each pixel."""
        x = self.first(x)
        x = torch.relu(self.wide(self.inner(self.narrow(x))) + self.shortcut(x))
        return self.last(x)


@pytest.fixture(scope="module")
def captured() -> Captured:
    """Return the captured block."""
    return capture(Bottleneck(), call_of((torch.randn(8, 3, 64, 64),), {}))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run kernels in one thread: workspaces depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def segment_between(captured: Captured, first: str, last: str, axis: Axis) -> Segment:
    """Return the segment from the first call of one layer to the last of another, in four pieces."""
    segments = Segments(captured.graph, captured.in_place_calls)
    calls = {layer: [op.call for op in captured.graph.forward_ops if op.layer == layer] for layer in (first, last)}
    begin, end = min(filter(None, calls[first])), max(filter(None, calls[last]))
    segment = segments.segment(begin, end, axis, 4)
    assert segment is not None
    return segment


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("axis", [SAMPLES, SPACE], ids=["samples", "space"])
@pytest.mark.parametrize(
    ("first", "last"),
    [("inner.0", "inner.0"), ("wide.1", "wide.1"), ("wide.0", "wide.1"), ("narrow.0", "wide.0"), ("narrow.0", "")],
    ids=["convolution", "norm", "convolution and norm", "branch", "block"],
)
def test_bytes_of_a_piece_are_near_those_of_the_allocator(
    captured: Captured, first: str, last: str, axis: Axis
) -> None:
    """Beside what the second of four pieces really takes. Workspaces of kernels are estimates: they matter most in
    short segments, where a factor of two is allowed, else one and a half."""
    allowed = 1.0 if first == last else 0.5
    segment = segment_between(captured, first, last, axis)
    tiled, program = segment.tiled, segment.tiled.program
    tensors = [program.likes[value].empty().fill_(0.5) for value in program.inputs]
    statistics = [like.empty().fill_(0.5) for like in tiled.statistic_likes]
    gradients = [like.empty().fill_(0.5) for like in tiled.result_likes]
    needed = [value not in program.inputs_without_gradient for value in program.inputs]

    def bytes_beside_results(sizes: list[int]) -> int:
        return peak_of(sizes) - sum(sizes)  # the results are still there, and the rest is freed

    kept = []
    sizes = allocations(lambda: kept.append(tiled.backward(tensors, statistics, gradients, needed, [1])))
    real, expected = bytes_beside_results(sizes), segment.memory.backward(4)
    assert real / (1 + allowed) <= expected <= real * (1 + allowed)
    sizes = allocations(lambda: kept.append(tiled.forward(tensors, statistics, [1])))
    assert segment.memory.forward(4) == pytest.approx(bytes_beside_results(sizes), rel=0.1)
