"""Where a script's steps begin and end, and how it ends."""

from __future__ import annotations

import signal
import textwrap
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from integrations.scripts.script_runs import GaveUp, run
from torch import nn

import memplan
from memplan.errors import StepError
from memplan.integrations.scripts.request import ScriptEnded

LOOP = """
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
opt = torch.optim.Adam(model.parameters())
data = DataLoader(TensorDataset(torch.randn(400, 32), torch.randint(0, 8, (400,))), batch_size=40, shuffle=True)
for x, y in data:
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
"""


def test_two_updates_are_two_steps(tmp_path: Path) -> None:
    trace, facts = run(tmp_path, LOOP)
    assert (facts.ending, facts.updates, len(trace.steps)) == ("steps", 2, 2)
    updates = [op.step for op in trace.ops if op.phase == "optimizer"]
    assert set(updates) == {0, 1}
    assert {op.step for op in trace.ops if op.phase == "backward"} == {0, 1}


def test_the_peak_is_that_of_a_build_of_the_same(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}

    def build() -> object:
        from integrations.scripts import script_runs

        exec(script_runs.HEAD + LOOP.partition("for x, y")[0], namespace)
        exec(
            "batches = iter(data)\ndef step():\n    x, y = next(batches)\n"
            "    nn.functional.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()",
            namespace,
        )
        return namespace["step"]

    trace, _ = run(tmp_path, LOOP)
    other = memplan.record(build, device="cpu")  # pyright: ignore[reportArgumentType]
    assert memplan.simulate(trace).peak_allocated == memplan.simulate(other).peak_allocated


@pytest.mark.parametrize("steps", [1, 3])
def test_as_many_steps_as_asked_for(tmp_path: Path, steps: int) -> None:
    trace, facts = run(tmp_path, LOOP, steps=steps)
    assert (len(trace.steps), facts.updates) == (steps, steps)


def test_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    text = """
    model = nn.Linear(16, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(100):
        model(torch.randn(8, 16)).sum().backward()
        if number % 5 == 4:
            opt.step(); opt.zero_grad()
    """
    trace, facts = run(tmp_path, text)
    forward = [op for op in trace.ops if op.layer == "Linear" and op.phase == "forward" and op.step == 1]
    assert facts.updates == 2
    assert len([op for op in forward if "addmm" in op.name]) == 5


def test_a_rare_optimizer_is_waited_for(tmp_path: Path) -> None:
    text = """
    critic, generator = nn.Linear(16, 1), nn.Linear(4, 16)
    often = torch.optim.Adam(critic.parameters())
    rarely = torch.optim.Adam(generator.parameters())
    for number in range(1000):
        made = generator(torch.randn(8, 4))
        critic(made.detach()).sum().backward(); often.step()
        if number % 5 == 0:
            critic(made).sum().backward(); rarely.step()
    """
    trace, facts = run(tmp_path, text)
    assert facts.updates == 2
    calls = [op for op in trace.ops if op.step == 1 and op.phase == "forward" and op.name.startswith("aten.addmm")]
    assert len(calls) == 5 + 5 + 1, "five times both, once the critic on what is not detached"


@pytest.mark.slow
def test_an_optimizer_that_is_never_used_is_not_waited_for(tmp_path: Path) -> None:
    text = LOOP.replace("opt =", "spare = torch.optim.SGD(model.parameters(), lr=1)\nopt =").replace("400", "4000")
    _, facts = run(tmp_path, text)
    assert facts.ending == "steps"


def test_what_follows_the_update_belongs_to_the_step(tmp_path: Path) -> None:
    average = LOOP + "    kept = torch.zeros(1 << 20)\n    del kept\n"
    trace, _ = run(tmp_path, average, steps=1)
    assert memplan.simulate(trace).peak_allocated >= 4 << 20


