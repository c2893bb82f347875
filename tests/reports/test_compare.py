"""Two steps side by side on the terminal and as JSON."""

from __future__ import annotations

import json

import pytest

from memplan.reports.compare import report
from memplan.reports.terminal import text_of
from memplan.studies.comparisons.comparison import Comparison, Decided, LayerPart, ResultDifference, Side, Zeros

KIB = 1 << 10


def side(title: str, scale: int, **more: object) -> Side:
    layers = tuple(LayerPart(f"block.{k}", "Conv2d", scale * k * KIB, scale * k * KIB, KIB) for k in range(4))
    causes = {"weight": 4 * KIB, "saved": 6 * scale * KIB, "rounding": 0}
    total = sum(causes.values())
    return Side(title, "recorded", "cpu", True, total, total, causes, layers, 6 * scale * KIB, 4 * KIB, **more)  # type: ignore[arg-type]


def printed(comparison: Comparison, top: int = 12) -> str:
    return text_of(report(comparison, top))


def test_what_is_printed() -> None:
    text = printed(Comparison(side("net.py:a\x1b", 2), side("net.py:b", 1, outputs=("1x5 float32",)), notes=("so",)))
    assert text.startswith(
        "A: net.py:a? (recorded, training step, cpu)\nB: net.py:b (recorded, training step, cpu)\n"
        "16.0 KiB -> 10.0 KiB peak: 6.0 KiB less, -38 % (saved activations -6.0 KiB).\n"
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "saved activations 12.0 KiB 6.0 KiB -6.0 KiB -50 %" in lines
    assert "peak 16.0 KiB 10.0 KiB -6.0 KiB -38 %" in lines
    rows = [line.split()[0] for line in lines if line.startswith("block")]
    assert rows == ["block.3", "block.2", "block.1"]  # what differs most first; block.0 does not
    assert "1 layer takes the same in both." in text
    assert "note: so" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_layers_beyond_the_top_are_added_up() -> None:
    text = " ".join(printed(Comparison(side("a", 2), side("b", 1)), top=1).split())
    assert "... 2 more 6.0 KiB 3.0 KiB -3.0 KiB" in text
    assert "all 4 12.0 KiB 6.0 KiB -6.0 KiB" in text


def test_a_layer_of_one_side_alone() -> None:
    one = side("a", 1)
    other = Side("b", "recorded", "cpu", True, 4 * KIB, 4 * KIB, {"weight": 4 * KIB}, one.layers[:3])
    line = next(line.split() for line in printed(Comparison(one, other)).splitlines() if line.startswith("block.3"))
    assert line[1:6] == ["3.0", "KiB", "none", "-3.0", "KiB"]


def test_results_and_zeros_are_sentences() -> None:
    zero = Zeros("block.3", "weight", 1000, 500, 4000, 4000, 10, 2)
    both = Comparison(
        side("a", 1),
        side("b", 1, zeros=(zero,)),
        (ResultDifference("outputs", 1, 0.0123, 0.5), ResultDifference("gradients", 3, 0, 0)),
        True,
    )
    text = " ".join(printed(both).split())
    assert "On equal weights, B's outputs are 1.2 % from A's (relative, L2; 0.5 at most for one element)." in text
    assert "B's gradients are A's bit for bit." in text
    assert "B's weights hold zeros: 50 % of 1 layer, which take 3.9 KiB all the same" in text
    assert "whole channels would take 2.0 KiB less of weights, and about 1.5 KiB less of these layers' outputs" in text
    assert "2 output channels are zero throughout" in text
    assert "B's masks add 3.9 KiB" in text


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("roofline of h100", "roofline of h100", "Time of a step: 2.0 s -> 1.0 s, -50 % (roofline of h100)."),
        ("roofline of h100", "roofline of a100", "2.0 s (roofline of h100) -> 1.0 s (roofline of a100), -50 %."),
        ("as the plan has it", "roofline of a100", "(as the plan has it), and 1.0 s (roofline of a100): not by one"),
    ],
)
def test_times_are_divided_where_they_are_by_one_measure(a: str, b: str, said: str) -> None:
    both = Comparison(side("a", 1, seconds=2.0, seconds_by=a), side("b", 1, seconds=1.0, seconds_by=b))
    text = " ".join(printed(both).split())
    assert said in text
    assert ("seconds 2.0 s 1.0 s -1.0 s" in text) is ("%" in said)


def test_what_two_plans_decide_otherwise() -> None:
    keep, again = Decided("relu", "block.1", "keep", 2 * KIB), Decided("relu", "block.1", "recompute", 2 * KIB)
    small = Decided("add", "", "encode", KIB)
    text = printed(Comparison(side("a", 1, decided=(keep,)), side("b", 1, decided=(again, small))))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    at = lines.index("Decided otherwise layer bytes A B")
    assert lines[at + 2 : at + 4] == ["relu block.1 2.0 KiB keep recompute", "add 1.0 KiB - encode"]
    assert "values: keep 1 0 -1" in lines
    assert "values: recompute 0 1 +1" in lines


def test_json_is_the_comparison() -> None:
    both = Comparison(side("a", 2), side("b", 1))
    data = json.loads(both.to_json())
    assert (data["format"], data["difference"]) == ("memplan.compare", -6 * KIB)
    assert data["by_cause"][1] == {"cause": "saved", "a": 12 * KIB, "b": 6 * KIB, "difference": -6 * KIB}
    assert [row["saved_bytes"] for row in data["layers"]] == [0, -KIB, -2 * KIB, -3 * KIB]
    assert data["a"]["peak"] == 16 * KIB
