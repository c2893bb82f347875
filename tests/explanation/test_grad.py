"""Inference beside training: each against its own recording."""

from __future__ import annotations

from models.networks import SmallResNet
from torch import nn

import memplan
from memplan._bytes import format_bytes


def note_of(explanation: memplan.Explanation) -> str:
    return next((note for note in explanation.notes if note.startswith("without grad")), "")


def test_it_says_what_training_keeps() -> None:
    found = memplan.explain(SmallResNet, "4x3x16x16", train=False, device="cpu")
    trained = memplan.explain(SmallResNet, "4x3x16x16", device="cpu")
    assert note_of(found) == (
        f"without grad {format_bytes(found.by_cause_most['activation'])} of activations live at once; "
        f"a training step keeps {format_bytes(trained.saved_bytes)} of them for its backward pass"
    )
    assert note_of(trained) == ""


def test_what_cannot_train_has_no_such_line() -> None:
    assert note_of(memplan.explain(nn.Linear(3, 4).requires_grad_(False), "2x3", train=False, device="cpu")) == ""
