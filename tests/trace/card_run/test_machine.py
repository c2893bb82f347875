"""What a machine is: what its card and libraries say, and the variables that count."""

from __future__ import annotations

import platform

import pytest
import torch

from memplan.trace.card_run import machine


def test_versions_are_those_of_what_is_imported() -> None:
    found = machine.versions(["numpy", "no_such_library"])
    assert (found["torch"], found["python"]) == (torch.__version__, platform.python_version())
    assert "no_such_library" not in found


def test_only_variables_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("MY_PASSWORD", "x")
    assert machine.environment() == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_switches_are_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert machine.flags()["cudnn_benchmark"] is True


def test_what_has_no_answer_is_none() -> None:
    assert machine.or_none(lambda: 1 // 0) is None
