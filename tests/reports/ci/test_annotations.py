from __future__ import annotations

import pytest
from models.guard_figures import MIB, figures, taken

from memplan.checks.finding import Finding
from memplan.reports.ci.annotations import Annotation, annotations_of_findings, annotations_of_outcome
from memplan.studies.guarding.outcome import compare_with


@pytest.mark.parametrize(
    ("where", "target", "place"),
    [
        ("src/net.py:3", "x.py:make", ("src/net.py", 3)),
        ("src\\net.py:3", "x.py:make", ("src/net.py", 3)),
        (None, "models\\net.py:make", ("models/net.py", 1)),
        ("net.py:0", "./net.py:make", ("net.py", 1)),
        ("net.py:³", "package:make", None),
        ("", "package:make", None),
    ],
)
def test_a_place_is_the_same_on_every_system(where: str | None, target: str, place: tuple[str, int] | None) -> None:
    assert Annotation("held-graph", "note", "x", where=where, target=target).place == place


def test_findings_that_fail_are_errors() -> None:
    findings = [
        Finding("held-graph", "warning", "a", "net.py:1", 5, "a graph is held", ("let it go",)),
        Finding("loss-memory", "info", "", None, 0, "cuDNN may take more"),
    ]
    for failing, levels in (
        (("warning",), ["error", "note"]),
        ((), ["warning", "note"]),
        (("info", "warning"), ["error"] * 2),
    ):
        assert [one.level for one in annotations_of_findings("net.py:make", findings, failing)] == levels
    assert [one.text for one in annotations_of_findings("net.py:make", findings, ())] == [
        "A graph is held. Let it go.", "cuDNN may take more.",
    ]  # fmt: skip


def test_a_step_that_grew_is_an_error_and_each_line_that_it_grew_at_a_warning() -> None:
    before = figures({("a", "saved"): MIB, ("b", "saved"): 3 * MIB})
    outcome = compare_with(before, taken({("a", "saved"): 4 * MIB, ("b", "saved"): 2 * MIB}))
    error, warning = annotations_of_outcome(outcome)
    assert (error.level, error.bytes, error.place) == ("error", 2 * MIB, ("net.py", 1))
    assert (
        error.text == "net.py:build on h100: 4.0 MiB -> 6.0 MiB peak: 2.0 MiB more, +50 % (saved activations +2.0 MiB)."
    )
    assert (warning.level, warning.place) == ("warning", ("src/net.py", 10))
    assert warning.text == "a: +3.0 MiB (saved activations +3.0 MiB)."


def test_one_that_did_not_grow_is_none() -> None:
    before = figures({("a", "saved"): MIB})
    assert annotations_of_outcome(compare_with(before, taken({("a", "saved"): MIB}))) == []
