"""DeepSpeed is refused by name where a step starts it, and left as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from integrations.scripts.script_runs import run_here

import memplan
from memplan.cli import main
from memplan.errors import StepError
from memplan.integrations.scripts import process

STARTED = "raise AssertionError('DeepSpeed was started')"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of DeepSpeed's names: the real one compiles kernels for a minute, then waits for ranks."""
    (tmp_path / "deepspeed" / "comm").mkdir(parents=True)
    (tmp_path / "deepspeed" / "comm" / "__init__.py").write_text(f"def init_distributed(**_): {STARTED}")
    (tmp_path / "deepspeed" / "__init__.py").write_text(
        "from deepspeed import comm\n"
        "def initialize(**_):\n"
        "    comm.init_distributed()\n"
    )  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("deepspeed", "deepspeed.comm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("deepspeed", "deepspeed.comm"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.usefixtures("package")
def test_a_step_that_starts_it_is_refused(early: bool) -> None:
    initialize: Any = None
    if early:
        from deepspeed import initialize  # pyright: ignore[reportMissingImports]

    def build() -> object:
        if early:
            return initialize()
        import deepspeed  # pyright: ignore[reportMissingImports]

        return deepspeed.initialize()

    with pytest.raises(
        StepError, match=r"DeepSpeed is not recorded.*ZeRO-3 as its rows FSDP2.*ZeroRedundancyOptimizer"
    ):
        memplan.record(build, world=4)  # pyright: ignore[reportArgumentType]
    import deepspeed  # pyright: ignore[reportMissingImports]

    with pytest.raises(AssertionError, match="was started"):
        deepspeed.initialize()


def test_a_script_that_starts_it_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "run_script", run_here)  # another process takes four seconds to import torch
    script = package / "train.py"
    script.write_text("import deepspeed\ndeepspeed.initialize(model=None)\n")
    done = CliRunner().invoke(main, ["run", "--world", "8", "--device", "h100", str(script)])
    assert done.exit_code == 2
    assert "DeepSpeed is not recorded" in done.stderr
    assert "ZeRO-2 as FSDP2, kept" in done.stderr
