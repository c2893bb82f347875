"""Calls of memplan in which something goes wrong, one fault each: what they leave of the model, torch and the process.

    python benchmarks/faults.py                  # 500, or those that are missing: writes results/faults.json and .md
    python benchmarks/faults.py --count 40 --first 1000    # prints, writes nothing
    python benchmarks/faults.py --signals    # 1000 signals: writes results/signals.json and .md

Fault number n is drawn from a generator with the seed n: which call (record, measure, explain, check, plan, fit,
largest, sweep), and which fault:

* error: an op of the user's raises, at a random one of all its calls: forward, backward, loss or update
* memory: the same op runs out of memory there; where the step is real, a real allocation fails
* interrupt: Ctrl-C at a random moment of the call
* beside: another thread trains meanwhile

With ``--signals`` each number is a process forked from one that has made every call before, to which a signal comes at
a random moment of one call (record, measure, plan, fit, watch): Ctrl-C, Ctrl-C twice, SIGTERM with a handler that
raises SystemExit, or a timer of 2 ms whose handler counts, in which the call has to go on.

After each, these are compared with before: parameters, buffers, gradients, hooks and attributes of the model, state of
the optimizer, the batch, files of the working and the temporary folder, random states, and all that
tests/truth/torch_state.py has of torch and Python. The next call and a thread that trains give what they give alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from truth import torch_state  # noqa: E402

import memplan  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
COUNT, BATCH = 500, 25
FAULTS = ("error", "memory", "interrupt", "beside")
Row = dict[str, Any]


class Fault(Exception):
    """What the user's op raises."""


class Faults:
    """Counts the calls of the user's op, and fails at one of them."""

    def __init__(self) -> None:
        self.calls, self.at, self.kind = 0, 0, ""

    def call(self, x: Tensor, real: bool) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            if self.kind == "error":
                raise Fault("the user's own op fails")
            if not real:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            torch.empty(1 << 52, dtype=torch.uint8)
        return x.clone()


FAULT = Faults()


@torch.library.custom_op("memplan_faults::tap", mutates_args=())
def tap(x: Tensor) -> Tensor:
    return FAULT.call(x, real=True)


@tap.register_fake
def _(x: Tensor) -> Tensor:
    return FAULT.call(x, real=False)


tap.register_autograd(lambda ctx, gradient: tap(gradient))


class Tap(nn.Module):
    """The user's op as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return tap(x)


class Update(torch.optim.AdamW):
    """AdamW, whose update calls the user's op."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]["params"]
        tap(group[0].detach())
        done = super().step(closure)
        tap(group[-1].detach())
        return done


def loss(output: Tensor, target: Tensor) -> Tensor:
    return tap(F.cross_entropy(tap(output), target))


def network() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(32, 32), Tap(), nn.BatchNorm1d(32), nn.ReLU(), Tap()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Dropout(0.1), Tap(), nn.Linear(32, 8))


class User:
    """A model in training, its optimizer and a batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.y = network(), torch.randn(64, 32), torch.randint(0, 8, (64,))
        self.optimizer = Update(self.model.parameters())
        loss(self.model(self.x), self.y).backward()
        self.optimizer.step()
        self.given = {"targets": self.y, "loss": loss}

    def contents(self) -> dict[str, Any]:
        model = self.model
        return {
            "tensors": {name: _bits(tensor) for name, tensor in model.state_dict().items()},
            "gradients": {name: (id(one.grad), _bits(one.grad)) for name, one in model.named_parameters()},
            "attributes": {name: _plain(vars(part)) for name, part in model.named_modules()},
            "optimizer": repr(_plain(self.optimizer.state_dict())),
            "batch": (_bits(self.x), _bits(self.y), self.x.grad),
            "output": _bits(model.eval()(self.x)) and model.train() is model,
        }

    def build(self) -> Callable[[], None]:
        model, x, y = network(), torch.randn(64, 32), torch.randint(0, 8, (64,))
        optimizer = Update(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

        return step


def _bits(tensor: Tensor | None) -> list[Any] | None:
    return None if tensor is None else tensor.detach().flatten().tolist()


def _plain(value: Any) -> Any:
    """Return a value whose parts are compared by what they hold; tensors and functions by which they are."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return _bits(value) if not isinstance(value, nn.Parameter) else id(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


# -- calls


