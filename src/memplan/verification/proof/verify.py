"""Run a candidate beside a reference, step by step, and compare everything that a training step leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError, TargetError, UsageError
from memplan.trace.step import StepOptions
from memplan.verification.measurement.peak_and_time import Meter, compare_times
from memplan.verification.measurement.state_copies import RandomState, random_state_kept
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.differences import Compared, Difference, difference, named_outputs, output_differences
from memplan.verification.proof.proof import KINDS, Proof
from memplan.verification.proof.rounding import (
    LOSSY,
    ROUNDING,
    Rounded,
    Tolerance,
    floating,
    is_rounding,
    is_truth,
    overall,
    rounded,
    serious,
    told_truth,
)


def verify(
    reference: Any,
    candidate: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    autocast: torch.dtype | str | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    budget: int | None = None,
    pairs: int = 5,
) -> Proof:
    """Run both for some steps from the same state, and compare outputs, gradients, buffers, random streams and updated
    parameters bit for bit; measure the peak of each and the time.

    Parameters, buffers and ``.grad`` of both, the inputs and the random state stay as they are: copies are used.

    Args:
        reference, candidate: modules with the same names of parameters and the same values, or callables. A callable
            beside a module runs on that module's parameters.
        inputs, kwargs, targets, loss, autocast: as for `memplan.explain`.
        optimizer: a callable of the parameters. SGD with momentum where none is given; then no update is part of the
            measured peak.
        steps: how many are compared, one after the other.
        micro_batches: backward passes before each update.
        budget: bytes that the candidate's measured peak may reach; None: any.
        pairs: how many times both are timed; 0: not at all.

    Raises:
        TargetError: neither modules nor callables.
        InputError: parameters of other names, or what `memplan.explain` raises it for.

    Example:
        >>> memplan.verify(model, checkpointed, "8x3x32x32").ok
        True
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"steps={steps!r}", expected="a whole number of steps, at least 1")
    options = StepOptions(
        inputs, kwargs, tuple(targets) if isinstance(targets, (list, tuple)) else (targets,), loss, optimizer, autocast
    ).checked()
    assert options.autocast is None or isinstance(options.autocast, torch.dtype), "options were checked"
    work = Work(
        options.inputs, options.kwargs, options.targets, loss, optimizer, options.autocast, micro_batches
    )  # fmt: skip
    modules = _modules(reference, candidate)
    with random_state_kept():
        one = Trial("reference", reference, modules[0], work)
        other = Trial("candidate", candidate, modules[1], work)
        _check_names(one, other)
        proof = compare(one, other, steps, budget=budget)
        return proof if pairs == 0 else with_times(proof, one, other, pairs)


def compare(
    reference: Trial,
    candidate: Trial,
    steps: int,
    *,
    predicted: int | None = None,
    budget: int | None = None,
    rounding: Rounding | None = None,
) -> Proof:
    """Run both sides step by step. Random streams move on: the caller puts them back.

    Args:
        reference, candidate: sides that have not run yet.
        steps: how many.
        predicted, budget: bytes, for the proof.
        rounding: what tells rounding from errors, where the bits may be others. Then each step begins where the
            reference's does, and parameters are not compared: they follow from the gradients.
    """
    found = _Found(rounding)
    found.start(reference, candidate)
    sides = (reference, candidate) if rounding is None else rounding.around(reference, candidate)
    resident = 0, 0
    with _rested(sides), Meter() as meter:
        for step in range(steps):
            before = RandomState.now()
            for side in sides:
                side.prepare()
                before.restore()
                side.gradients_of_step(meter)
                found.after[side.name] = RandomState.now()
            resident = candidate.resident, reference.resident
            found.step(step, reference, candidate)
            for side in sides if candidate.early else (reference, candidate):
                side.update_step(meter)
            found.update(step, reference, candidate)
            found.after[reference.name].restore()
            for side in sides:
                side.rest()
    return Proof(
        steps=steps,
        micro_batches=reference.work.micro_batches,
        optimizer="no optimizer" if reference.update is None else type(reference.update).__name__,
        early=candidate.early,
        outputs=found.compared("outputs"),
        gradients=found.compared("gradients"),
        parameters=found.compared("parameters"),
        buffers=found.compared("buffers"),
        random_streams=tuple(found.streams),
        resident=resident[0],
        peak=resident[0] + meter.measured(candidate.name).growth_peak,
        reference_peak=resident[1] + meter.measured(reference.name).growth_peak,
        predicted=predicted,
        budget=budget,
        torch=torch.__version__,
        grade="exact" if rounding is None else "lossy" if rounding.lossy else "reordered",
        rounded=tuple(found.rounded),
        truth="" if rounding is None else rounding.truth.name,
    )


@contextmanager
def _rested(sides: Iterable[Trial]) -> Iterator[None]:
    """Where one of them fails, nothing is left that another try would free: its peak would come out too low."""
    try:
        yield
    finally:
        for side in sides:
            side.rest()


