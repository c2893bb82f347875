"""What is patched, as torch's own code compiles it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import memplan
from memplan._patched import original_of, patched


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, torch.tensor([[2.0, 0.0], [0.0, 3.0]]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_torch_scripts_functions_that_call_what_a_recording_patches() -> None:
    """As the import of torch.distributed.optim does."""
    namespace: dict[str, Any] = {"__name__": "torch.some_module", "torch": torch}
    exec("def compiled(function): return torch.jit.script(function)", namespace)
    scripted = list[Any]()

    def build() -> Any:
        scripted.append(namespace["compiled"](_scaled))
        return lambda: None

    memplan.record(build, device="cpu")
    assert isinstance(scripted[0], torch.jit.ScriptFunction)
    assert torch.equal(scripted[0](torch.ones(1, 2)), _scaled(torch.ones(1, 2)))


def test_the_original_of_several_replacements() -> None:
    class Owner:
        @staticmethod
        def value() -> int:
            return 1

    def first() -> int:
        return 2

    def second() -> int:
        return 3

    original = Owner.__dict__["value"]
    with patched(Owner, value=first), patched(Owner, value=second):
        assert original_of(second) is original_of(first) is original
    assert original_of(original) is original
    assert original_of(3) == 3
