"""Choose groups of calls that kernels replace, for a step that has no plan within its budget without kernels.

Groups are replaced by kind: all groups of a kernel, or none. Each round looks at the op with the most live bytes in the
schedule with the smallest peak. If it is in a group, that group's kind is added, and the step is captured and planned
anew. If it is a kernel that needs more bytes than the calls it replaced, its kind is left out again. If neither gives
a choice that was not tried yet, all kinds are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

from memplan._interrupts import safe_point
from memplan.errors import BudgetError, RecordingError
from memplan.kernels import launch
from memplan.kernels.depthwise import parts_of
from memplan.planning.capture.replaced_calls import GroupGone
from memplan.planning.capture.side_effects import is_fake
from memplan.planning.cost.op_timing import errors_on_device
from memplan.planning.graph.joint_graph import JointGraph, Ref
from memplan.planning.graph.op_schema import KERNELS
from memplan.planning.ops.kernel_group import Group
from memplan.planning.passes.split_convolution_backward import CONVOLUTION_BACKWARD
from memplan.planning.plan.decisions import saved_bytes
from memplan.planning.segments import OverBudgetOp
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, Study
from memplan.planning.tile_search import over_budget_ops_of

_log = logging.getLogger("memplan")

ROUNDS = 4
"""Most captures, each with other kinds of kernels; those with a kernel or group that fails do not count."""
_SMALLEST_PEAK = 1
"""Budget in bytes that no schedule meets: the nearest to it is the schedule with the smallest peak."""
STATISTICS = 8
"""Most bytes that a norm's kernel saves for a row."""


def planned_with_kernels(
    study: Study, settings: Settings, budget: int, captured: Callable[[Sequence[Group]], Study], error: BudgetError
) -> Planned:
    """Return a plan within the budget in which kernels replace groups of calls. Raises BudgetError if there is none;
    its ``smallest_budget`` is the smallest peak that was reached.

    Args:
        study, error: the step without kernels, and its error for this budget.
        settings: options of the plan.
        budget: in bytes.
        captured: returns the study of the step with kernels in the place of groups, or raises GroupGone.
    """
    groups, reasons = offered(study, settings)  # why kernels do not replace the other groups
    kinds, tried, current = frozenset[str](), {frozenset[str]()}, study
    kind_of, levels_without = _kind_of(groups), dict[str, int]()
    for op in over_budget_ops_of(study, settings, _SMALLEST_PEAK):  # the op with the most live bytes first
        if op.call in kind_of:
            levels_without.setdefault(kind_of[op.call], op.level)
    kinds_with_refusal, rounds = set[str](), 0
    while rounds < ROUNDS:
        safe_point()
        highest = over_budget_ops_of(current, settings, _SMALLEST_PEAK)
        next_kinds = _next_kinds(groups, highest, kinds, tried, levels_without)
        if next_kinds is None:
            break
        tried.add(next_kinds)
        _log.info("trying kernels: %s", ", ".join(sorted(next_kinds)))
        try:
            replaced = captured([group for group in groups if group.kernel in next_kinds])
            failures = _failures(replaced, settings)
            if failures:
                reasons += [f"{kernel}: {failure}" for kernel, failure in failures.items()]
                groups = [group for group in groups if group.kernel not in failures]
                continue
            kinds, current, rounds = next_kinds, replaced, rounds + 1
            planned = current.planned(settings, budget)
        except GroupGone as reason:
            _log.info("a group cannot be replaced: %s", reason)
            kind = reason.group.kernel
            reasons.append(f"{kind}: {reason}")
            groups = [group for group in groups if group != reason.group]
            if kind in kinds_with_refusal:  # the second refusal: give up on the kind
                groups = [group for group in groups if group.kernel != kind]
            kinds_with_refusal.add(kind)
            tried.discard(next_kinds)  # there are fewer groups of these kinds now
        except RecordingError as reason:
            _log.info("the step cannot be traced with kernels: %s", reason)
            new_kinds = next_kinds - kinds or next_kinds
            reasons.append(f"{', '.join(sorted(new_kinds))}: {reason}")
            groups = [group for group in groups if group.kernel not in new_kinds]
        except BudgetError as lower:
            error = min(error, lower, key=lambda known: known.smallest_budget)
        else:
            return planned.noting(_notes(reasons))
    raise error.but(do="; ".join(filter(None, (error.do, *_notes(reasons))))) if reasons else error


def with_kernel_remedy(error: BudgetError, study: Study, settings: Settings, budget: int) -> BudgetError:
    """Return the error of an exact plan, with the advice to allow kernels if one replaces calls at which the step is
    above its budget."""
    if settings.allow != "exact" or budget < study.least_peak(settings):
        return error
    groups, _ = offered(study, settings)
    if not groups:
        return error
    kind_of = _kind_of(groups)
    over_budget = over_budget_ops_of(study, settings, budget)
    if not over_budget:  # on a card the allocator's reserved bytes are above the budget, live bytes need not be
        over_budget = over_budget_ops_of(study, settings, _SMALLEST_PEAK)[:1]
    if not any(op.call in kind_of for op in over_budget):
        return error
    return error.but(do=f"{error.do}; or let kernels replace groups of ops, which add in another order: "
                     "allow='reordered' (--allow reordered)")  # fmt: skip


