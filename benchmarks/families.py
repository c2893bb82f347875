"""What each family of formulas and special cases is worth: peaks with it and without it.

    python benchmarks/families.py                        # writes benchmarks/results/families.json, prints the table
    python benchmarks/families.py --only gpt2 --all      # every family that gpt2 comes to; prints, writes nothing
    python benchmarks/families.py --report               # the table anew from families.json

Steps: the zoo on the CPU, the steps of the golden files on their cards, and models of `breadth.py`, those whose results
rest on values first. A family is a function of a table, or one that is called by name; it is replaced from here by one
that does nothing. A step is recorded once with all families, which shows those that it comes to, then without all of
them that no earlier step needed; where that moves a peak, without halves of them, until the one is found. So the
largest change is over the steps that came before the family was found to be needed; with ``--all``, over all steps.
`moves` counts a peak, allocated or reserved, of the run or of a step, that changes by 0.1 %; `decides` that low and
high are equal with the family alone. What cannot be recorded without a family counts as a change of 100 %.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools" / "gpu")]
RESULTS = ROOT / "benchmarks" / "results"
MOVES = 0.001
SECONDS = 400
CUDA, CPU, RECORDING = "trace.semantics.cuda", "trace.semantics.cpu", "trace.recording"
OLDER_CARD = ("attention", "autocast", "multihead", "gpt2", "bf16", "lstm", "channels_last", "layer_norm")
"""Steps with these in their names are recorded for a T4, too, where other kernels run."""
ALIKE = {
    "optimizer_sgd", "optimizer_sgd_foreach", "optimizer_adam", "optimizer_adam_foreach", "optimizer_adamw",
    "optimizer_rmsprop", "resnet50", "llama_gradient_checkpointing", "resnet18_inference", "frozen_first_layers",
    "zero_grad_after_step", "weight_tying", "gradient_clipping", "loss_logging", "checkpoint_reentrant", "unet3d",
    "moving_average",
}  # fmt: skip
"""Steps of golden files that run on the card what others do: recorded on the CPU alone."""
Row = dict[str, Any]

_nothing = lambda *_: 0  # noqa: E731
_no_sizes = lambda *_: ()  # noqa: E731
_as_is = lambda args, kwargs, result: result  # noqa: E731
_by_torch = lambda *_: NotImplemented  # noqa: E731
TABLES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (f"{CPU}.table", "_FORMULAS", _nothing),
    (f"{CPU}.sparse", "FORMULAS", _nothing),
    (f"{CPU}.table", "SEMANTICS.results", _as_is),
    (f"{CPU}.table", "SEMANTICS.instead", _by_torch),
    (f"{CUDA}.kernels", "FORMULAS", _no_sizes),
    (f"{CUDA}.results", "RESULTS", _as_is),
    (f"{CUDA}.results", "INSTEAD", _by_torch),
    (f"{RECORDING}.values.ranges", "RULES", lambda call: None),
)
"""Module and name of a table by op -> what replaces one of its functions."""
CALLS: dict[str, Any] = {
    f"{CPU}.scalar_operands:transient_bytes": _nothing,
    f"{CPU}.convolution:im2col_convolution.forward": _nothing,
    f"{CPU}.convolution:im2col_convolution.backward": _nothing,
    f"{CUDA}.reductions:staging_buffer": _no_sizes,
    f"{CUDA}.table:_Kernels._transfer_copy": lambda *_: [],
    f"{CUDA}.table:_Kernels._is_product_loop": lambda *_: False,
    f"{CUDA}.autocast:Autocast._is_cacheable": staticmethod(lambda *_: False),
    f"{CUDA}.composites:_flattened": lambda *_: True,
    f"{CUDA}.attention_kernels:flash_splits": lambda *_: 1,
    f"{RECORDING}.observer:form_of": lambda *_: None,
    f"{RECORDING}.engine_forms:EngineForms.writes_fresh_zeros": lambda *_: False,
    f"{RECORDING}.engine_forms:EngineForms.in_place_variant": lambda *_: None,
    f"{RECORDING}.engine_forms:EngineForms.is_in_place": lambda *_: False,
    f"{RECORDING}.saved_scalars:SavedScalars.save": lambda *_: None,
    f"{RECORDING}.symbolic_scalars:answer_of_healthy": lambda *_: None,
    f"{RECORDING}.symbolic_scalars:is_optimizing": lambda *_: False,
    "trace.record:count_from_shape_error": lambda *_: None,
    "trace.record:explore_branches": lambda first, *_: first.outcome,
}
COMPOSITES = {
    "softmax": "softmax.int", "log_softmax": "log_softmax.int", "lstm_cell": "lstm_cell", "gru_cell": "gru_cell",
    "ctc_loss": "ctc_loss.Tensor", "batch_norm": "batch_norm", "dropout": "dropout", "rms_norm": "_fused_rms_norm",
    "attention": "scaled_dot_product_attention",
}  # fmt: skip
"""Method of `composites._Table` -> op whose CPU decomposition replaces it."""


class Family:
    """A function, and the places in which it can be replaced."""

    def __init__(self, name: str, lines: int) -> None:
        self.name, self.lines = name, lines
        self.places: list[tuple[Any, str, Callable[..., Any], Any, bool]] = []
        """(table or owner, key, function, replacement, whether it is a table)"""

    @contextmanager
    def replaced(self, make: Callable[[Callable[..., Any], Any], Any]) -> Iterator[None]:
        """Put ``make(function, replacement)`` in the place of each function."""
        with ExitStack() as stack:
            for owner, key, function, other, table in self.places:
                new = make(function, other)
                stack.enter_context(patch.dict(owner, {key: new}) if table else patch.object(owner, key, new))
            yield


@functools.cache
def families() -> dict[str, Family]:
    """All families by name: module, and function within it."""
    found: dict[str, Family] = {}

    def add(function: Callable[..., Any], owner: Any, key: str, other: Any, *, table: bool, what: str = "") -> None:
        inner = innermost(function)
        what = what or inner.__qualname__.partition(".<locals>")[0].replace("<lambda>", key)
        name = f"{inner.__module__.removeprefix('memplan.')}:{what}"
        if name not in found:
            maker: Any = getattr(sys.modules[inner.__module__], name.rpartition(":")[2], inner)
            found[name] = Family(name, len(inspect.getsourcelines(inspect.unwrap(maker))[0]))
        found[name].places.append((owner, key, function, other, table))

    for module, path, other in TABLES:
        table: Any = importlib.import_module(f"memplan.{module}")
        for part in path.split("."):
            table = getattr(table, part)
        for key, function in table.items():
            add(function, table, key, other, table=True)
    for path, other in CALLS.items():
        owner, key = owner_of(path)
        add(inspect.getattr_static(owner, key), owner, key, other, table=False, what=path.rpartition(":")[2])
    import torch

    from memplan._torch import dispatch

    table = importlib.import_module(f"memplan.{CUDA}.composites")._Table
    for method, op in COMPOSITES.items():
        packet, _, overload = op.partition(".")
        call = getattr(getattr(torch.ops.aten, packet), overload or "default")
        other = lambda self, *args, call=call, **kwargs: dispatch.composite(call, *args, **kwargs)  # noqa: E731
        add(getattr(table, method), table, method, other, table=False, what=f"_Table.{method}")
    return found


def owner_of(path: str) -> tuple[Any, str]:
    """The module or class that a path names, and the attribute in it."""
    module, _, names = path.partition(":")
    owner: Any = importlib.import_module(f"memplan.{module}")
    *parts, last = names.split(".")
    for part in parts:
        owner = getattr(owner, part)
    return owner, last


def innermost(function: Any) -> Any:
    """The function that another one wraps: in a staticmethod, a partial, a correction on the CPU alone, a sum of two
    formulas."""
    if isinstance(function, staticmethod):
        return function.__func__
    if isinstance(function, functools.partial):
        return innermost(function.func)
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    for name in ("correction", "first"):
        inner = function.__closure__[names.index(name)].cell_contents if name in names else None
        if callable(inner):
            return innermost(inner)
    return function


def watched(function: Any, hit: Callable[[], Any]) -> Any:
    """The function, which calls ``hit`` first."""
    inner = function.__func__ if isinstance(function, staticmethod) else function

    def call(*args: Any, **kwargs: Any) -> Any:
        hit()
        return inner(*args, **kwargs)

    return staticmethod(call) if isinstance(function, staticmethod) else call


def called(function: Any) -> Any:
    """A replacement that ignores keywords."""
    if isinstance(function, staticmethod) or "kwargs" in function.__code__.co_varnames:
        return function
    return lambda *args, **_: function(*args)


@contextmanager
def one_card_only() -> Iterator[None]:
    """Leave out what other cards would do, which takes most of the time and moves no peak."""
    table, composites = (importlib.import_module(f"memplan.{CUDA}.{name}") for name in ("table", "composites"))

    def alone(device: Any, kernels: Any, differing: Any) -> Any:
        return kernels(table.Arch(device.architecture, device.multiprocessors))

    with patch.object(table, "_Compared", alone), patch.object(composites._Table, "_compare_cards", lambda *_: None):
        yield


class Step:
    """One step, recorded with and without families."""

    def __init__(self, kind: str, name: str, device: str) -> None:
        self.device = device
        self.known = families()
        self.build, self.steps = build_of(kind, name)

    def peaks(self) -> list[int]:
        """Allocated peaks in the low and the high case of the run and of each step, and the reserved one."""
        import memplan

        with one_card_only():
            trace = memplan.record(self.build, device=self.device, steps=self.steps)
        low, high = (memplan.simulate(trace, workspace=case) for case in ("low", "high"))
        peaks = [[line.peak_allocated, *(step.peak_allocated for step in line.steps)] for line in (low, high)]
        return [*peaks[0], *peaks[1], high.peak_reserved]

    def first(self) -> tuple[list[int], list[str]]:
        """Peaks with all families, and the families that the step came to."""
        hit: dict[str, None] = {}
        with ExitStack() as stack:
            for name, family in self.known.items():
                stack.enter_context(
                    family.replaced(lambda function, _, name=name: watched(function, lambda: hit.setdefault(name)))
                )
            return self.peaks(), [*hit]

    def without(self, names: Sequence[str]) -> list[int] | None:
        """Peaks without these families; None where the step cannot be recorded."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self.known[name].replaced(lambda _, other: called(other)))
            try:
                return self.peaks()
            except Exception:
                return None


