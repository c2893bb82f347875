"""Distinguish rounding from bugs: compare the errors of two steps, both measured from the same step in float64.

A candidate that adds in another order has other bits. Its error may be ``FACTOR`` times that of the step without a
plan, plus ``SLACK`` eps of the largest gradient of the same module. The latter is what rounding leaves of a gradient
that is zero in exact arithmetic, such as that of a bias before a normalisation.

A lossy candidate is judged in the same way; ``LOSSY`` allows a multiple of the error of plain autocast, which people
accept when they train in lower precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan._json import Measured
from memplan.planning.plan.plan import Grade
from memplan.verification.proof.differences import NEAR_ZERO, Difference, relative_error

FACTOR = 2.0
SLACK = 64
SANE = 0.1
"""Relative error of all gradients above which the float64 step is not the same computation as the step without a plan:
mostly it drew other random numbers. Rounding alone reaches 0.02, in consecutive batch norms of few samples."""
SANE_WITHOUT_DRAWS = 0.2
"""The same of a step that draws no random numbers. Rounding to bfloat16 reaches 0.14, in the batch norms of a U-Net
with attention gates under autocast: measured from the step without a plan, no sum in another order would be allowed."""
ALIKE = 1000.0
"""Multiple of the error of the step without a plan above which `torch.compile` is not the same computation, and so no
yardstick: mostly it drew other random numbers. Rounding alone reaches 100, in a sum of a batch norm's outputs, which
cancels out."""

CHANCE = 1.25
"""Multiple of the yardstick's error that is always allowed, since steps that round in different places have different
errors. In a ResNet-18 of 16 random images autocast loses half of some gradients, and other bfloat16 kernels lose 1.02
times as much."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed error of a candidate: ``factor`` times the largest error of its yardsticks, plus ``slack`` eps."""

    grade: Grade
    """``exact``: bits are compared, and the other fields are not used."""
    factor: float = FACTOR
    """Multiple of the largest error of the yardsticks."""
    slack: float = SLACK
    """Number of eps of the largest gradient of the same module."""
    dtype: torch.dtype | None = None
    """The dtype of that eps; None: the tensor's own."""
    share: float = math.inf
    """Share of the module's largest gradient, above which ``factor`` shrinks to `CHANCE`: the error of a gradient that
    is lost altogether is as large as the gradient."""
    sane: float = SANE
    """Largest relative error of all gradients of a yardstick."""
    further: float = 0.0
    """Share of the module's largest gradient that is allowed in addition, for gradients."""
    alike: float = ALIKE
    """Largest error of a yardstick, as a multiple of that of the step without a plan."""

    def allowed(self, reference: float, largest: float, dtype: torch.dtype) -> float:
        """Return the allowed error of a tensor (L2). ``reference`` is the largest error of the yardsticks, ``largest``
        the norm of the largest gradient of the same module."""
        scaled = max(CHANCE * reference, min(self.factor * reference, self.share * largest))
        return scaled + (self.slack * torch.finfo(self.dtype or dtype).eps + self.further) * largest


