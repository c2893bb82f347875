"""Expected workspaces: formulas by hand, probabilities, and how often they are what cuDNN answered."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest

from memplan.cudnn.described_card import properties
from memplan.cudnn.expected_workspace import (
    expected_workspaces,
    family_of,
    features,
    is_unlearned,
    network_for,
    with_cublas,
    workspace_of,
)
from memplan.cudnn.questions import Question
from memplan.cudnn.stored_answers import measured, shipped
from memplan.devices import find

CARD = find("a100-80gb")
IMAGE = Question(  # 3 channels to 20, half the size
    "forward", (2, 3, 10, 12), (20, 3, 3, 3), (2, 20, 5, 6), False, "float16", (1, 1), (2, 2), (1, 1), (32, 32, 32),
    True, False,
)  # fmt: skip
X, W, Y = 2 * 3 * 10 * 12, 20 * 3 * 9, 2 * 20 * 5 * 6
"""Elements of the three tensors, two bytes each."""


@pytest.mark.parametrize(
    ("formula", "size"),
    [
        ("0", 0),
        ("X", 2 * X),
        ("Y", 2 * Y),
        ("W", 2 * W),
        ("X8", 2 * (2 * 8 * 10 * 12)),
        ("Y8", 2 * (2 * 24 * 5 * 6)),
        ("W8,4", 2 * (24 * 4 * 9)),
        ("W8", 2 * (24 * 8 * 9)),
        ("2P", 2 * 4 * W),
        ("X8+Y+W8,4", 2 * (2 * 8 * 10 * 12) + 2 * Y + 2 * (24 * 4 * 9)),
        ("X+3P", 2 * X + 3 * 4 * W),
        ("r0.5", X + W + Y),
    ],
)
def test_a_formula_by_hand(formula: str, size: int) -> None:
    assert workspace_of(IMAGE, formula) == size


def questions(card: str, version: int) -> dict[Question, int]:
    """Return the convolutions of the examples and the zoo, with the bytes that cuDNN answered for a card."""
    answers = shipped(card, version, properties(find(card)))
    return {read(key): plans[0].workspace for key, plans in answers.items()}


def read(key: str) -> Question:
    """Return the convolution with this key."""
    kind, x, w, y, last, dtype, padding, stride, dilation, alignments, *flags = json.loads(key)
    sizes = (tuple(part) for part in (padding, stride, dilation, alignments))
    question = Question(kind, tuple(x), tuple(w), tuple(y), last, dtype, *sizes, *flags)  # pyright: ignore[reportArgumentType]
    assert question.key == key
    return question


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_engines_with_cublas_take_what_real_cards_took(card: str) -> None:
    """By formula for a kernel of 1 and Winograd's weight gradients; the expected workspaces follow it."""
    took = {read(key): size for key, size in measured(card, 91900).items() if not key.startswith(('["lstm', '["gru'))}
    applies = {question: size for question in took if (size := with_cublas(question)) is not None}
    assert len(applies) == 248
    assert sum(_near(question, size, took[question]) for question, size in applies.items()) == 226
    input_gradients = {q: size for q, size in applies.items() if q.kind == "input gradient"}
    winograd = {q: size for q, size in applies.items() if q.w[2:] == (3, 3)}
    assert (len(input_gradients), len(winograd)) == (83, 9)
    assert all(_near(question, size, took[question]) for question, size in input_gradients.items())
    assert all(-(-size // 512) == -(-took[question] // 512) for question, size in winograd.items())
    expected = expected_workspaces(find(card), 91900, list(took))
    assert all(expected[question].bytes == size for question, size in applies.items())
    others = expected_workspaces(find("a100-80gb"), 91900, list(applies))
    right = sum(_near(question, others[question].bytes, took[question]) for question in applies)
    assert right < 80  # what cuDNN names for described cards


def _near(question: Question, size: int, took: int) -> bool:
    return abs(size - took) <= 0.01 * tensor_bytes(question)


def tensor_bytes(question: Question) -> int:
    itemsize = 4 if question.dtype == "float32" else 2
    return (prod(question.x) + prod(question.w) + prod(question.y)) * itemsize


@pytest.mark.parametrize("version", [91900, 92600])
def test_most_are_what_cudnn_answered(version: int) -> None:
    """For the convolutions of the examples and the zoo, of which the networks have not seen any."""
    answered = questions(CARD.name, version)
    expected = expected_workspaces(CARD, version, list(answered))
    assert len(expected) == len(answered) > 700
    near = sum(abs(expected[q].bytes - size) <= 0.02 * tensor_bytes(q) for q, size in answered.items())
    assert near / len(answered) > 0.6
    within = sum(expected[q].sizes[0] <= size <= expected[q].sizes[-1] for q, size in answered.items())
    assert within / len(answered) > 0.98


def test_probabilities_are_of_all_sizes_and_add_up() -> None:
    network = network_for(CARD.architecture, 91900)
    assert network is not None
    rows = [features(question) for question in questions(CARD.name, 91900)]
    probabilities = network.probabilities(rows)
    assert probabilities.shape == (len(rows), len(network.formulas))
    assert (probabilities >= 0).all()
    assert probabilities.sum(axis=1) == pytest.approx(1)
    expected = expected_workspaces(CARD, 91900, [IMAGE])[IMAGE]
    assert sum(expected.probabilities) == pytest.approx(1)
    assert list(expected.sizes) == sorted({workspace_of(IMAGE, formula) for formula in network.formulas})
    assert expected.bytes in expected.sizes


def test_what_was_asked_beside_it_changes_nothing() -> None:
    other = replace(IMAGE, x=(4, 3, 10, 12), y=(4, 20, 5, 6))
    alone, together = (expected_workspaces(CARD, 91900, asked)[IMAGE] for asked in ([IMAGE], [other, IMAGE]))
    assert (alone.bytes, alone.sizes) == (together.bytes, together.sizes)
    assert alone.probabilities == pytest.approx(together.probabilities, abs=1e-12)


def test_beyond_what_was_learned_the_probabilities_are_spread() -> None:
    """By hand: at most half of the network's own for the most probable formula, and half spread over all."""
    large = replace(IMAGE, x=(1, 64, 1 << 13, 1 << 13), w=(64, 64, 3, 3), y=(1, 64, 1 << 13, 1 << 13), padding=(1, 1))
    network = network_for(CARD.architecture, 91900)
    assert network is not None
    (own,) = network.probabilities([features(large)])
    expected = expected_workspaces(CARD, 91900, [large])[large]
    assert is_unlearned(large)
    assert not is_unlearned(IMAGE)
    assert expected.bytes == workspace_of(large, network.formulas[int(own.argmax())])
    share = dict(zip(expected.sizes, expected.probabilities, strict=True))
    assert min(share.values()) >= 0.5 / len(network.formulas)
    assert sum(expected.probabilities) == pytest.approx(1)


def test_a_capability_without_a_network_has_none() -> None:
    assert network_for((6, 1), 91900) is None
    assert expected_workspaces(replace(CARD, architecture=(6, 1)), 91900, [IMAGE]) == {}
    assert expected_workspaces(CARD, 91900, []) == {}


def test_volta_has_a_network_for_the_last_version_with_its_kernels() -> None:
    assert network_for((7, 0), 91002) is not None
    assert network_for((7, 0), 91900) is None
    assert network_for((7, 5), 91002) is not None


def test_versions_that_choose_alike_have_one_family() -> None:
    versions = (90800, 91002, 91900, 92000, 92400, 92600, 93000)
    assert [family_of(version) for version in versions] == ["", "9.10", "9.19", "9.19", "9.24", "9.24", "9.24"]
    assert network_for((9, 0), 90800) is None