def change(peaks: list[int], other: list[int] | None) -> tuple[float, bool]:
    """Largest relative change, and whether low and high are equal in one of the two only."""
    if other is None or len(other) != len(peaks):
        return 1.0, False
    half = len(peaks) // 2
    equal = [one[:half] == one[half : 2 * half] for one in (peaks, other)]
    return max(abs(a / b - 1) for a, b in zip(other, peaks, strict=True) if b), equal[0] != equal[1]


def searched(step: Step, needed: set[str]) -> Row:
    """The families that the step came to, and the change without each that matters."""
    peaks, hit = step.first()
    row: Row = {"hit": hit, "peaks": peaks, "changes": {}}
    pending = [[name for name in hit if name not in needed]]
    while pending:
        names = pending.pop()
        if not names:
            continue
        moved, decides = change(peaks, step.without(names))
        if len(names) == 1:
            row["changes"][names[0]] = [moved, decides]
        elif moved >= MOVES or decides:
            pending += [names[: len(names) // 2], names[len(names) // 2 :]]
    return row


def cases() -> list[tuple[str, str, str]]:
    """Kind, name and device of each step."""
    from benchmarks.zoo import ZOO
    from golden_file import find

    steps = importlib.import_module("golden_steps")
    on_cards = {path.name.partition(".")[0] for path in find(ROOT / "goldens")}
    names = [name for name in steps.subjects()[0] if name in on_cards and name not in ALIKE]
    older = [name for name in names if any(word in name for word in OLDER_CARD)]
    rows = json.loads((RESULTS / "breadth.json").read_text(encoding="utf-8"))["rows"]
    ran = [(row["family"], row["name"], bool(row["assumed"])) for row in rows if "predicted" in row]
    ran = [(family, name, rests) for family, name, rests in ran if importlib.util.find_spec(family)]
    breadth = [(family, name) for family, name, rests in ran if rests]
    breadth += [one[:2] for one in ran if not one[2] and one[0] != "transformers"][::8]
    breadth += [one[:2] for one in ran if not one[2] and one[0] == "transformers"][::40]
    return [
        *(("zoo", name, "cpu") for name in ZOO),
        *(("golden", name, "h100") for name in names),
        *(("golden", name, "t4") for name in older),
        *((f"breadth {family}", name, "cpu") for family, name in breadth),
        *((f"breadth {family}", name, "h100") for family, name in breadth[::4]),
    ]


def build_of(kind: str, name: str) -> tuple[Callable[[], Callable[[], None]], int]:
    """Return a step's build, and how often it runs."""
    if kind == "golden":
        steps = importlib.import_module("golden_steps")
        subject = steps.subjects()[0][name]
        return steps.on_card(subject.build), subject.steps
    if kind == "zoo":
        from benchmarks.zoo import ZOO

        return ZOO[name], 2
    from benchmarks.breadth import runnable

    return runnable(kind.split()[1], name), 2


def _send(connection: Any, case: tuple[str, str, str], needed: set[str]) -> None:
    warnings.simplefilter("ignore")
    try:
        connection.send(searched(Step(*case), needed))
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {str(error)[:200]}"})


def _smallest() -> Callable[[], None]:
    import torch

    return lambda: torch.ones(8, requires_grad=True).sum().backward()


def run(wanted: Sequence[tuple[str, str, str]], *, every: bool) -> list[Row]:
    """Record each step in a process of its own, a fork of this one."""
    import torch
    import transformers  # noqa: F401

    import memplan

    torch.set_num_threads(1)
    families()
    for device in ("cpu", "h100"):  # imports all that a recording needs, once for all forks
        memplan.simulate(memplan.record(_smallest, device=device))
    context, needed, rows = multiprocessing.get_context("fork"), set[str](), list[Row]()
    for case in wanted:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(there, case, set() if every else needed))
        process.start()
        there.close()
        try:
            row: Row = here.recv() if here.poll(SECONDS) else {"error": f"more than {SECONDS} s"}
        except EOFError:
            row = {"error": "the process ended"}
        process.kill()
        process.join()
        rows.append({"case": list(case), **row})
        found = {name: pair for name, pair in row.get("changes", {}).items() if pair[0] >= MOVES or pair[1]}
        needed |= found.keys()
        print(*case, row.get("error", len(row.get("hit", ()))), found, flush=True)
    return rows


def summary(rows: Sequence[Row]) -> list[Row]:
    """Of each family: its lines, the steps that come to it, the largest change, how many it moves and decides."""
    table: list[Row] = []
    for name, family in sorted(families().items()):
        changes = {tuple(row["case"]): row["changes"][name] for row in rows if name in row.get("changes", {})}
        most = max(changes, key=lambda case: changes[case][0], default=None)
        table.append({
            "family": name, "lines": family.lines, "ops": len(family.places),
            "steps": sum(name in row.get("hit", ()) for row in rows),
            "change": changes[most][0] if most else 0.0, "in": " ".join(most) if most else "",
            "moves": sum(pair[0] >= MOVES for pair in changes.values()),
            "decides": sum(pair[1] for pair in changes.values()),
        })  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="this step only; may be repeated")
    parser.add_argument("--kind", action="append", help="steps of this kind only: zoo, golden, breadth")
    parser.add_argument("--all", action="store_true", help="each family in each step")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "families.json")
    options = parser.parse_args()
    if not options.report:
        kinds = options.kind or ["zoo", "golden", "breadth"]
        wanted = [case for case in cases() if case[0].split()[0] in kinds]
        wanted = [case for case in wanted if not options.only or case[1] in options.only]
        rows = run(wanted, every=options.all)
        if options.only:
            print(json.dumps([line for line in summary(rows) if line["steps"]], indent=1))
            return
        options.output.write_text(json.dumps({"families": summary(rows), "steps": rows}) + "\n", encoding="utf-8")
    print("| family | lines | steps | largest change | in | moves | decides |\n|---|--:|--:|--:|---|--:|--:|")
    for line in json.loads(options.output.read_text(encoding="utf-8"))["families"]:
        print("| {family} | {lines} | {steps} | {change:.2%} | {in} | {moves} | {decides} |".format(**line))


if __name__ == "__main__":
    main()
