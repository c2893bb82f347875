"""What torch asks cuDNN for, worked out by hand from the shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memplan.cudnn.questions import Question
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.cudnn_convolution import operand_copies
from memplan.trace.semantics.cuda.cudnn_questions import questions

H100 = Arch((9, 0), 132)
ALL = (True, True, True)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=True):
        yield


def empty(*sizes: int, **more: Any) -> torch.Tensor:
    return torch.empty(*sizes, device="meta", **more)


def forward(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, *options: Any) -> list[tuple[int, Question]]:
    stride, padding, dilation, transposed, groups = options
    return questions((x, w, None, stride, padding, dilation, transposed, [0], groups), y, backward=False)


def backward(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *options: Any, mask: tuple[bool, ...] = ALL
) -> list[tuple[int, Question]]:
    return questions(_backward(y, x, w, *options, mask=mask), None, backward=True)


def _backward(y: Any, x: Any, w: Any, *options: Any, mask: tuple[bool, ...] = ALL) -> tuple[Any, ...]:
    stride, padding, dilation, transposed, groups = options
    return y, x, w, [w.shape[0]], stride, padding, dilation, transposed, [0], groups, list(mask)


SIZES = {"x": (16, 64, 56, 56), "w": (128, 64, 3, 3), "y": (16, 128, 28, 28)}
OPTIONS = ([2, 2], [1, 1], [1, 1], False, 1)


def test_a_convolution_and_its_gradients_are_asked_for_in_the_same_sizes() -> None:
    x, w, y = (empty(*SIZES[name]) for name in "xwy")
    expected = Question(
        "forward",
        SIZES["x"],
        SIZES["w"],
        SIZES["y"],
        False,
        "float32",
        (1, 1),
        (2, 2),
        (1, 1),
        (32, 32, 32),
        True,
        False,
    )
    assert forward(x, w, y, *OPTIONS) == [(0, expected)]
    both = backward(y, x, w, *OPTIONS)
    assert [(number, one.kind) for number, one in both] == [(0, "input gradient"), (1, "weight gradient")]
    assert {(one.x, one.w, one.y) for _, one in both} == {(expected.x, expected.w, expected.y)}
    only = backward(y, x, w, *OPTIONS, mask=(False, True, True))
    assert [(number, one.kind) for number, one in only] == [(1, "weight gradient")]


def test_a_transposed_one_is_the_gradient_of_a_plain_one() -> None:
    """ConvTranspose2d(64, 32, 4, 2, 1): the plain convolution leads from its result to its input."""
    x, w, y = empty(16, 64, 28, 28), empty(64, 32, 4, 4), empty(16, 32, 56, 56)
    options = ([2, 2], [1, 1], [1, 1], True, 1)
    sizes = ((16, 32, 56, 56), (64, 32, 4, 4), (16, 64, 28, 28))
    asked = [*forward(x, w, y, *options), *backward(y, x, w, *options)]
    assert [(number, one.kind) for number, one in asked] == [
        (0, "input gradient"), (0, "forward"), (1, "weight gradient")
    ]  # fmt: skip
    assert {(one.x, one.w, one.y) for _, one in asked} == {sizes}


def test_one_dimension_is_computed_in_two() -> None:
    x, w, y = empty(4, 8, 100), empty(16, 8, 7), empty(4, 16, 50)
    ((_, asked),) = forward(x, w, y, [2], [3], [1], False, 1)
    assert (asked.x, asked.w, asked.y) == ((4, 8, 1, 100), (16, 8, 1, 7), (4, 16, 1, 50))
    assert (asked.padding, asked.stride, asked.dilation) == ((0, 3), (1, 2), (1, 1))


def test_either_operand_decides_the_memory_format() -> None:
    last = {"memory_format": torch.channels_last}
    for x_format, w_format, expected in (({}, {}, False), (last, {}, True), ({}, last, True)):
        x, w, y = empty(*SIZES["x"], **x_format), empty(*SIZES["w"], **w_format), empty(*SIZES["y"])
        ((_, asked),) = forward(x, w, y, *OPTIONS)
        assert asked.channels_last is expected


@pytest.mark.parametrize(("offset", "alignment"), [(0, 32), (1, 4), (2, 8), (4, 16), (8, 32), (24, 32), (6, 8)])
def test_alignment_is_that_of_the_address(offset: int, alignment: int) -> None:
    """In float32, of blocks of 512 bytes; the result is made anew, and so is a copy into another format."""
    x = empty(16 * 64 * 56 * 56 + offset)[offset:].view(16, 64, 56, 56)
    w, y = empty(*SIZES["w"]), empty(*SIZES["y"])
    ((_, asked),) = forward(x, w, y, *OPTIONS)
    assert asked.alignments == (alignment, 32, 32)
    ((_, into), (_, weight)) = backward(y, x, w, *OPTIONS)
    assert into.alignments == (32, 32, 32)
    assert weight.alignments == (alignment, 32, 32)
    ((_, copied),) = forward(x, w.to(memory_format=torch.channels_last), y, *OPTIONS)
    assert copied.alignments == (32, 32, 32)


def test_what_is_set_for_cudnn_is_asked_for() -> None:
    x, w, y = (empty(*SIZES[name]) for name in "xwy")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        ((_, asked),) = forward(x, w, y, *OPTIONS)
        assert (asked.tf32, asked.deterministic) == (False, True)
        ((_, half),) = forward(x.half(), w.half(), y.half(), *OPTIONS)
        assert half.tf32, "it says something of float32 alone"
    ((_, asked),) = forward(x, w, y, *OPTIONS)
    assert (asked.tf32, asked.deterministic) == (True, False)


def test_another_dtype_is_not_asked_for() -> None:
    x, w, y = (empty(*SIZES[name], dtype=torch.int8) for name in "xwy")
    assert forward(x, w, y, *OPTIONS) == []


def test_copies_lie_around_the_results() -> None:
    """Sizes in float32: x 12,845,056 bytes, w 294,912, y 6,422,528."""
    last = torch.channels_last
    x, w, y = (empty(*SIZES[name]) for name in "xwy")
    temporaries = operand_copies(
        _backward(y.expand(SIZES["y"]), x, w.to(memory_format=last), *OPTIONS), H100, backward=True
    )
    copies = [(one.bytes, one.first, one.after, one.until) for one in temporaries if one.after != 2]
    assert copies == [(12845056, True, None, 2), (6422528, True, None, 2)]
    spread = empty(1, 1, 1, 1).expand(SIZES["y"])
    temporaries = operand_copies(_backward(spread, x, w, *OPTIONS), H100, backward=True)
    copies = [(one.bytes, one.first, one.after, one.until) for one in temporaries if one.after != 2]
    assert copies == [(6422528, False, 0, None), (6422528, False, 0, 2)], "contiguous for each of the two gradients"
    temporaries = operand_copies(_backward(spread, x, w, *OPTIONS, mask=(False, True, False)), H100, backward=True)
    assert [(one.bytes, one.after, one.until) for one in temporaries] == [(6422528, 0, 2)]
    swapped = empty(56, 56, 16, 64).permute(2, 3, 0, 1)
    options = (swapped, w, None, *OPTIONS[:4], [0], 1)
    assert [(one.bytes, one.first, one.until) for one in operand_copies(options, H100, backward=False)] == [
        (12845056, True, 2)
    ]
