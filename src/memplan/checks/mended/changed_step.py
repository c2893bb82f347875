"""The same step recorded again, with its modules changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks

from memplan.errors import BudgetError, MemplanError
from memplan.planning.api import plan
from memplan.planning.plan.plan import Plan
from memplan.trace.record import record_for
from memplan.trace.recording.session import Target
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions, build_of, copy_module
from memplan.trace.trace import Trace

Change = Callable[[dict[str, nn.Module]], None]
"""Changes modules, given by the paths that a trace's layers have. It may raise `ChangeError`."""
Wrap = Callable[[nn.Module], nn.Module]


class ChangeError(Exception):
    """A change that does not apply to a model."""


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """The changed step could not be recorded; ``why``, in words that end without a full stop."""

    why: str

    @classmethod
    def by(cls, error: MemplanError | ChangeError) -> NotRecorded:
        """Make one of the error that was raised while it was recorded."""
        cause = error.__cause__ if isinstance(error.__cause__, ChangeError) else error
        return cls(cause.found.rstrip(".") if isinstance(cause, MemplanError) else str(cause))


@dataclass(frozen=True)
class Remaker:
    """A step as it was described to `memplan.check`, which can be recorded and planned again after a change."""

    what: Any
    options: StepOptions
    target: Target

    def record(
        self,
        change: Change | None = None,
        wrap: Wrap | None = None,
        options: StepOptions | None = None,
        around: AbstractContextManager[Any] | None = None,
    ) -> Trace | NotRecorded:
        """Return the changed step, or why there is none: the change does not apply, or the step no longer runs.

        ``wrap`` puts the model into another one; ``options`` replace those of the step; ``around`` is entered while
        it is recorded.
        """
        used = self.options if options is None else options
        build = build_of(self._changed(change, wrap), used, on_card=self.target.card is not None)
        try:
            with around or nullcontext():
                return record_for(build, self.target)
        except (MemplanError, ChangeError) as error:
            return NotRecorded.by(error)

    def planned(self, change: Change, budget: int) -> Plan | int | None:
        """Return the cheapest exact plan of the changed step in a budget; the smallest budget that there is a plan for,
        where it does not fit; None where the step cannot be planned (a build brings its own step)."""
        used = self.options
        if not used.train:
            return None
        try:
            return plan(
                self._changed(change, None), *used.inputs, kwargs=used.kwargs, targets=used.targets, loss=used.loss,
                budget=budget, optimizer=used.optimizer, autocast=used.autocast, costs="roofline",
                device=None if self.target.name == HOST else self.target.name,
            )  # fmt: skip
        except BudgetError as error:
            return error.smallest_budget
        except Exception:  # a build that names CUDA, a model that cannot be captured: then no plan is reported
            return None

    def _changed(self, change: Change | None, wrap: Wrap | None) -> Callable[[], Any]:
        def make() -> Any:
            with _made_modules() as modules:
                made = copy_module(self.what) if isinstance(self.what, nn.Module) else self.what()
            if change is not None:
                change(by_path([made] if isinstance(made, nn.Module) else modules))
            return wrap(made) if wrap is not None and isinstance(made, nn.Module) else made

        make.__qualname__ = "the changed step"
        return make


def by_path(modules: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return modules by every path that a trace may give them: from their root, with and without its class's name."""
    modules = list(modules)
    children = {id(child) for module in modules for child in module.children()}
    found: dict[str, nn.Module] = {}
    for root in (module for module in modules if id(module) not in children):
        kind = type(root).__name__
        for path, module in root.named_modules():
            found.setdefault(f"{kind}.{path}" if path else kind, module)
            if path:
                found.setdefault(path, module)
    return found


@contextmanager
def _made_modules() -> Iterator[list[nn.Module]]:
    """Return the modules that get a child or a parameter while the context lasts, in order."""
    found: dict[int, nn.Module] = {}

    def note(module: nn.Module, name: str, value: Any) -> None:
        found.setdefault(id(module), module)

    handles = [
        module_hooks.register_module_parameter_registration_hook(note),
        module_hooks.register_module_module_registration_hook(note),
    ]
    made: list[nn.Module] = []
    try:
        yield made
    finally:
        made += found.values()
        for handle in handles:
            handle.remove()


def module_at(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """Return the module of a layer.

    Raises:
        ChangeError: there is none of that name.
    """
    if path not in modules:
        raise ChangeError(f"there is no module {path}")
    return modules[path]
