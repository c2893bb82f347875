"""The magics in a real IPython shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memplan

pytest.importorskip("IPython")

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
seen = []

def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append(loss.item())
    return loss
"""


@pytest.fixture
def shell() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell  # pyright: ignore[reportMissingImports]

    shell = InteractiveShell()
    shell.run_cell("%load_ext memplan").raise_error()
    shell.run_cell(SETUP).raise_error()
    yield shell
    shell.reset()


def build() -> Any:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def test_a_cell_is_predicted_and_changes_nothing(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(shell.user_ns)
    found = shell.run_cell("%%memplan --device cpu\nnew = step(x, y)\nprint('held back')").result
    expected = memplan.simulate(memplan.record(build, device="cpu", steps=1))
    assert found.timeline.steps[0].peak_allocated == expected.steps[0].peak_allocated
    assert "held back" not in capsys.readouterr().out
    names = {name for name in shell.user_ns if not name.startswith("_")}
    assert "new" not in names
    assert all(shell.user_ns[name] is before[name] for name in ("model", "optimizer", "x", "seen"))
    assert shell.user_ns["seen"] == []
    assert found.title == "this cell"
    assert any("were there before" in note for note in found.notes)


def test_for_a_card(shell: Any) -> None:
    found = shell.run_cell("%memplan --device h100 step(x, y)").result
    expected = memplan.simulate(memplan.record(build, device="h100", steps=1), workspace="low")
    assert found.timeline.steps[0].peak_allocated == expected.steps[0].peak_allocated
    assert found.device == "h100"


def test_a_cell_that_is_measured_runs(shell: Any) -> None:
    found = shell.user_ns
    shell.run_cell("%%memplan --measure\nnew = step(x, y)\nkept = torch.ones(1000)")
    measured = shell.user_ns["_"]
    assert found["new"].item() == found["seen"][0]
    assert found["kept"].numel() == 1000
    weights = sum(one.nbytes for one in found["model"].parameters())
    # the optimizer's moments and two counters, what the cell kept, and the loss
    assert measured.after - measured.before == 2 * weights + 2 * 4 + 4000 + 4
    assert measured.peak > measured.after


def test_lines_predicted_and_measured_are_the_same(shell: Any) -> None:
    shell.run_cell("step(x, y)")  # makes the optimizer's state
    (predicted,) = shell.run_cell("%mprun --device cpu -f step step(x, y)").result
    shell.run_cell("%mprun -f step --measure step(x, y)")
    (measured,) = shell.user_ns["_"]
    sizes = [[(row.hits, row.added, row.freed) for row in one.rows] for one in (predicted, measured)]
    assert sizes[0] == sizes[1]
    assert [row.source for row in predicted.rows][1].strip() == "loss = F.cross_entropy(model(x), y)"
    assert sum(hits for hits, *_ in sizes[0]) == 6
    assert len(shell.user_ns["seen"]) == 2


def test_a_cell_that_raises(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%%memplan\na = torch.ones(3)\n1 / 0")
    said = capsys.readouterr()
    assert "UsageError: the cell raised ZeroDivisionError: division by zero (at " in said.err
    assert ":2)" in said.err
    assert "a" not in shell.user_ns
    shell.run_cell("%%memplan --measure\na = torch.ones(3)\n1 / 0")
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert "a" in shell.user_ns
    assert shell.user_ns["_"].after - shell.user_ns["_"].before == 12


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%memplan", "no statement. Expected %%memplan [--device h100]"),
        ("%memplan --device", "--device without a value. Expected %%memplan"),
        ("%memplan --foo 1", "the option --foo. Expected %%memplan"),
        ("%memplan --device h100 --measure 1", "--device and --measure. Expected one of them"),
        ("%%memplan step(x, y)\n1", "%%memplan step(x, y). Expected"),
        ("%%memplan\nthis is", "a cell that is not Python: "),
        ("%memplan --device nosuch 1", "There is no card 'nosuch' in the catalogue."),
        ("%mprun step(x, y)", "%mprun without -f. Expected %mprun -f FUNCTION"),
        ("%mprun -f step", "%mprun without a statement. Expected %mprun -f FUNCTION"),
        ("%mprun -f foo 1", "-f foo: NameError: name 'foo' is not defined."),
        ("%mprun -f len 1", "-f len: <built-in function len>. Expected a function or a method written in Python."),
        ("%mprun -f step 1", "no line of step ran. Expected functions that the statement calls."),
    ],
)
def test_wrong_lines_are_told_in_one(shell: Any, capsys: pytest.CaptureFixture[str], cell: str, said: str) -> None:
    shell.run_cell(cell)
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"UsageError: {said}")
    assert len(error.splitlines()) == 1


def test_results_show_themselves(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = shell.run_cell("%memplan --device cpu step(x, y)").result
    shown, _ = shell.display_formatter.format(result)
    assert shown["text/plain"] == str(result)
    assert shown["text/html"] == result._repr_html_()
    lines = shell.run_cell("%mprun --device cpu -f step step(x, y)").result
    shown, _ = shell.display_formatter.format(lines)
    assert shown["text/plain"] == str(lines[0])
    assert shown["text/html"] == lines[0]._repr_html_()
