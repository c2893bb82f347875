"""Callbacks for trainers that watch their training. Each library is imported only when its callback is created."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from memplan._frames import callers
from memplan.integrations.watching.watch import Watch, watch


class _WatchesTraining:
    """Begins and ends a watch at a trainer's events; each training has its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        """``options``: keyword arguments of `memplan.watch`."""
        self.options = options
        self.seen: Watch | None = None
        """The watch of the training that runs, or ran last."""

    def begin(self, model: Any) -> None:
        """Begin to watch the training of a model."""
        self.seen = watch(model, **self.options)
        self.seen.__enter__()

    def end(self, error: BaseException | None = None) -> None:
        """End the watch, by the error with which the training ended."""
        if self.seen is not None:
            self.seen.__exit__(type(error) if error is not None else None, error, None)


def for_transformers(**options: Any) -> Any:
    """Return a callback for a ``transformers.Trainer`` whose attribute ``seen`` is the `Watch` of the last training.

    The watch ends with the training or an error in one of its epochs. An error outside of the epochs does not end it:
    ``with memplan.watch(trainer): trainer.train()`` covers those, too.

    Args:
        options: as for `memplan.watch`.

    Example:
        >>> trainer = transformers.Trainer(model, arguments, callbacks=[for_transformers(quiet=True)])
    """
    import transformers

    class WatchCallback(transformers.TrainerCallback, _WatchesTraining):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            trainer = _running_trainer(transformers.Trainer)
            self.begin(others["model"])
            if trainer is not None:
                _end_on_error(trainer, self.end)

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.end()

    return WatchCallback(options)


def for_lightning(**options: Any) -> Any:
    """Return a callback for a ``lightning.Trainer`` whose attribute ``seen`` is the `Watch` of the last training.

    Args:
        options: as for `memplan.watch`.

    Example:
        >>> lightning.Trainer(callbacks=[for_lightning(quiet=True)]).fit(module, loader)
    """
    from lightning.pytorch.callbacks import Callback  # pyright: ignore[reportMissingImports]  # an optional library

    class WatchCallback(Callback, _WatchesTraining):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.begin(pl_module)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.end(exception)

    return WatchCallback(options)


def _running_trainer(kind: type) -> Any:
    """Return the innermost ``self`` of this type on the call stack, or None: a trainer's events do not pass it."""
    for frame in callers():
        if frame.f_code.co_varnames[:1] == ("self",) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            values = frame.f_locals
            instance = values.get("self")
            if type(values) is dict:  # before Python 3.13 a copy: the frame would keep its values alive
                values.clear()
            if isinstance(instance, kind):
                return instance
    return None


def _end_on_error(trainer: Any, end: Callable[[BaseException], None]) -> None:
    """Call ``end`` if an epoch of this trainer raises, for which it has no event."""
    name = "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"
    original = getattr(trainer, name)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            vars(trainer).pop(name, None)
            end(error)
            raise

    setattr(trainer, name, guarded)
