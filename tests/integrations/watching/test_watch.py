"""Leaks of five styles by line within four steps, peaks beside torch's own, and everything put back."""

from __future__ import annotations

import collections
import gc
import importlib
import inspect
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # torch's own name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.errors import DeviceError, InputError, UsageError
from memplan.integrations.watching import follower
from memplan.integrations.watching import watch as module_of_watch

BATCH, CLASSES = 32, 10
OPTIMIZER: Any = importlib.import_module("torch.optim.optimizer")
MODULE: Any = importlib.import_module("torch.nn.modules.module")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def line_of(function: Callable[..., Any], text: str) -> str:
    """Return file:line, as memplan writes it, of the only line of a function that has a text."""
    lines, start = inspect.getsourcelines(function)
    (at,) = [number for number, line in enumerate(lines) if text in line]
    return f"tests/integrations/watching/test_watch.py:{start + at}"


def train(
    seen: memplan.integrations.watching.watch.Watch | None,  # pyright: ignore[reportAttributeAccessIssue]
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: Callable[[torch.Tensor, torch.Tensor], None] = lambda output, loss: None,
    steps: int = 4,
) -> None:
    for _ in range(steps):
        x, y = torch.randn(BATCH, 64), torch.randint(0, CLASSES, (BATCH,))
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep(output, loss)


def watched(
    keep: Callable[[torch.Tensor, torch.Tensor], None] = lambda output, loss: None,
    model: nn.Module | None = None,
    steps: int = 4,
) -> Any:
    model = model or net()
    optimizer = torch.optim.AdamW(model.parameters())
    with memplan.watch(model, optimizer, quiet=True) as seen:
        train(seen, model, optimizer, keep, steps)
    return seen


OUTPUT, LOSS = line_of(train, "output = model(x)"), line_of(train, "loss = F.cross_entropy")


# Leaks


def test_a_loss_that_is_kept_is_named_by_line() -> None:
    losses = list[torch.Tensor]()

    def keep(output: torch.Tensor, loss: torch.Tensor) -> None:
        losses.append(loss)

    (leak,) = watched(keep).leaks
    assert (leak.where, leak.bytes, leak.count, leak.shape) == (LOSS, 4, 1, ())
    assert leak.kept_at == line_of(keep, "losses.append(loss)")
    assert "`losses`" in leak.held_by
    assert leak.noticed == 4
    assert len(losses) == 4  # nothing else was put into it


def test_a_hook_that_stores_outputs_is_named_by_line_and_layer() -> None:
    model, kept = net(), list[torch.Tensor]()

    def save(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.append(output)

    model[1].register_forward_hook(save)
    (leak,) = watched(model=model).leaks
    assert (leak.where, leak.layer, leak.bytes) == (OUTPUT, "1", BATCH * 128 * 4)
    assert leak.kept_at == line_of(save, "kept.append(output)")
    assert leak.held_by.endswith("filled by a hook of 1")


def test_a_closure_is_named_by_line() -> None:
    callbacks = list[Callable[[], torch.Tensor]]()

    def keep(output: torch.Tensor, loss: torch.Tensor) -> None:
        callbacks.append(lambda: output.sum())

    (leak,) = watched(keep).leaks
    assert (leak.where, leak.layer, leak.bytes) == (OUTPUT, "2", BATCH * CLASSES * 4)
    assert leak.held_by == "`output` in the closure of <lambda>"
    assert leak.kept_at == line_of(keep, "callbacks.append")


class Recorder:
    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []

    def add(self, output: torch.Tensor, loss: torch.Tensor) -> None:
        self.outputs.append({"batch": (output,)})


def test_a_list_of_outputs_is_named_by_line() -> None:
    recorder = Recorder()
    (leak,) = watched(recorder.add).leaks
    assert (leak.where, leak.bytes) == (OUTPUT, BATCH * CLASSES * 4)
    assert leak.held_by == "the attribute `outputs` of a Recorder (in a tuple in a dict (key 'batch'))"
    assert leak.kept_at == line_of(Recorder.add, "self.outputs.append")


class Node:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.itself, self.tensor = self, tensor


@pytest.mark.parametrize("collects", [False, True], ids=["left", "collected"])
def test_a_reference_cycle_is_named_by_line(collects: bool) -> None:
    """Also where Python's collector has freed it by then."""

    def keep(output: torch.Tensor, loss: torch.Tensor) -> None:
        Node(output.exp())
        if collects:
            gc.collect()

    (leak,) = watched(keep).leaks
    assert leak.cycle
    assert (leak.where, leak.bytes) == (line_of(keep, "Node("), BATCH * CLASSES * 4)
    assert leak.held_by.startswith("a reference cycle")


def test_what_the_graph_of_a_kept_loss_holds_is_counted_with_it() -> None:
    """A validation loss without a backward pass: input, activation and mask live on in its graph."""
    kept, model = list[torch.Tensor](), net()

    def keep(output: torch.Tensor, loss: torch.Tensor) -> None:
        kept.append(model(torch.randn(BATCH, 64)).sum())

    (leak,) = watched(keep, model).leaks
    assert leak.where == line_of(keep, "kept.append")
    assert leak.bytes == 4 * (1 + BATCH * 64 + BATCH * 128)  # the scalar, the input and the ReLU's result


def test_what_is_kept_for_a_while_is_no_leak() -> None:
    last = collections.deque[torch.Tensor](maxlen=2)
    model, average = net(), dict[str, torch.Tensor]()

    def keep(output: torch.Tensor, loss: torch.Tensor) -> None:
        last.append(output)
        for name, parameter in model.named_parameters():
            before = average.get(name, parameter.detach())
            average[name] = 0.9 * before + 0.1 * parameter.detach()

    assert watched(keep, model, steps=8).leaks == ()


def test_a_leak_that_ends_is_said_to_have_ended() -> None:
    last = collections.deque[torch.Tensor](maxlen=6)
    (leak,) = watched(lambda output, loss: last.append(output), steps=12).leaks
    assert leak.ended is not None
    assert 7 <= leak.ended <= 10  # the output of step 3 is pushed out when that of step 9 comes
    assert f"gone by step {leak.ended}" in str(leak)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(self.rnn(x.view(BATCH, 4, 16))[0][:, -1]))


