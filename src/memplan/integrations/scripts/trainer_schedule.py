"""Evaluations and checkpoints of trainers that come after some hundred updates, brought forward."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from memplan import _torch

_SOON = 2
"""Updates after which the first evaluation and the first checkpoint of Hugging Face's `Trainer` come; batches after
which the first validation of Lightning's comes."""
_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


class TrainerSchedule:
    """Changes the schedules of trainers within ``stack``, once a script has imported them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        """Undoes the changes when it is exited."""
        self._changed: list[Any] = []
        """Classes that are changed already."""

    def bring_forward(self) -> None:
        """Evaluate and save soon where a trainer would after more updates or batches (``eval_steps``, ``save_steps``,
        an integer ``val_check_interval``)."""
        self._change("transformers.trainer_callback", "TrainerState", _sooner_states)
        for name in _LIGHTNING:
            self._change(name, "Trainer", _sooner_validations)

    def _change(self, module: str, name: str, attributes_of: Any) -> None:
        """Replace attributes of class ``name``, once its module is imported; only the first time. ``attributes_of``
        takes the class, and returns the new attributes by name."""
        changed = getattr(sys.modules.get(module), name, None)
        if changed is not None and changed not in self._changed:
            self._changed.append(changed)
            self._stack.enter_context(_torch.patched(changed, **attributes_of(changed)))


def _sooner_states(state: Any) -> dict[str, Any]:
    """Return a method for transformers' class `TrainerState` that caps its steps between evaluations and saves."""
    compute = state.compute_steps

    def compute_sooner(self: Any, args: Any, max_steps: int) -> None:
        compute(self, args, max_steps)
        for kind in ("eval_steps", "save_steps"):
            steps = getattr(self, kind, None)
            if isinstance(steps, int) and steps > _SOON:
                setattr(self, kind, _SOON)

    return {"compute_steps": compute_sooner}


def _sooner_validations(trainer: Any) -> dict[str, Any]:
    """Return a property for Lightning's class `Trainer` that caps ``val_check_interval``. The trainer sets it in its
    constructor, and reads it in ``fit``, where it must not exceed the loader's length."""
    name = "val_check_interval"

    def interval(self: Any) -> Any:
        value = vars(self)[name]
        return min(value, _SOON) if type(value) is int else value

    return {name: property(interval, lambda self, value: vars(self).update({name: value}))}
