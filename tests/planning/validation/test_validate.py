"""The validator: a schedule written by hand, and every mistake in it that we can think of."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning.graphs import EARLY, HELD, Tape
from planning.interpreter import interpreted, with_action

import memplan.planning.validation.validate as checked
from memplan.errors import ScheduleError
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import GradientUse
from memplan.planning.schedule.actions import Action, Choices
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.validation.validate import validate

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"


# One mistake at a time, on a step with one of everything.


def step() -> JointGraph:
    """input -> mm -> relu -> dropout, times the relu's result -> mm -> loss, with a running mean that is written."""
    tape = Tape()
    x, mean = tape.value("input", 64), tape.value("buffer", 64)
    first, second = tape.value("parameter", 64), tape.value("parameter", 64)
    h = tape.op("aten.mm.default", [x], 64, 1.0, parameters=[first], saves="i")
    r = tape.op("aten.relu.default", [h], 64, 0.5, saves="o", overwrites=(h,))
    (new,) = tape.raw("aten.lerp.Scalar", (mean, r), [64])
    d = tape.op("aten.native_dropout.default", [r], 64, 0.5, extra=[16], random=True)
    m = tape.op("aten.mul.Tensor", [r, d], 64, 0.5, saves="i")
    y = tape.op("aten.mm.default", [m], 64, 1.0, parameters=[second], saves="i", scratch=32)
    tape.mutations.append((mean, new))
    tape.finish(tape.op("aten.sum.default", [y], 4, 0.1))
    tape.bits(d + 1, whole=True)
    tape.bits(r, whole=False)
    return tape.graph()


GRAPH = step()
X, MEAN, W1, W2, H, R, NEW, D, MASK, M, Y, LOSS, TANGENT, G_Y, G_M, G_W2, G_R, G_D, G_R2, G_SUM, G_H, G_W1 = range(22)
BITS, SIGNS = 22, 23


def run(op: int, reads: tuple[int, ...], makes: tuple[int, ...], frees: tuple[int, ...] = (), **more: Any) -> Action:
    return Action("run", op=op, reads=reads, makes=makes, frees=frees, **more)


FORWARD = (
    run(0, (X, W1), (H,)),
    run(1, (H,), (R,), overwritten=H),
    run(2, (MEAN, R), (NEW,)),
    Action("write", value=MEAN, source=NEW, reads=(NEW,), frees=(NEW,)),
    run(3, (R,), (D, MASK)),
    Action("store", value=MASK, encoding=BITS, reads=(MASK,), makes=(BITS,), frees=(MASK,)),
    run(4, (R, D), (M,)),
    Action("store", value=R, encoding=SIGNS, reads=(R,), makes=(SIGNS,), frees=(R,)),
    run(5, (M, W2), (Y,), (M,)),
    run(6, (Y,), (LOSS,), (Y,)),
)
BACKWARD = (
    Action("receive", makes=(TANGENT,)),
    run(7, (TANGENT,), (G_Y,), (TANGENT,)),
    run(0, (X, W1), (H,), recomputed=True),
    run(1, (H,), (R,), recomputed=True, overwritten=H),
    run(4, (R, D), (M,), recomputed=True),
    run(8, (G_Y, M, W2), (G_M, G_W2), (M, G_Y)),
    Action("give", value=W2, source=G_W2, reads=(G_W2,)),
    run(9, (G_M, R, D), (G_R, G_D), (R, D), overwritten=G_M),
    Action("fetch", value=MASK, encoding=BITS, reads=(BITS,), makes=(MASK,), frees=(BITS,)),
    run(10, (G_D, MASK), (G_R2,), (MASK,), overwritten=G_D),
    run(11, (G_R, G_R2), (G_SUM,), (G_R2,), overwritten=G_R),
    run(12, (G_SUM, SIGNS), (G_H,), (SIGNS,), overwritten=G_SUM, encoding=SIGNS),
    run(13, (G_H, X, W1), (G_W1,), overwritten=G_H),
    Action("give", value=W1, source=G_W1, reads=(G_W1,)),
)
PLAN = Schedule(GRAPH, Choices(), FORWARD, BACKWARD, (D, BITS, SIGNS))
SIX_KINDS = {"run", "store", "fetch", "write", "receive", "give"}


