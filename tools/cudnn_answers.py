"""What the package ships of cuDNN: workspaces that a real card took, and cuDNN's answers for the examples and the zoo.

    python tools/cudnn_answers.py --measured --cudnn ENV        # of goldens/, recorded with this cuDNN
    python tools/cudnn_answers.py --shipped --cudnn ENV ENV2    # of the cuDNN of each environment

Writes src/memplan/cudnn/answers/measured.json.gz or shipped.json.gz. Both hold the questions as text; of plans with the
same workspace the first alone is kept, which is the one that torch can come to.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import sys
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for _path in (str(ROOT / "benchmarks"), str(ROOT / "src"), str(ROOT / "examples")):
    if _path not in sys.path:
        sys.path.append(_path)

accuracy: Any = importlib.import_module("cudnn_accuracy")
golden_file: Any = importlib.import_module("golden_file")

from memplan import record  # noqa: E402
from memplan.cudnn.ask import ask  # noqa: E402
from memplan.cudnn.cudnn_library import Cudnn, find_cudnn  # noqa: E402
from memplan.cudnn.described_card import properties  # noqa: E402
from memplan.cudnn.questions import Plans, Question  # noqa: E402
from memplan.cudnn.stored_answers import (  # noqa: E402
    MEASURED,
    SHIPPED,
    AllMeasured,
    CardAnswers,
    Measured,
    Shipped,
    digest_of,
)
from memplan.devices import find  # noqa: E402

CARDS = ("a100-80gb", "h100", "rtx4090", "t4")
EXAMPLES = ("resnet18", "unet3d")


def measured(environment: str) -> AllMeasured:
    """What each real card took for each question of the golden files that were recorded with this cuDNN."""
    library = find_cudnn(environment)
    assert library is not None, "it was found when it was asked for"
    found: dict[tuple[str, str], dict[str, set[int]]] = {}
    for golden in map(golden_file.read, golden_file.find(ROOT / "goldens")):
        if golden.name in accuracy.BENCHMARK or golden.versions["cudnn"] != library.version:
            continue
        of = found.setdefault((find(golden.gpu).name, golden.torch), {})
        if any("convolution" in name for name in golden.calls or {}):
            for row in accuracy.rows_of(golden, environment):
                if not isinstance(row, str):
                    of.setdefault(row.question.key, set()).add(row.took)
        if any("_cudnn_rnn" in name for name in golden.calls or {}):
            for question, took in accuracy.recurrent_of(golden):
                of.setdefault(question.key, set()).add(took)
    return AllMeasured(tuple(agreeing(*key, library.version, of) for key, of in sorted(found.items())))


def agreeing(card: str, release: str, version: int, found: dict[str, set[int]]) -> Measured:
    """What one card took, without the questions that took different sizes."""
    doubtful = [key for key, sizes in found.items() if len({accuracy.blocks(size) for size in sizes}) > 1]
    print(f"{card}: {len(found)} questions, {len(doubtful)} of which took different sizes and are left out: {doubtful}")
    kept = {key: max(sizes) for key, sizes in sorted(found.items()) if key not in doubtful}
    return Measured(card, version, release, kept)


def questions(version: str) -> list[Question]:
    """What the zoo's steps, the single layers and the examples ask."""
    steps = importlib.import_module("golden_steps")
    builds = {subject.name: steps.on_card(subject.build) for subject in accuracy.subjects().values()}
    builds |= {f"example {name}": importlib.import_module(name).build for name in EXAMPLES}
    found: dict[Question, None] = {}
    for name, build in builds.items():
        with accuracy.questions_noted() as noted:
            try:
                record(build, device="h100", steps=1, cudnn=version)
            except Exception as error:  # a library that is missing, or of another version
                print(f"{name}: {error}")
        asked = [one.question for of in noted.values() for one in of.values()]
        print(f"{name}: {len(asked)}", flush=True)
        found |= dict.fromkeys(asked)
    return sorted(found, key=lambda question: question.key)


def shipped(environments: Iterable[str]) -> Shipped:
    """The answers of each environment's cuDNN for each card."""
    libraries = [library for path in environments if (library := find_cudnn(path)) is not None]
    asked = questions("9.0.0")
    of = [answers(library, card, asked) for library in libraries for card in CARDS]
    return Shipped(tuple(question.key for question in asked), tuple(of))


def answers(library: Cudnn, card: str, asked: list[Question]) -> CardAnswers:
    """What one cuDNN says of one card."""
    known = ask(library, find(card), asked)
    print(card, library.title, len(known.plans), *known.notes, flush=True)
    plans = (known.plans.get(question) for question in asked)
    digest = digest_of(properties(find(card)))
    return CardAnswers(card, library.version, digest, tuple(None if one is None else sizes(one) for one in plans))


def sizes(plans: Plans) -> Plans:
    """The first plan of each workspace."""
    seen = set[int]()
    return tuple(plan for plan in plans if plan.workspace not in seen and not seen.add(plan.workspace))


def write(path: Path, value: AllMeasured | Shipped) -> None:
    """Write a file that is the same for the same values."""
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(astuple(value), separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", action="store_true", help="write what the real card took")
    parser.add_argument("--shipped", action="store_true", help="write cuDNN's answers")
    parser.add_argument("--cudnn", nargs="+", required=True, metavar="ENV", help="environments whose cuDNN is asked")
    options = parser.parse_args()
    if options.measured:
        write(MEASURED, measured(options.cudnn[0]))
    if options.shipped:
        write(SHIPPED, shipped(options.cudnn))
    return 0


if __name__ == "__main__":
    sys.exit(main())
