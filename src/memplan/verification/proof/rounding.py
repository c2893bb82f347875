"""Whether two steps differ by rounding alone: both held against the same step in float64.

A candidate whose additions are in another order has other bits. Its error is measured against float64, and so is that
of the step as it is: ``FACTOR`` times the latter is allowed, and ``SLACK`` roundings of the largest gradient of the
same module, which is what is left of a gradient that is zero in truth (a bias before a normalisation).

A lossy candidate is held against float64 just so; what is allowed then is ``LOSSY``: so many times the error of plain
autocast, which is what people take for granted when they train in lower precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan.verification.proof.differences import NOTHING, Difference

FACTOR = 2.0
SLACK = 64
SANE = 0.1
"""Where the step as it is is farther from float64 than this share of all gradients, float64 did something else: mostly
it drew other random numbers. Rounding alone can make 0.02 where batch norms of few samples follow one another."""
ALIKE = 1000.0
"""`torch.compile` is no yardstick where its gradients are more than so many times as far from float64 as those of the
step as it is: then it computed something else, mostly from other random numbers. (A sum of what batch norms make, which
cancels out, is a hundred times as far.)"""

CHANCE = 1.25
"""Times the others' error, which is allowed however large that is: two steps that round as much, in other places, are
not off alike. (In a ResNet-18 of 16 random images autocast is off by half of some gradients, and so is whatever
computes in bfloat16: 1.02 times as much in other kernels.)"""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a candidate may be from the truth."""

    factor: float = FACTOR
    """Times the largest error of those that it is held against."""
    slack: float = SLACK
    """And so many roundings of the largest gradient of the same module."""
    dtype: torch.dtype | None = None
    """In what these roundings are counted; None: in the tensor's own."""
    share: float = float("inf")
    """Of the module's largest gradient, beyond which the factor is `CHANCE`: a gradient that is lost is as far off as
    it is large."""

    def allowed(self, reference: float, largest: float, dtype: torch.dtype) -> float:
        """The error that a tensor may have: ``reference`` is that of the others."""
        scaled = max(CHANCE * reference, min(self.factor * reference, self.share * largest))
        return scaled + self.slack * torch.finfo(self.dtype or dtype).eps * largest


ROUNDING = Tolerance()
LOSSY = Tolerance(factor=4.0, slack=2.0, dtype=torch.bfloat16, share=0.75)
"""Four times plain autocast's error (see ``share``), and two roundings to bfloat16 (1.6 %) of the module's largest
gradient. Where autocast is off by half, a tensor of few elements may be off by more and all of them together by less:
Adam's first updates are signs, and of 64 biases three turned under autocast and five in other kernels, 0.42 and 0.55
off, where over the whole net both were 0.36 off."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """How far a tensor is from float64, in L2."""

    kind: str
    """What it is: outputs, gradients, parameters or buffers."""
    name: str
    step: int
    """Of the steps that were compared, counted from 0."""
    error: float
    """The candidate's."""
    reference: float
    """The largest of the steps that it may be held against."""
    norm: float
    """The tensor's own."""
    allowed: float
    own: float = 0.0
    """That of the step as it is. (Older files do not say.)"""

    @property
    def within(self) -> bool:
        """Whether it is rounding; False for a nan."""
        return self.error <= self.allowed

    @property
    def relative(self) -> float:
        """The candidate's error, of the norm."""
        return self.error / self.norm if self.norm else 0.0 if self.error == 0 else float("inf")


def rounded(
    kind: str,
    step: int,
    truth: Mapping[str, torch.Tensor],
    references: Sequence[Mapping[str, torch.Tensor]],
    candidate: Mapping[str, torch.Tensor],
    tolerance: Tolerance = ROUNDING,
    coarse: Mapping[str, float] = {},  # read only
) -> list[Rounded]:
    """The errors of a candidate's tensors of floating point.

    Args:
        kind, step: what they are, and of which step.
        truth: the tensors in float64, by name: what is before the last dot is the module.
        references: the same as other ways to run the step have them, first the step as it is.
        candidate: the same as the candidate has them.
        tolerance: what is allowed.
        coarse: by name, what is allowed beside that.
    """
    alike = {name for name, one in candidate.items() if name in truth and one.shape == truth[name].shape}
    alike = {name for name in alike if all(name in one and one[name].shape == truth[name].shape for one in references)}
    norms = {name: _norm(tensor) for name, tensor in truth.items()}
    largest: dict[str, float] = {}
    for name, norm in norms.items():
        module = name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), norm)
    found = list[Rounded]()
    for name, exact in sorted(truth.items()):
        if name not in alike:
            continue  # which is said elsewhere
        error = distance(exact, candidate[name])
        errors = [distance(exact, one[name]) for one in references]
        reference = max(errors)
        most = norms[name] if kind == "outputs" else largest[name.rpartition(".")[0]]  # each output is by itself
        allowed = tolerance.allowed(reference, most, candidate[name].dtype) + coarse.get(name, 0.0)
        found.append(Rounded(kind, name, step, error, reference, norms[name], allowed, errors[0]))
    return found


