"""Calls of ops as C kernels beside PyTorch's own in float64: all cases are compiled at once."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from memplan import _torch
from memplan.exporting.kernels.call_writer import CallWriter
from memplan.exporting.kernels.frozen_weights import Quantized
from memplan.exporting.kernels.kernel_calls import calls_of
from memplan.exporting.lower import lowered
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Phase, Ref, Value
from memplan.planning.graph.op_schema import overload


@dataclass(frozen=True)
class Case:
    """A call of an op."""

    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    phase: Phase = "forward"
    narrow: tuple[int, Quantized] | None = None
    """Position among the tensors of one that kernels read in eight bits, and what it is there."""


@dataclass
class _Written:
    lines: list[str]
    pointers: list[torch.Tensor]
    results: list[tuple[torch.Tensor, torch.Tensor]]
    """What the kernels write, and what PyTorch computes."""


def worst_error(cases: Sequence[Case], folder: Path, more_flags: Sequence[str] = ()) -> list[float]:
    """Run every case; return its largest error, in shares of the largest element of its results."""
    writer = CallWriter(JointGraph((), (), (), ()), lambda value: "")
    written = [_write(writer, case) for case in cases]
    functions = [
        f"void case_{at}(void **p)\n{{\n    (void)p;\n" + "".join(f"    {line}\n" for line in one.lines) + "}"
        for at, one in enumerate(written)
    ]
    tables = [text.replace("NAME", name, 1) for text, name in writer.tables.items()]
    source, library = folder / "cases.c", folder / "cases.so"
    head = "#include <math.h>\n#include <stdint.h>\n"
    source.write_text("\n".join([head, *writer.kernels.values(), *tables, *functions]))
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", *more_flags]
    subprocess.run(["cc", *flags, str(source), "-o", str(library), "-lm"], check=True)
    loaded = ctypes.CDLL(str(library))
    return [_run(getattr(loaded, f"case_{at}"), one) for at, one in enumerate(written)]


def _run(function: Any, one: _Written) -> float:
    function((ctypes.c_void_p * len(one.pointers))(*(tensor.data_ptr() for tensor in one.pointers)))
    worst = 0.0
    for found, wanted in one.results:
        scale = max(float(wanted.double().abs().max()) if wanted.numel() else 0.0, 1.0)
        error = (found.double() - wanted.double()).abs().max() if wanted.numel() else torch.zeros(())
        worst = max(worst, float(error) / scale)
    return worst


def _write(writer: CallWriter, case: Case) -> _Written:
    """Lower one call to kernels, each value in memory of its own."""
    tensors = [leaf for leaf in _torch.tree_leaves([case.args, dict(case.kwargs)]) if isinstance(leaf, torch.Tensor)]
    wide = _torch.tree_map(_widened, (case.args, dict(case.kwargs)))
    made = overload(case.target)(*wide[0], **wide[1])
    wanted = list(made if isinstance(made, (tuple, list)) else (made,))
    numbers = {id(tensor): at for at, tensor in enumerate(tensors)}
    args, kwargs = _torch.tree_map(
        lambda leaf: Ref(numbers[id(leaf)]) if isinstance(leaf, torch.Tensor) else leaf, (case.args, dict(case.kwargs))
    )
    values = [_value(at, _without_flags(tensor), "input") for at, tensor in enumerate(tensors)]
    outputs = [None if one is None else len(values) + k for k, one in enumerate(wanted)]
    results = [None if one is None else one.float() if one.is_floating_point() else one for one in wanted]
    values += [
        _value(len(values) + k, one if one is not None else torch.zeros(1), "result") for k, one in enumerate(results)
    ]
    values = [Value(**{**_fields(v), "id": at, "base": at}) for at, v in enumerate(values)]
    if case.narrow is not None:  # the weight itself, which the argument looks into
        values.append(_value(len(values), torch.empty(case.narrow[1].numbers.shape), "parameter"))
        values[case.narrow[0]] = replace(values[case.narrow[0]], base=len(values) - 1)
    op = GraphOp(
        0, case.target, tuple(args), kwargs, case.phase, tuple(outputs), len(wanted) > 1, tuple(range(len(tensors))),
        tuple(one for one in outputs if one is not None),
    )  # fmt: skip
    kept = tuple(one for one in outputs if one is not None)
    graph = JointGraph(tuple(values), (op,), kept, ())
    device = lowered(graph, {}, {})
    made = {k: w for k, w in zip(outputs, wanted, strict=True) if k is not None}
    return _placed(writer, device, tensors, made, case.narrow)


def _placed(
    writer: CallWriter, device: Any, tensors: Sequence[torch.Tensor], wanted: Mapping[int, torch.Tensor],
    narrow: tuple[int, Quantized] | None,
) -> _Written:  # fmt: skip
    graph = device.graph
    memory: dict[int, torch.Tensor] = {}
    for at, tensor in enumerate(tensors):
        flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        memory[at] = flat.to(torch.int32) if not _without_flags(tensor).is_floating_point() else _without_flags(flat)
    writer.int8_scales = {}
    if narrow is not None:
        base = graph.base(narrow[0])
        memory |= {base: torch.from_numpy(narrow[1].numbers), -1: torch.from_numpy(narrow[1].scales)}
        writer.int8_scales = {base: f"((float *)p[{len(memory) - 1}])"}
    for value in graph.values:
        if value.base == value.id and value.id not in memory:
            memory[value.id] = torch.full((max(value.bytes // 4, 1),), float("nan"))
    order = {number: k for k, number in enumerate(memory)}

    def place(value: int) -> str:
        found = graph.values[value]
        if narrow is not None and value == narrow[0]:
            return f"((signed char *)p[{order[graph.base(value)]}])"
        kind = {"int32": "int32_t", "uint8": "unsigned char", "bool": "unsigned char"}.get(found.dtype, "float")
        start = device.storage_offsets.get(value, 0) + (tensors[value].storage_offset() if value < len(tensors) else 0)
        return f"(({kind} *)p[{order[graph.base(value)]}] + {start})"

    writer.graph, writer.pointer_to = graph, place
    lines = [line for op in graph.ops if not op.is_view for line in calls_of(writer, op)]
    results = []
    for given, number in zip(wanted, graph.outputs, strict=True):
        found = graph.values[number]
        if found.dtype == "float32":
            view = torch.as_strided(
                memory[graph.base(number)], found.shape, found.stride, device.storage_offsets.get(number, 0)
            )
            results.append((view, wanted[given]))
    return _Written(lines, list(memory.values()), results)


def _without_flags(tensor: torch.Tensor) -> torch.Tensor:
    """Flags as the floats that they are on the device."""
    return tensor.float() if tensor.dtype == torch.bool else tensor


def _fields(value: Value) -> dict[str, Any]:
    return {name: getattr(value, name) for name in Value.__slots__}


def _value(at: int, tensor: torch.Tensor, kind: Any) -> Value:
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = tensor.numel() * tensor.element_size()
    return Value(at, f"v{at}", kind, at, size, tuple(tensor.shape), tuple(tensor.stride()), dtype, path=str(at))


def _widened(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
