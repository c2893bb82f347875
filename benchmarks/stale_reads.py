"""Does a planned call ever go on with an old value of something that forward() reads? On other packages' models.

    pip install transformers monai peft einops lightning torchmetrics
    python benchmarks/stale_reads.py                 # writes stale_reads.json and stale_reads.md to benchmarks/results
    python benchmarks/stale_reads.py --only gpt2     # prints, writes nothing
    python benchmarks/stale_reads.py --again t5,ViT  # these anew in the files; the others stay
    python benchmarks/stale_reads.py --checks        # the cost of the checks anew

What can be changed is found without memplan: attributes of all modules and of the objects in them, to any depth, items
of lists and dicts, tables and defaults of their classes, globals of the modules that define these. Each flag, number,
text, None and array is changed by itself, and the model runs without a plan: where loss or gradients are others, or it
raises, forward() has read it. As many of those changes as the share of the model among 500, drawn at random (seed 0),
and a tenth as many that decide nothing, are made between two planned calls. A change is silent where the planned call
has another loss or gradient than the model without a plan, bit for bit, or does not raise where that raises. Where a
plan made from scratch with the new value differs from eager mode by the same bits, that is rounding, and told apart.

The plan keeps everything that eager mode keeps: what is tested is which plan is taken. The cost of the checks is that
of finding the plan of a call whose arguments are taken apart already, the least of many: with what they read in the
processor's caches. After a training step it is not there, and they take longer: some 0.3 ms for GPT-2.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RESULTS = Path(__file__).resolve().parent / "results"
CHANGES = 500
TRANSFORMERS = ("gpt2", "bert", "llama", "t5", "vit", "distilbert", "opt", "mistral", "roberta", "electra", "gpt_neox",
                "convnext")  # fmt: skip
MONAI = ("UNet", "BasicUNet", "SegResNet", "ViT")
OTHERS = ("peft", "einops", "lightning", "torchmetrics")
MODELS = (*TRANSFORMERS, *MONAI, *OTHERS)
PLAIN = (bool, int, float, str, type(None))
Row = dict[str, Any]


# -- models


def _called(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a model, and what it is called with."""
    import torch
    from benchmarks import breadth
    from torch import nn

    torch.manual_seed(0)
    if name in TRANSFORMERS:
        return breadth.transformers_step(name)().called  # pyright: ignore[reportFunctionMemberAccess]
    if name in MONAI:
        steps = breadth.monai_steps()
        return steps[next(one for one in steps if one.split(" ")[0] == name)]().called  # pyright: ignore[reportFunctionMemberAccess]
    if name == "peft":
        import peft

        model, args, kwargs = _called("gpt2")
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        return peft.get_peft_model(model, config), args, kwargs
    if name == "einops":
        from einops.layers.torch import EinMix, Rearrange, Reduce

        layers = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), nn.Linear(48, 16), nn.GELU(),
            EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=16, d=8), nn.Dropout(0.1),
            Reduce("b t c -> b c", "mean"), nn.LayerNorm(8),
        )  # fmt: skip
        return layers, (torch.randn(2, 3, 16, 16),), {}
    if name == "lightning":
        return _lightning(), (torch.randn(4, 8),), {}
    return _with_metric(), (torch.randn(4, 8), torch.randn(4, 8)), {}


def _lightning() -> Any:
    import lightning
    import torch
    from torch import nn

    class Model(lightning.LightningModule):
        slopes = {"first": {"leaky": 0.2}, "second": {"leaky": 0.3}}  # noqa: RUF012  # a table, as classes have them

        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"scale": 0.5, "residual": True, "power": [1.0, 2.0]})
            self.first, self.second, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = nn.functional.leaky_relu(self.first(x), self.slopes["first"]["leaky"])
            h = (
                self.drop(nn.functional.leaky_relu(self.second(h), self.slopes["second"]["leaky"]))
                * self.hparams["scale"]
            )
            h = h.abs() ** self.hparams["power"][1]
            return h + x if self.hparams["residual"] else h

    return Model()