def test_an_evaluation_is_one_step_over_two_batches_of_each_loader(tmp_path: Path) -> None:
    text = """
    model = nn.Linear(16, 4).eval()
    data = DataLoader(TensorDataset(torch.randn(400, 16)), batch_size=40)
    with torch.no_grad():
        for (x,) in data:
            print(model(x).sum().item())
    """
    trace, facts = run(tmp_path, text)
    assert (facts.ending, len(trace.steps)) == ("script", 1)
    assert [(one.taken, one.length, one.cut) for one in facts.batches] == [(2, 10, True)]


def test_an_evaluation_before_the_training_does_not_end_it(tmp_path: Path) -> None:
    before = "model.eval()\nfor x, y in data:\n    model(x)\nmodel.train()\n"
    _, facts = run(tmp_path, LOOP.replace("for x, y in data:\n    nn", before + "for x, y in data:\n    nn"))
    assert facts.ending == "steps"
    assert facts.batches[0].cut


def test_batches_taken_ahead_do_not_end_a_loader(tmp_path: Path) -> None:
    ahead = LOOP.replace("in data:", "in list(data):")
    _, facts = run(tmp_path, ahead)
    assert facts.ending == "steps"


def test_an_exit_after_an_update_ends_it(tmp_path: Path) -> None:
    trace, facts = run(tmp_path, LOOP + "    raise SystemExit(3)\n")
    assert (facts.ending, facts.code, len(trace.steps)) == ("exit", 3, 1)
    assert any(layer.name == "0" for layer in trace.layers)


def test_an_update_in_a_function_that_returns_is_counted(tmp_path: Path) -> None:
    text = (
        "def train():\n"
        + "".join(f"    {line}\n" for line in LOOP.replace("(400,", "(40,").strip().splitlines())
        + "train()\n"
    )
    _, facts = run(tmp_path, text.replace("(400", "(40"))
    assert (facts.ending, facts.updates) == ("script", 1)


