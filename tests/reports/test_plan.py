"""A plan on the terminal: it fits, it adds up, it says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reports.plans import DECISIONS, MIB, PLAN, REASON, piped, value

from memplan._bytes import format_bytes
from memplan.reports.plan import report
from memplan.reports.terminal import text_of


def test_the_whole_report() -> None:
    plan = replace(PLAN, decisions=(DECISIONS[1], *DECISIONS[3:]))
    assert (
        piped(plan, top=2)
        == """\
Plan for a step on cpu, torch 2.13.0
budget          260.0 MiB
predicted peak  381.0 MiB before, 252.0 MiB after, 34 % less
floor           188.0 MiB; its order of ops needs at least 180.0 MiB
added time      4.5 ms of 100 ms (4.5 %)
gap             1.5 ms: no plan in this order and budget adds less than 3.0 ms
always there    weight 44.0 MiB, input 9.0 MiB

value       layer      bytes  decision      cost
────────────────────────────────────────────────────────────────────────────────
step                70.0 MiB  in place         -
    results in the memory of others: 9
large       layer1  30.0 MiB  keep             -
    needed by convolution_backward of encoder.layers.3.attention.output; making
    it again would take 41 ms
relu_1      layer1   4.0 MiB  recompute   1.0 ms
    needed by convolution_backward of encoder.layers.3.attention.output; making
    it again would take 41 ms
... 1 more           2.0 MiB  encode     0.50 ms
────────────────────────────────────────────────────────────────────────────────
all 1               30.0 MiB  keep             -
all 1                4.0 MiB  recompute   1.0 ms
all 1                2.0 MiB  encode     0.50 ms
bytes: what keep holds from the forward to the backward pass, what anything else
frees. cost: what it adds to the step. Below each: the reason.

note: no optimizer was given"""
    )


def names(text: str) -> list[str]:
    """The first words of the table's rows."""
    lines = text.split("\n")
    rules = [at for at, line in enumerate(lines) if line and set(line) <= set("─-")]
    return [line.split()[0] for line in lines[rules[0] + 1 : rules[1]] if not line.startswith(" ")]


def test_the_largest_first_and_what_is_not_shown_is_summed_up() -> None:
    assert names(piped(PLAN)) == ["step", "large", "relu", "relu_1", "mask", "small"]
    assert names(piped(PLAN, top=0)) == names(piped(PLAN))
    text = piped(PLAN, top=1)
    assert names(text) == ["step", "large", "...", "...", "..."]
    hidden = [line.split() for line in text.split("\n") if line.startswith("...")]
    assert hidden == [
        ["...", "2", "more", "12.0", "MiB", "recompute", "4.0", "ms"],
        ["...", "1", "more", "2.0", "MiB", "encode", "0.50", "ms"],
        ["...", "1", "more", "1.0", "MiB", "keep", "-"],
    ]


@pytest.mark.parametrize("top", [0, 1, 2, 3, 12])
def test_the_sums_are_of_all_values_whatever_is_shown(top: int) -> None:
    sums = [line.split() for line in piped(PLAN, top).split("\n") if line.startswith("all ")]
    assert [(row[1], " ".join(row[2:4]), row[4]) for row in sums] == [
        ("2", format_bytes(31 * MIB), "keep"),
        ("2", format_bytes(12 * MIB), "recompute"),
        ("1", format_bytes(2 * MIB), "encode"),
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_it_fits_the_page_and_cuts_no_reason(width: int, ascii_only: bool) -> None:
    long = value(
        "a_value_with_quite_a_long_name_" * 2, "keep", 50 * MIB, layer="encoder.blocks.a_long_name." * 3 + "end"
    )
    text = text_of(report(replace(PLAN, decisions=(long, *DECISIONS))), width, ascii_only=ascii_only)
    assert max(map(len, text.split("\n"))) <= width
    assert " ".join(text.split()).count(REASON) == 6
    assert text.isascii() is ascii_only
    assert ("….end" in text or "..end" in text or "_name.end" in text) is (width >= 60)


def test_what_is_not_exact_says_so() -> None:
    lossy = replace(DECISIONS[0], grade="lossy")
    assert "keep, lossy" in piped(replace(PLAN, decisions=(lossy,)))


def test_a_plan_without_decisions_or_times() -> None:
    text = piped(replace(PLAN, decisions=(), step_seconds=None, notes=(), resident={}))
    assert "added time      4.5 ms" in text
    assert "decision" not in text
    assert text.count("\n") == 5
