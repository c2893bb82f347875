"""Kernels take the place of groups of calls where a step does not fit without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan import _torch
from memplan.devices import find
from memplan.errors import BudgetError, InputError, RecordingError, UsageError
from memplan.kernels import norms
from memplan.planning import planner as planning
from memplan.planning.graph.placement import Home
from memplan.planning.kernel_search import offered, planned_with_kernels, with_kernel_remedy
from memplan.planning.planner import Planner
from memplan.planning.request import request
from memplan.planning.search.search import Heuristics
from memplan.planning.settings import Allow, PlanOptions
from memplan.planning.study import Study
from memplan.trace.step import StepOptions

WIDTH, CLASSES, TOKENS = 64, 3000, 256
HEURISTICS = Heuristics(shakes=0, rounds=4)
QUICK: dict[str, Any] = {"heuristics": HEURISTICS, "costs": "roofline"}


class Block(nn.Module):
    """A norm and a gated feed-forward, as Llama has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, 1e-6)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 192), nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A block, a head and the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(CLASSES, WIDTH), Block()
        self.norm, self.head = nn.RMSNorm(WIDTH, 1e-6), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(self.norm(self.blocks(self.embed(ids))))
        return F.cross_entropy(scores[:, :-1].reshape(-1, CLASSES), ids[:, 1:].reshape(-1))


def tokens() -> Tensor:
    return torch.randint(CLASSES, (1, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No segment runs piece by piece, as none does on a card."""

    def planned_in_tiles(study: Any, settings: Any, budget: int, captured: Any, error: BudgetError) -> Any:
        raise error

    monkeypatch.setattr(planning, "planned_in_tiles", planned_in_tiles)


@functools.cache
def floor_of(allow: Allow = "exact", *, tiles: bool = False) -> int:
    """In tests without `tiles` this is called where no segment may run in pieces."""
    with pytest.raises(BudgetError) as caught:
        memplan.plan(Decoder(), tokens(), budget=1, allow=allow, **QUICK)
    return caught.value.smallest_budget


@functools.cache
def planned() -> memplan.Plan:
    """With kernels, in the least that these allow."""
    return memplan.plan(Decoder(), tokens(), budget=floor_of("reordered"), allow="reordered", **QUICK)


@pytest.mark.usefixtures("without_tiles")
def test_a_step_fits_in_less_and_takes_what_was_predicted(tmp_path: Path) -> None:
    """By torch's profiler; the plan is the same from a file, and refused where results must be the same bits."""
    exact, floor = floor_of(), floor_of("reordered")
    assert floor < 0.9 * exact
    model, ids = Decoder(), tokens()
    fitted = memplan.fit(model, ids, budget=floor, allow="reordered", pairs=0, heuristics=HEURISTICS)
    plan = fitted.plan
    assert fitted.proof.ok
    assert plan.grade == "reordered"
    assert "cross_entropy" in {group.kernel for group in plan.kernels}
    profile = _torch.memory_profile()
    with profile:
        fitted.model(ids).backward()
    level = peak = 0
    for event in _torch.Profile.of(profile).events:
        level += event.bytes
        peak = max(peak, level)
    resident = sum(t.numel() * t.element_size() for t in (*model.parameters(), ids))
    assert plan.peak - 128 <= resident + peak <= plan.peak <= floor  # 128: numbers in tensors of their own
    fitted.undo()
    plan.save(tmp_path / "plan.json")
    loaded = memplan.Plan.load(tmp_path / "plan.json")
    assert loaded.kernels == plan.kernels
    again = memplan.plan(Decoder(), tokens(), budget=floor, allow="reordered", plan=loaded, **QUICK)
    assert again.fingerprint == plan.fingerprint
    with pytest.raises(UsageError, match="groups of ops by kernels, which adds in another order, and allow is 'exact'"):
        memplan.plan(Decoder(), tokens(), budget=floor, plan=loaded, **QUICK)
    with pytest.raises(UsageError, match="for another model"):
        memplan.plan(Block(), torch.randn(9, WIDTH), budget="1 GiB", allow="reordered", plan=loaded, **QUICK)


class Images(nn.Sequential):
    """Three convolutions with batch norm and ReLU, and a loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = list[nn.Module]()
        for inputs in (3, 8, 8):
            layers += [nn.Conv2d(inputs, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        super().__init__(*layers, nn.Conv2d(8, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square().mean()


class Attention(nn.Module):
    """Two layers of causal attention with dropout, as nanoGPT has them, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 72) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1]).tril() == 0
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            scores = (q @ k.transpose(1, 2) * 0.2).masked_fill(hidden, float("-inf"))
            x = x + F.dropout(F.softmax(scores, -1), 0.1) @ v
        return x.square().mean()


