"""The kernels that Inductor's generated code calls: what each moves, and of which ops it is.

Recorded as the code is written, since the code itself does not say. Seen in torch 2.11, 2.13 and 2.15:
``torch._inductor.scheduler.Scheduler.codegen_extern_call``, ``name_to_fused_node``, ``get_name``, ``get_nodes`` and
``get_outputs``, ``read_writes`` and ``get_read_write_buffer_accesses`` of its nodes;
``torch._inductor.dependencies.WeakDep``; ``define_kernel`` of ``torch._inductor.codegen.cpp.CppScheduling`` and
``torch._inductor.codegen.triton.TritonScheduling``; ``torch._inductor.ir.MultiOutput``, and ``origins``,
``origin_node``, ``op_overload`` and ``python_kernel_name`` of what is in ``torch._inductor.ir``;
``torch._inductor.virtualized.V``. Seen in 2.11, 2.13 and 2.14: ``_codegen_mix_order_reduction`` and
``_generate_kernel_code_for_mix_order_reduction`` of ``torch._inductor.codegen.simd.SIMDScheduling``, and
``saved_partial_accumulate``, ``numels`` and ``rsplit_size`` of the kernel that the latter gives.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memplan._torch.flops import flop_formula
from memplan._torch.patches import here_alone, patched

MARK = "memplan "
"""Beginning of the stack trace of a marked node; a number follows."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A core op, all or a part of which a kernel computes."""

    name: str
    """Unique among the ops that were lowered together."""
    mark: int | None
    """None for what Inductor put there by itself."""
    flops: int
    """FLOPs as `torch.utils.flop_counter` counts them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call of a kernel."""

    name: str
    """Name in Inductor's code of a kernel that Inductor wrote; name of the op of one of torch's."""
    fused: bool
    """Whether Inductor wrote it."""
    bytes: int
    """Read and written: in each of its loops each tensor once; not what is made and used up within a loop."""
    origins: tuple[Origin, ...]


class Record:
    """Kernels, as they are found."""

    def __init__(self) -> None:
        self._found: list[Kernel] | None = []

    @property
    def kernels(self) -> tuple[Kernel, ...] | None:
        """Kernels in the order of their calls; None where Inductor's names are others than those known here."""
        if self._found is None:
            return None
        called = {one.name for kernel in self._found if not kernel.fused for one in kernel.origins}
        return tuple(_without(kernel, called) if kernel.fused else kernel for kernel in self._found)

    def give_up(self) -> None:
        """Give up: there is no telling."""
        self._found = None

    def wrote(self, name: str, nodes: Iterable[Any]) -> None:
        """Record a kernel that was written."""
        self._add(lambda: _fused(name, nodes))

    def calls(self, node: Any) -> None:
        """Note a call of one of torch's kernels."""
        self._add(lambda: _torchs(node))

    def sums_up(self, kernel: Any) -> None:
        """Note that torch's kernels follow one that was written, for what it reduces along the other dimension."""
        for partial in getattr(kernel, "saved_partial_accumulate", ()):
            self._add(lambda partial=partial: _second_pass(kernel, partial.reduction_type))

    def _add(self, made: Any) -> None:
        try:
            kernel = made()
        except Exception:  # another version's names: no figures are worth a step that cannot be compiled
            return self.give_up()
        if kernel is not None and self._found is not None:
            self._found.append(kernel)


@contextmanager
def kernels_recorded() -> Iterator[Record]:
    """Record what is called by the code that Inductor writes meanwhile."""
    record = Record()
    with ExitStack() as patches:
        try:
            _record_written(record, patches)
            _record_called(record, patches)
            _record_second_passes(record, patches)
        except (ImportError, AttributeError):
            record.give_up()
        yield record


def _record_written(record: Record, patches: ExitStack) -> None:
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.triton import TritonScheduling

    def recording(define: Any) -> Any:
        def define_kernel(self: Any, source: Any, nodes: Any, *rest: Any, **more: Any) -> Any:
            name = define(self, source, nodes, *rest, **more)
            record.wrote(name, nodes)
            return name

        return here_alone(define_kernel, define)

    for backend in (CppScheduling, TritonScheduling):
        patches.enter_context(patched(backend, define_kernel=recording(backend.define_kernel)))


def _record_called(record: Record, patches: ExitStack) -> None:
    from torch._inductor.scheduler import Scheduler

    call = Scheduler.codegen_extern_call

    def codegen_extern_call(self: Any, node: Any, *rest: Any, **more: Any) -> Any:
        record.calls(node)
        return call(self, node, *rest, **more)

    patches.enter_context(patched(Scheduler, codegen_extern_call=here_alone(codegen_extern_call, call)))


