"""What a recorded segment consists of, and what cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.planning.tiles.recorded_segments import recorded
from torch import Tensor, nn

from memplan.planning.tiles.program import NotTileable


def test_changes_in_place_are_functional_ops() -> None:
    """The op without underscore, and readers behind it read the new value."""
    program, _ = recorded(lambda x: (x + 1).relu_().mul_(2).exp(), [torch.randn(3)])
    assert [node.target for node in program.nodes] == [
        "aten.add.Tensor", "aten.relu.default", "aten.mul.Tensor", "aten.exp.default"
    ]  # fmt: skip
    for before, node in zip(program.nodes, program.nodes[1:], strict=False):
        assert node.reads == before.outputs
    assert program.outputs == program.nodes[-1].outputs


def test_running_statistics_are_no_inputs() -> None:
    """A training batch norm reads them for nothing; nothing of the model is changed."""
    norm = nn.BatchNorm1d(2)
    program, tensors = recorded(norm, [torch.randn(4, 2)], [*norm.parameters(), *norm.buffers()])
    assert [tuple(tensor.shape) for tensor in tensors] == [(4, 2), (2,), (2,)]
    assert len(program.static_inputs) == 2
    assert torch.equal(norm.running_mean, torch.zeros(2))  # pyright: ignore[reportArgumentType]


def test_what_nothing_reads_is_left_out() -> None:
    """A pool of signals also makes a view of its indices; the unread norm is kept for its running statistics."""
    norm = nn.BatchNorm1d(2)

    def function(x: Tensor) -> Tensor:
        norm(x.exp())
        return F.max_pool1d(norm(x.sin()), 2) + 1

    x = torch.randn(4, 2, 6, requires_grad=True)
    program, _ = recorded(function, [x], [*norm.parameters(), *norm.buffers()])
    assert [node.name for node in program.nodes] == [
        "exp", "native_batch_norm", "sin", "native_batch_norm", "unsqueeze", "max_pool2d_with_indices", "squeeze", "add"
    ]  # fmt: skip


def written_view(x: Tensor) -> Tensor:
    y = x + 1
    half = y[:1]
    y.relu_()
    return half + y


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.relu_(), "from outside"),
        (written_view, "views"),
        (lambda x: F.relu(x, inplace=True), "from outside"),
    ],
)
def test_what_changes_more_than_its_own_values_is_refused(function: Callable[[Tensor], Tensor], why: str) -> None:
    """A tensor of the user's, or one of which a view is read again."""
    with pytest.raises(NotTileable, match=why):
        recorded(function, [torch.randn(3)])


def test_nothing_is_computed() -> None:
    """Tensors of terabytes."""
    x = torch.empty(1, device="meta").expand(1 << 40)
    program, _ = recorded(lambda x: x.relu() + 1, [x])
    assert len(program.nodes) == 2
