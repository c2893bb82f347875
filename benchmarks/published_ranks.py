"""What torchtitan's own trainer reserves on a rank, beside the readings that its team published.

    ENV/bin/python benchmarks/published_ranks.py     # writes benchmarks/results/published_ranks.json and .md

ENV is an environment with torchtitan 0.2.2, tokenizers, and memplan. The readings are reserved bytes on H100 of 96 GB,
with torch and torchtitan of December 2024: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1
and 3. Whether they are with expandable segments, which torchtitan's run_train.sh sets, is not said: both are predicted.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CONFIG = ROOT / "benchmarks" / "published_ranks" / "llama3_8b.toml"
GIB = 2**30
PUBLISHED = {8: 82.4, 128: 67.0}
"""GiB reserved, FSDP without torch.compile, by number of GPUs."""
OF_2024 = CONFIG.parent / "december_2024.py"
"""torchtitan with the groups of parameters that its code had then; its optimizer was not fused."""
CARD = "h200"
"""The H100's kernels, and more memory than the published cards had."""


@dataclass(frozen=True)
class Row:
    """A number of GPUs; sizes in GiB."""

    world: int
    published: float
    allocated: float
    reserved: float
    expandable: float
    """Reserved with ``expandable_segments:True``."""
    reserved_2024: float
    """Reserved with `OF_2024` and a foreach optimizer."""
    expandable_2024: float


def make_assets(folder: Path) -> None:
    """Write what torchtitan reads: a tokenizer and texts, which its wheel lacks. The model's own vocabulary is that of
    its flavor."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(3000)]
    texts = [" ".join(draw.choices(words, k=600)) for _ in range(400)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=special))
    names = folder / "tests" / "assets" / "tokenizer"
    data = folder / "tests" / "assets" / "c4_test"
    names.mkdir(parents=True)
    data.mkdir(parents=True)
    tokenizer.save(str(names / "tokenizer.json"))
    keys = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    (names / "tokenizer_config.json").write_text(json.dumps(keys), encoding="utf-8")
    lines = [json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n" for text in texts]
    (data / "data.json").write_text("".join(lines), encoding="utf-8")


def peaks(world: int, *options: str, of_2024: bool = False) -> tuple[float, float]:
    """Return the allocated and the reserved peak of rank 0, in GiB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_assets(folder)
        shutil.copy(CONFIG, folder)
        script = [str(OF_2024)] if of_2024 else ["-m", "torchtitan.train"]
        optimizer = ["--optimizer.implementation=foreach"] if of_2024 else []
        command = [
            sys.executable, "-m", "memplan.cli", "run", "--world", str(world), "--device", CARD, "--limit", "900",
            "--json", "-", *options, *script, "--job.config_file", CONFIG.name, *optimizer,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{world} ranks: {done.stderr}")
    timeline: dict[str, Any] = json.loads(done.stdout)["timeline"]
    return timeline["peak_allocated"] / GIB, timeline["peak_reserved"] / GIB


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| GPUs | published, reserved | predicted | off | expandable segments | off | of 2024 | off "
        "| of 2024, expandable segments | off |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.world} | {row.published} GiB "
        + "".join(
            f"| {size:.1f} GiB | {size / row.published - 1:+.1%} "
            for size in (row.reserved, row.expandable, row.reserved_2024, row.expandable_2024)
        )
        + "|"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Predict all rows and write the results."""
    rows: list[Row] = []
    for world, published in PUBLISHED.items():
        allocated, reserved = peaks(world)
        segments = "--settings", "expandable_segments:True"
        _, expandable = peaks(world, *segments)
        _, reserved_2024 = peaks(world, of_2024=True)
        _, expandable_2024 = peaks(world, *segments, of_2024=True)
        rows.append(Row(world, published, allocated, reserved, expandable, reserved_2024, expandable_2024))
    print(table(rows))
    (RESULTS / "published_ranks.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    (RESULTS / "published_ranks.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