def calls(user: User) -> dict[str, Callable[[], Any]]:
    """Return what is called, by name; each returns a figure that does not depend on how fast the machine is."""
    model, x, given = user.model, user.x, user.given
    updated = {**given, "optimizer": Update}

    def fitted(**more: Any) -> Any:
        try:
            fitted = memplan.fit(model, x, **given, budget=1, pairs=0, accumulate=2, **more)
        except memplan.BudgetError as error:
            fitted = memplan.fit(model, x, **given, budget=error.smallest_budget, pairs=0, accumulate=2, **more)
        fitted.undo()
        return fitted.plan.peak

    def swept() -> Any:
        found = memplan.sweep(model, {"batch": [16, 32]}, x, **updated, device="cpu", jobs=1)
        if found.interrupted:  # it keeps the points that were done
            raise KeyboardInterrupt
        return [row.get("peak") for row in found.rows]

    peak = lambda trace: memplan.simulate(trace).peak_allocated  # noqa: E731
    return {
        "record": lambda: peak(memplan.record(user.build, device="cpu")),
        "record for a card": lambda: peak(memplan.record(user.build, device="h100")),
        "measure": lambda: peak(memplan.measure(user.build, device="cpu")),
        "explain": lambda: memplan.explain(model, x, **updated, device="cpu").timeline.peak_allocated,
        "check": lambda: len(memplan.check(model, x, **updated, device="cpu")),
        "plan": lambda: memplan.plan(model, x, **updated, budget="1 GiB", costs="roofline").peak,
        "fit": fitted,
        "fit early": lambda: memplan.fit(
            model, x, **updated, budget="1 MiB", pairs=0, early=True
        ).undo(),
        "largest": lambda: memplan.largest(model, "batch", x, **updated, budget="300 KiB", device="cpu"),
        "sweep": swept,
    }  # fmt: skip


class Alone:
    """What each call gives, how often it calls the user's op, and how long it takes, without a fault."""

    def __init__(self, user: User) -> None:
        self._user, self._seen = user, dict[str, tuple[Any, int, float]]()

    def __getitem__(self, name: str) -> tuple[Any, int, float]:
        if name not in self._seen:
            call = calls(self._user)[name]
            call()  # what is made once, is made
            FAULT.calls, FAULT.at, begun = 0, 0, time.perf_counter()
            found = call()
            self._seen[name] = found, FAULT.calls, time.perf_counter() - begun
        return self._seen[name]


# -- faults


