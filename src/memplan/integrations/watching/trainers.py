"""Callbacks that watch what a trainer trains. Each library is imported where its callback is made."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from memplan.integrations.watching.watch import Watch, watch


class _Watched:
    """One watch for each training, begun and ended by a trainer's events."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.seen: Watch | None = None

    def begin(self, model: Any) -> None:
        self.seen = watch(model, **self.options)
        self.seen.__enter__()

    def end(self, error: BaseException | None = None) -> None:
        if self.seen is not None:
            self.seen.__exit__(type(error) if error is not None else None, error, None)


def for_transformers(**options: Any) -> Any:
    """Return a callback for a ``transformers.Trainer``: what it saw is its attribute ``seen``, a `Watch`.

    The watch ends with the training, also with an error in one of its epochs. Where more than that is between the
    trainer's beginning and its end, ``with memplan.watch(trainer): trainer.train()`` is the surer way.

    Args:
        options: as for `memplan.watch`.

    Example:
        >>> trainer = transformers.Trainer(model, arguments, callbacks=[for_transformers(quiet=True)])
    """
    import transformers

    class WatchCallback(transformers.TrainerCallback, _Watched):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            trainer = _running_trainer(transformers.Trainer)
            self.begin(others["model"])
            if trainer is not None:
                _guard(trainer, self.end)

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.end()

    return WatchCallback(options)


def for_lightning(**options: Any) -> Any:
    """Return a callback for a ``lightning.Trainer``: what it saw is its attribute ``seen``, a `Watch`.

    Args:
        options: as for `memplan.watch`.

    Example:
        >>> lightning.Trainer(callbacks=[for_lightning(quiet=True)]).fit(module, loader)
    """
    from lightning.pytorch.callbacks import Callback  # pyright: ignore[reportMissingImports]  # an optional library

    class WatchCallback(Callback, _Watched):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.begin(pl_module)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.end(exception)

    return WatchCallback(options)


def _running_trainer(kind: type) -> Any:
    """Return the trainer whose training calls this: its events do not name it."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            values = frame.f_locals
            found = values.get("self")
            if type(values) is dict:  # before Python 3.13 a copy that the frame keeps
                values.clear()
            if isinstance(found, kind):
                return found
        frame = frame.f_back
    return None


def _guard(trainer: Any, end: Callable[[BaseException], None]) -> None:
    """Call ``end`` where an epoch of this trainer raises: it has no event for that."""
    name = "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"
    before = getattr(trainer, name)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return before(*args, **kwargs)
        except BaseException as error:
            vars(trainer).pop(name, None)
            end(error)
            raise

    setattr(trainer, name, guarded)
