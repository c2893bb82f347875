"""Quantized inference on the terminal and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from memplan.reports.quantize import report
from memplan.reports.terminal import text_of
from memplan.studies.comparisons.comparison import ResultDifference, Side
from memplan.studies.quantization.quantized import Layer, Quantized

KIB = 1 << 10


def side(title: str, weights: int, cast: int = 0) -> Side:
    causes = {"weight": weights, "activation": 2 * KIB} | ({"cast_copies": cast} if cast else {})
    total = sum(causes.values())
    return Side(
        title, "measured", "cpu", False, total, total, causes, (), 0, weights, cast, 2 * KIB, None, None, 0.002, "m"
    )


LAYERS = (
    Layer("conv\x1b", "Conv2d", 10 * KIB, 10 * KIB, "torchao quantizes nn.Linear, not Conv2d"),
    Layer("a", "Linear", 20 * KIB, 5 * KIB, None),
    Layer("b", "Linear", 20 * KIB, 5 * KIB, None),
)
FOUND = Quantized(
    "SomeConfig", side("as it is", 50 * KIB), side("SomeConfig", 20 * KIB, 20 * KIB),
    replace(side("with grad", 50 * KIB), activation_bytes=9 * KIB), LAYERS,
    ResultDifference("outputs", 1, 0.0123, 0.5), 70 * KIB,
)  # fmt: skip


def printed(found: Quantized, top: int = 12) -> str:
    return text_of(report(replace(found, title="net.py:make"), top))


def test_what_is_printed() -> None:
    text = printed(FOUND, top=1)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "net.py:make: inference on the CPU, by SomeConfig"
    flat = " ".join(lines)
    assert "Weights 50.0 KiB -> 20.0 KiB: 30.0 KiB less, -60 % (2 of 3 layers with weights quantized)." in flat
    assert "Peak of inference 52.0 KiB -> 42.0 KiB: 10.0 KiB less, -19 %." in flat
    assert "written out in another dtype: 20.0 KiB at most, 20.0 KiB of it at the peak" in flat
    assert (
        "The quantized model's outputs are 1.2 % from the model's (relative, L2; 0.5 at most for one element)." in flat
    )
    assert "Without grad 2.0 KiB of activations live at once, with grad 9.0 KiB" in flat
    assert "While it is quantized, 70.0 KiB are needed." in flat
    assert "weights in another dtype - 20.0 KiB +20.0 KiB" in lines
    assert "a 20.0 KiB 5.0 KiB 1 of 1" in lines
    assert "... 2 more 30.0 KiB 15.0 KiB 1 of 2" in lines
    assert "all 3 50.0 KiB 20.0 KiB 2 of 3" in lines
    assert "conv? (1, 10.0 KiB) stays: torchao quantizes nn.Linear, not Conv2d." in lines
    assert all(len(line) <= 80 for line in text.splitlines())


def test_what_was_not_run_says_so() -> None:
    text = printed(replace(FOUND, after=None, error=None, quantizing_peak=None, notes=("no kernel here",)))
    flat = " ".join(text.split())
    assert "SomeConfig was not run: no kernel here." in flat
    assert "2 of 3 layers with weights take 10.0 KiB instead of 40.0 KiB" in flat
    assert "outputs" not in flat
    assert "Peak" not in flat


def test_json_has_the_numbers() -> None:
    data = json.loads(replace(FOUND, title="net.py:make").to_json())
    assert (data["format"], data["weights_saved"], data["error"]["relative"]) == ("memplan.quantized", 30 * KIB, 0.0123)
    assert data["by_cause"][0] == {"cause": "weight", "a": 50 * KIB, "b": 20 * KIB, "difference": -30 * KIB}
