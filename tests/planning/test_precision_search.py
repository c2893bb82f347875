"""Which precision is taken: the fastest that fits, the one that loses less where they are as fast."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from environment import needs_avx512, slow
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan import _torch
from memplan.devices import find
from memplan.errors import BudgetError, RecordingError
from memplan.planning import precision_search, study
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import with_loss
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.op_schema import CHUNKED
from memplan.planning.graph.precision import EXACT, UNSCALED, Precision, Save
from memplan.planning.levers.chunk_convolutions import CONVOLUTION
from memplan.planning.plan.precision_report import blocks
from memplan.planning.planner import Planner
from memplan.planning.search.search import Heuristics
from memplan.planning.settings import Allow, Engine, Settings

ENGINES = get_args(Engine)
QUICK = Heuristics(shakes=1, rounds=8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *parts, nn.Flatten(), nn.Linear(8 * 256, 5))


def given() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 3, 16, 16), torch.randint(5, (8,))


def planned(budget: int | str, **options: Any) -> memplan.Plan:
    x, y = given()
    options = {"costs": "roofline", "heuristics": QUICK, **options}
    return memplan.plan(net(), x, targets=y, loss=F.cross_entropy, budget=budget, **options)


@pytest.mark.slow
@needs_avx512
def test_the_fastest_of_all_kinds_is_taken() -> None:
    x, _ = given()
    call, model = call_of((x,), {}), net()
    exact = Planner(model).planned(call, Settings(costs="roofline"), 1 << 30).plan
    for share in (0.9, 0.6, 0.5):
        budget = int(share * exact.peak)
        settings = Settings(costs="roofline", heuristics=QUICK, allow="lossy")
        took = Planner(model).planned(call, settings, budget).plan
        times = list[float]()
        for precision in (EXACT, *(Precision(c, s) for c in ("", "bfloat16") for s in ("exact", "bfloat16", "int8"))):
            try:  # a planner of its own: nothing is shared
                one = Planner(model).planned(call, replace(settings, precision=precision), budget).plan
            except BudgetError:
                continue
            assert one.total_seconds is not None
            times.append(one.total_seconds)
        assert took.total_seconds is not None
        assert took.peak <= budget
        assert took.total_seconds <= min(times) / precision_search.WORTH_LOSING * 1.001


def test_what_loses_less_is_taken_where_it_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_search, "lower_precision", lambda card, device: "")
    plan = planned("1GB", allow="lossy")
    assert (plan.precision, plan.grade) == (EXACT, "exact")


@pytest.mark.slow
@needs_avx512
def test_what_an_exact_plan_cannot_do_is_offered_and_done() -> None:
    planner, call = Planner(with_loss(net(), F.cross_entropy)), call_of(given(), {})

    def within(budget: int, allow: Allow = "exact") -> memplan.Plan:
        settings = Settings(costs="roofline", heuristics=QUICK, allow=allow)
        return planner.planned(call, settings, budget, key=0).plan  # what is captured once is there for all budgets

    floor = within(1 << 30).floor
    with pytest.raises(BudgetError) as caught:
        within(int(0.8 * floor))
    said = str(caught.value)
    assert "allow='lossy' (--allow lossy) meets it by computing in bfloat16" in said
    assert "a step predicted" in said
    plan = within(int(0.8 * floor), allow="lossy")
    assert plan.precision.compute == "bfloat16"
    assert plan.peak <= 0.8 * floor < floor
    assert caught.value.lower_by[-1].bytes == plan.peak
    with pytest.raises(BudgetError) as caught:
        within(1)
    assert "lossy" not in str(caught.value)
    with pytest.raises(BudgetError) as caught:
        within(int(0.2 * floor), allow="lossy")
    assert floor > caught.value.smallest_budget > 0.2 * floor
    assert within(caught.value.smallest_budget, allow="lossy").peak <= caught.value.smallest_budget


def least(model: nn.Module, x: torch.Tensor, engine: Engine) -> int:
    with pytest.raises(BudgetError) as caught:
        memplan.plan(model, x, budget=1, engine=engine, costs="roofline")
    assert "engine='graph'" not in str(caught.value)
    return caught.value.smallest_budget


@pytest.mark.slow
@pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here")
def test_what_fused_kernels_cannot_do_and_single_ops_can_is_offered_and_done() -> None:
    """The fused gradient of a softmax has a buffer for the sum of each row."""
    model, x = nn.Sequential(nn.Linear(64, 512), nn.Softmax(-1), nn.Linear(512, 64)), torch.randn(1024, 64)
    single, fused = least(model, x, "graph"), least(model, x, "inductor")
    assert single < fused
    with pytest.raises(BudgetError) as caught:
        memplan.plan(model, x, budget=fused - 1, engine="inductor", costs="roofline")
    assert "or engine='graph' (--engine graph) meets it, op by op, " in str(caught.value)
    plan = memplan.plan(model, x, budget=fused - 1, costs="roofline")
    assert single <= plan.peak < fused
    assert plan.peak in [way.bytes for way in caught.value.lower_by]


@pytest.mark.slow
def test_a_card_without_bfloat16_computes_in_float16_and_says_what_that_needs() -> None:
    assert precision_search.lower_precision(find("t4"), "cpu") == "float16"
    assert precision_search.lower_precision(find("h100"), "cpu") == "bfloat16"
    assert precision_search.lower_precision(None, "cpu") == "bfloat16"
    torch.manual_seed(0)
    # no convolutions: on processors without float16 they take more in it
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model, x, y = nn.Sequential(*layers), torch.randn(512, 64), torch.randint(64, (512,))
    options: dict[str, Any] = {"targets": y, "loss": F.cross_entropy, "costs": "roofline", "heuristics": QUICK}
    exact = memplan.plan(model, x, budget="1GB", **options)
    plan = memplan.plan(model, x, budget=int(0.7 * exact.floor), allow="lossy", device="t4", **options)
    assert plan.precision.compute == "float16"
    assert UNSCALED in plan.notes


def test_under_autocast_only_what_is_saved_is_left_to_lose() -> None:
    settings = Settings(allow="lossy")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {one.compute for one in precision_search.allowed_precisions(net(), settings)} == {""}
    assert next(precision_search.allowed_precisions(net(), settings)) == EXACT
    assert EXACT not in precision_search.allowed_precisions(
        net(), Settings(allow="lossy", excluded_precisions=(EXACT,))
    )


@pytest.mark.slow
def test_blocks_that_are_slower_in_fewer_bits_compute_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs by hand: in bfloat16 the second block takes ten times as long, and all others half as long."""
    with_costs = study.with_costs

    def by_hand(graph: JointGraph, **_: Any) -> JointGraph:
        ops = {op.index: op for op in graph.ops}
        for block, inside in blocks(graph).items():
            low = any("conv" in op.target and graph.values[op.makes[0]].dtype == "bfloat16" for op in inside)
            seconds = (10 if block.startswith("2") else 0.5) if low else 1
            ops |= {op.index: replace(op, seconds=1e-3 * seconds / len(inside)) for op in inside}
        return replace(with_costs(graph, how="roofline"), ops=tuple(ops.values()))

    monkeypatch.setattr(study, "with_costs", by_hand)
    plan = planned("1GB", allow="lossy")
    assert plan.precision.compute == "bfloat16"
    assert plan.precision.apart
    assert all(name.startswith("2") for name in plan.precision.apart)
    assert str(plan.precision).startswith("computing in bfloat16")
    told = {one.layer for one in plan.decisions if one.lever == "lower precision"}
    assert told
    assert not [layer for layer in told if layer is not None and layer in plan.precision.apart]
    assert memplan.Plan.from_json(plan.to_json()) == plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_fused_kernels_have_the_same_kinds_to_choose_from() -> None:
    kinds = {
        engine: list(precision_search.allowed_precisions(net(), Settings(engine=engine, allow="lossy")))
        for engine in ENGINES
    }
    assert kinds["inductor"][:3] == [EXACT, Precision("bfloat16", whole=True), Precision("bfloat16")]
    assert {*kinds["inductor"]} - {*kinds["graph"]} == {*kinds["inductor"][1:3]}


