"""Compute the two parts of a convolution's derivative by one kernel, where there is room for that.

In two parts (`memplan.planning.passes.split_convolution_backward`) the input is free one op earlier. But each part
reorders its own operands, and is a call of its own: in networks of many small convolutions that costs a twentieth of
the step. DenseNet took 1.06 times as long as under torch.compile with two parts, and 1.01 times with one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

from memplan.planning.graph.joint_graph import GraphOp
from memplan.planning.passes.split_convolution_backward import CONVOLUTION_BACKWARD
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import Schedule


def joined(of: Schedule) -> Mapping[int, int]:
    """Return pairs of ops that are computed together, as places in both passes: the weight's part, then the input's.
    They do not raise the step's peak, op by op, although both results are alive before the input is free."""
    found = levels(of)
    during, peak, values = (*found.forward, *found.backward), found.peak, of.graph.values
    room = dict[int, int]()
    for first, second in pairs(of).items():
        op = of.graph.ops[_op(of, second)]
        more = op.scratch + sum(values[made].bytes for made in op.makes)
        if max(during[first : second + 1]) + more <= peak:
            room[first] = second
    return room


def pairs(of: Schedule) -> Mapping[int, int]:
    """Return the two parts of each derivative, by place."""
    found, begun = dict[int, int](), dict[str, int]()
    for place, action in enumerate((*of.forward, *of.backward)):
        op = None if action.op is None else action.called(of.graph)
        if op is None or op.target != CONVOLUTION_BACKWARD:
            continue
        key = repr((op.gradient_of, op.args[0], op.args[2:10]))
        if _makes_weight(op):
            begun[key] = place
        elif key in begun:
            found[begun.pop(key)] = place
    return found


def _makes_weight(op: GraphOp) -> bool:
    return op.args[10][1]


def _op(of: Schedule, place: int) -> int:
    number = (*of.forward, *of.backward)[place].op
    assert number is not None, "ops are paired"
    return number