def _with_metric() -> Any:
    import torch
    from torch import nn
    from torchmetrics.functional.image import total_variation
    from torchmetrics.functional.regression import mean_squared_error

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.options = nn.Linear(8, 8), types.SimpleNamespace(squared=True, weights=(1.0, 0.1))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            error = mean_squared_error(h, y, squared=self.options.squared)
            return error * self.options.weights[0] + total_variation(h.view(1, 1, 4, 8)) * self.options.weights[1]

    return Model()


# -- changes


@dataclass(frozen=True)
class Change:
    """A value that is put in the place of another."""

    where: str
    put: Callable[[Any], None]
    before: Any
    after: Any


def changes(model: Any) -> list[Change]:
    """Return changes of everything plain that a model's code may read."""
    seen, found = set[int](), list[Change]()
    roots: list[tuple[str, Any]] = [(name or "model", module) for name, module in model.named_modules()]
    classes = {kind for module in model.modules() for kind in type(module).__mro__ if _is_open(kind.__module__)}
    roots += [(f"class {kind.__qualname__}", kind) for kind in sorted(classes, key=lambda one: one.__qualname__)]
    defining = sorted({kind.__module__ for kind in classes})
    roots += [(f"module {name}", sys.modules[name]) for name in defining if name in sys.modules]
    ahead = [(where, value, 0) for where, value in roots]
    while ahead and len(found) < 4000:
        where, value, depth = ahead.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        for name, part, put in _parts(value):
            place = f"{where}.{name}" if isinstance(name, str) else f"{where}[{name}]"
            for after in _others(part):
                found.append(Change(place, put, part, after))
            if depth < 6 and not isinstance(part, (*PLAIN, types.FunctionType, types.ModuleType, type)):
                ahead.append((place, part, depth + 1))
    return found


def _is_open(module: str) -> bool:
    return module.split(".")[0] not in ("torch", "builtins", "abc", "typing", "enum") and module != "__mp_main__"


def _parts(value: Any) -> Iterator[tuple[str | int, Any, Callable[[Any], None]]]:
    import torch

    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, dict):
        for key, part in list(value.items())[:40]:
            if isinstance(key, (str, int)):
                yield key, part, lambda new, key=key: value.__setitem__(key, new)
    elif isinstance(value, list):
        for at, part in enumerate(value[:40]):
            yield at, part, lambda new, at=at: value.__setitem__(at, new)
    own = getattr(value, "__dict__", None)
    if own is None or (not isinstance(value, type) and not isinstance(own, dict)):
        return
    for name, part in list(own.items()):
        if name.startswith("__") or name in _KEPT or (callable(part) and not isinstance(part, torch.nn.Module)):
            continue
        if isinstance(part, torch.nn.Module) and isinstance(value, torch.nn.Module):
            continue
        yield name, part, lambda new, name=name: setattr(value, name, new)


_KEPT = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
                   "_compiled_call_impl", "_trainer", "_fabric", "_jit_is_scripting"})  # fmt: skip


def _others(value: Any) -> list[Any]:
    """Return values of the same kind, or near it."""
    if isinstance(value, bool):
        return [not value]
    if type(value) is int:
        return [value + 1, value * 2] if value else [1]
    if type(value) is float:
        return [value * 0.5 + 0.125]
    if type(value) is str:
        same = {"gelu": "relu", "relu": "gelu", "mean": "sum", "sum": "mean", "eager": "sdpa", "sdpa": "eager"}
        return [same.get(value, f"{value}_")]
    if type(value) is tuple and value and all(type(one) is float for one in value):
        return [tuple(one * 0.5 + 0.125 for one in value)]
    if value is None:
        return [0.5]
    return []


# -- one model


def _result(run: Callable[[], Any], model: Any) -> Any:
    """Return loss and gradients, or the kind of exception."""
    import torch
    from torch.utils._pytree import tree_leaves

    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    try:
        out = run()
        leaves = tree_leaves(dict(out) if isinstance(out, dict) else out)
        loss: Any = sum(one.float().sum() for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad)
        loss.backward()
    except Exception as error:
        return type(error)
    return [loss.detach(), *(None if one.grad is None else one.grad.to_dense().clone() for one in model.parameters())]


