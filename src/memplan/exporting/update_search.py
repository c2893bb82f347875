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

MOST = 16
"""Most sets for each order that are planned with all memory techniques."""

NOTHING = 1e-9
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
    sizes = {path: weight.numel() * 4 * (1 + len(rules.members)) for path, weight in request.model.named_parameters()}
    search = _Search({path: (norms[path], sizes[path]) for path in norms}, peak, request.bytes)
    chosen = search.best()
    candidates = tuple(Candidate(path, sizes[path], norm**0.5, path in chosen) for path, norm in norms.items())
    return UpdateChoice(candidates, count, peak(chosen, True), len(search.known))


def squared_norms(request: Request, paths: Collection[str], batches: Iterable[Any]) -> tuple[dict[str, float], int]:
    """Return the mean over batches of each parameter's squared gradient norm, and the number of batches."""
    step = copy.deepcopy(request.step)
    prefix = "" if request.step is request.model else "model."  # of the model's parameters in the step
    named = {name: parameter for name, parameter in step.named_parameters() if parameter.requires_grad}
    parameters = {path: named[prefix + path] for path, _ in request.model.named_parameters() if path in paths}
    totals, count = dict.fromkeys(parameters, 0.0), 0
    for batch in _batches(batches):
        step.zero_grad()
        _loss(step, batch, count).backward()
        for path, parameter in parameters.items():
            totals[path] += 0.0 if parameter.grad is None else float(parameter.grad.double().square().sum())
        count += 1
    if not count:
        raise InputError("search_update has no batch", expected="batches of inputs and targets", do="Give some data")
    means = {path: total / count for path, total in totals.items()}
    not_finite = [path for path, mean in means.items() if not mean < float("inf")]
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


def _loss(step: Any, batch: Any, at: int) -> torch.Tensor:
    """Return the loss of a step on a batch, whose number is `at`. Raises InputError if the step fails on it."""
    arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
    try:
        return default_loss(step(*arguments))
    except Exception as error:
        raise InputError(
            f"batch {at} of search_update: {error}", expected="inputs and targets as the step takes them",
            do="Give each batch as a tuple: inputs, then targets",
        ) from error  # fmt: skip


class _Search:
    """Fills a budget with parameters in several orders; see `best`."""

    def __init__(self, worth: Mapping[str, tuple[float, int]], peak: Peak, budget: int) -> None:
        self.worth, self.peak, self.budget = worth, peak, budget
        self.known: dict[frozenset[str], bool] = {}
        """By set that was planned with all memory techniques: whether it fits."""
        self.left = MOST
        """Number of such plans left for the current order."""

    def best(self) -> frozenset[str]:
        """Return the set with the largest gain among the filled orders. Raises BudgetError if none fits."""
        sets = [self._improved(self._filled(order)) for order in self._orders() if order]
        gain = lambda chosen: sum(self.worth[path][0] for path in chosen)  # noqa: E731
        best = max(sets, key=lambda chosen: (gain(chosen), -len(chosen)), default=frozenset())
        if not best:
            smallest = min(self.peak({path}, True) for path in self.worth)
            raise BudgetError(
                f"The budget is {format_bytes(self.budget)}, and training one parameter takes {format_bytes(smallest)}",
                expected=f"at least {smallest} bytes", do="Give more, or take a smaller model",
                smallest_budget=smallest,
            )  # fmt: skip
        return best

    def _orders(self) -> Iterable[list[str]]:
        """Yield parameters by gain per byte, by gain, from last layer to first, and with small ones (biases) first."""
        total = sum(gain for gain, _ in self.worth.values())
        paths = [path for path, (gain, _) in self.worth.items() if gain > NOTHING * total] or list(self.worth)
        by_density = sorted(paths, key=lambda path: -self._density[path])
        yield by_density
        yield sorted(paths, key=lambda path: -self.worth[path][0])
        yield paths[::-1]
        median = sorted(size for _, size in self.worth.values())[len(self.worth) // 2]
        small = [path for path in paths[::-1] if self.worth[path][1] <= median]
        yield small + [path for path in by_density if path not in small]

    @cached_property
    def _density(self) -> dict[str, float]:
        """Gain per byte of RAM that training this parameter alone costs over training none."""
        base = self.peak((), False)
        return {
            path: gain / max(self.peak((path,), False) - base, size)
            for path, (gain, size) in self.worth.items()
        }  # fmt: skip

    def _filled(self, order: Sequence[str]) -> frozenset[str]:
        """Return the longest prefix of an order that fits the budget, found by bisection, and then any other parameters
        that still fit, by gain per byte."""
        low, high, self.left = 0, len(order), MOST
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(order[:middle]) else (low, middle - 1)
        chosen = list(order[:low])
        for path in sorted(order[low:], key=lambda path: -self._density[path]):
            if self._fits([*chosen, path]):
                chosen.append(path)
        return frozenset(chosen)

    def _improved(self, chosen: frozenset[str]) -> frozenset[str]:
        """One-swap local search: replace a parameter by one with more gain while the budget holds."""
        for path in sorted(self.worth.keys() - chosen, key=lambda path: (-self.worth[path][0], path)):
            for other in sorted(chosen, key=lambda path: (self.worth[path][0], path)):
                swapped = chosen - {other} | {path}
                if self.worth[other][0] < self.worth[path][0] and self._fits(swapped):
                    return self._improved(swapped)
        return chosen

    def _fits(self, paths: Iterable[str]) -> bool:
        """Return whether training a set of parameters fits the budget.

        It is first planned without memory techniques, which is fast. If that does not fit, it is planned with all of
        them, up to `MOST` times for each order; beyond that it counts as not fitting.
        """
        chosen = frozenset(paths)
        if chosen not in self.known:
            if self.peak(chosen, False) <= self.budget:
                return True
            if not self.left:
                return False
            self.left -= 1
            self.known[chosen] = self.peak(chosen, True) <= self.budget
        return self.known[chosen]
