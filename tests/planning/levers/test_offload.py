"""Values in host memory: what the step waits against a simulation by events, peaks against sums by hand, and what a
search makes of fast and of slow links."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.graphs import Tape, kept, random_graph, residual, transformer
from planning.interpreter import interpreted, with_action
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.devices import Device, find
from memplan.errors import ScheduleError, UsageError
from memplan.planning.graph.joint_graph import JointGraph, SavedForm, recomputable_values
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import Situation
from memplan.planning.levers.offload import SMALLEST_OFFLOADED_BYTES, Offload
from memplan.planning.levers.registry import with_encodings_of
from memplan.planning.plan.decisions import decide
from memplan.planning.plan.plan import Plan
from memplan.planning.schedule.actions import Action, Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.host_copies import simulate_waits
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.lower_bound import Relaxation
from memplan.planning.search.search import Heuristics, Search, Solution
from memplan.planning.validation.validate import validate

CARD = find("rtx4090")


def linked(rate: float) -> Any:
    """The card with another link, in bytes a second."""
    return replace(CARD, link=round(rate))


def with_offloads(graph: JointGraph, card: Device) -> JointGraph:
    return with_encodings_of(graph, Situation(card=card), [Offload()])


# -- a step of four ops, by hand


def chain(copy_seconds: float = 1.5) -> JointGraph:
    """input -> a -> b -> c -> loss; each op takes a second forward and two backward, and saves its input."""
    tape = Tape()
    x, weight = tape.value("input", 64), tape.value("parameter", 64)
    a = tape.op("aten.mm.default", [x], 1000, 1.0, parameters=[weight], saves="i")
    b = tape.op("aten.sin.default", [a], 300, 1.0, saves="i")
    c = tape.op("aten.sin.default", [b], 300, 1.0, saves="i")
    tape.finish(tape.op("aten.sum.default", [c], 4, 1.0, saves="i"))
    for value in (a, b, c):
        tape.away(value, copy_seconds)
    return tape.graph()


X, WEIGHT, A, B, C, LOSS, TANGENT, G_C, G_B, G_A, G_WEIGHT = range(11)


def kinds(actions: Sequence[Action]) -> list[str]:
    """What each does, with the op or the value that it is about."""
    return [f"{one.kind} {one.value if one.op is None else one.op}" for one in actions]


def test_copies_run_beside_the_ops_and_memory_is_freed_when_they_are_done() -> None:
    made = schedule(chain(), Choices(saved_forms=kept(offload={A})))
    # a is made after 1 s, and its copy is done after 2.5 s: in the middle of op 2, which ends after 3.
    assert kinds(made.forward) == ["run 0", f"store {A}", "run 1", "run 2", f"stored {A}", "run 3"]
    # a is needed 4 s after the backward pass began (by op 6), and so fetched 2.5 s after: before op 5 begins, after 2.
    assert kinds(made.backward)[:6] == ["receive None", "run 4", f"fetch {A}", "run 5", f"fetched {A}", "run 6"]
    assert made.seconds == 0.0
    resident = 64 + 64
    found = levels(made)
    assert found.forward == (resident + 1000, resident + 1000, resident + 1300, resident + 1600, resident + 1600, 732)
    assert found.between_passes == resident + 300 + 300 + 4
    # loss, b and c, tangent and its gradient; then a beside b and two gradients
    assert found.backward[1] == resident + 4 + 600 + 4 + 300
    assert found.backward[2] == resident + 4 + 300 + 300 + 1000
    assert found.peak == interpreted(chain(), made, OutsideMemory()) == validate(chain(), made)


def test_a_queue_has_one_copy_at_a_time() -> None:
    made = schedule(chain(), Choices(saved_forms=kept(offload={A, B})))
    # a is copied from 1 to 2.5, b from 2.5 (not 2) to 4: at the end of op 3.
    assert kinds(made.forward)[-3:] == [f"stored {A}", "run 3", f"stored {B}"]
    # b is needed after 2, so it is fetched after 0.5: before op 4; a is needed after 4.
    assert kinds(made.backward)[1:5] == [f"fetch {B}", "run 4", f"fetch {A}", f"fetched {B}"]
    assert made.seconds == 0.0


def test_the_step_waits_where_a_pass_is_too_short() -> None:
    made = schedule(chain(5.0), Choices(saved_forms=kept(offload={A})))
    # Out: from 1 to 6, and the pass ends after 4. Back: from 0 to 5, and needed after 4.
    assert made.waits == {A: pytest.approx(2.0 + 1.0)}
    assert made.seconds == pytest.approx(3.0)
    assert kinds(made.forward)[-1] == f"stored {A}"
    assert kinds(made.backward)[1] == f"fetch {A}"
    graph = chain(5.0)
    (decision,) = (one for one in decide(graph, made) if one.lever == "offload")
    assert (decision.bytes, decision.seconds, decision.grade) == (1000, pytest.approx(3.0), "exact")
    assert decision.reason == (
        "copied to host memory in 5.0 s, freed after sum; fetched before sum; needed by sin; "
        "the step waits 3.0 s for it"
    )


def test_whoever_makes_another_value_again_fetches_what_it_needs() -> None:
    made = schedule(chain(), Choices(frozenset({B}), kept(offload={A})))
    # b is made again of a before op 5, which begins after 2 s: fetched after 0.5, and there before.
    assert kinds(made.backward)[1:6] == [f"fetch {A}", "run 4", f"fetched {A}", "run 1", "run 5"]
    assert made.seconds == 1.0


# -- by events


def waited(graph: JointGraph, plan: Schedule) -> float:
    """What a step takes beyond its ops: the longest way through everything that must wait for something else, found by
    going over all of it until nothing changes."""
    tasks: list[tuple[float, list[int]]] = []
    """Seconds, and the tasks that have to be done before: ops and copies alike."""
    last: dict[str, int] = {}
    begun: dict[tuple[str, int | None], int] = {}
    own = 0.0

    def add(queue: str, seconds: float, *after: int) -> int:
        tasks.append((seconds, [*after, *([last[queue]] if queue in last else [])]))
        last[queue] = len(tasks) - 1
        return last[queue]

    for action in (*plan.forward, *plan.backward):
        form = None if action.encoding is None else graph.form_by_encoded[action.encoding]
        if form is not None and form.copy_seconds is not None and action.kind in ("store", "fetch"):
            now = add("ops", 0.0)
            begun[action.kind, action.value] = add(action.kind, form.copy_seconds, now)
        elif action.kind in ("stored", "fetched"):
            add("ops", 0.0, begun[{"stored": "store", "fetched": "fetch"}[action.kind], action.value])
        else:
            op = None if action.op is None else graph.ops[action.op]
            again = op.cheaper_recompute if op is not None and action.recomputed else None
            seconds = 0.0 if op is None else (again or op).seconds
            seconds += form.store_seconds if form is not None and action.kind == "store" else 0.0
            seconds += form.fetch_seconds if form is not None and action.kind == "fetch" else 0.0
            own += seconds
            add("ops", seconds)
    ends, before = [0.0] * len(tasks), None
    while ends != before:
        before = list(ends)
        ends = [seconds + max((before[one] for one in after), default=0.0) for seconds, after in tasks]
    return ends[last["ops"]] - own


def no_time(graph: JointGraph) -> tuple[SavedForm, ...]:
    """The forms, with copies that take no time."""
    return tuple(replace(form, copy_seconds=0.0) if form.is_copied else form for form in graph.forms)


def drawn(seed: int) -> tuple[JointGraph, Schedule]:
    draw = random.Random(seed)
    graph = random_graph(seed, draw.randint(2, 12))
    choices = Choices(
        frozenset(value for value in sorted(recomputable_values(graph)) if draw.random() < 0.4),
        frozenset((one.lever, one.value) for one in graph.forms if draw.random() < 0.7),
    )
    return graph, schedule(graph, choices)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30))
def test_waits_are_those_of_a_simulation_by_events(seed: int) -> None:
    graph, made = drawn(seed)
    assert sum(made.waits.values()) == pytest.approx(waited(graph, made), abs=1e-12)
    use = {one.value: one.use_seconds for one in graph.forms_by("offload")}
    without = replace(made, graph=replace(graph, forms=no_time(graph)))
    assert made.seconds == pytest.approx(without.seconds + sum(made.waits.values()), abs=1e-12)
    assert without.seconds >= sum(use[value] for value in made.waits)


def test_random_steps_wait_now_and_then() -> None:
    """Else the test above would say little."""
    found = [sum(schedule.waits.values()) for _, schedule in map(drawn, range(150)) if schedule.waits]
    assert len(found) > 60
    assert 0.2 < sum(one > 0 for one in found) / len(found) < 0.8


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_link_of_no_time_is_never_waited_for_and_holds_nothing_longer(seed: int) -> None:
    graph, made = drawn(seed)
    free = replace(graph, forms=no_time(graph))
    made = schedule(free, made.choices)
    assert sum(made.waits.values()) == 0.0
    for passed in (made.forward, made.backward):
        for at, action in enumerate(passed):
            if action.kind == "fetch" and free.form_by_encoded[action.encoding or 0].is_copied:
                between = passed[at + 1 : next(k for k in range(at, len(passed)) if passed[k].kind == "fetched")]
                assert {one.kind for one in between} <= {"fetch"}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30))
def test_nobody_waits_because_memory_is_freed_early_or_taken_late(seed: int) -> None:
    """All waits of the forward pass at its end, and all copies of the backward pass begun with it: no less."""
    graph, made = drawn(seed)
    copies = {form.encoded for form in graph.forms if form.is_copied}
    late = sorted(made.forward, key=lambda one: one.kind == "stored")
    early = sorted(
        made.backward,
        key=lambda one: (
            0 if one.kind == "receive" else 1 if (one.kind, one.encoding in copies) == ("fetch", True) else 2
        ),
    )
    assert sum(simulate_waits(graph, (*late, *early)).values()) == pytest.approx(sum(made.waits.values()), abs=1e-12)


@pytest.mark.parametrize("copy_seconds", [0.5, 5.5, 20.0])
def test_the_bound_of_the_seconds_knows_what_copies_run_beside(copy_seconds: float) -> None:
    """Against all choices: b is random, so that it is kept or away; to make c again takes long, before b is needed."""
    tape = Tape()
    x, weight = tape.value("input", 64), tape.value("parameter", 64)
    a = tape.op("aten.mm.default", [x], 100, 0.1, parameters=[weight], saves="i")
    b = tape.op("aten.dropout.default", [a], 1000, 0.1, random=True)
    m = tape.op("aten.sin.default", [b], 100, 1.0, saves="i")
    c = tape.op("aten.mm.default", [x], 1000, 5.0, parameters=[weight], saves="i")
    d = tape.op("aten.mul.Tensor", [m, c], 100, 1.0, saves="i")
    loss = tape.op("aten.sum.default", [d], 4, 1.0, scratch=5000)  # beside which there is room for neither
    tape.finish(loss, ratio=0.1)
    tape.ops = [replace(op, scratch=0) if op.phase == "backward" else op for op in tape.ops]
    for value in (b, c):
        tape.away(value, copy_seconds, 0.01)
    graph = tape.graph()
    evaluator = Evaluator(graph)
    columns = (np.arange(2**evaluator.decision_count)[None, :] >> np.arange(evaluator.decision_count)[:, None]) & 1
    every = evaluator.evaluate(columns.astype(bool))
    relaxation, bounds = Relaxation(evaluator.flat), list[float]()
    for budget in sorted(set(every.peak.tolist())):
        best = float(every.seconds[every.peak <= budget].min())
        found = relaxation.seconds(budget)
        assert found is not None
        assert found.seconds <= best + 1e-9
        bounds.append(found.seconds)
    assert bounds[0] > 0


# -- mistakes


PLAN = schedule(chain(), Choices(saved_forms=kept(offload={A})))
STORE, STORED = 1, 4
FETCH, FETCHED = len(PLAN.forward) + 2, len(PLAN.forward) + 4
ALL = (*PLAN.forward, *PLAN.backward)
MISTAKES: dict[str, tuple[Schedule, str]] = {
    "read without being fetched": (
        with_action(with_action(PLAN, FETCHED), FETCH),
        f"v{A} is not there to be read|should have been freed",
    ),
    "read before it has arrived": (
        with_action(with_action(PLAN, FETCHED), FETCHED, replace(ALL[FETCHED + 1]), ALL[FETCHED]),
        "is not there yet",
    ),
    "fetched before it was stored": (
        replace(PLAN, forward=tuple(one for one in PLAN.forward if one.kind != "stored")),
        "is still being copied",
    ),
    "freed while it is copied": (with_action(PLAN, STORE, replace(ALL[STORE], frees=(A,))), "is being copied"),
    "freed while it is fetched": (with_action(PLAN, FETCH, replace(ALL[FETCH], frees=(A,))), "is being copied"),
    "written over while it is copied": (with_action(PLAN, 2, replace(ALL[2], overwritten=A)), "is being copied"),
    "waited for, but never copied": (with_action(PLAN, STORE), "no such copy"),
    "waited for as if it came back": (
        with_action(PLAN, STORED, replace(ALL[STORED], kind="fetched")),
        "no such copy",
    ),
    "waited for twice": (with_action(PLAN, STORED, replace(ALL[STORED], frees=()), ALL[STORED]), "no such copy"),
    "stored twice": (with_action(PLAN, STORE, ALL[STORE], ALL[STORE]), "is there already|is being copied"),
    "another value is fetched": (with_action(PLAN, FETCH, replace(ALL[FETCH], value=B)), "no such thing"),
    "a value that cannot be offloaded": (with_action(PLAN, STORE, replace(ALL[STORE], value=LOSS)), "no such"),
}


@pytest.mark.parametrize(("wrong", "why"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_refused(wrong: Schedule, why: str) -> None:
    with pytest.raises(ScheduleError, match=why) as raised:
        validate(PLAN.graph, wrong)
    assert str(raised.value).startswith("The schedule is wrong at ")


# -- what a search makes of it


@pytest.mark.parametrize("make", [transformer, *slow(residual)])
def test_a_fast_link_beats_making_everything_again_and_a_slow_one_is_left_alone(make: Any) -> None:
    graph = make()
    fast, slow = with_offloads(graph, linked(1e13)), with_offloads(graph, linked(1e6))
    assert len(fast.forms) > 10
    low = Search(graph).floor().peak
    budget = low + (levels(schedule(graph, Choices())).peak - low) // 4
    plain, quick, late = (Search(one).within(budget) for one in (graph, fast, slow))
    assert isinstance(plain, Solution)
    assert isinstance(quick, Solution)
    assert isinstance(late, Solution)
    assert quick.choices.saved_by("offload")
    assert quick.seconds < 0.5 * plain.seconds
    assert not late.choices.saved_by("offload")
    assert late.seconds <= plain.seconds * 1.02
    for one, found in ((fast, quick), (slow, late)):
        made = schedule(one, found.choices)
        assert validate(one, made, budget=budget) == found.peak
        assert made.seconds == pytest.approx(found.seconds)
    off = Search(fast, heuristics=Heuristics(offload=False)).within(budget)
    assert isinstance(off, Solution)
    assert not off.choices.saved_by("offload")


def test_what_may_be_offloaded() -> None:
    tape = Tape()
    x, mean = tape.value("input", 4 << 20), tape.value("buffer", 2 << 20)
    weight = tape.value("parameter", 64)
    big = tape.op("aten.mm.default", [x], 2 << 20, 1.0, parameters=[weight], saves="i")
    small = tape.op("aten.mm.default", [big], SMALLEST_OFFLOADED_BYTES - 4, 1.0, parameters=[weight], saves="io")
    (new,) = tape.raw("aten.lerp.Scalar", (mean, big), [2 << 20])
    held = tape.op("aten.sin.default", [small], 2 << 20, 1.0, saves="i")
    last = tape.op("aten.sin.default", [held], 2 << 20, 1.0, saves="i", held_values=(held,))
    tape.mutations.append((mean, new))
    tape.finish(tape.op("aten.sin.default", [last], 2 << 20, 1.0, saves="io"))
    graph = with_offloads(tape.graph(), CARD)
    assert {one.value for one in graph.forms} == {big, last}  # not small, held, written or returned
    for one in graph.forms:
        assert one.copy_seconds == pytest.approx((2 << 20) / (0.76 * 31.5e9), rel=1e-2)
        assert one.use_seconds == pytest.approx(2 * ((2 << 20) / 1008e9 + 5e-6), rel=1e-6)
        assert (graph.values[one.encoded].kind, graph.values[one.encoded].bytes) == ("host", 0)
    assert graph.fingerprint == tape.graph().fingerprint
    assert with_offloads(tape.graph(), replace(CARD, link=None)) == tape.graph()


# -- through the front door


class Mixer(nn.Sequential):
    """Products of large matrices, which take long to make again."""

    def __init__(self, width: int = 2048, layers: int = 4) -> None:
        super().__init__(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())])


def planned(**options: Any) -> Plan:
    x, y = memplan.spec("60000x2048"), memplan.spec("60000x2048")
    return memplan.plan(Mixer, x, targets=y, loss=F.mse_loss, **options)


def pinned(size: int) -> int:
    """Bytes of a block of pinned memory: the next power of two, as published for 129.5 MiB (256) and 5 GiB (8)."""
    block = 1
    while block < size:
        block *= 2
    return block


def test_a_plan_for_a_card_offloads_and_says_what_for() -> None:
    kept = planned(device="rtx4090", budget="64 GiB")
    assert kept.choices == Choices(pieces=kept.choices.pieces)
    budget = kept.floor + (kept.eager_peak - kept.floor) // 3
    plan, plain = (
        planned(device="rtx4090", budget=budget, heuristics=Heuristics(offload=offload)) for offload in (True, False)
    )
    assert plan.choices.saved_by("offload")
    assert not plain.choices.saved_by("offload")
    assert plan.peak <= budget
    assert plan.seconds < plain.seconds
    offloaded = [one.bytes for one in plan.decisions if one.lever == "offload"]
    assert plan.host_bytes == sum(map(pinned, offloaded)) > sum(offloaded) > 0
    assert f"{plan.count('offload')} offloaded (" in plan.summary
    assert Plan.from_json(plan.to_json()) == plan
    assert "transfers.store(" in plan.as_python()
    with pytest.raises(UsageError, match=r"keeps . values? in host memory while the step runs on rtx4090"):
        planned(budget=budget, plan=plan, costs="roofline")
    again = planned(device="rtx4090", budget=budget, plan=plan)
    assert again.choices.saved_by("offload") == plan.choices.saved_by("offload")


def test_on_the_cpu_and_with_fused_kernels_nothing_is_offloaded() -> None:
    kept = planned(budget="64 GiB", costs="roofline")
    plan = planned(budget=kept.floor, costs="roofline")
    assert not plan.choices.saved_by("offload")
    model, x = Mixer(16, 2), torch.randn(64, 16)
    fitted = memplan.fit(model, x, targets=x, loss=F.mse_loss, device="rtx4090", budget="16 MiB")
    assert not fitted.plan.choices.saved_by("offload")
    fitted.undo()
