"""A proof is worth what it can refuse: each candidate here is right but for one small thing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from truth.cpu_allocator import allocations, peak_of
from truth.module_state import everything

from memplan.errors import InputError, TargetError, UsageError
from memplan.verification.measurement.peak_and_time import Meter
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.proof import Proof
from memplan.verification.proof.rounding import EXACT, LOSSY, NEAR_KINKS, ROUNDING, Tolerance
from memplan.verification.proof.verify import Baselines, InFloat64, compare, verify


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(12, 4)

    def body(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.stem(x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class OneUlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        changed = tangents[0].clone()
        changed[0] = changed[0].nextafter(torch.tensor(torch.inf))
        return changed


class GradientOff(Net):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(x), self.head.weight, OneUlp.apply(self.head.bias))


class NormTwice(Net):
    def body(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        self.norm(hidden.detach())
        return self.drop(self.norm(hidden).relu())


class Redrawn(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False))


class OneDrawFurther(Net):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        torch.rand(1)
        return output


class NoGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(x), self.head.weight, self.head.bias.detach())


class OtherOutput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * 3 + 1e-6


class OtherLayout(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


class OldWeight(Net):
    """As a cache that never hears of an update."""

    def __init__(self) -> None:
        super().__init__()
        self.old: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.old = self.head.weight.detach().clone() if self.old is None else self.old
        weight = self.old + (self.head.weight - self.head.weight.detach())
        return nn.functional.linear(self.body(x), weight, self.head.bias)


class CountLost(Net):
    def body(self, x: Tensor) -> Tensor:
        norm = self.norm
        hidden = nn.functional.batch_norm(
            self.stem(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.1, norm.eps
        )
        return self.drop(hidden.relu())


def made(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize(
    ("kind", "part", "said"),
    [
        (GradientOff, "gradients", "the gradient of head.bias differs by up to"),
        (NormTwice, "buffers", "the buffer norm.num_batches_tracked differs by up to 1 "),
        (Redrawn, "gradients", "the gradient of stem.weight differs"),
        (OneDrawFurther, "random_streams", "the random stream of torch is elsewhere"),
        (NoGradient, "gradients", "the gradient of head.bias is missing in step 1"),
        (OtherOutput, "outputs", "the output differs by up to"),
        (OtherLayout, "outputs", "the output has the strides (1, 8), not (4, 1)"),
        (OldWeight, "outputs", "in step 2"),
        (CountLost, "buffers", "the buffer norm.num_batches_tracked differs"),
    ],
)
def test_what_is_wrong_is_found_and_named(kind: type[Net], part: str, said: str) -> None:
    proof = verify(made(), made(kind), "8x6", pairs=0)
    assert not proof.ok
    assert not proof.exact
    assert any(said in text for text in proof.failures), proof.failures
    found = getattr(proof, part)
    assert found if part == "random_streams" else not found.equal
    assert "NOT the same" in str(proof)


def test_a_gradient_one_ulp_off_is_the_only_thing_named_in_its_step() -> None:
    proof = verify(made(), made(GradientOff), "8x6", pairs=0)
    assert [(one.name, one.step) for one in proof.gradients.differences] == [("head.bias", 0)]
    assert proof.gradients.differences[0].max_abs is not None
    assert 0 < proof.gradients.differences[0].max_abs < 1e-5
    assert proof.outputs.equal
    assert proof.buffers.equal


class Checkpointed(Net):
    def body(self, x: Tensor) -> Tensor:
        return self.drop(checkpoint(torch.relu, self.norm(self.stem(x)), use_reentrant=False))


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
@pytest.mark.parametrize("autocast", [None, "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_is_right_passes(optimizer: Any, autocast: str | None, micro_batches: int) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "autocast": autocast, "micro_batches": micro_batches}
    proof = verify(
        made(), made(Checkpointed), "8x6", targets="8:int64<4", loss=nn.functional.cross_entropy, pairs=1, **options
    )
    assert proof.failures == ()
    assert proof.ok
    assert (proof.steps, proof.gradients.tensors, proof.buffers.tensors) == (3, 18, 9)
    assert proof.optimizer == ("SGD" if optimizer is None else "AdamW")
    assert proof.times is not None


def test_gradients_that_are_not_added_to_those_held_are_found() -> None:
    class Fresh(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.head.bias.grad = None
            return super().forward(x)

    assert verify(made(), made(Fresh), "8x6", pairs=0).ok
    proof = verify(made(), made(Fresh), "8x6", pairs=0, micro_batches=2)
    assert [one.name for one in proof.gradients.differences] == ["head.bias"]


def test_nothing_of_the_users_changes() -> None:
    reference, candidate = made(), made(NormTwice)
    x = torch.randn(8, 6, requires_grad=True)
    reference.head.weight.grad = torch.ones(4, 12)
    candidate.head.weight.register_hook(lambda g: pytest.fail("a hook of the user's"))
    before = everything(reference, x), everything(candidate, x)
    with torch.no_grad():
        verify(reference, candidate, x, pairs=1, optimizer=torch.optim.AdamW)
    assert (everything(reference, x), everything(candidate, x)) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_of_the_users_changes_on_an_error(error: type[BaseException]) -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            output.register_hook(self.fail)
            return output

        def fail(self, _: Tensor) -> None:
            raise error

    reference, candidate = made(), made(Fails)
    before = everything(reference), everything(candidate)
    with pytest.raises(error):
        verify(reference, candidate, "8x6")
    assert (everything(reference), everything(candidate)) == before


def test_peaks_are_those_of_the_allocator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())))
    x = torch.randn(256, 64)

    class Less(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return checkpoint_sequential(list(self), 4, x, use_reentrant=False)

    less = Less(*copy.deepcopy(model))

    def plain(one: nn.Module) -> Callable[[], None]:
        def run() -> None:
            for _ in range(3):
                one.zero_grad()
                out = one(x)
                out.sum().backward()

        return run

    proof = verify(model, less, x, pairs=0)
    resident = sum(t.nbytes for t in (*model.parameters(), x))
    assert proof.resident == resident
    for one, peak in ((model, proof.reference_peak), (less, proof.peak)):
        one.zero_grad()
        assert peak - resident == pytest.approx(peak_of(allocations(plain(one))), rel=0.01)
    assert proof.peak < proof.reference_peak


def test_the_budget_is_part_of_the_proof() -> None:
    free = verify(made(), made(), "8x6", pairs=0)
    assert verify(made(), made(), "8x6", pairs=0, budget=free.peak).ok
    over = verify(made(), made(), "8x6", pairs=0, budget=free.peak - 1)
    assert not over.ok
    assert over.exact
    assert over.failures == ("the measured peak is 1 B over the budget of " + memplan_bytes(free.peak - 1),)


def memplan_bytes(number: int) -> str:
    from memplan._bytes import format_bytes

    return format_bytes(number)


def test_callables_and_gradients_of_inputs() -> None:
    x = torch.randn(5, requires_grad=True)
    assert verify(torch.sin, lambda x: checkpoint(torch.sin, x, use_reentrant=False), x, pairs=0).ok
    wrong = verify(torch.sin, lambda x: x.detach().sin() + 0 * x, x, pairs=0)
    assert [one.name for one in wrong.gradients.differences] == ["input 0"]
    assert wrong.outputs.equal


def test_a_callable_runs_on_the_modules_parameters() -> None:
    model = made()
    before = everything(model)
    assert verify(model, lambda x: model.head(model.body(x)), "8x6", pairs=0).ok
    assert not verify(model, lambda x: model.head(model.body(x)) * 2, "8x6", pairs=0).ok
    assert everything(model) == before


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        (lambda: verify(3, made(), "8x6"), TargetError, "int 3"),
        (lambda: verify(made(), nn.Linear(6, 4), "8x6"), InputError, "head.bias"),
        (lambda: verify(made(), Net(), "8x6"), InputError, "not the same in reference and candidate"),
        (lambda: verify(made(), made(), "8x6", steps=0), UsageError, "steps=0"),
        (lambda: verify(made(), made(), "8y6"), InputError, "does not describe"),
        (
            lambda: verify(m := made(), m, "8x6", optimizer=lambda _: torch.optim.SGD(made().parameters(), lr=1)),
            InputError,
            "other parameters than it was given",
        ),
    ],
)
def test_bad_usage(run: Callable[[], Proof], error: type[Exception], said: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(error, match=said):
        run()


def test_an_optimizer_that_asks_the_module_gets_the_copies() -> None:
    model = made()
    assert verify(model, model, "8x6", pairs=0, optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=0.1)).ok


class _InOrder(torch.autograd.Function):
    """A product by a weight, whose gradient is the sum of three rows, in order."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.factor = factor
        return weight * 3

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return tangents[0] * ctx.factor * ((rows[0] + rows[1]) + rows[2]), None, None


