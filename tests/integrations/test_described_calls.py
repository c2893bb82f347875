"""Arguments as descriptions, and an optimizer like the user's."""

from __future__ import annotations

import pytest
import torch

from memplan import spec
from memplan.integrations.described_calls import (
    Unknown,
    copy_without_hooks,
    optimizer_factory,
    options_of,
    specs_of,
    text_of,
)


@pytest.mark.parametrize("text", ["4x8", "4x8:int64", "scalar", "scalar:bool", "2:bfloat16"])
def test_a_description_is_what_spec_reads(text: str) -> None:
    assert text_of(specs_of(spec(text).make())) == text


def test_containers_keep_their_form_and_plain_values() -> None:
    value = {"a": [torch.zeros(2), None], "b": (1, True)}
    assert specs_of(value) == {"a": [spec("2"), None], "b": (1, True)}
    with pytest.raises(Unknown, match="a object"):
        specs_of({"a": object()})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_another_optimizer_with_the_same_options(kind: type[torch.optim.Optimizer]) -> None:
    weight = [torch.nn.Parameter(torch.zeros(3))]
    first = kind(weight, lr=0.25, weight_decay=0.5)  # pyright: ignore[reportCallIssue]  # all of these take them
    second = optimizer_factory(kind, options_of(first))(weight)
    assert type(second) is kind
    assert second.defaults == first.defaults


def test_a_copy_has_no_hooks_and_its_own_parameters() -> None:
    layer = torch.nn.Linear(2, 2)
    seen: list[object] = []
    layer.register_forward_hook(lambda *given: seen.append(given))
    other = copy_without_hooks(layer)
    other(torch.zeros(1, 2))
    assert not seen
    assert other.weight is not layer.weight
