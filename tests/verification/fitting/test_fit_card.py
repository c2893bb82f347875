"""`memplan.fit` of modules on a CUDA card: on an emulated one, whose kernels are the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import slow
from tests.emulated_card import HERE, needs_emulation, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("card"))


@needs_emulation
@pytest.mark.parametrize("which", ["not slow", *slow("slow")])
@pytest.mark.parametrize("cases", ["fit_cases.py", *slow("fused_cases.py")])
def test_steps_on_a_card(cases: str, which: str, folder: Path) -> None:
    run(HERE / cases, which, folder)
