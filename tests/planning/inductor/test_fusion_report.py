"""What fusion brings: counted again in the generated C++, in what really runs, and by torch's own counter of FLOPs."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from models.networks import SmallGPT, SmallResNet
from planning.graphs import HELD, all_kept
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memplan
from memplan import _torch, devices
from memplan._torch import inductor, scheduled
from memplan._torch.patches import patched
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import RESIDENT, recomputable_values
from memplan.planning.inductor import fusion_report
from memplan.planning.inductor.partition import Fused, as_fused, fused
from memplan.planning.plan import fusion as fusion_
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.codegen import program
from memplan.planning.schedule.scheduler import Schedule, schedule

pytestmark = pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here")


class Norms(nn.Module):
    """What fuses, between products; the last has a single column, which Inductor makes no product of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.middle, self.layer_norm, self.last = nn.Linear(8 * 64 * 64, 24), nn.LayerNorm(24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.norm(self.conv(x))) * 2
        h = self.layer_norm(torch.tanh(self.middle(h.flatten(1))))
        return torch.sigmoid(self.last(h)).sum()


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs).square().mean()


def mlp() -> nn.Module:
    return WithLoss(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "norms": (Norms, lambda: torch.randn(8, 3, 64, 64)),
    "mlp": (mlp, lambda: torch.randn(32, 16)),
    "resnet": (lambda: WithLoss(SmallResNet()), lambda: torch.randn(8, 3, 64, 64)),
    "gpt": (lambda: WithLoss(SmallGPT(layers=2)), lambda: torch.randint(40, (2, 16))),
}
CHOICES: dict[str, Callable[[Any], Choices]] = {
    "all kept": lambda graph: Choices(),
    "recomputed": lambda graph: Choices(recompute=recomputable_values(graph)),
    "encoded": lambda graph: Choices(saved_forms=all_kept(graph, "encode")),
    "held": lambda graph: Choices(gradients=HELD),
}
QUICK = [("norms", "encoded"), ("mlp", "held")]


def each_of(*models: str) -> pytest.MarkDecorator:
    """Each model with each choice: those that are not in ``QUICK`` are lowered for the slow tests only."""
    pairs = [(model, choice) for model in models for choice in CHOICES]
    cases = [pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in pairs]
    return pytest.mark.parametrize(("model", "choice"), cases)


Made = tuple[Captured, Fused, dict[str, inductor.Code]]


@pytest.fixture(scope="module")
def made() -> Callable[[str, str], Made]:
    """A model's step as fused kernels, made once, with one thread: then each loop is a block of its own."""
    from torch._inductor import config

    known: dict[tuple[str, str], Made] = {}

    def make(model: str, choice: str) -> Made:
        if (model, choice) not in known:
            torch.manual_seed(0)
            captured = capture(MODELS[model][0](), call_of((MODELS[model][1](),), {}))
            of = fused(as_fused(captured.graph, CHOICES[choice](captured.graph)))
            with config.patch({"cpp.threads": 1}):
                codes = {part.name: inductor.code_of(part.lowerable) for part in of.parts}
            known[model, choice] = captured, of, codes
        return known[model, choice]

    return make


def told(of: Fused, codes: dict[str, inductor.Code], device: devices.Device | None = None) -> fusion_.Fusion:
    found = fusion_report.fusion_of(of, codes, device)
    assert found is not None
    return found


# -- an account of its own: the generated code is run on tensors without data, and its C++ is read


