"""Steps of fused kernels: the same but for rounding, in the budget, and predicted."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from rewriting.cells import Norms, total
from torch import nn
from torch._functorch import config as autograd_config
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import control_dependencies
from torch.nn import functional as F
from verification.fitting.quick import QUICK

import memplan
from memplan import _torch
from memplan._bytes import format_bytes
from memplan._torch import inductor
from memplan.errors import BudgetError, CompileError, UsageError, VerificationError
from memplan.planning import study
from memplan.planning.inductor import partition
from memplan.planning.settings import Engine
from memplan.verification.fitting import prover
from memplan.verification.fitting.fit import Fitted, _Fitting, fit

pytestmark = pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here")
GIVEN: dict[str, Any] = {"engine": "inductor", "heuristics": QUICK, "pairs": 0}
WITHIN = 0.05
"""Of the measured peak: what the prediction may be off."""


class Net(nn.Module):
    """A conv net with what fuses (norms, activations) and what does not (convolutions, pools), and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(16)])
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        x = F.gelu(self.norms[1](self.second(x))) + x
        return self.last(self.drop(F.max_pool2d(x, 2)).mean((2, 3)))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def ran(call: Any, model: nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    """The output and all gradients of a call from the same random state."""
    torch.manual_seed(2)
    model.zero_grad()
    output = call(*given)
    output.square().mean().backward()
    return [output.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(control_dependencies, "control_deps_autograd"),
    reason="this torch draws random numbers otherwise in layouts of its choice",
)
def test_compiled_as_eager_is_torch_compile_in_its_own_layouts() -> None:
    """What says what rounding is must be `torch.compile` as people run it: it convolves in channels last."""
    model, (x, _) = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)), inputs()
    theirs = ran(torch.compile(lambda x: model(x)), model, x)
    ours = ran(_torch.compiled_as_eager(lambda x: model(x)), model, x)
    assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))
    with inductor._inductor_settings():
        plain = ran(torch.compile(lambda x: 1 * model(x)), model, x)
    assert not all(torch.equal(one, other) for one, other in zip(theirs, plain, strict=True))


