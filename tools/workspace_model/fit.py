"""Fit the networks of `memplan.cudnn.expected_workspace` to cuDNN's answers, and write them and their accuracy.

    python tools/workspace_model/fit.py ARCHITECTURE/FAMILY=FILE... --out expected.npz [--report accuracy.json]
        [--same 8.0/9.19=8.0/9.24 7.5/9.10=7.5/9.19]

A file holds the lines that `gather.py` wrote: for ``expected.npz``, answers to 40,000 or 45,000 questions of seed 1.
Networks of the existing ``--out`` that are not named stay as they are, and so do their rows in ``--report``. ``--same``
names what has the network of another, as cuDNN chooses alike for it. A tenth of the convolutions, with all three kinds
of a layer together, is held out: the reported accuracy is that of the tenth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memplan.cudnn import expected_workspace as model
from memplan.cudnn.questions import Question

WIDTH = 160
EPOCHS = 40
PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
"""Numbers of partial sums of a split product among the formulas."""
FORMULAS, SHARES = 96, 24
"""Most formulas of operands, and number of classes by the share of the operands, for workspaces without a formula."""
TOLERANCE, SLACK = 0.008, 16384
"""A formula explains a workspace if it is off by at most this share or these bytes."""
NOTHING = 65536
"""Workspaces up to this count as 0."""


@dataclass(frozen=True)
class Answered:
    """Convolutions with the workspace of cuDNN's first plan in bytes."""

    questions: list[Question]
    workspaces: Any
    held_out: Any


def read(file: Path) -> Answered:
    """Return the answers of a file; which of them are held out depends on the layer alone."""
    questions, workspaces, held_out = list[Question](), list[int](), list[bool]()
    for line in file.read_text().splitlines():
        fields, plans = json.loads(line)
        if not plans:
            continue
        question = Question(*(tuple(value) if isinstance(value, list) else value for value in fields))
        questions.append(question)
        workspaces.append(plans[0][1])
        held_out.append(zlib.crc32(json.dumps(fields[1:9]).encode()) % 10 == 0)
    return Answered(questions, np.array(workspaces, dtype=np.float64), np.array(held_out))


def candidates() -> list[str]:
    """Return the formulas to choose from."""
    layouts = ("", "W", "W1,4", "W1,8", "W4,4", "W8,8", "W4,1", "W8,1", "W32,8", "W32,32")
    images = list(itertools.product(("", "X", "X4", "X8", "X16"), ("", "Y", "Y4", "Y8", "Y16")))
    plain = [(x, y, w) for x, y in images for w in layouts]
    summed = [
        (x, y, w, f"{count}P")
        for x, y in (("", ""), ("X", "Y"), ("X", ""), ("", "Y"), ("X4", "Y4"), ("X8", "Y8"), ("X8", "Y"), ("X", "Y8"))
        for w in ("", "W", "W8,8")
        for count in PARTS
    ]
    return ["0", *("+".join(filter(None, terms)) for terms in (*plain, *summed) if any(terms))]


def values(questions: Iterable[Question], formulas: list[str]) -> Any:
    """Return the bytes by each formula: (convolutions, formulas)."""
    terms = sorted({term for formula in formulas for term in formula.split("+") if term != "0"})
    table = [[model.term_bytes(question, term) for term in terms] for question in questions]
    by_term = dict(zip(terms, np.array(table, dtype=np.float64).T, strict=True))
    nothing = np.zeros(len(table))
    return np.stack([sum((by_term[t] for t in f.split("+") if t != "0"), nothing) for f in formulas], axis=1)


def explains(sizes: Any, workspaces: Any) -> Any:
    """Whether each formula explains each workspace."""
    near = np.abs(sizes - workspaces[:, None]) <= np.maximum(TOLERANCE * workspaces, SLACK)[:, None]
    small = workspaces <= NOTHING
    near[small] = sizes[small] == 0
    return near


def covering(near: Any, limit: int) -> list[int]:
    """Return the formulas that explain most, greedily, until one explains fewer than 0.05 % more."""
    left, chosen = near.copy(), list[int]()
    while len(chosen) < limit:
        counts = left.sum(0)
        best = int(counts.argmax())
        if counts[best] < 0.0005 * len(near):
            break
        chosen.append(best)
        left[left[:, best]] = False
    return chosen