def is_truth(judged: Sequence[Rounded]) -> bool:
    """Whether the step as it is comes so near to float64 that this can say what is right."""
    own, _, norm = _of_gradients(judged)
    return own <= SANE * norm


def is_rounding(judged: Sequence[Rounded], *, exact: bool = True) -> bool:
    """Whether all that a candidate is held against did the same, so that the largest of their errors is rounding.

    Args:
        judged: the errors.
        exact: whether they are those from float64; else from the step as it is, whose own are none.
    """
    own, reference, norm = _of_gradients(judged)
    near = reference <= SANE * norm
    return near and (not exact or reference <= ALIKE * (own + torch.finfo(torch.float32).eps * norm))


def _of_gradients(judged: Sequence[Rounded]) -> tuple[float, float, float]:
    gradients = [one for one in judged if one.kind in ("gradients", "parameters")]
    own, reference, norm = (math.hypot(*(getattr(one, of) for one in gradients)) for of in ("own", "reference", "norm"))
    return own, reference, norm


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far what a layer has is from the truth, over all of its tensors and all steps, in L2."""

    kind: str
    layer: str
    """The module's name; of outputs, the output's."""
    error: float
    reference: float
    """The largest of the steps that it is held against."""
    norm: float

    @property
    def relative(self) -> float:
        """The candidate's error, of the norm."""
        return self.error / self.norm if self.norm else 0.0 if self.error == 0 else float("inf")

    @property
    def relative_reference(self) -> float:
        """That of the steps that it is held against."""
        return self.reference / self.norm if self.norm else 0.0 if self.reference == 0 else float("inf")


def by_layer(judged: Sequence[Rounded]) -> tuple[LayerError, ...]:
    """One row for each output, and for the gradients of each layer, in the order of their names."""
    groups: dict[tuple[str, str], list[Rounded]] = {}
    for one in judged:
        layer = one.name if one.kind == "outputs" else one.name.rpartition(".")[0]
        groups.setdefault((one.kind, layer), []).append(one)
    return tuple(_added_up(kind, layer, ones) for (kind, layer), ones in groups.items())


def overall(judged: Sequence[Rounded], kind: str) -> LayerError:
    """All of one kind as one."""
    return _added_up(kind, "all", [one for one in judged if one.kind == kind])


def _added_up(kind: str, layer: str, ones: Sequence[Rounded]) -> LayerError:
    sums = (math.hypot(*(getattr(one, what) for one in ones)) for what in ("error", "reference", "norm"))
    return LayerError(kind, layer, *sums)


def told_truth(name: str) -> str:
    """What a step is held against, for people."""
    return "float64" if name == "float64" else "the step as it is"


def serious(differences: Sequence[Difference], judged: Sequence[Rounded], truth: str = "float64") -> list[Difference]:
    """The differences that are more than rounding, in words. ``truth``: what they are held against."""
    of = {one.name: one for one in judged}
    left = [one for one in differences if one.max_abs is None or not (one.name in of and of[one.name].within)]
    return [_told(one, of.get(one.name), truth) for one in left]


def _told(one: Difference, judged: Rounded | None, truth: str) -> Difference:
    if judged is None or one.max_abs is None:
        return one
    if math.isnan(judged.error):
        own = "and so has the step as it is" if math.isnan(judged.own) else "where the step as it is has numbers"
        return replace(one, what=f"has a nan, {own}")
    if judged.error >= NOTHING * judged.norm:  # a gradient that is zero in truth: of it, everything is a multiple
        size = f"in L2, where {truth} has {judged.norm:.3g}"
        return replace(one, what=f"is {judged.error:.3g} from {truth} ({size}), and {judged.allowed:.3g} is allowed")
    off, allowed = (part / judged.norm for part in (judged.error, judged.allowed))
    return replace(one, what=f"is {off:.3g} from {truth} (relative, in L2), and {allowed:.3g} is allowed")


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """The L2 norm of what two tensors differ by, in float64. Infinities of the same sign do not differ."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, two = one.detach().to(wide), two.detach().to(wide)
    return float(torch.where(one == two, 0.0, one - two).norm())


def _norm(tensor: torch.Tensor) -> float:
    finite = torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.norm())


def floating(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Those of floating point that are there."""
    return {
        name: one
        for name, one in named.items()
        if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex())
    }