@pytest.mark.slow
def test_compiled_as_eager_compiles_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo leaves code to eager mode that it has compiled eight times: then eager would be held against eager."""
    compiled = list[Any]()

    def backend(graph: Any, examples: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    for number in range(12):
        _torch.compiled_as_eager(lambda x, n=number: x * n)(torch.ones(2))
    assert len(compiled) == 12


@pytest.mark.slow
def test_compiled_as_eager_draws_as_eager() -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8)), torch.randn(16, 32)
    eager, ours = ran(model, model, x), ran(_torch.compiled_as_eager(lambda x: model(x)), model, x)
    for one, other in zip(eager, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def at_share(model: nn.Module, share: float, *given: Any, **options: Any) -> Fitted:
    """Fit a step in a share of what it takes, or in the least that is found."""
    eager = memplan.plan(model, *given, budget="1TB", costs="roofline", heuristics=QUICK, **options).eager_peak
    try:
        return fit(model, *given, budget=int(share * eager), **options, **GIVEN)
    except BudgetError as error:
        return fit(model, *given, budget=error.smallest_budget, **options, **GIVEN)


def holds(fitted: Fitted) -> None:
    proof = fitted.proof
    assert fitted.changed
    assert proof.same
    assert not proof.exact
    assert proof.within_budget
    assert abs(fitted.plan.peak - proof.peak) <= WITHIN * proof.peak
    step = fitted.model if fitted.loss is None else fitted.loss
    trained = {name for name, one in step.named_parameters() if one.requires_grad}
    for number in range(proof.steps):  # errors of all of them were measured
        assert {one.name for one in proof.rounded if (one.kind, one.step) == ("gradients", number)} >= trained
    assert proof.parameters.tensors == (len(trained) * proof.steps if proof.early else 0)


# of all kinds, budgets and modes benchmarks/fit_cells.py makes a table
@pytest.mark.slow
def test_gradients_and_random_state_are_those_of_a_plain_step() -> None:
    """Not by the proof, which is memplan's own, but by a step by hand: autograd's gradients are the other side."""
    torch.manual_seed(0)
    model, (x, y) = Net(), inputs()
    twin = copy.deepcopy(model)
    fitted = at_share(model, 0.7, x, targets=y, loss=F.cross_entropy)
    planned = fitted.loss
    assert planned is not None
    assert fitted.plan.choices.recompute | fitted.plan.choices.saved_by("encode")
    after = list[torch.Tensor]()
    for step in (lambda: planned(x, y), lambda: F.cross_entropy(twin(x), y)):
        torch.manual_seed(7)
        step().backward()
        after.append(torch.rand(3))
    assert torch.equal(*after)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        scale = max(float(theirs.grad.norm()), 0.1)  # a bias before a norm has a gradient of rounding alone
        assert float((ours.grad - theirs.grad).norm()) <= 1e-4 * scale, name
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"optimizer": torch.optim.AdamW, "early": True}], ids=["held", "early"]
)
def test_gradients_that_are_used_up_as_they_come(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())])
    fitted = at_share(model, 0.9, torch.randn(16, 64), loss=torch.sum, **options)
    holds(fitted)
    trained = sum(one.numel() * one.element_size() for one in model.parameters())
    if options.get("early"):
        state = fitted.plan.resident["optimizer_state"]
        assert fitted.proof.peak < sum(fitted.plan.resident.values()) + trained  # they are never all there
        assert state == pytest.approx(2 * trained, rel=0.01)


@pytest.mark.slow
def test_an_update_waits_for_all_that_reads_its_parameter() -> None:
    """A convolution's weight is read for its input's gradient, too, which can be computed after its own."""
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    model, (x, _) = nn.Sequential(*parts), inputs()
    twin, sgd = copy.deepcopy(model), functools.partial(torch.optim.SGD, lr=0.01)
    fitted = at_share(model, 0.7, x, loss=total, optimizer=sgd, early=True)
    by_hand = sgd(twin.parameters())
    assert fitted.loss is not None
    for _ in range(2):
        by_hand.zero_grad()
        total(twin(x)).backward()
        by_hand.step()
        fitted.loss(x).backward()
        fitted.optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_under_autocast_it_is_as_near_to_float64_as_autocast_is() -> None:
    torch.manual_seed(0)
    model, (x, y) = Net(), inputs()
    model.drop.p = 0.0  # in float64 it would draw other numbers
    low, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    fitted = at_share(model, 0.85, x, targets=y, loss=F.cross_entropy, autocast="bfloat16")
    assert fitted.proof.ok
    assert fitted.loss is not None
    assert abs(fitted.plan.peak - fitted.proof.peak) <= WITHIN * fitted.proof.peak
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fitted.loss(x, y).backward()
        F.cross_entropy(low(x), y).backward()
    F.cross_entropy(wide(x.double()), y).backward()
    ours, plain, true = ([one.grad for one in net.parameters() if one.grad is not None] for net in (model, low, wide))
    errors = [torch.stack([(a - b).norm() for a, b in zip(one, true, strict=True)]).norm() for one in (ours, plain)]
    assert 1e-4 < errors[0] < 2 * errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["graph", "inductor"])
def test_an_autocast_around_the_call_is_as_good_as_asking_for_one(engine: Engine) -> None:
    """Its casts of parameters must not outlive an update, as they do until an outermost autocast ends."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Conv2d(io, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()) for io in (3, 16)]
    tail = nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 5)
    model, x, y = nn.Sequential(*parts, *tail), torch.randn(8, 3, 32, 32), torch.randint(5, (8,))
    given: dict[str, Any] = {"targets": y, "loss": F.cross_entropy, "engine": engine}
    asked = memplan.plan(model, x, budget="1GB", autocast="bfloat16", costs="roofline", **given)
    with torch.autocast("cpu", cache_enabled=True):
        around = memplan.plan(model, x, budget="1GB", costs="roofline", **given)
        fitted = memplan.fit(model, x, budget=int(1.05 * asked.floor), pairs=0, **given)
        assert torch.is_autocast_enabled("cpu")
    assert (around.choices, around.peak, around.eager_peak) == (asked.choices, asked.peak, asked.eager_peak)
    assert fitted.changed
    assert fitted.proof.ok
    assert abs(fitted.plan.peak - fitted.proof.peak) <= WITHIN * fitted.proof.peak
    with torch.autocast("cpu"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(16),
    "groups": lambda: nn.GroupNorm(4, 16),
    "instances": lambda: nn.InstanceNorm2d(16, affine=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("norm", [pytest.param(one, marks=[pytest.mark.slow] * (one != "batch")) for one in NORMS])
def test_under_autocast_what_surrounds_a_norm_stays_in_bfloat16(norm: str) -> None:
    """Were its gradient in float32, so would be all of the backward pass before it, and nothing would be saved."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Conv2d(io, 16, 3, padding=1), NORMS[norm](), nn.ReLU()) for io in (3, 16, 16)]
    model, x = nn.Sequential(*parts), torch.randn(4, 3, 32, 32)
    fitted = at_share(model, 2.0, x, loss=total, autocast="bfloat16")  # nothing is made again
    assert fitted.proof.ok
    assert fitted.proof.reference_peak is not None
    assert fitted.proof.peak <= fitted.proof.reference_peak


class Island(nn.Module):
    """A product that stays in float32 whatever surrounds it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x.float() @ self.second.weight)


@pytest.mark.slow
def test_what_autocast_leaves_alone_is_computed_as_it_is_written() -> None:
    torch.manual_seed(0)
    fitted = at_share(Island(), 2.0, torch.randn(256, 64), loss=total, autocast="bfloat16")
    assert fitted.proof.ok


@pytest.mark.slow
def test_where_other_layouts_round_too_much_the_plain_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, layouts = _Fitting._install_and_prove, list[bool]()

    def fails_in_channels_last(self: _Fitting, planned: Any, budget: int) -> Fitted:
        layouts.append(planned.captured.channels_last)
        if planned.captured.channels_last:
            raise VerificationError("The planned step is NOT the same: tried in channels last")
        return tried(self, planned, budget)

    monkeypatch.setattr(_Fitting, "_install_and_prove", fails_in_channels_last)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU())
    fitted = at_share(model, 2.0, inputs()[0], loss=total)
    holds(fitted)
    assert layouts == [True, False]
    assert any("convolving in channels last was tried and not taken" in note for note in fitted.notes)