@needs_avx512
@pytest.mark.parametrize("engine", ["graph", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_stem_runs_in_one_go_where_the_budget_allows_and_in_pieces_where_it_does_not(engine: Engine) -> None:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False).requires_grad_(False)  # in bfloat16 it holds more than its result
    model, x = nn.Sequential(stem, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(64 * 144, 4)), torch.randn(16, 3, 96, 96)
    planner, call = Planner(model), call_of((x,), {})
    settings = Settings(engine=engine, costs="roofline", allow="lossy", excluded_precisions=(EXACT,), heuristics=QUICK)
    wide = planner.planned(call, settings, 1 << 30, key=0).plan
    assert wide.precision.whole
    assert memplan.Plan.from_json(wide.to_json()) == wide
    pieces = planner.study(call, replace(settings, precision=replace(wide.precision, whole=False)), key=0)
    if not any(op.target == CHUNKED for op in pieces.captured.graph.ops):
        pytest.skip("what oneDNN holds beside a result is small here")
    tight = planner.planned(call, settings, wide.floor - 1, key=0).plan
    assert not tight.precision.whole
    assert tight.peak < 0.9 * wide.floor
    budgets = (1, tight.floor // 2, tight.floor - 1)
    assert {smallest(planner, call, settings, one) for one in budgets} == {tight.floor}


@pytest.mark.slow
def test_what_was_refused_is_not_planned_again_as_what_would_have_allowed_more() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(2))), torch.randn(64, 32)
    planner, call = Planner(model), call_of((x,), {})
    settings = Settings(allow="lossy", costs="roofline", excluded_precisions=(EXACT,))
    plan = planner.planned(call, settings, 1 << 30, key=0).plan
    assert plan.lost.save == "exact"
    assert plan.lost.compute
    refused = [replace(plan.lost, whole=whole) for whole in (False, True)]
    others = replace(settings, excluded_precisions=(EXACT, *refused))
    with pytest.raises(RecordingError, match="precisions that are left"):  # with so much room, nothing is encoded
        planner.planned(call, others, 1 << 30, key=0)


