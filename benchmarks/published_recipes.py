"""How near to published readings of training steps the recipes are: whole models that others measured on their cards.

    python benchmarks/published_recipes.py                  # writes benchmarks/results/published_recipes.json and .md
    python benchmarks/published_recipes.py --only litgpt    # renews the rows whose name has it
    python benchmarks/published_recipes.py --table          # writes the tables again, predicts nothing

`recipe` is what the words of ``--model`` and ``--recipe`` predict. Where a source ran something else than they stand
for, and says so or its code of that time does, `same` is the prediction of that: the recipe's script with the lines
replaced that `Row.changes` lists, or a step of the source's own library (``--libraries FOLDER`` where that is not
installed). Such lines were looked for where the words alone were off, and are the code of the time or a release's known
behaviour; no number is fitted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
if str(ROOT / "src") not in sys.path:  # where memplan is not installed
    sys.path.append(str(ROOT / "src"))

import memplan  # noqa: E402
from memplan.devices.context import expected_context  # noqa: E402
from memplan.devices.lookup import find  # noqa: E402
from memplan.studies.recipes.lines import Options  # noqa: E402
from memplan.studies.recipes.models import Model, find_model  # noqa: E402
from memplan.studies.recipes.recipe import recipe_of  # noqa: E402
from memplan.studies.recipes.script import script_of  # noqa: E402

LIMIT = 0.03
MIB, GIB = 2**20, 2**30
Counter = Literal["allocated", "nvidia-smi"]

_GITHUB = "https://github.com"
FMS = (
    f"{_GITHUB}/foundation-model-stack/fms-acceleration/blob/0aab2c6f64e3e19d137efe2b8f7a4c65c23a2059/"
    "scripts/benchmarks/refs/a100_80gb.csv"
)
LITGPT = f"{_GITHUB}/Lightning-AI/litgpt/blob/4839345a97a0a90bc5f2361664b04d665c9a0e89/tutorials/resource-tables.md"
BERT = (
    f"{_GITHUB}/huggingface/transformers/blob/0016acf7ef421c7fe8eff7945de52c71896c3b01/"
    "docs/source/en/perf_train_gpu_one.mdx"
)
TORCHTUNE = f"{_GITHUB}/pytorch/torchtune/blob/0031bfb080bd35ec533c412df883cf2bf7bf7fe4/README.md"
TORCHTUNE_LATER = "https://pypi.org/project/torchtune/0.6.1/"

PHI = Model(
    "phi-1.5", "PhiForCausalLM",
    {"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
     "num_attention_heads": 32, "max_position_embeddings": 2048, "partial_rotary_factor": 0.5},
)  # fmt: skip
CLASSIFIER = Model(
    "bert-large-uncased for classes", "BertForSequenceClassification", find_model("bert-large-uncased").config
)


@dataclass(frozen=True, slots=True)
class Change:
    """Other lines than the recipe's: old text -> new."""

    lines: tuple[tuple[str, str], ...]
    why: str


@dataclass(frozen=True, slots=True)
class Row:
    """One reading, and the words of the recipe that is nearest to what was run."""

    name: str
    source: str
    card: str
    published: float
    """Bytes."""
    counter: Counter
    model: str | Model
    recipe: str
    options: Mapping[str, Any]
    changes: tuple[Change, ...] = ()
    script: str = ""
    """A step of the source's library: its text, which `changes` does not touch."""
    script_why: str = ""
    context: float | None = None
    """Bytes of the CUDA context, where the source has them; else the catalogue's."""
    note: str = ""
    """Why the recipe's prediction differs, of a row that is farther than `LIMIT`."""

    @property
    def words(self) -> str:
        """The recipe as a user types it."""
        name = self.model if isinstance(self.model, str) else self.model.name
        parts = [f"{name}, {self.recipe}, batch {self.options.get('batch', 1)}, {self.options['sequence']} tokens"]
        parts += [str(self.options[key]) for key in ("dtype", "optimizer") if key in self.options]
        parts += [f"autocast {self.options['autocast']}"] if "autocast" in self.options else []
        return ", ".join(parts + ["checkpoints"] * bool(self.options.get("checkpointing")))


