"""Choose the parameters to train that reduce the loss most within a budget of RAM.

The gain of a parameter is its squared gradient norm, averaged over batches of the user's data: to first order, the
decrease of the loss in a step of SGD. Its cost is more than its own bytes, because its gradient needs saved
activations, which it may share with other parameters; so whole sets are planned instead of adding up costs. Ranking
parameters by gain per byte and then filling a budget follows Lin et al., On-Device Training Under 256KB Memory (NeurIPS
2022). The budget is filled in several orders and the best set is returned; it need not be optimal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan.errors import BudgetError, InputError, UsageError
from memplan.exporting.optimizer_rules import UpdateRules
from memplan.planning.capture.loss_module import default_loss
from memplan.planning.request import Request

PLANS_PER_ORDER = 16
"""Most sets for each order that are planned with all memory techniques."""

NEGLIGIBLE_SHARE = 1e-9
"""Share of all squared norms below which a gradient is rounding error, as of a bias before a batch norm."""

Peak = Callable[[Collection[str], bool], int]
"""Returns the bytes of RAM of a step that trains these parameters; True: with all memory techniques, which is slow."""


@dataclass(frozen=True, slots=True)
class Candidate(Printed):
    """A parameter that could be trained."""

    path: str
    bytes: int
    """Bytes of RAM of the weight and its optimizer state, without activations."""
    gradient: float
    """Root of the mean squared gradient norm over the batches."""
    trained: bool

    def __str__(self) -> str:
        return f"{self.path} ({format_bytes(self.bytes)}, gradient norm {self.gradient:.3g})"


@dataclass(frozen=True)
class UpdateChoice(Printed):
    """The parameters that a search chose to train, among the candidates."""

    DERIVED: ClassVar[tuple[str, ...]] = ("share",)

    candidates: tuple[Candidate, ...]
    batches: int
    """Number of batches over which gradients were averaged."""
    ram: int
    """Bytes of RAM of the smallest plan that trains the chosen set."""
    tried: int
    """Number of sets that were planned with all memory techniques."""

    @property
    def trained(self) -> tuple[Candidate, ...]:
        """The chosen candidates, in the model's order."""
        return tuple(candidate for candidate in self.candidates if candidate.trained)

    @property
    def share(self) -> float:
        """The chosen candidates' share of the sum of squared gradient norms, from 0 to 1."""
        total = sum(candidate.gradient**2 for candidate in self.candidates)
        return sum(candidate.gradient**2 for candidate in self.trained) / total if total else 0.0

    def __str__(self) -> str:
        return (
            f"{len(self.trained)} of {len(self.candidates)} parameters are trained: {self.share:.0%} of the squared "
            f"gradient norm over {self.batches} batches; {self.tried} sets were planned"
        )


def chosen_update(request: Request, rules: UpdateRules, batches: Iterable[Any], peak: Peak) -> UpdateChoice:
    """Choose the parameters to train within the budget of the request.

    Args:
        request: the step and its budget.
        rules: the optimizer's rules; their parameters are the candidates.
        batches: tuples of inputs and targets, as the step takes them.
        peak: returns the bytes of RAM of a set of parameters.

    Raises:
        BudgetError: no parameter can be trained within the budget.
        InputError: the step fails on a batch, or there is no batch.
    """
    norms, count = squared_norms(request, rules.group_of, batches)
    sizes = {
        path: weight.numel() * 4 * (1 + len(rules.arrays_in_state)) for path, weight in request.model.named_parameters()
    }
    search = _Search(norms, sizes, peak, request.bytes)
    chosen = search.best()
    candidates = tuple(
        Candidate(path, sizes[path], gradient=norm**0.5, trained=path in chosen) for path, norm in norms.items()
    )
    return UpdateChoice(candidates, batches=count, ram=peak(chosen, True), tried=len(search.fits_of_set))


def squared_norms(request: Request, paths: Collection[str], batches: Iterable[Any]) -> tuple[dict[str, float], int]:
    """Return the mean over batches of each parameter's squared gradient norm, and the number of batches."""
    step = copy.deepcopy(request.step)
    prefix = "" if request.step is request.model else "model."  # of the model's parameters in the step
    named = {name: parameter for name, parameter in step.named_parameters() if parameter.requires_grad}
    parameters = {path: named[prefix + path] for path, _ in request.model.named_parameters() if path in paths}
    totals, count = dict.fromkeys(parameters, 0.0), 0
    for batch in _batches(batches):
        step.zero_grad()
        _loss(step, batch, number=count).backward()
        for path, parameter in parameters.items():
            totals[path] += 0.0 if parameter.grad is None else float(parameter.grad.double().square().sum())
        count += 1
    if not count:
        raise InputError("search_update has no batch", expected="batches of inputs and targets", do="Give some data")
    means = {path: total / count for path, total in totals.items()}
    not_finite = [path for path, mean in means.items() if not mean < float("inf")]  # also where it is not a number
    if not_finite:
        raise InputError(
            f"the gradient of {not_finite[0]} is not finite on this data",
            expected="data that trains",
            do="Look at the data",
        )
    return means, count


