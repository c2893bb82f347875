"""What waits for a real GPU, in order of worth. Each entry is a command of this folder, in a process of its own.

`ENTRIES` is the list. What a command leaves in its folder, `Entry.read` makes figures of: plain data.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
import fit  # noqa: E402  # of this folder, as all that follow
import fit_steps  # noqa: E402
import golden  # noqa: E402
import golden_more  # noqa: E402

if TYPE_CHECKING:
    from golden_dry import DryCard

MOST_MINUTES = 8.0
"""An entry's process is ended after so long."""
FIGURES = "figures.json"
FUNCTIONS = "queue_functions"
"""The module of the entries that are functions: each writes its figures to `FIGURES` as they come."""
NEEDS_VALUES = "needs values, and kernels of an emulated card compute nothing"
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where an entry runs."""

    folder: Path
    """The folder of the whole queue, which entries can share: golden files are in ``goldens/``."""
    own: Path
    """The folder of the entry alone."""
    seconds: float
    """How long it may take."""
    card: str = ""
    """Folder of the card's golden files: ``nvidia-h200/2.11.0-cu130``."""
    dry: DryCard | None = None
    """The emulated card; None: this machine's GPU."""
    again: bool = False
    """Whether what failed is to be run again."""


@dataclass(frozen=True)
class Entry:
    """Something that only a card can tell."""

    name: str
    why: str
    minutes: float
    """Expected, on a card."""
    module: str
    """The script of this folder that runs."""
    arguments: Callable[[Place], list[str] | None]
    """Its arguments; None: nothing is left to do."""
    read: Callable[[Place], Row]
    """Its figures: what it has left so far. ``left``: what another run can still measure; ``failed``: by name why there
    are no figures."""
    codes: tuple[int, ...] = (0,)
    """Exit codes with which it has measured what it could."""
    dry_skip: str = ""
    """Why it means nothing on an emulated card."""
    starts_card: bool = field(default=False, kw_only=True)
    """Whether the script itself starts the processes that see an emulated card."""

    def command(self, place: Place) -> list[str] | None:
        """What to run; None: nothing is left to do."""
        arguments = self.arguments(place)
        if arguments is None:
            return None
        if place.dry is not None and not self.starts_card:
            return place.dry.command(self.module, arguments)
        return [sys.executable, str(HERE / f"{self.module}.py"), *arguments]


def dry_options(place: Place) -> list[str]:
    """Of `fit.py` and `golden.py`."""
    return [] if place.dry is None else ["--dry", place.dry.name, "--torch", place.dry.environment]


def figures_of(place: Place) -> Row:
    """What a function has written."""
    path = place.own / FIGURES
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def function(name: str, why: str, minutes: float, **options: Any) -> Entry:
    """An entry that is the function of this name in `FUNCTIONS`."""

    def arguments(place: Place) -> list[str]:
        dry = [] if place.dry is None else ["--emulated", place.dry.name, "--environment", place.dry.environment]
        return [name, str(place.own), *dry]

    return Entry(name, why, minutes, FUNCTIONS, arguments, figures_of, **options)


# Budgets


METHODS = ("eager", "per_block", "compile", "liger", "fit-graph-0.8", "fit-inductor-0.8", "fit-graph-floor",
           "fit-inductor-floor")  # fmt: skip
DRY_METHODS = ("eager", "fit-graph-0.8")
DRY_COMPILED = ("per_block", "compile", "fit-inductor-0.8")
"""On an emulated card for one step alone: they go the same way for all, and fused kernels take minutes to make."""
COMPILED_STEP = "gpt"


def methods(step: str, dry: bool) -> tuple[str, ...]:
    """What is measured of a step."""
    if dry:
        return DRY_METHODS + (DRY_COMPILED if step == COMPILED_STEP else ())
    return tuple(one for one in METHODS if one != "liger" or importlib.util.find_spec("liger_kernel") is not None)


def fitted(step: str, minutes: float) -> Entry:
    """`memplan.fit` by both engines on a step, beside what people do today."""

    def arguments(place: Place) -> list[str] | None:
        if not _left(step, place, again=place.again):
            return None
        chosen = ",".join(methods(step, place.dry is not None))
        again = ["--again"] if place.again else []
        return ["--only", step, "--methods", chosen, "--output", str(place.own), "--missing", *again,
                "--seconds", str(int(place.seconds)), *dry_options(place)]  # fmt: skip

    def read(place: Place) -> Row:
        cases = _cases(place)
        failed = {case["method"]: case["error"][:300] for case in cases if fit.has_failed(case)}
        return {"cases": cases, "left": _left(step, place), "failed": failed}

    why = f"{fit_steps.TITLES[step]}: memory and seconds of both engines, by turns with eager mode, beside its peers"
    return Entry(f"fit-{step}", why, minutes, "fit", arguments, read, codes=(0, fit.SOME_MISSING),
                 starts_card=True)  # fmt: skip


