"""The report of a step beside its baseline, in whole."""

from __future__ import annotations

import json

from models.guard_figures import MIB, figures, taken

from memplan.reports.guard import report
from memplan.reports.terminal import text_of
from memplan.studies.guarding.outcome import Outcome, compare_with


def grown(tolerance: str = "1%") -> Outcome:
    before = figures({(f"h.{at}.attn", "saved"): MIB for at in range(4)} | {("head", "weight"): 6 * MIB})
    now = taken({(f"h.{at}.attn", "saved"): 3 * MIB for at in range(4)} | {("head", "weight"): 5 * MIB})
    return compare_with(before, now, tolerance)


def printed(outcome: Outcome, top: int = 12) -> str:
    return text_of(report(outcome, top))


def test_what_is_printed() -> None:
    assert printed(grown()) == (
        "net.py:build: training step on h100\n"
        "10.0 MiB -> 17.0 MiB peak: 7.0 MiB more, +70 % (saved activations +8.0 MiB,\n"
        "weights -1.0 MiB).\n"
        "It takes more than the baseline and 102.4 KiB of tolerance. --update accepts it.\n"
        "\n"
        "By cause, at the peak  baseline       now      more\n"
        "───────────────────────────────────────────────────────────\n"
        "saved activations       4.0 MiB  12.0 MiB  +8.0 MiB  +200 %\n"
        "weights                 6.0 MiB   5.0 MiB  -1.0 MiB   -17 %\n"
        "───────────────────────────────────────────────────────────\n"
        "peak                   10.0 MiB  17.0 MiB  +7.0 MiB   +70 %\n"
        "\n"
        "By layer, at the peak\n"
        "  attn of h 0 to 3: +8.0 MiB (saved activations +8.0 MiB) (src/net.py:10)\n"
        "  head: -1.0 MiB (weights -1.0 MiB) (src/net.py:14)"
    )


def test_the_verdicts() -> None:
    same = figures({("a", "saved"): MIB})
    verdicts = {
        "1.0 MiB peak, as in the baseline.": compare_with(same, taken({("a", "saved"): MIB})),
        "Within the tolerance.": compare_with(same, taken({("a", "saved"): MIB + 1}), "1%"),
        "It takes less than the baseline. --update keeps that.": compare_with(same, taken({("a", "saved"): 1})),
    }
    for verdict, outcome in verdicts.items():
        assert printed(outcome).splitlines()[1 if "as in" in verdict else 2] == verdict
    reserved = compare_with(same, taken({("a", "saved"): MIB}, reserved=3 * MIB))
    assert "The allocator holds 2.0 MiB more than in the baseline, 3.0 MiB, and" in printed(reserved)


def test_changes_beyond_the_top_are_summed_up() -> None:
    assert "and 1 more: -1.0 MiB" in printed(grown(), top=1)


def test_the_json_has_every_figure() -> None:
    data = json.loads(grown().to_json())
    assert (data["format"], data["grew"], data["now"]["peak"]) == ("memplan.guard", True, 17 * MIB)
    assert [(one["name"], one["difference"]) for one in data["changes"]] == [
        ("attn of h 0 to 3", 8 * MIB), ("head", -MIB),
    ]  # fmt: skip
    assert grown().to_json() == grown().to_json()