def test_a_schedule_written_by_hand_passes_with_the_peak_added_up_by_hand() -> None:
    resident = 4 * 64
    dropped_result, bits, loss, gradient, relu, product = 64, 2 + 2, 4, 64, 64, 64
    made, scratch = 2 * 64, 32
    peak = resident + dropped_result + bits + loss + gradient + relu + product + made + scratch
    assert validate(GRAPH, PLAN, peak) == interpreted(GRAPH, PLAN, OutsideMemory()) == peak
    with pytest.raises(ScheduleError, match=r"backward action 5 \(run 8\): 680 bytes live, the budget is 679"):
        validate(GRAPH, PLAN, peak - 1)
    assert {action.kind for action in (*FORWARD, *BACKWARD)} == SIX_KINDS


def test_what_has_an_effect_and_no_result_runs_once() -> None:
    """A check of a matrix makes nothing, and is no view."""
    tape = Tape()
    x, w = tape.value("input", 64), tape.value("parameter", 64)
    h = tape.op("aten.mm.default", [x], 64, 1.0, parameters=[w], saves="i")
    tape.raw("aten._linalg_check_errors.default", (h,), (), must_run_once=True)
    tape.finish(tape.op("aten.sum.default", [h], 4, 0.1))
    graph = tape.graph()
    plan = schedule(graph, Choices())
    validate(graph, plan)
    (at,) = (at for at, action in enumerate(plan.forward) if action.op == 1)
    without = replace(plan, forward=(*plan.forward[:at], *plan.forward[at + 1 :]))
    with pytest.raises(ScheduleError):
        validate(graph, without)


def test_what_lives_beside_the_graph_counts() -> None:
    def peak(*, early: bool = False, held: bool = False) -> int:
        plan = replace(PLAN, choices=Choices(gradients=GradientUse(early, held)))
        if early or held:
            for at, action in enumerate(BACKWARD):
                if action.kind == "give" and action.source is not None:
                    plan = change(plan, at + 10, frees=(action.source,))
        return validate(GRAPH, plan, None, OutsideMemory(10_000, 300, {W1: 2000, W2: 100}))

    at_the_end = 4 * 64 + 4 + 2 * 64
    assert peak() == 10_000 + max(680, at_the_end + 300)
    last_give = 4 * 64 + 4 + 64
    assert peak(early=True) == 10_000 + last_give + 2000
    assert peak(held=True) == 10_000 + 2 * 64 + 680


@pytest.mark.parametrize(
    ("field", "of", "live"),
    [
        ("scratch", 2, 64 + 64),  # the ReLU's result, the new mean
        ("discarded", 2, 64 + 64),
        ("store_scratch", MASK, 64 + 64 + 16 + 2),  # the ReLU's result, the dropout's, its mask, bits
        ("fetch_scratch", MASK, 2 + 2 + 16 + 4 + 64 + 2 * 64),  # bits, signs, mask, loss, given, gradients
        ("direct_reader_scratch", R, 2 + 4 + 64 + 64),  # signs, loss, given, gradient
    ],
)
def test_what_an_action_holds_for_a_moment_counts(field: str, of: int, live: int) -> None:
    huge: dict[str, Any] = {field: 100_000}
    if field in ("scratch", "discarded"):
        graph = replace(GRAPH, ops=tuple(replace(op, **huge) if op.index == of else op for op in GRAPH.ops))
    else:
        graph = replace(GRAPH, forms=tuple(replace(e, **huge) if e.value == of else e for e in GRAPH.forms))
    assert validate(graph, replace(PLAN, graph=graph)) == 4 * 64 + live + 100_000


def change(plan: Schedule, at: int, **facts: Any) -> Schedule:
    return with_action(plan, at, replace((*plan.forward, *plan.backward)[at], **facts))


def inserted(at: int, action: Action) -> Schedule:
    """Behind another one."""
    return with_action(PLAN, at, (*FORWARD, *BACKWARD)[at], action)


def swapped(first: int, second: int) -> Schedule:
    actions = (*FORWARD, *BACKWARD)
    return with_action(with_action(PLAN, first, actions[second]), second, actions[first])


