"""Fit a step in a byte budget: plan it, put the plan in the place of the module's call, prove it, hand it over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import BudgetError, DeviceError, MemplanError, UsageError, VerificationError
from memplan.planning.losses import WithLoss
from memplan.planning.plan import Plan
from memplan.planning.planner import Planned, Planner, Settings
from memplan.planning.request import Request, request
from memplan.planning.search import Heuristics
from memplan.rewriting.early import update_early
from memplan.rewriting.install import Installed, install
from memplan.trace.model import HOST
from memplan.trace.spec import realize
from memplan.verification.fitting import Plans, say
from memplan.verification.measured import measure_step, storage_bytes
from memplan.verification.proof import Proof
from memplan.verification.states import ModuleCopy, attributes_kept, random_state_kept
from memplan.verification.trial import Trial, Work
from memplan.verification.verify import compare, with_times

ENGINES = ("graph",)
_STEPS = 3
_ATTEMPTS = 4
"""How often a plan is made that keeps the budget, with less each time, before it is given up."""


def fit(
    model: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Callable[..., Any] | None = None,
    budget: Any = None,
    optimizer: Callable[[Any], Any] | None = None,
    autocast: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    allow: str = "exact",
    engine: str = "graph",
    early: bool = False,
    accumulate: int = 1,
    clip_norm: float | None = None,
    plan: Plan | None = None,
    heuristics: Heuristics | None = None,
    pairs: int = 3,
) -> Fitted:
    """Make a training step run within a budget of bytes, with the same result bit for bit.

    It is planned, run beside the step as it is on copies of all that the model holds, compared and measured. Only then
    do calls of the model run as planned. Nothing is trained: parameters, buffers, gradients and random state stay.

    Args:
        model, inputs, kwargs, targets, loss, autocast: as for `memplan.explain`.
        budget: bounds everything on the device at any moment of the step: bytes, a size ("6 GiB"), or a card's name.
        optimizer: a callable of the parameters. Its state and its update are part of the step then.
        device: a card of whose kernels the seconds are to be, instead of this machine's.
        allow, engine: ``"exact"``, nothing that changes a bit; ``"graph"``, aten kernels in planned order.
        early: update each parameter in the backward pass, as soon as its gradient is complete, and free that.
        accumulate: micro-batches between two updates; with more than one, gradients are held when a step begins.
        clip_norm: the global norm that gradients are clipped at, where they are: then no update can be early.
        plan: a plan made before for this model and these inputs, instead of a search.
        heuristics: switches of the search.
        pairs: how many times the step is timed, with and without the plan.

    Returns:
        ``fitted.model`` is the model, its calls planned. Where the step fits as it is, ``fitted.changed`` is False.

    Raises:
        BudgetError: no plan fits; its ``smallest_budget`` is the least that one was found for.
        VerificationError: the planned step is not the step that it was. The model is as before.
        UsageError, RecordingError: what was asked for cannot be, or the step cannot be captured.

    Example:
        >>> fitted = memplan.fit(model, images, targets=labels, loss=F.cross_entropy, budget="6 GiB")
        >>> fitted.loss(images, labels).backward()
    """
    if engine not in ENGINES:
        raise UsageError(f"engine={engine!r}", expected=f"{' or '.join(map(repr, ENGINES))}", do="Leave it out")
    settings = Settings(0, optimizer, early=early, plan=plan, heuristics=heuristics or Heuristics())
    asked = request(
        model, inputs, kwargs=kwargs, targets=targets, loss=loss, budget=budget, autocast=autocast, device=device,
        allow=allow, clip_norm=clip_norm, accumulate=accumulate, settings=settings, fake=False,
    )  # fmt: skip
    _check_place(asked.step)
    with random_state_kept(), torch.inference_mode(False), torch.enable_grad():
        return _Fitting(asked, pairs).run()


@dataclass
class Fitted:
    """A model whose step runs within a budget."""

    model: nn.Module
    """The user's model; its calls run as planned."""
    loss: nn.Module | None
    """``(*inputs, *targets) -> loss``: model and loss as one planned graph, where a loss was given. This, not the
    model's own call, is what plan and proof are about then."""
    plan: Plan
    proof: Proof
    changed: bool
    """False where the step fits as it is: then nothing was changed."""
    optimizer: Any = None
    """The live optimizer where updates are early: its learning rate and state are the user's to use; its ``step()``
    has nothing left to do."""
    notes: list[str] = field(default_factory=list)
    """What has to be said, later calls that are planned anew among it."""
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Make the model run as it did before. Gradients stay for an ordinary update again."""
        while self._undo:
            self._undo.pop()()
        self.changed = False

    def __str__(self) -> str:
        if self.changed:
            head = f"{type(self.model).__name__} runs as planned"
        else:
            head = f"{type(self.model).__name__} is as it was: nothing is changed"
        return "\n".join([head, str(self.plan), str(self.proof), *(f"note: {note}" for note in self.notes)])


class _Fitting:
    """One call of `fit`."""

    def __init__(self, asked: Request, pairs: int) -> None:
        self.asked, self.pairs, self.settings = asked, pairs, asked.settings
        self.notes = list(asked.notes)
        args, kwargs = asked.call.rebuild(asked.call.tensors)
        self.work = Work(
            args, kwargs, optimizer=self.settings.optimizer, autocast=asked.autocast,
            micro_batches=2 if self.settings.held else 1,
        )  # fmt: skip
        self.planner = Planner(asked.step)
        self.handed_over = False
        if not asked.step.training:
            self.notes.append("planned in evaluation mode, as the model is: call model.train() first to train it")

    def run(self) -> Fitted:
        """Change nothing, or plan until the measured peak keeps the budget."""
        fitting = self._as_it_is()
        if fitting is not None:
            return fitting
        tightened, lowest = self.settings, None
        for _ in range(_ATTEMPTS):
            planned = self._planned(tightened, lowest)
            fitted = self._tried(planned, tightened)
            if fitted.proof.within_budget:
                self.handed_over = True
                return fitted
            fitted.undo()
            lowest = fitted.proof.peak if lowest is None else min(lowest, fitted.proof.peak)
            over = fitted.proof.peak - self.settings.budget
            self.notes.append(
                f"a plan for {format_bytes(tightened.budget)} was measured at {format_bytes(fitted.proof.peak)}: "
                "planned again with so much less"
            )
            if tightened.plan is not None:
                break
            tightened = replace(tightened, budget=min(tightened.budget, fitted.plan.peak) - over)
        assert lowest is not None
        raise self._over(lowest)

    def _as_it_is(self) -> Fitted | None:
        """The answer where the step fits without a plan, predicted and measured; None where it does not."""
        if self.settings.plan is not None or self.settings.early:
            return None
        with self._tracing():
            study = self.planner.study(self.asked.call, self.settings, key=0)
            if study.eager_peak(self.settings) > self.settings.budget:
                return None
            planned = study.planned(self.settings)
        sides = [Trial(name, self.asked.step, self.asked.step, self.work) for name in ("reference", "candidate")]
        predicted = planned.plan.eager_peak
        proof = compare(sides[0], sides[1], 2, predicted=predicted, budget=self.settings.budget)
        if not proof.within_budget:
            return None
        self.notes.append("it fits already: nothing is changed")
        loss = None if self.asked.step is self.asked.model else self.asked.step
        return Fitted(self.asked.model, loss, planned.plan, proof, False, None, self.notes)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        with attributes_kept(self.asked.step), self.asked.under_autocast():
            yield

    def _planned(self, settings: Settings, lowest: int | None) -> Planned:
        if settings.plan is not None and settings.plan.peak > self.settings.budget:
            raise BudgetError(
                f"The plan needs {format_bytes(settings.plan.peak)}",
                expected=f"one that needs no more than the budget of {format_bytes(self.settings.budget)}",
                do="Give it its budget, or leave the plan out",
                smallest_budget=settings.plan.peak,
            )
        try:
            with self._tracing():
                return self.planner.planned(self.asked.call, settings, key=0)
        except BudgetError:
            if lowest is None:
                raise
            raise self._over(lowest) from None

    def _over(self, lowest: int) -> BudgetError:
        return BudgetError(
            f"The budget is {format_bytes(self.settings.budget)}, and the planned step was measured above it",
            expected=f"at least {format_bytes(lowest)}, at which it ran",
            do="Give that, or look for what the plan does not know: a kernel that allocates more than its results",
            smallest_budget=lowest,
        )

    def _tried(self, planned: Planned, settings: Settings) -> Fitted:
        """The plan in place, with its proof. Whatever goes wrong, the module is as before."""
        step = self.asked.step
        reference = Trial("reference", step, step, self.work)  # copied before the plan is in place: runs without it
        plans = Plans(step, settings, self._told)
        plans.expect(planned)
        installed = install(step, plans)
        try:
            with random_state_kept():  # plans what is still to be planned: this is not to be measured
                first = Trial("first", step, step, self.work, early=settings.early)
                first.prepare()
                first.gradients_of_step()
                del first
            candidate = Trial("candidate", step, step, self.work, early=settings.early)
            candidate.beside = storage_bytes(planned.captured.constants.values())
            proof = compare(reference, candidate, _STEPS, predicted=planned.plan.peak, budget=self.settings.budget)
            if not proof.exact:
                raise self._differs(proof)
            if proof.within_budget and self.pairs:
                proof = with_times(proof, reference, candidate, self.pairs)
            return self._handed_over(planned, proof, installed)
        except BaseException:
            installed.undo()
            raise

    def _handed_over(self, planned: Planned, proof: Proof, installed: Installed) -> Fitted:
        asked, settings, undo = self.asked, self.settings, [installed.undo]
        loss = None
        if asked.step is not asked.model:
            loss = asked.step
            if proof.within_budget:
                spare = replace(settings, budget=max(0, settings.budget - self._loss_bytes()), plan=None)
                undo.append(install(asked.model, Plans(asked.model, spare, self._told)).undo)
        optimizer = None
        if settings.early and settings.optimizer is not None and proof.within_budget:
            optimizer = settings.optimizer(list(asked.step.parameters()))
            undo.append(update_early(optimizer).undo)
        return Fitted(asked.model, loss, planned.plan, proof, True, optimizer, self.notes, undo)

    def _loss_bytes(self) -> int:
        """What the loss by itself holds at the most, forward and backward: a call of the model alone leaves it room."""
        step = self.asked.step
        assert isinstance(step, WithLoss)
        args, kwargs = realize(self.work.inputs), realize(dict(self.work.kwargs))
        cut = len(args) - step.targets
        with ModuleCopy(step).in_place(), self.asked.under_autocast():
            with torch.no_grad():
                output = _torch.tree_map(_leaf, step.model(*args[:cut], **kwargs))

            def backward() -> None:
                step.loss(output, *args[cut:]).backward()

            return measure_step(backward).growth_peak

    def _differs(self, proof: Proof) -> MemplanError:
        return VerificationError(
            f"The planned step is {str(proof).splitlines()[0]}",
            expected="the step as it is, bit for bit",
            do="The model is as before. Please report this; a step that differs from run to run cannot be proven",
            proof=proof,
        )

    def _told(self, text: str) -> None:
        if self.handed_over:  # before that, it is planned for the proof
            self.notes.append(text)
            say(text)


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_()


def _check_place(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != HOST:
            raise DeviceError(
                f"{name} is on {tensor.device}",
                expected="a module on the CPU, whose allocations can be measured here",
                do="Move the model to the CPU, or use memplan.plan alone",
            )
