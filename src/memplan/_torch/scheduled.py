"""The kernels that Inductor's generated code calls: the bytes that each kernel moves, and the ops that it computes.

Recorded while the code is generated, since the code itself lacks this information. Seen in torch 2.11, 2.13 and 2.15:
``torch._inductor.scheduler.Scheduler.codegen_extern_call``, ``name_to_fused_node``, ``get_name``, ``get_nodes`` and
``get_outputs``, ``read_writes`` and ``get_read_write_buffer_accesses`` of its nodes;
``torch._inductor.dependencies.WeakDep``; ``define_kernel`` of ``torch._inductor.codegen.cpp.CppScheduling`` and
``torch._inductor.codegen.triton.TritonScheduling``; ``torch._inductor.ir.MultiOutput``, and ``origins``,
``origin_node``, ``op_overload`` and ``python_kernel_name`` of the nodes in ``torch._inductor.ir``;
``torch._inductor.virtualized.V``. Seen in 2.11, 2.13 and 2.14: ``_codegen_mix_order_reduction`` and
``_generate_kernel_code_for_mix_order_reduction`` of ``torch._inductor.codegen.simd.SIMDScheduling``, and
``saved_partial_accumulate``, ``numels`` and ``rsplit_size`` of the kernel that the latter returns.
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
from memplan._torch.patches import only_in_this_thread, patched

MARK = "memplan "
"""Beginning of the stack trace of a marked node; a number follows."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A core op that a kernel computes, wholly or in part."""

    name: str
    """Unique among the ops that were lowered together."""
    mark: int | None
    """None for ops that Inductor added."""
    flops: int
    """FLOPs as `torch.utils.flop_counter` counts them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A call of a kernel."""

    name: str
    """Name in Inductor's code of a generated kernel, else the name of the op."""
    fused: bool
    """Whether Inductor generated the kernel."""
    bytes: int
    """Bytes read and written: each tensor once per loop; values produced and consumed inside a loop do not count."""
    origins: tuple[Origin, ...]


class Record:
    """Kernels recorded so far."""

    def __init__(self) -> None:
        self._recorded: list[Kernel] | None = []
        """None once the record has been given up."""

    @property
    def kernels(self) -> tuple[Kernel, ...] | None:
        """Kernels in call order; None if this version of Inductor is unknown."""
        if self._recorded is None:
            return None
        ops_of_torch = {origin.name for kernel in self._recorded if not kernel.fused for origin in kernel.origins}

        def without_ops_of_torch(kernel: Kernel) -> Kernel:
            """Return a kernel without the origins that a kernel of torch computes."""
            return replace(kernel, origins=tuple(o for o in kernel.origins if o.name not in ops_of_torch))

        # Where a fused kernel only copies an operand into the layout that a kernel of torch needs, Inductor lists the
        # op of torch's kernel among the origins of both. The op is computed once, so the copy must not count it.
        return tuple(without_ops_of_torch(kernel) if kernel.fused else kernel for kernel in self._recorded)

    def give_up(self) -> None:
        """Discard the record: this version of Inductor is unknown."""
        self._recorded = None

    def wrote(self, name: str, nodes: Iterable[Any]) -> None:
        """Record a kernel that Inductor generated, by its name and scheduler nodes."""
        self._add(lambda: _fused(name, nodes))

    def calls(self, node: Any) -> None:
        """Record a call of a kernel of torch, by its scheduler node."""
        self._add(lambda: _library_kernel(node))

    def sums_up(self, kernel: Any) -> None:
        """Record the kernels of torch that sum the partial results of ``kernel``, a Triton kernel that reduces along
        two dimensions."""
        for partial in getattr(kernel, "saved_partial_accumulate", ()):
            self._add(lambda partial=partial: _second_pass(kernel, partial.reduction_type))

    def _add(self, build: Any) -> None:
        """Record the kernel that ``build`` returns, if any."""
        try:
            kernel = build()
        except Exception:  # names of another version: the record may fail, the compilation may not
            return self.give_up()
        if kernel is not None and self._recorded is not None:
            self._recorded.append(kernel)