MISTAKES: dict[str, tuple[Schedule, str]] = {
    "a free is dropped": (change(PLAN, 17, frees=(D,)), "end of the backward pass: v5 should have been freed"),
    "a free is dropped in the forward pass": (change(PLAN, 9, frees=()), "v7, v10, v22, v23 live, not what is saved"),
    "what is saved is not said": (replace(PLAN, saved=(D, BITS)), "not what is saved"),
    "freed before it is read": (change(PLAN, 15, frees=(M, G_Y, R)), "v5 is not there to be read"),
    "freed before it is used in the other pass": (change(PLAN, 6, frees=(D,)), "not what is saved"),
    "freed twice": (change(PLAN, 22, frees=(D,)), "v7 is not there to be freed"),
    "freed and written over": (change(PLAN, 17, frees=(R, D, G_M)), "v14 is not there to be freed"),
    "a parameter is freed": (change(PLAN, 23, frees=(W1,)), "v2 is not there to be freed, or has to stay"),
    "the output is freed": (change(PLAN, 23, frees=(LOSS,)), "has to stay"),
    "a given gradient is freed": (change(PLAN, 23, frees=(G_W2,)), "has to stay"),
    "an op is left out": (with_action(PLAN, 2), "v6 is not there"),
    "an op without consequence is left out": (with_action(PLAN, 9), "not what is saved"),
    "an op runs for the first time twice": (change(PLAN, 12, recomputed=False), "runs twice"),
    "a backward op runs in the forward pass": (
        inserted(9, replace(BACKWARD[1], reads=(), frees=())),
        "in another pass",
    ),
    "two ops are swapped": (swapped(19, 20), "v18 is not there"),
    "independent ops are swapped": (
        with_action(with_action(PLAN, 4), 1, FORWARD[1], FORWARD[4]),
        "aten.lerp.Scalar is out of its order",
    ),
    "made again in the forward pass": (inserted(1, replace(FORWARD[0], recomputed=True)), "must not run again here"),
    "a random op is run again": (
        inserted(14, run(3, (R,), (MASK,), recomputed=True)),
        "aten.native_dropout.default must not run again",
    ),
    "made again while it is there": (
        replace(change(PLAN, 7, frees=()), saved=(D, BITS, SIGNS, R)),
        "v5 is there already",
    ),
    "made again a second time": (inserted(17, replace(BACKWARD[2], frees=(H,))), "aten.mm.default must not run again"),
    "made again of what has changed": (
        inserted(13, run(2, (MEAN, R), (NEW,), (NEW,), recomputed=True)),
        "v1 has changed since",
    ),
    "read after the write": (swapped(2, 3), "v6 is not there"),
    "written too early": (
        with_action(with_action(PLAN, 3), 2, FORWARD[2], FORWARD[3], replace(FORWARD[2], makes=())),
        "runs twice",
    ),
    "written twice": (inserted(2, replace(FORWARD[3], frees=())), "not this, or not twice"),
    "never written": (change(with_action(PLAN, 3), 2, frees=(NEW,)), "gradient of v1 is missing"),
    "written from another value": (change(PLAN, 3, source=R, reads=(R,)), "not this"),
    "written in the backward pass": (
        replace(PLAN, forward=(*FORWARD[:3], *FORWARD[4:]), backward=(*BACKWARD, FORWARD[3]), saved=(NEW, *PLAN.saved)),
        "no such thing",
    ),
    "over what lives": (change(PLAN, 4, overwritten=R), "must not write over v5"),
    "over a parameter": (change(PLAN, 0, overwritten=W1), "must not write over v2"),
    "over what is still read": (change(PLAN, 14, overwritten=R), "must not write over v5"),
    "over what is not there": (change(PLAN, 19, reads=(G_D, MASK), overwritten=G_M), "must not write over v14"),
    "over a value for a second result": (change(PLAN, 17, makes=(G_D, G_R)), "must not write over|otherwise"),
    "another value is decoded": (change(PLAN, 18, value=R), "no such thing|otherwise"),
    "decoded out of other bits": (change(PLAN, 18, reads=(SIGNS,), frees=()), "otherwise"),
    "signs decoded": (
        inserted(16, Action("fetch", value=R, encoding=SIGNS, reads=(SIGNS,), makes=(R,))),
        "no such thing",
    ),
    "decoded twice": (inserted(18, BACKWARD[8]), "v22 is not there to be read"),
    "decoded where it is there": (inserted(18, replace(BACKWARD[8], reads=(BITS,))), "not there|already"),
    "never encoded": (change(with_action(PLAN, 5), 4, frees=(MASK,)), "not what is saved"),
    "encoded what is gone": (change(PLAN, 4, frees=(MASK,)), "v8 is not there to be read"),
    "signs for an op that wants the value": (
        change(PLAN, 17, reads=(G_M, SIGNS, D), encoding=SIGNS),
        "cannot read a kept form",
    ),
    "the value for an op that wants signs": (change(PLAN, 21, encoding=None), "otherwise"),
    "given twice": (inserted(16, BACKWARD[6]), "or it is done"),
    "never given": (with_action(PLAN, 23), "gradient of v2 is missing"),
    "another's gradient": (change(PLAN, 23, value=W2), "no such thing"),
    "half of a gradient": (change(PLAN, 23, source=G_H, reads=(G_H,)), "no such thing"),
    "given before it is made": (swapped(22, 23), "v21 is not there"),
    "given in the forward pass": (inserted(9, BACKWARD[6]), "no such thing"),
    "another value is read": (change(PLAN, 17, reads=(G_W2, R, D)), "otherwise"),
    "no tangents": (with_action(PLAN, 10), "tangents come first"),
    "tangents twice": (inserted(11, BACKWARD[0]), "tangents come first"),
    "tangents made by an op": (change(PLAN, 10, makes=()), "otherwise"),
    "an op that reads more than it says": (change(PLAN, 8, reads=(M,)), "otherwise"),
    "an encoding that writes over memory": (change(PLAN, 5, overwritten=MASK, frees=()), "only ops do that"),
    "an op that makes what it cannot": (change(PLAN, 8, makes=(Y, H)), "makes no v4, v10"),
    "one result twice": (change(PLAN, 4, makes=(D, MASK, MASK)), "otherwise"),
    "nothing at all": (change(PLAN, 0, op=None), "no such thing"),
}


