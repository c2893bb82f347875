"""What is said of a run to its end, from loaders of four batches, is what the run takes that really goes there."""

from __future__ import annotations

import contextlib
import runpy
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integrations.scripts.script_runs import HEAD, run, run_here, script_of
from truth.cpu_allocator import allocations, peak_of

import memplan
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.request import Request
from memplan.studies.runs import extrapolation
from memplan.studies.runs.whole_run import WholeRun, whole_run

_LAST = 64
"""Bytes by which phases may differ: losses of four bytes, dropped one batch earlier or later."""
BEGIN = """
dev = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 20)).to(dev)
opt = torch.optim.Adam(net.parameters())
def loader(samples, batch):
    return DataLoader(TensorDataset(torch.randn(samples, 48), torch.randint(0, 20, (samples,))), batch)
def train(data):
    net.train()
    for x, y in data:
        opt.zero_grad()
        nn.functional.cross_entropy(net(x.to(dev)), y.to(dev)).backward()
        opt.step()
"""
PREDICTIONS_KEPT = """
data, val = loader({train}, {batch}), loader({val}, {val_batch})
for epoch in range(2):
    train(data)
    net.eval()
    predictions, targets = [], []
    with torch.no_grad():
        for x, y in val:
            predictions.append(net(x.to(dev)))
            targets.append(y)
    accuracy = (torch.cat(predictions).argmax(1) == torch.cat(targets).to(dev)).float().mean()
    torch.save(net.state_dict(), "net.pt")
"""
BOXES = """
val, boxes = loader(50, 8), []
net.eval()
with torch.no_grad():
    for x, y in val:
        for row in net(x.to(dev)):
            boxes.append(row.topk(7).values)
"""
GRAPHS_KEPT = """
data, val = loader(48, 8), loader(100, 8)
for epoch in range(2):
    train(data)
    net.eval()
    total = 0
    for x, y in val:
        total += nn.functional.cross_entropy(net(x.to(dev)), y.to(dev))
"""
CONCATENATED = """
val = loader(90, 8)
net.eval()
outputs = None
with torch.no_grad():
    for x, y in val:
        out = net(x.to(dev))
        outputs = out if outputs is None else torch.cat((outputs, out))
"""
DATA_SETS_DROPPED = """
for samples in (90, 110, 130):
    val = loader(samples, 8)
    net.eval()
    with torch.no_grad():
        for x, y in val:
            out = net(x.to(dev))
    del val, x, y, out
"""
ACCUMULATED_AND_RESUMED = """
data = loader(96, 4)
for epoch in range(2):
    kept = []
    for number, (x, y) in enumerate(data):
        loss = nn.functional.cross_entropy(net(x.to(dev)), y.to(dev))
        loss.backward()
        kept.append(x.to(dev).flip(0))
        if number % 4 == 3:
            opt.step()
            opt.zero_grad()
torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "all.pt")
loaded = torch.load("all.pt", map_location=dev)
net.load_state_dict(loaded["net"])
opt.load_state_dict(loaded["opt"])
train(loader(20, 4))
"""
ONE_AHEAD = """
def ahead(data):
    batches = iter(data)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following
val = loader(130, 8)
net.eval()
predictions = []
with torch.no_grad():
    for x, y in ahead(val):
        predictions.append(net(x.to(dev)))
print(torch.cat(predictions).shape)
"""
LEFT_OF_ONE_AHEAD = """
from torch.utils.data import BatchSampler, SequentialSampler
def ahead(data):
    batches = iter(data)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        yield batch, following is None
        batch = following
samples = TensorDataset(torch.randn(130, 48), torch.randint(0, 20, (130,)))
val = DataLoader(samples, batch_sampler=BatchSampler(SequentialSampler(samples), 8, False))
data = loader(48, 8)
for epoch in range(2):
    train(data)
    net.eval()
    predictions = []
    for (x, y), is_last in ahead(val):
        with torch.no_grad():
            out = net(x)
        predictions.append(out[:130 % 8] if is_last else out)
    torch.cat(predictions).argmax(1)
    torch.save(net.state_dict(), "net.pt")
"""
WINDOWS = """
data, val = loader(15 * 8, 8), loader(40, 8)
for epoch in range(2):
    net.train()
    batches = iter(data)
    for first in range(0, len(data), 4):
        window = [next(batches) for _ in range(min(4, len(data) - first))]
        for x, y in window:
            nn.functional.cross_entropy(net(x.to(dev)), y.to(dev)).backward()
        opt.step()
        opt.zero_grad()
    net.eval()
    with torch.no_grad():
        for x, y in val:
            net(x.to(dev))
"""
KNOWN_LENGTH = """
val = loader(130, 8)
net.eval()
predictions, batches = [], iter(val)
with torch.no_grad():
    for number in range(len(val)):
        x, y = next(batches)
        predictions.append(net(x.to(dev)))
    print(torch.cat(predictions).softmax(1).shape)
"""
GENERATED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100))
    def forward(self, x):
        return self.net(x)
    @torch.no_grad()
    def generate(self, x, n):
        for _ in range(n):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], 1)
        return x
