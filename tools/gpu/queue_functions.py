"""The entries of the card's queue that are functions: a process each, which writes figures as they come.

python tools/gpu/queue_functions.py kernels FOLDER        # what card_queue.py calls
python tools/gpu/queue_functions.py --describe            # the card and the versions, as a line of JSON
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for _path in (str(HERE), str(ROOT), str(ROOT / "src")):
    if _path not in sys.path:
        sys.path.insert(0, _path)
sys.path.append(str(ROOT / "tests"))  # for how errors from float64 are taken, as in the tests

Row = dict[str, Any]
Note = Callable[[str, Row], None]
"""Enters figures under a name."""


@dataclass(frozen=True)
class Setting:
    """Where a function runs."""

    device: str = "cuda"
    card: str = ""
    """The emulated card; empty: a real one."""
    environment: str = ""
    """Of the emulated card: the Python with the CUDA build of torch."""

    @property
    def has_values(self) -> bool:
        """Whether kernels compute anything."""
        return not self.card


def attempt(note: Note, name: str, run: Callable[[], Row]) -> None:
    """Enter what ``run`` finds, or why it finds nothing: the other figures of the entry stand without it."""
    begun = time.perf_counter()
    try:
        found = run()
    except Exception as error:  # out of memory, a library or kernel that this card lacks
        traceback.print_exc()
        text = (str(error).strip().splitlines() or ["no message"])[0]
        found = {"error": f"{type(error).__name__}: {text}"[:500]}
    note(name, found | {"took": round(time.perf_counter() - begun, 1)})
    with contextlib.suppress(Exception):
        import torch

        torch.cuda.empty_cache()


# The proof


def _proof_steps() -> dict[str, Callable[[], Any]]:
    import fit_steps

    return {
        "resnet18": fit_steps.STEPS["resnet18"], "gpt_dropout": fit_steps.STEPS["gpt_dropout"],
        "unet3d_64": lambda: fit_steps.unet3d(1, 64, (16, 32, 64)),
    }  # fmt: skip


def proof(
    note: Note, setting: Setting, steps: Mapping[str, Callable[[], Any]] | None = None,
    engines: Sequence[str] = ("graph", "inductor"),
) -> None:  # fmt: skip
    """`memplan.fit` at 75 % of the step without a plan, or the least there is, and what its proof says."""
    import fit_steps

    import memplan
    from memplan.errors import BudgetError

    def fitted(make: Callable[[], Any], engine: Any) -> Row:
        subject = fit_steps.on(setting.device, make)
        options: Row = {"targets": subject.targets, "loss": subject.loss, "engine": engine, "pairs": 3}
        try:
            made = memplan.fit(subject.model, *subject.inputs, budget="75%", **options)
        except BudgetError as error:
            made = memplan.fit(subject.model, *subject.inputs, budget=error.smallest_budget, **options)
        one = made.proof
        return {
            "ok": one.ok, "exact": one.exact, "grade": one.grade, "peak": one.peak, "predicted": one.predicted,
            "budget": one.budget, "reference_peak": one.reference_peak, "torch_kernels": one.torch_kernels,
            "full_float32": one.full_float32, "failures": list(one.failures), "text": str(one),
            "notes": list(made.notes),
        }  # fmt: skip

    for name, make in (_proof_steps() if steps is None else steps).items():
        for engine in engines:
            attempt(note, f"{name}, {engine}", functools.partial(fitted, make, engine))


# Commands


def _memplan(arguments: Sequence[str], folder: str | None = None) -> Row:
    """Run a command of memplan that writes JSON.

    Raises:
        RuntimeError: it failed.
    """
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "memplan.cli", *arguments], cwd=folder or ROOT, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    sys.stderr.write(done.stderr)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['silent'])[-1]}")
    return json.loads(done.stdout)


def _peaks(result: Row) -> Row:
    """What was measured, beside the prediction where the command made one."""
    if result.get("beside"):
        return {"peaks": result["beside"]["peaks"]}
    timeline = result["timeline"]
    measured = [timeline["build"], *timeline["steps"]]
    return {"peaks": [{"measured": [one["peak_allocated"], one["peak_reserved"]]} for one in measured]}


TARGETS = ("examples/gpt2.py:build", "examples/resnet18.py:build", "examples/unet3d.py:build")


def measure(note: Note, setting: Setting, targets: Sequence[str] = TARGETS) -> None:
    """`memplan measure` of examples."""
    where = ["--device", "cuda"]
    if setting.card:
        where = ["--dry", "--device", setting.card, "--environment", setting.environment]
    for target in targets:
        attempt(note, target, lambda target=target: _peaks(_memplan(["measure", *where, "--json", "-", target])))


NEEDED = "attrs, cattrs, click, cloudpickle, rich, sortedcontainers"


def run(note: Note, setting: Setting) -> None:
    """`memplan run --measure` of an example that writes checkpoints, behind the barrier."""
    import tempfile

    lacks = subprocess.run(
        [sys.executable, "-c", f"import attr, {NEEDED}"], capture_output=True, check=False
    ).returncode
    if setting.card and lacks:
        return note("examples/train.py", {"skipped": f"the environment of the CUDA build lacks one of {NEEDED}"})

    def ran() -> Row:
        with tempfile.TemporaryDirectory() as folder:
            script = [str(ROOT / "examples" / "train.py"), "--batch-size", "32", "--width", "16"]
            result = _memplan(["run", "--measure", "--device", "cuda", "--json", "-", *script], folder)
            left = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
        return _peaks(result) | {"protection": result["script"]["protection"], "left_behind": left}

    return attempt(note, "examples/train.py", ran)


# Kernels


@dataclass(frozen=True)
class Kernel:
    """A function of `memplan.kernels`, and what stands beside it."""

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    """The same in plain torch."""
    shapes: Callable[[int], list[tuple[int, ...]]]
    """Of its operands, by the number of rows."""
    passes: int
    """How often an element of the first operand is read or written in both passes, at least."""
    complete: Callable[[list[Any]], list[Any]] = lambda operands: operands
    """From normally distributed operands of these shapes to those of the function: another layout, and further ones."""
    further: tuple[float, ...] = ()
    """How often an element of each operand after those of `shapes` is read or written; of bits: of a flag's byte."""
    liger: str = ""
    """Name of the same in `liger_kernel.ops`, or in the functions below."""
    classes: int = 0
    """Of targets, for a loss."""


