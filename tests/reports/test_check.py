"""Findings on the terminal and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memplan.checks.finding import Finding, Findings
from memplan.errors import FormatError
from memplan.reports.check import report
from memplan.reports.terminal import text_of


def finding(layers: int = 3) -> Finding:
    rows = [{"layer": f"block.{k}", "where": "net.py:3", "lost": [(k, k), (0, 0.5)]} for k in range(layers)]
    return Finding(
        "a-trap", "warning", "block.0", "net.py:3", 3 << 20, "something costs", ("mend\x1bit",), {"layers": rows}
    )


def printed(*findings: Finding, top: int = 12) -> str:
    return text_of(report("net.py:make", list(findings), top))


def test_what_is_printed() -> None:
    text = printed(finding())
    assert text.startswith(
        "net.py:make: 1 warning\n\nwarning a-trap  3.0 MiB\n  at block.0, net.py:3\n  Something costs.\n"
    )
    lines = [line.split() for line in text.splitlines() if "block." in line][1:]
    assert [line[0] for line in lines] == ["block.2", "block.1", "block.0"]  # the most first
    assert "2 x 0+0.5" in text
    assert "- mend?it" in text  # no character that steers a terminal
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_name_keeps_its_first_letter() -> None:
    told = Finding("a-trap", "info", "", None, 0, "cuDNN may take more")
    assert printed(told).endswith("\n  cuDNN may take more.")


def test_further_layers_are_counted() -> None:
    assert "... 7 more" in printed(finding(9), top=2)
    assert "more" not in printed(finding(9), top=0)


def test_nothing_found() -> None:
    assert printed() == "net.py:make: nothing found"


def test_json_is_the_finding() -> None:
    data = json.loads(Findings("net.py:make", (finding(1),)).to_json())
    assert data["findings"] == [finding(1).to_dict()]
    assert data["findings"][0]["details"]["layers"][0]["lost"] == [[0, 0], [0, 0.5]]


def test_a_line_number_is_never_cut() -> None:
    where = "site-packages/transformers/integrations/sdpa_attention.py:193"
    rows = [{"layer": f"transformer.encoder.{k}.attention.self", "where": where, "bytes": 25165824} for k in range(3)]
    long = Finding("a-trap", "warning", "x", None, 3 << 20, "something costs", (), {"layers": rows})
    assert sum(line.endswith("_attention.py:193") for line in printed(long).splitlines()) == 3


@pytest.mark.parametrize(
    "wrong",
    [{"layer": 7}, {"where": 7}, {"lost": 513}, {"lost": [[1]]}, {"lost": [[1, "x"]]}, {"bytes": "1"}, {"bytes": 1}],
    ids=str,
)
def test_rows_of_layers_in_a_file_are_checked(wrong: dict[str, Any]) -> None:
    """Each has the columns of the others: ``bytes`` in one alone are refused, too."""
    data = json.loads(Findings("net.py:make", (finding(2),)).to_json())
    data["findings"][0]["details"]["layers"][1] |= wrong
    with pytest.raises(FormatError, match=r"^The text is no findings .* it\.findings\[0\]\.details\.layers\[[01]\]"):
        Findings.from_json(json.dumps(data))


@pytest.mark.parametrize("layers", [7, [7, 7]])
def test_layers_in_a_file_are_rows(layers: Any) -> None:
    data = json.loads(Findings("net.py:make", (finding(2),)).to_json())
    data["findings"][0]["details"]["layers"] = layers
    with pytest.raises(FormatError, match=r"it\.findings\[0\]\.details\.layers"):
        Findings.from_json(json.dumps(data))
