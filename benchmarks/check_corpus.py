"""What `memplan.check` warns of on 150 models of other people: every warning, to be read by a person.

    pip install transformers monai diffusers torch_geometric
    python benchmarks/check_corpus.py                      # writes check_corpus.json to benchmarks/results
    python benchmarks/check_corpus.py --only gpt2,UNet     # prints, writes nothing
    python benchmarks/check_corpus.py --again gpt2,UNet    # these anew in check_corpus.json, after a change

The models are those of breadth.py that ran there, chosen by a rule: all of MONAI's and diffusers', every second one of
PyG's, and of transformers as many, evenly spaced, as make 150 with these. A step is breadth.py's: forward, the sum of
all outputs, backward and AdamW; models of transformers and MONAI have the widths of their defaults (two layers) and
inputs of a usual size, since nothing of them is allocated. They are checked for the CPU and for an H100 by turns, each
in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import breadth
from benchmarks.accuracy import RESULTS

Row = dict[str, Any]
MODELS = 150
DEVICES = ("cpu", "h100")
SECONDS = 300


def chosen() -> list[tuple[str, str]]:
    """Return family and name of the models, in breadth.json's order."""
    rows = json.loads((RESULTS / "breadth.json").read_text())["rows"]
    ran = {family: [row["name"] for row in rows if row["family"] == family and "left_out" not in row]
           for family in breadth.FAMILIES}  # fmt: skip
    few = [(family, name) for family in ("monai", "diffusers") for name in ran[family]]
    few += [("torch_geometric", name) for name in ran["torch_geometric"][::2]]
    most, wanted = ran["transformers"], MODELS - len(few)
    return [*(("transformers", most[number * len(most) // wanted]) for number in range(wanted)), *few]


def child(family: str, name: str) -> Row:
    """Check one model, in this process."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = DEVICES[[one for _, one in chosen()].index(name) % 2]
    row: Row = {"family": family, "name": name, "device": device}
    for wide, make in _steps(family, name):
        begin = time.perf_counter()
        try:
            found = _findings(make(), device)
        except Exception as error:  # the model's own, of inputs that do not fit it; or a refusal
            row["left_out"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        row.pop("left_out", None)
        return row | {"wide": wide, "seconds": round(time.perf_counter() - begin, 1)} | found
    return row


def _steps(family: str, name: str) -> Iterator[tuple[bool, Callable[[], breadth.Maker]]]:
    """Yield ways to make a model's step: in its own width first, then the tiny one that runs."""
    if family == "monai":
        yield True, lambda: breadth.monai_steps(wide=True)[name]
    if family == "transformers":
        for more in ({}, {"cache": False}, {"both": True}):
            yield True, partial(breadth.transformers_step, name, wide=True, **more)
    yield False, partial(breadth.runnable, family, name)


def _findings(build: breadth.Maker, device: str) -> Row:
    import memplan

    found = [finding.to_dict() for finding in memplan.check(build, device=device)]
    return {
        "warnings": [_kept(finding) for finding in found if finding["severity"] == "warning"],
        "notes": Counter(finding["id"] for finding in found if finding["severity"] == "info"),
    }


def _kept(finding: Row) -> Row:
    kind = finding["details"].get("kind")
    names = ("id", "layer", "where", "bytes", "message")
    return {name: finding[name] for name in names} | ({"kind": kind} if kind is not None else {})


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, with commas between; prints and writes nothing")
    parser.add_argument("--again", help="names, with commas between; writes their rows anew")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "check_corpus.json")
    given = parser.parse_args()
    some = given.only or given.again
    wanted = set(some.split(",")) if some else None
    models = [one for one in chosen() if wanted is None or one[1] in wanted]
    context = breadth.server()
    with ThreadPoolExecutor(given.jobs) as pool:
        rows: list[Row] = []
        for row in pool.map(lambda model: breadth.run(context, *model, child, SECONDS), models):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if given.only:
        return
    if given.again:
        new = {(row["family"], row["name"]): row for row in rows}
        rows = [new.get((row["family"], row["name"]), row) for row in json.loads(given.out.read_text())["rows"]]
    counts = Counter(title for row in rows for title in _titles(row))
    given.out.write_text(json.dumps({"counts": counts, "rows": rows}, indent=1) + "\n")
    print(json.dumps(counts, indent=1))


def _titles(row: Row) -> list[str]:
    found = row.get("warnings", ())
    return [f"{one['id']}: {one['kind']}" if "kind" in one else one["id"] for one in found]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