def _kernels() -> dict[str, Kernel]:
    from torch.nn import functional as F

    from memplan import kernels

    wide, width, vocabulary = 11008, 4096, 32000

    def rows(rows: int) -> list[tuple[int, ...]]:
        return [(rows, width), (width,)]

    def with_residual(rows: int) -> list[tuple[int, ...]]:
        return [(rows, width), (width,), (width,), (rows, width)]

    def gates(rows: int) -> list[tuple[int, ...]]:
        return [(rows, wide), (rows, wide)]

    def head(rows: int) -> list[tuple[int, ...]]:
        return [(rows, 2048), (vocabulary, 2048)]

    def images(rows: int) -> list[tuple[int, ...]]:
        return [(max(1, rows // 64), 64, 56, 56), (64,), (64,)]

    def wide_images(rows: int) -> list[tuple[int, ...]]:
        return [(max(1, rows // 64), 96, 56, 56), (96, 1, 7, 7), (96,)]

    def scores(rows: int) -> list[tuple[int, ...]]:
        return [(max(1, rows // 512), 512, width)]

    def volumes(rows: int) -> list[tuple[int, ...]]:
        return [(max(1, rows // 1024), 64, 32, 32, 32), (64, 1, 3, 3, 3), (64,)]

    def added(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        residual = x + residual
        return F.layer_norm(residual, (width,), weight, bias), residual

    return {
        "rms_norm": Kernel(lambda x, weight: kernels.rms_norm(x, weight, eps=1e-6),
                           lambda x, weight: F.rms_norm(x, (width,), weight, 1e-6), rows, 5, liger="rms_norm"),
        "layer_norm, residual": Kernel(
            lambda x, weight, bias, residual: kernels.layer_norm(x, weight, bias, residual=residual), added,
            with_residual, 8,
        ),
        "swiglu": Kernel(kernels.swiglu, lambda gate, up: F.silu(gate) * up, gates, 8, liger="swiglu"),
        "geglu, tanh": Kernel(lambda gate, up: kernels.geglu(gate, up, approximate="tanh"),
                              lambda gate, up: F.gelu(gate, approximate="tanh") * up, gates, 8, liger="geglu"),
        "depthwise_conv, 3D": Kernel(
            lambda x, weight, bias: kernels.depthwise_conv(x, weight, bias, padding=1),
            lambda x, weight, bias: F.conv3d(x, weight, bias, padding=1, groups=64), volumes, 6,
        ),
        "depthwise_conv, 2D, channels last": Kernel(
            lambda x, weight, bias: kernels.depthwise_conv(x, weight, bias, padding=3),
            lambda x, weight, bias: F.conv2d(x, weight, bias, padding=3, groups=96), wide_images, 6,
            complete=_channels_last,
        ),
        "batch_norm_act, channels last": Kernel(
            kernels.batch_norm_act,
            lambda x, weight, bias: F.relu(F.batch_norm(x, None, None, weight, bias, training=True)), images, 8,
            complete=_channels_last,
        ),
        "group_norm_act, silu": Kernel(
            lambda x, weight, bias: kernels.group_norm_act(x, 32, weight, bias, activation="silu"),
            lambda x, weight, bias: F.silu(F.group_norm(x, 32, weight, bias)), images, 8,
        ),
        "instance_norm_act, leaky_relu": Kernel(
            lambda x, weight, bias: kernels.instance_norm_act(x, weight, bias, activation="leaky_relu"),
            lambda x, weight, bias: F.leaky_relu(F.instance_norm(x, weight=weight, bias=bias)), images, 8,
        ),
        "softmax_dropout, scaled": Kernel(lambda x: kernels.softmax_dropout(x, scale=0.5),
                                          lambda x: F.softmax(x * 0.5, -1), lambda rows: [(rows, width)], 5),
        "softmax_dropout, mask": Kernel(
            kernels.softmax_dropout, lambda x, hidden: F.softmax(x.masked_fill(hidden, float("-inf")), -1), scores, 5,
            complete=lambda made: [*made, _hidden(made[0])], further=(1,),
        ),
        "softmax_dropout, mask, dropout": Kernel(
            lambda x, hidden, kept: kernels.softmax_dropout(x, hidden, p=DROPPED), _masked_dropout, scores, 5,
            complete=lambda made: [*made, _hidden(made[0]), _kept(made[0])], further=(2, 2 / 8),
        ),
        "dice_cross_entropy": Kernel(
            kernels.dice_cross_entropy, _dice_cross_entropy, lambda rows: [(2, 4, 64, 4 * rows)], 3,
            complete=lambda made: [*made, _labels(made[0])], further=(2,),
        ),
        "cross_entropy": Kernel(
            lambda hidden, weight, targets: kernels.cross_entropy(hidden, weight, targets),
            lambda hidden, weight, targets: F.cross_entropy(_logits(hidden, weight), targets),
            head, 3, liger="cross_entropy", classes=vocabulary,
        ),
        "log_probs": Kernel(
            kernels.log_probs,
            lambda hidden, weight, ids: _logits(hidden, weight).log_softmax(-1).gather(-1, ids[:, None])[:, 0],
            head, 3, classes=vocabulary,
        ),
    }  # fmt: skip


def _channels_last(operands: list[Any]) -> list[Any]:
    import torch

    return [operands[0].contiguous(memory_format=torch.channels_last), *operands[1:]]


def _logits(hidden: Any, weight: Any) -> Any:
    """Logits in float32, or float64."""
    import torch

    logits = torch.nn.functional.linear(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


DROPPED = 0.1


def _hidden(scores: Any) -> Any:
    """A causal mask of the last queries."""
    queries, keys = scores.shape[-2:]
    return scores.new_ones(queries, keys).triu(keys - queries + 1).bool()


def _kept(scores: Any) -> Any:
    """What dropout of scores keeps after `SEED`."""
    import torch

    torch.manual_seed(SEED)
    return torch.native_dropout(scores, DROPPED, True)[1]


def _masked_dropout(scores: Any, hidden: Any, kept: Any) -> Any:
    """In float64 with the draws of the dtype that is tested: a card draws others there."""
    import torch
    from torch.nn import functional as F

    shares = F.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return shares * kept / (1 - DROPPED) if scores.dtype == torch.float64 else F.dropout(shares, DROPPED)


def _labels(logits: Any) -> Any:
    """Class indices of logits (N, C, ...), always the same."""
    import torch

    count = logits.shape[0] * logits.shape[2:].numel()
    return (torch.arange(count, device=logits.device) * 7 // 3 % logits.shape[1]).view(-1, *logits.shape[2:])


def _dice_cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean Dice loss of samples and classes, plus cross-entropy, by probabilities and one-hot targets."""
    from torch.nn import functional as F

    shares = logits.softmax(1)
    targets = F.one_hot(labels, logits.shape[1]).movedim(-1, 1).to(logits.dtype)
    common, sizes = (shares * targets).flatten(2).sum(2), (shares + targets).flatten(2).sum(2)
    return (1 - (2 * common + 1e-5) / (sizes + 1e-5)).mean() + F.cross_entropy(logits, labels)


def _liger(name: str) -> Callable[..., Any]:
    """Liger's function of the same operands.

    Raises:
        ImportError: Liger is not installed, or another version.
    """
    if name == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

        return lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6)
    if name == "swiglu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

        return LigerSiLUMulFunction.apply
    if name == "geglu":
        from liger_kernel.ops.geglu import LigerGELUMulFunction  # pyright: ignore[reportMissingImports]

        return LigerGELUMulFunction.apply
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyFunction,
    )

    return lambda hidden, weight, targets: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)[0]


def _named(names: Sequence[str]) -> dict[str, Kernel]:
    """The kernels of these public functions."""
    return {name: kernel for name, kernel in _kernels().items() if name.split(",")[0] in names}


TOKEN_KERNELS = ("rms_norm", "layer_norm", "swiglu", "geglu", "softmax_dropout", "cross_entropy", "log_probs")
IMAGE_KERNELS = ("depthwise_conv", "batch_norm_act", "group_norm_act", "instance_norm_act", "dice_cross_entropy")
RIVALS = ("torch", "inductor", "liger")
SEED = 1
"""Of what a function draws while its errors are measured."""


def kernels(
    note: Note, setting: Setting, *, rows: int = 8192, checked_rows: int = 1024,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"), of: Mapping[str, Kernel] | None = None,
    rivals: Sequence[str] = RIVALS,
) -> None:  # fmt: skip
    """Each kernel's errors beside plain torch's, and its seconds beside torch, Inductor and Liger."""
    import fit
    import torch

    rates: list[float] = []

    def copied() -> Row:
        rates.append(fit.copy_rate())
        return {"bytes_per_second": rates[0]}

    if setting.device == "cuda":
        attempt(note, "copy", copied)
    copies = rates[0] if rates else None

    def measured(kernel: Kernel, dtype: Any) -> Row:
        return _errors(kernel, dtype, checked_rows, setting) | _times(kernel, dtype, rows, setting, copies, rivals)

    for name, kernel in (_named(TOKEN_KERNELS) if of is None else of).items():
        for dtype in dtypes:
            attempt(note, f"{name}, {dtype}", functools.partial(measured, kernel, getattr(torch, dtype)))


def image_kernels(note: Note, setting: Setting) -> None:
    """As `kernels`, of images and volumes."""
    kernels(note, setting, of=_named(IMAGE_KERNELS))


def _operands(kernel: Kernel, dtype: Any, rows: int, device: str) -> list[Any]:
    import torch

    torch.manual_seed(0)
    made: list[Any] = [torch.randn(shape, device=device).to(dtype) for shape in kernel.shapes(rows)]
    if kernel.classes:
        made[1] *= 0.02  # logits as of a model, not of noise
        made.append(torch.randint(kernel.classes, (rows,), device=device))
    return kernel.complete(made)


def _errors(kernel: Kernel, dtype: Any, rows: int, setting: Setting) -> Row:
    """The largest error of a value or gradient, in plain torch's own: both from float64's."""
    import torch
    from truth.float64_errors import values_and_gradients

    operands = _operands(kernel, dtype, rows, setting.device)
    if not setting.has_values:
        values_and_gradients(kernel.ours, operands)
        return {"errors": "skipped: needs values"}

    def seeded(function: Callable[..., Any], operands: list[Any]) -> list[Any]:
        torch.manual_seed(SEED)
        return values_and_gradients(function, operands)

    truths = seeded(kernel.plain, [x.double() if x.is_floating_point() else x for x in operands])
    found = []
    for truth, mine, theirs in zip(truths, seeded(kernel.ours, operands), seeded(kernel.plain, operands), strict=True):
        error, plain = float((mine - truth).norm()), float((theirs - truth).norm())
        found.append({"error": error / float(truth.norm()), "of_plain": error / plain if plain else None})
    return {"errors": found}


def _times(kernel: Kernel, dtype: Any, rows: int, setting: Setting, copies: float | None, among: Sequence[str]) -> Row:
    """Seconds of both passes, by turns with each rival; bytes a second of the least that both passes move."""
    import fit
    import torch

    operands = _operands(kernel, dtype, rows, setting.device)
    least = kernel.passes * operands[0].nbytes
    if kernel.classes:  # operands read and gradients written; the products decide, not the bytes
        least = kernel.passes * sum(x.nbytes for x in operands[:2])
    for passes, operand in zip(reversed(kernel.further), reversed(operands), strict=False):
        least += round(passes * operand.nbytes)
    ours = _both_passes(kernel.ours, operands)
    rivals: dict[str, Callable[[], Callable[..., Any]]] = {
        "torch": lambda: kernel.plain, "inductor": lambda: torch.compile(kernel.plain, dynamic=False),
    }  # fmt: skip
    if kernel.liger and importlib.util.find_spec("liger_kernel") is not None:
        rivals["liger"] = lambda: _liger(kernel.liger)
    found: Row = {"least_bytes": least}
    for rival, make in rivals.items():
        if rival not in among:
            continue
        if rival == "inductor" and setting.card and dtype != torch.float32:
            continue  # made the same way for all
        try:
            row = fit.paired(_both_passes(make(), operands), ours, 9 if setting.has_values else 1)
        except Exception as error:  # the other rivals stand
            found[rival] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        found[rival] = {"seconds": row["eager_seconds"], "ours_over_it": row["ratio"], "quartiles": row["quartiles"]}
        found["seconds"] = min(row["seconds"], found.get("seconds", float("inf")))
    if "seconds" in found:
        found["bytes_per_second"] = least / found["seconds"]
        found["of_copy"] = None if copies is None else found["bytes_per_second"] / copies
    return found


def _both_passes(function: Callable[..., Any], operands: Sequence[Any]) -> Callable[[], None]:
    """A step of both passes; gradients are new each time."""
    import torch

    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in operands]
    inputs = [x for x in leaves if x.requires_grad]
    given: list[Any] = []

    def step() -> None:
        results = function(*leaves)
        results = list(results) if isinstance(results, tuple) else [results]
        if not given:
            given.extend(torch.ones_like(x) for x in results)
        torch.autograd.grad(results, inputs, given)

    return step


# Saved forms and packed states


def encodings(note: Note, setting: Setting, *, elements: int = 1 << 26, checked: int = (1 << 20) + 3) -> None:
    """Encodings of saved values, by the calls of plans: those of the card equal the CPU's, and bytes a second."""
    import fit
    import torch

    from memplan.planning.graph.joint_graph import SavedForm
    from memplan.planning.levers.encode import NAME, Encode
    from memplan.planning.ops import host_copies, int8, piecewise  # noqa: F401  # registers the ops

    lever = Encode()

    def called(call: Any, x: Any) -> Any:
        """The result of a planned call that reads ``x``."""
        target, (_, *rest), options = call
        ops: Any = torch.ops
        return functools.reduce(getattr, target.split("."), ops)(x, *rest, **options)

    def encoded(codec: str, dtype: str, x: Any) -> Any:
        value = SimpleNamespace(shape=x.shape, stride=x.stride(), dtype=str(x.dtype).removeprefix("torch."))
        graph: Any = SimpleNamespace(values=[value, SimpleNamespace(dtype=dtype)])
        saved = SavedForm(NAME, 0, 1, codec)
        form = called(lever.store(graph, saved), x)
        return form, called(lever.fetch(graph, saved), form)

    def in_host(x: Any) -> Any:
        host, copy = host_copies.store(x)
        copy.wait()
        value, copy = host_copies.fetch(host)
        copy.wait()
        return host, value

    ways: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "bits": (functools.partial(encoded, "bits", "uint8"), lambda x: x.gt(0)),
        **{codec: (functools.partial(encoded, codec, "uint8"), torch.clone) for codec in ("sign", "positive", "int8")},
        "uint8": (functools.partial(encoded, "uint8", "uint8"), torch.abs),
        "uint8 indices": (functools.partial(encoded, "index", "uint8"), lambda x: x.mul(40).long() & 255),
        "bfloat16": (functools.partial(encoded, "bfloat16", "bfloat16"), torch.clone),
        "host memory": (in_host, torch.clone),
    }  # fmt: skip
    """By name: what encodes and decodes a value, and what makes such a value of normally distributed numbers."""

    def way(run: Callable[[Any], Any], of_kind: Callable[[Any], Any]) -> Row:
        torch.manual_seed(0)
        x = of_kind(torch.randn(checked))
        on_card = [one.cpu() for one in run(x.to(setting.device))]
        row: Row = {"bytes": on_card[0].nbytes, "value_bytes": x.nbytes}
        if setting.has_values:
            row["differing"] = [int((a != b).sum()) for a, b in zip(run(x), on_card, strict=True)]
        big = of_kind(torch.empty(elements, device=setting.device).normal_())
        form, value = run(big)
        moved = big.nbytes + 2 * form.nbytes + value.nbytes
        del form, value
        seconds = min(fit.seconds(lambda: run(big)) for _ in range(3))
        return row | {"seconds": seconds, "bytes_per_second": moved / seconds}

    for name, (run, of_kind) in ways.items():
        attempt(note, name, functools.partial(way, run, of_kind))


def packed(note: Note, setting: Setting, *, elements: int = 1 << 26, updates: int = 5) -> None:
    """`memplan.PackedMasters` beside float32 master weights: the same bits, its bytes, and its seconds beside those of
    torch.optim, of its fused kernel where ours is one pass, too."""
    import fit
    import torch

    import memplan

    def kind(optimizer_class: Any, one_pass: bool, **options: Any) -> Row:
        torch.manual_seed(0)
        weights = [torch.randn(elements, device=setting.device).bfloat16()]
        weights += [weights[0].clone()]
        given = torch.randn(elements, device=setting.device).bfloat16()
        ours, plain = (torch.nn.Parameter(one) for one in weights)
        master = torch.nn.Parameter(plain.detach().float())
        optimizer, of_master = (
            memplan.PackedMasters([ours], optimizer_class, one_pass=one_pass, **options),
            # in one pass the bits are those of the same kernel on float32 weights, not those of torch.optim on a card
            memplan.PackedMasters([master], optimizer_class, one_pass=True, **options)
            if one_pass
            else optimizer_class([master], **options),
        )

        def packed_step() -> None:
            ours.grad = given
            optimizer.step()

        def plain_step(optimizer: Any = of_master) -> None:
            master.grad = given.float()
            optimizer.step()
            plain.detach().copy_(master.detach())

        for _ in range(updates):
            packed_step()
            plain_step()
        row: Row = {}
        if setting.has_values:
            row["differing"] = int((ours != plain).sum()) + int((optimizer.master(ours) != master).sum())
        states = [one.state[parameter].values() for one, parameter in ((optimizer, ours), (of_master, master))]
        held = [sum(value.nbytes for value in values if torch.is_tensor(value)) for values in states]
        row |= {"state_bytes": held[0], "plain_bytes": held[1] + master.nbytes}
        timed = optimizer_class([master], fused=True, **options) if one_pass else of_master
        row["fused"] = bool(timed.defaults["fused"])
        return row | fit.paired(functools.partial(plain_step, timed), packed_step, 5)

    for optimizer_class, options in (
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ):
        name = optimizer_class.__name__
        attempt(note, name, functools.partial(kind, optimizer_class, False, **options))
        attempt(note, f"{name}, one pass", functools.partial(kind, optimizer_class, True, **options))


def watch(note: Note, setting: Setting, steps: Mapping[str, int] | None = None) -> None:
    """What `memplan.watch` adds to a step."""
    overhead = importlib.import_module("benchmarks.watch_overhead")
    for name, count in (steps or {"small": 300, "large": 100}).items():
        attempt(note, name, lambda name=name, count=count: overhead.measured(name, count, setting.device))


FUNCTIONS: dict[str, Callable[[Note, Setting], None]] = {
    "proof": proof, "measure": measure, "run": run, "kernels": kernels, "image_kernels": image_kernels,
    "encodings": encodings, "packed": packed, "watch": watch,
}  # fmt: skip


def describe() -> Row:
    """The card and the versions."""
    import torch

    from memplan.trace.card_run import machine

    with contextlib.suppress(ImportError):
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]  # so that its version is named
    torch.cuda.init()
    card, versions = machine.gpu(), machine.versions(("triton",))
    return {
        "card": card["name"], "capability": card["capability"], "memory": card["memory"],
        **{name: versions.get(name) for name in ("torch", "cuda", "cudnn", "driver", "triton", "python")},
    }  # fmt: skip


def figures_to(path: Path) -> Note:
    """What writes all figures so far to a file, as a whole or not at all."""
    figures: Row = {}

    def note(name: str, row: Row) -> None:
        figures[name] = row
        print(f"{name}: {json.dumps(row)}", file=sys.stderr, flush=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    return note


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=[*FUNCTIONS])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--describe", action="store_true", help="print the card and the versions")
    parser.add_argument("--emulated", default="", metavar="CARD", help="this process, or those it starts, see it")
    parser.add_argument("--environment", default="", metavar="PYTHON", help="with the CUDA build of torch")
    options = parser.parse_args(arguments)
    inside = contextlib.nullcontext()
    if options.emulated and options.name != "measure":
        from golden_dry import emulated

        inside = emulated(options.emulated)
    with inside:
        if options.describe:
            print(json.dumps(describe()))
            return 0
        setting = Setting(card=options.emulated, environment=options.environment)
        FUNCTIONS[options.name](figures_to(options.folder / "figures.json"), setting)
    return 0


if __name__ == "__main__":
    sys.exit(main())
