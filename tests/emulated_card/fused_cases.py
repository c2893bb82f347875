"""`memplan.fit` with fused kernels of modules on a card, the emulated one: Inductor writes them in C++ there."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import emulated
import pytest
import torch
from fit_cases import between, gradients, language_model, tokens_loss, words
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan._torch import inductor
from memplan.errors import BudgetError, CompileError, UsageError
from memplan.planning.cost import cuda_workspace as planned_card
from memplan.planning.cost.kernel_key import KernelCall

emulated.install_inductor()
pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")  # Inductor's advice on newer cards


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(128, 128), nn.GELU()))).cuda()


def rows(count: int = 8192) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, 128, device="cuda")


def own_bytes(*tensors: Tensor) -> int:
    return sum(-(-one.numel() * one.element_size() // 512) * 512 for one in tensors)


class Case(NamedTuple):
    """A fitted model, fitted once for all tests of it."""

    model: nn.Module
    inputs: tuple[Tensor, Tensor]
    expected: dict[str, Tensor]
    """Gradients of the model as it is."""
    budget: int
    fitted: memplan.Fitted

    def loss(self) -> Tensor:
        assert self.fitted.loss is not None
        return self.fitted.loss(*self.inputs)


@pytest.fixture(scope="module")
def case() -> Case:
    budget, model, (x, y) = between(0.3), language_model(), words()
    expected = gradients(model, lambda: tokens_loss(model(x), y))
    model.zero_grad(set_to_none=True)
    fitted = memplan.fit(model, x, targets=y, loss=tokens_loss, budget=budget, engine="inductor", pairs=1)
    return Case(model, (x, y), expected, budget, fitted)


def test_a_step_fits_as_fused_kernels(case: Case) -> None:
    fitted, fusion = case.fitted, case.fitted.plan.fusion
    assert fitted.changed
    assert fitted.proof.same
    assert fitted.proof.grade == "reordered"
    assert fitted.proof.peak <= case.budget
    assert fitted.plan.device == "rtx4090"
    assert fusion is not None
    assert fusion.device == "rtx4090"
    assert fusion.kernels_after < fusion.kernels_before
    found = gradients(case.model, case.loss)  # from the same seed: dropout draws what it draws in eager mode
    for name, one in found.items():
        assert one.device.type == "cuda"
        assert float((one - case.expected[name]).norm()) <= 1e-5 * float(case.expected[name].norm()) + 1e-7


def test_what_is_allocated_is_what_the_code_says(case: Case) -> None:
    case.model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - own_bytes(*case.model.parameters(), *case.inputs)
    case.loss().backward()
    taken = torch.cuda.max_memory_allocated() - others
    plan = case.fitted.plan
    predicted = plan.predicted.peak_allocated - plan.resident["workspace"]  # it has no cuBLAS
    assert abs(predicted - taken) <= 0.01 * taken


@pytest.mark.slow
def test_the_optimizer_is_part_of_it() -> None:
    model, x = chain(), rows()
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "early": True}
    budget = memplan.plan(model, x, budget="20 GiB", **options).floor * 5 // 4
    fitted = memplan.fit(model, x, budget=budget, engine="inductor", pairs=0, **options)
    assert fitted.proof.same
    assert fitted.proof.peak <= budget
    fitted.undo()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 16, 32, 32)
        pairs = list(itertools.pairwise(sizes))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in pairs)
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))


@pytest.mark.slow
def test_statistics_of_norms_are_updated_once() -> None:
    torch.manual_seed(0)
    model, x, y = Images().cuda(), torch.randn(16, 3, 64, 64, device="cuda"), torch.randint(10, (16,), device="cuda")
    plan = memplan.plan(model, x, targets=y, loss=F.cross_entropy, budget="20 GiB")
    budget = (plan.floor + plan.eager_peak) // 2
    fitted = memplan.fit(model, x, targets=y, loss=F.cross_entropy, budget=budget, engine="inductor", pairs=0)
    assert fitted.proof.same
    assert fitted.proof.buffers.tensors > 0
    assert fitted.loss is not None
    statistics = dict(model.named_buffers())
    before = statistics["norms.0.running_mean"].clone()
    fitted.loss(x, y).backward()
    found = model.get_submodule("convolutions.0")(x).mean((0, 2, 3))
    assert torch.allclose(statistics["norms.0.running_mean"], 0.9 * before + 0.1 * found, atol=1e-6)
    assert int(statistics["norms.0.num_batches_tracked"]) == 1


@pytest.mark.slow
def test_in_fewer_bits() -> None:
    model, (x, y) = language_model(), words()
    budget = between(0.3)
    fitted = memplan.fit(
        model, x, targets=y, loss=tokens_loss, budget=budget, engine="inductor", allow="lossy", pairs=0
    )  # fmt: skip
    assert fitted.proof.same
    assert fitted.proof.peak <= budget


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_refused_with_one_that_is_not() -> None:
    model, x = chain(), rows()
    with pytest.raises(BudgetError) as error:
        memplan.fit(model, x, budget="18 MiB", engine="inductor", pairs=0)
    least = error.value.smallest_budget
    fitted = memplan.fit(model, x, budget=least, engine="inductor", pairs=0)
    assert fitted.proof.peak <= least


@pytest.mark.slow
def test_a_smaller_call_runs_by_the_same_decisions() -> None:
    model, x = chain(), rows()
    budget = memplan.plan(model, x, budget="20 GiB").floor * 5 // 4
    fitted = memplan.fit(model, x, budget=budget, engine="inductor", pairs=0)
    found = gradients(model, lambda: fitted.model(rows(500)).sum())
    fitted.undo()
    expected = gradients(model, lambda: model(rows(500)).sum())
    assert all(torch.allclose(one, expected[name], rtol=1e-4, atol=1e-4) for name, one in found.items())
    assert not [note for note in fitted.notes if "planned anew" in note]


def test_what_kernels_hold_on_the_card_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_card, "_known", {})
    a = torch.randn(64, 300, device="cuda")
    sort = KernelCall.of("aten.sort.default", (a,), {})
    plain = KernelCall.of("aten.mm.out", (a, a.T), {"out": torch.empty(64, 64, device="cuda")})
    wrong = KernelCall.of("aten.mm.default", (a, a), {})
    planned_card.measure_workspaces("cuda:0", [sort, plain, wrong])
    # the CPU computes, and what it holds meanwhile is its own
    assert planned_card.measured_workspaces("cuda:0") == {sort.key: 0, plain.key: 0, wrong.key: None}
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert planned_card.measured_workspaces("cuda:0") == {}


def test_what_a_kernel_holds_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain(), rows()
    asked = set[str]()

    def held(place: str, call: Any) -> int:
        call()
        return 0

    def more(place: str, calls: Any) -> None:
        found = planned_card.measured_workspaces(place)
        for call in calls:
            asked.add(call.name)
            found[call.key] = (64 << 20) if call.name == "aten.addmm.default" else 0

    monkeypatch.setattr(planned_card, "_known", {})
    monkeypatch.setattr(planned_card, "workspace_on", held)
    plain = memplan.plan(model, x, budget="20 GiB", engine="inductor").predicted
    monkeypatch.setattr(planned_card, "_known", {})
    monkeypatch.setattr(planned_card, "measure", more)
    plan = memplan.plan(model, x, budget="20 GiB", engine="inductor")
    assert "aten.addmm.default" in asked
    levels = [allocated for _, allocated, _ in plan.predicted.events]
    assert [after - before for before, after in itertools.pairwise(levels)].count(64 << 20) >= 4
    workspaces = plan.resident["workspace"]
    assert workspaces == 8_519_680  # of cuBLAS, once: both passes run in one thread
    assert plain.peak_allocated < plan.predicted.peak_allocated <= plain.peak_allocated + (64 << 20)


class Noisy(nn.Module):
    """Makes tensors on the card, of numbers that are drawn there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            keep = torch.rand(x.shape[0], 1, device=x.device) > 0.2
            x = x + torch.where(keep, torch.tanh(layer(x)), torch.zeros((), device=x.device))
        return x