class InOrder(nn.Module):
    """Two weights; ``order``: in which the gradient's rows are added, ``factor``: of the gradient."""

    def __init__(self, *order: int, factor: float = 1.0) -> None:
        super().__init__()
        self.weight, self.order, self.factor = nn.Parameter(torch.ones(512)), list(order), factor
        self.other = nn.Parameter(torch.ones(4))

    def forward(self, rows: Tensor) -> Tensor:
        return _InOrder.apply(self.weight, rows[self.order], self.factor).sum() + self.other.sum()  # pyright: ignore


def rows_of(*first: float) -> Tensor:
    """Three rows of 512 elements; of the ``first`` elements, the rest is far from zero."""
    torch.manual_seed(0)
    rows = 1 + torch.rand(3, 512)
    rows[:, 0] = torch.tensor(first)
    return rows


AT_ZERO = rows_of(1.0, 2**-25, -1.0)
"""1 + 2^-25 - 1 is 2^-25; added from the left, float32 loses it."""


def proof_of_early(candidate: nn.Module, optimizer: Any, tolerance: Tolerance, rows: Tensor = AT_ZERO) -> Proof:
    """Compare updates in the backward pass with a gradient that is added in an order in which float32 loses nothing."""
    model, work = InOrder(0, 2, 1), Work((rows,), optimizer=optimizer)
    truth = None if tolerance is EXACT else Trial("float64", model, model, work, float64=True)
    early = Trial("candidate", candidate, candidate, work, in_backward=True)
    return compare(Baselines(Trial("reference", model, model, work), truth), early, 2, tolerance)