def _same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, type) or isinstance(other, type):
        return isinstance(one, type) and isinstance(other, type)  # both raise: which error is memplan's affair
    try:
        return len(one) == len(other) and all(
            (a is None) == (b is None) and (a is None or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
            for a, b in zip(one, other, strict=True)
        )
    except NotImplementedError:  # on another device, such as meta
        return False


def _words(model: Any) -> set[str]:
    """Return all words in the source of the model's classes: what these name is tried first."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__[:-1]}
    texts = [inspect.getsource(kind) for kind in kinds if kind is not nn_module() and hasattr(kind, "forward")]
    return {word for text in texts for word in re.findall(r"\w+", text)}


def nn_module() -> type:
    """Return `torch.nn.Module`."""
    import torch

    return torch.nn.Module


@dataclass(frozen=True)
class _Planned:
    captured: Any
    schedule: Any
    fused: None = None


def _installed(model: Any) -> Any:
    from memplan._torch import guards
    from memplan.errors import RecordingError, UsageError
    from memplan.planning.capture.capture import capture
    from memplan.planning.levers.lever import GradientUse
    from memplan.planning.schedule.actions import Choices
    from memplan.planning.schedule.scheduler import schedule
    from memplan.rewriting.install import install
    from memplan.rewriting.keys import UnkeyedError

    def planner(call: Any, held: bool) -> Any:
        try:
            captured = capture(model, call)
        except (RecordingError, UsageError) as error:  # as memplan.fit does with later calls
            raise UnkeyedError(str(error)) from error
        return _Planned(captured, schedule(captured.graph, Choices(gradients=GradientUse(accumulates=held))))

    guards._CHECKS_BEFORE_TREE = 1  # the checks of the second call are those of a long training
    return install(model, planner)


def one_model(name: str, count: int, seconds: float) -> Row:
    """Return what was changed in one model, and what planned calls made of it."""
    model, args, kwargs = _called(name)
    eager = lambda: model.forward(*args, **kwargs)  # noqa: E731
    first = _result(eager, model)
    assert not isinstance(first, type), first
    found = changes(model)
    random.Random(0).shuffle(found)
    named = _words(model)
    found.sort(key=lambda change: change.where.rpartition(".")[2].partition("[")[0] not in named)
    decides, raises, idle, start = list[Change](), list[Change](), list[Change](), time.monotonic()
    for change in found:
        if len(decides) >= count or time.monotonic() - start > seconds:
            break
        if _applied(change):
            other = _result(eager, model)
            change.put(change.before)
            if _same(first, other):
                idle.append(change)
                continue
            again = _result(eager, model)
            if _same(first, again):
                (raises if isinstance(other, type) else decides).append(change)
            first = again  # another where the change cannot be taken back, as a cache that was filled
    decides += raises[: max(count // 4, count - len(decides))]
    first = _result(eager, model)
    plans = _installed(model)
    planned = lambda: model(*args, **kwargs)  # noqa: E731
    at_first = _result(planned, model)
    same_at_first = _same(first, at_first)
    rows, rounding, raised = list[str](), list[str](), 0
    tried = decides + idle[: max(1, count // 10)]
    for change in tried:
        if not _applied(change):
            continue
        label, alike, anew = f"{change.where}: {change.before!r} -> {change.after!r}"[:200], True, None
        try:
            expected = _result(eager, model)
            got = _result(planned, model)
            alike = _same(expected, got)
            if not alike:
                plans.undo()
                plans = _installed(model)
                anew = _result(planned, model)
        finally:
            change.put(change.before)
        raised += isinstance(expected, type)
        if not alike and anew is not None and _same(got, anew):
            rounding.append(label)
        elif not alike or not _same(at_first, _result(planned, model)):
            rows.append(label)
    stats = plans.calls.stats()
    return {
        "model": name, "changes": len(tried), "decide": len(decides), "raise": raised, "silent": rows,
        "rounding": rounding, "same_at_first": same_at_first, "candidates": len(found), "planned": stats.planned,
        "unplanned": stats.unplanned, "why": dict(stats.why),
    }  # fmt: skip


def _applied(change: Change) -> bool:
    try:
        change.put(change.after)
    except Exception:  # a frozen object, a slot, a check of its own
        return False
    return True


# -- the cost of the checks


def checks() -> list[Row]:
    """Return the microseconds that a planned call takes to find its plan."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    resnet: Any = importlib.import_module("examples.resnet18")
    gpt2 = GPT2LMHeadModel(
        GPT2Config(n_layer=12, n_embd=48, n_head=4, vocab_size=100, n_positions=32, bos_token_id=1, eos_token_id=1)
    )
    tokens = torch.randint(0, 100, (1, 8))
    kinds = {
        "GPT-2, 12 layers": (gpt2, (tokens,), {"labels": tokens, "use_cache": False}),
        "ResNet-18": (resnet.ResNet18(10), (torch.randn(2, 3, 32, 32),), {}),
    }
    return [_checks_of(name, *kind) for name, kind in kinds.items()]


def _checks_of(name: str, model: Any, args: Any, kwargs: Any) -> Row:
    from memplan.planning.capture.flat_call import call_of

    plans = _installed(model)
    model(*args, **kwargs)
    call = call_of(args, kwargs)
    return {
        "model": name, "modules": len(list(model.modules())), "planned": plans.calls.stats().planned,
        "checks_us": _least(lambda: plans._find_or_plan(model, call)),
        "arguments_us": _least(lambda: call_of(args, kwargs)),
    }  # fmt: skip


def _least(run: Callable[[], Any], repeats: int = 60, each: int = 100) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(each):
            run()
        best = min(best, (time.perf_counter() - start) / each)
    return round(best * 1e6, 1)


# -- results


def table(rows: list[Row], cost: list[Row]) -> str:
    """Return the results as Markdown."""
    total = {key: sum(row[key] for row in rows) for key in ("changes", "decide", "raise")}
    silent, rounding = (sum(len(row[key]) for row in rows) for key in ("silent", "rounding"))
    lines = [
        f"{total['changes']} changes in {len(rows)} models, {total['decide']} of which change what eager mode computes "
        f"({total['raise']} make it raise): {silent} silent differences, and {rounding} that a new plan has, too "
        "(rounding).",
        "",
        "| model | changes | that decide | silent differences |",
        "|---|--:|--:|--:|",
        *(f"| {row['model']} | {row['changes']} | {row['decide']} | {len(row['silent'])} |" for row in rows),
        "",
        "| checks of a planned call | modules | us |",
        "|---|--:|--:|",
        *(f"| {row['model']} | {row['modules']} | {row['checks_us']} |" for row in cost),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="models by name, without writing anything")
    parser.add_argument("--again", help="models by name: these anew, the others stay")
    parser.add_argument("--checks", action="store_true", help="only the cost of the checks, in the file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60, help="to look for changes that decide, for each model")
    given = parser.parse_args()
    if given.work:
        warnings.simplefilter("ignore")
        count = -(-CHANGES // len(MODELS)) + 5  # some models have fewer things to change
        found: Any = checks() if given.work == "checks" else one_model(given.work, count, given.seconds)
        print("RESULT " + json.dumps(found), flush=True)
        return
    file = RESULTS / "stale_reads.json"
    known: Row = json.loads(file.read_text()) if file.exists() else {"models": [], "checks": []}
    names = (given.only or given.again or ("" if given.checks else ",".join(MODELS))).split(",")
    rows = {row["model"]: row for row in known["models"]} if given.checks or given.again else {}
    for name in (*filter(None, names), *(() if given.only or given.again else ("checks",))):
        command = [sys.executable, __file__, "--work", name, "--seconds", str(given.seconds)]
        ended = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
        found = json.loads(lines[-1].removeprefix("RESULT ")) if lines else None
        if found is None:
            print(name, "failed:", ended.stderr.strip().splitlines()[-1:], flush=True)
            continue
        print(found, flush=True)
        if name == "checks":
            known["checks"] = found
        else:
            rows[name] = found
        if not given.only:
            known["models"] = list(rows.values())
            file.write_text(json.dumps(known, indent=1) + "\n")
            (RESULTS / "stale_reads.md").write_text(table(known["models"], known["checks"]))


if __name__ == "__main__":
    main()