EXACT = Tolerance("exact")
ROUNDING = Tolerance("reordered")
NEAR_KINKS = Tolerance("reordered", alike=math.inf)
"""With `near_kinks` as the yardstick, whose error is a thousand times that of a step in which no decision flips."""
IN_FLOAT64 = Tolerance("reordered", slack=2.0**20, dtype=torch.float64)
"""For steps that are both in float64: they differ by 1e-15 to 1e-13, and 2e-10 are allowed."""
WITH_FLOAT32 = replace(IN_FLOAT64, slack=SLACK, dtype=torch.float32)
"""For such steps where the model's code makes tensors in float32 even in float64, such as a table."""
PROVEN = Tolerance("reordered", further=SANE)
"""For a step in float32 that is the same in float64: decisions that rounding flips change it by less."""
LOSSY = Tolerance("lossy", factor=4.0, slack=2.0, dtype=torch.bfloat16, share=0.75, sane=0.5, alike=math.inf)
"""Four times the error of plain autocast (see ``share``), plus two roundings to bfloat16 (1.6 %) of the module's
largest gradient. The factor is from updates by Adam, which were compared before gradients were: its first ones are
signs, and of 64 biases autocast flipped three and other kernels five. Gradients may need less. With a relative
error above 0.5, autocast is no yardstick: mostly it drew other random numbers."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Error of a tensor, measured from the same tensor in float64 (L2)."""

    kind: str
    """outputs, gradients or buffers."""
    name: str
    step: int
    """Number of the compared step, counted from 0."""
    error: Measured
    """Error of the candidate's tensor."""
    reference: Measured
    """Largest error of the yardsticks."""
    norm: Measured
    """Norm of the tensor in float64."""
    allowed: Measured
    own: Measured = 0.0
    """Error of the step without a plan; 0 in files of older versions."""

    @property
    def within(self) -> bool:
        """Return whether the error is allowed; False for a nan."""
        return self.error <= self.allowed

    @property
    def relative(self) -> float:
        """Error of the candidate's tensor as a share of the norm."""
        return relative_error(self.error, self.norm)


def rounding_errors(
    kind: str, step: int, truth: Mapping[str, torch.Tensor], yardsticks: Sequence[Mapping[str, torch.Tensor]],
    candidate: Mapping[str, torch.Tensor], tolerance: Tolerance = ROUNDING,
) -> list[Rounded]:  # fmt: skip
    """Return the errors of a candidate's floating-point tensors.

    Tensors that are missing or of another shape are left out: `differences.difference` reports them.

    Args:
        kind: outputs, gradients or buffers.
        step: number of the step.
        truth: the tensors in float64, by name: what is before the last dot is the module.
        yardsticks: the same tensors of steps whose errors are accepted, first of the step without a plan.
        candidate: the same tensors of the candidate.
        tolerance: the allowed error. Its ``further`` is of gradients alone: outputs are continuous at kinks.
    """
    if kind != "gradients":
        tolerance = replace(tolerance, further=0.0)
    norms = {
        name: float(torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0).norm())
        for name, tensor in truth.items()
    }
    largest_norms: dict[str, float] = {}  # by module
    for name, norm in norms.items():
        largest_norms[_module(name)] = max(largest_norms.get(_module(name), 0.0), norm)
    results = list[Rounded]()
    for name in sorted(candidate.keys() & truth.keys()):
        exact = truth[name]
        if any(name not in tensors or tensors[name].shape != exact.shape for tensors in (candidate, *yardsticks)):
            continue
        errors = [distance(exact, tensors[name]) for tensors in yardsticks]
        without_plan, reference = errors[0], max(errors)
        scale = norms[name] if kind == "outputs" else largest_norms[_module(name)]
        allowed = tolerance.allowed(reference, scale, candidate[name].dtype)
        error = distance(exact, candidate[name])
        results.append(Rounded(kind, name, step, error, reference, norms[name], allowed, without_plan))
    return results


def _module(name: str) -> str:
    """Return the module of a parameter: ``blocks.0`` of ``blocks.0.weight``."""
    return name.rpartition(".")[0]


def is_truth(errors: Sequence[Rounded], *, draws: bool = True) -> bool:
    """Return whether the float64 step is the same computation as the step without a plan, except for rounding.

    ``draws``: whether the step draws random numbers, which float64 may draw otherwise.
    """
    without_plan, _, norm = _gradient_norms(errors)
    return without_plan <= (SANE if draws else SANE_WITHOUT_DRAWS) * norm


def is_yardstick(errors: Sequence[Rounded], tolerance: Tolerance = ROUNDING, *, exact: bool = True) -> bool:
    """Return whether all yardsticks are the same computation, except for rounding. ``exact``: whether errors are
    measured from float64; else from the step without a plan, whose own error is 0."""
    without_plan, reference, norm = _gradient_norms(errors)
    bound = tolerance.alike * (without_plan + torch.finfo(torch.float32).eps * norm) if exact else math.inf
    return reference <= min(tolerance.sane * norm, bound)