model = Model()
opt = torch.optim.SGD(model.parameters(), 0.1)
data = DataLoader(TensorDataset(torch.randint(0, 100, (36, 8))), 6)
for epoch in range(2):
    for (prompt,) in data:
        tokens = model.generate(prompt, 12)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        opt.step()
        opt.zero_grad()
"""


def followed(tmp_path: Path, text: str, *, really: bool, batches: int = 4) -> WholeRun:
    """Follow a script's phases: recorded with loaders of ``batches``, or for real to its end."""
    trace, facts = run(tmp_path, text, really=really, phases=True, batches=None if really else batches)
    return whole_run(trace, facts, title="script.py")[0]


def real_peak(tmp_path: Path, text: str) -> int:
    """Return the peak of a script that nothing of memplan watches."""
    path = tmp_path / "alone.py"
    path.write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
    return peak_of(allocations(lambda: runpy.run_path(str(path), run_name="__main__")))


def assert_as_it_really_goes(tmp_path: Path, text: str, batches: int = 4) -> WholeRun:
    recorded, real = followed(tmp_path, text, really=False, batches=batches), followed(tmp_path, text, really=True)
    assert [(p.kind, p.where) for p in recorded.phases] == [(p.kind, p.where) for p in real.phases]
    for phase, actual in zip(recorded.phases, real.phases, strict=True):
        assert phase.allocated == pytest.approx(actual.allocated, abs=_LAST), phase.kind
        assert phase.stays == pytest.approx(actual.stays, abs=_LAST), phase.kind
    assert recorded.allocated == pytest.approx(real_peak(tmp_path, text), abs=_LAST)
    return recorded


def test_predictions_that_an_evaluation_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = BEGIN + PREDICTIONS_KEPT.format(train=42, batch=8, val=100, val_batch=8)
    run = assert_as_it_really_goes(tmp_path, text)
    assert [phase.kind for phase in run.phases] == ["build", "train", "evaluate", "save", "train", "evaluate", "save"]
    evaluation = run.phases[2]
    assert (evaluation.batches, evaluation.length) == (4, 13)
    assert evaluation.per_batch == 8 * (20 * 4 + 8)  # a prediction in float32 and a target in int64


@pytest.mark.slow
def test_batches_beyond_the_most_storages_count_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extrapolation, "_MOST_ADDED", 30)
    text = BEGIN + PREDICTIONS_KEPT.format(train=42, batch=8, val=200, val_batch=8)
    recorded, real = followed(tmp_path, text, really=False), followed(tmp_path, text, really=True)
    assert recorded.allocated == pytest.approx(real_peak(tmp_path, text), abs=_LAST)
    assert [p.stays for p in recorded.phases] == pytest.approx([p.stays for p in real.phases], abs=_LAST)


def test_boxes_that_each_sample_of_a_smaller_last_batch_leaves(tmp_path: Path) -> None:
    recorded, real = (followed(tmp_path, BEGIN + BOXES, really=really) for really in (False, True))
    assert recorded.allocated == pytest.approx(real.allocated, abs=_LAST)
    assert recorded.phases[-1].stays == pytest.approx(real.phases[-1].stays, abs=_LAST)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    train=st.integers(33, 90), batch=st.integers(3, 8), val=st.integers(1, 120), val_batch=st.integers(2, 9)
)  # fmt: skip
def test_of_any_length(tmp_path: Path, train: int, batch: int, val: int, val_batch: int) -> None:
    with contextlib.chdir(tmp_path):
        text = BEGIN + PREDICTIONS_KEPT.format(train=train, batch=batch, val=val, val_batch=val_batch)
        recorded, peak = followed(tmp_path, text, really=False), real_peak(tmp_path, text)
    assert recorded.allocated == pytest.approx(peak, rel=0.001)


def test_data_sets_that_the_script_drops_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_as_it_really_goes(tmp_path, BEGIN + DATA_SETS_DROPPED)


@pytest.mark.slow
def test_predictions_that_each_batch_concatenates(tmp_path: Path) -> None:
    assert_as_it_really_goes(tmp_path, BEGIN + CONCATENATED)


def test_a_loader_that_fetches_one_batch_ahead(tmp_path: Path) -> None:
    """As Accelerate's does: a batch lives for two periods, and is not kept by each."""
    run = assert_as_it_really_goes(tmp_path, BEGIN + ONE_AHEAD)
    assert run.phases[-1].per_batch == 8 * 20 * 4