def fit(answered: Answered, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a network, and its accuracy on what is held out."""
    torch.manual_seed(seed)
    formulas = candidates()
    sizes = values(answered.questions, formulas)
    near = explains(sizes, answered.workspaces)
    chosen = covering(near[~answered.held_out], FORMULAS)
    tensors = np.array([model.tensor_bytes(question) for question in answered.questions])
    share = np.maximum(answered.workspaces, NOTHING) / tensors
    rest = ~near[:, chosen].any(1)
    edges = np.quantile(share[rest & ~answered.held_out], np.linspace(0, 1, SHARES + 1))
    which = np.clip(np.searchsorted(edges, share, side="right") - 1, 0, SHARES - 1)
    groups = (share[rest & (which == number)] for number in range(SHARES))
    medians = [float(np.median(group)) for group in groups if len(group)]
    by_share = rest[:, None] & (which[:, None] == np.arange(len(medians)))
    targets = np.concatenate([near[:, chosen], by_share], axis=1)
    names = [*(formulas[number] for number in chosen), *(f"r{median:.5g}" for median in medians)]

    rows = np.array([model.features(question) for question in answered.questions])
    train, validate = ~answered.held_out, answered.held_out
    mean, scale = rows[train].mean(0), rows[train].std(0) + 1e-6
    inputs = torch.tensor(np.clip((rows - mean) / scale, -5, 5), dtype=torch.float32)
    wanted = torch.tensor(targets)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise((rows.shape[1], WIDTH, WIDTH, len(names)))]
    drop = torch.nn.Dropout(0.1)
    network = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), drop, layers[2])
    indices = torch.tensor(np.flatnonzero(train))
    steps = EPOCHS * len(indices) // 512
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=2e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(steps):
        batch = indices[torch.randint(len(indices), (512,))]
        scores = network(inputs[batch]).log_softmax(1)
        loss = -scores.masked_fill(~wanted[batch], -torch.inf).logsumexp(1).clamp(min=-20).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()
    with torch.no_grad():
        temperature = calibrated(network(inputs[validate]), wanted[validate])
        layers[2].weight /= temperature
        layers[2].bias /= temperature
    arrays: dict[str, Any] = {"mean": mean.astype(np.float32), "scale": scale.astype(np.float32)}
    for number, layer in enumerate(layers):
        arrays[f"weights{number}"] = layer.weight.detach().numpy().T.astype(np.float16)
        arrays[f"biases{number}"] = layer.bias.detach().numpy().astype(np.float16)
    arrays["formulas"] = np.array(" ".join(names))
    return arrays, accuracy(arrays, answered)


def calibrated(scores: Any, wanted: Any) -> float:
    """Return the temperature with which held-out probabilities are nearest to the frequencies."""

    def loss(temperature: float) -> float:
        logs = (scores / temperature).log_softmax(1).masked_fill(~wanted, -torch.inf).logsumexp(1)
        return float(-logs.clamp(min=-30).mean())

    return min(np.linspace(0.7, 3.0, 47), key=loss)


def network_of(arrays: dict[str, Any]) -> model.Network:
    """Return the network as the package reads it."""
    wide = {name: value.astype(np.float64) for name, value in arrays.items() if name != "formulas"}
    layers = tuple((wide[f"weights{number}"], wide[f"biases{number}"]) for number in range(3))
    return model.Network(wide["mean"], wide["scale"], layers, tuple(str(arrays["formulas"].item()).split()))


def accuracy(arrays: dict[str, Any], answered: Answered) -> dict[str, Any]:
    """Return shares of the held-out convolutions: right to 1 %, within 1 and 5 % with the tensors, inside the band."""
    network = network_of(arrays)
    numbers = np.flatnonzero(answered.held_out)
    questions = [answered.questions[number] for number in numbers]
    rows = network.probabilities(np.array([model.features(question) for question in questions]))
    right, with_tensors, inside, widths = list[bool](), list[float](), list[bool](), list[float]()
    for question, row, took in zip(questions, rows, answered.workspaces[numbers], strict=True):
        expected = model._expected(question, network.formulas, row, None)
        tensors = sum(prod(sizes) for sizes in (question.x, question.w, question.y)) * (
            {"float32": 4, "float64": 8}.get(question.dtype, 2)
        )
        right.append(abs(expected.bytes - took) <= max(0.01 * took, NOTHING))
        with_tensors.append(abs(expected.bytes - took) / (tensors + took))
        low, high = quantiles(expected)
        slack = max(0.01 * took, NOTHING)
        inside.append(low - slack <= took <= high + slack)
        widths.append((tensors + high) / (tensors + low))
    kinds = np.array([f"{question.kind}, {question.dtype}" for question in questions])
    off = np.array(with_tensors)
    return {
        "convolutions": len(answered.questions), "held out": len(numbers), "right to 1 %": float(np.mean(right)),
        "with tensors, 1 %": float((off <= 0.01).mean()), "with tensors, 5 %": float((off <= 0.05).mean()),
        "inside the band": float(np.mean(inside)), "median width": float(np.median(widths)),
        "by kind": {
            str(kind): [
                int((kinds == kind).sum()), float(np.array(right)[kinds == kind].mean()),
                float((off[kinds == kind] <= 0.05).mean()),
            ]
            for kind in np.unique(kinds)
        },
    }  # fmt: skip


def quantiles(expected: model.ExpectedWorkspace, share: float = 0.95) -> tuple[int, int]:
    """Return the sizes between which the workspace lies with this probability."""
    sums = np.cumsum(expected.probabilities)
    tail = (1 - share) / 2
    low, high = np.searchsorted(sums, [tail, 1 - tail - 1e-9])
    return expected.sizes[low], expected.sizes[min(high, len(expected.sizes) - 1)]


def main() -> None:
    """Read the command line, and fit a network for each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", nargs="+", help="such as 9.0/9.24=h100.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--same", nargs="*", default=[], help="such as 8.0/9.19=8.0/9.24")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arrays, report = dict[str, Any](), dict[str, Any]()
    if options.out.exists():
        with np.load(options.out, allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in kept.files if name != "same"}
    if options.report and options.report.exists():
        report = json.loads(options.report.read_text())
    for entry in options.answers:
        name, _, file = entry.partition("=")
        arrays = {part: value for part, value in arrays.items() if not part.startswith(f"{name}/")}
        network, report[name] = fit(read(Path(file)))
        arrays |= {f"{name}/{part}": value for part, value in network.items()}
        print(name, json.dumps(report[name]), flush=True)
    np.savez_compressed(options.out, **arrays, same=np.array(" ".join(options.same)))
    if options.report:
        options.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