class Calls(TorchDispatchMode):
    """The kernels that are called, and the bytes of the tensors that each takes and gives."""

    def __init__(self, size: Callable[[Tensor], int] = lambda one: one.numel() * one.element_size()) -> None:
        super().__init__()
        self.size, self.found = size, list[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace != "prim" and func is not torch.ops.aten.empty_strided.default:
            given = tensors((args, kwargs))
            made = [one for one in tensors(result) if all(one is not other for other in given)]
            self.found.append((str(func), sum(map(self.size, (*given, *made)))))
        return result


def in_memory(of: Tensor) -> int:
    """Bytes of the elements that lie apart. What stands for its shape alone, one element again and again, is unread."""
    if of.dim() and not any(of.stride()):
        return 0
    return math.prod(n for n, step in zip(of.shape, of.stride(), strict=True) if step) * of.element_size()


def tensors(of: Any) -> list[Tensor]:
    if isinstance(of, Tensor):
        return [of]
    parts = of.values() if isinstance(of, dict) else of if isinstance(of, (tuple, list)) else ()
    found = [one for part in parts for one in tensors(part)]
    return list({id(one): one for one in found}.values())


STORES = r"\.store\({0}\b|\b{0}\[.*\] \+?= |atomic_add\w*\(&?{0}\b"


def of_source(source: str, given: Sequence[Tensor]) -> int:
    """Bytes that a C++ kernel moves: in each block of its body, what it reads of each operand and what it writes."""
    head, _, body = source[source.index('extern "C"') :].partition("\n{")
    names = re.findall(r"\*\s*(\w+)", head)
    size_of = {name: one.numel() * one.element_size() for name, one in zip(names, given, strict=True)}
    same = dict(re.findall(r"^    auto (\w+) = (in_out_ptr\d+);$", body, re.MULTILINE))
    total = 0
    for block in re.findall(r"^    \{\n(.*?)^    \}$", body, re.MULTILINE | re.DOTALL):
        used = set[tuple[str, bool]]()
        for line in block.splitlines():
            for name in re.findall(r"\b(?:in_out|in|out)_ptr\d+\b", line):
                used.add((same.get(name, name), re.search(STORES.format(name), line) is not None))
        total += sum(size_of[name] for name, _ in used)
    return total


def calls_of(part: Any, code: str) -> list[tuple[str, int]]:
    """What the code of a part calls, in order."""
    from torch._inductor import async_compile

    calls = Calls(in_memory)

    class Recording:
        def cpp_pybinding(self, types: Any, source: str) -> Any:
            return lambda *given: calls.found.append(("cpp", of_source(source, given)))

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    found: dict[str, Any] = {}
    with patched(async_compile, AsyncCompile=Recording):
        exec(compile(code, "<code>", "exec"), found)
    found |= {
        "empty_strided_cpu": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        "reinterpret_tensor": lambda one, size, stride, at=0: one.as_strided(size, stride, one.storage_offset() + at),
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
    }
    with part.lowerable.mode, calls:
        found["call"](list(part.lowerable.examples))
    return calls.found


@each_of(*MODELS)
def test_kernels_and_their_bytes_are_those_of_the_code(made: Callable[..., Made], model: str, choice: str) -> None:
    """At best: a tensor that several blocks of the C++ go over, which were fused, may still be in a cache. Of a slice,
    as attention takes three of one tensor, what is read counts, where the code has the whole as an operand."""
    _, of, codes = made(model, choice)
    least, most = {"mlp": (1.0, 1.0), "gpt": (0.35, 1.25)}.get(model, (0.8, 1.0))
    for part in of.parts:
        kernels, text = codes[part.name].kernels, codes[part.name].text
        assert kernels is not None
        counted = calls_of(part, text) if text else []
        assert [("cpp" if one.fused else one.name) for one in kernels] == [name for name, _ in counted]
        for kernel, (_, size) in zip(kernels, counted, strict=True):
            if kernel.fused:
                assert least * size - 2048 * (least < 1) <= kernel.bytes <= most * size, kernel.name
            else:
                assert kernel.bytes == size, kernel.name
    found = told(of, codes)
    writes = sum(action.kind == "write" for action in of.schedule.forward)
    called = sum(len(codes[part.name].kernels or ()) for part in of.parts)
    assert found.kernels_after == len(found.groups) == called + writes
    assert found.bytes_after == sum(group.bytes for group in found.groups)


class Pointwise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.split(16, 1)
        return torch.tanh(first * second + 1)


def test_a_slice_counts_as_what_is_read_of_it() -> None:
    """By hand: a kernel reads both halves and writes what is as large as one of them; the backward pass reads halves,
    result and its gradient, and writes the gradient of the whole."""
    x = torch.randn(64, 32, requires_grad=True)
    of = fused(as_fused(capture(Pointwise(), call_of((x,), {})).graph, Choices()))
    found = told(of, {part.name: inductor.code_of(part.lowerable) for part in of.parts})
    half = 64 * 16 * 4
    assert [group.bytes for group in found.groups if group.phase == "forward"] == [3 * half]
    assert sum(group.bytes for group in found.groups if group.phase == "backward") <= 8 * half
    assert (found.kernels_before, found.bytes_before) >= (5, 3 * half + 2 * half + 2 * half)


# -- before: what really runs


def run(captured: Captured, of: Schedule, model: nn.Module, x: Tensor) -> None:
    """A step of the engine ``graph``'s program, on the model's own tensors."""
    functions: dict[str, Any] = {}
    exec(compile(program(of), "<program>", "exec"), functions)
    known = dict(model.named_parameters()) | dict(model.named_buffers()) | {"0": x}
    resident = [value for value in captured.graph.values if value.kind in RESIDENT]
    inputs = [known[value.path].detach() for value in resident]
    _, saved = functions["forward"](list(inputs))
    tangents = [torch.ones(value.shape) for value in captured.graph.values if value.kind == "tangent"]
    for given in functions["backward"](inputs, saved, tangents):
        given.clear()


def graph_engine(captured: Captured, choice: str) -> Schedule:
    return schedule(captured.graph, CHOICES[choice](captured.graph))


VIEWS = ("view", "t", "transpose", "permute", "expand", "detach", "squeeze", "unsqueeze", "as_strided", "slice")


@each_of("norms", "mlp", "resnet")
def test_before_each_op_that_the_profiler_sees_is_a_kernel(made: Callable[..., Made], model: str, choice: str) -> None:
    captured, of, codes = made(model, choice)
    torch.manual_seed(0)
    network, x = MODELS[model][0](), MODELS[model][1]()
    step = graph_engine(captured, choice)
    run(captured, step, network, x)  # imports and registers what it needs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run(captured, step, network, x)
    seen = Counter(event.name for event in profile.events() or () if event.cpu_parent is None)
    made_here = len([value for value in captured.graph.values if value.kind == "tangent"])
    views = {"aten::ones", *(f"aten::{name}" for name in VIEWS)}
    assert seen["aten::ones"] == made_here
    kernels = [name for name in seen.elements() if name.startswith(("aten::", "memplan::")) and name not in views]
    assert told(of, codes).kernels_before == len(kernels), seen


@each_of("norms", "mlp", "resnet")
def test_before_the_bytes_are_those_of_the_tensors_that_ops_take_and_give(
    made: Callable[..., Made], model: str, choice: str
) -> None:
    """But for what an op is handed and does not read, and for what a norm reads twice. Nothing is done in place, or
    what is read and written would be one tensor."""
    captured, of, codes = made(model, choice)
    torch.manual_seed(0)
    network, x = MODELS[model][0](), MODELS[model][1]()
    with Calls() as calls:
        run(captured, of.schedule, network, x)
    twice = 0
    for action in (*of.schedule.forward, *of.schedule.backward):
        op = None if action.op is None else action.called_op(captured.graph)
        if op is not None and op.target.startswith("aten.") and "batch_norm" in op.target:
            size = captured.graph.values[op.args[0].value].bytes
            twice += size * (2 if "backward" in op.target else 1)
    counted = sum(size for _, size in calls.found) + twice
    assert told(of, codes).bytes_before == pytest.approx(counted, rel=0.02)


# -- FLOPs


@each_of("norms", "mlp", "resnet")
def test_flops_are_those_that_torch_counts(made: Callable[..., Made], model: str, choice: str) -> None:
    captured, of, codes = made(model, choice)
    torch.manual_seed(0)
    network, x = MODELS[model][0](), MODELS[model][1]()
    with FlopCounterMode(display=False) as step:
        network(x).backward()
    with FlopCounterMode(display=False) as planned:
        run(captured, graph_engine(captured, choice), network, x)
    found = sum(group.flops for group in told(of, codes).groups)
    assert found == planned.get_total_flops()
    assert (found > step.get_total_flops()) is (choice == "recomputed")
    assert found == step.get_total_flops() or choice == "recomputed"


# -- groups


def test_groups_lead_back_to_the_layers_that_were_written(made: Callable[..., Made]) -> None:
    """The norm and what follows it are one kernel, and none has a convolution or a product with another layer."""
    _, of, codes = made("norms", "all kept")
    groups = told(of, codes).groups
    norm = next(group for group in groups if group.fused)
    assert (norm.phase, norm.layers) == ("forward", ("norm",))
    assert norm.ops == ("aten._native_batch_norm_legit_functional.default", "aten.gelu.default", "aten.mul.Tensor")
    lines = Path(__file__).read_text().splitlines()
    line = next(at for at, line in enumerate(lines, 1) if "F.gelu(self.norm" in line)
    assert norm.where is not None
    assert norm.where.endswith(f"test_fusion_report.py:{line}")
    forward = [group.layers for group in groups if group.phase == "forward" and "copy_" not in group.kernel]
    assert forward == [("conv",), ("norm",), ("middle",), ("layer_norm",), ("last",), ("norm",)]  # its batches
    backward = {layer for group in groups if group.phase == "backward" for layer in group.layers}
    assert backward == {"conv", "norm", "middle", "layer_norm", "last"}
    computed = Counter(op for group in groups for op in group.ops)
    assert set(computed) >= {op.target for op in of.schedule.graph.forward_ops}


@pytest.mark.slow
def test_what_is_made_again_is_of_the_same_layer(made: Callable[..., Made]) -> None:
    _, of, codes = made("norms", "recomputed")
    again = [
        group for group in told(of, codes).groups if group.phase == "backward" and "aten.gelu.default" in group.ops
    ]
    assert again
    assert all("norm" in group.layers for group in again)


class Pooled(nn.Module):
    """A dropout between a pool and what computes the pool's indices keeps them in two kernels. What is pooled is
    written by the first, where it takes long to compute, and else computed again."""

    def __init__(self, *, long: bool) -> None:
        super().__init__()
        self.long, self.drop, self.norm = long, nn.Dropout(0.3), nn.BatchNorm2d(8)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = F.gelu(self.norm(self.second(h))) + h if self.long else F.gelu(h) + h
        return self.drop(F.max_pool2d(h, 2)).mean()


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
def test_a_group_has_what_it_computes_not_what_it_reads(long: bool) -> None:
    """Of a GELU there is an error function in the C++ of each kernel that has it among its ops, and in no other."""
    of = fused(as_fused(capture(Pooled(long=long), call_of((torch.randn(4, 3, 32, 32),), {})).graph, Choices()))
    codes = {part.name: inductor.code_of(part.lowerable) for part in of.parts}
    groups = told(of, codes).groups
    for phase, text in (("forward", codes["forward"].text), ("backward", codes["backward 0"].text)):
        sources = dict(
            re.findall(r"^(cpp_fused\w+) = async_compile\.cpp_pybinding\(.*?r'''(.*?)'''", text, re.M | re.S)
        )
        fused_ones = [group for group in groups if group.phase == phase and group.fused]
        assert {group.kernel for group in fused_ones} == set(sources)
        for group in fused_ones:
            assert any("gelu" in op for op in group.ops) is ("erf(" in sources[group.kernel]), group.kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "h100", "v100"])