GRADES = [ROUNDING, LOSSY]


@pytest.mark.parametrize("tolerance", GRADES, ids=lambda tolerance: tolerance.grade)
def test_an_early_update_may_turn_with_the_sign_of_a_gradient_near_zero(tolerance: Tolerance) -> None:
    """Adam's first update of that element is the learning rate, or nothing."""
    adam = functools.partial(torch.optim.AdamW, lr=0.1, eps=1e-12)
    moved = InOrder(0, 1, 2), InOrder(0, 2, 1)
    for model in moved:
        optimizer = adam(model.parameters())
        model(AT_ZERO).backward()
        optimizer.step()
    first, second = (model.weight.detach()[0] for model in moved)
    assert abs(float(first - second)) > 0.09
    proof = proof_of_early(InOrder(0, 1, 2), adam, tolerance)
    assert proof.failures == ()
    assert (proof.gradients.tensors, proof.parameters.tensors, proof.state.tensors) == (4, 4, 12)
    assert {error.name for error in proof.rounded if error.kind == "gradients"} == {"weight", "other"}
    assert max(error.error for error in proof.rounded) > 0  # another order was compared


@pytest.mark.parametrize("tolerance", [EXACT, *GRADES], ids=lambda tolerance: tolerance.grade)
def test_an_early_update_by_a_wrong_gradient_is_found_where_the_optimizer_hides_it(tolerance: Tolerance) -> None:
    """Adam's updates by a gradient that is twice as large are the same."""
    adam = functools.partial(torch.optim.AdamW, lr=0.1, eps=0.0)
    proof = proof_of_early(InOrder(0, 2, 1, factor=2.0), adam, tolerance)
    assert [(item.name, item.step) for item in proof.gradients.differences] == [("weight", 0)]
    assert proof.parameters.equal
    assert "the gradient of weight" in str(proof)


class ByAllGradients(torch.optim.Optimizer):
    """Divides each gradient by the norm of all."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.tensor([float(p.grad.norm()) for p in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["norm"] = norm.clone()
            parameter.sub_(parameter.grad / norm * self.param_groups[0]["lr"])


@pytest.mark.parametrize("tolerance", [EXACT, *GRADES], ids=lambda tolerance: tolerance.grade)
@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_an_early_update_that_is_not_the_optimizers_is_found(rate: float, tolerance: Tolerance) -> None:
    """With a learning rate of zero the optimizer's state alone differs."""
    proof = proof_of_early(InOrder(0, 2, 1), functools.partial(ByAllGradients, lr=rate), tolerance)
    assert proof.gradients.equal
    assert bool(proof.parameters.differences) is (rate > 0)
    assert [item.name for item in proof.state.differences] == ["norm of other", "norm of weight"]
    assert any("after the update norm of weight differs by" in text for text in proof.failures)