def _batches(batches: Any) -> Iterable[Any]:
    """Return the batches. Raises UsageError for what is no iterable of batches, such as a single tensor."""
    if isinstance(batches, (torch.Tensor, nn.Module, str, bytes, Mapping)) or not isinstance(batches, Iterable):
        raise UsageError(
            f"search_update=a {type(batches).__name__}", expected="an iterable of batches, each a tuple of inputs and "
            "targets", do="Pass such as [(x, y)], or a DataLoader"
        )  # fmt: skip
    return batches


def _loss(step: Any, batch: Any, number: int) -> torch.Tensor:
    """Return the loss of a step on batch number `number`. Raises InputError if the step fails on it."""
    arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
    try:
        return default_loss(step(*arguments))
    except Exception as error:
        raise InputError(
            f"batch {number} of search_update: {error}", expected="inputs and targets as the step takes them",
            do="Give each batch as a tuple: inputs, then targets",
        ) from error  # fmt: skip


class _Search:
    """Fills a budget with parameters in several orders; see `best`."""

    def __init__(self, gains: Mapping[str, float], sizes: Mapping[str, int], peak: Peak, budget: int) -> None:
        self.gains, self.sizes, self.peak, self.budget = gains, sizes, peak, budget
        """By parameter: its squared gradient norm, and the bytes of the weight and its optimizer state."""
        self.fits_of_set: dict[frozenset[str], bool] = {}
        """By set that was planned with all memory techniques: whether it fits."""
        self.plans_left = PLANS_PER_ORDER
        """Number of such plans left for the current order."""

    def best(self) -> frozenset[str]:
        """Return the set with the largest gain among the filled orders. Raises BudgetError if none fits."""
        sets = [self._improved(self._filled(order)) for order in self._orders() if order]
        best = max(sets, key=lambda chosen: (self._gain(chosen), -len(chosen)), default=frozenset())
        if not best:
            smallest = min(self.peak({path}, True) for path in self.gains)
            raise BudgetError(
                f"The budget is {format_bytes(self.budget)}, and training one parameter takes {format_bytes(smallest)}",
                expected=f"at least {smallest} bytes", do="Give more, or take a smaller model",
                smallest_budget=smallest,
            )  # fmt: skip
        return best

    def _gain(self, paths: Iterable[str]) -> float:
        return sum(self.gains[path] for path in paths)

    def _orders(self) -> Iterable[list[str]]:
        """Yield parameters by gain per byte, by gain, from last layer to first, and with small ones (biases) first."""
        total_gain = sum(self.gains.values())
        paths = [path for path, gain in self.gains.items() if gain > NEGLIGIBLE_SHARE * total_gain] or list(self.gains)
        by_gain_per_byte = sorted(paths, key=lambda path: -self._gain_per_byte[path])
        yield by_gain_per_byte
        yield sorted(paths, key=lambda path: -self.gains[path])
        yield paths[::-1]
        median_size = sorted(self.sizes[path] for path in self.gains)[len(self.gains) // 2]
        small = [path for path in paths[::-1] if self.sizes[path] <= median_size]
        yield small + [path for path in by_gain_per_byte if path not in small]

    @cached_property
    def _gain_per_byte(self) -> dict[str, float]:
        """Gain per byte of RAM that training this parameter alone costs over training none."""
        ram_of_none = self.peak((), False)
        return {
            path: gain / max(self.peak((path,), False) - ram_of_none, self.sizes[path])
            for path, gain in self.gains.items()
        }

    def _filled(self, order: Sequence[str]) -> frozenset[str]:
        """Return the longest prefix of an order that fits the budget, found by bisection, and then any other parameters
        that still fit, by gain per byte."""
        # the longest prefix has a length from `fitting` to `end`
        fitting, end, self.plans_left = (
            0,
            len(order),
            PLANS_PER_ORDER,
        )
        while fitting < end:
            middle = (fitting + end + 1) // 2
            fitting, end = (middle, end) if self._fits(order[:middle]) else (fitting, middle - 1)
        chosen = list(order[:fitting])
        for path in sorted(order[fitting:], key=lambda path: -self._gain_per_byte[path]):
            if self._fits([*chosen, path]):
                chosen.append(path)
        return frozenset(chosen)

    def _improved(self, chosen: frozenset[str]) -> frozenset[str]:
        """One-swap local search: replace a parameter by one with more gain while the budget holds."""
        for path in sorted(self.gains.keys() - chosen, key=lambda path: (-self.gains[path], path)):
            for other in sorted(chosen, key=lambda path: (self.gains[path], path)):
                swapped = chosen - {other} | {path}
                if self.gains[other] < self.gains[path] and self._fits(swapped):
                    return self._improved(swapped)
        return chosen

    def _fits(self, paths: Iterable[str]) -> bool:
        """Return whether training a set of parameters fits the budget.

        It is first planned without memory techniques, which is fast. If that does not fit, it is planned with all of
        them, up to `MOST` times for each order; beyond that it counts as not fitting.
        """
        chosen = frozenset(paths)
        if chosen not in self.fits_of_set:
            if self.peak(chosen, False) <= self.budget:
                return True
            if not self.plans_left:
                return False
            self.plans_left -= 1
            self.fits_of_set[chosen] = self.peak(chosen, True) <= self.budget
        return self.fits_of_set[chosen]