@pytest.mark.slow
def test_where_the_plain_layout_takes_more_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a layout of our choice rounds too much is nothing that the user asked about."""

    def tried(self: _Fitting, planned: Any, budget: int) -> Fitted:
        raise VerificationError("The planned step is NOT the same: tried in channels last")

    def planned(self: _Fitting, budget: int) -> Any:
        if not self.settings.channels_last:
            raise BudgetError("The budget is so much", smallest_budget=17)
        return right(self, budget)

    right = _Fitting._plan
    monkeypatch.setattr(_Fitting, "_install_and_prove", tried)
    monkeypatch.setattr(_Fitting, "_plan", planned)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU())
    with pytest.raises(BudgetError) as caught:
        fit(model, inputs()[0], loss=total, budget="1GB", **GIVEN)
    assert caught.value.smallest_budget == 17


@pytest.mark.slow
def test_the_budget_that_is_refused_is_the_one_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, (x, y), right = Net(), inputs(), prover.compare
    with pytest.raises(BudgetError) as caught:
        memplan.plan(model, x, targets=y, loss=F.cross_entropy, budget=1, engine="inductor", heuristics=QUICK)
    least = caught.value.smallest_budget

    def pessimist(*given: Any, **more: Any) -> Any:
        proof = right(*given, **more)
        return dataclasses.replace(proof, peak=proof.peak + least)

    monkeypatch.setattr(prover, "compare", pessimist)
    with pytest.raises(
        BudgetError, match=rf"^The budget is {format_bytes(least)}; a plan for it was measured above it"
    ):
        fit(model, x, targets=y, loss=F.cross_entropy, budget=least, **GIVEN)


def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All graphs that are lowered from now on, as code."""
    found, write = list[str](), inductor._generate_code
    monkeypatch.setattr(inductor, "_generate_code", lambda part: (found.append(str(part.graph.code)), write(part))[1])
    return found