def test_the_copies_of_gradients_are_no_part_of_the_measured_peak() -> None:
    """A step with a gradient of 2 KiB after another; the copies of both would be 4 KiB more."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model, work = InOrder(0, 2, 1), Work((AT_ZERO,), optimizer=sgd)
    peaks = []
    for recorded in (False, True):
        trial = Trial("candidate", model, model, work, in_backward=True)
        trial.prepare()
        if recorded:
            trial.record_gradients()
        with Meter() as meter:
            trial.gradients_of_step(meter)
        assert set(trial.gradients.values()) == {None} or recorded
        peaks.append(meter.measured("candidate").growth_peak)
        trial.release()
    assert peaks[0] == peaks[1] > 0


@pytest.mark.parametrize(("long_seconds", "runs"), [(0.0, 4), (1e9, 5)])
def test_long_steps_that_were_compared_count_as_timed(
    long_seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are compared and three pairs timed: if the steps take long, one of the pairs is that of the
    comparison's second step: the first run prepares kernels."""
    monkeypatch.setattr("memplan.verification.proof.verify.LONG_SECONDS", long_seconds)
    counts = {"reference": 0, "candidate": 0}

    def counting(name: str) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            counts[name] += 1
            return x.tanh()

        return run

    reference, candidate = map(counting, counts)
    proof = verify(reference, candidate, torch.randn(4, 8, requires_grad=True), steps=2, pairs=3)
    assert proof.ok
    assert proof.times is not None
    assert proof.times.pairs == 3
    assert counts == {"reference": runs, "candidate": runs}


class Scaled(torch.autograd.Function):
    """The same numbers, with gradients that are multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.factor, None


def test_no_yardstick_excuses_a_wrong_gradient_after_a_step_that_agreed_in_float64() -> None:
    """The candidate is right in the first step, and three times too large from the second on."""
    torch.manual_seed(0)
    model, work, factors = nn.Linear(8, 4), Work((torch.randn(5, 8),)), [1.0, 3.0]

    def trial(name: str, function: Callable[..., Any] = model, **options: Any) -> Trial:
        return Trial(name, function, model, work, **options)

    baselines = Baselines(
        trial("reference"), trial("float64", float64=True), trial("yardstick", lambda x: Scaled.apply(model(x), -100.0))
    )
    candidate = trial("candidate", lambda x: Scaled.apply(model(x), factors.pop(0)))
    proof = compare(baselines, candidate, 2, NEAR_KINKS, in_float64=InFloat64(trial("in float64", float64=True)))
    assert not factors
    assert any("in step 2" in failure for failure in proof.failures)


class Products(nn.Module):
    """Products of all rows, or of some at a time."""

    def __init__(self, rows_at_once: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product, self.rows_at_once = nn.Linear(64, 1, bias=False), rows_at_once

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([self.product(part).float().sum() for part in rows.split(self.rows_at_once)]).sum()


def test_a_sum_in_another_order_is_allowed_under_autocast() -> None:
    """The gradient is the sum of 1.01 and -1: rounded to bfloat16, the step without a plan is a tenth from float64."""
    torch.manual_seed(0)
    one_and_minus_one = (torch.tensor([[1.0], [-1.0], [0.0]]) + 0.01 * torch.randn(3, 64) for _ in range(2))
    rows = torch.cat(list(one_and_minus_one))
    model, candidate, work = Products(6), Products(3), Work((rows,), autocast=torch.bfloat16)
    baselines = Baselines(Trial("reference", model, model, work), Trial("float64", model, model, work, float64=True))
    proof = compare(baselines, Trial("candidate", candidate, candidate, work), 2, ROUNDING)
    assert proof.failures == ()
    assert proof.truth == "float64"
    (first, _) = [error for error in proof.rounded if error.kind == "gradients"]
    assert 0.1 * first.norm < first.own < 0.2 * first.norm
    assert abs(first.error - first.own) > 0  # another order was compared
