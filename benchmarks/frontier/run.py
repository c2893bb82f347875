"""One case in this process: a step made to fit, beside the same step run eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memplan.verification.proof.float64_gradients import GradientErrors, drew_same_numbers, gradient_errors

from .cases import FLOOR, INDUCTOR_FLOOR, Case, Mode, Row
from .measure import live_bytes, pairs_of, peak_above, storage_bytes
from .models import MODELS, Subject
from .peers import PLAIN, Loss, group_of, peer

THREADS = 2


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of mode ``update``."""
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass
class Training:
    """A subject with the loss that is to be measured, as a step and what comes before it."""

    subject: Subject
    loss: Loss
    mode: Mode
    optimizer: torch.optim.Optimizer | None = None

    def prepare(self) -> None:
        """Gradients are taken away, or there already."""
        if self.mode != "held":
            self.subject.model.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Forward, loss, backward, and the update where there is one to do."""
        self.loss().backward()
        if self.optimizer is not None:
            self.optimizer.step()


def trained(subject: Subject) -> list[torch.nn.Parameter]:
    return [parameter for parameter in subject.model.parameters() if parameter.requires_grad]


def hold_gradients(subject: Subject) -> None:
    for parameter in trained(subject):
        parameter.grad = torch.zeros_like(parameter)


def resident(subject: Subject) -> int:
    """Bytes of weights, buffers, inputs and targets, and of the gradients that are there."""
    gradients = [parameter.grad for parameter in trained(subject) if parameter.grad is not None]
    model = subject.model
    return storage_bytes([*model.parameters(), *model.buffers(), *subject.inputs, *subject.targets, *gradients])


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    states = optimizer.state.values()
    return storage_bytes(item for state in states for item in state.values() if isinstance(item, Tensor))


def eager(case: Case) -> Training:
    """The step as it is written, with a model of its own."""
    subject = MODELS[case.model]()
    if case.mode == "held":
        hold_gradients(subject)
    return training_of(case, subject, "eager")


def training_of(case: Case, subject: Subject, name: str) -> Training:
    """The step as a peer does it, with the optimizer that the mode asks for."""
    optimizer = optimizer_of(trained(subject)) if case.mode == "update" else None
    return Training(subject, peer(subject, name), case.mode, optimizer)


def fitted(case: Case, subject: Subject) -> tuple[Training, Row]:
    """The step as memplan makes it fit, and what it says about that."""
    import memplan

    options: dict[str, Any] = {"targets": subject.targets, "loss": subject.loss, "device": "cpu", "pairs": 0}
    if case.mode == "update":
        options |= {"optimizer": optimizer_of, "early": True}
    options |= {"accumulate": 2} if case.mode == "held" else {}
    options |= {"engine": case.engine} if case.engine != "graph" else {}
    options |= {"allow": case.allow} if case.allow != "exact" else {}
    budget = case.budget
    if budget is None:
        assert case.method in (FLOOR, INDUCTOR_FLOOR), "every other case of ours has a budget"
        budget = smallest_budget(lambda: memplan.fit(subject.model, *subject.inputs, budget=1, **options))
    start = time.perf_counter()
    result = memplan.fit(subject.model, *subject.inputs, budget=budget, **options)
    said = {
        "fit_seconds": round(time.perf_counter() - start, 3),
        "given": budget,
        "predicted": result.plan.peak,
        "lower_bound": result.plan.lower_bound,
    }
    loss = lambda: result.loss(*subject.inputs, *subject.targets)  # noqa: E731
    return Training(subject, loss, case.mode, result.optimizer), said


def smallest_budget(attempt: Callable[[], Any]) -> int:
    """The least that a step can be given, as memplan refuses less."""
    from memplan.errors import BudgetError

    try:
        attempt()
    except BudgetError as error:
        return error.smallest_budget
    raise AssertionError("no step fits in one byte")


def same(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    """Whether two lists of tensors are equal bit by bit (but for the sign of a zero)."""
    pairs = zip(first, second, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def compare(reference: Training, candidate: Training) -> Row:
    """One step of each from the same random state: what comes out equal."""
    states: list[Tensor] = []
    for training in (reference, candidate):
        torch.manual_seed(1)
        training.prepare()
        training.step()
        states.append(torch.get_rng_state())
    models = (reference.subject.model, candidate.subject.model)
    one, other = ([parameter.grad for parameter in model.parameters()] for model in models)
    updated = reference.mode == "update"  # then gradients may be gone, and the parameters tell
    return {
        "gradients_equal": same([*models[0].parameters()], [*models[1].parameters()]) if updated else same(one, other),
        "buffers_equal": same([*models[0].buffers()], [*models[1].buffers()]),
        "random_state_equal": torch.equal(*states),
    }


def seen(training: Training) -> tuple[dict[str, Tensor | None], float, bool]:
    """Gradients and loss of one step from a fixed random state, and whether it drew random numbers."""
    training.prepare()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loss = training.loss()
    loss.backward()
    gradients = {name: one.grad for name, one in training.subject.model.named_parameters() if one.requires_grad}
    return gradients, float(loss.detach()), not torch.equal(before, torch.get_rng_state())


def in_float64(case: Case, name: str) -> Training:
    """The step in float64, as a peer does it."""
    subject = MODELS[case.model]()
    subject.model.double()
    subject.inputs, subject.targets = (
        tuple(one.double() if one.is_floating_point() else one for one in tensors)
        for tensors in (subject.inputs, subject.targets)
    )
    return Training(subject, peer(subject, name), "fresh")


def judged(case: Case, reference: Training, candidate: Training, plain: GradientErrors | None) -> Row:
    """The gradients of both held against float64, with the same random numbers.

    What is compiled as it is draws other ones than eager mode: then the float64 step is compiled, too, which draws
    those. ``plain`` are the errors of torch.compile without a budget, which others may have twice.
    """
    found, loss, _ = seen(candidate)
    eager, _, random = seen(reference)
    compiled = random and group_of(case.method) == "compiled"
    exact, true, _ = seen(in_float64(case, "eager"))
    base = gradient_errors(eager, exact)
    if compiled:
        exact, true, _ = seen(in_float64(case, PLAIN))
    if random and not drew_same_numbers(loss, true):
        return {"gradients": "not comparable"}
    errors = gradient_errors(found, exact)
    own = errors if case.method == PLAIN else plain
    wrong = errors.exceeding(*(one for one in (base, own) if one is not None))
    row: Row = {"error": errors.relative, "eager_error": base.relative}
    row = {f"gradient_{name}": float(f"{value:.4g}") for name, value in row.items()}
    if case.method == PLAIN:
        row["gradient_errors"] = {name: float(f"{value:.4g}") for name, value in errors.errors.items()}
    if (group_of(case.method) if not case.ours else case.allow) == "lossy":
        return row | {"gradients": "lossy"}
    if not wrong:
        return row | {"gradients": "right"}
    worst = max(wrong, key=wrong.__getitem__)
    return row | {"gradients": "wrong", "wrong": len(wrong), "worst": float(f"{wrong[worst]:.4g}"), "worst_in": worst}


def run(case: Case, pairs: int, plain: Row | None = None, seconds: float = 0.0) -> Row:
    """Peak, time and equality of one case.

    Args:
        case: which.
        pairs: how often both steps are timed, at least.
        seconds: as for `pairs_of`.
        plain: the result of torch.compile without a budget, if there is one.
    """
    torch.set_num_threads(THREADS)
    reference = eager(case)
    subject = MODELS[case.model]()
    if case.mode == "held":
        hold_gradients(subject)
    base = resident(subject)
    before = live_bytes()
    row: Row = {}
    if case.ours:
        candidate, row = fitted(case, subject)
    else:
        candidate = training_of(case, subject, case.method)
    # The reference's own gradients and state come in between, and are taken off.
    row |= compare(reference, candidate)
    reference.prepare()
    candidate.prepare()
    state = state_bytes(reference.optimizer)
    kept = live_bytes() - before - state
    above = peak_above(candidate.prepare, candidate.step)
    row |= {"resident": base + state, "kept": kept - state, "total": base + kept + above}
    row["above"] = row["total"] - row["resident"]
    row |= pairs_of((reference.prepare, reference.step), (candidate.prepare, candidate.step), pairs, seconds)
    if case.ours and group_of(case.beside) != "eager":
        row["beside"] = beside(case, candidate, pairs, seconds)
    if case.mode == "fresh" and not row["gradients_equal"]:
        errors = (plain or {}).get("gradient_errors")
        row |= judged(case, reference, candidate, None if errors is None else GradientErrors(errors))
    return row | {"torch": str(torch.__version__), "threads": THREADS}


def beside(case: Case, candidate: Training, pairs: int, seconds: float) -> Row:
    """Our step's time by turns with that of the peer that it stands beside."""
    other = training_of(case, MODELS[case.model](), case.beside)
    taken = pairs_of((other.prepare, other.step), (candidate.prepare, candidate.step), pairs, seconds)
    return {name: taken[name] for name in ("pairs", "ratio", "quartiles", "ratios")}