_QKVO = "q_proj+k_proj+v_proj+o_proj"


def _fms() -> list[Row]:
    """Mistral 7B by the Trainer of transformers 4.45, torch 2.4.1 and flash attention, 4,096 tokens: the Trainer's
    count of `torch.cuda.max_memory_allocated`, and the most of nvidia-smi."""
    rows = []
    for recipe, batch, allocated, shown in (
        (f"lora:r=16,dropout=0.1,targets={_QKVO}", 4, 25653881344, 28071),
        (f"lora:r=16,dropout=0.1,targets={_QKVO}", 8, 36643613184, 41407),
        ("full", 4, 72434853376, 76045),
        ("full", 8, 72435246592, 72725),
    ):
        options = {"batch": batch, "sequence": 4096, "checkpointing": True}
        for counter, figure in (("allocated", allocated), ("nvidia-smi", shown * MIB)):
            name = f"fms Mistral 7B {recipe.partition(':')[0]} batch {batch} {counter}"
            note = ""
            if counter == "nvidia-smi" and recipe == "full":
                note = "more than the card has, so that cached segments are given back there, which is not counted here"
            rows.append(
                Row(name, FMS, "a100-80gb", figure, counter, "mistral-7b-v0.1", recipe, options, note=note)  # pyright: ignore[reportArgumentType]
            )
    return rows


_LITGPT_STEP = """\
import torch
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from litgpt.utils import chunked_cross_entropy


def build():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    config = Config.from_name({name!r}, lora_r=8, lora_alpha=16, lora_dropout=0.05, lora_query=True, lora_value=True)
    with torch.device(device):
        model = GPT(config)
        model.max_seq_length = {tokens}
    torch.set_default_dtype(torch.float32)
    mark_only_lora_as_trainable(model)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(config.vocab_size, ({batch}, {tokens}), device=device)

    def step():
        logits = model(ids, lm_head_chunk_size=128)
        logits = [chunk.float() for chunk in logits]  # as Fabric does with results (convert_output)
        logits[-1] = logits[-1][..., :-1, :]
        chunked_cross_entropy(logits, ids[..., 1:], chunk_size=128).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
"""


def _litgpt() -> list[Row]:
    """LoRA of litgpt at rank 8 on queries and values, bf16, torch 2.1: the longest example of Alpaca comes first.
    Gigabytes of 1e9 bytes (finetune/lora.py there)."""
    rows = []
    for model, name, tokens, batch, gigabytes in (
        (PHI, "phi-1_5", 1044, 1, 4.82),
        (PHI, "phi-1_5", 1044, 2, 6.76),
        (PHI, "phi-1_5", 1044, 4, 10.68),
        ("llama-2-7b", "Llama-2-7b-hf", 1304, 1, 21.30),
        ("llama-2-7b", "Llama-2-7b-hf", 1304, 2, 29.07),
        ("llama-2-13b", "Llama-2-13b-hf", 1304, 1, 38.12),
    ):
        rows.append(
            Row(
                f"litgpt {name} lora batch {batch}", LITGPT, "a100-40gb", gigabytes * 1e9, "allocated", model,
                "lora:r=8,dropout=0.05,targets=q_proj+v_proj", {"batch": batch, "sequence": tokens},
                script=_LITGPT_STEP.format(name=name, tokens=tokens, batch=batch),
                script_why="litgpt's own model, adapters and loss in chunks of 128 tokens (0.5.13), logits in "
                "fp32 as Fabric returns them",
            )
        )  # fmt: skip
    return rows


