"""A plan as a value: through JSON and back, and files that a stranger made or a person edited."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.graphs import kept, random_graph

from memplan import _json
from memplan._json import Unreadable
from memplan._text import format_seconds
from memplan.errors import BudgetError, FormatError, UsageError
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.decision import Decision, Scope
from memplan.planning.plan.plan import (
    Plan,
    check_fingerprint,
    check_settings,
    names_of,
    optimizer_name,
)
from memplan.planning.schedule.actions import Choices
from memplan.simulation.timeline import AllocatorEvent, Block, Segment, StepPeak, Timeline

MIB = 1 << 20
TIMELINE = Timeline(
    "cpu",
    ((1, 50 * MIB, 50 * MIB), (2, 252 * MIB, 252 * MIB), (3, 10, 10)),
    StepPeak(0, 1, 50 * MIB, 50 * MIB, 1, 1),
    (StepPeak(1, 3, 252 * MIB, 252 * MIB, 2, 2),),
    252 * MIB,
    252 * MIB,
    2,
    2,
)
DECISIONS = (
    Decision("keep", Scope("value", ("conv",)), "exact", 40, 0.0, "layer1", "net.py:3", "needed by conv's gradient"),
    Decision("recompute", Scope("value", ("relu",)), "exact", 70, 0.25, "layer1", "net.py:4", "takes 250 ms"),
    Decision("encode", Scope("value", ("mask",)), "exact", 7, 1e-4, details={"codec": "bits", "sizes": [1, [2, 3]]}),
)
PLAN = Plan(
    fingerprint="ab" * 32,
    torch="2.13.0",
    device="cpu",
    budget=260 * MIB,
    decisions=DECISIONS,
    choices=Choices(frozenset({5}), kept(encode={8})),
    names={"conv": 4, "relu": 5, "mask": 8},
    predicted=TIMELINE,
    eager_peak=381 * MIB,
    floor=188 * MIB,
    lower_bound=180 * MIB,
    seconds=0.2501,
    step_seconds=1.0,
    lower_bound_seconds=0.2,
    resident={"weight": 44 * MIB, "input": 9 * MIB},
    program="def forward(inputs):\n    return inputs  # net.py:3\n",
    notes=("no optimizer was given",),
    heuristics={"beam": 8, "local": True, "share": 0.5, "name": None},
)


def edited(change: Any, plan: Plan = PLAN) -> str:
    """The plan's JSON after a change of it as plain data."""
    plain = json.loads(plan.to_json())
    change(plain)
    return json.dumps(plain)


def test_through_json_and_back_it_is_the_same_value_and_the_same_text() -> None:
    text = PLAN.to_json()
    back = Plan.from_json(text)
    assert back == PLAN
    assert hash(back) == hash(PLAN)
    assert back.to_json() == text
    assert back.decisions[2].details["sizes"] == (1, (2, 3))
    assert back.as_python() == PLAN.program


def test_a_plan_of_before_a_field_was_added_is_read_still() -> None:
    plan = replace(PLAN, optimizer="AdamW", choices=replace(PLAN.choices, pieces=frozenset({3})))
    assert Plan.from_json(plan.to_json()) == plan
    since = ("pieces", "offload")
    older = edited(lambda plain: (plain.pop("optimizer"), [plain["choices"].pop(name) for name in since]), plan)
    assert Plan.from_json(older) == PLAN


def test_choices_are_names_that_a_person_can_edit() -> None:
    plain = json.loads(PLAN.to_json())
    assert plain["choices"]["recompute"] == ["relu"]
    assert plain["choices"]["encode"] == ["mask"]

    def keep_relu(plain: Any) -> None:
        plain["choices"]["recompute"] = ["conv"]

    assert Plan.from_json(edited(keep_relu)) == replace(PLAN, choices=Choices(frozenset({4}), kept(encode={8})))


def test_a_timeline_of_a_card_survives_too() -> None:
    log = (AllocatorEvent("segment_alloc", 1 << 40, 2 * MIB), AllocatorEvent("alloc", 1 << 40, 512, owner=3, tick=2))
    blocks = (Block(1 << 40, 512, 500, "active_allocated", 3), Block((1 << 40) + 512, 2 * MIB - 512, 0, "inactive"))
    segments = (Segment(1 << 40, 2 * MIB, 0, True, (0, 0), False, blocks),)
    plan = replace(PLAN, predicted=replace(TIMELINE, log=log, segments=segments))
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert isinstance(back.predicted.log[0], AllocatorEvent)


