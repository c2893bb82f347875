"""How much lower do kernels make the lowest budget that has a plan, and does the plan keep it? On the dry card.

    python benchmarks/kernel_floors.py --torch PATH/TO/ENV [--card h100] [--steps "ResNet-50"]

Each cell is a process of its own that sees an emulated card (docs/dry.md): a step is planned for the lowest budget,
without kernels (``allow="exact"``) or with them (``allow="reordered"``), the plan is put in its place without a proof,
and torch's own allocator counts what it reserves when it runs. Seconds are estimates, the same on every machine:
measured, those of an emulated card mean nothing. Writes benchmarks/results/kernel_floors.json and .md,
which docs/kernels.md has. Exit code 1 if a plan takes more than its budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kernel_floors"
for _path in (str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

import fit_dry  # noqa: E402  # of this folder
import torch  # noqa: E402
from benchmarks.frontier import models  # noqa: E402
from benchmarks.frontier.models import Subject  # noqa: E402

Row = dict[str, Any]
ALLOWED = ("exact", "reordered")
SMALLER = 0.9
"""Share of the lowest budget without kernels that the lowest budget with kernels is to be at most."""


def gpt() -> Subject:
    """GPT of 4 layers of 512 with dropout 0.1 and 50,257 classes, 4 x 1,024 tokens."""
    return fit_dry.fit_steps.gpt2_medium(4, 4, 512)


def llama_lora() -> Subject:
    """LoRA of a Llama of 4 layers of 512 and 32,000 classes, 4 x 1,024 tokens, in bfloat16."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(LlamaForCausalLM(config), lora)  # pyright: ignore[reportArgumentType]  # any of its models
    ids, labels = (torch.randint(32_000, (4, 1024)) for _ in range(2))
    return Subject(model.to(torch.bfloat16).train(), (ids,), (labels,), models.logits_loss, {})


STEPS: Mapping[str, Callable[[], Subject]] = {
    "MONAI's BasicUNet, 64³, float32": models.basic_unet,
    "ResNet-50, batch 8, float32": models.resnet50,
    "ResNet-18, batch 16, float32": models.resnet18,
    "GPT, 4 layers of 512, 4 x 1,024 tokens, 50,257 classes, float32": partial(
        fit_dry.fit_steps.gpt2_medium, 4, 4, 512
    ),
    "Llama with LoRA, 4 layers of 512, 4 x 1,024 tokens, 32,000 classes, bfloat16": llama_lora,
}


def build(step: str, allow: Any, out: str) -> Callable[[], None]:
    """In the process that sees the card: plan a step for its lowest budget, and return what runs it. ``out``: the file
    for budget, prediction and kernels."""
    subject = fit_dry.fit_steps.on("cuda", STEPS[step])
    planned, row = fit_dry.with_plan(subject, "graph", lambda lowest, _: lowest, allow=allow, costs="roofline")
    Path(out).write_text(json.dumps(row), encoding="utf-8")
    return partial(fit_dry.run_step, planned, subject)


def cell(step: str, allow: str, card: str, environment: str) -> Row:
    """Plan and run a step on the emulated card; an error is an entry."""
    build = partial(sys.modules["kernel_floors"].build, step, allow)
    row, counters = fit_dry.run_dry(build, card, environment)
    return {"step": step, "allow": allow, "card": card} | row | fit_dry.highest(counters)


def report(rows: Sequence[Row]) -> str:
    """The table of all steps of which both cells ran, and a sentence."""
    lines = [
        "| step | exact | reserved | with kernels | reserved | smaller by | kernels |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    pairs = list[tuple[Row, Row]]()
    for step in STEPS:
        found = {row["allow"]: row for row in rows if row["step"] == step and "error" not in row}
        if found.keys() >= set(ALLOWED):
            pairs.append((found["exact"], found["reordered"]))
    for exact, kernels in pairs:
        sizes = [f"{row[name] / 2**20:,.0f}" for row in (exact, kernels) for name in ("budget", "reserved")]
        names = ", ".join(f"`{name}`" for name in kernels["kernels"])
        lines.append(f"| {exact['step']} | {' | '.join(sizes)} | {1 - share(exact, kernels):.0%} | {names} |")
    above = sum(row["reserved"] > row["budget"] for pair in pairs for row in pair)
    enough = sum(share(*pair) <= SMALLER for pair in pairs)
    said = (
        f"{2 * len(pairs)} plans ran, {above} over their budget; kernels make {enough} of {len(pairs)} lowest budgets "
        "smaller by 10 % or more"
    )
    return "\n".join([*lines, "", said, ""])


def share(exact: Row, kernels: Row) -> float:
    """The lowest budget with kernels as a share of that without: in what the plans reserve if they run."""
    return max(kernels["budget"], kernels["reserved"]) / max(exact["budget"], exact["reserved"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells and write the results; 0 if all keep their budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", required=True, metavar="ENV", help="an environment with a CUDA build of torch")
    parser.add_argument("--card", default="h100")
    parser.add_argument("--steps", default="", help="only steps with this text in their name")
    options = parser.parse_args(arguments)
    known: list[Row] = (
        json.loads(RESULTS.with_suffix(".json").read_text()) if RESULTS.with_suffix(".json").exists() else []
    )
    rows = {(row["step"], row["allow"]): row for row in known if row["card"] == options.card}
    for step in (step for step in STEPS if options.steps in step):
        for allow in ALLOWED:
            rows[step, allow] = cell(step, allow, options.card, options.torch)
            print(json.dumps(rows[step, allow]), flush=True)
            write([rows[key] for key in ((step, allow) for step in STEPS for allow in ALLOWED) if key in rows])
    print(report(list(rows.values())))
    return int(any("error" in row or row["reserved"] > row["budget"] for row in rows.values()))


def write(rows: Sequence[Row]) -> None:
    """Write both files."""
    RESULTS.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(report(rows), encoding="utf-8")


if __name__ == "__main__":
    import kernel_floors  # the other process loads it by this name

    sys.exit(kernel_floors.main())