_EAGER = Change(
    (("dtype=dtype)", 'dtype=dtype, attn_implementation="eager")'),), "attention that saves its weights (2022)"
)
_HELD = Change(
    (("        optimizer.zero_grad()", "        optimizer.zero_grad(set_to_none=False)"),),
    "gradients are set to zero, not freed (torch is not stated, and taken as 1.10)",
)
_SINGLE = Change((("AdamW(trained)", "AdamW(trained, foreach=False)"),), "an optimizer of one parameter at a time")
_SOFTMAX = Change(
    (
        (
            "def build(",
            """class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, dtype):
        x = x.to(dtype)
        out = torch._softmax(x, dim, False)
        ctx.dim = dim
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return torch._softmax_backward_data(grad, out, ctx.dim, x.dtype), None, None


def softmax(x, dim=None, dtype=None):
    half = torch.is_autocast_enabled("cuda") and x.dtype == torch.float16
    return Softmax.apply(x, dim, dtype or (torch.float32 if half else x.dtype))


torch.nn.functional.softmax = softmax


def build(""",
        ),
    ),
    "softmax keeps its input, too (before pytorch/pytorch#65242)",
)
_ADAFACTOR = Change(
    (
        ("torch.optim.Adafactor(trained)", "Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)"),
        ("from transformers import", "from transformers.optimization import Adafactor\nfrom transformers import"),
    ),
    "the Adafactor of transformers",
)


def _bert() -> list[Row]:
    """bert-large-uncased by the Trainer of January 2022 on a V100, 512 tokens: what nvidia-smi shows, of which
    1,343 MiB are its context, as the page says."""
    rows = []
    for name, megabytes, options in (
        ("batch 4", 14949, {"batch": 4}),
        ("batch 1 of 4", 8681, {"batch": 1}),
        ("batch 1 of 4, checkpoints", 6775, {"batch": 1, "checkpointing": True}),
        ("fp16, batch 4", 13939, {"batch": 4, "autocast": "fp16"}),
        ("fp16, batch 1 of 4, checkpoints", 7275, {"batch": 1, "checkpointing": True, "autocast": "fp16"}),
        ("Adafactor, batch 4", 12295, {"batch": 4, "optimizer": "adafactor"}),
        (
            "Adafactor, fp16, batch 1 of 4, checkpoints", 4847,
            {"batch": 1, "checkpointing": True, "autocast": "fp16", "optimizer": "adafactor"},
        ),
    ):  # fmt: skip
        changes = (_EAGER, _SOFTMAX, _HELD, _ADAFACTOR if "optimizer" in options else _SINGLE)
        rows.append(
            Row(
                f"bert-large {name}", BERT, "v100-16gb", megabytes * MIB, "nvidia-smi", CLASSIFIER, "full",
                {"sequence": 512, "dtype": "fp32", **options}, changes, context=1343 * MIB,
                note="what is more in fp16 is not known" * ("fp16" in name),
            )
        )  # fmt: skip
    return rows


_MLP = "q_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"


_LOSS = "compiled, with a loss in 8 chunks: in one piece it holds {} GiB of fp32 at the peak, and the rest is {} GiB"


def _torchtune() -> list[Row]:
    """torchtune, packed and compiled but where another version of its page says so; its loss is in chunks."""
    lora, packed = f"lora:r=8,targets={_MLP}", {"batch": 2, "sequence": 2048}
    full, longer = "full", {"batch": 2, "sequence": 4096}
    return [
        Row(
            "torchtune Llama 3.1 8B lora, 4090", TORCHTUNE, "rtx4090", 16.2 * GIB, "allocated", "llama-3.1-8b", lora,
            {**packed, "checkpointing": True}, note=_LOSS.format("5.9", "16.2"),
        ),
        Row(
            "torchtune Llama 3.1 8B lora, A6000", TORCHTUNE, "rtx3090", 30.3 * GIB, "allocated", "llama-3.1-8b", lora,
            packed, note="compiled, which keeps less than each op saves; whether with checkpoints is not stated: with "
            "them the recipe predicts 22.1 GiB",
        ),
        Row(
            "torchtune Llama 3.2 3B full, A100", TORCHTUNE_LATER, "a100-80gb", 60.0 * GIB, "allocated", "llama-3.2-3b",
            full, longer,
        ),
        Row(
            "torchtune Llama 3.2 3B full, checkpoints, A100", TORCHTUNE_LATER, "a100-80gb", 24.9 * GIB, "allocated",
            "llama-3.2-3b", full, {**longer, "checkpointing": True},
            note="compiled, with a loss in chunks: in one piece it holds 11.7 GiB of fp32 at the peak; in chunks the "
            "update is the peak, whose weights, gradients and state are 23.9 GiB",
        ),
    ]  # fmt: skip