def test_what_takes_longer_bounds_a_group(made: Callable[..., Made], name: str | None) -> None:
    """Against the figures of the card by hand. A float32 convolution runs as TF32 where there is that."""
    _, of, codes = made("resnet", "all kept")
    card = None if name is None else devices.find(name)
    found = told(of, codes, card)
    assert found.device == ("cpu" if card is None else card.name)
    rates = {"float32": 150e9} if card is None else dict(card.flops)
    bandwidth = 8e9 if card is None else card.bandwidth
    assert bandwidth is not None
    for group in found.groups:
        rate = rates.get("tf32", rates["float32"]) if "convolution" in group.kernel else rates["float32"]
        assert group.bound == ("compute" if group.flops / rate > group.bytes / bandwidth else "bandwidth")
        assert group.intensity == pytest.approx(group.flops / group.bytes)
    assert 0 < found.bound_bytes <= found.bytes_after
    assert {group.bound for group in found.groups} == ({"bandwidth"} if name == "h100" else {"bandwidth", "compute"})


def test_a_norm_alone_moves_what_it_moved_before() -> None:
    """There is nothing to fuse it with: both accounts say the same."""
    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    of = fused(as_fused(capture(nn.BatchNorm2d(16, track_running_stats=False), call_of((x,), {})).graph, Choices()))
    found = told(of, {part.name: inductor.code_of(part.lowerable) for part in of.parts})
    assert found.bytes_after == pytest.approx(found.bytes_before, rel=0.01)