@pytest.mark.slow
def test_what_the_graph_does_not_hang_on_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of this model notes in its config which problem it solves."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    model, tokens = transformers.BertForSequenceClassification(config), torch.arange(128).reshape(8, 16) % 50
    given: dict[str, Any] = {"kwargs": {"labels": torch.arange(8) % 2}, "budget": "1TB"}
    lowered = written(monkeypatch)
    fitted = fit(model, tokens, **given, **GIVEN)
    for _ in range(2):
        fitted.model(tokens, **given["kwargs"]).loss.backward()
        model.zero_grad()
    assert config.problem_type == "single_label_classification"
    assert len(lowered) == len(set(lowered)) > 0  # nothing twice


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [*slow("as eager"), "otherwise"])
def test_a_wrong_kernel_is_found(drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `torch.compile` draws other numbers than eager mode, and is far off by that."""
    compiled = inductor.kernels_of

    def wrong(part: inductor.Lowerable) -> Any:
        kernels = compiled(part)
        return (lambda given: [one * 1.001 for one in kernels(given)]) if part.backward else kernels

    def otherwise(step: Any) -> Any:
        return lambda *given, **more: (torch.rand(1), step(*given, **more))[1]

    monkeypatch.setattr(inductor, "kernels_of", wrong)
    if drawn == "otherwise":
        monkeypatch.setattr(_torch, "compiled_as_eager", otherwise)
    torch.manual_seed(0)
    model, (x, y) = Net(), inputs()
    with pytest.raises(VerificationError, match=r"NOT the same: the gradient of .* from float64"):
        at_share(model, 2.0, x, targets=y, loss=F.cross_entropy)
    assert all(one.grad is None for one in model.parameters())


class Noisy(nn.Module):
    """Draws by several ops, more than once: each has to draw what it draws in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            depth = x.new_empty(x.shape[0], 1).bernoulli_(0.8)
            x = x + F.silu(layer(x)) * depth + 0.1 * torch.randn_like(x) + torch.rand_like(x)
        return x


@pytest.mark.slow
def test_random_numbers_are_drawn_in_the_order_of_eager_mode() -> None:
    """In float64 `randn` draws other numbers: the step as it is has to be what is right then."""
    torch.manual_seed(0)
    fitted = at_share(Noisy(), 0.8, torch.randn(64, 32), loss=torch.sum)
    holds(fitted)
    assert fitted.proof.truth == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"optimizer": torch.optim.AdamW, "early": True}], ids=["plain", "early"])
