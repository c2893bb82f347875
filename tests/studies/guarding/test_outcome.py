"""What is said of a step beside its baseline, for figures written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.guard_figures import MIB, figures, taken

from memplan.errors import BaselineError, UsageError
from memplan.studies.guarding.baseline import Baseline
from memplan.studies.guarding.outcome import allowance, baseline_of, compare_with
from memplan.studies.guarding.recorded_figures import KernelChoice

FLASH, EFFICIENT = "scaled_dot_product_flash_attention", "scaled_dot_product_efficient_attention"


def test_alike_layers_are_one_sentence_with_its_causes_and_the_reason() -> None:
    layers = [f"blocks.{at}.attn" for at in range(12)]
    before = figures({(layer, "saved"): MIB for layer in layers}, dict.fromkeys(layers, (FLASH, "linear")))
    grown = {(layer, "saved"): MIB * (65 if at >= 3 else 1) for at, layer in enumerate(layers)}
    grown |= {(layer, "temporary"): MIB for layer in layers[3:4]}
    ran = {layer: ("matmul", "softmax", "linear") if at >= 3 else (FLASH, "linear") for at, layer in enumerate(layers)}
    chosen = {layer: KernelChoice("a mask is given", "net.py:31") for layer in layers[3:]}
    outcome = compare_with(before, taken(grown, ran, chosen=chosen))
    assert outcome.grew
    assert [str(change) for change in outcome.changes] == [
        "attn of blocks 3 to 11: +577.0 MiB (saved activations +576.0 MiB, temporaries +1.0 MiB); attention is no "
        "longer fused: flash attention became matmul, softmax (a mask is given)"
    ]
    assert outcome.changes[0].where == "net.py:31"  # the call that chose, not the layer's first line


def test_one_kernel_for_another_is_said_by_their_names() -> None:
    before = figures({("attn", "saved"): 1}, {"attn": (FLASH,)})
    now = taken(
        {("attn", "saved"): 3}, {"attn": ("expand", EFFICIENT)}, chosen={"attn": KernelChoice("a mask", "a.py:1")}
    )
    (change,) = compare_with(before, now).changes
    assert change.why == "flash attention became memory-efficient attention (a mask)"


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (("linear", "relu"), ("linear", "gelu"), "relu became gelu"),
        (("linear",), ("linear", "gelu"), "gelu is new"),
        (("linear", "gelu"), ("linear",), "gelu is gone"),
        (None, ("linear",), "the layer ran nothing before"),
        (("linear",), None, "the layer no longer runs"),
        (("linear", "relu"), ("relu", "linear"), ""),
        ((FLASH,), ("matmul",), "attention is no longer fused: flash attention became matmul"),
    ],
)
def test_other_ops_are_named(before: tuple[str, ...] | None, now: tuple[str, ...] | None, why: str) -> None:
    ran = [{} if ops is None else {"a": ops} for ops in (before, now)]
    (change,) = compare_with(figures({("a", "saved"): 1}, ran[0]), taken({("a", "saved"): 2}, ran[1])).changes
    assert change.why == why


def test_what_grew_and_what_shrank_do_not_cancel_under_one_name() -> None:
    before = figures({("h.0", "saved"): 10, ("h.1", "saved"): 10})
    outcome = compare_with(before, taken({("h.0", "saved"): 25, ("h.1", "saved"): 3}))
    assert [(change.name, change.difference) for change in outcome.changes] == [("h.0", 15), ("h.1", -7)]


HELD = st.dictionaries(
    st.tuples(st.sampled_from(["h.0", "h.1", "h.2.a", "head", "b"]), st.sampled_from(["weight", "saved", "input"])),
    st.integers(0, 1 << 40),
)


@given(HELD, HELD)
def test_changes_add_up_to_the_difference_of_the_peaks(
    one: dict[tuple[str, str], int], other: dict[tuple[str, str], int]
) -> None:
    outcome = compare_with(figures(one), taken(other))
    assert sum(change.difference for change in outcome.changes) == sum(other.values()) - sum(one.values())
    named = [layer for change in outcome.changes for layer in change.layers]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("tolerance", "now", "grew"),
    [
        ("0%", 1000, False),
        ("0%", 1001, True),
        ("1%", 1010, False),
        ("1%", 1011, True),
        ("0.5 %", 1006, True),
        ("12 B", 1012, False),
        ("1KiB", 2024, False),
        ("1KiB", 2025, True),
    ],
)
def test_the_tolerance_is_a_share_or_bytes(tolerance: str, now: int, grew: bool) -> None:
    outcome = compare_with(figures({("a", "saved"): 1000}), taken({("a", "saved"): now}), tolerance)
    assert outcome.grew is grew


def test_reserved_bytes_alone_can_be_too_many() -> None:
    before = figures({("a", "saved"): 1000}, reserved=2000)
    assert not compare_with(before, taken({("a", "saved"): 1000}, reserved=2020), "1%").grew
    assert compare_with(before, taken({("a", "saved"): 1000}, reserved=2021), "1%").grew
    assert compare_with(before, taken({("a", "saved"): 1000}, reserved=2021)).notes == (
        "the allocator holds 2.0 KiB at most, +21 B",
    )


@pytest.mark.parametrize("text", ["", "%", "-1%", "1e999999999%", "1/0%", "nan%", "banana", "-5", "1%%"])
def test_another_tolerance_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="Write 1%, or 64 MiB"):
        allowance(text, 1000)


def test_larger_inputs_and_another_peak_are_noted() -> None:
    before = figures({("a", "input"): 512, ("a", "saved"): 1})
    now = taken({("a", "input"): 1024, ("a", "saved"): 2}, at="forward: relu")
    assert compare_with(before, now).notes == (
        "the inputs take 1.0 KiB, 2 times the 512 B of the baseline: another batch, size or dtype",
        "the peak was in backward: linear's gradient of head; it is in forward: relu",
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"device": "rtx4090"}, "has it for h100, not for rtx4090"),
        ({"options": "--batch 8"}, "has no figures of it; it has net.py:build."),
        ({"target": "other.py:build"}, "has no figures of it; it has net.py:build."),
        ({"torch": "2.14.0"}, "was written by torch 2.13.0, and this is torch 2.14.0"),
        (
            {"cudnn": True},
            "has the least workspaces of cuDNN (--cudnn off, and the default of former versions), and this "
            "has cuDNN's workspaces of the --cudnn that was named",
        ),
        ({"expected": True}, "this has cuDNN's workspaces as they are expected, the default"),
    ],
)
def test_what_cannot_be_compared_is_said_with_the_way_out(more: dict[str, Any], why: str) -> None:
    baseline = Baseline((figures({("a", "saved"): 1}),))
    with pytest.raises(BaselineError) as raised:
        baseline_of(baseline, figures({("a", "saved"): 1}, **more), "memory.json")
    assert why in str(raised.value)
    assert "--update" in str(raised.value)


@pytest.mark.parametrize(("tolerance", "said"), [("0%", False), ("2 MiB", True), ("3 MiB", False)])
def test_a_limit_inside_of_the_band_is_said(tolerance: str, said: bool) -> None:
    """The baseline has 10 MiB, and the step is expected to take 12 MiB: from 11 to 13 MiB in 95 %."""
    before, now = figures({("a", "workspace"): 10 * MIB}), taken({("a", "workspace"): 12 * MIB})
    outcome = compare_with(before, replace(now, band=(11 * MIB, 13 * MIB)), tolerance)
    text = "95 %: 11.0 MiB to 13.0 MiB allocated, as cuDNN's workspaces are expected: the limit of 12.0 MiB lies inside"
    assert (text in outcome.notes) == said
    assert any("95 %" in note for note in outcome.notes) == said
