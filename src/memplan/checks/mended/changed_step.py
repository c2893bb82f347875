"""Record a step again with its modules changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks

from memplan.errors import MemplanError
from memplan.planning.api import plan_or_floor
from memplan.planning.plan.plan import Plan
from memplan.trace.record import record_for
from memplan.trace.recording.session import Target
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions, build_of, copy_module
from memplan.trace.trace import Trace

Change = Callable[[dict[str, nn.Module]], None]
"""Changes modules in place; they come by the paths of a trace's layers. May raise `ChangeError`."""
Wrap = Callable[[nn.Module], nn.Module]


class ChangeError(Exception):
    """A change that does not apply to a model."""


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """The answer instead of a trace where the changed step could not be recorded."""

    why: str
    """The reason as part of a sentence, without a full stop."""

    @classmethod
    def from_error(cls, error: MemplanError | ChangeError) -> NotRecorded:
        """Return the answer for an error that was raised during the recording."""
        # a build's ChangeError comes as the cause of the recording's error
        cause = error.__cause__ if isinstance(error.__cause__, ChangeError) else error
        return cls(cause.found.rstrip(".") if isinstance(cause, MemplanError) else str(cause))


@dataclass(frozen=True)
class StepRecorder:
    """The arguments of `memplan.check`, to record and plan their step again with a change."""

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
        """Return the trace of the changed step, or why there is none: the change does not apply, or the step fails.
        ``wrap`` returns another module around the model; ``around`` is a context for the recording."""
        step_options = self.options if options is None else options
        build = build_of(self._changed_build(change, wrap), step_options, on_card=self.target.card is not None)
        try:
            with around or nullcontext():
                return record_for(build, self.target)
        except (MemplanError, ChangeError) as error:
            return NotRecorded.from_error(error)

    def planned(self, change: Change, budget: int) -> Plan | int | None:
        """Return the cheapest exact plan of the changed step within a budget in bytes.

        If there is none, return the smallest feasible budget; None if the step cannot be planned (inference, or a build
        that brings its own step).
        """
        options = self.options
        if not options.train:
            return None
        try:
            device = None if self.target.name == HOST else self.target.name
            return plan_or_floor(self._changed_build(change, wrap=None), options, budget, device)
        except Exception:  # a build that names CUDA, a model that cannot be captured: then no plan is reported
            return None

    def _changed_build(self, change: Change | None, wrap: Wrap | None) -> Callable[[], Any]:
        """Return a function that builds what is recorded, changed: a copy of the module, or what the callable returns.
        ``change`` gets the modules of that module; of a callable that returns a step, the modules that it creates."""

        def build() -> Any:
            with _new_modules() as created:
                result = copy_module(self.what) if isinstance(self.what, nn.Module) else self.what()
            is_module = isinstance(result, nn.Module)
            if change is not None:
                change(by_path([result] if is_module else created))
            return wrap(result) if wrap is not None and is_module else result

        build.__qualname__ = "the changed step"
        return build


def by_path(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Map the paths of all modules to them: ``Net.encoder`` and ``encoder``, both of which a trace may have.
    ``modules`` include the root modules, of which paths begin with the class."""
    children = {id(child) for module in modules for child in module.children()}
    paths: dict[str, nn.Module] = {}
    for root in (module for module in modules if id(module) not in children):
        kind = type(root).__name__
        for path, module in root.named_modules():
            paths.setdefault(f"{kind}.{path}" if path else kind, module)
            if path:
                paths.setdefault(path, module)
    return paths


@contextmanager
def _new_modules() -> Iterator[list[nn.Module]]:
    """Yield a list that, after the context, has the modules created within it, in order. They are recognized by the
    registration of a child or a parameter."""
    by_id: dict[int, nn.Module] = {}

    def note(module: nn.Module, name: str, value: Any) -> None:
        by_id.setdefault(id(module), module)

    handles = [
        module_hooks.register_module_parameter_registration_hook(note),
        module_hooks.register_module_module_registration_hook(note),
    ]
    modules: list[nn.Module] = []
    try:
        yield modules
    finally:
        modules += by_id.values()
        for handle in handles:
            handle.remove()


def module_at(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """Return the module with a layer's path. Raises ChangeError if there is none."""
    if path not in modules:
        raise ChangeError(f"there is no module {path}")
    return modules[path]
