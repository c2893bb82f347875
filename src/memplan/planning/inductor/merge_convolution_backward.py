"""Compute both parts of a convolution's derivative by a single kernel if that does not raise the peak.

In two parts (`memplan.planning.passes.split_convolution_backward`) the input is freed one op earlier. But each part is
a separate call that reorders its operands: in networks of many small convolutions that costs a twentieth of the step.
DenseNet took 1.06 times as long as under torch.compile with two parts, and 1.01 times with a single kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

from memplan.planning.passes.split_convolution_backward import CONVOLUTION_BACKWARD
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import Schedule


def affordable_pairs(schedule: Schedule) -> Mapping[int, int]:
    """Return those `pairs` that a single kernel can compute without raising the peak of the step, counted op by op."""
    counted = levels(schedule)
    level_of_action, actions = (*counted.forward, *counted.backward), (*schedule.forward, *schedule.backward)
    affordable = dict[int, int]()
    for weight_part, input_part in pairs(schedule).items():
        index = actions[input_part].op
        assert index is not None, "ops are paired"
        op = schedule.graph.ops[index]
        # The gradient of the input is then allocated together with that of the weight, before the input is freed.
        earlier_bytes = op.scratch + sum(schedule.graph.values[value].bytes for value in op.makes)
        if max(level_of_action[weight_part : input_part + 1]) + earlier_bytes <= counted.peak:
            affordable[weight_part] = input_part
    return affordable


def pairs(schedule: Schedule) -> Mapping[int, int]:
    """Return {action of the weight's part: action of the input's part} for each convolution's derivative, as indices
    into the schedule's forward and backward actions, concatenated."""
    complete, weight_parts = dict[int, int](), dict[str, int]()
    for index, action in enumerate((*schedule.forward, *schedule.backward)):
        op = None if action.op is None else action.called_op(schedule.graph)
        if op is None or op.target != CONVOLUTION_BACKWARD:
            continue
        # convolution_backward(grad_output, input, weight, ..., groups, output_mask): the parts differ in input and mask
        gradient, weight_to_groups, output_mask = op.args[0], op.args[2:10], op.args[10]
        convolution = repr((op.gradient_of, gradient, weight_to_groups))
        computes_weight_gradient = output_mask[1]  # of (input, weight, bias)
        if computes_weight_gradient:
            weight_parts[convolution] = index
        elif convolution in weight_parts:
            complete[weight_parts.pop(convolution)] = index
    return complete
