"""The report in a pipe and on terminals: it fits, it adds up, it lets no name steer it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn

import memplan
from memplan._bytes import format_bytes, parse_bytes
from memplan.explanation.model import Explanation
from memplan.reports.explain import report
from memplan.reports.terminal import text_of
from memplan.trace.records import Assumption

LONG = "a_block_with_quite_a_long_name_that_goes_on"


def nested(depth: int) -> nn.Module:
    """Layers with long names, three to a level."""
    inner = [] if depth == 0 else [nested(depth - 1)]
    parts = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), *inner)
    return nn.Sequential(nn.Sequential(), nn.ModuleDict({LONG: parts})[LONG]) if depth else parts


class Named(nn.Module):
    """The same below a long name."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.add_module(LONG, nested(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(LONG)(x)


def explanation(model: nn.Module, **options: Any) -> Explanation:
    return memplan.explain(model, "16x64", **options)


def piped(what: Explanation, top: int = 12) -> str:
    return wide(what, 80, top)


def wide(what: Explanation, width: int, top: int = 12) -> str:
    return text_of(report(what, top), width)


def table(text: str, header: str) -> list[str]:
    """The lines of a table below its header, with that of the sums, the last."""
    lines = [line.rstrip() for line in text.split("\n")]
    start = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
    rule = next(i for i, line in enumerate(lines[start:], start) if set(line) == {"─"})
    end = next(i for i, line in enumerate(lines[rule:], rule) if not line or line.startswith(("saves:", "outputs:")))
    return [line for line in lines[start:end] if set(line) != {"─"}]


def size_in(line: str, position: int) -> int:
    """The exact bytes that a printed size stands for, where it is below 1 KiB."""
    return parse_bytes(re.findall(r"\d[\d.]* (?:B|KiB|MiB)", line)[position])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("top", [0, 12, *slow(1, 5)])
def test_no_line_is_over_80_columns_in_a_pipe(train: bool, top: int) -> None:
    text = piped(explanation(Named(5), train=train, optimizer=torch.optim.AdamW if train else None), top)
    assert max(map(len, text.split("\n"))) <= 80
    assert "\x1b" not in text
    assert not re.search(r" $", text, re.MULTILINE)
    for header in ("By layer", "outputs", "weights"):
        assert header in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_terminals_of_any_width(width: int) -> None:
    text = wide(explanation(Named(3)), width)
    assert max(len(line) for line in text.split("\n")) <= width
    header = next(line for line in text.split("\n") if line.startswith("By layer"))
    assert ("gradients" in header) == (width >= 100)


def test_a_long_name_is_cut_at_its_beginning() -> None:
    rows = table(piped(explanation(Named(4))), "By layer")
    cut = [row.split()[0] for row in rows if row.startswith("…")]
    assert cut
    names = [row.name for row in explanation(Named(4)).layers]
    assert [name for name in cut if not any(full.endswith(name[1:]) for full in names)] == []


def test_the_causes_add_up_to_the_peak() -> None:
    what = memplan.explain(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), "2x4")
    assert what.timeline.peak_allocated < 1024  # so that every size is printed exactly
    *rows, total = table(piped(what), "By cause")
    assert sum(size_in(row, 0) for row in rows) == size_in(total, 0) == what.timeline.peak_allocated
    assert len(rows) == sum(1 for cause, size in what.by_cause.items() if size or what.by_cause_most.get(cause, 0))
    weights = next(row for row in rows if row.startswith("weights "))
    assert size_in(weights, 0) == 4 * (4 * 3 + 3)


@pytest.mark.parametrize("top", [1, 2, 12, 0])
def test_the_layers_and_the_line_for_the_others_add_up(top: int) -> None:
    what = memplan.explain(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), "2x4")
    *rows, total = table(wide(what, 200, top), "By layer")
    assert size_in(total, 1) == what.saved_bytes == sum(row.saved_bytes for row in what.layers)
    assert size_in(total, 2) == 4 * (4 * 3 + 3 + 3 * 2 + 2)
    assert len(rows) == (top + 1 if 0 < top < len(what.layers) else len(what.layers))
    assert f"all {len(what.layers)} layers" in total


def test_layers_are_in_the_order_of_what_they_save() -> None:
    what = explanation(nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 512), nn.Tanh()))
    first = table(wide(what, 200), "By layer")[0]
    assert first.startswith("3 ")  # 16 x 512 results of the last tanh
    assert format_bytes(16 * 512 * 4) in first


def test_what_several_layers_keep_is_counted_once_and_marked() -> None:
    text = wide(explanation(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))), 200)
    rows = {line.split()[0]: line for line in table(text, "By layer")}
    assert format_bytes(16 * 64 * 4) in rows["1"]
    assert "(shared)" in rows["2"]
    assert re.search(r"\bboth\b|\bweight\b", rows["2"])


def test_inference_has_no_columns_of_training() -> None:
    text = piped(explanation(nn.Linear(64, 64), train=False))
    assert "inference" in text
    for word in ("saves", "gradients", "Why"):
        assert word not in text


def test_branches_stand_at_the_head_and_other_assumptions_at_the_end() -> None:
    what = dataclasses.replace(
        explanation(nn.Linear(64, 64)),
        assumptions=(
            Assumption("scalar", "a value was read", "a.py:1", 3),
            Assumption("branch", "IT BRANCHES", "[b]"),
        ),
        notes=("one [note]",),
    )
    text = piped(what)
    head, _, rest = text.partition("By cause")
    assert "assumed: IT BRANCHES, at [b]" in head
    assert "assumed: a value was read (3 times), at a.py:1" in rest
    assert "note: one [note]" in rest


def test_repeated_layers_get_one_reason() -> None:
    block = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())]
    text = piped(explanation(nn.Sequential(*block)))
    why = text.partition("Why")[2]
    assert why.startswith(" the most is saved\n1, 4.0 KiB")
    assert "and 4 layers like it" in why  # the last one's result is shared with nobody
    assert why.count("tanh saves its result") == 2