@pytest.mark.slow
def test_a_loop_over_a_known_length(tmp_path: Path) -> None:
    """As Lightning's: the part of the last batch goes on with what is made of all."""
    assert_as_it_really_goes(tmp_path, BEGIN + KNOWN_LENGTH)


@pytest.mark.slow
def test_variables_that_hold_the_last_batch_of_a_loader_that_fetches_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Accelerate's, whose loaders get a batch sampler, and which cuts the last batch's predictions."""
    monkeypatch.chdir(tmp_path)
    assert_as_it_really_goes(tmp_path, BEGIN + LEFT_OF_ONE_AHEAD)


def test_the_last_update_accumulates_as_many_batches_as_really(tmp_path: Path) -> None:
    """As the Trainer of transformers, whose list of the batches of an update lives on in the evaluation."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + BEGIN + WINDOWS, encoding="utf-8")
    ran = run_here(Request(Command(str(path)), device="cpu", phases=True))
    recorded = whole_run(ran.trace, ran.facts, title="script.py")[0]
    real = followed(tmp_path, BEGIN + WINDOWS, really=True)
    phases = [(p.kind, p.allocated, p.stays) for p in recorded.phases]
    assert phases == [(p.kind, pytest.approx(p.allocated, abs=_LAST), p.stays) for p in real.phases]


@pytest.mark.slow
def test_accumulated_gradients_and_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_as_it_really_goes(tmp_path, BEGIN + ACCUMULATED_AND_RESUMED, batches=16)


@pytest.mark.slow
def test_an_evaluation_that_keeps_its_graphs(tmp_path: Path) -> None:
    run = assert_as_it_really_goes(tmp_path, BEGIN + GRAPHS_KEPT)
    assert [phase.builds_graph for phase in run.phases if phase.kind == "evaluate"] == [True, True]


def test_rollouts(tmp_path: Path) -> None:
    run = assert_as_it_really_goes(tmp_path, GENERATED)
    assert [phase.kind for phase in run.phases] == ["build", "generate", "train", "generate", "train"]


def test_what_each_epoch_keeps(tmp_path: Path) -> None:
    text = BEGIN + "data, kept = loader(48, 8), []\nfor epoch in range({}):\n    train(data)\n    kept.append({})\n"
    sample = "net(torch.zeros(400, 48, device=dev)).detach()"
    recorded = followed(tmp_path, text.format(6, sample), really=False)
    assert recorded.ending == "passes"
    two, six = (followed(tmp_path, text.format(epochs, sample), really=True).allocated for epochs in (2, 6))
    assert recorded.allocated + 4 * recorded.per_epoch == pytest.approx(six, abs=_LAST)
    assert six - two == 4 * recorded.per_epoch


STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(48), 3
for epoch in range(3):
    train(DataLoader(Stream(), 8))
"""


def test_an_endless_stream_is_cut_and_has_no_length(tmp_path: Path) -> None:
    run = followed(tmp_path, BEGIN + STREAM, really=False)
    training = [phase for phase in run.phases if phase.kind == "train"]
    assert [(phase.batches, phase.length) for phase in training] == [(4, None)] * 3
    assert run.ending == "script"


def test_a_loop_without_a_loader_ends_after_eight_updates(tmp_path: Path) -> None:
    text = "model = nn.Linear(4, 4)\nopt = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(1000):\n"
    text += "    model(torch.ones(2, 4)).sum().backward()\n    opt.step()\n"
    trace, facts = run(tmp_path, text, phases=True, batches=4)
    assert (facts.ending, facts.updates, len(trace.steps)) == ("steps", 8, 8)


PLACES = """
torch.save({"weight": torch.ones(1000, device="cuda"), "step": torch.ones(500)}, "saved.pt")
for place in (None, "cpu", {"cuda:0": "cpu"}, lambda storage, location: storage.cuda(0)):
    loaded = torch.load("saved.pt", map_location=place)
    print(loaded["weight"].device.type, loaded["step"].device.type)
"""


def test_a_checkpoint_is_loaded_to_the_device_it_was_saved_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `torch.load` documents ``map_location``."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + PLACES + "nn.Linear(1, 1)(torch.ones(1, 1))\n", encoding="utf-8")
    with contextlib.chdir(tmp_path):
        memplan.record(script_of(str(path), shows=True, phases=True, batches=4), device="h100")  # pyright: ignore[reportArgumentType]  # a program
    assert capfd.readouterr().out.split() == ["cuda", "cpu", *["cpu"] * 4, "cuda", "cuda"]
