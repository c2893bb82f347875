"""Choose what to train: the parameters that promise most for the bytes that a device has.

What a parameter promises is its squared gradient norm, averaged over batches of the user's data: to first order, what a
step of SGD takes from the loss. What it takes is more than its own bytes, because its gradient asks for activations
which those of other parameters may share; so each set is planned, not added up. Ranking single parameters by gain per
byte and then filling a budget follows the scheme search of Lin et al., On-Device Training Under 256KB Memory
(NeurIPS 2022); several orders are filled, and the best set wins. No proof says that none is better.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan.errors import BudgetError, InputError, UsageError
from memplan.exporting.optimizer_rules import UpdateRules
from memplan.planning.capture.loss_module import default_loss
from memplan.planning.request import Request

MOST = 16
"""Sets of an order that are planned with all levers, at most."""

NOTHING = 1e-9
"""Share of all squared norms that is rounding: a bias before a norm in training has no gradient."""

Peak = Callable[[Collection[str], bool], int]
"""Bytes of RAM of a step that trains these parameters; the flag: with all levers, which takes longer to find."""


@dataclass(frozen=True, slots=True)
class Candidate(Printed):
    """A parameter that could be trained."""

    path: str
    bytes: int
    """Of RAM that it takes itself: the weight, and what the optimizer holds of it."""
    gradient: float
    """Root of the mean squared gradient norm over the batches."""
    trained: bool

    def __str__(self) -> str:
        return f"{self.path} ({format_bytes(self.bytes)}, gradient norm {self.gradient:.3g})"


@dataclass(frozen=True)
class UpdateChoice(Printed):
    """What is trained, and what else could have been."""

    candidates: tuple[Candidate, ...]
    batches: int
    """Batches of data that the gradients are of."""
    ram: int
    """Bytes of RAM that the chosen set takes at least."""
    tried: int
    """Sets that were planned with all levers."""

    @property
    def trained(self) -> tuple[Candidate, ...]:
        """Return those that were chosen, in the model's order."""
        return tuple(one for one in self.candidates if one.trained)

    @property
    def share(self) -> float:
        """Return the chosen ones' share of all squared gradient norms."""
        whole = sum(one.gradient**2 for one in self.candidates)
        return sum(one.gradient**2 for one in self.trained) / whole if whole else 0.0

    def __str__(self) -> str:
        return (
            f"{len(self.trained)} of {len(self.candidates)} parameters are trained: {self.share:.0%} of the squared "
            f"gradient norm over {self.batches} batches; {self.tried} sets were planned"
        )


def chosen_update(asked: Request, rules: UpdateRules, batches: Iterable[Any], peak: Peak) -> UpdateChoice:
    """Choose which of an optimizer's parameters to train within a budget.

    Args:
        asked: the step and its budget.
        rules: whose parameters are candidates.
        batches: of inputs and targets, as the step takes them.
        peak: bytes of RAM of a set.

    Raises:
        BudgetError: no parameter can be trained within the budget.
        InputError: a batch that the step does not take, or none.
    """
    norms, count = squared_norms(asked, rules.group_of, batches)
    sizes = {path: one.numel() * 4 * (1 + rules.floats) for path, one in asked.model.named_parameters()}
    search = _Search({path: (norms[path], sizes[path]) for path in norms}, peak, asked.bytes)
    chosen = search.best()
    candidates = tuple(Candidate(path, sizes[path], norm**0.5, path in chosen) for path, norm in norms.items())
    return UpdateChoice(candidates, count, peak(chosen, True), len(search.known))


def squared_norms(asked: Request, paths: Collection[str], batches: Iterable[Any]) -> tuple[dict[str, float], int]:
    """Return the mean squared gradient norm of each parameter over batches, and how many batches there are."""
    step = copy.deepcopy(asked.step)
    prefix = "" if asked.step is asked.model else "model."
    named = {name: one for name, one in step.named_parameters() if one.requires_grad}
    parameters = {path: named[prefix + path] for path, _ in asked.model.named_parameters() if path in paths}
    totals, count = dict.fromkeys(parameters, 0.0), 0
    for batch in _batches(batches):
        step.zero_grad()
        _loss(step, batch, count).backward()
        for path, one in parameters.items():
            totals[path] += 0.0 if one.grad is None else float(one.grad.double().square().sum())
        count += 1
    if not count:
        raise InputError("search_update has no batch", expected="batches of inputs and targets", do="Give some data")
    found = {path: total / count for path, total in totals.items()}
    if not all(total < float("inf") for total in found.values()):
        worst = next(path for path, total in found.items() if not total < float("inf"))
        raise InputError(
            f"the gradient of {worst} is not finite on this data", expected="data that trains", do="Look at the data"
        )
    return found, count


