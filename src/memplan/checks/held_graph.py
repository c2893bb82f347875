"""Check: graphs that stay alive although no backward pass reads them (retain_graph, no no_grad, summed losses)."""

from __future__ import annotations

from typing import Any

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.growth import HELD_FOR_GOOD, growth, in_graph, ticks_of_step
from memplan.checks.mended.savings import after_last_use, matters, rows_of, saving, without_saving
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

ID = "held-graph"
TITLE = "A graph is held that no backward pass will read"


def find(subject: Subject) -> list[Finding]:
    """Return findings for graphs that outlive their step, graphs retained after their last backward pass, and forward
    passes with grad that no backward pass follows."""
    trace = subject.trace
    return [*_growing(trace), *_retained(trace), *_without_backward(trace)]


def _growing(trace: Trace) -> list[Finding]:
    """Return a finding for forward tensors that every step leaves in a live graph."""
    leaked = growth(trace, graph=True)
    size = leaked.bytes
    if not matters(trace, size):
        return []
    rows = rows_of(trace, leaked.storages)
    message = (
        f"every step leaves {format_bytes(size)} of its forward pass behind: its graph is held by something that "
        "outlives it, as a loss that is added up with its graph (total += loss)"
    )
    advice = ("Add numbers up instead: total += loss.item(), or loss.detach(); evaluate under torch.no_grad()",)
    return [_finding(rows, size, message, advice, kind="growing", bytes_per_step=list(leaked.bytes_per_step))]


def _retained(trace: Trace) -> list[Finding]:
    """Return a finding for saved tensors that outlive the last backward pass of their step, where that pass was called
    with retain_graph or create_graph."""
    saved: list[Storage] = []
    retained: list[Storage] = []
    last_pass = {backward.step: backward for backward in trace.passes if not backward.nested}
    for step, last in last_pass.items():
        if not last.keeps:  # without retain_graph or create_graph, the pass frees what is saved
            continue
        begin, _ = ticks_of_step(trace, step)
        of_step = [s for s in trace.counted if s.cause == "saved" and begin < s.born <= last.end]
        saved += of_step
        retained += [s for s in of_step if s.died is None or s.died > last.end]
    retained = [s for s in retained if s.op is not None and trace.ops[s.op].layer]
    # variables of the step (output, loss) also keep some tensors alive: only a retained graph keeps half of them
    if 2 * sum(s.bytes for s in retained) < sum(s.bytes for s in saved):
        return []
    size = saving(trace, after_last_use(trace, retained))
    rows = rows_of(trace, retained)
    if not rows:
        return []
    last = next(backward for backward in last_pass.values() if backward.keeps)
    retained_bytes = sum(row["bytes"] for row in rows)
    message = (
        f"the graph lives on when its backward pass is over ({format_bytes(retained_bytes)} of saved tensors, "
        f"{format_bytes(size)} at the peak), and nothing reads it again: {last.keeps}=True"
        + (f" at {last.where}" if last.where else "")
    )
    advice = (f"Leave {last.keeps} out of the last backward(); add losses that share a graph, and call backward once",)
    return [_finding(rows, size, message, advice, kind="retained", kept=retained_bytes)]


def _without_backward(trace: Trace) -> list[Finding]:
    """Return a finding for a model that runs with grad although no backward pass reads its graph."""
    used = {op.gradient_of for op in trace.ops if op.gradient_of is not None}  # forward ops whose gradient is computed
    recomputed_layers = {op.layer for op in trace.ops if op.recomputed}
    idle: list[Op] = []  # ops of the calls of models in the first step without a backward pass
    begin = 0
    for returned in trace.returned:
        ops = [op for op in trace.ops[begin : returned.after] if op.phase == "forward" and op.step == 0 and op.layer]
        begin = returned.after
        has_graph = any(in_graph(trace, op) for op in ops)
        if has_graph and not any(op.index in used or op.layer in recomputed_layers for op in ops):
            idle += ops
    if not idle:
        return []
    names, layers = {op.name for op in idle}, {op.layer for op in idle}
    # only the first step has calls of models: in later steps, the ops of the same names and layers
    of_model = {op.index for op in trace.ops if op.phase == "forward" and op.name in names and op.layer in layers}
    outputs = {view.storage for returned in trace.returned for view in returned.tensors}
    storages = [
        s for s in trace.counted
        if s.op in of_model and s.cause not in HELD_FOR_GOOD and s.id not in outputs
        and not any(sharer.op in used for sharer in s.sharers)
    ]  # fmt: skip
    size = saving(trace, without_saving(trace, storages))
    if not matters(trace, size):
        return []
    rows = rows_of(trace, storages)
    models = {op.layer.split(".")[0] for op in idle}
    message = (
        f"{models.pop() if len(models) == 1 else 'a model'} runs with grad and no backward pass "
        f"follows: its graph holds {format_bytes(size)} at the peak"
    )
    advice = ("Run it under torch.no_grad() (or torch.inference_mode()); model.eval() alone does not do that",)
    return [_finding(rows, size, message, advice, kind="no backward")]


def _finding(rows: list[dict[str, Any]], size: int, message: str, advice: tuple[str, ...], **details: Any) -> Finding:
    """Return a finding at the layer and line of the first of these rows (see `rows_of`), which costs ``size`` bytes."""
    first = rows[0]
    return Finding(ID, "warning", first["layer"], first["where"], size, message, advice, {**details, "layers": rows})