def _packed() -> list[Row]:
    """Weights of four bits, as `_fms` and `_litgpt`."""
    found = []
    for batch, allocated, shown in ((4, 15323147776, 18269), (8, 26312879616, 32693)):
        options = {"batch": batch, "sequence": 4096, "checkpointing": True, "autocast": "bf16"}
        recipe = f"qlora:r=16,dropout=0.1,targets={_QKVO},prepare=false"
        for counter, figure in (("allocated", allocated), ("nvidia-smi", shown * MIB)):
            name = f"fms Mistral 7B qlora batch {batch} {counter}"
            note = "not known: allocated bytes are near, so it is what stays cached" * (counter != "allocated")
            found.append(Row(name, FMS, "a100-80gb", figure, counter, "mistral-7b-v0.1", recipe, options, note=note))  # pyright: ignore[reportArgumentType]
    for model, double, gigabytes in (
        ("llama-2-7b", "false", 14.14), ("llama-2-7b", "true", 13.84),
        ("llama-2-13b", "false", 23.14), ("llama-2-13b", "true", 22.55),
    ):  # fmt: skip
        recipe = f"qlora:r=8,dropout=0.05,targets=q_proj+v_proj,double={double},prepare=false"
        kind = "nf4-dq" if double == "true" else "nf4"
        options = {"batch": 1, "sequence": 1304}
        found.append(
            Row(
                f"litgpt {model} {kind}",
                LITGPT,
                "a100-40gb",
                gigabytes * 1e9,
                "allocated",
                model,
                recipe,
                options,
                note="of bitsandbytes 0.41: over the reading of inference a step holds 9.57 GB for Llama 2 7B, in 16 "
                "bits 7.78 GB; why is not known",
            )
        )
    return found


def rows() -> list[Row]:
    return [*_fms(), *_litgpt(), *_packed(), *_bert(), *_torchtune()]


@dataclass(slots=True)
class Prediction:
    """What memplan predicts of a step, in bytes."""

    allocated: int
    reserved: int
    seconds: float

    def figure(self, row: Row) -> float:
        """The bytes that a row's reading counts."""
        if row.counter == "allocated":
            return self.allocated
        context = expected_context(find(row.card).context[0], convolutions=False, products=True)
        return self.reserved + (context if row.context is None else row.context)


_done: dict[tuple[str, str], Prediction] = {}


def predict(script: str, card: str) -> Prediction:
    """Record a script's step for a card; with workspaces at their most, as the reports count them."""
    key = (script, card)
    if key not in _done:
        names: dict[str, Any] = {"__name__": "recipe"}
        exec(compile(script, "train.py", "exec"), names)
        start = time.perf_counter()
        timeline = memplan.simulate(memplan.record(names["build"], device=card, steps=2), workspace="high")
        seconds = time.perf_counter() - start
        _done[key] = Prediction(timeline.peak_allocated, timeline.peak_reserved, seconds)
        gc.collect()
    return _done[key]


def scripts(row: Row) -> dict[str, str]:
    """The recipe's script and, where the source ran something else, that."""
    model = find_model(row.model) if isinstance(row.model, str) else row.model
    found = {"recipe": script_of(model, recipe_of(row.recipe), Options(**row.options))}
    if row.script:
        found["same"] = row.script
    elif row.changes:
        text = found["recipe"]
        for change in row.changes:
            for old, new in change.lines:
                assert old in text, f"{row.name}: no {old!r} in the script"
                text = text.replace(old, new)
        found["same"] = text
    return found