class Segmentation(nn.Module):
    """A convolution to six classes, and a loss as MONAI has it."""

    def __init__(self) -> None:
        super().__init__()
        from monai.losses.dice import DiceCELoss

        torch.manual_seed(0)
        self.head, self.loss = nn.Conv2d(1, 6, 1), DiceCELoss(softmax=True, to_onehot_y=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.head(x), (x > 0).long())


@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize(
    ("build", "shape", "kernels"),
    [
        (Attention, (3, 128, 24), 2 * ["softmax_dropout"]),
        *slow(
            (Images, (4, 3, 48, 48), 3 * ["batch_norm_act"]), (Segmentation, (2, 1, 128, 128), ["dice_cross_entropy"])
        ),
    ],
)
def test_other_steps_fit_in_less_and_take_what_was_predicted(
    build: Callable[[], nn.Module], shape: tuple[int, ...], kernels: list[str]
) -> None:
    """By torch's profiler; where torch's own derivatives cannot be written over what they read, or save more."""
    x, floors = torch.randn(shape), dict[str, int]()
    for allow in ("exact", "reordered"):
        with pytest.raises(BudgetError) as caught:
            memplan.plan(build(), x, budget=1, allow=allow, **QUICK)
        floors[allow] = caught.value.smallest_budget
    assert floors["reordered"] < 0.9 * floors["exact"]
    model = build()
    fitted = memplan.fit(model, x, budget=floors["reordered"], allow="reordered", pairs=0, heuristics=HEURISTICS)
    assert fitted.proof.ok
    assert [group.kernel for group in fitted.plan.kernels] == kernels
    profile = _torch.memory_profile()
    with profile:
        fitted.model(x).backward()
    level = peak = 0
    for event in _torch.Profile.of(profile).events:
        level += event.bytes
        peak = max(peak, level)
    resident = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), x))
    assert fitted.plan.peak - 128 <= resident + peak <= fitted.plan.peak  # 128: numbers in tensors of their own


@pytest.mark.usefixtures("without_tiles")
def test_the_planned_step_as_python_runs() -> None:
    plan = planned()
    assert "import memplan.kernels" in plan.as_python()
    namespace: dict[str, Any] = {}
    exec(compile(plan.as_python(), "plan", "exec"), namespace)
    assert callable(namespace["forward"])


@pytest.mark.usefixtures("without_tiles")
def test_a_budget_that_is_met_without_has_no_kernels() -> None:
    exact = floor_of()
    plan = memplan.plan(Decoder(), tokens(), budget=exact, allow="reordered", **QUICK)
    assert plan == memplan.plan(Decoder(), tokens(), budget=exact, **QUICK)
    assert not plan.kernels


def test_segments_in_pieces_come_first() -> None:
    plan = memplan.plan(Decoder(), tokens(), budget=int(0.9 * floor_of(tiles=True)), allow="reordered", **QUICK)
    assert plan.tiles
    assert not plan.kernels


def study_on(card: str | None, model: Any = None, inputs: Any = None) -> tuple[Planner, Study, Any, Any]:
    options = PlanOptions(budget=1, allow="reordered", costs="roofline", heuristics=HEURISTICS)
    checked = request(
        model or Decoder(), StepOptions(inputs or (tokens(),), {}, (), None, None, None), options, fake=False
    )
    planner, settings = Planner(checked.step), checked.settings
    study = planner.study(checked.call, settings, key=0)
    if card is not None:
        settings = replace(settings, home=Home("cpu", find(card)))
    return planner, study, checked, settings