@pytest.mark.parametrize(("wrong", "why"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_refused_for_its_reason(wrong: Schedule, why: str) -> None:
    with pytest.raises(ScheduleError, match=why) as raised:
        validate(GRAPH, wrong)
    assert str(raised.value).startswith("The schedule is wrong at ")
    assert "\n" not in str(raised.value)


# What the step above has none of.


def tiny(*, stride: tuple[int, ...] = (1,), overwrites: bool = False) -> tuple[JointGraph, Schedule]:
    """A parameter's gradient is made, then what reads the parameter: values x, w, h, tangent, its gradient, another."""
    tape = Tape()
    x, w = tape.value("input", 64), tape.value("parameter", 64)
    (h,) = tape.raw("aten.mm.default", (x, w), [64])
    tangent = tape.value("tangent", 64)
    (gradient,) = tape.raw("aten.mm.default", (tangent, x), [64], phase="backward")
    over = (gradient,) if overwrites else ()
    (last,) = tape.raw("aten.mm.default", (tangent, w, *over), [64], phase="backward", overwrites=over)
    tape.values[gradient] = replace(tape.values[gradient], stride=stride)
    tape.outputs.append(h)
    tape.gradients += [(w, gradient), (x, last)]
    backward = (
        Action("receive", makes=(tangent,)),
        run(1, (tangent, x), (gradient,)),
        run(2, (tangent, w, *over), (last,), (tangent,), overwritten=gradient if overwrites else None),
        Action("give", value=x, source=last, reads=(last,)),
        Action("give", value=w, source=gradient, reads=(gradient,)),
    )
    graph = tape.graph()
    return graph, Schedule(graph, Choices(), (run(0, (x, w), (h,)),), backward, ())


def test_a_parameter_is_updated_early_only_after_its_last_read() -> None:
    graph, plan = tiny()
    receive, first, second, given, last = plan.backward
    early = replace(
        plan,
        choices=Choices(gradients=EARLY),
        backward=(*plan.backward[:4], replace(last, frees=(4,))),
    )
    assert validate(graph, early) == interpreted(graph, early, OutsideMemory())
    too_early = replace(early, backward=(receive, first, replace(last, frees=(4,)), second, given))
    with pytest.raises(ScheduleError, match="v1 has changed since"):
        validate(graph, too_early)
    validate(graph, replace(plan, backward=(receive, first, last, second, given)))


def test_a_parameter_with_hooks_gets_its_gradient_only_after_its_last_read() -> None:
    graph, plan = tiny()
    receive, first, second, given, last = plan.backward
    before = replace(plan, backward=(receive, first, last, second, given))
    validate(graph, before)
    hooked = replace(graph, values=tuple(replace(v, hooked=v.kind == "parameter") for v in graph.values))
    assert validate(hooked, plan) == interpreted(hooked, plan, OutsideMemory())
    with pytest.raises(ScheduleError, match="v1 has changed since"):
        validate(hooked, before)
    made = [action.kind for action in schedule(hooked, Choices()).backward]
    assert made == ["receive", "run", "run", "give", "give"]
    assert [action.kind for action in schedule(graph, Choices()).backward] == ["receive", "run", "give", "run", "give"]


def test_a_gradient_does_not_change_after_it_was_given() -> None:
    graph, plan = tiny(overwrites=True)
    receive, first, second, given, last = plan.backward
    with pytest.raises(ScheduleError, match="v4 is not there to be read"):
        validate(graph, plan)
    with pytest.raises(ScheduleError, match="v4 has changed since"):
        validate(graph, replace(plan, backward=(receive, first, last, second, given)))
    copied = replace(plan, backward=(receive, first, replace(last, returns_copy=True), second, given))
    assert validate(graph, copied) == interpreted(graph, copied, OutsideMemory())


@pytest.mark.parametrize("what", ["of another layout", "of two", "the tangent", "the output", "an input"])
def test_a_gradient_whose_memory_is_not_its_own_is_copied(what: str) -> None:
    graph, plan = tiny(stride=(2,) if what == "of another layout" else (1,))
    base = {"of two": 5, "the tangent": 3, "the output": 2, "an input": 0}.get(what, 4)
    graph = replace(graph, gradients=((1, base), (0, 5)))
    frees = {4: (), 3: (3,)}.get(base, ())
    give = replace(plan.backward[4], source=base, reads=(base,), frees=frees)
    second = replace(plan.backward[2], frees=() if base == 3 else (3,))
    first = replace(plan.backward[1], frees=() if base == 4 else (4,))

    def changed(copies: bool, choices: Choices) -> Schedule:
        free = () if not copies and not choices.gradients.accumulates else (base,) if base == 4 else frees
        give_other = replace(plan.backward[3], returns_copy=what == "of two")
        other = replace(give, returns_copy=copies, frees=(*free, *((5,) if what == "of two" else ())))
        backward = (plan.backward[0], first, second, give_other, other)
        return replace(plan, choices=choices, backward=backward, saved=(2,) if base == 2 else ())

    validate(graph, changed(True, Choices()))
    with pytest.raises(ScheduleError, match="must be copied"):
        validate(graph, changed(False, Choices()))
    validate(graph, changed(False, Choices(gradients=HELD)))  # it is added to the held one, and read for that only


def batch_norm(*, training: bool) -> tuple[JointGraph, Schedule]:
    """x -> batch norm, whose statistics are written, and which runs again: values x, mean, variance, five results."""
    values = [Value(0, "x", "input", 0, 64, (16,), (1,), "float32")]
    values += [Value(i, f"v{i}", "buffer", i, 8, (2,), (1,), "float32") for i in (1, 2)]
    values += [Value(i, f"v{i}", "result", i, 8, (2,), (1,), "float32", 0) for i in (3, 4, 5, 6, 7)]
    values += [
        Value(8, "t", "tangent", 8, 8, (2,), (1,), "float32"),
        Value(9, "v9", "result", 9, 64, (16,), (1,), "f", 1),
    ]
    made = (3, 4, 5, 6, 7)
    args = (Ref(0), None, None, Ref(1), Ref(2), training, 0.1, 1e-5)
    forward = GraphOp(0, BATCH_NORM, args, {}, "forward", made, True, (0, 1, 2), made)
    backward = GraphOp(1, "aten.mul.Tensor", (), {}, "backward", (9,), False, (8, 3), (9,))
    graph = JointGraph(tuple(values), (forward, backward), (), ((0, 9),), ((1, 6), (2, 7)))
    first = (
        run(0, (0, 1, 2), made, (3, 4, 5)),
        Action("write", value=1, source=6, reads=(6,), frees=(6,)),
        Action("write", value=2, source=7, reads=(7,), frees=(7,)),
    )
    second = (
        Action("receive", makes=(8,)),
        run(0, (0, 1, 2), (3,), recomputed=True),
        run(1, (8, 3), (9,), (8, 3)),
        Action("give", value=0, source=9, reads=(9,)),
    )
    return graph, Schedule(graph, Choices(), first, second, ())


def test_only_a_training_batch_norm_is_made_again_after_its_statistics_were_written() -> None:
    graph, plan = batch_norm(training=True)
    validate(graph, plan)
    statistics = change(plan, 4, makes=(3, 6), frees=(6,))
    with pytest.raises(ScheduleError, match="v1, v2 has changed since"):
        validate(graph, statistics)
    graph, plan = batch_norm(training=False)
    with pytest.raises(ScheduleError, match="v1, v2 has changed since"):
        validate(graph, replace(plan, graph=graph))


def test_memory_is_taken_over_by_the_first_result_of_the_same_size_only() -> None:
    smaller = tuple(replace(value, bytes=60) if value.id == H else value for value in GRAPH.values)
    with pytest.raises(ScheduleError, match=r"run 1\): aten\.relu\.default must not write over v4"):
        validate(replace(GRAPH, values=smaller), PLAN)
    with pytest.raises(ScheduleError, match=r"run 9\): aten\.mul\.Tensor_backward must not write over v14"):
        validate(GRAPH, change(PLAN, 17, makes=(G_D,)))


def test_an_op_with_an_effect_runs_once_whoever_reads_its_result() -> None:
    ops = tuple(replace(op, must_run_once=op.index == 0) for op in GRAPH.ops)
    with pytest.raises(ScheduleError, match=r"run 0\): aten\.mm\.default must not run again"):
        validate(replace(GRAPH, ops=ops), PLAN)
    graph, plan = tiny()
    effect = GraphOp(3, "aten.print.default", (), {}, "backward", (), False, (1,), (), discarded=4, must_run_once=True)
    graph = replace(graph, ops=(*graph.ops, effect))
    with pytest.raises(ScheduleError, match="not all ran once"):
        validate(graph, plan)
    validate(graph, replace(plan, backward=(*plan.backward[:3], run(3, (1,), ()), *plan.backward[3:])))


def test_an_op_reads_the_encoded_form_only_of_what_it_reads() -> None:
    forms = (GRAPH.forms[0], replace(GRAPH.forms[1], direct_readers=(12, 13)))
    with pytest.raises(ScheduleError, match="cannot read a kept form"):
        validate(replace(GRAPH, forms=forms), change(PLAN, 22, encoding=SIGNS))


def test_an_output_that_is_read_in_the_backward_pass_is_saved() -> None:
    graph, plan = tiny()
    ops = (*graph.ops[:2], replace(graph.ops[2], reads=(3, 1, 2)))
    graph = replace(graph, ops=ops)
    plan = change(plan, 3, reads=(3, 1, 2))
    with pytest.raises(ScheduleError, match="v2 has changed since, or is not saved"):
        validate(graph, plan)
    validate(graph, replace(plan, saved=(2,)))


def test_it_shares_nothing_but_the_words() -> None:
    text = Path(checked.__file__).read_text(encoding="utf-8")
    imported = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memplan")
        for alias in node.names
    }
    room = "memplan.planning"
    names = {f"{room}.graph.joint_graph": ("RESIDENT", "GraphOp", "JointGraph", "Ref")}
    names |= {f"{room}.graph.resident": ("OutsideMemory",), f"{room}.schedule.actions": ("Action",)}
    names |= {f"{room}.schedule.scheduler": ("Schedule",), "memplan.errors": ("ScheduleError",)}
    names |= {f"{room}.validation.host_copies": ("ENDS", "check_copies")}
    assert imported == {(module, name) for module, those in names.items() for name in those}