USELESS = 0.5
"""The share of all gradients by which plain autocast is off where it says nothing: mostly it drew other numbers."""


@dataclass(frozen=True)
class Sides:
    """What a planned step is held against."""

    reference: Trial
    """The step as it is."""
    truth: Trial | None = None
    """In float64."""
    compiled: Trial | None = None
    """By `torch.compile`, without a plan."""
    lowered: Trial | None = None
    """Under plain autocast, without a plan."""


def compare_rounded(sides: Sides, candidate: Trial, steps: int, *, predicted: int | None, budget: int | None) -> Proof:
    """As `compare`, for a candidate whose additions are in another order than the reference's.

    The rounding of the step as it is is allowed; where the candidate's is larger, also that of `torch.compile`. A model
    that does not run in float64, or draws other random numbers there, is held against the step as it is, and then
    `torch.compile` says what rounding is; where that does not run either, or draws other numbers itself, only the few
    last places are allowed that anything is.
    """
    truth, compiled = sides.truth, sides.compiled
    assert truth is not None
    assert compiled is not None
    first: Proof | None = None
    try:
        first = compare(
            sides.reference, candidate, steps, predicted=predicted, budget=budget, rounding=Rounding(truth)
        )  # fmt: skip
    except Exception:  # the model's own code runs, which may insist on a dtype
        truth = sides.reference
    if first is not None and not is_truth(first.rounded):
        first, truth = None, sides.reference
    if first is not None and (first.same or first.random_streams):
        return first
    for side in dict.fromkeys((sides.reference, candidate, truth, compiled)):
        side.restart_as(sides.reference)
    rounding, beside = Rounding(truth, (compiled,)), None
    with suppress(Exception):  # what torch.compile cannot do says nothing of the candidate
        beside = compare(sides.reference, candidate, steps, predicted=predicted, budget=budget, rounding=rounding)
    exact = truth is not sides.reference
    if beside is not None and is_rounding(beside.rounded, exact=exact):  # else torch.compile drew other numbers
        return beside
    if first is not None:
        return first
    for side in dict.fromkeys((sides.reference, candidate, truth)):
        side.restart_as(sides.reference)
    rounding = Rounding(truth)
    return compare(sides.reference, candidate, steps, predicted=predicted, budget=budget, rounding=rounding)


def compare_lossy(sides: Sides, candidate: Trial, steps: int, *, predicted: int | None, budget: int | None) -> Proof:
    """As `compare`, for a candidate that computes or saves in fewer bits.

    It is held against the step in float64; where that does not run, or draws other random numbers, against the step as
    it is. The errors of plain autocast say what is allowed (`rounding.LOSSY`); where autocast does not run, or is
    farther off than half of all gradients, those of the step as it is.
    """
    sides_of_autocast = () if sides.lowered is None else (sides.lowered,)
    ways = [(truth, others) for truth in (sides.truth, sides.reference) for others in (sides_of_autocast, ())]
    proof, failed, false = None, None, False
    for truth, others in dict.fromkeys(ways):
        if truth is None or (false and truth is sides.truth):
            continue
        for side in dict.fromkeys((sides.reference, candidate, truth, *others)) if proof or failed else ():
            side.restart_as(sides.reference)
        rounding = Rounding(truth, others, LOSSY)
        try:
            proof = compare(sides.reference, candidate, steps, predicted=predicted, budget=budget, rounding=rounding)
        except Exception as error:  # the model's own code runs, which may insist on a dtype
            failed = error
            continue
        false = truth is sides.truth and not is_truth(proof.rounded)
        told = overall(proof.rounded, "parameters" if candidate.early else "gradients")
        if not false and not (others and told.reference > USELESS * told.norm):
            return proof
    if proof is None:
        assert failed is not None, "the step as it is is among the ways"
        raise failed
    return proof


def with_times(proof: Proof, reference: Trial, candidate: Trial, pairs: int) -> Proof:
    """The proof with the seconds of both, which have run before and rest now."""
    return replace(proof, times=compare_times(reference.seconds, candidate.seconds, pairs))


@dataclass(frozen=True)
class Rounding:
    """The sides that tell rounding from errors."""

    truth: Trial
    """In float64."""
    others: tuple[Trial, ...] = ()
    """Other ways to run the step whose rounding is taken for granted, beside the reference."""
    tolerance: Tolerance = ROUNDING

    @property
    def lossy(self) -> bool:
        """Whether more than rounding is allowed."""
        return self.tolerance is not ROUNDING

    @property
    def sides(self) -> tuple[Trial, ...]:
        """All of them."""
        return (self.truth, *self.others)

    def around(self, *sides: Trial) -> tuple[Trial, ...]:
        """Those that are compared, and these, each once."""
        return tuple(dict.fromkeys((*sides, *self.sides)))


