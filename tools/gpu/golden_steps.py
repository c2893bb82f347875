"""The steps that golden files are recorded of, and how each is put on the card. Needs torch, no GPU.

Measured and predicted runs take a step from here, in the same words: what one does, the other does.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Set = Literal["zoo", "layers"]
Build = Callable[[], Callable[[], Any]]

ROOT = Path(__file__).resolve().parents[2]
LAYERS_MODULE, MORE_MODULE = "golden_layers", "golden_more"
STEPS: dict[Set, int] = {"zoo": 2, "layers": 3}
"""How often the step runs: an optimizer makes its state in the first, and published figures of layers are of a later
one, when gradients are held."""
_SHELVES = {"examples": ROOT / "examples", "golden_zoo": ROOT / "benchmarks" / "zoo"}
_ZOO = "golden_zoo"


@dataclass(frozen=True, slots=True)
class Subject:
    """A step to record: its name, where it comes from, and its build, which names no device."""

    name: str
    set: Set
    module: str
    build: Build

    @property
    def steps(self) -> int:
        """How often the step runs."""
        return STEPS[self.set]


def modules() -> list[str]:
    """The modules with steps: those of the zoo by their file names, and the one of single layers."""
    files = sorted((ROOT / "benchmarks" / "zoo").glob("*.py"))
    return [path.stem for path in files if path.stem not in ("__init__", "registry")] + [LAYERS_MODULE]


def subjects(only: str | None = None, *, more: bool = False) -> tuple[dict[str, Subject], dict[str, str]]:
    """The steps of all modules, or of one, by name; and of the modules that cannot be imported, why.

    Each module of the zoo is imported by itself: one that lacks a library takes no other with it.

    Args:
        only: a module.
        more: with the layers of `golden_more`, too.
    """
    _put_up_shelves()
    found: dict[str, Subject] = {}
    broken: dict[str, str] = {}
    every = [*modules(), *([MORE_MODULE] if more else [])]
    for module in [only] if only is not None else every:
        try:
            found.update(_of_module(module))
        except Exception as error:  # a missing library, or a version that the zoo does not know
            broken[module] = f"{type(error).__name__}: {error}"
    return found, broken


def _of_module(module: str) -> dict[str, Subject]:
    if module in (LAYERS_MODULE, MORE_MODULE):
        layers = importlib.import_module(module).LAYERS
        return {name: Subject(name, "layers", module, build) for name, build in layers.items()}
    home = importlib.import_module(f"{_ZOO}.{module}").__name__
    registered = importlib.import_module(f"{_ZOO}.registry").ZOO
    return {name: Subject(name, "zoo", module, build) for name, build in registered.items() if build.__module__ == home}


def _put_up_shelves() -> None:
    """Make the zoo's folders importable by names that nothing else has, without the zoo's own ``__init__``.

    That one imports every module, and so needs every library at once.
    """
    for name, folder in _SHELVES.items():
        if name not in sys.modules:
            shelf = types.ModuleType(name)
            shelf.__path__ = [str(folder)]
            sys.modules[name] = shelf
    here = str(Path(__file__).resolve().parent)
    if here not in sys.path:
        sys.path.insert(0, here)


def on_card(build: Build) -> Build:
    """A build whose tensors are all made on the CUDA device, as are those that its step makes.

    ``torch.autocast("cpu")`` in it means the card's.
    """

    def build_on_card() -> Callable[[], Any]:
        with _card_is_default():
            step = build()

        def step_on_card() -> Any:
            with _card_is_default():
                return step()

        return step_on_card

    return build_on_card


@contextlib.contextmanager
def _card_is_default() -> Iterator[None]:
    import torch

    plain = torch.autocast

    class CardAutocast(plain):
        """`torch.autocast` on the card, whichever device the step names."""

        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cuda" if device_type == "cpu" else device_type, *args, **kwargs)

    torch.autocast = CardAutocast
    try:
        with torch.device("cuda"):
            yield
    finally:
        torch.autocast = plain