def result_of(row: Row) -> dict[str, Any]:
    """Predict a row."""
    out: dict[str, Any] = {
        "name": row.name, "source": row.source, "card": row.card, "counter": row.counter, "words": row.words,
        "published": row.published,
    }  # fmt: skip
    for kind, text in scripts(row).items():
        if "from litgpt." in text and find_spec("litgpt") is None:
            continue
        prediction = predict(text, row.card)
        out[kind] = prediction.figure(row)
        out[f"{kind}_error"] = out[kind] / row.published - 1
        if kind == "same":
            out["same_is"] = row.script_why or "; ".join(change.why for change in row.changes)
    return out


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of rows within the limit."""
    errors = [abs(result["recipe_error"]) for result in results]
    best = [abs(result.get("same_error", result["recipe_error"])) for result in results]
    return {
        "rows": len(results),
        "sources": len({result["source"] for result in results}),
        "within_by_words": sum(error <= LIMIT for error in errors),
        "within": sum(error <= LIMIT for error in best),
        "median_error_by_words": statistics.median(errors) if errors else None,
    }


def markdown(results: Sequence[Mapping[str, Any]], versions: str) -> str:
    """The table, and what the source ran that the recipe's words do not stand for."""
    total = summary(results)
    lines = [
        f"**{total['rows']} readings of {total['sources']} sources: {total['within_by_words']} within {LIMIT:.0%} by "
        f"the recipe's words, {total['within']} where the step is what the source ran** ({versions}).",
        "", "| reading | counts | published | recipe | | as the source ran it | |", "|---|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    notes: dict[str, int] = {}
    for result in results:
        marks = [notes.setdefault(text, len(notes) + 1) for key in ("same_is", "note") if (text := result.get(key))]
        same = f"{result['same'] / GIB:.2f} | {result['same_error']:+.1%}" if "same" in result else " | "
        name = result["name"] + "".join(f" [{mark}]" for mark in marks)
        lines.append(
            f"| {name} | {result['counter']} | {result['published'] / GIB:.2f} | {result['recipe'] / GIB:.2f} | "
            f"{result['recipe_error']:+.1%} | {same} |"
        )
    lines += ["", "In GiB.", "", *(f"{number}. {text}." for text, number in notes.items())]
    addresses = dict.fromkeys(result["source"] for result in results)
    return "\n".join([*lines, "", "Published at:", "", *(f"- <{address}>" for address in addresses), ""])


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name contains this")
    parser.add_argument("--table", action="store_true", help="write the tables from the results, predict nothing")
    parser.add_argument(
        "--libraries", metavar="FOLDER", action="append", default=[], help="where litgpt or torchtune is"
    )
    options = parser.parse_args()
    sys.path += options.libraries
    warnings.simplefilter("ignore")
    path = RESULTS / "published_recipes.json"
    saved = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    known = {result["name"]: result for result in saved}
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    for row in rows():
        if options.table or (options.only or "") not in row.name:
            continue
        known[row.name] = {
            **{k: v for k, v in known.get(row.name, {}).items() if k.startswith("same")},
            **result_of(row),
        }
        result = known[row.name]
        print(f"{row.name:60} {result['recipe_error']:+.2%} {result.get('same_error', float('nan')):+.2%}", flush=True)
        _write(known, versions)
    _write(known, versions)
    return 0


def _write(known: Mapping[str, dict[str, Any]], versions: str) -> None:
    """Write the results and the table of the rows that have been predicted, with the notes of those that are off."""
    ordered = []
    for row in rows():
        if row.name not in known:
            continue
        result: dict[str, Any] = {key: value for key, value in known[row.name].items() if key != "note"}
        result["source"] = row.source
        if "same" in result:
            result["same_is"] = row.script_why or "; ".join(change.why for change in row.changes)
        off = abs(result.get("same_error", result["recipe_error"])) > LIMIT
        ordered.append({**result, "note": row.note} if off and row.note else result)
    content = {"versions": versions, "summary": summary(ordered), "rows": ordered}
    text = json.dumps(content, indent=1)
    (RESULTS / "published_recipes.json").write_text(text + "\n", encoding="utf-8")
    (RESULTS / "published_recipes.md").write_text(markdown(ordered, versions), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
