"""A script's model planned for a budget of the whole script; the lines are run, and what they take is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.scripts.script_runs import HEAD, run, script_of
from torch import nn
from truth.cpu_allocator import allocations, peak_of

import memplan
from memplan.devices import find
from memplan.errors import InputError
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.planned import planned
from memplan.integrations.scripts.request import Request
from memplan.studies.capacity.limit import room_of
from memplan.verification.fitting.outcome import Fitting

LAYERS = """
def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)) for _ in range(2)))
"""
TRAIN = (
    LAYERS
    + """
model = net()
opt = torch.optim.AdamW(model.parameters())
for _ in range(4):
    x, y = torch.randn(2048, 128), torch.randn(2048, 128)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
"""
)
MIB = 1 << 20
EXAMPLE = HEAD.count("\n")
"""Lines of the script before its text."""


def fitting(folder: Path, text: str, budget: str, device: str = "cpu", **options: Any) -> Fitting:
    """Record a script and plan its model."""
    (folder / "script.py").write_text(HEAD + text, encoding="utf-8")
    room = room_of(device, budget)
    request = Request(Command(str(folder / "script.py")), device, room=room, plan=tuple(options.items()))
    script = script_of(str(folder / "script.py"), room=room, plan=request.plan)
    return planned(memplan.record(script, device=device), script, request)  # pyright: ignore[reportArgumentType]  # a program


def test_the_lines_make_the_script_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = fitting(tmp_path, TRAIN, "10MiB")
    assert found.plan is not None
    assert found.lines is not None
    assert found.planned is not None
    assert found.plan.peak < found.plan.eager_peak
    assert found.recorded <= found.plan.eager_peak + found.beside  # what the plan does not count is all counted
    assert found.planned <= 10 * MIB < found.recorded
    assert (found.lines.where, found.lines.before) == (f"script.py:{EXAMPLE + 6}", False)
    assert found.lines.text == (
        "import memplan",
        "memplan.fit(",
        "    model,",
        '    "2048x128",',
        f"    budget={10 * MIB - found.beside:_},",
        "    optimizer=torch.optim.AdamW,",
        ")",
    )
    _check_measured("\n".join(found.lines.text), 10 * MIB)


def _check_measured(lines: str, budget: int) -> None:
    """Run the script's step with the lines added, and see what the allocator gives."""
    around: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(LAYERS, around)
    model = around["model"] = around["net"]()
    exec(lines, around)

    def step() -> None:
        x, y = torch.randn(2048, 128), torch.randn(2048, 128)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW(model.parameters())
    step()
    state = [one for row in optimizer.state.values() for one in row.values()]
    there = sum(one.numel() * one.element_size() for one in (*model.parameters(), *state))
    assert there + peak_of(allocations(step)) <= budget
    before = memplan.measure(lambda: _as_it_is(around["net"]()), device="cpu")
    assert memplan.simulate(before).peak_allocated > budget