@contextmanager
def interrupted(after: float) -> Iterator[None]:
    """Send this process what Ctrl-C sends, after some seconds."""
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    ignored = (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    )  # as a shell leaves it for what it starts in the background
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(after, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class Beside:
    """A thread that trains a model of its own, from its own generator."""

    def __init__(self) -> None:
        self._stop, self._steps, self._weights = threading.Event(), 0, Tensor()
        self._thread = threading.Thread(target=self._run)

    def _train(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)
        weight = nn.Parameter(torch.randn(32, 32, generator=generator))
        optimizer = torch.optim.SGD([weight], 0.001)
        while True:
            optimizer.zero_grad()
            F.linear(torch.randn(16, 32, generator=generator), weight).relu().sum().backward()
            optimizer.step()
            yield weight.detach()

    def _run(self) -> None:
        for weights in self._train():
            self._steps, self._weights = self._steps + 1, weights.clone()
            if self._stop.wait(0.001):
                return

    @contextmanager
    def training(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            again = self._train()
            for _ in range(self._steps - 1):
                next(again)
            assert torch.equal(next(again), self._weights), "the thread beside trained otherwise"


def fault(number: int, user: User, alone: Alone) -> Row:
    """Run one call with one fault and compare everything with before; ``wrong`` is what differs."""
    draw = random.Random(number)
    name, kind = draw.choice(list(calls(user))), draw.choice(FAULTS)
    expected, ops, seconds = alone[name]
    where = draw.random() * seconds
    at = draw.randint(1, ops) if kind in ("error", "memory") else 0

    @contextmanager
    def armed() -> Iterator[None]:
        FAULT.calls, FAULT.at, FAULT.kind = 0, at, kind
        yield

    around = {"interrupt": lambda: interrupted(where), "beside": lambda: Beside().training()}.get(kind, armed)
    row = {"number": number, "call": name, "fault": kind, "outcome": "result", "wrong": []}
    # where an op of the user's fails, a probe of a kernel may have failed, and the result may be another
    return compared(row, user, calls(user)[name], around, expected if kind in ("interrupt", "beside") else None)


def compared(
    row: Row, user: User, call: Callable[[], Any], around: Callable[[], AbstractContextManager[Any]], expected: Any
) -> Row:
    """Run a call within a context and add to its row what is not as before, nor the result as expected."""
    before, files = user.contents(), _files()
    state = random.getstate(), torch.get_rng_state()
    try:
        with torch_state.kept():
            try:
                with around():
                    found = call()
                if expected is not None and found != expected:
                    row["wrong"].append(f"gives {found}, alone {expected}")
            except (KeyboardInterrupt, SystemExit):
                row["outcome"] = "interrupt"
            except (memplan.MemplanError, Fault, MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
                row["outcome"], row["said"] = type(error).__name__, str(error)[:300]
            FAULT.at = 0
    except AssertionError as error:
        row["wrong"] += str(error).splitlines()
    FAULT.at = 0
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    after = user.contents()
    row["wrong"] += [f"{key} of the user: {_first_other(before[key], after[key])}" for key in before
                     if before[key] != after[key]]  # fmt: skip
    row["wrong"] += [f"file {one}" for one in sorted(_files() ^ files)]
    free = threading.Thread(target=lambda: memplan.record(user.build, device="cpu", steps=1), daemon=True)
    free.start()
    free.join(60)
    if free.is_alive():
        row["wrong"].append("the next call waits for ever")
    return row


# -- signals


SIGNALS = ("Ctrl-C", "Ctrl-C twice", "SIGTERM", "timer of 2 ms")
_TICK, _HANGS = 0.002, 120


def signalled_calls(user: User) -> dict[str, Callable[[], Any]]:
    """Return the calls to which signals come, by name."""
    every = calls(user)

    def watched() -> int:
        model = copy.deepcopy(user.model).eval()  # else its dropout would draw
        optimizer = Update(model.parameters())
        with memplan.watch(model, optimizer, quiet=True, post_mortem=None) as seen:
            for _ in range(5):
                loss(model(user.x), user.y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return len(seen.rows)

    def planned() -> int:
        return memplan.plan(user.model, user.x, **user.given, budget="95%", costs="roofline").peak

    def fitted() -> None:
        memplan.fit(user.model, user.x, **user.given, budget="95%", pairs=0).undo()

    return {
        "record": every["record"], "measure": every["measure"], "plan": planned, "fit": fitted, "watch": watched,
    }  # fmt: skip


def signalled(number: int, user: User, expected: Any, name: str, kind: str, after: float, again: float) -> Row:
    """Fork a process that makes a call, send it signals, and return what it says; or how it ended."""
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.close(read)
        row: Row = {"number": number, "call": name, "fault": kind, "outcome": "result", "wrong": []}
        try:
            call = signalled_calls(user)[name]
            around = lambda: _handled(kind, row, lambda: os.write(write, b"\n"), after + again + 0.3)  # noqa: E731
            compared(row, user, call, around, expected)
        except BaseException as error:
            row["wrong"].append(f"{type(error).__name__}: {error}")
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as said:
        said.read(1)
        for pause in {"timer of 2 ms": (), "Ctrl-C twice": (after, again)}.get(kind, (after,)):
            time.sleep(pause)
            os.kill(process, signal.SIGTERM if kind == "SIGTERM" else signal.SIGINT)
        killer = threading.Timer(_HANGS, os.kill, (process, signal.SIGKILL))
        killer.start()
        text = said.read()
    _, status = os.waitpid(process, 0)
    killer.cancel()
    if os.WIFSIGNALED(status):
        outcome = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return {"number": number, "call": name, "fault": kind, "outcome": outcome, "wrong": [outcome]}
    return json.loads(text)


@contextmanager
def _handled(kind: str, row: Row, ready: Callable[[], Any], until: float) -> Iterator[None]:
    """Handle signals as the user does whom they come to. What comes after the call is ignored: the last one comes some
    seconds after it began, at most."""
    ticks, over, begun = 0, False, time.monotonic()

    def tick(*_: Any) -> None:
        nonlocal ticks
        ticks += 1

    def leave(*_: Any) -> None:
        if not over:
            raise SystemExit

    before = signal.signal(signal.SIGTERM, leave), signal.signal(signal.SIGALRM, tick)
    try:
        ready()
        if kind == "timer of 2 ms":
            signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
        yield
    finally:
        over = True
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        ours = ours and signal.getsignal(signal.SIGTERM) is leave and signal.getsignal(signal.SIGALRM) is tick
        row["wrong"] += [] if ours else ["handlers are others"]
        row["ticks"] = ticks
        time.sleep(max(0.0, begun + until - time.monotonic()))
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])
        signal.signal(signal.SIGINT, signal.default_int_handler)


def signal_rows(numbers: list[int]) -> Iterator[Row]:
    """Send the signals of these numbers, a row each."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    user = User()
    alone = dict[str, tuple[Any, float]]()
    for name, call in signalled_calls(user).items():
        call()
        begun = time.perf_counter()
        alone[name] = call(), time.perf_counter() - begun
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tempfile.tempdir = folder
        for number in numbers:
            draw = random.Random(number)
            name, kind = draw.choice(list(alone)), draw.choice(SIGNALS)
            expected, seconds = alone[name]
            yield signalled(number, user, expected, name, kind, draw.random() * seconds, draw.random() * 0.05)
        os.chdir("/")


def _first_other(before: Any, after: Any) -> str:
    """Name the innermost entry that is not the same."""
    if isinstance(before, dict) and isinstance(after, dict):
        key = next((key for key in (*before, *after) if before.get(key) != after.get(key)), "")
        return f"{key} {_first_other(before.get(key), after.get(key))}".strip()
    return f"{str(before)[:80]} -> {str(after)[:80]}"


def _files() -> set[str]:
    temporary = {str(one) for one in Path(tempfile.gettempdir()).iterdir() if "memplan" in one.name}
    return temporary | {str(one) for one in Path().rglob("*")}


def _work(numbers: list[int]) -> None:
    """Run faults in this process, a row of JSON each; the process ends with the first that leaves something."""
    torch.set_num_threads(1)
    user = User()
    alone = Alone(user)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number in numbers:
            row = fault(number, user, alone)
            print(json.dumps(row), flush=True)
            if row["wrong"]:
                break
        os.chdir("/")
    os._exit(0)


def rows_of(numbers: list[int]) -> Iterator[Row]:
    """Run faults in processes of their own, in lots; one that takes its process with it is a row, too."""
    left, folder = list(numbers), tempfile.mkdtemp()
    while left:
        lot = left[:BATCH]
        command = [sys.executable, __file__, "--work", ",".join(map(str, lot))]
        done = 0
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=said, text=True, env={**os.environ, "TMPDIR": folder}
            )
            for line in process.stdout or ():
                if line.startswith('{"number"'):
                    done += 1
                    yield json.loads(line)
            if process.wait() != 0 or not done:
                said.seek(0)
                wrong = ["the process ended", *said.read().splitlines()[-8:]]
                yield {"number": lot[min(done, len(lot) - 1)], "outcome": f"exit {process.returncode}", "wrong": wrong}
                done += 1
        left = left[done:]


def table(rows: list[Row], faults: tuple[str, ...] = FAULTS) -> str:
    """Return how many of each call and fault left everything as before."""
    lines = [f"| call | {' | '.join(faults)} |", "|---|" + "---|" * len(faults)]
    of = Counter((row.get("call"), row.get("fault")) for row in rows)
    kept = Counter((row.get("call"), row.get("fault")) for row in rows if not row["wrong"])
    for name in sorted({row["call"] for row in rows if "call" in row}):
        cells = [f"{kept[name, kind]} of {of[name, kind]}" for kind in faults]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="how many, without writing them")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--signals", action="store_true", help="send signals")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return _work([int(one) for one in given.work.split(",")])
    name, faults, count = ("signals", SIGNALS, 1000) if given.signals else ("faults", FAULTS, COUNT)
    file = given.json.absolute() if given.json else RESULTS / f"{name}.json"
    written = given.json is not None or given.count is None
    known = json.loads(file.read_text()) if file.exists() and written else []
    wanted = range(given.first, given.first + (given.count or count))
    missing = [number for number in wanted if number not in {row["number"] for row in known}]
    for row in (signal_rows if given.signals else rows_of)(missing):
        known.append(row)
        print(row["number"], row.get("call"), row.get("fault"), row["outcome"], *row["wrong"][:8], sep="  ", flush=True)
        if written:
            file.write_text(json.dumps(sorted(known, key=lambda one: one["number"]), indent=1) + "\n")
    print(table(known, faults))
    if given.count is None:
        (RESULTS / f"{name}.md").write_text(table(known, faults))


if __name__ == "__main__":
    main()