@pytest.mark.slow
def test_what_is_drawn_on_the_card_is_the_same() -> None:
    torch.manual_seed(0)
    model, x = Noisy().cuda(), torch.randn(8192, 64, device="cuda")
    expected = gradients(model, lambda: model(x).square().mean())
    plan = memplan.plan(model, x, budget="20 GiB")
    fitted = memplan.fit(model, x, budget=(plan.floor + plan.eager_peak) // 2, engine="inductor", pairs=0)
    assert fitted.proof.same
    found = gradients(model, lambda: fitted.model(x).square().mean())
    for name, one in found.items():
        assert float((one - expected[name]).norm()) <= 1e-5 * float(expected[name].norm()) + 1e-8


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(4, 4).cuda(), torch.randn(2, 4, device="cuda")
    monkeypatch.setattr(inductor, "has_triton", lambda: False)
    with pytest.raises(UsageError, match="engine='inductor' on cuda:0, and no package triton was found"):
        memplan.fit(model, x, budget="1 MiB", engine="inductor")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (6, 1))
    with pytest.raises(UsageError, match=r"compute capability 6\.1, and Triton begins with 7\.0"):
        memplan.fit(model, x, budget="1 MiB", engine="inductor")


def test_a_compiler_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain(), rows()

    def fails(*_: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    before, expected = {name: one.clone() for name, one in model.state_dict().items()}, model(x)
    monkeypatch.setattr(inductor, "kernels_of", fails)
    with pytest.raises(CompileError, match="no kernel image"):
        memplan.fit(model, x, budget="60 MiB", engine="inductor", pairs=0)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(model(x), expected)
