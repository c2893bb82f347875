"""Ask a cuDNN on disk about random convolutions for a described card, and append its answers to a file of JSON lines.

python tools/workspace_model/gather.py CARD COUNT SEED --cudnn ENV --out FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import astuple
from pathlib import Path

from sampling import sample

from memplan.cudnn.cudnn_library import find_cudnn
from memplan.cudnn.described_card import properties
from memplan.cudnn.questions import stairs
from memplan.cudnn.worker_process import ask_worker
from memplan.devices import find


def main() -> None:
    """Read the command line, and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("card")
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--cudnn", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    library = find_cudnn(options.cudnn)
    assert library is not None, "an environment was named"
    questions = list(itertools.islice(sample(options.seed), options.count))
    start, answered = time.time(), 0
    with options.out.open("w") as out:
        for start_at in range(0, len(questions), 2000):
            batch = questions[start_at : start_at + 2000]
            for question, plans in ask_worker(library, properties(find(options.card)), batch):
                if isinstance(plans, str):
                    continue
                answered += 1
                out.write(json.dumps([astuple(question), [[p.engine, p.workspace] for p in stairs(plans)]]) + "\n")
    print(f"{options.card}: {answered} of {len(questions)} answered in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