@pytest.mark.parametrize("make", [net, Checkpointed, Recurrent], ids=["net", "checkpoint", "lstm"])
def test_sound_steps_leak_nothing(make: Callable[[], nn.Module]) -> None:
    seen = watched(model=make(), steps=6)
    assert (seen.leaks, seen.drifts, seen.notes) == ((), (), ())
    assert [row.step for row in seen.rows] == [1, 2, 3, 4, 5, 6]


def test_a_leak_that_begins_late_is_found_by_the_growth_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[torch.Tensor]()
    resident = iter(range(0, 10**12, 1 << 20))  # each step's end has 1 MiB more
    monkeypatch.setattr("memplan.integrations.watching.counters._resident", lambda: next(resident))
    monkeypatch.setattr("memplan.integrations.watching.counters._INTERVAL", 0.0)
    steps = iter(range(100))
    seen = watched(lambda output, loss: kept.append(output) if next(steps) > 5 else None, steps=16)
    (leak,) = seen.leaks
    assert leak.where == OUTPUT
    assert leak.noticed > 6


# Figures


def test_peaks_and_what_is_held_are_those_of_torchs_profiler() -> None:
    """`memplan.measure` of the same steps, whose results live as long as those of a loop, is another way to them."""
    torch.manual_seed(0)
    seen = watched()

    def build() -> Callable[[], None]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        held = dict[str, torch.Tensor]()

        def step() -> None:
            held["x"], held["y"] = torch.randn(BATCH, 64), torch.randint(0, CLASSES, (BATCH,))
            held["output"] = model(held["x"])
            held["loss"] = F.cross_entropy(held["output"], held["y"])
            optimizer.zero_grad()
            held["loss"].backward()
            optimizer.step()

        return step

    measured = memplan.simulate(memplan.measure(build, steps=4))
    last = seen.rows[-1]
    assert (last.source, last.observed) == ("profiler", False)
    assert last.peak == measured.steps[-1].peak_allocated
    weights = 64 * 128 + 128 + 128 * CLASSES + CLASSES
    numbers = (
        4 * weights + 4 + BATCH * 64 + 2 * BATCH + BATCH * CLASSES + 1
    )  # Adam's counters, x, y (int64), output, loss
    assert last.held == 4 * numbers
    assert last.predicted is not None
    assert abs(last.predicted - last.peak) <= 64  # each row counts some scalars that live for an op alone
    assert [row.observed for row in seen.rows] == [True, True, True, False]