def offered(study: Study, settings: Settings) -> tuple[list[Group], list[str]]:
    """Return the groups that kernels can replace, and the reasons why they cannot replace the others."""
    card, graph = settings.home.card, study.captured.graph
    reasons, groups = [str(refused) for refused in study.captured.refused_groups], list[Group]()
    if card is not None and study.captured.groups:
        if launch.triton is None:
            return [], [*reasons, "Triton is not installed"]
        if card.architecture < launch.OLDEST_CARD:
            return [], [*reasons, f"{card.title} is older than compute capability 7.5"]
    for group in study.captured.groups:
        if group.kernel == "rms_norm" and saved_bytes(graph, group.calls) <= STATISTICS * _rows(graph, group):
            reasons.append(f"{group.kernel}: torch's own saves no more")
        elif group.kernel == "depthwise_conv" and card is None:
            reasons.append(f"{group.kernel}: on the CPU it is torch's own convolution")
        elif group.kernel == "depthwise_conv" and _sums_of_filters(graph, group) > _scratch(graph, group):
            reasons.append(f"{group.kernel}: its sums take more than the workspace of torch's own")
        else:
            groups.append(group)
    return groups, reasons


def _next_kinds(
    groups: Sequence[Group], highest: Sequence[OverBudgetOp], kinds: frozenset[str], tried: Collection[frozenset[str]],
    levels_without: Mapping[str, int],
) -> frozenset[str] | None:  # fmt: skip
    """Return the kinds of kernels to try next; None if there is no other choice.

    The first of these that was not tried yet: the last choice, with the kind in whose group the highest op is; the last
    choice without that kind, if its groups need fewer bytes without kernels; all kinds. The choice does not depend on
    the budget. So the smallest budget that an error names has a plan.

    Args:
        groups: groups that kernels can replace.
        highest: ops of the schedule with the smallest peak, the op with the most live bytes first.
        kinds: kinds of the last capture.
        tried: all choices that were tried.
        levels_without: most live bytes during the groups of each kind, in the step without kernels.
    """
    all_kinds, kind_of = frozenset(group.kernel for group in groups), _kind_of(groups)
    kind_at_peak = frozenset(kind_of[op.call] for op in highest[:1] if op.call in kind_of)
    worse = frozenset(kind for kind in kind_at_peak & kinds if levels_without.get(kind, 0) < highest[0].level)
    candidates = [kinds | kind_at_peak, kinds - worse, all_kinds]
    return next((candidate & all_kinds for candidate in candidates if candidate & all_kinds not in tried), None)


def _kind_of(groups: Sequence[Group]) -> dict[int, str]:
    """Return the kind of kernel that replaces each call, by the call's number."""
    return {call: group.kernel for group in groups for call in group.calls}


def _failures(study: Study, settings: Settings) -> dict[str, str]:
    """Return the error of each kind of kernel that fails to run on the step's card."""
    if settings.home.card is None or is_fake(study.model):
        return {}
    graph, kernel_at = study.captured.graph, {group.last: group.kernel for group in study.kernels}
    failures = errors_on_device(graph, KERNELS, settings.home.name)
    return {
        kernel_at[call]: failures[op.target]
        for op in graph.ops
        if op.target in failures and (call := graph.call_of(op)) in kernel_at
    }


def _rows(graph: JointGraph, group: Group) -> int:
    """Return the number of rows of a norm's result: the norm is over the last dimension."""
    shapes = [graph.values[value].shape for op in graph.forward_ops if op.call == group.last for value in op.makes]
    return prod(shapes[-1][:-1]) if shapes else 0


def _scratch(graph: JointGraph, group: Group) -> int:
    """Return the most bytes of workspace of an op of a group."""
    return max((op.scratch for op in graph.ops if graph.call_of(op) in group.calls), default=0)


def _sums_of_filters(graph: JointGraph, group: Group) -> int:
    """Return the bytes of the partial sums of the weight's and bias's gradient in the kernel of a depthwise
    convolution."""
    sums_bytes = 0
    for op in graph.backward_ops:
        computes_weight_or_bias = op.outputs[1:] != (None, None)  # outputs: gradients of input, weight, bias
        if op.target == CONVOLUTION_BACKWARD and graph.call_of(op) in group.calls and computes_weight_or_bias:
            d_y, _, weight = (graph.values[arg.value] for arg in op.args[:3] if isinstance(arg, Ref))
            (samples, channels, *sizes), taps = d_y.shape, prod(weight.shape[2:])
            parts, *_ = parts_of(samples, prod(sizes), taps)
            sums_of_channel = taps + (op.outputs[2] is not None)  # a sum for each tap of the filter, and for the bias
            sums_bytes = 4 * parts * sums_of_channel * channels  # float32
    return sums_bytes


def _notes(reasons: Sequence[str]) -> tuple[str, ...]:
    """Return the note on groups that no kernel replaces."""
    return (f"what no kernel replaces: {'; '.join(dict.fromkeys(reasons))}",) if reasons else ()
