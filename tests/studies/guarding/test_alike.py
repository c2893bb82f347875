from __future__ import annotations

import pytest

from memplan.studies.guarding.alike import name_of, pattern


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        (["head"], "head"),
        (["blocks.3.attn"], "blocks.3.attn"),
        ([f"blocks.{at}.attn" for at in range(3, 12)], "attn of blocks 3 to 11"),
        (["h.9.mlp.0", "h.10.mlp.0"], "mlp.0 of h 9 to 10"),
        (["h.7", "h.0", "h.1", "h.3"], "h 0 to 1, 3 and 7"),
        (["0.attn", "2.attn"], "attn of layers 0 and 2"),
        (["0.1", "1.1"], "(layers 0 to 1).1"),
    ],
)
def test_layers_of_one_pattern_have_one_name(layers: list[str], name: str) -> None:
    assert len({pattern(layer) for layer in layers}) == 1
    assert name_of(layers) == name


@pytest.mark.parametrize(
    ("one", "other"), [("h.0.attn", "h.0.mlp"), ("h.0.mlp.0", "h.0.mlp.2"), ("layer1.0", "layer2.0")]
)
def test_others_have_another_pattern(one: str, other: str) -> None:
    assert pattern(one) != pattern(other)


def test_digits_that_are_no_number_are_a_name() -> None:
    assert pattern("a." + "9" * 5000) == "a." + "9" * 5000
    assert pattern("a.²") == "a.²"
