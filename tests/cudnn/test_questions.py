"""Questions to cuDNN, and its plans, as values."""

from __future__ import annotations

from dataclasses import replace

from cudnn.scripted_worker import FORWARD
from hypothesis import given
from hypothesis import strategies as st

from memplan.cudnn.questions import ExecutionPlan, stairs


def test_equal_questions_have_equal_keys_and_others_have_others() -> None:
    others = [
        replace(FORWARD, **change)
        for change in (
            {"kind": "input gradient"}, {"x": (16, 64, 56, 57)}, {"channels_last": True}, {"dtype": "float16"},
            {"padding": (1, 0)}, {"stride": (2, 1)}, {"dilation": (2, 1)}, {"alignments": (32, 32, 16)},
            {"tf32": False}, {"deterministic": True}, {"w": (128, 32, 3, 3)}, {"y": (16, 128, 28, 28)},
        )
    ]  # fmt: skip
    assert replace(FORWARD).key == FORWARD.key
    assert len({FORWARD.key, *(other.key for other in others)}) == 1 + len(others)


@given(st.lists(st.integers(0, 6), min_size=1), st.integers(0, 6))
def test_stairs_keep_what_runs_in_any_room(sizes: list[int], room: int) -> None:
    plans = tuple(ExecutionPlan(f"eng{number}", size) for number, size in enumerate(sizes))
    first = next((plan for plan in plans if plan.workspace <= room), None)
    assert next((plan for plan in stairs(plans) if plan.workspace <= room), None) == first
    assert stairs(plans)[0] == plans[0]
