"""PyTorch's own corpus of operators and modules: predictions beside torch on an emulated card.

    python benchmarks/dry_operators.py --torch PATH/TO/ENV [--card h100] [--keep FOLDER] [--only cumprod,sort]

Every op with a derivative runs forward and backward on the CUDA build of torch against the emulated card
(docs/dry.md), with the first samples of the corpus, in float32, and every third op in bfloat16; every module in train
mode. Another process of the same environment predicts the same steps. Compared are the peak of allocated bytes and
what is allocated between forward and backward, each to a block of 512 bytes. Counted apart: what the emulated card
refuses, what the prediction refuses, and steps in which values decide what is allocated, as that card has none. With
`--keep` what the card did and what was predicted is kept, and only what is missing there is run again.
Writes benchmarks/results/dry_operators.json, dry_operators.md and dry_operators_short.md, and docs/dry.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "dry.md"
for _path in (str(ROOT / "src"), str(ROOT / "benchmarks")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

BLOCK = 512
SAMPLES = 2
HALF_EVERY = 3
PATIENCE = 90
"""Seconds without a word after which a process is ended."""
PARTS = ("card", "predicted")
WIDE = {5: 24, 10: 50, 20: 90}
"""Sizes of the corpus' samples -> larger ones, by which what a kernel takes for itself shows."""
DECIDED = ("branch", "bound", "scalar", "sparse")
"""Kinds of assumptions: values that the step reads, or that size what it makes."""
Row = dict[str, Any]
Build = Callable[[], Callable[[], None]]


# ---------------------------------------------------------------- the corpus, in either process


def corpus() -> list[tuple[str, Any]]:
    """Every op and module with its key; torch as a user has it, since the corpus sets flags of its own."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    torch.set_default_dtype(torch.float32)
    found: list[tuple[str, Any]] = []
    for number, op in enumerate(op_db):
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        found += [(f"{name} {form}", op) for form in ("float32", "wide") if torch.float32 in op.dtypes]
        if number % HALF_EVERY == 0 and torch.bfloat16 in op.dtypes:
            found.append((f"{name} bfloat16", op))
    found += [(f"{info.name} module", info) for info in module_db if torch.float32 in info.dtypes]
    gc.collect()
    gc.freeze()  # half a million objects, which every collection would walk
    return found


def steps(key: str, entry: Any, hook: Callable[[], None]) -> Iterator[tuple[str, Build]]:
    """The builds of one op or module; ``hook`` is called before and after the forward pass."""
    import torch

    torch.manual_seed(0)
    if key.endswith(" module"):
        for number, given in enumerate(entry.module_inputs_func(entry, "cpu", torch.float32, True, True)[:SAMPLES]):
            yield f"{key} {number}", module_build(entry, given, hook)
        return
    dtype = torch.bfloat16 if key.endswith("bfloat16") else torch.float32
    with sizes(WIDE if key.endswith("wide") else {}):
        samples = entry.sample_inputs("cpu", dtype, requires_grad=entry.supports_autograd)
        chosen = list(itertools.islice(samples, SAMPLES))
    for number, sample in enumerate(chosen):
        yield f"{key} {number}", op_build(entry, sample, hook)


@contextlib.contextmanager
def sizes(wide: dict[int, int]) -> Iterator[None]:
    """Give the names that the corpus' samples take their sizes from (`S`, `M`, `L`) other sizes for a while."""
    places = [module for name, module in sys.modules.items() if name.startswith("torch.testing._internal.")]
    kept = [
        (module, name, size)
        for module in places
        for name in ("S", "M", "L")
        if (size := getattr(module, name, 0)) in wide
    ]
    try:
        for module, name, size in kept:
            setattr(module, name, wide[size])
        yield
    finally:
        for module, name, size in kept:
            setattr(module, name, size)