def _record_second_passes(record: Record, patches: ExitStack) -> None:
    """Record the kernels of torch's that sum partial results: a kernel of Triton's that reduces along both dimensions
    leaves one of the two in parts, in a workspace, and the lines that add these up have no node of the scheduler's."""
    from torch._inductor.codegen.simd import SIMDScheduling

    generate = getattr(SIMDScheduling, "_generate_kernel_code_for_mix_order_reduction", None)
    whole = getattr(SIMDScheduling, "_codegen_mix_order_reduction", None)
    if generate is None or whole is None:
        return
    written = list[Any]()

    def generate_and_keep(*args: Any, **more: Any) -> Any:
        found = generate(*args, **more)
        written.append(found[0])
        return found

    def whole_and_sums(*args: Any, **more: Any) -> Any:
        written.clear()
        found = whole(*args, **more)
        record.sums_up(written[-1] if written else None)  # before that, others were tried out
        return found

    patches.enter_context(
        patched(
            SIMDScheduling,
            _generate_kernel_code_for_mix_order_reduction=here_alone(generate_and_keep, generate),
            _codegen_mix_order_reduction=here_alone(whole_and_sums, whole),
        )
    )


_PARTS = 4
"""Bytes of an element of such a workspace: float32."""


def _second_pass(kernel: Any, reduction: str) -> Kernel:
    columns = int(kernel.numels["r0_"])
    parts = -(-int(kernel.numels["x"]) // int(kernel.rsplit_size)) * columns
    name = {"min": "amin.default", "max": "amax.default"}.get(reduction, f"{reduction}.dim_IntList")
    return Kernel(f"aten.{name}", False, _PARTS * (2 * parts + columns), ())  # the parts are written, too


def _without(kernel: Kernel, called: set[str]) -> Kernel:
    """Return a kernel without the origins that one of torch's kernels computes: a kernel that only lays out its operand
    bears its name, too."""
    return replace(kernel, origins=tuple(one for one in kernel.origins if one.name not in called))


def _fused(name: str, nodes: Iterable[Any]) -> Kernel:
    """Build the record of a kernel that Inductor wrote: one or more loops, one after the other, each of what was
    fused."""
    nodes = [node for node in nodes if hasattr(node, "scheduler")]  # between them are signs for the backend
    loops = dict.fromkeys(node.scheduler.name_to_fused_node[node.get_name()] for node in nodes)
    return Kernel(name, True, sum(map(_moved, loops)), _as_origins(_computed(nodes)))


def _moved(node: Any) -> int:
    """Return the bytes that are read and written, at best. What only has to come before it is read by nobody."""
    from torch._inductor.dependencies import WeakDep

    sizes = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    named = (*node.read_writes.reads, *node.read_writes.writes)
    real = {one.name for one in named if not isinstance(one, WeakDep)}
    return sum(int(size) for name, size in sizes.items() if name in real)


def _torchs(node: Any) -> Kernel | None:
    from torch._inductor.ir import MultiOutput

    if isinstance(node.node, MultiOutput):  # takes one of the results of a call
        return None
    called = getattr(node.node, "op_overload", None) or getattr(node.node, "python_kernel_name", None)
    results = _results(node.node)
    moved = _moved(node) + max(0, sum(map(_made, results)) - _made_and_read(node))
    return Kernel(str(called or type(node.node).__name__), False, moved, _as_origins(results))


def _made(node: fx.Node) -> int:
    """Return the bytes of an op's several results, those among them that nobody reads; 0 for an op of one."""
    made = node.meta.get("val")
    if not isinstance(made, (tuple, list)):
        return 0
    return sum(one.numel() * one.element_size() for one in made if isinstance(one, torch.Tensor))


def _made_and_read(node: Any) -> int:
    sizes = node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
    return sum(map(int, sizes.values()))


def _computed(nodes: Sequence[Any]) -> set[fx.Node]:
    """Return the ops that a kernel computes. Inductor's origins also name what other kernels computed into memory that
    this one reads: these are left out."""
    from torch._inductor.virtualized import V

    buffers: Mapping[str, Any] = V.graph.name_to_buffer
    made = {one.get_name() for node in nodes for one in node.get_outputs()}
    read = {dependency.name for node in nodes for dependency in node.read_writes.reads} - made
    behind = {getattr(buffers.get(name), "origin_node", None) for name in read}
    named = {origin for node in nodes for origin in node.node.origins}
    stack, found = [one for node in nodes for one in _results(node.node)], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node not in found and node not in behind and (node in named or _is_one_of_several(node)):
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found & named


def _results(of: Any) -> list[fx.Node]:
    """Return the nodes whose results a buffer holds."""
    if of.origin_node is not None:
        return [of.origin_node]
    used = {one for node in of.origins for one in node.all_input_nodes}
    used |= {one.args[0] for one in used if _is_one_of_several(one)}
    return [one for one in of.origins if one not in used]


def _is_one_of_several(node: fx.Node) -> bool:
    """Return whether it is one of the results of an op: Inductor does not name it as an origin."""
    return node.target is operator.getitem


def _as_origins(nodes: Iterable[fx.Node]) -> tuple[Origin, ...]:
    computed = (node for node in sorted(nodes) if not getattr(node.target, "is_view", False))
    return tuple(_origin(node) for node in computed if node.op == "call_function")


def _origin(node: fx.Node) -> Origin:
    return Origin(node.name, mark_of(node), _flops(node))


def mark_of(node: fx.Node) -> int | None:
    """Return the mark of an op; None for what was not traced between marks."""
    kind, _, number = (node.stack_trace or "").partition(MARK)
    return int(number) if number and not kind else None


def _flops(node: fx.Node) -> int:
    formula = flop_formula(str(node.target))
    if formula is None or "val" not in node.meta:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
