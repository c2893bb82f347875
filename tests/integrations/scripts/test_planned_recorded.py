"""Scripts that have the lines of `memplan fit --script` in them, and what else of memplan scripts call."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import fit_scripts
from integrations.scripts.script_runs import run

import memplan

LAYERS = """
import memplan
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))
opt = torch.optim.AdamW(model.parameters())
"""
LOOP = """
for _ in range(3):
    model(torch.randn(512, 64)).square().mean().backward()
    opt.step()
    opt.zero_grad()
"""
FIT = 'memplan.fit(model, "512x64", budget="90%", optimizer=torch.optim.AdamW)'


def peak(folder: Path, text: str, *, really: bool = False) -> int:
    trace, _ = run(folder, LAYERS + text + LOOP, really=really)
    return memplan.simulate(trace).peak_allocated


def test_a_fitted_script_is_recorded_as_planned(tmp_path: Path) -> None:
    """Its plan is made of estimates both times, so that a measured run of it takes the same bytes."""
    trace, _ = run(tmp_path, LAYERS + FIT + LOOP)
    recorded = memplan.simulate(trace).peak_allocated
    assert recorded < 0.95 * peak(tmp_path, "")
    assert recorded == peak(tmp_path, FIT, really=True)
    assert any("Sequential runs as memplan.fit plans it" in note for note in trace.notes)


def test_on_a_card_the_script_runs_without_its_plan_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\nfrom torch import nn\n" + LAYERS + FIT + LOOP, encoding="utf-8")
    from integrations.scripts.script_runs import script_of

    trace = memplan.record(script_of(str(tmp_path / "script.py")), device="rtx4090")  # pyright: ignore[reportArgumentType]  # a program
    assert any("without memplan.fit" in note for note in trace.notes)


CALLS = """
memplan.plan(model, "512x64", budget="90%")
memplan.record(lambda: lambda: nn.Linear(99, 99)(torch.ones(9, 99)).sum().backward())
memplan.measure(lambda: lambda: nn.Linear(99, 99)(torch.ones(9, 99)).sum().backward())
memplan.explain(model, "512x64")
assert memplan.verify(model, model, "512x64", pairs=0).ok
memplan.assert_peak(lambda: lambda: nn.Linear(9, 9)(torch.ones(9, 9)).sum().backward(), at_most='1 GiB')
"""


def test_what_else_a_script_calls_of_memplan_is_no_part_of_its_recording(tmp_path: Path) -> None:
    assert peak(tmp_path, CALLS) == peak(tmp_path, "")


def test_a_line_that_reads_a_number_keeps_no_tensor_of_its_function(tmp_path: Path) -> None:
    """A function's frame holds on to a copy of its variables once that was asked for, up to Python 3.12."""
    text = """
    model = nn.Linear(64, 4096)
    def train():
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            out = model(torch.randn(256, 64))
            out.mean().backward()
            {}
            opt.step()
            opt.zero_grad()
            del out
    train()
    """
    peaks = [
        memplan.simulate(run(tmp_path, text.format(line))[0]).peak_allocated
        for line in ("out.mean().item()", 'print("step", number, out.mean().item())')
    ]
    assert peaks[0] == peaks[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["losses_kept", "two_calls", "gpt2_accelerate"])
def test_the_lines_keep_the_bound_that_is_printed_with_them(name: str) -> None:
    if name == "gpt2_accelerate":
        pytest.importorskip("accelerate")
        pytest.importorskip("transformers")
    rows = fit_scripts.rows_of(Path(__file__).with_name("fitted") / f"{name}.py", shares=(0.5,))
    assert rows
    assert all(row.holds for row in rows), rows


CLASSED = """
class Sub(torch.Tensor):
    pass
class Made(torch.Tensor):
    def __new__(cls, data): return torch.Tensor._make_subclass(cls, data)
"""


@pytest.mark.parametrize("made", ["torch.randn(512, 64).as_subclass(Sub)", "Made(torch.randn(512, 64))"])
def test_tensors_of_subclasses_are_recorded_as_such(tmp_path: Path, made: str) -> None:
    loop = LOOP.replace("torch.randn(512, 64)", made) + f"print(type(model({made})).__mro__)"
    loop = loop.replace("    opt.step()", f"    assert type(model({made})).__name__ in ('Sub', 'Made')\n    opt.step()")
    trace, _ = run(tmp_path, LAYERS + CLASSED + loop)
    assert memplan.simulate(trace).peak_allocated