def moved(tree: Any) -> tuple[Any, list[Any]]:
    """The arguments on the card, in the layout that they have, and the tensors among them."""
    import torch
    from torch.utils._pytree import tree_map

    memo: dict[int, Any] = {}

    def move(value: Any) -> Any:
        if value == "cpu" or value == torch.device("cpu"):
            return "cuda"
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in memo:
            memo[id(value)] = on_card(value.detach()).requires_grad_(value.requires_grad)
        return memo[id(value)]

    return tree_map(move, tree), list(memo.values())


def on_card(value: Any) -> Any:
    import torch

    if value.layout is not torch.strided:
        raise NotImplementedError("a sample that is sparse")
    if value.is_contiguous():
        return torch.empty(value.shape, dtype=value.dtype, device="cuda").copy_(value)
    whole = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
    base = torch.empty(whole.shape, dtype=value.dtype, device="cuda").copy_(whole)
    return base.as_strided(value.shape, value.stride(), value.storage_offset())


def total(out: Any) -> Any:
    """The sum of all results that have a gradient."""
    import torch
    from torch.utils._pytree import tree_leaves

    found = None
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            part = leaf.abs().sum() if leaf.is_complex() else leaf.sum()
            found = part if found is None else found + part
    return found


def op_build(op: Any, sample: Any, hook: Callable[[], None]) -> Build:
    def build() -> Callable[[], None]:
        (first, args, kwargs), leaves = moved((sample.input, sample.args, sample.kwargs))
        return step(lambda: sample.output_process_fn_grad(op(first, *args, **kwargs)), leaves, hook)

    return build


def module_build(info: Any, given: Any, hook: Callable[[], None]) -> Build:
    def build() -> Callable[[], None]:
        (args, kwargs), _ = moved((given.constructor_input.args, given.constructor_input.kwargs))
        module = info.module_cls(*args, **kwargs).cuda().train()
        (inputs, options), leaves = moved((given.forward_input.args, given.forward_input.kwargs))
        return step(lambda: module(*inputs, **options), [*leaves, *module.parameters()], hook)

    return build


