"""Guards on the Python values that the code of a captured step can read.

A capture observes which code runs (`executed`). Everything that this code can have read is traversed from the model's
modules, the globals that the code loads and the closures of its functions: containers, objects (the attributes that the
code names) and classes, to any depth. The first traversal compares by value. Later checks compare objects by identity
and dicts by version, which is fast; if any object was replaced, everything is traversed again.

Objects that cannot be examined are listed in `Snapshot.unseen`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from memplan.planning.capture.reads.walk import Recipe, Snapshot, Walk
from memplan.planning.capture.side_effects import recomputed_attributes


class Reads:
    """Values that a captured step can have read, with a snapshot of them."""

    def __init__(self, readable: Readable, *, read_in_backward: bool = False) -> None:
        self.readable, self.snapshot = readable, readable.take_snapshot()
        self.read_in_backward = read_in_backward
        """Whether the backward pass reads them, too."""

    def are_unchanged(self, moment: object = None) -> bool:
        """Return whether all values equal the snapshot. ``moment``: a token that is the same object while no module's
        attributes change; None: unknown."""
        now = self.readable.take_snapshot(moment)
        if now is not self.snapshot and now == self.snapshot:
            self.snapshot = now
        return now is self.snapshot

    def differences(self) -> list[str]:
        """Return the names of the values that differ from the snapshot."""
        return self.snapshot.differences(self.readable.take_snapshot())

    def release(self) -> None:
        """Drop references to all values; the next check reads them anew."""
        self.readable.release()

    def share(self, other: Reads) -> None:
        """Use the other's `Readable` if both read the same values."""
        if self.readable.recipe == other.readable.recipe:
            self.readable = other.readable


class Readable:
    """Reads the values that a recipe describes. Does not keep the model alive."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self._modules = [
            (name, vars(module), recomputed_attributes(module), type(module)) for name, module in model.named_modules()
        ]
        """(name, attributes, names of attributes that do not count, class) of each of the model's modules."""
        self._module_names = {id(module): name for name, module in model.named_modules()}
        """By id() of a module."""
        self._moment: object = None
        """Token of the last snapshot; see `take_snapshot`."""
        self._walk: Walk | None = None
        """The traversal that read the last snapshot."""
        self._snapshot: Snapshot | None = None

    def take_snapshot(self, moment: object = None) -> Snapshot:
        """Return a snapshot of the present values: the same object as in the last call if nothing has changed.
        ``moment`` is the same object while no module's attributes change; None: unknown."""
        modules_unchanged = moment is not None and moment is self._moment
        if self._snapshot is None or self._walk is None or not self._walk.unchanged(modules=not modules_unchanged):
            self._walk = self._traverse()
            self._snapshot = self._walk.snapshot()
        self._moment = moment
        return self._snapshot

    def _traverse(self) -> Walk:
        """Traverse all readable values, and again while the traversal meets objects that read further attributes by
        name (`operator.attrgetter`), which the recipe must include."""
        while True:
            walk = Walk(self.recipe, self._module_names)
            walk.start(self._modules)
            recipe = replace(self.recipe, names=self.recipe.names | walk.added_names, reads_all=walk.reads_all)
            if recipe == self.recipe:
                return walk
            self.recipe = recipe

    def release(self) -> None:
        """Drop references to all values."""
        self._moment = self._walk = self._snapshot = None