def _batches(batches: Any) -> Iterable[Any]:
    if isinstance(batches, (torch.Tensor, nn.Module, str, bytes, Mapping)) or not isinstance(batches, Iterable):
        raise UsageError(
            f"search_update=a {type(batches).__name__}", expected="an iterable of batches, each a tuple of inputs and "
            "targets", do="Pass such as [(x, y)], or a DataLoader"
        )  # fmt: skip
    return batches


def _loss(step: Any, batch: Any, at: int) -> torch.Tensor:
    given = batch if isinstance(batch, (tuple, list)) else (batch,)
    try:
        made = step(*given)
        return made if isinstance(made, torch.Tensor) and made.dim() == 0 else default_loss(made)
    except Exception as error:
        raise InputError(
            f"batch {at} of search_update: {error}", expected="inputs and targets as the step takes them",
            do="Give each batch as a tuple: inputs, then targets",
        ) from error  # fmt: skip


class _Search:
    """Fills a budget in several orders."""

    def __init__(self, worth: Mapping[str, tuple[float, int]], peak: Peak, budget: int) -> None:
        self.worth, self.peak, self.budget = worth, peak, budget
        self.known: dict[frozenset[str], bool] = {}
        self.left = MOST

    def best(self) -> frozenset[str]:
        """Return the set with the largest sum of squared norms among those that were found to fit."""
        found = [self._improved(self._filled(order)) for order in self._orders() if order]
        best = max(found, key=lambda chosen: (self._gain(chosen), -len(chosen)), default=frozenset())
        if not best:
            smallest = min(self.peak({path}, True) for path in self.worth)
            raise BudgetError(
                f"The budget is {format_bytes(self.budget)}, and training one parameter takes {format_bytes(smallest)}",
                expected=f"at least {smallest} bytes", do="Give more, or take a smaller model",
                smallest_budget=smallest,
            )  # fmt: skip
        return best

    def _orders(self) -> Iterable[list[str]]:
        """Yield orders: gain per byte, gain, from the last to the first, biases first."""
        whole = sum(gain for gain, _ in self.worth.values())
        paths = [path for path, (gain, _) in self.worth.items() if gain > NOTHING * whole] or list(self.worth)
        by_density = sorted(paths, key=lambda path: -self._density[path])
        yield by_density
        yield sorted(paths, key=lambda path: -self.worth[path][0])
        yield paths[::-1]
        small = sorted(size for _, size in self.worth.values())[len(self.worth) // 2]
        light = [path for path in paths[::-1] if self.worth[path][1] <= small]
        yield light + [path for path in by_density if path not in light]

    @cached_property
    def _density(self) -> dict[str, float]:
        """Gain for each byte that training a parameter alone takes more than training none."""
        none = self.peak((), False)
        return {
            path: gain / max(self.peak((path,), False) - none, size)
            for path, (gain, size) in self.worth.items()
        }  # fmt: skip

    def _filled(self, order: Sequence[str]) -> frozenset[str]:
        """Return the longest beginning of an order that fits, and what of the rest fits beside it."""
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
        """Return the set with one exchanged for another that promises more, where that fits."""
        for path in sorted(self.worth.keys() - chosen, key=lambda path: (-self.worth[path][0], path)):
            for other in sorted(chosen, key=lambda path: (self.worth[path][0], path)):
                swapped = chosen - {other} | {path}
                if self.worth[other][0] < self.worth[path][0] and self._fits(swapped):
                    return self._improved(swapped)
        return chosen

    def _fits(self, paths: Iterable[str]) -> bool:
        wanted = frozenset(paths)
        if wanted not in self.known:
            if self.peak(wanted, False) <= self.budget:
                return True
            if not self.left:
                return False
            self.left -= 1
            self.known[wanted] = self.peak(wanted, True) <= self.budget
        return self.known[wanted]

    def _gain(self, paths: Iterable[str]) -> float:
        return sum(self.worth[path][0] for path in paths)