@pytest.mark.slow
def test_what_saves_in_fewer_bits_is_told_from_what_only_might() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(2048, 32)
    settings = Settings(engine="inductor", allow="lossy", precision=Precision("", "bfloat16"), costs="roofline")
    search = Planner(model).study(call_of((x,), {}), settings, key=0).search(settings)
    assert precision_search._saves_in_fewer_bits(search, search.floor_peak)
    exact = replace(settings, precision=EXACT)
    search = Planner(model).study(call_of((x,), {}), exact, key=0).search(exact)
    assert not precision_search._saves_in_fewer_bits(search, search.floor_peak)


@pytest.mark.parametrize("engine", ["graph", *slow("inductor")])
def test_what_does_not_run_in_fewer_bits_is_told(engine: Engine) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), Choosy(), nn.Linear(64, 32)), torch.randn(256, 32)
    settings = Settings(engine=engine, allow="lossy", costs="roofline")
    plan = Planner(model).planned(call_of((x,), {}), settings, 1 << 30, key=0).plan
    (note,) = [note for note in plan.notes if "left out" in note]
    assert note.startswith("computing in bfloat16")
    assert "float32 is wanted" in note


class Choosy(nn.Module):
    """Takes no bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise ValueError("float32 is wanted")
        return x.relu()


def smallest(planner: Planner, call: Call, settings: Settings, budget: int) -> int:
    with pytest.raises(BudgetError) as caught:
        planner.planned(call, settings, budget, key=0)
    return caught.value.smallest_budget


@pytest.mark.slow
@pytest.mark.parametrize("save", ["bfloat16", "int8"])
def test_fused_kernels_save_in_fewer_bits(save: Save) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(2048, 32)
    settings = Settings(engine="inductor", allow="lossy", precision=Precision("", save), costs="roofline")
    planner, call = Planner(model), call_of((x,), {})
    floor = planner.study(call, settings, key=0).search(settings).floor_peak
    plan = planner.planned(call, settings, int(1.01 * floor), key=0).plan
    assert plan.count("encode") > 0
    fitted = memplan.fit(model, x, budget=plan.peak + 64, plan=plan, engine="inductor", allow="lossy", pairs=0)
    assert fitted.proof.same
    assert fitted.proof.peak <= plan.peak + 64
    assert abs(plan.peak - fitted.proof.peak) <= 0.001 * fitted.proof.peak


def test_of_fused_kernels_what_saves_in_fewer_bits_is_looked_at_where_it_may_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What each kind takes is made up."""
    looked = list[Precision]()

    class Study:
        def __init__(self, settings: Settings) -> None:
            self.precision = settings.fixed_precision
            ops = [SimpleNamespace(target=CONVOLUTION if self.precision.whole else CHUNKED)]
            self.captured = SimpleNamespace(graph=SimpleNamespace(forward_ops=ops))

        def search(self, _: Settings) -> Any:
            peak = {"exact": 130, "bfloat16": 100, "int8": 200}[self.precision.save]
            found = SimpleNamespace(choices=None)
            return SimpleNamespace(floor_peak=peak, graph=None, outside_memory=None, floor=lambda: found)

        def planned(self, settings: Settings, budget: int) -> Any:
            looked.append(self.precision)
            least = {"exact": 120, "bfloat16": 90, "int8": 80}[self.precision.save]
            if budget < least:
                raise BudgetError("too little", expected="more", do="Give it", smallest_budget=least)
            again = 0.0 if budget > 150 else 0.5
            plan = SimpleNamespace(total_seconds=1.0 + again, seconds=again, precision=EXACT, lost=EXACT)
            return SimpleNamespace(plan=plan)

    monkeypatch.setattr(precision_search, "step_seconds", lambda _: 1.0)
    monkeypatch.setattr(precision_search._PrecisionSearch, "without_slower_blocks", lambda _: None)
    monkeypatch.setattr(precision_search, "base_level", lambda *_: 20)  # bytes that are there all the time
    monkeypatch.setattr(precision_search, "_saves_in_fewer_bits", lambda *_: saves)

    def asked(budget: int, engine: Engine) -> set[str]:
        looked.clear()
        study: Any = Study
        precision_search.fastest(study, net(), Settings(engine=engine, allow="lossy"), budget)
        return {one.save for one in looked}

    saves = False
    assert asked(140, "inductor") == {"exact"}
    saves = True
    assert asked(200, "inductor") == {"exact"}  # nothing is made again
    assert asked(140, "inductor") == {"exact", "bfloat16", "int8"}
    assert asked(95, "inductor") == {"exact", "bfloat16"}  # op by op the other is far from fitting
    assert asked(92, "inductor") == {"bfloat16"}
    assert asked(95, "graph") == {"bfloat16", "exact", "int8"}
    for budget in (10, 60, 80):  # of what is far from fitting, what takes the least op by op is looked at after all
        with pytest.raises(BudgetError) as error:
            asked(budget, "inductor")
        assert error.value.smallest_budget == 90
        assert {(one.save, one.whole) for one in looked if one.compute} == {("bfloat16", True), ("bfloat16", False)}
        assert {one.save for one in looked} == {"bfloat16"}