@dataclass
class _Found:
    """What differs so far. After the first step that differs nothing is compared: what comes later follows from it."""

    rounding: Rounding | None = None
    tensors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    differences: dict[str, list[Difference]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    rounded: list[Rounded] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    after: dict[str, RandomState] = field(default_factory=dict)
    """By side: where the random streams are when its backward pass has ended."""
    _stopped: bool = False
    _before: dict[str, torch.Tensor] = field(default_factory=dict)
    _eps: dict[str, float] = field(default_factory=dict)
    """Parameters before the step, where it is their updates that are held against others."""

    def start(self, reference: Trial, candidate: Trial) -> None:
        """Before the first step: the same values."""
        theirs = candidate.parameters | candidate.buffers
        for name, one in (reference.parameters | reference.buffers).items():
            if difference(name, 0, one, theirs.get(name)) is not None:
                raise InputError(
                    f"{name} is not the same in reference and candidate",
                    expected="modules with the same parameters and buffers",
                    do="Load the one's state_dict into the other",
                )
        self._note(reference, candidate)

    def _note(self, reference: Trial, candidate: Trial) -> None:
        if candidate.early and self.rounding is not None:
            named = floating(reference.parameters)
            self._before = {name: one.detach().to(torch.float64, copy=True) for name, one in named.items()}
            self._eps = {name: torch.finfo(one.dtype).eps for name, one in named.items()}

    def _judged(self, kind: str, named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What is held against others: of parameters, where they are known from before, what was added to them."""
        found = floating(named)
        if kind != "parameters" or not self._before:
            return found
        return {name: one.detach().to(torch.float64) - self._before[name] for name, one in found.items()}

    def _coarse(self, kind: str, named: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """By what was added to a parameter: one rounding of the parameter, which the sum cannot be nearer than."""
        if kind != "parameters" or not self._before:
            return {}
        return {name: self._eps[name] * float(self._before[name].norm()) for name in named if name in self._eps}

    def step(self, step: int, reference: Trial, candidate: Trial) -> None:
        """After both backward passes."""
        if self._stopped:
            return
        number, differences = output_differences(step, reference.output, candidate.output)
        self._add("outputs", step, (reference, candidate), lambda side: named_outputs(side.output), differences, number)
        if not candidate.early:
            self._named("gradients", step, reference, candidate)
        self._named("buffers", step, reference, candidate)
        self.streams += self.after[reference.name].differing(self.after[candidate.name])

    def update(self, step: int, reference: Trial, candidate: Trial) -> None:
        """After both updates."""
        if self._stopped:
            return
        if self.rounding is None or candidate.early:
            self._named("parameters", step, reference, candidate)
        if self.rounding is not None:
            for side in (candidate, *self.rounding.sides):
                side.begin_as(reference)
            self._note(reference, candidate)
        self._stopped = bool(self.streams or any(self.differences.values()))

    def compared(self, kind: str) -> Compared:
        """All of one kind."""
        return Compared(self.tensors[kind], tuple(self.differences[kind]))

    def _named(self, kind: str, step: int, reference: Trial, candidate: Trial) -> None:
        ours, theirs = getattr(reference, kind), getattr(candidate, kind)
        names = ours.keys() | theirs.keys()
        found = [difference(name, step, ours.get(name), theirs.get(name)) for name in names]
        differences = [one for one in found if one is not None]
        self._add(kind, step, (reference, candidate), lambda side: getattr(side, kind), differences, len(names))

    def _add(
        self,
        kind: str,
        step: int,
        sides: tuple[Trial, Trial],
        named: Callable[[Trial], Mapping[str, Any]],
        differences: list[Difference],
        number: int,
    ) -> None:
        """Note differences; without those that are rounding, where that is allowed."""
        self.tensors[kind] += number
        if self.rounding is not None:
            reference, candidate = sides
            others = [self._judged(kind, named(side)) for side in (reference, *self.rounding.others)]
            truth, ours = self._judged(kind, named(self.rounding.truth)), self._judged(kind, named(candidate))
            judged = rounded(kind, step, truth, others, ours, self.rounding.tolerance, self._coarse(kind, ours))
            self.rounded += judged
            differences = serious(differences, judged, told_truth(self.rounding.truth.name))
        self.differences[kind] = sorted(self.differences[kind] + differences, key=lambda one: one.name)


def _modules(reference: Any, candidate: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Whose state each runs on."""
    for what in (reference, candidate):
        if not callable(what):
            raise TargetError(f"{type(what).__name__} {what!r:.60}", expected="a module or a callable", do="Pass one")
    one = reference if isinstance(reference, nn.Module) else None
    other = candidate if isinstance(candidate, nn.Module) else None
    return (one or other, other or one)


def _check_names(reference: Trial, candidate: Trial) -> None:
    for what in ("parameters", "buffers"):
        ours, theirs = getattr(reference, what).keys(), getattr(candidate, what).keys()
        if ours != theirs:
            raise InputError(
                f"the candidate's {what} are not the reference's: {', '.join(sorted(ours ^ theirs)[:5])} in one only",
                expected="modules with the same names",
                do="Compare a model with a copy of itself",
            )
