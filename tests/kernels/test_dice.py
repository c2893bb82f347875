"""Dice loss and cross-entropy, beside plain torch in float64.

In `TRITON_INTERPRET=1` the same tests go through the kernels, else through the plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak
from truth.float64_errors import INTERPRETED, assert_as_exact, values_and_gradients

import memplan
from memplan import kernels
from memplan.errors import InputError
from memplan.kernels import dice
from memplan.kernels.dice import class_sums

Function = Callable[..., Any]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


def plain(
    logits: Tensor, targets: Tensor, *, include_background: bool = True, batch: bool = False, squared: bool = False,
    jaccard: bool = False, weight: Tensor | None = None, ignore_index: int = -100, smooth: float = 1e-5,
) -> Tensor:  # fmt: skip
    """The same by probabilities and one-hot targets."""
    targets = targets.reshape(logits.shape[0], *logits.shape[2:]).long()
    weight = None if weight is None else weight.to(logits)
    cross_entropy = F.cross_entropy(logits, targets, weight, ignore_index=ignore_index)
    counted = targets != ignore_index
    one_hot = F.one_hot(targets.where(counted, 0), logits.shape[1]).movedim(-1, 1).to(logits) * counted[:, None]
    p = logits.softmax(1) * counted[:, None]
    if not include_background:
        p, one_hot, weight = p[:, 1:], one_hot[:, 1:], None if weight is None else weight[1:]
    dims = [*([0] if batch else []), *range(2, logits.dim())]
    common, sizes = (p * one_hot).sum(dims), (p * p if squared else p).sum(dims) + one_hot.sum(dims)
    losses = 1 - (2 * common + smooth) / ((2 * (sizes - common) if jaccard else sizes) + smooth)
    return (losses if weight is None else losses * weight).mean() + cross_entropy


def pair(targets: Tensor, smooth: float = 1e-5, **options: Any) -> tuple[Function, Function]:
    """The kernel, and plain torch, of logits."""
    of_ours = {"smooth_numerator": smooth, "smooth_denominator": smooth, **options}
    return (
        lambda logits: kernels.dice_cross_entropy(logits, targets, **of_ours),
        lambda logits: plain(logits, targets, smooth=smooth, **options),
    )


def operands(*shape: int) -> tuple[Tensor, Tensor]:
    """Logits (N, C, ...), and class indices (N, 1, ...)."""
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64), torch.randint(shape[1], (shape[0], 1, *shape[2:]))


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "foreground, batch": {"include_background": False, "batch": True},
    "squared, ignored": {"squared": True, "ignore_index": 1, "smooth": 1.0},
    "jaccard, weight": {"jaccard": True, "weight": torch.tensor([0.5, 1.0, 2.0]), "include_background": False},
}


@dtypes
@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients(options: str, dtype: torch.dtype) -> None:
    logits, targets = operands(2, 3, 7, 9, 5)
    assert_as_exact(*pair(targets, **OPTIONS[options]), [logits], dtype)


@pytest.mark.parametrize("shape", [(1, 5, 1), (3, 4, 11), (2, 17, 3, 5), (1, 33, 40, 26)], ids=str)
def test_odd_sizes(shape: tuple[int, ...]) -> None:
    """One position, in 1D and 2D, and more positions than a program sums."""
    logits, targets = operands(*shape)
    assert_as_exact(*pair(targets[:, 0], smooth=0.5), [logits], torch.float32, few=True)


def test_more_classes_than_a_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dice, "LARGEST_CLASSES", 4)
    logits, targets = operands(2, 5, 6, 7)
    assert_as_exact(*pair(targets), [logits], torch.float32, few=True)


@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (2, 3, 4, 5, 6)], ids=str)
def test_layouts(shape: tuple[int, ...]) -> None:
    """Channels last, whose gradient has that layout, too, and every second number."""
    logits, targets = operands(*shape)
    ours, theirs = pair(targets)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    for laid_out in (lambda x: x.contiguous(memory_format=last), lambda x: torch.cat((x, x), -1)[..., ::2]):
        both = [lambda x, f=function, to=laid_out: f(to(x)) for function in (ours, theirs)]
        assert_as_exact(both[0], both[1], [logits], torch.float32)
    of = logits.float().contiguous(memory_format=last).requires_grad_()
    ours(of).backward()
    assert of.grad is not None
    assert of.grad.is_contiguous(memory_format=last)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32], ids=str)
def test_dtypes_of_targets(dtype: torch.dtype) -> None:
    logits, targets = operands(2, 3, 5, 6)
    expected = values_and_gradients(pair(targets)[0], [logits.float()])
    assert all(map(torch.equal, values_and_gradients(pair(targets.to(dtype))[0], [logits.float()]), expected))


def test_autocast_leaves_dtypes_as_they_are() -> None:
    logits, targets = operands(2, 3, 4, 5)
    expected = kernels.dice_cross_entropy(logits.bfloat16(), targets)
    assert expected.dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(kernels.dice_cross_entropy(logits.bfloat16(), targets), expected)


def test_classes_that_do_not_exist_make_the_loss_nan() -> None:
    logits, targets = operands(1, 3, 4, 5)
    for wrong in (3, -1):
        targets[0, 0, 1, 2] = wrong
        assert kernels.dice_cross_entropy(logits.float(), targets).isnan()
    assert kernels.dice_cross_entropy(logits.float(), targets, ignore_index=-1).isfinite()
    assert kernels.dice_cross_entropy(logits.float(), torch.full_like(targets, -100)).isnan()  # as in torch


def test_numeric_derivatives() -> None:
    logits, targets = operands(2, 3, 4)
    for squared in (False, True):
        ours, _ = pair(targets, squared=squared, ignore_index=2)
        assert torch.autograd.gradcheck(ours, [logits.requires_grad_()])


@pytest.mark.skipif(INTERPRETED, reason="it says nothing of what runs in the op")
@pytest.mark.filterwarnings("ignore")  # opcheck's own
def test_the_op_is_as_torch_wants_it() -> None:
    logits, targets = operands(2, 3, 4)
    torch.library.opcheck(class_sums, (logits.requires_grad_(), targets[:, 0], 1, True))


@dtypes
def test_the_gradient_may_be_written_over_the_logits(dtype: torch.dtype) -> None:
    logits, targets = operands(2, 3, 30, 40)
    logits, targets = logits.to(dtype), targets.view(2, -1)
    d_sums = torch.randn(class_sums(logits, targets, 1, False).shape, dtype=dice.accumulated(dtype))
    expected = dice.differentiate(None, d_sums, logits, targets, 1, False)
    over = logits.clone()
    assert dice.differentiate(over, d_sums, over, targets, 1, False) is over
    assert torch.equal(over, expected)


def test_refused() -> None:
    logits, targets = operands(2, 3, 4, 5)
    with pytest.raises(InputError, match=r"dice_cross_entropy does not run under torch.vmap"):
        torch.vmap(kernels.dice_cross_entropy)(logits[None], targets[None])
    with pytest.raises(InputError, match=r"targets have the shape \(2, 3, 4, 5\).*Pass the label map, not one-hot"):
        kernels.dice_cross_entropy(logits, logits)
    with pytest.raises(InputError, match=r"logits have the shape \(2, 1, 4, 5\).*two or more classes"):
        kernels.dice_cross_entropy(logits[:, :1], targets)
    with pytest.raises(InputError, match=r"logits have the shape \(0, 3, 4, 5\)"):
        kernels.dice_cross_entropy(logits[:0], targets[:0])
    with pytest.raises(InputError, match=r"targets are of torch.bool. Expected integers"):
        kernels.dice_cross_entropy(logits, targets.bool())
    with pytest.raises(InputError, match=r"weight has the shape \(2,\). Expected \(3,\)"):
        kernels.dice_cross_entropy(logits, targets, weight=torch.ones(2))
    loss = kernels.dice_cross_entropy(logits.requires_grad_(), targets)
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="class_sums_backward"):
        gradient.sum().backward()


# Memory


def segmentation() -> Callable[[], None]:
    """A training step of a convolution."""
    layer, inputs, targets = nn.Conv2d(1, 6, 1), torch.randn(2, 1, 128, 128), torch.randint(6, (2, 1, 128, 128))

    def step() -> None:
        kernels.dice_cross_entropy(layer(inputs), targets).backward()
        layer.zero_grad()

    return step


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_a_recorded_step_takes_what_is_measured() -> None:
    predicted = memplan.simulate(memplan.record(segmentation, device="cpu")).peak_allocated
    assert predicted == measured_peak(segmentation)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_on_a_card_the_gradient_is_all_that_is_added() -> None:
    """By hand: logits, targets and the gradient; beside these sums of parts and of samples."""
    samples, classes, side = 2, 4, 256

    def build() -> Callable[[], None]:
        logits = torch.randn(samples, classes, side, side, requires_grad=True)
        targets = torch.randint(classes, (samples, side, side))
        return lambda: kernels.dice_cross_entropy(logits, targets).backward()

    step = memplan.simulate(memplan.record(build, device="h100", steps=1)).steps[0]
    least = samples * side * side * (2 * 4 * classes + 8)
    assert least < step.peak_allocated <= least + 64 * 512