def _cases(place: Place) -> list[Row]:
    """Of this card and torch."""
    return fit.stored(place.own / f"{place.card.replace('/', '.')}.json")


def _left(step: str, place: Place, again: bool = False) -> list[str]:
    cases = _cases(place)
    done = {case["method"] for case in cases if not fit.was_stopped(case) and not (again and "error" in case)}
    return [one for one in methods(step, place.dry is not None) if one not in done]


# Golden files

DRY_GOLDENS = 2
"""Of each group on an emulated card: the others go the same way."""


def goldens(group: str, why: str, minutes: float, **options: Any) -> Entry:
    """Golden files of those steps of a group that have none of this card and torch yet."""

    def wanted(place: Place) -> list[str]:
        return names_of(group) if place.dry is None else names_of(group)[:DRY_GOLDENS]

    def missing(place: Place) -> list[str]:
        repository = golden.ROOT / "goldens" / ("" if place.dry is None else "dry")
        known = [root / place.card for root in (repository, place.folder / "goldens")]
        return [one for one in wanted(place) if not any((folder / f"{one}.json.gz").exists() for folder in known)]

    def arguments(place: Place) -> list[str] | None:
        chosen = [part for one in missing(place) for part in ("--only", one)]
        if not chosen:
            return None
        return [*chosen, "--output", str(place.folder / "goldens"), "--budget-seconds", str(int(place.seconds)),
                *dry_options(place)]  # fmt: skip

    def read(place: Place) -> Row:
        index = place.folder / "goldens" / place.card / golden.INDEX
        rows = json.loads(index.read_text(encoding="utf-8"))["steps"] if index.exists() else {}
        steps = {one: rows[one] for one in wanted(place) if one in rows}
        failed = {one: row["error"] for one, row in steps.items() if "error" in row}
        stopped = [one for one in missing(place) if golden.OVER in failed.get(one, "")]
        for one in missing(place):  # where not a single step was measured, there is no index
            failed.setdefault(one, "no golden file was written: output.txt says why")
        return {
            "files": [one for one in steps if one not in failed], "left": stopped,
            "failed": {one: why for one, why in failed.items() if one not in stopped},
        }  # fmt: skip

    return Entry(f"goldens-{group}", why, minutes, "golden", arguments, read, codes=(0, golden.SOME_MISSING),
                 starts_card=True, **options)  # fmt: skip


def names_of(group: str) -> list[str]:
    """The steps of a group of `golden_more`; of ``rest``: all others."""
    if group != "rest":
        return golden_more.GROUPS[group]
    import golden_steps

    return [*golden_steps.subjects()[0]]


_RECURRENT = "recurrent networks of other kinds than the seven whose workspaces are known"
_POINTWISE = "convolutions with a kernel of 1, of which half take what cuDNN does not name for a described card"
_WEIGHTS = "weight gradients of convolutions, some of which take more than cuDNN names"
_ENCODINGS = "saved values as bits, small integers and int8, and in host memory: as on the CPU, and bytes a second"
ENTRIES: tuple[Entry, ...] = (
    function("proof", "fit's proof, which has not run on a real card as it is now", 4, dry_skip=NEEDS_VALUES),
    function("kernels", "memplan.kernels: errors from float64, and seconds beside torch, Inductor and Liger", 4),
    function("image_kernels", "likewise those of convolutional networks: norms, depthwise convolutions, losses", 3),
    function("measure", "memplan measure --device cuda beside the prediction", 1.5, starts_card=True),
    function("run", "memplan run --measure --device cuda, whose script runs behind the barrier", 1.5),
    function("encodings", _ENCODINGS, 1),
    function("packed", "memplan.PackedMasters: the bits of float32 master weights, its bytes and its seconds", 1),
    fitted("gpt", 6),
    fitted("resnet50", 8),
    fitted("unet3d", 8),
    goldens("benchmark", "cuDNN's benchmark mode: the largest workspace of all plans, then the fastest one's", 1),
    goldens("recurrent", _RECURRENT, 1.5, dry_skip="cuDNN refuses recurrent networks on an emulated card"),
    goldens("pointwise", _POINTWISE, 1.5),
    goldens("weight_gradients", _WEIGHTS, 1.5),
    fitted("llama_lora", 6),
    fitted("basic_unet", 6),
    fitted("gpt2_medium", 8),
    function("watch", "what memplan.watch adds to a step", 1),
    fitted("resnet18", 6),
    fitted("vit_s", 6),
    fitted("gpt_dropout", 6),
    fitted("unetr", 8),
    fitted("densenet", 8),
    fitted("resnet50_b8", 8),
    goldens("rest", "every other step that has no golden file of this card and torch", 8),
)