@contextmanager
def kernels_recorded() -> Iterator[Record]:
    """Record the kernels called by the code that Inductor generates in this context."""
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
    """Record each kernel that Inductor generates, with the scheduler nodes that it computes."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.triton import TritonScheduling

    def recording(define: Any) -> Any:
        """Return a backend's ``define_kernel`` that records the kernel, too."""

        def define_kernel(self: Any, source: Any, nodes: Any, *rest: Any, **more: Any) -> Any:
            name = define(self, source, nodes, *rest, **more)
            record.wrote(name, nodes)
            return name

        return only_in_this_thread(define_kernel, define)

    for backend in (CppScheduling, TritonScheduling):
        patches.enter_context(patched(backend, define_kernel=recording(backend.define_kernel)))


def _record_called(record: Record, patches: ExitStack) -> None:
    """Record each call of a kernel that torch has (a convolution, a matrix product)."""
    from torch._inductor.scheduler import Scheduler

    call = Scheduler.codegen_extern_call

    def codegen_extern_call(self: Any, node: Any, *rest: Any, **more: Any) -> Any:
        """Replace ``Scheduler.codegen_extern_call``: record the call."""
        record.calls(node)
        return call(self, node, *rest, **more)

    patches.enter_context(patched(Scheduler, codegen_extern_call=only_in_this_thread(codegen_extern_call, call)))


def _record_second_passes(record: Record, patches: ExitStack) -> None:
    """Record torch's kernels that sum partial results.

    A Triton kernel that reduces along both dimensions leaves one of the sums in parts, in a workspace; the generated
    lines that add up the parts have no scheduler node.
    """
    from torch._inductor.codegen.simd import SIMDScheduling

    generate = getattr(SIMDScheduling, "_generate_kernel_code_for_mix_order_reduction", None)
    whole = getattr(SIMDScheduling, "_codegen_mix_order_reduction", None)
    if generate is None or whole is None:
        return
    candidates = list[Any]()

    def generate_candidate(*args: Any, **more: Any) -> Any:
        """Replace the generation of a candidate kernel that reduces along both dimensions: keep the kernel."""
        kernels = generate(*args, **more)
        candidates.append(kernels[0])
        return kernels

    def whole_and_sums(*args: Any, **more: Any) -> Any:
        """Replace the generation of code for a reduction along both dimensions: record torch's kernels that add up its
        parts."""
        candidates.clear()
        result = whole(*args, **more)
        record.sums_up(candidates[-1] if candidates else None)  # Inductor uses the last candidate
        return result

    patches.enter_context(
        patched(
            SIMDScheduling,
            _generate_kernel_code_for_mix_order_reduction=only_in_this_thread(generate_candidate, generate),
            _codegen_mix_order_reduction=only_in_this_thread(whole_and_sums, whole),
        )
    )


_PARTS = 4
"""Bytes of an element of the workspace for partial results: float32."""