def _as_it_is(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        x, y = torch.randn(2048, 128), torch.randn(2048, 128)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_one_that_fits_needs_nothing(tmp_path: Path) -> None:
    found = fitting(tmp_path, TRAIN, "1GiB")
    assert (found.fits, found.changes, found.lines) == (True, False, None)
    trace, _ = run(tmp_path, TRAIN)
    assert found.recorded == memplan.simulate(trace).peak_allocated


def test_no_budget_is_said_to_be_smaller_than_what_the_script_takes_anyway(tmp_path: Path) -> None:
    """Beside a small model a large loss: the bound on both is more than the script takes."""
    large = TRAIN.replace("range(2)", "range(1)").replace("model(x), y)", "model(x).exp().exp(), y.exp().exp())")
    found = fitting(tmp_path, large, "2MiB")
    assert found.smallest == found.recorded


def test_on_a_card_context_and_reserved_blocks_are_kept_free(tmp_path: Path) -> None:
    """What the card has beyond tensors is in the script's sum; `memplan.fit` there counts it by itself."""
    text = TRAIN.replace("net()\nopt", "net().cuda()\nopt").replace("2048, 128)", '65536, 128, device="cuda")')
    found = fitting(tmp_path, text, "920MiB", "rtx4090")
    card = find("rtx4090")
    assert found.plan is not None
    assert found.lines is not None
    assert found.surplus >= card.context[0]
    assert found.planned is not None
    assert found.planned <= 920 * MIB < found.recorded
    assert f"    budget={920 * MIB - found.beside:_}," in found.lines.text


@pytest.mark.usefixtures("no_cudnn_installed")
def test_expected_workspaces_have_the_band_that_explain_names(tmp_path: Path) -> None:
    text = """
model = nn.Sequential(nn.Conv2d(16, 48, 5, padding=2), nn.Conv2d(48, 29, 5, padding=2)).cuda()
for _ in range(3):
    model(torch.randn(8, 16, 65, 67).cuda()).sum().backward()
"""
    found = fitting(tmp_path, text, "8GiB", "rtx4090")
    trace = memplan.record(script_of(str(tmp_path / "script.py")), device="rtx4090")  # pyright: ignore[reportArgumentType]  # a program
    explained = memplan.explain(trace)
    assert explained.card is not None
    assert found.recorded_band is not None
    assert found.recorded_band == explained.card.verdict.band
    assert found.recorded_band[0] <= found.recorded == explained.card.verdict.low <= found.recorded_band[1]


MASKED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    def forward(self, ids, mask=None, scale=1.0):
        x = self.body(self.embed(ids)) * scale
        return x if mask is None or bool(mask.all()) else x * mask[..., None]
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    ids = torch.randint(0, 50, (64, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids, mask=torch.ones(64, 32, dtype=torch.long), scale=0.5)
    out.float().square().mean().backward()
    opt.step()
    opt.zero_grad()
"""


def test_arguments_of_all_kinds(tmp_path: Path) -> None:
    found = fitting(tmp_path, MASKED, "5MiB")
    assert found.lines is not None
    assert found.lines.text == (
        "import memplan",
        "memplan.fit(",
        "    model,",
        '    "64x32:int64",',
        '    kwargs={"mask": memplan.spec("64x32:int64", low=1), "scale": 0.5},',
        f"    budget={5 * MIB - found.beside:_},",
        "    optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9),",
        '    autocast="bf16",',
        ")",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("with torch.no_grad():\n    nn.Linear(2, 2).eval()(torch.zeros(1, 2))", "called no model in training"),
        ("class Odd(nn.Linear):\n    def forward(self, x): return super().forward(x.get())\n"
         "class Box:\n    def get(self): return torch.zeros(1, 2)\nOdd(2, 2)(Box()).sum().backward()",
         "script.py calls Odd with a Box"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        fitting(tmp_path, text, "1")


WIDE = """
model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
opt = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(16, 256)).sum().backward()
    opt.step()
    opt.zero_grad()
"""


def test_a_script_keeps_the_moments_of_its_own_optimizer(tmp_path: Path) -> None:
    """Of the two moments' MiB (2 x 4 bytes of 131,072 weights), 8 bits would save three quarters: the lines drop the
    optimizer that has these."""
    pytest.importorskip("torchao.optim")
    exact = fitting(tmp_path, WIDE, "1MiB")
    assert exact.shortfall is not None
    budget = exact.shortfall.smallest_budget + exact.beside - MIB // 2
    lossy = fitting(tmp_path, WIDE, str(budget), allow="lossy")
    assert lossy.plan is None
    assert lossy.shortfall is not None
    assert "moments" not in f"{exact.shortfall} {lossy.shortfall}"
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
    inner = memplan.plan(
        model, "16x256", budget=budget - lossy.beside, allow="lossy", optimizer=torch.optim.AdamW, costs="roofline"
    )
    assert inner.precision.moments == "int8"  # such a plan exists