texts = st.text(max_size=8)
sizes = st.integers(0, (1 << 63) - 1)
times = st.floats(0, 1e6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(-1e300, 1e300) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
decisions = st.builds(
    Decision,
    st.sampled_from(["keep", "recompute", "encode", "in place", "update early", "accumulate"]),
    st.builds(
        Scope, st.sampled_from(["value", "segment", "parameter", "step"]), st.lists(texts, max_size=3).map(tuple)
    ),
    st.sampled_from(["exact", "reordered", "lossy"]),
    sizes,
    times,
    texts,
    st.none() | texts,
    texts,
    st.dictionaries(texts, values, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(decisions, max_size=4).map(tuple),
    st.dictionaries(texts, values, max_size=3),
    st.none() | times,
    st.sets(st.sampled_from([4, 5, 8])),
    st.booleans(),
    texts,
)
def test_any_plan_survives(
    decided: tuple[Decision, ...], heuristics: Any, step: float | None, recompute: set[int], early: bool, text: str
) -> None:
    plan = replace(
        PLAN, decisions=decided, heuristics=heuristics, step_seconds=step, program=text, notes=(text,),
        choices=Choices(frozenset(recompute), gradients=GradientUse(updates_early=early)),
    )  # fmt: skip
    assert Plan.from_json(plan.to_json()) == plan


def set_(*path: Any, to: Any) -> Any:
    def change(plain: Any) -> None:
        for key in path[:-1]:
            plain = plain[key]
        plain[path[-1]] = to

    return change


def without(*path: Any) -> Any:
    def change(plain: Any) -> None:
        for key in path[:-1]:
            plain = plain[key]
        del plain[path[-1]]

    return change


BAD: dict[str, tuple[Any, str]] = {
    "another version": (set_("schema", to=2), "it has schema version 2"),
    "no version": (without("schema"), "it has schema version None"),
    "another format": (set_("format", to="memplan.trace"), "it has the format 'memplan.trace'"),
    "a lever that is not known": (set_("decisions", 0, "lever", to="chunk"), "decisions[0].lever is 'chunk'"),
    "a lever that is no text": (set_("decisions", 0, "lever", to=["keep"]), "decisions[0].lever is ['keep']"),
    "a grade that is not known": (set_("decisions", 1, "grade", to="nearly"), "decisions[1].grade is 'nearly'"),
    "a kind of scope that is not known": (set_("decisions", 1, "scope", "kind", to="model"), "scope.kind is 'model'"),
    "bytes as text": (set_("decisions", 0, "bytes", to="40"), "decisions[0].bytes is '40', not int"),
    "bytes as truth": (set_("decisions", 0, "bytes", to=True), "decisions[0].bytes is True, not int"),
    "a fraction of a byte": (set_("budget", to=1.5), "budget is 1.5, not int"),
    "bytes below 0": (set_("budget", to=-1), "budget is -1, which is out of range"),
    "too many bytes": (set_("budget", to=1 << 63), "out of range"),
    "a number of too many digits": (set_("floor", to=10**4000), "a number of many digits"),
    "seconds without end": (set_("seconds", to=1e308 * 10), "Infinity is no number"),
    "seconds below 0": (set_("seconds", to=-0.5), "out of range"),
    "a name that is none": (set_("choices", "recompute", to=["rleu"]), "'rleu', which is none of its values"),
    "an id for a name": (set_("choices", "encode", to=[8]), "choices names 8"),
    "no choices": (without("choices"), "choices is no mapping"),
    "choices without a list": (without("choices", "encode"), "choices has no list 'encode'"),
    "two names of one value": (set_("names", "again", to=5), "two names to one value"),
    "names as a list": (set_("names", to=["conv"]), "names is ['conv'], not a mapping"),
    "a field that is missing": (without("floor"), "lacks 'floor'"),
    "a field that is not known": (set_("flour", to=1), "unknown 'flour'"),
    "a choice that is not known": (set_("choices", "chunk", to=[]), "choices has an unknown 'chunk'"),
    "a decision without bytes": (without("decisions", 0, "bytes"), "decisions[0] lacks 'bytes'"),
    "events that are pairs": (set_("predicted", "events", to=[[1, 2]]), "predicted.events[0] has 2 parts, not 3"),
    "notes as one text": (set_("notes", to="all"), "notes is 'all', not a list"),
    "details too deep": (set_("decisions", 2, "details", to={"a": json.loads("[" * 20 + "]" * 20)}), "deeper than"),
}


@pytest.mark.parametrize(("change", "why"), BAD.values(), ids=BAD)
def test_a_damaged_file_is_refused_with_the_place(change: Any, why: str) -> None:
    with pytest.raises(FormatError) as raised:
        Plan.from_json(edited(change), "plan.json")
    text = str(raised.value)
    assert why in text
    assert text.startswith("plan.json is no plan that can be used: ")
    assert "Expected JSON of the format memplan.plan, schema version 1, as memplan writes it. Plan again" in text
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"plan"', "[" * 100_000, "cos\nsystem\n(S'ls'\ntR."])
def test_what_is_no_plan_at_all_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        Plan.from_json(text)


def test_a_file_that_is_too_long_is_not_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_json, "LONGEST", 100)
    (tmp_path / "plan.json").write_text(" " * 101)
    with pytest.raises(FormatError, match="it has more than 100 bytes"):
        Plan.load(tmp_path / "plan.json")


def test_a_kernel_that_saves_time_is_loaded_again() -> None:
    decision = replace(PLAN.decisions[0], seconds=-0.0013)
    plan = replace(PLAN, decisions=(decision, *PLAN.decisions[1:]))
    assert Plan.from_json(plan.to_json()) == plan


def test_a_file_and_back(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    (tmp_path / "binary.json").write_bytes(b"\x80\x04\x95")
    with pytest.raises(FormatError, match=r"binary\.json is no plan"):
        Plan.load(tmp_path / "binary.json")
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")


def of(graph: JointGraph) -> Plan:
    return replace(PLAN, fingerprint=graph.fingerprint, choices=Choices(), names=names_of(graph))


def test_a_plan_for_another_model_is_refused_with_both_fingerprints() -> None:
    graph, other = random_graph(1), random_graph(2)
    check_fingerprint(of(graph), graph)
    with pytest.raises(UsageError) as raised:
        check_fingerprint(of(graph), other)
    text = str(raised.value)
    assert graph.fingerprint[:16] in text
    assert other.fingerprint[:16] in text
    assert "\n" not in text


def test_a_plan_that_calls_other_values_by_the_names_is_refused() -> None:
    graph = random_graph(1)
    names = names_of(graph)
    first, second = list(names)[:2]
    swapped = {**names, first: names[second], second: names[first]}
    with pytest.raises(UsageError, match="its values are numbered otherwise"):
        check_fingerprint(replace(of(graph), names=swapped), graph)


def check(plan: Plan, **asked: Any) -> None:
    given: dict[str, Any] = {
        "gradients": GradientUse(), "optimizer": None, "state": 0, "peak": 252 * MIB, "budget": 260 * MIB,
    }  # fmt: skip
    check_settings(plan, **{**given, **asked})


@pytest.mark.parametrize(("early", "held"), [(False, False), (True, False), (False, True)])
def test_a_plan_is_for_the_settings_that_it_was_made_for(early: bool, held: bool) -> None:
    plan = replace(PLAN, choices=Choices(gradients=GradientUse(early, held)))
    check(plan, gradients=GradientUse(early, held))
    if not held:
        with pytest.raises(UsageError, match=r"made for .*early=False.* asks for .*--early" if not early else
                           r"made for .*--early.* asks for .*early=False"):  # fmt: skip
            check(plan, gradients=GradientUse(not early, held))
    with pytest.raises(UsageError, match=r"held gradients \(accumulate="):
        check(plan, gradients=GradientUse(early, not held))


def test_a_plan_for_less_beside_the_step_says_what_it_was_made_for_and_what_it_needs() -> None:
    check(PLAN, optimizer=lambda parameters: torch.optim.AdamW(parameters), state=90 * MIB)  # there is room
    with pytest.raises(BudgetError) as raised:
        check(PLAN, optimizer=lambda parameters: torch.optim.AdamW(parameters), state=90 * MIB, peak=342 * MIB)
    assert str(raised.value) == (
        "The plan was made without an optimizer; with an optimizer and 90.0 MiB of state it needs 342.0 MiB. Expected "
        "no more than the budget of 260.0 MiB. Plan this step again, with this optimizer and this budget, or give the "
        "plan what it needs."
    )
    assert raised.value.smallest_budget == 342 * MIB
    sgd = replace(PLAN, optimizer="SGD")
    with pytest.raises(BudgetError, match=r"made with SGD and 0 B of state; with AdamW and 90\.0 MiB"):
        check(sgd, optimizer=torch.optim.AdamW, state=90 * MIB, peak=342 * MIB)
    with pytest.raises(BudgetError, match=r"The plan needs 252\.0 MiB\. Expected no more than the budget of 1 B"):
        check(sgd, optimizer=torch.optim.SGD, budget=1)


def test_what_an_optimizer_is_called() -> None:
    partial = functools.partial(torch.optim.Adam, lr=1e-3)
    made = (None, torch.optim.AdamW, partial, lambda p: torch.optim.SGD(p), SGDMaker())
    assert [optimizer_name(one) for one in made] == [None, "AdamW", "Adam", "an optimizer", "an optimizer"]


class SGDMaker:
    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters)


def test_names_are_those_of_what_the_forward_pass_makes() -> None:
    graph = random_graph(3)
    made = {v for v in graph.values if v.kind == "result" and v.op is not None and graph.ops[v.op].phase == "forward"}
    assert names_of(graph) == {v.name: v.id for v in made if not v.is_view}


def test_what_it_says_in_a_paragraph() -> None:
    assert PLAN.summary == (
        "A step on cpu in the budget of 260.0 MiB: predicted peak 381.0 MiB -> 252.0 MiB, 250 ms added (25.0 %), "
        "1 value recomputed, 1 encoded. No plan in this order of ops and budget adds less than 200 ms (gap 50 ms). The "
        "least budget found is 188.0 MiB; its order needs at least 180.0 MiB."
    )
    fused = replace(PLAN, choices=replace(PLAN.choices, fused=True))  # where others were not lowered
    assert fused.summary.endswith("The least looked at is 188.0 MiB, no less than 180.0 MiB can be.")
    assert PLAN.peak == 252 * MIB
    assert PLAN.gap == pytest.approx(0.0501)
    assert replace(PLAN, lower_bound_seconds=0.3).gap == 0
    fits = replace(PLAN, choices=Choices(), eager_peak=259 * MIB)
    assert fits.changes_nothing
    assert not PLAN.changes_nothing
    assert not replace(PLAN, choices=Choices()).changes_nothing  # only because results lie in place
    assert fits.summary.startswith("A step on cpu fits the budget of 260.0 MiB as it is: predicted peak 259.0 MiB.")
    assert fits.summary.endswith("The least budget found is 188.0 MiB; its order of ops needs at least 180.0 MiB.")
    assert "(25" not in replace(PLAN, step_seconds=None).summary


def test_a_plan_does_not_change() -> None:
    details = {"a": [1]}
    decision = Decision("keep", Scope("step"), "exact", 0, 0.0, details=details)
    details["a"].append(2)
    assert decision.details == {"a": (1,)}
    with pytest.raises(AttributeError):
        PLAN.budget = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AssertionError, match="has no name"):
        replace(PLAN, choices=Choices(frozenset({99})))
    with pytest.raises(Unreadable, match="details is"):
        Decision("keep", Scope("step"), "exact", 0, 0.0, details={"a": object()})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"), (1e-8, "under 0.001 ms"), (4e-6, "0.004 ms"), (0.0000996, "0.10 ms"), (0.00031, "0.31 ms"),
        (0.000999, "1.0 ms"), (0.00123, "1.2 ms"), (0.00999, "10 ms"), (0.0412, "41 ms"), (0.99949, "999 ms"),
        (0.9996, "1.0 s"), (2.5, "2.5 s"), (61, "61 s"),
    ],
)  # fmt: skip
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