def _second_pass(kernel: Any, reduction: str) -> Kernel:
    """Return the record of the kernel of torch that reduces the partial results of ``kernel`` in a workspace to a
    single row. ``reduction``: Inductor's name of it, as "sum"."""
    columns = int(kernel.numels["r0_"])
    parts = -(-int(kernel.numels["x"]) // int(kernel.rsplit_size)) * columns  # a row for each split, rounded up
    name = {"min": "amin.default", "max": "amax.default"}.get(reduction, f"{reduction}.dim_IntList")
    moved = _PARTS * (2 * parts + columns)  # the parts are written by the kernel before, and read
    return Kernel(f"aten.{name}", fused=False, bytes=moved, origins=())


def _fused(name: str, nodes: Iterable[Any]) -> Kernel:
    """Return the record of a kernel that Inductor generated: a sequence of loops, each over fused ops."""
    nodes = [node for node in nodes if hasattr(node, "scheduler")]  # the others are markers for the backend
    loops = dict.fromkeys(node.scheduler.name_to_fused_node[node.get_name()] for node in nodes)
    return Kernel(name, fused=True, bytes=sum(map(_moved, loops)), origins=_as_origins(_computed(nodes)))


def _moved(node: Any) -> int:
    """Return the least bytes that a scheduler node reads and writes. Dependencies that only fix an order (`WeakDep`)
    are no reads."""
    from torch._inductor.dependencies import WeakDep

    bytes_by_name = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    accesses = (*node.read_writes.reads, *node.read_writes.writes)
    real = {access.name for access in accesses if not isinstance(access, WeakDep)}
    return sum(int(size) for name, size in bytes_by_name.items() if name in real)


def _library_kernel(node: Any) -> Kernel | None:
    """Return the record of a call of torch's kernel; None for a node that selects one result of such a call."""
    from torch._inductor.ir import MultiOutput

    if isinstance(node.node, MultiOutput):
        return None
    called = getattr(node.node, "op_overload", None) or getattr(node.node, "python_kernel_name", None)
    results = _results(node.node)
    writes = node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
    # the kernel writes all results of the op; Inductor counts those that are read
    unread = max(0, sum(map(_result_bytes, results)) - sum(map(int, writes.values())))
    name = str(called or type(node.node).__name__)
    return Kernel(name, fused=False, bytes=_moved(node) + unread, origins=_as_origins(results))


def _result_bytes(node: fx.Node) -> int:
    """Return the bytes of all results of an op with several, unread results included; 0 for an op with a single one."""
    results = node.meta.get("val")
    if not isinstance(results, (tuple, list)):
        return 0
    return sum(tensor.numel() * tensor.element_size() for tensor in results if isinstance(tensor, torch.Tensor))


def _computed(nodes: Sequence[Any]) -> set[fx.Node]:
    """Return the ops that a kernel of these scheduler nodes computes: the origins of its nodes that lie between its
    inputs and its results. (Origins list the ops of other kernels, too.)"""
    from torch._inductor.virtualized import V

    buffers: Mapping[str, Any] = V.graph.name_to_buffer
    produced = {buffer.get_name() for node in nodes for buffer in node.get_outputs()}
    read = {dependency.name for node in nodes for dependency in node.read_writes.reads} - produced
    input_ops = {getattr(buffers.get(name), "origin_node", None) for name in read}
    origins = {origin for node in nodes for origin in node.node.origins}
    stack, computed = [op for node in nodes for op in _results(node.node)], set[fx.Node]()
    while stack:
        op = stack.pop()
        if op not in computed and op not in input_ops and (op in origins or _selects_result(op)):
            computed.add(op)
            stack.extend(op.all_input_nodes)
    return computed & origins


def _results(buffer: Any) -> list[fx.Node]:
    """Return the ops whose results a buffer of Inductor contains: those of its origins that no other origin reads."""
    if buffer.origin_node is not None:
        return [buffer.origin_node]
    inputs = {operand for node in buffer.origins for operand in node.all_input_nodes}
    inputs |= {node.args[0] for node in inputs if _selects_result(node)}
    return [node for node in buffer.origins if node not in inputs]


def _selects_result(node: fx.Node) -> bool:
    """Return whether a node selects a result of a multi-output op. Inductor does not list such nodes as origins."""
    return node.target is operator.getitem


def _as_origins(nodes: Iterable[fx.Node]) -> tuple[Origin, ...]:
    """Return the records of ops in graph order, without views, which compute nothing."""
    computed = (node for node in sorted(nodes) if not getattr(node.target, "is_view", False))
    return tuple(Origin(node.name, mark_of(node), _flops(node)) for node in computed if node.op == "call_function")


def mark_of(node: fx.Node) -> int | None:
    """Return the number with which `memplan._torch.inductor.mark` marked an op; None if it was traced before the first
    mark."""
    kind, _, number = (node.stack_trace or "").partition(MARK)
    return int(number) if number and not kind else None


def _flops(node: fx.Node) -> int:
    """Return the floating-point operations of an op, by torch's formulas; 0 if it has none."""
    formula = flop_formula(str(node.target))
    if formula is None or "val" not in node.meta:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
