"""Evaluations and checkpoints of Hugging Face's `Trainer` that come after some hundred updates, brought forward."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from memplan import _torch

_UPDATES = 2
"""Updates after which the first evaluation and the first checkpoint come."""


class TrainerSchedule:
    """Changes the schedule of `Trainer` within ``stack``, once a script has imported it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._changed = False

    def bring_forward(self) -> None:
        """Evaluate and save after two updates where `Trainer` would after more (``eval_steps``, ``save_steps``)."""
        module = sys.modules.get("transformers.trainer_callback")
        state = None if self._changed else getattr(module, "TrainerState", None)
        if state is None:
            return
        self._changed = True
        compute = state.compute_steps

        def compute_sooner(self: Any, args: Any, max_steps: int) -> None:
            compute(self, args, max_steps)
            for kind in ("eval_steps", "save_steps"):
                steps = getattr(self, kind, None)
                if isinstance(steps, int) and steps > _UPDATES:
                    setattr(self, kind, _UPDATES)

        self._stack.enter_context(_torch.patched(state, compute_steps=compute_sooner))