def failing_norms(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What stands for a card here has the CPU's kernels, of which that of norms raises an error."""
    backward = norms._backward

    def fail(*args: Any) -> Any:
        if isinstance(args[0], _torch.FakeTensor):  # what it allocates is known
            return backward(*args)
        raise error

    monkeypatch.setattr(norms, "_backward", fail)


@pytest.mark.parametrize("kind", [RuntimeError, *slow(torch.OutOfMemoryError)])
def test_a_kernel_that_does_not_run_on_the_card_is_dropped_with_a_line(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler raises, or the allocator."""
    failing_norms(monkeypatch, kind("PTXAS error: out of registers\nand more"))
    planner, study, checked, settings = study_on("h100")
    tried = list[set[str]]()

    def captured(groups: Any) -> Study:
        tried.append({group.kernel for group in groups})
        return planner._rewritten(study, checked.call, replace(settings, home=Home()), kernels=groups)

    with pytest.raises(BudgetError) as caught:
        planned_with_kernels(study, settings, 1, captured, BudgetError("", smallest_budget=1 << 60))
    assert f"rms_norm: {kind.__name__}: PTXAS error: out of registers" in str(caught.value)
    assert "and more" not in str(caught.value)
    (failed,) = [index for index, kinds in enumerate(tried) if "rms_norm" in kinds]
    assert tried[failed + 1 :]
    assert caught.value.smallest_budget < 1 << 60


def test_an_error_behind_which_nothing_runs_on_the_card_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_norms(monkeypatch, torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    planner, study, checked, settings = study_on("h100")

    def captured(groups: Any) -> Study:
        return planner._rewritten(study, checked.call, replace(settings, home=Home()), kernels=groups)

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        planned_with_kernels(study, settings, 1, captured, BudgetError("", smallest_budget=1 << 60))


@pytest.mark.usefixtures("without_tiles")
def test_a_kernel_that_does_not_take_its_operands_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms, of which no group can be replaced; the loss still is."""

    def rms_norm(**operands: Any) -> Any:
        raise InputError("These do not fit", expected="others")

    monkeypatch.setattr("memplan.kernels.rms_norm", rms_norm)
    planner, study, checked, settings = study_on(None)
    tried = list[list[str]]()

    def captured(groups: Any) -> Study:
        tried.append([group.kernel for group in groups])
        return planner._rewritten(study, checked.call, settings, kernels=groups)

    with pytest.raises(BudgetError) as caught:
        planned_with_kernels(study, settings, 1, captured, BudgetError("", smallest_budget=1 << 60))
    norm_counts = [kinds.count("rms_norm") for kinds in tried if "rms_norm" in kinds]
    assert norm_counts == [2, 1]  # a group, then the kind
    assert tried[-1].count("cross_entropy") == 1
    assert "rms_norm" not in tried[-1]
    assert "rms_norm: rms_norm does not take its operands: These do not fit" in str(caught.value)
    assert caught.value.smallest_budget < 1 << 60


def test_kinds_with_which_the_step_is_not_traced_are_left_out() -> None:
    planner, study, checked, settings = study_on(None)

    def captured(groups: Any) -> Study:
        if any(group.kernel == "swiglu" for group in groups):
            raise RecordingError("No trace", expected="a trace", do="Nothing")
        return planner._rewritten(study, checked.call, settings, kernels=groups)

    with pytest.raises(BudgetError) as caught:
        planned_with_kernels(study, settings, 1, captured, BudgetError("", smallest_budget=1 << 60))
    assert "swiglu: No trace" in str(caught.value)
    budget = caught.value.smallest_budget
    planned = planned_with_kernels(study, settings, budget, captured, BudgetError("", smallest_budget=1 << 60))
    assert {group.kernel for group in planned.plan.kernels} >= {"cross_entropy"}


@pytest.mark.parametrize("card", [None, "h100"])
def test_an_exact_plan_that_does_not_fit_names_kernels(card: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the logits are above the budget; not for less than what stays between the passes, nor without Triton on a
    card."""
    _, study, _, settings = study_on(card)
    exact, error = replace(settings, allow="exact"), BudgetError("", do="More", smallest_budget=1 << 60)
    with pytest.raises(BudgetError) as caught:
        study.planned(exact, 1)
    budget = caught.value.smallest_budget - 1

    def advice(budget: int = budget, **options: Any) -> str | None:
        return with_kernel_remedy(error, study, replace(exact, **options), budget).do

    assert "kernels" in str(advice())
    assert "allow='reordered'" in str(advice())
    assert advice(budget=1) == advice(allow="lossy") == "More"
    monkeypatch.setattr("memplan.kernels.launch.triton", None)
    assert (advice() == "More") == (card is not None)


@pytest.mark.parametrize(
    ("card", "triton", "reason"), [("v100", True, "older than compute"), ("h100", False, "Triton")]
)
def test_a_card_or_machine_without_kernels(
    card: str, triton: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not triton:
        monkeypatch.setattr("memplan.kernels.launch.triton", None)
    _, study, _, settings = study_on(card)
    groups, reasons = offered(study, settings)
    assert not groups
    assert reason in reasons[-1]
    assert offered(study, replace(settings, home=Home()))[0]


@pytest.mark.parametrize("card", [None, "h100"])
def test_depthwise_convolutions_are_replaced_on_a_card_alone(card: str | None) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 2, 1))
    planner, study, checked, settings = study_on(card, model, (torch.randn(1, 3, 8, 8),))
    groups, reasons = offered(study, settings)
    assert [group.kernel for group in groups] == ["depthwise_conv"] * (card is not None)
    assert reasons == ["depthwise_conv: on the CPU it is torch's own convolution"] * (card is None)
    replaced = planner._rewritten(study, checked.call, replace(settings, home=Home()), kernels=groups)
    targets = [op.target for op in replaced.captured.graph.ops]
    assert targets.count("memplan.depthwise.default") == len(groups)
    assert targets.count("aten.convolution.default") == 3 - len(groups)


@pytest.mark.parametrize("less", [0, 1])
def test_depthwise_convolutions_whose_sums_take_more_than_a_workspace_stay(less: int) -> None:
    """By hand: one part, with 10 sums of each of 8 channels."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 2, 1))
    _, study, _, settings = study_on("h100", model, (torch.randn(3, 3, 8, 8),))
    graph = study.captured.graph
    ops = tuple(replace(op, scratch=4 * 10 * 8 - less) for op in graph.ops)
    study.captured = replace(study.captured, graph=replace(graph, ops=ops))
    groups, reasons = offered(study, settings)
    assert len(groups) == 1 - less
    assert reasons == ["depthwise_conv: its sums take more than the workspace of torch's own"] * less


@pytest.mark.usefixtures("without_tiles")
def test_the_table_says_what_a_kernel_saves() -> None:
    """Bytes that torch's own hooks see saved for the backward pass by eager mode, and by the function of
    `memplan.kernels`."""
    plan = planned()
    (loss,) = [one for one in plan.decisions if one.details.get("kernel") == "cross_entropy"]
    hidden, weight = torch.randn(1, TOKENS - 1, WIDTH), torch.randn(CLASSES, WIDTH)

    def saved(function: Any) -> int:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        own = {x.untyped_storage().data_ptr() for x in leaves}
        storages = dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and tensor.dtype != torch.int64:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(*leaves, tokens()[:, 1:])
        return sum(storages.values())

    before = saved(lambda h, w, t: F.cross_entropy(F.linear(h, w).view(-1, CLASSES), t.reshape(-1)))
    assert loss.bytes == pytest.approx(before, rel=0.01)
    assert loss.details["kept_bytes"] == pytest.approx(saved(memplan.kernels.cross_entropy), rel=0.6)
    assert loss.grade == "reordered"
    assert (
        "1 group of ops by kernels" in plan.summary or f"{len(plan.kernels)} groups of ops by kernels" in plan.summary
    )