def test_rows_and_leaks_go_through_json() -> None:
    kept = list[torch.Tensor]()
    seen = watched(lambda output, loss: kept.append(loss), steps=5)
    data = json.loads(json.dumps(seen.to_dict()))
    assert data["steps"] == 5
    assert data["rows"][3]["drift"] == data["rows"][3]["peak"] - data["predicted"]
    assert data["rows"][4]["peak"] is None
    assert data["leaks"][0]["where"] == LOSS
    assert len(repr(seen)) < 2000
    assert str(seen).splitlines()[1].startswith(f"leak: a tensor (scalar, float32), 4 B a step, made at {LOSS}")


def test_a_larger_batch_that_comes_later_is_a_drift_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter(range(0, 10**12, 1 << 20))
    monkeypatch.setattr("memplan.integrations.watching.counters._resident", lambda: next(resident))
    monkeypatch.setattr("memplan.integrations.watching.counters._INTERVAL", 0.0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters())

    def run(batch: int) -> None:
        loss = model(torch.randn(batch, 64)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with memplan.watch(model, optimizer, quiet=True) as seen:
        for number in range(14):
            run(BATCH if number < 5 else 20_000)
    (growth, *_) = seen.drifts
    assert growth.layer == "1"  # the ReLU's result, 20,000 x 128, is what the backward pass keeps
    assert growth.where == line_of(run, "loss = model")
    # the result and its gradient are there at the peak; at the small batch's, in the update, neither, or a result alone
    assert growth.bytes in [4 * 128 * (2 * 20_000 - results * BATCH) for results in (0, 1, 2)]
    assert growth.peak > growth.predicted + growth.bytes


# Put back


def state() -> tuple[Any, ...]:
    hooks = OPTIMIZER._global_optimizer_pre_hooks, OPTIMIZER._global_optimizer_post_hooks, MODULE._global_forward_hooks
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()  # pyright: ignore[reportAttributeAccessIssue]
    profiled = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    return (*map(len, hooks), mode, profiled, len(gc.callbacks), gc.isenabled(), nn.Module.__setstate__)


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = state()
    yield
    assert state() == before
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class Own(Exception):
    pass


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_an_error_of_the_step_is_the_users_and_everything_is_put_back(steps: int, named: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    error, seen = Own("mine"), memplan.watch(model, optimizer if named else None, quiet=True)

    def run() -> None:
        with seen:
            train(seen, model, optimizer, steps=steps)
            raise error

    with unchanged(model, optimizer):
        with pytest.raises(Own) as raised:
            run()
        assert raised.value is error
        assert len(seen.rows) == steps
        assert seen.post_mortem is None


def test_an_error_of_an_op_is_torchs_own() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with (
        unchanged(model, optimizer),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        memplan.watch(model, optimizer, quiet=True),
    ):
        model(torch.randn(3, 3))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_second_interrupt_as_the_watch_ends_leaves_nothing(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())

    class Interrupted:
        """The signal comes before anything lets it wait."""

        def __init__(self, **_: Any) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

    def run() -> None:
        with memplan.watch(model, optimizer, quiet=True) as seen:
            train(seen, model, optimizer, steps=steps)
            monkeypatch.setattr(module_of_watch, "deferred", Interrupted)
            raise KeyboardInterrupt

    with unchanged(model, optimizer), pytest.raises(KeyboardInterrupt):
        run()


def test_training_gives_the_same_bits_with_a_watch() -> None:
    def trained(watch: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = Recurrent()
        optimizer = torch.optim.AdamW(model.parameters())
        if watch:
            with memplan.watch(model, optimizer, quiet=True) as seen:
                train(seen, model, optimizer, steps=6)
        else:
            train(None, model, optimizer, steps=6)
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(trained(True), trained(False), strict=True))


def test_an_error_of_the_watch_itself_ends_the_watch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(follower, "find_leaks", fails)
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with unchanged(model, optimizer), memplan.watch(model, optimizer, quiet=True) as seen:
        train(seen, model, optimizer, steps=6)
    assert "the watch ended at step 4: ZeroDivisionError()" in seen.notes
    assert len(seen.rows) == 4


def test_an_error_of_the_notes_ends_the_notes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("in a rule")

    monkeypatch.setattr("memplan.trace.recording.ledger.Ledger.parts", fails)
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with unchanged(model, optimizer), pytest.raises(ZeroDivisionError), memplan.watch(model, optimizer, quiet=True):
        pass  # opening it fails: nothing is left behind


def test_one_watch_at_a_time_and_each_but_once() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with unchanged(model, optimizer), memplan.watch(model, optimizer, quiet=True) as seen:
        with pytest.raises(UsageError, match="second watch"), memplan.watch(model, optimizer):
            pass
        train(seen, model, optimizer, steps=2)
    assert len(seen.rows) == 2
    with pytest.raises(UsageError, match="has run already"):
        seen.__enter__()
    with memplan.watch(model, optimizer, quiet=True):  # the lock is free again
        pass


def test_steps_of_other_threads_are_not_watched() -> None:
    model, other = net(), net()
    optimizer, others = torch.optim.SGD(model.parameters()), torch.optim.SGD(other.parameters())
    with memplan.watch(model, optimizer, quiet=True) as seen:
        thread = threading.Thread(target=lambda: [train(None, other, others), optimizer.step()])
        thread.start()
        thread.join()
        train(seen, model, optimizer, steps=2)
    assert len(seen.rows) == 2


def test_a_profiler_of_the_users_is_left_alone() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with memplan.watch(model, optimizer, quiet=True) as seen:
        train(seen, model, optimizer, steps=1)
        with torch.autograd.profiler.profile() as profile:
            train(seen, model, optimizer, steps=2)
        train(seen, model, optimizer, steps=2)
    assert profile is not None
    assert any(event.key == "aten::addmm" for event in profile.key_averages())
    assert [row.peak for row in seen.rows] == [None] * 5
    assert seen.rows[-1].predicted is not None


def test_a_compiled_model_is_compiled_without_our_hooks() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    fast, kept = torch.compile(model, backend="aot_eager"), list[torch.Tensor]()
    with warnings.catch_warnings(), memplan.watch(model, optimizer, quiet=True) as seen:
        # torch warns where hooks of modules are compiled, too
        warnings.filterwarnings("error", message="Using `torch.compile\\(module\\)` when there are global hooks")
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # of Python 3.13.0
        train(seen, fast, optimizer, lambda output, loss: kept.append(loss), steps=5)  # pyright: ignore[reportArgumentType]
    (leak,) = seen.leaks
    assert leak.where == LOSS


# What is watched


def test_steps_end_by_hand_where_no_optimizer_does_it() -> None:
    model = net()
    with memplan.watch(model, quiet=True) as seen:
        for _ in range(5):
            model(torch.randn(BATCH, 64)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            seen.end_step()
    assert len(seen.rows) == 5
    assert seen.leaks == ()


def test_of_two_optimizers_the_last_one_ends_a_step() -> None:
    one, other = net(), net()
    first, last = torch.optim.SGD(one.parameters()), torch.optim.SGD(other.parameters())
    with memplan.watch([one, other], [first, last], quiet=True) as seen:
        for _ in range(3):
            train(seen, one, first, steps=1)
            train(seen, other, last, steps=1)
    assert len(seen.rows) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((3,), InputError, "a model to watch of type int"),
        (([],), InputError, "a model to watch of type list"),
        ((net(), 3), InputError, "an optimizer of type int"),
        ((net(), None, "h100"), DeviceError, "device='h100', and the model is on cpu"),
        ((net(), None, "h9000"), DeviceError, "h9000"),
        pytest.param(
            (net(), None, "cuda"),
            DeviceError,
            "device='cuda' on a machine without a card",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card"),
        ),
    ],
)
def test_what_cannot_be_watched_is_refused(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        memplan.watch(*arguments)


def test_a_model_that_moves_is_watched_from_then_on() -> None:
    model = net()
    with memplan.watch(model, quiet=True) as seen:
        seen.end_step()
        model.to("meta")
        seen.end_step()
        seen.end_step()
    assert [row.step for row in seen.rows] == [1, 3]
    assert seen.notes[0] == "the model moved to meta: watched from step 3 on"


def test_leaks_are_said_on_stderr_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    kept, model = list[torch.Tensor](), net()
    optimizer = torch.optim.SGD(model.parameters())
    for quiet in (True, False):
        with memplan.watch(model, optimizer, quiet=quiet) as seen:
            train(seen, model, optimizer, lambda output, loss: kept.append(loss))
        out, err = capsys.readouterr()
        said = [line for line in err.splitlines() if line.startswith("memplan: ")]
        assert out == ""
        assert said == ([] if quiet else [f"memplan: {seen.leaks[0]}"])


def test_the_annotation_of_the_watch_is_public() -> None:
    assert isinstance(watched(steps=1), module_of_watch.Watch)
