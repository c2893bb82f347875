"""Tell rounding from errors: hold two steps against the same step in float64.

A candidate that adds in another order has other bits. Its error is measured against float64, and so is that of the step
without a plan: ``FACTOR`` times the latter is allowed, and ``SLACK`` eps of the largest gradient of the same module,
which is what remains of a gradient that is zero in exact arithmetic (a bias before a normalisation).

The error of a lossy candidate is measured in the same way; ``LOSSY`` allows a multiple of the error of plain autocast,
which people accept when they train in lower precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan._json import Measured
from memplan.planning.plan.plan import Grade
from memplan.verification.proof.differences import NOTHING, Difference

FACTOR = 2.0
SLACK = 64
SANE = 0.1
"""Share of all gradients. Where the step without a plan is farther from float64 than this, float64 computed something
else: mostly it drew other random numbers. Rounding alone can make 0.02 where batch norms of few samples follow one
another."""
ALIKE = 1000.0
"""`torch.compile` is no yardstick where its gradients are more than this many times as far from float64 as those of the
step without a plan: then it computed something else, mostly from other random numbers. (A sum of a batch norm's
outputs, which cancels out, is a hundred times as far.)"""

CHANCE = 1.25
"""Times the yardstick's error, which is allowed however large that is: two steps that round as much, in other places,
are not off by the same amount. (In a ResNet-18 of 16 random images autocast is off by half of some gradients, and so is
whatever computes in bfloat16: 1.02 times as much in other kernels.)"""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a candidate may be from the step in float64."""

    grade: Grade
    """``exact``: not at all, bits are compared and the other fields are not used."""
    factor: float = FACTOR
    """Times the largest error of the steps that it is held against."""
    slack: float = SLACK
    """And this many eps of the largest gradient of the same module."""
    dtype: torch.dtype | None = None
    """The dtype of that eps; None: the tensor's own."""
    share: float = math.inf
    """Share of the module's largest gradient, above which the factor is `CHANCE`: a gradient that is lost is as far off
    as it is large."""
    sane: float = SANE
    """Share of all gradients by which a yardstick may be off."""
    alike: float = ALIKE
    """Multiple of the own error of the step without a plan by which a yardstick may be off."""

    def allowed(self, reference: float, largest: float, dtype: torch.dtype) -> float:
        """Return the error that a tensor may have.

        Args:
            reference: the error of the steps that it is held against.
            largest: the norm of the largest gradient of the same module.
            dtype: the tensor's.
        """
        scaled = max(CHANCE * reference, min(self.factor * reference, self.share * largest))
        return scaled + self.slack * torch.finfo(self.dtype or dtype).eps * largest


EXACT = Tolerance("exact")
ROUNDING = Tolerance("reordered")
LOSSY = Tolerance("lossy", factor=4.0, slack=2.0, dtype=torch.bfloat16, share=0.75, sane=0.5, alike=math.inf)
"""Four times plain autocast's error (see ``share``), and two roundings to bfloat16 (1.6 %) of the module's largest
gradient. Where autocast is off by half, a tensor of few elements may be off by more and all of them together by less:
Adam's first updates are signs, and of 64 biases three turned under autocast and five in other kernels, 0.42 and 0.55
off, where over the whole net both were 0.36 off. Autocast that is off by more than half of all gradients is no
yardstick: mostly it drew other numbers."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Distance of a tensor from the same one in float64 (L2)."""

    kind: str
    """outputs, gradients, parameters or buffers."""
    name: str
    step: int
    """Number of the compared step, counted from 0."""
    error: Measured
    """Error of the candidate's tensor."""
    reference: Measured
    """Largest error of the steps that it is held against."""
    norm: Measured
    """Norm of the tensor in float64."""
    allowed: Measured
    own: Measured = 0.0
    """Error of the step without a plan. (Older files do not have it.)"""

    @property
    def within(self) -> bool:
        """Return whether the error is allowed; False for a nan."""
        return self.error <= self.allowed

    @property
    def relative(self) -> float:
        """Error of the candidate's tensor as a share of the norm."""
        return _share(self.error, self.norm)


def _share(error: float, norm: float) -> float:
    return error / norm if norm else 0.0 if error == 0 else math.inf


def rounded(
    kind: str,
    step: int,
    truth: Mapping[str, torch.Tensor],
    references: Sequence[Mapping[str, torch.Tensor]],
    candidate: Mapping[str, torch.Tensor],
    tolerance: Tolerance = ROUNDING,
    coarse: Mapping[str, float] = {},  # read only
) -> list[Rounded]:
    """Return the errors of a candidate's tensors of floating point.

    Args:
        kind: outputs, gradients, parameters or buffers.
        step: number of the step.
        truth: the tensors in float64, by name: what is before the last dot is the module.
        references: the same tensors of the steps that the candidate is held against, first the step without a plan.
        candidate: the same tensors of the candidate.
        tolerance: what is allowed.
        coarse: by name, what is allowed in addition.
    """
    alike = {name for name, one in candidate.items() if name in truth and one.shape == truth[name].shape}
    alike = {name for name in alike if all(name in one and one[name].shape == truth[name].shape for one in references)}
    norms = {name: _norm(tensor) for name, tensor in truth.items()}
    largest: dict[str, float] = {}
    for name, norm in norms.items():
        largest[_module(name)] = max(largest.get(_module(name), 0.0), norm)
    judged = list[Rounded]()
    for name in sorted(alike):  # other shapes and missing tensors are differences of their own
        exact = truth[name]
        errors = [distance(exact, one[name]) for one in references]
        most = norms[name] if kind == "outputs" else largest[_module(name)]  # each output is by itself
        allowed = tolerance.allowed(max(errors), most, candidate[name].dtype) + coarse.get(name, 0.0)
        error = distance(exact, candidate[name])
        judged.append(Rounded(kind, name, step, error, max(errors), norms[name], allowed, errors[0]))
    return judged


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def is_truth(judged: Sequence[Rounded]) -> bool:
    """Return whether the step without a plan is near enough to float64 for this to be the same computation."""
    own, _, norm = _of_gradients(judged)
    return own <= SANE * norm


