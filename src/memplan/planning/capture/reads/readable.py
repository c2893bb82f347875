"""Fingerprint what the Python code of a captured step can read beside its tensors, to any depth.

A capture observes which code runs (`executed`). What that code can have read is walked from the model's modules, from
the globals that the code loads, and from what its functions close over: through containers, through objects as far as
the code names their attributes, and through classes, whatever the depth. All of it is read once, by value. From then
on objects at the same places are compared by identity, dicts by a version, which is fast; where anything is another
object, everything is walked again.

What cannot be looked into is named in `Found.unseen`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from memplan.planning.capture.reads.walk import Found, Recipe, Walk
from memplan.planning.capture.side_effects import computed


class Reads:
    """What a captured step can have read, and its values then."""

    def __init__(self, readable: Readable, *, late: bool = False) -> None:
        self.readable, self.found = readable, readable.now()
        self.late = late
        """Whether the backward pass has to find all of it as it was, too."""

    def hold(self, moment: object = None) -> bool:
        """Return whether all of it is as it was. ``moment``: as for `Readable.now`."""
        now = self.readable.now(moment)
        if now is not self.found and now == self.found:
            self.found = now
        return now is self.found

    def differing(self) -> list[str]:
        """Return the names of what is not as it was."""
        return self.found.differing(self.readable.now())

    def release(self) -> None:
        """Hold nothing that was read: it is read anew the next time."""
        self.readable.release()

    def share(self, other: Reads) -> None:
        """Read together with what reads the same."""
        if self.readable.recipe == other.readable.recipe:
            self.readable = other.readable


class Readable:
    """Reads what a recipe names. The model itself is not kept alive."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self._modules = [(name, vars(module), computed(module), type(module)) for name, module in model.named_modules()]
        self._places = {id(module): name for name, module in model.named_modules()}
        self._moment: object = None
        self._walk: Walk | None = None
        self._found: Found | None = None

    def now(self, moment: object = None) -> Found:
        """Return the present values: the same object as the last time where nothing has changed.

        Args:
            moment: the same object as long as no module's attributes have changed; None: that is not known.
        """
        settled = moment is not None and moment is self._moment
        if self._found is None or self._walk is None or not self._walk.unchanged(modules=not settled):
            walk = self._walked()
            self._walk, self._found = walk, walk.found()
        self._moment = moment
        return self._found

    def _walked(self) -> Walk:
        while True:
            walk = Walk(self.recipe, self._places)
            walk.start(self._modules)
            recipe = replace(self.recipe, names=self.recipe.names | walk.named, whole=walk.whole)
            if recipe == self.recipe:
                return walk
            self.recipe = recipe

    def release(self) -> None:
        """Hold nothing that was read."""
        self._moment = self._walk = self._found = None