def test_a_script_may_interrupt_itself(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    try:
        with pytest.raises(StepError, match="interrupted itself"):
            run(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exit_before_any_model_is_the_scripts_own(tmp_path: Path) -> None:
    with pytest.raises(ScriptEnded, match="ended with exit code 4 before it called a model") as caught:
        run(tmp_path, "raise SystemExit(4)")
    assert caught.value.code == 4


def test_its_own_exception_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"raised ValueError: wrong.*script\.py:5"):
        run(tmp_path, "raise ValueError('wrong')")


def test_updates_by_hand_are_no_updates(tmp_path: Path) -> None:
    text = """
    weight = nn.Linear(4, 4)
    while True:
        weight(torch.randn(2, 4)).sum().backward()
        with torch.no_grad():
            for one in weight.parameters():
                one -= 0.1 * one.grad
                one.grad = None
    """
    trace, facts = run(tmp_path, text)
    assert (facts.ending, facts.updates, len(trace.steps)) == ("no update", 0, 1)


def test_a_rollout_without_gradients_is_waited_for(tmp_path: Path) -> None:
    text = """
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        with torch.no_grad():
            seen = [model(torch.randn(2, 4)) for _ in range(300)]
        model(torch.cat(seen)).sum().backward()
        optimizer.step()
    """
    _, facts = run(tmp_path, text)
    assert (facts.ending, facts.updates) == ("steps", 2)


def test_a_line_of_numpy_is_the_line_that_calls_it(tmp_path: Path) -> None:
    text = """
    import numpy as np
    np.arange(1000, dtype=np.int64).tofile("data.bin")
    data, model = np.memmap("data.bin", dtype=np.int64), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        at = torch.randint(len(data) - 8, (2,))
        x = torch.stack([torch.from_numpy(np.asarray(data[i : i + 8])) for i in at])
        model(x.float()).sum().backward()
        optimizer.step()
    """
    trace, _ = run(tmp_path, text)
    places = {one.where for one in trace.assumptions if "read" in one.text}
    assert places
    assert all(str(place).startswith("script.py:") for place in places), places


def test_a_script_that_goes_on_whatever_happens_is_given_up(tmp_path: Path) -> None:
    text = """
    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        try:
            model(torch.randn(2, 4)).sum().backward()
            opt.step()
        except BaseException as error:
            if type(error).__name__ == "GaveUp":
                raise
    """
    with pytest.raises(GaveUp, match="catches every exception"):
        run(tmp_path, text)


def test_time_ends_it(tmp_path: Path) -> None:
    _, facts = run(tmp_path, LOOP.replace("    opt.step()\n", ""), limit=1e-6)
    assert facts.ending == "time"


def test_the_next_run_imports_its_modules_again(tmp_path: Path) -> None:
    (tmp_path / "settings_of_the_script.py").write_text("import torch\nSCALE = torch.ones(32)\n", encoding="utf-8")
    text = LOOP.replace("model(x)", "model(x * settings_of_the_script.SCALE)")
    for _ in range(2):
        _, facts = run(tmp_path, "import settings_of_the_script\n" + text.lstrip())
        assert facts.ending == "steps"


def test_a_branch_on_a_value_does_not_lose_the_updates(tmp_path: Path) -> None:
    text = LOOP.replace("    opt.step()", "    if model[0].weight.grad.norm() > 100: continue\n    opt.step()")
    trace, facts = run(tmp_path, text)
    assert (facts.updates, len(trace.steps)) == (2, 2)


def test_recorded_and_measured_have_the_same_steps(tmp_path: Path) -> None:
    recorded, _ = run(tmp_path, LOOP)
    measured, facts = run(tmp_path, LOOP, really=True)
    assert (facts.ending, len(measured.steps)) == ("steps", 2)
    assert memplan.simulate(measured).peak_allocated == memplan.simulate(recorded).peak_allocated


GUARDS = [
    "torch.isfinite(loss)",
    "torch.isfinite(loss).all()",
    "~torch.isnan(loss)",
    "not torch.isnan(loss).any()",
    "not (torch.isnan(loss).any() or torch.isinf(loss).any())",
    "torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0))",
]


def test_a_check_for_nan_is_passed(tmp_path: Path) -> None:
    checks = "".join(f"    if not ({guard}):\n        print('skipped')\n        continue\n" for guard in GUARDS)
    text = LOOP.replace("    nn.functional.cross_entropy(model(x), y).backward()", "    loss = model(x).sum()\n"
        f"    loss.backward()\n{checks}")  # fmt: skip
    trace, facts = run(tmp_path, text)
    assert (facts.ending, facts.updates) == ("steps", 2)
    assert not [one for one in trace.assumptions if one.kind == "branch" or "either way" in one.text]
    measured, _ = run(tmp_path, text, really=True)
    assert memplan.simulate(measured).peak_allocated == memplan.simulate(trace).peak_allocated


RESUMED = """
model = nn.Sequential(nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 500))
opt = torch.optim.Adam(model.parameters())
found = torch.load(r"{path}")
model.load_state_dict(found["model"])
opt.load_state_dict(found["opt"])
{free}
for _ in range(9):
    model(torch.randn(8, 500)).sum().backward()
    opt.step(); opt.zero_grad()
"""


@pytest.mark.parametrize("free", ["", "del found"])
def test_a_checkpoint_that_is_there_counts(tmp_path: Path, free: str) -> None:
    model = nn.Sequential(nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 500))
    opt = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 500)).sum().backward()
    opt.step()
    path = tmp_path / "here.pt"
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
    text = RESUMED.format(path=path, free=free)
    recorded, _ = run(tmp_path, text)
    measured, _ = run(tmp_path, text, really=True)
    assert memplan.simulate(recorded).peak_allocated == pytest.approx(
        memplan.simulate(measured).peak_allocated, rel=1e-4
    )
    states = [one.bytes for one in recorded.storages if one.cause == "optimizer_state"]
    assert sum(states) >= 2 * 4 * 2 * 500 * 500