@pytest.mark.parametrize(
    ("bfloat16", "int8", "taken"), [(0.95, 0.93, ""), *slow((0.8, 0.79, "bfloat16"), (0.8, 0.7, "int8"))]
)
def test_nothing_is_lost_for_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch, bfloat16: float, int8: float, taken: str
) -> None:
    class Study:
        def __init__(self, settings: Settings) -> None:
            self.precision = settings.fixed_precision
            self.captured = SimpleNamespace(graph=None)

        def planned(self, settings: Settings, budget: int) -> Any:
            seconds = {"exact": 1.0, "bfloat16": bfloat16, "int8": int8}[self.precision.save]
            return SimpleNamespace(
                plan=SimpleNamespace(
                    total_seconds=seconds, seconds=seconds, precision=self.precision, lost=self.precision
                )
            )

    monkeypatch.setattr(precision_search, "step_seconds", lambda _: 0.0)
    monkeypatch.setattr(precision_search, "lower_precision", lambda card, device: "")
    monkeypatch.setattr(precision_search._PrecisionSearch, "without_slower_blocks", lambda _: None)
    study: Any = Study
    plan = precision_search.fastest(study, net(), Settings(allow="lossy"), 1).plan
    assert plan.precision.save == (taken or "exact")


def test_a_frontier_has_its_exact_plans_whatever_beats_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Study:
        def __init__(self, settings: Settings) -> None:
            self.lossy = settings.fixed_precision.lossy
            self.captured = SimpleNamespace(graph=0.5 if self.lossy else 1.0)

        def frontier(self, settings: Settings, points: int) -> Any:
            sizes = (100, 60) if self.lossy else (200, 150, 120)
            return [SimpleNamespace(peak=size, seconds=0.1 * at) for at, size in enumerate(sizes)]

    monkeypatch.setattr(precision_search, "step_seconds", lambda graph: graph)
    study: Any = Study
    found = precision_search.frontier(study, net(), Settings(engine="inductor", allow="lossy"), 3)
    assert [one.peak for one in found if not one.precision.lossy] == [200, 150, 120]
    assert [(one.peak, one.seconds) for one in found if one.precision.lossy] == [(100, -0.5), (60, -0.4)]
    assert [one.peak for one in found] == [200, 150, 120, 100, 60]
    exact = precision_search.frontier(study, net(), Settings(engine="inductor"), 3)
    assert [one.peak for one in exact] == [200, 150, 120]