def test_the_proof_is_the_same_where_the_step_cannot_be_compiled_without_a_plan(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try begins anew: nothing of one that failed is there in the next, nor missing."""

    def uncompiled(*_: Any) -> Any:
        raise RuntimeError

    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(64, 32)
    first = at_share(model, 0.8, x, loss=torch.sum, **options)
    holds(first)
    first.undo()
    monkeypatch.setattr(_torch, "compiled_as_eager", lambda _: uncompiled)
    second = fit(model, x, loss=torch.sum, budget=first.plan.budget, plan=first.plan, **options, **GIVEN)
    holds(second)
    assert first.proof.truth == second.proof.truth == "reference"
    assert first.proof.peak == second.proof.peak
    assert first.proof.reference_peak == second.proof.reference_peak


SECOND = """
import torch, memplan
from torch import nn
from torch._inductor import config
config.cpp_cache_precompile_headers = False  # they take longer than the few files for which they would be made
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
fitted = memplan.fit(model, torch.randn(32, 64), loss=torch.sum, budget="1GB", engine="inductor", pairs=0)
assert fitted.proof.ok
"""


@pytest.mark.slow
def test_a_second_process_finds_the_kernels_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = list[dict[Path, int]]()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SECOND], env=environment, check=True, capture_output=True)
        found.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")})
    first, second = found
    assert len(first) >= 2  # of the forward and the backward pass
    assert second == first  # none is new, none was written again


@pytest.mark.slow
def test_a_plan_goes_back_and_forth_and_keeps_its_engine() -> None:
    torch.manual_seed(0)
    model, (x, y) = Net(), inputs()
    fitted = at_share(model, 0.7, x, targets=y, loss=F.cross_entropy)
    plan = memplan.Plan.from_json(fitted.plan.to_json())
    assert plan.choices == fitted.plan.choices
    fitted.undo()
    with pytest.raises(UsageError, match="engine='inductor'"):
        fit(model, x, targets=y, loss=F.cross_entropy, budget=plan.budget, plan=plan, pairs=0)
    again = fit(model, x, targets=y, loss=F.cross_entropy, budget=plan.budget, plan=plan, **GIVEN)
    assert again.proof.peak == fitted.proof.peak


@pytest.mark.slow
def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    torch.manual_seed(0)
    model, (x, y) = Net(), inputs()
    with pytest.raises(BudgetError) as caught:
        fit(model, x, targets=y, loss=F.cross_entropy, budget=1, **GIVEN)
    holds(fit(model, x, targets=y, loss=F.cross_entropy, budget=caught.value.smallest_budget, **GIVEN))


@pytest.mark.parametrize("rate", [1e-5, *slow(0.1)])
def test_an_early_update_by_a_wrong_gradient_is_found(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the learning rate: gradients are compared, not what they change."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(16, 32)
    backward = partition.CompiledPasses.backward

    def lost(*given: Any) -> Any:
        for group in backward(*given):
            for _, gradient in group:
                gradient.zero_()
            yield group

    def early() -> Fitted:
        sgd = functools.partial(torch.optim.SGD, lr=rate)
        return fit(model, x, loss=torch.sum, budget="1GB", optimizer=sgd, early=True, **GIVEN)

    fitted = early()
    assert fitted.proof.ok
    fitted.undo()
    monkeypatch.setattr(partition.CompiledPasses, "backward", lost)
    with pytest.raises(VerificationError, match="the gradient of"):
        early()


@pytest.mark.slow
def test_a_budget_that_only_the_step_as_it_is_keeps_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels were asked for, also where they take more than torch's own one after the other."""
    torch.manual_seed(0)
    monkeypatch.setattr(study.Study, "eager_peak", lambda *_: 1)
    model, x = Norms(), torch.randn(32, 3, 16, 16)
    with pytest.raises(BudgetError) as caught:
        fit(model, x, loss=torch.sum, budget=1, **GIVEN)
    fitted = fit(model, x, loss=torch.sum, budget=caught.value.smallest_budget, **GIVEN)
    holds(fitted)
    assert fitted.proof.peak <= caught.value.smallest_budget


@pytest.mark.slow
def test_what_is_compiled_meanwhile_in_another_thread_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.ones(4, 8)
    lowered, theirs = inductor._lower, list[torch.Tensor]()

    def planned() -> memplan.Plan:
        return memplan.plan(model, x, loss=torch.sum, budget="1MB", engine="inductor", costs="roofline")

    def compiled() -> torch.Tensor:
        with inductor_config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
            return torch.compile(lambda x: (x.sin() + len(theirs)).cos())(x)

    def beside(part: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            theirs.append(pool.submit(compiled).result())
        return lowered(part)

    alone = planned()
    monkeypatch.setattr(inductor, "_lower", beside)
    assert planned() == alone
    assert len(theirs) == 2
    for number, one in enumerate(theirs):
        torch.testing.assert_close(one, (x.sin() + number).cos())


def test_without_a_compiler_one_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "cpp_compiler", lambda: None)
    with pytest.raises(UsageError, match="no C\\+\\+ compiler was found"):
        fit(nn.Linear(2, 2), torch.ones(1, 2), budget="1MB", engine="inductor")


def test_a_compiler_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(part: Any) -> Any:
        raise RuntimeError("cc1plus: out of disk space")

    monkeypatch.setattr(inductor, "kernels_of", fails)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompileError, match="out of disk space"):
        fit(model, torch.ones(4, 8), loss=torch.sum, budget="1MB", **GIVEN)
    assert _torch.call_of_module(model) is None
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.slow
def test_a_compiler_that_fails_later_leaves_the_call_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of training are not lost to the last batch, which is smaller, and a disk that is full by then."""
    torch.manual_seed(0)
    model, (x, y) = Net(), inputs()
    model.drop.p = 0.0
    plain = copy.deepcopy(model)
    fitted = at_share(model, 0.7, x, targets=y, loss=F.cross_entropy)
    assert fitted.loss is not None
    for name, size in (("kernels_of", 6), ("code_of", 16)):  # while kernels are made, and while it is planned
        given, labels = torch.randn(size, 3, 32, 32), torch.arange(size) % 10

        def fails(part: Any, name: str = name) -> Any:
            raise RuntimeError(f"{name}: out of disk space")

        said = f"a call runs unplanned: The .* pass could not be compiled: .*{name}: out"
        with monkeypatch.context() as patch:
            patch.setattr(inductor, name, fails)
            with pytest.warns(UserWarning, match=said):
                found = fitted.loss(given, labels)
        torch.testing.assert_close(found, F.cross_entropy(plain(given), labels))


def test_what_the_compiler_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(part: Any) -> Any:
        raise RuntimeError(
            "C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\na.cpp:1:10: fatal error: Python.h: none"
        )

    monkeypatch.setattr(inductor, "code_of", fails)
    with pytest.raises(CompileError, match=r"C\+\+ compile error: a.cpp:1:10: fatal error: Python.h: none"):
        fit(nn.Linear(8, 8), torch.ones(4, 8), loss=torch.sum, budget="1MB", **GIVEN)


def test_what_a_killed_process_has_left_in_the_cache_is_to_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(part: Any) -> Any:
        raise ImportError("/tmp/cache/xf/kernel.so: file too short")

    monkeypatch.setattr(inductor, "kernels_of", fails)
    with pytest.raises(CompileError, match=r"/tmp/cache/xf/kernel.so: file too short.*Delete that file"):
        fit(nn.Linear(8, 8), torch.ones(4, 8), loss=torch.sum, budget="1MB", **GIVEN)


def test_without_a_directory_for_its_cache_one_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")

    monkeypatch.setattr(_torch, "cpp_compiler", fails)
    with pytest.raises(UsageError, match=r"'/nowhere'.*TORCHINDUCTOR_CACHE_DIR"):
        fit(nn.Linear(2, 2), torch.ones(1, 2), budget="1MB", engine="inductor")


@torch.library.custom_op("memplan_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


turned.register_fake(torch.empty_like)  # which it is not: its strides are others
turned.register_autograd(lambda ctx, gradient: gradient)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return turned(self.linear(x)) * 2


@pytest.mark.slow
def test_an_op_that_is_not_what_it_says_is_named() -> None:
    model = Turning()
    with pytest.raises(CompileError, match=r"(?s)expected size .*memplan_tests.turned.*register_fake"):
        fit(model, torch.ones(4, 8), loss=torch.sum, budget="1MB", **GIVEN)
    assert _torch.call_of_module(model) is None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(64, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)[0])


@pytest.mark.slow
def test_what_an_opaque_call_takes_is_predicted() -> None:
    """An LSTM's kernels hold a quarter of the step's memory beyond what they return."""
    torch.manual_seed(0)
    fitted = fit(Recurrent(), torch.randn(16, 16, 64), loss=torch.sum, budget="1GB", **GIVEN)
    holds(fitted)
    assert fitted.plan.peak == pytest.approx(fitted.proof.peak, rel=0.01)


def everything(model: nn.Module) -> list[Any]:
    """What a fit must leave as it is: the model, and torch."""
    modules = list(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    configs: list[Any] = [importlib.import_module(f"torch.{name}.config") for name in ("_inductor", "_functorch")]
    return [
        [(id(one), one.training, one.forward, sorted(vars(one)), _torch.call_of_module(one)) for one in modules],
        [sorted(getattr(one, hooks)) for one in modules for hooks in vars(one) if hooks.endswith("_hooks")],
        [(id(one), one.data_ptr(), one.requires_grad, one.tolist()) for one in tensors],
        [(id(one.grad), one.grad.tolist()) if one.grad is not None else None for one in tensors],
        [one._backward_hooks for one in tensors],
        [torch.get_rng_state().tolist(), random.getstate()],
        [config.save_config_portable() for config in configs],
        [torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")],
        [torch.get_default_dtype(), torch.get_num_threads(), torch.is_inference_mode_enabled()],
    ]


def interrupted_at(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the second call of a function."""
    owner: Any = importlib.import_module(place.partition(":")[0])
    *path, name = place.partition(":")[2].split(".")
    for part in path:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), list[None]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True], ids=["plain", "early"])
@pytest.mark.parametrize(
    "place",
    [
        "torch._inductor.graph:GraphLowering.codegen",  # the plan is made
        "memplan._torch.inductor:kernels_of",  # the plan is compiled, in place of the model's call
        "memplan.planning.inductor.partition:Halves.backward",  # the proof runs
    ],
)
def test_an_interrupted_fit_leaves_everything_as_it_was(
    place: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, (x, y) = Net(), inputs()
    model.norms[1].eval()
    F.cross_entropy(model(x), y).backward()
    if early:
        model.zero_grad(set_to_none=True)  # as it has to be
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "early": True} if early else {}
    interrupted_at(place, monkeypatch)
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        fit(model, x, targets=y, loss=F.cross_entropy, budget="1GB", **options, **GIVEN)
    for one, other in zip(everything(model), before, strict=True):
        assert one == other


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="'graph' or 'inductor'"):
        fit(nn.Linear(2, 2), torch.ones(1, 2), budget="1MB", engine="tvm")  # type: ignore[arg-type]  # which it checks