def _gradient_norms(errors: Sequence[Rounded]) -> tuple[float, float, float]:
    """Return three norms (L2) over all gradients: of the errors of the step without a plan, of the largest errors of
    the yardsticks, and of the gradients themselves."""
    gradients = [error for error in errors if error.kind == "gradients"]
    without_plan = math.hypot(*(error.own for error in gradients))
    reference_error = math.hypot(*(error.reference for error in gradients))
    return without_plan, reference_error, math.hypot(*(error.norm for error in gradients))


@dataclass(frozen=True, slots=True)
class LayerError:
    """Distance of all of a layer's tensors in all steps from float64 (L2)."""

    kind: str
    layer: str
    """Name of the module; for outputs, of the output."""
    error: float
    reference: float
    """Largest error of the yardsticks."""
    norm: float

    @property
    def relative(self) -> float:
        """Error of the candidate as a share of the norm."""
        return relative_error(self.error, self.norm)

    @property
    def relative_reference(self) -> float:
        """Largest error of the yardsticks as a share of the norm."""
        return relative_error(self.reference, self.norm)


def by_layer(errors: Sequence[Rounded]) -> tuple[LayerError, ...]:
    """Return a row for each output, and for the gradients of each layer, in the order of their names."""
    groups: dict[tuple[str, str], list[Rounded]] = {}
    for error in errors:
        layer = error.name if error.kind == "outputs" else _module(error.name)
        groups.setdefault((error.kind, layer), []).append(error)
    return tuple(_total(kind, layer, group) for (kind, layer), group in groups.items())


def overall(errors: Sequence[Rounded], kind: str) -> LayerError:
    """Return the error of all tensors of a kind together."""
    return _total(kind, "all", [error for error in errors if error.kind == kind])


def _total(kind: str, layer: str, errors: Sequence[Rounded]) -> LayerError:
    """Return the norms (L2) over the errors of a layer's tensors."""
    error, reference = math.hypot(*(e.error for e in errors)), math.hypot(*(e.reference for e in errors))
    return LayerError(kind, layer, error, reference, math.hypot(*(e.norm for e in errors)))


def truth_label(name: str) -> str:
    """Return how messages name the step that errors are measured from. ``name``: of its trial."""
    return "float64" if name == "float64" else "the step without a plan"


def beyond_tolerance(
    differences: Sequence[Difference], errors: Sequence[Rounded], truth: str = "float64"
) -> list[Difference]:
    """Return the differences that are not allowed, described by their errors.

    Differences that are no matter of numbers, such as other shapes, are returned unchanged. ``truth`` is the label of
    the step that errors are measured from.
    """
    by_name = {error.name: error for error in errors}
    reported = list[Difference]()
    for item in differences:
        error = by_name.get(item.name)
        if error is None or item.max_abs is None:
            reported.append(item)
        elif not error.within:
            reported.append(replace(item, what=describe(error, truth)))
    return reported


def describe(error: Rounded, truth: str) -> str:
    """Describe an error that is larger than allowed, relative to the norm unless the tensor is nearly zero. ``truth``:
    label of the step that it is measured from."""
    if math.isnan(error.error):
        if math.isnan(error.own):
            return "has a nan, and so has the step without a plan"
        return "has a nan, where the step without a plan has numbers"
    if error.error >= NEAR_ZERO * error.norm:
        norm = f"in L2, where {truth} has {error.norm:.3g}"
        return f"is {error.error:.3g} from {truth} ({norm}), and {error.allowed:.3g} is allowed"
    allowed = error.allowed / error.norm
    return f"is {error.relative:.3g} from {truth} (relative, in L2), and {allowed:.3g} is allowed"


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm (L2) of the difference of two tensors, in float64. Infinities of the same sign do not differ."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    return float(torch.where(a == b, 0.0, a - b).norm())


def floating_point(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors, real or complex, among values by name."""
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    return {name: t for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}
