"""The validator on random schedules and on random changes of them, beside an interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.graphs import any_order, random_graph
from planning.interpreter import Wrong, interpreted, with_action

from memplan.errors import ScheduleError
from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.validation.validate import validate


def drawn(seed: int) -> tuple[JointGraph, Schedule, OutsideMemory]:
    """A random graph and a random schedule of it, made by schedule()."""
    draw = random.Random(seed)
    graph = random_graph(seed, draw.randint(2, 9), hooks=draw.random() < 0.5, more_forms=draw.random() < 0.5)
    later = {value for op in graph.backward_ops for value in op.reads}
    graph = replace(graph, mutations=tuple((target, new) for target, new in graph.mutations if target not in later))
    if draw.random() < 0.5:
        ops = (
            replace(op, must_run_once=op.must_run_once or draw.random() < 0.3) if op.phase == "backward" else op
            for op in graph.ops
        )
        graph = replace(graph, ops=tuple(ops))
    changed = {target for target, _ in graph.mutations}
    again = sorted(v for v in recomputable_values(graph) if changed.isdisjoint(graph.maker[v].recompute_op.reads))
    forms = [form for form in graph.forms if changed.isdisjoint(form.fetch_operands)]
    choices = Choices(
        frozenset(value for value in again if draw.random() < 0.5),
        saved_forms=frozenset((form.lever, form.value) for form in forms if draw.random() < 0.6),
        gradients=GradientUse(draw.random() < 0.3, draw.random() < 0.3),
        in_place=draw.random() < 0.8,
        order=any_order(graph, draw) if draw.random() < 0.5 else (),
    )
    update_of = {v.id: 70 for v in graph.values if v.kind == "parameter"}
    return graph, schedule(graph, choices), OutsideMemory(1000, 500, update_of, loss_bytes=draw.choice([0, 800]))


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_schedule_makes_is_right_and_its_bytes_are_counted_alike(seed: int) -> None:
    graph, plan, outside_memory = drawn(seed)
    peak = interpreted(graph, plan, outside_memory)
    assert validate(graph, plan, None, outside_memory) == peak
    assert validate(graph, plan, peak, outside_memory) == peak
    with pytest.raises(ScheduleError, match="bytes live"):
        validate(graph, plan, peak - 1, outside_memory)


# Mutants


def mutant(graph: JointGraph, plan: Schedule, draw: random.Random) -> Schedule:
    """The schedule with one thing changed."""
    actions = [*plan.forward, *plan.backward]
    at, other = draw.randrange(len(actions)), draw.randrange(len(actions))
    coded = draw.choice([at for at, action in enumerate(actions) if action.kind != "run"])
    action, any_value = actions[at], draw.randrange(len(graph.values))
    some = draw.choice([*action.reads, *action.makes, any_value])
    changes: list[Callable[[], Schedule]] = [
        lambda: with_action(plan, at),
        lambda: with_action(plan, at, action, action),
        lambda: with_action(with_action(plan, at, actions[other]), other, action),
        lambda: with_action(plan, at, action, actions[other]),
        lambda: with_action(plan, at, replace(action, frees=(*action.frees, some))),
        lambda: with_action(plan, at, replace(action, frees=action.frees[1:])),
        lambda: with_action(plan, at, replace(action, makes=action.makes[1:])),
        lambda: with_action(plan, at, replace(action, makes=(*action.makes, any_value))),
        lambda: with_action(plan, at, replace(action, reads=action.reads[1:])),
        lambda: with_action(
            plan, at, replace(action, overwritten=some, frees=tuple(v for v in action.frees if v != some))
        ),
        lambda: with_action(plan, at, replace(action, overwritten=None)),
        lambda: with_action(plan, at, replace(action, recomputed=not action.recomputed)),
        lambda: with_action(plan, coded, replace(actions[coded], returns_copy=not actions[coded].returns_copy)),
        lambda: with_action(plan, at, replace(action, encoding=some)),
        lambda: with_action(plan, at, replace(action, encoding=None)),
        lambda: with_action(plan, coded, replace(actions[coded], value=any_value)),
        lambda: with_action(plan, coded, replace(actions[coded], source=any_value)),
        lambda: with_action(plan, at, replace(action, op=draw.randrange(len(graph.ops)))),
        lambda: with_action(plan, at, replace(action, kind=actions[other].kind)),
        lambda: replace(plan, saved=plan.saved[1:]),
    ]
    return draw.choice(changes)()


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_what_the_validator_lets_pass_does_no_harm(seed: int, change: int) -> None:
    graph, plan, outside_memory = drawn(seed)
    changed = mutant(graph, plan, random.Random(change))
    try:
        peak = validate(graph, changed, None, outside_memory)
    except ScheduleError:
        return
    assert interpreted(graph, changed, outside_memory) == peak


def test_most_changes_do_harm() -> None:
    """Else the test above would say nothing."""
    harm = 0
    for seed in range(400):
        graph, plan, outside_memory = drawn(seed)
        try:
            interpreted(graph, mutant(graph, plan, random.Random(seed)), outside_memory)
        except Wrong:
            harm += 1
    assert harm > 150
