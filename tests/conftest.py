"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest

# A worker holds millions of objects that thousands of tests imported: searched at Python's own thresholds, they take a
# tenth of the suite's processor time. The recorder runs the collector where cycles matter.
gc.set_threshold(100_000, 50, 100)


hypothesis.settings.register_profile("push", max_examples=20)


def pytest_configure(config: pytest.Config) -> None:
    """Without slow tests, draw a fifth of the examples of each property: Hypothesis' own number is 100."""
    if config.option.markexpr == "not slow":
        hypothesis.settings.load_profile("push")


@pytest.fixture(scope="module")
def older_objects_frozen() -> Iterator[None]:
    """Exclude what was there before a file's tests from Python's collections.

    A search of all takes a second, and line profiles, watches and Inductor's code run one each. Each recording asks
    whether something is frozen, and Python answers by counting millions of objects: here the answer is known.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield
    gc.unfreeze()


@pytest.fixture
def no_cudnn_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the cuDNN that a CUDA build of torch brings: workspaces are expected, with a band, not its own answers."""
    monkeypatch.setattr("memplan.cudnn.cudnn_library._installed", lambda: None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget what importing MONAI sets: it would size cuBLAS's workspaces in all later tests of the worker."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