def is_yardstick(judged: Sequence[Rounded], tolerance: Tolerance = ROUNDING, *, exact: bool = True) -> bool:
    """Return whether all steps that a candidate is held against computed the same: their largest error is rounding.

    Args:
        judged: the errors.
        tolerance: how far a yardstick may be off.
        exact: whether errors are measured from float64; else from the step without a plan, whose own error is 0.
    """
    own, reference, norm = _of_gradients(judged)
    beyond = math.inf if not exact else tolerance.alike * (own + torch.finfo(torch.float32).eps * norm)
    return reference <= min(tolerance.sane * norm, beyond)


def _of_gradients(judged: Sequence[Rounded]) -> tuple[float, float, float]:
    gradients = [one for one in judged if one.kind in ("gradients", "parameters")]
    own, reference, norm = (math.hypot(*(getattr(one, of) for one in gradients)) for of in ("own", "reference", "norm"))
    return own, reference, norm


@dataclass(frozen=True, slots=True)
class LayerError:
    """Distance of a layer's tensors from float64, over all of them and all steps (L2)."""

    kind: str
    layer: str
    """Name of the module; for outputs, of the output."""
    error: float
    reference: float
    """Largest error of the steps that it is held against."""
    norm: float

    @property
    def relative(self) -> float:
        """Error of the candidate as a share of the norm."""
        return _share(self.error, self.norm)

    @property
    def relative_reference(self) -> float:
        """Error of the steps that it is held against, as a share of the norm."""
        return _share(self.reference, self.norm)


def by_layer(judged: Sequence[Rounded]) -> tuple[LayerError, ...]:
    """Return a row for each output, and for the gradients of each layer, in the order of their names."""
    groups: dict[tuple[str, str], list[Rounded]] = {}
    for one in judged:
        groups.setdefault((one.kind, one.name if one.kind == "outputs" else _module(one.name)), []).append(one)
    return tuple(_added_up(kind, layer, ones) for (kind, layer), ones in groups.items())


def overall(judged: Sequence[Rounded], kind: str) -> LayerError:
    """Return the error of all tensors of a kind together."""
    return _added_up(kind, "all", [one for one in judged if one.kind == kind])


def _added_up(kind: str, layer: str, ones: Sequence[Rounded]) -> LayerError:
    sums = (math.hypot(*(getattr(one, what) for one in ones)) for what in ("error", "reference", "norm"))
    return LayerError(kind, layer, *sums)


def told_truth(name: str) -> str:
    """Name, for people, of the step that errors are measured from."""
    return "float64" if name == "float64" else "the step without a plan"


def serious(differences: Sequence[Difference], judged: Sequence[Rounded], truth: str = "float64") -> list[Difference]:
    """Keep the differences that are more than allowed, and describe them. ``truth``: what errors are measured from."""
    of = {one.name: one for one in judged}
    left = [one for one in differences if one.max_abs is None or not (one.name in of and of[one.name].within)]
    return [_told(one, of.get(one.name), truth) for one in left]


def _told(one: Difference, judged: Rounded | None, truth: str) -> Difference:
    if judged is None or one.max_abs is None:
        return one
    if math.isnan(judged.error):
        plain = "the step without a plan"
        own = f"and so has {plain}" if math.isnan(judged.own) else f"where {plain} has numbers"
        return replace(one, what=f"has a nan, {own}")
    if judged.error >= NOTHING * judged.norm:  # a gradient that is zero in truth: of it, everything is a multiple
        size = f"in L2, where {truth} has {judged.norm:.3g}"
        return replace(one, what=f"is {judged.error:.3g} from {truth} ({size}), and {judged.allowed:.3g} is allowed")
    off, allowed = (part / judged.norm for part in (judged.error, judged.allowed))
    return replace(one, what=f"is {off:.3g} from {truth} (relative, in L2), and {allowed:.3g} is allowed")


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the norm (L2) of the difference of two tensors, in float64. Infinities of the same sign do not differ."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, two = one.detach().to(wide), two.detach().to(wide)
    return float(torch.where(one == two, 0.0, one - two).norm())


def _norm(tensor: torch.Tensor) -> float:
    finite = torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.norm())


def floating(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Keep the tensors of floating point (real or complex)."""
    return {
        name: one
        for name, one in named.items()
        if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex())
    }
