"""A baseline: what steps took when it was last accepted, as immutable data. All sizes are bytes.

It has no lines of the source: a comment added above a layer must not change a file that is under version control.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memplan.studies.comparisons.comparison import Side

SCHEMA = 1
"""Version of the JSON form. Raised whenever a reader of the old form would misread the new one."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that are live at the allocated peak, of one layer for one cause."""

    layer: str
    cause: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Ran:
    """The forward ops of a layer, each once, in order: ``("linear", "scaled_dot_product_flash_attention")``."""

    layer: str
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one step takes on one device."""

    target: str
    """As the command names it, with forward slashes."""
    options: str
    """Of the step, as typed: ``--input 8x512 --optimizer adamw``."""
    device: str
    torch: str
    """Its version, without what a wheel adds behind a plus sign."""
    cudnn: bool
    """Whether workspaces are those that an installed cuDNN named."""
    train: bool
    peak: int
    """The most that is allocated at any time."""
    reserved: int
    """The most that the caching allocator holds; the peak itself where there is none."""
    at: str
    """What runs at the peak: ``backward: linear's gradient of head``."""
    held: tuple[Held, ...]
    """Adds up to the peak."""
    ran: tuple[Ran, ...]

    @property
    def title(self) -> str:
        """Return the target and its options."""
        return f"{self.target} {self.options}".strip()

    @property
    def by_cause(self) -> dict[str, int]:
        """Bytes at the peak by cause; they add up to it."""
        found: dict[str, int] = {}
        for part in self.held:
            found[part.cause] = found.get(part.cause, 0) + part.bytes
        return found

    def side(self, name: str) -> Side:
        """Return this as a side of a comparison, which has causes and no layers."""
        return Side(name, "recorded", self.device, self.train, self.peak, self.reserved, self.by_cause, ())

    def same_step(self, target: str, options: str) -> bool:
        """Return whether this is about a target with these options, on whatever device."""
        return (self.target, self.options) == (target, options)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Figures of any number of steps: a target with its options, on a device."""

    steps: tuple[Figures, ...] = ()

    def find(self, target: str, options: str, device: str) -> Figures | None:
        """Return the figures of a step on a device; None where there are none."""
        return next((one for one in self.steps if one.device == device and one.same_step(target, options)), None)

    def updated(self, figures: Figures) -> Baseline:
        """Return the same with these figures in the place of those of the same step on the same device."""
        others = [one for one in self.steps if self.find(figures.target, figures.options, figures.device) is not one]
        return replace(self, steps=tuple(sorted([*others, figures], key=lambda one: (one.title, one.device))))
