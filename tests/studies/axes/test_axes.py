"""An axis gives the step that the user would describe for that value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import InputError
from memplan.studies.axes.axes import Argument, Layers, Size, axis_of
from memplan.studies.axes.subject import Subject
from memplan.trace.spec import Spec
from memplan.trace.step import StepOptions


def subject(what: Any, *inputs: Any, **options: Any) -> Subject:
    return Subject(what, StepOptions(inputs, **options).checked())


def shapes(of: Subject) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in (*of.options.inputs, *of.options.kwargs.values(), *of.options.targets)]


def stack(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2, 1))


def test_batch_changes_every_leading_dimension() -> None:
    changed = axis_of("batch", s := subject(stack, "4x3x8x8", targets=("4x8x8:int64",))).at(s, 7)
    assert shapes(changed) == [(7, 3, 8, 8), (7, 8, 8)]


def test_batch_is_the_argument_of_a_build() -> None:
    def build(batch_size: int = 2) -> Any: ...

    s = subject(build)
    assert axis_of("batch", s).at(s, 5).arguments == {"batch_size": 5}


def test_size_changes_what_shares_the_image() -> None:
    targets = ("2x8x8:int64", "2x1x8x8", "2x1x4x4", "2:int64")
    s = subject(stack, "2x3x8x8", kwargs={"mask": "2x8x8:bool"}, targets=targets)
    changed = shapes(axis_of("size", s).at(s, 12))
    assert changed == [(2, 3, 12, 12), (2, 12, 12), (2, 12, 12), (2, 1, 12, 12), (2, 1, 4, 4), (2,)]


def test_size_takes_one_number_for_each_dimension() -> None:
    s = subject(stack, "1x1x8x8x4")
    axis = axis_of("patch", s)
    assert shapes(axis.at(s, "16x16x8")) == [(1, 1, 16, 16, 8)]
    assert shapes(axis.at(s, (2, 3, 4))) == [(1, 1, 2, 3, 4)]
    assert (axis.measure("16x16x8"), axis.measure(4), axis.unit) == (2048.0, 64.0, "voxel")


def test_an_aspect_rounds_down_to_what_divides() -> None:
    axis = Size("size", 3, (1, 1, 0.5), 16)
    assert axis.sizes(96) == (96, 96, 48)
    assert axis.sizes(80) == (80, 80, 32)
    assert axis.sizes(16) == (16, 16, 16)


def test_sequence_changes_tokens_masks_and_targets() -> None:
    kwargs = {"attention_mask": "2x16:int64", "bias": "2x1x16x16"}
    s = subject(stack, "2x16:int64<99", kwargs=kwargs, targets=("2x16:int64<99", "16:int64"))
    assert shapes(axis_of("sequence", s).at(s, 5)) == [(2, 5), (2, 5), (2, 1, 5, 5), (2, 5), (16,)]
    s = subject(stack, "2x16x8")
    assert shapes(axis_of("sequence", s).at(s, 5)) == [(2, 5, 8)]


def test_sequence_changes_both_sides_of_a_mask_of_pairs() -> None:
    s = subject(stack, "2x16x8", kwargs={"mask": "16x16:bool", "each": "8x16x16"})
    assert shapes(axis_of("sequence", s).at(s, 5)) == [(2, 5, 8), (5, 5), (8, 5, 5)]
    s = subject(stack, "16x16:int64<99", targets=("16x16:int64",))  # as many samples as tokens: no mask
    assert shapes(axis_of("sequence", s).at(s, 5)) == [(16, 5), (16, 5)]


def test_a_step_with_a_mask_of_pairs_is_recorded_at_other_lengths() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.heads(x, x, x, attn_mask=mask)[0]

    swept = memplan.sweep(Attention, {"sequence": [16, 5]}, "2x16x8", "16x16", device="cpu")
    assert [row["peak"] for row in swept.rows] == [
        memplan.explain(Attention, f"2x{n}x8", f"{n}x{n}", device="cpu").timeline.peak_allocated for n in (16, 5)
    ]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "bf16-true"])
def test_precision_is_what_the_step_would_be_given(name: str) -> None:
    given: dict[str, Any] = {
        "fp32": {},
        "bf16": {"autocast": "bf16"},
        "fp16": {"autocast": "fp16"},
        "bf16-true": {"dtype": torch.bfloat16},
    }[name]
    image = memplan.spec("2x3x8x8", dtype="bf16" if given.get("dtype") else "fp32")
    s = subject(stack, "2x3x8x8")
    changed = axis_of("precision", s).at(s, name)
    assert changed.options == StepOptions((image,), **given).checked()


def test_an_argument_and_layers_by_name() -> None:
    s = subject(stack, "2x3x8x8")
    assert axis_of("width", s) == Argument("width")
    assert axis_of("0.kernel_size", s) == Layers("0", "kernel_size")
    made = axis_of("0.kernel_size", s).at(axis_of("width", s).at(s, 6), 5)
    right = nn.Sequential(nn.Conv2d(3, 6, 5, padding=1), nn.Conv2d(6, 2, 1))
    options = s.options
    one, other = memplan.record(made.build(on_card=False)), memplan.explain(right, *options.inputs)
    assert memplan.simulate(one).peak_allocated == other.timeline.peak_allocated


def test_a_module_with_changed_layers_is_left_as_it_is() -> None:
    model = stack()
    s = subject(model, "2x3x8x8")
    memplan.record(axis_of("0.kernel_size", s).at(s, 5).build(on_card=False))
    assert repr(model) == repr(stack())


def test_tensors_keep_what_they_are() -> None:
    image = torch.zeros(2, 3, 8, 8, requires_grad=True).to(memory_format=torch.channels_last)
    s = subject(stack, image)
    (made,) = axis_of("size", s).at(s, 6).options.inputs
    assert made.shape == (2, 3, 6, 6)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert made.requires_grad


def test_measures_are_what_bytes_grow_with() -> None:
    s = subject(stack, "2x3x8x8")
    assert axis_of("size", s).measure(8) == 64
    assert axis_of("batch", s).measure(8) == 8
    assert axis_of("width", s).measure(8) == 8
    assert axis_of("precision", s).measure("bf16") is None
    assert axis_of("0.bias", s).measure(True) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sequence", 8, "stack has no sequence to vary. Expected a sequence among its inputs"),
        (
            "wdith",
            8,
            "stack has no argument 'wdith'. Expected batch, size, patch, sequence, precision, or one of its arguments: "
            "width. Did you mean width?",
        ),
        ("batch", 0, "batch 0. Expected a whole number above 0"),
        ("batch", "many", "batch 'many'. Expected a whole number above 0"),
        ("size", "8x8x8", "size 8x8x8 has 3 dimensions. Expected 2, as the input has"),
        ("size", "8xa", "size 'a'. Expected a whole number"),
        ("precision", "fp8", "precision 'fp8'. Expected one of fp32, bf16"),
    ],
)
def test_an_axis_that_the_step_does_not_take_is_one_message(name: str, value: Any, words: str) -> None:
    s = subject(stack, Spec((2, 3, 8, 8)))
    with pytest.raises(InputError) as error:
        axis_of(name, s).at(s, value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_without_inputs_there_is_no_batch() -> None:
    s = subject(stack)
    with pytest.raises(InputError, match="no batch to vary"):
        axis_of("batch", s).at(s, 2)


def test_layers_of_a_build_cannot_be_reached() -> None:
    def build() -> Any:
        return lambda: None

    s = subject(build)
    with pytest.raises(InputError, match="returns a step, whose layers cannot be reached"):
        memplan.record(axis_of("0.kernel_size", s).at(s, 5).build(on_card=False))