# -- where nothing is known, and in a plan


@functools.cache
def planned(**options: Any) -> memplan.Plan:
    torch.manual_seed(0)
    return memplan.plan(mlp(), torch.randn(32, 16), budget="1MB", costs="roofline", engine="inductor", **options)


@pytest.mark.slow
def test_a_plan_bears_it_and_goes_back_and_forth() -> None:
    plan = planned()
    assert plan.fusion is not None
    assert memplan.Plan.from_json(plan.to_json()) == plan
    before = replace(plan, fusion=None).to_json().replace('"fusion":null,\n', "")
    assert memplan.Plan.from_json(before).fusion is None  # a plan of before there was this
    assert memplan.plan(mlp(), torch.randn(32, 16), budget="1MB", costs="roofline").fusion is None
    assert planned(device="h100").fusion.device == "h100"  # type: ignore[union-attr]  # with this engine it has one


def without_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.scheduler import Scheduler

    def gone(record: Any, patches: Any) -> None:
        raise AttributeError("define_kernel")

    assert hasattr(Scheduler, "codegen_extern_call")
    monkeypatch.setattr(scheduled, "_record_written", gone)


def without_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.scheduler import BaseSchedulerNode

    monkeypatch.delattr(BaseSchedulerNode, "get_read_write_buffer_accesses")


@pytest.mark.parametrize("less", [without_a_hook, *slow(without_sizes)])
def test_another_inductor_makes_no_plan_fail(less: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = planned()
    less(monkeypatch)
    plan = planned.__wrapped__()
    assert plan.fusion is None
    assert fusion_report.UNTOLD in plan.notes
    assert fusion_report.UNTOLD not in known.notes
    assert (plan.choices, plan.predicted) == (known.choices, known.predicted)
