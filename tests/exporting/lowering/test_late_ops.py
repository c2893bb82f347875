"""Ops of the backward pass as late as they are worth."""

from __future__ import annotations

from memplan.exporting.lowering.late_ops import with_delayed_ops
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value


def value(number: int, size: int, kind: str = "result") -> Value:
    return Value(number, f"v{number}", kind, number, size, (size // 4,), (1,), "float32")  # type: ignore[arg-type]


def op(index: int, reads: tuple[int, ...], made: int) -> GraphOp:
    args = tuple(Ref(one) for one in reads)
    return GraphOp(index, f"op{made}", args, {}, "backward", (made,), False, reads, (made,))


def order(large: int, small: int) -> list[str]:
    """A gradient, a shortcut's and one by the long way, which both are made of it, and their sum."""
    sizes = {0: small, 1: large, 2: small, 3: large, 4: large}
    values = tuple(value(at, size, "tangent" if at == 0 else "result") for at, size in sizes.items())
    ops = (op(0, (0,), 1), op(1, (0,), 2), op(2, (2,), 3), op(3, (1, 3), 4))
    made = with_delayed_ops(JointGraph(values, ops, (), ()))
    assert [one.index for one in made.ops] == [0, 1, 2, 3], "numbered again"
    assert all(made.values[int(one.target[2:])].op == one.index for one in made.ops)
    return [one.target for one in made.ops]


def test_what_is_larger_than_its_operand_comes_late() -> None:
    assert order(large=400, small=40) == ["op2", "op3", "op1", "op4"]


def test_what_is_smaller_than_its_operand_comes_at_once() -> None:
    assert order(large=40, small=400) == ["op1", "op2", "op3", "op4"]
