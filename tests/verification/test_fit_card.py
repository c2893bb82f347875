"""`memplan.fit` of modules on a CUDA card: on an emulated one, whose kernels are the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.emulated_card import HERE, needs_emulation, run


@needs_emulation
def test_steps_on_a_card(tmp_path_factory: pytest.TempPathFactory) -> None:
    run(HERE / "fit_cases.py", Path(tmp_path_factory.mktemp("card")))
