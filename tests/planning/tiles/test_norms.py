"""Norms in parts: statistics and derivatives beside torch's own of the whole, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memplan.planning.tiles.norms import Norm, Normalize, Statistics, gradient_sums, input_gradient, norm_of
from memplan.planning.tiles.program import Node


def norm(groups: int | None) -> Norm:
    """Return a norm of value 0 with weight 1 and bias 2."""
    return Norm(Node("", (), {}, (3,)), 0, 1, 2, 1e-5, groups)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_statistics_add_up(groups: int | None, offset: float) -> None:
    """Parts of unequal size, also far from 0, where sums of squares would cancel."""
    x = torch.randn(3, 4, 11, dtype=torch.float64) + offset
    collected = Statistics(norm(groups))
    for part in x.split([2, 5, 4], dim=2):
        collected.add(part)
    mean, variance = collected.result(x.dtype)
    whole = x.transpose(0, 1).reshape(1, 4, -1) if groups is None else x.reshape(3, groups, -1)
    torch.testing.assert_close(mean, whole.mean(2))
    torch.testing.assert_close(variance, whole.var(2, correction=0), rtol=1e-6, atol=0)
    assert collected.count == whole.shape[2]


@pytest.mark.parametrize("groups", [None, 2])
def test_parts_that_overlap_have_the_derivative_of_the_whole(groups: int | None) -> None:
    """Two parts with a border of three: gradients of overlapping parts add up."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    whole = F.batch_norm(x, None, None, weight, bias, True) if groups is None else F.group_norm(x, groups, weight, bias)
    dy = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, [x, weight, bias], dy)
    kind, collected = norm(groups), Statistics(norm(groups))
    collected.add(x.detach())
    mean, variance = collected.result(x.dtype)
    # the gradient of each element comes from one part or, at the border, half from each
    share = torch.ones(10, dtype=torch.float64)
    share[4:7] = 0.5
    parts = [(0, 7, (2, 0, 5)), (4, 10, (2, 1, 5))]
    pieces = [(x.detach()[..., low:high], dy[..., low:high] * share[low:high]) for low, high, _ in parts]
    sums = [gradient_sums(kind, piece, mean, variance, incoming) for piece, incoming in pieces]
    total = sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]
    computed = torch.zeros_like(x)
    for first, ((low, high, own), (piece, incoming)) in enumerate(zip(parts, pieces, strict=True)):
        leaves = [piece.clone().requires_grad_(), *(v.detach().requires_grad_() for v in (weight, bias))]
        count = collected.count
        result = Normalize.apply(kind, *leaves, mean, variance, total, count, own, first == 0)
        torch.testing.assert_close(result, whole[..., low:high])
        gradients = torch.autograd.grad(result, leaves, incoming, allow_unused=True)
        computed[..., low:high] += gradients[0]
        if first == 0:
            torch.testing.assert_close(list(gradients[1:]), list(expected[1:]))
        else:
            assert gradients[1:] == (None, None)
    torch.testing.assert_close(computed, expected[0])


@pytest.mark.parametrize("groups", [None, 2, "instances"])
@pytest.mark.parametrize("follows", [0.0, 3.0])
@pytest.mark.parametrize("offset", [0.0, 30.0, 1000.0])
def test_contiguous_parts_are_as_accurate_as_torch(groups: int | str | None, follows: float, offset: float) -> None:
    """Parts by torch's kernels in float32, at most twice as far from float64 as torch's own derivative of the whole.

    ``follows``: by how much the gradient of the result follows the input, as that of a squared error does: then most of
    it cancels in that of the input.
    """
    torch.manual_seed(0)
    is_instances, samples, channels = groups == "instances", 4, 32
    exact = (torch.randn(samples, channels, 600, dtype=torch.float64) + offset).float().double()
    weight, bias = (torch.randn(channels).double() for _ in range(2))
    dy = torch.randn_like(exact) + 0.5 + follows * (exact - offset) * torch.randn(channels, 1).double()
    dy = dy.float().double()
    if is_instances:  # which torch computes as the batch norm of a sample with more channels
        exact, dy = (each.reshape(1, samples * channels, -1) for each in (exact, dy))
        weight, bias, groups = weight.repeat(samples), bias.repeat(samples), None
    assert not isinstance(groups, str)

    def whole(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return torch's gradients of input, weight and bias."""
        x, w, b = leaves = [each.to(dtype).requires_grad_() for each in (exact, weight, bias)]
        if is_instances:
            y = F.instance_norm(x, weight=w, bias=b)
        else:
            y = F.batch_norm(x, None, None, w, b, True) if groups is None else F.group_norm(x, groups, w, b)
        return torch.autograd.grad(y, leaves, dy.to(dtype))

    kind, collected = norm(groups), Statistics(norm(groups))
    pieces = [each.contiguous() for each in exact.float().split([150, 450], dim=2)]
    incoming = [each.contiguous() for each in dy.float().split([150, 450], dim=2)]
    for piece in pieces:
        collected.add(piece)
    statistics = collected.result(torch.float32)
    parts = [gradient_sums(kind, piece, *statistics, each) for piece, each in zip(pieces, incoming, strict=True)]
    sums = parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
    arguments = weight.float(), *statistics
    gradients = [
        input_gradient(kind, piece, *arguments, each, sums, collected.count)
        for piece, each in zip(pieces, incoming, strict=True)
    ]
    computed = torch.cat(gradients, dim=2), sums[1].sum(0), sums[0].sum(0)
    for own, ours, true in zip(whole(torch.float32), computed, whole(torch.float64), strict=True):
        assert (ours - true).norm() <= 2 * (own - true).norm() + 1e-7 * true.norm()
    for piece, each, gradient in zip(pieces, incoming, gradients, strict=True):
        in_place = input_gradient(kind, piece, *arguments, each, sums, collected.count, out=each)
        assert in_place is each
        assert each.equal(gradient)


def test_only_norms_over_the_axis_are_norms() -> None:
    """An instance norm's samples lie in its channels; an evaluated norm has its statistics."""
    from memplan.planning.graph.joint_graph import Ref

    target = "aten._native_batch_norm_legit.default"
    training = Node(target, (Ref(0), Ref(1), Ref(2), None, None, True, 0.1, 1e-5), {}, (3,))
    evaluated = Node(target, (Ref(0), Ref(1), Ref(2), Ref(4), Ref(5), False, 0.1, 1e-5), {}, (3,))
    assert norm_of(training, 0) == Norm(training, 0, 1, 2, 1e-5)
    assert norm_of(training, 1) is None
    assert norm_of(evaluated, 0) is None