def test_pools_of_processes_work_in_this_one(tmp_path: Path) -> None:
    pools = """
    import multiprocessing as mp
    from concurrent.futures import ProcessPoolExecutor
    with mp.Pool(4) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    with mp.get_context("spawn").Pool(2, initializer=print, initargs=("ready",)) as pool:
        assert list(pool.imap(abs, [-3])) == [3]
    with ProcessPoolExecutor(max_workers=3) as pool:
        assert list(pool.map(abs, [-4])) == [4]
    """
    _, facts = run(tmp_path, textwrap.dedent(pools) + LOOP)
    assert facts.ending == "steps"


def test_what_was_saved_takes_no_memory_and_takes_it_when_it_is_loaded(tmp_path: Path) -> None:
    """Copies that are saved die as they really do; each load makes new tensors."""
    text = f"""
    model = nn.Linear(500, 500)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(9):
        torch.save([torch.ones(500, 500)], r"{tmp_path}/copies.pt")
        held = torch.load(r"{tmp_path}/copies.pt")
        again = torch.load(r"{tmp_path}/copies.pt")
        model(torch.randn(8, 500)).sum().backward()
        opt.step(); opt.zero_grad()
    """
    recorded, facts = run(tmp_path, text)
    assert [one.kind for one in facts.held] == ["checkpoint"]
    assert not (tmp_path / "copies.pt").exists()
    measured, _ = run(tmp_path, text, really=True)
    peaks = [memplan.simulate(trace).peak_allocated for trace in (recorded, measured)]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)


def test_saved_tensors_are_opened_one_by_one(tmp_path: Path) -> None:
    """As transformers does in `from_pretrained`: the whole file is mapped, the tensors are parts of it."""
    pytest.importorskip("safetensors")
    text = f"""
    import safetensors, safetensors.torch
    path = r"{tmp_path}/base.safetensors"
    saved = dict(wide=torch.zeros(300, 500), half=torch.zeros(7, dtype=torch.bfloat16), flags=torch.zeros(3).bool())
    safetensors.torch.save_file(saved, path, metadata=dict(format="pt"))
    assert isinstance(safetensors.safe_open, type)
    file = safetensors.safe_open(path, framework="pt", device="cpu")
    assert (sorted(file.keys()), file.metadata()) == (["flags", "half", "wide"], dict(format="pt"))
    assert file.get_slice("half").get_dtype() == "BF16"
    model = nn.Linear(500, 300)
    model.weight = nn.Parameter(file.get_slice("wide")[:].to(torch.float32))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(9):
        model(torch.randn(8, 500)).sum().backward()
        opt.step(); opt.zero_grad()
    """
    recorded, _ = run(tmp_path, text)
    measured, _ = run(tmp_path, text, really=True)
    peaks = [memplan.simulate(trace).peak_allocated for trace in (recorded, measured)]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-4)


def test_ops_may_be_given_the_default_generator(tmp_path: Path) -> None:
    """MONAI's loader draws its seed so."""
    text = """
    drawn = torch.empty((), dtype=torch.int64).random_(generator=torch.random.default_generator).item()
    """
    trace, facts = run(tmp_path, text + textwrap.dedent(LOOP).replace("\n", "\n    "))
    assert (facts.updates, len(trace.steps)) == (2, 2)


BRANCH = """
model, rows = nn.Linear(8, 8), torch.rand(64, 8)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    x = torch.cat((rows, rows)) if rows.sum() > 3 else rows
    model(x).sum().backward()
    opt.step()
"""


@pytest.mark.parametrize(("limit", "explored"), [(60.0, True), (5.0, False)])
def test_branches_are_explored_while_there_is_time(
    limit: float, explored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = count(step=2)  # seconds of a run, and of what comes between two
    monkeypatch.setattr("memplan.integrations.scripts.script.time", SimpleNamespace(monotonic=lambda: next(runs)))
    trace, _ = run(tmp_path, BRANCH, limit=limit)
    ways = [row.text for row in trace.assumptions if "branch" in row.text.lower()]
    assert len(ways) == 1
    assert ("NOT BOUNDED" in ways[0]) != explored