def step(forward: Callable[[], Any], leaves: Sequence[Any], hook: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        hook()
        out = forward()
        hook()
        loss = total(out)
        del out
        if loss is not None:
            loss.backward()

    return run


# ---------------------------------------------------------------- what either process does with a build


def on_the_card(key: str, entry: Any) -> Iterator[tuple[str, Callable[[], Row]]]:
    """What torch did on the card of this process."""
    import torch

    from memplan import _torch

    held: list[int] = []

    def ran(build: Build) -> Row:
        gc.collect()
        torch.manual_seed(0)
        _torch.clear_cublas_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", clear_history=True)
        held.clear()
        before = torch.cuda.memory_allocated()
        run = build()
        run()
        gc.collect()
        sizes = [event.bytes for event in _torch.history() if event.action == "alloc"]
        peak = torch.cuda.max_memory_allocated() - before
        return {"peak": peak, "between": held[1] - held[0], "sizes": sizes}

    for name, build in steps(key, entry, lambda: held.append(torch.cuda.memory_allocated())):
        yield name, lambda build=build: ran(build)


def as_predicted(key: str, entry: Any, card: str) -> Iterator[tuple[str, Callable[[], Row]]]:
    """What memplan says of the same; the hook is a call that the recording notes with its tick."""
    import torch

    import memplan

    def said(build: Build) -> Row:
        gc.collect()
        trace = memplan.record(build, device=card, steps=1)
        low, timeline = (memplan.simulate(trace, workspace=case) for case in ("low", "high"))
        begin, end = (call.tick for call in trace.calls if call.kind == "synchronize")

        def at(tick: int) -> int:
            return max((event for event in timeline.events if event[0] <= tick), default=(0, 0, 0))[1]

        sizes = [storage.bytes for storage in trace.counted if storage.bytes]
        row: Row = {"peak": timeline.peak_allocated, "between": at(end) - at(begin), "sizes": sizes}
        row |= {} if low.peak_allocated == timeline.peak_allocated else {"low": low.peak_allocated}
        decided = [one.text for one in trace.assumptions if one.kind in DECIDED]
        return row | ({"values": decided[0]} if decided else {})

    for name, build in steps(key, entry, lambda: torch.cuda.synchronize()):
        yield name, lambda build=build: said(build)


def work(part: str, card: str, keys: Iterable[str], out: Path) -> None:
    """Run one part for some of the corpus; a line before and after each."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    wanted = set(keys)
    with out.open("a", buffering=1) as file:
        for key, entry in corpus():
            if key not in wanted:
                continue
            file.write(json.dumps({"start": key}) + "\n")
            row: Row = {"key": key, "steps": {}}
            try:
                found = on_the_card(key, entry) if part == "card" else as_predicted(key, entry, card)
                for name, run in found:
                    row["steps"][name] = _tried(run)
            except Exception as error:
                row["error"] = _said(error)
            file.write(json.dumps(row) + "\n")
    os._exit(0)


def _tried(run: Callable[[], Row]) -> Row:
    try:
        return run()
    except Exception as error:
        return {"error": _said(error)}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


# ---------------------------------------------------------------- here


def drive(part: str, card: str, environment: str, folder: Path, keys: Sequence[str]) -> dict[str, Row]:
    """Run what is missing, in processes that may hang or die, and return everything by its key."""
    out = folder / f"{part}.jsonl"
    done = _rows(out)
    while todo := [key for key in keys if key not in done]:
        status = _process(part, card, environment, todo, out)
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        done = _rows(out)
        started = [line["start"] for line in lines if "start" in line]
        if started and started[-1] not in done:
            with out.open("a") as file:
                file.write(json.dumps({"key": started[-1], "steps": {}, "error": status}) + "\n")
            done = _rows(out)
        elif not started:
            raise RuntimeError(f"no process of the part {part} began: {status}")
    return {key: done[key] for key in keys}


def _rows(out: Path) -> dict[str, Row]:
    if not out.exists():
        return {}
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {line["key"]: line for line in lines if "key" in line}


def _process(part: str, card: str, environment: str, keys: Sequence[str], out: Path) -> str:
    """Run one process until it ends, or says nothing for a while; how it ended."""
    from memplan.devices import find
    from memplan.dry.cuda_torch import find_torch
    from memplan.dry.library import library_for
    from memplan.trace.dry_run.process import process_command, process_variables

    torch = find_torch(environment)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "keys.json")
        listed.write_text(json.dumps(list(keys)), encoding="utf-8")
        code = (
            f"import sys, json, pathlib; sys.path.insert(0, {str(Path(__file__).parent)!r}); import dry_operators\n"
            f"keys = json.loads(pathlib.Path({str(listed)!r}).read_text())\n"
            f"dry_operators.work({part!r}, {card!r}, keys, pathlib.Path({str(out)!r}))\n"
        )
        variables = dict(os.environ)
        if part == "card":
            variables = process_variables(os.environ, find(card), library_for(torch), Path(folder, "log"))
        process = subprocess.Popen(process_command(torch, code), env=variables)
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            now = out.stat().st_size if out.exists() else 0
            size, since = (size, since) if now == size else (now, time.monotonic())
            if time.monotonic() - since > PATIENCE:
                process.kill()
                process.wait()
                return "hung"
    return f"ended with {process.returncode}"


def compared(key: str, card: Row, predicted: Row) -> Iterator[Row]:
    """One row for each step of a key."""
    names = list(card["steps"]) or list(predicted["steps"]) or [f"{key} -"]
    for name in names:
        real, said = (part["steps"].get(name, {"error": part.get("error", "not run")}) for part in (card, predicted))
        yield {"step": name} | judged(real, said)


def judged(real: Row, said: Row) -> Row:
    """What a prediction is worth."""
    if "error" in real:
        return {"status": "not on the card", "why": real["error"]}
    if "error" in said:
        values = said["error"].startswith("DataDependentError")
        return {"status": "values" if values else "refused", "why": said["error"]}
    row = {name: [real[name], said[name]] for name in ("peak", "between")}
    if real["peak"] == said["peak"] and real["between"] == said["between"]:
        return {"status": "exact"} | row
    missing = collections.Counter(real["sizes"])
    missing.subtract(said["sizes"])
    differing = {str(size): count for size, count in sorted(missing.items()) if count}
    if "low" in said and said["low"] <= real["peak"] <= said["peak"]:
        return {"status": "interval", "low": said["low"]} | row
    row |= {"missing": differing}
    return {"status": "values", "why": said["values"]} | row if "values" in said else {"status": "wrong"} | row


def said(rows: Sequence[Row], card: str, version: str) -> str:
    """The counts, in words."""
    counts = collections.Counter(row["status"] for row in rows)
    judged_rows = counts["exact"] + counts["wrong"] + counts["interval"]
    near = sum(_off(row) <= BLOCK for row in rows if row["status"] == "wrong")
    return (
        f"PyTorch's own corpus of operators and modules, forward and backward, on {card} with torch {version}: of "
        f"{judged_rows:,} steps, {counts['exact']:,} ({counts['exact'] / max(1, judged_rows):.1%}) have the peak and "
        f"what is held between both passes exactly, {near} more within a block of {BLOCK} bytes, "
        f"{counts['wrong'] - near} are wrong. Apart: {counts['not on the card']} that the emulated card does not run, "
        f"{counts['values']} in which values decide what is allocated, {counts['refused']} that the prediction "
        f"refuses.\n"
    )


def summary(rows: Sequence[Row], card: str, version: str) -> str:
    """The counts, and every step that is wrong."""
    head = "| step | peak | predicted | between | predicted |\n|---|--:|--:|--:|--:|"
    lines = [said(rows, card, version), head]
    for row in rows:
        if row["status"] == "wrong":
            lines.append(f"| {row['step']} | {' | '.join(f'{n:,}' for n in (*row['peak'], *row['between']))} |")
    return "\n".join([*lines, ""])


def _off(row: Row) -> int:
    return max(abs(real - said) for real, said in (row["peak"], row["between"]))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, metavar="ENV", help="an environment with a CUDA build of torch")
    parser.add_argument("--card", default="h100")
    parser.add_argument("--keep", metavar="FOLDER", help="for what was run, to go on from there")
    parser.add_argument("--only", metavar="NAMES", help="ops and modules of these names, with commas between them")
    parser.add_argument("--again", action="store_true", help="predict anew what was predicted before")
    options = parser.parse_args()
    from cuda_accuracy import filled

    from memplan.dry.cuda_torch import find_torch

    torch = find_torch(options.torch)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        keys = _keys(options.torch)
        if options.only:
            keys = [key for key in keys if key.split()[0] in options.only.split(",")]
        if options.again:
            _forget(folder / "predicted.jsonl", keys)
        card, predicted = (drive(part, options.card, options.torch, folder, keys) for part in PARTS)
    rows = [row for key in keys for row in compared(key, card[key], predicted[key])]
    text = summary(rows, options.card, torch.version)
    print(text)
    if not options.only:
        content = {"card": options.card, "torch": torch.version, "steps": rows}
        body = ",\n  ".join(json.dumps(row) for row in rows)
        head = json.dumps(content | {"steps": None}, indent=1).replace('"steps": null', f'"steps": [\n  {body}\n ]')
        (RESULTS / "dry_operators.json").write_text(head + "\n", encoding="utf-8")
        (RESULTS / "dry_operators.md").write_text(text, encoding="utf-8")
        short = said(rows, options.card, torch.version)
        (RESULTS / "dry_operators_short.md").write_text(short, encoding="utf-8")
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(any(row["status"] == "wrong" for row in rows))


def _forget(out: Path, keys: Sequence[str]) -> None:
    kept = [row for key, row in _rows(out).items() if key not in keys]
    out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def _keys(environment: str) -> list[str]:
    """The keys of the corpus, as the other environment has it."""
    from memplan.dry.cuda_torch import find_torch
    from memplan.trace.dry_run.process import process_command

    code = (
        f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r}); import dry_operators\n"
        "print(json.dumps([key for key, _ in dry_operators.corpus()]))"
    )
    command = process_command(find_torch(environment), code)
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
