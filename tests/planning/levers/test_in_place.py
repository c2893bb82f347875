"""Every entry of the table of in-place forms against the op itself: bits, layout and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from truth.cpu_allocator import allocations, peak_of

from memplan import _torch
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, Ref, Value
from memplan.planning.levers import in_place

TABLE = sorted(in_place.ELEMENTWISE | set(in_place.READ_BEFORE_WRITTEN))
LARGE = (3, 12_001)  # more than one thread takes at once, and no multiple of a vector
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, 3e38)
SCALARS = {
    "threshold": 0.0,
    "p": 0.1,
    "min": -0.5,
    "max": 0.7,
    "min_val": -0.5,
    "max_val": 0.7,
    "dim": -1,
    "diagonal": 0,
}
LOGICAL = ("bitwise", "logical")


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, layout: str = "contiguous") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    if made.numel() >= 64:
        flat = made.view(-1)
        for at, value in enumerate(SPECIAL):
            flat[(at * 7 + seed * 3) % flat.numel() :: 61] = value
    made = (
        made > 0.5
        if dtype == torch.bool
        else made.nan_to_num(1).clamp(-99, 99).to(dtype)
        if not dtype.is_floating_point
        else made.to(dtype)
    )
    if layout == "channels_last":
        return made.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return made.transpose(0, 1).contiguous().transpose(0, 1)
    return made


def arguments(name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> dict[str, Any]:
    """Arguments for an op, by its schema."""
    given: dict[str, Any] = {}
    for seed, argument in enumerate(_torch.arguments(op_schema.overload(f"aten.{name}"))):
        kind, key = str(argument.type), argument.name
        if "Tensor" in kind:
            given[key] = tensor(shape, torch.bool if key in ("mask", "condition") else dtype, seed, layout)
        elif key in SCALARS:
            given[key] = SCALARS[key]
        elif key == "reduction":
            given[key] = 0
        elif key == "input_dtype":
            given[key] = dtype
        elif key == "rounding_mode":
            given[key] = "floor"
        elif argument.has_default_value():
            continue
        elif kind == "bool":
            given[key] = False
        else:
            given[key] = 0.7
    if name in ("masked_fill.Tensor",):
        given["value"] = torch.tensor(0.3, dtype=dtype)
    if name.split(".")[0] in ("index_add", "index_fill", "index_put", "scatter", "scatter_add"):
        given |= indexed(name, shape, dtype)
    return given


def indexed(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))
    if name.startswith("index_put"):
        return {"indices": [order], "values": tensor(shape, dtype, 9), "accumulate": True}
    if name.startswith("scatter"):
        return {
            "dim": 0,
            "index": order.view(-1, *[1] * (len(shape) - 1)).expand(shape),
            "src": tensor(shape, dtype, 9),
        } | ({"value": 0.3} if name == "scatter.value" else {})
    return {"dim": 0, "index": order, "source": tensor(shape, dtype, 9), "value": 0.3}


def call(target: str, given: dict[str, Any]) -> Any:
    func = op_schema.overload(target)
    names = [argument.name for argument in _torch.arguments(func)]
    return func(**{("self" if key == "self" else key): value for key, value in given.items() if key in names})


def cases(name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Arguments in many shapes, layouts and dtypes, and what they are."""
    dtypes = (torch.bool, torch.int64) if name.startswith(LOGICAL) else (torch.float32, torch.bfloat16, torch.float64)
    comparison = name.split(".")[0] in ("eq", "ne", "lt", "le", "gt", "ge")
    for dtype in (torch.bool,) if comparison else dtypes:
        for shape, layout in (
            (LARGE, "contiguous"), ((7,), "contiguous"), ((5, 33), "transposed"), ((2, 3, 5, 7), "channels_last")
        ):  # fmt: skip
            if len(shape) < 2 and name.split(".")[0] in ("tril", "triu"):
                continue
            try:
                given = arguments(name, shape, dtype, layout)
                call(f"aten.{name}", given)
            except (RuntimeError, NotImplementedError):  # an op without this dtype
                continue
            yield given, f"{name} {dtype} {shape} {layout}"


def bits(one: torch.Tensor) -> torch.Tensor:
    return one.contiguous().view(torch.uint8)


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) and not is_expanded(v) else v for k, v in given.items()}


def is_expanded(one: torch.Tensor) -> bool:
    return 0 in one.stride()


def value(number: int, one: torch.Tensor, base: int | None = None) -> Value:
    held = 0 if base is not None else one.untyped_storage().nbytes()
    return Value(
        number, f"v{number}", "result", number if base is None else base, held, tuple(one.shape), one.stride(),
        str(one.dtype).removeprefix("torch."), 0,
    )  # fmt: skip


def described(given: dict[str, Any], result: torch.Tensor) -> tuple[dict[str, Any], list[Value]]:
    """The arguments with Ref in place of tensors, and the values, the result last."""
    values: list[Value] = []
    found: dict[str, Any] = {}
    for name, one in given.items():
        if isinstance(one, torch.Tensor):
            found[name] = Ref(len(values))
            values.append(value(len(values), one))
        else:
            found[name] = one
    return found, [*values, value(len(values), result)]


def called_into(target: str, name: str, given: dict[str, Any]) -> Any:
    form = in_place.call_into(target, name)
    return call(form.target, given | ({form.out: given[name]} if form.out else {}))


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", TABLE)
def test_a_form_gives_the_same_bits_in_the_operands_memory(name: str) -> None:
    target, seen = f"aten.{name}", set[str]()
    for given, what in cases(name):
        expected = call(target, copied(given))
        references, values = described(given, expected)
        for base in in_place.overwrites(target, (), references, values, len(values) - 1):
            operand = next(n for n, one in references.items() if isinstance(one, Ref) and one.value == base)
            arguments = copied(given)
            got = called_into(target, operand, arguments)
            assert got.data_ptr() == arguments[operand].data_ptr(), what
            assert got.stride() == expected.stride(), what
            assert torch.equal(bits(got), bits(expected)), f"{what} over {operand}"
            seen.add(operand)
    assert seen
    if name not in in_place.READ_BEFORE_WRITTEN and in_place.call_into(target, min(seen)).out is not None:
        tensors = {n for _, n in _torch.tensor_arguments(op_schema.overload(target))}
        assert seen >= tensors - {"condition", "mask"}


def along(name: str, shape: tuple[int, ...], dim: int) -> dict[str, Any]:
    """Arguments for an op that goes along a dimension."""
    given = arguments(name, shape, torch.float32, "contiguous") | {"dim": dim}
    order = torch.randperm(shape[dim], generator=torch.Generator().manual_seed(0))
    if name.startswith("scatter"):
        given["index"] = order.view([-1 if at == dim else 1 for at in range(len(shape))]).expand(shape)
    elif name.startswith("index"):
        given["index"] = order
    return given


ALONG = [
    name
    for name in sorted(in_place.READ_BEFORE_WRITTEN)
    if "dim" in arguments(name, (2, 3), torch.float32, "contiguous")
]


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ALONG)
def test_forms_that_go_along_a_dimension_do_so_along_any(name: str, layout: torch.memory_format, dim: int) -> None:
    target = f"aten.{name}"
    for shape in ((3, 19, 33, 17), (2, 3, 5, 7)):
        given = along(name, shape, dim)
        for key, one in given.items():
            if isinstance(one, torch.Tensor) and one.dim() == 4 and not is_expanded(one):
                given[key] = one.contiguous(memory_format=layout)
        expected = call(target, copied(given))
        (operand,) = in_place.READ_BEFORE_WRITTEN[name]
        references, values = described(given, expected)
        if not in_place.overwrites(target, (), references, values, len(values) - 1):
            assert layout is torch.channels_last  # the op lays its result out otherwise
            continue
        own = copied(given)
        got = called_into(target, operand, own)
        assert got.data_ptr() == own[operand].data_ptr()
        assert got.stride() == expected.stride()
        assert torch.equal(bits(got), bits(expected))


BETWEEN = 54_321_123  # bytes that nothing else allocates


def test_a_form_allocates_less_by_the_result() -> None:
    calls: list[tuple[str, int, Callable[[], Any]]] = []
    for name in TABLE:
        target = f"aten.{name}"
        given, _ = next(cases(name))
        functional = call(target, given)
        references, values = described(given, functional)
        bases = in_place.overwrites(target, (), references, values, len(values) - 1)
        calls.append((name, 0, partial(call, target, given)))
        calls += [
            (name, functional.untyped_storage().nbytes(), partial(called_into, target, operand, copied(given)))
            for operand, one in references.items()
            if isinstance(one, Ref) and one.value in bases
        ]
    found: list[list[int]] = []

    def run() -> None:
        for _, _, one in calls:
            torch.empty(BETWEEN, dtype=torch.uint8)
            one()

    for size in allocations(run):
        if size == BETWEEN:
            found.append([])
        elif size != -BETWEEN:
            found[-1].append(size)
    peaks = {name: peak_of(sizes) for (name, less, _), sizes in zip(calls, found, strict=True) if not less}
    for (name, less, _), sizes in zip(calls, found, strict=True):
        assert peak_of(sizes) <= peaks[name] - less, name


def test_a_result_of_another_shape_dtype_or_layout_takes_nothing_over() -> None:
    x = torch.zeros(4, 6)
    for other in (
        torch.zeros(6), torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.int32),
        torch.zeros(6, 4).t(),
    ):  # fmt: skip
        expected = x + other
        values = [value(0, x), value(1, other), value(2, expected)]
        found = in_place.overwrites("aten.add.Tensor", (Ref(0), Ref(1)), {}, values, 2)
        for base in found:
            assert (values[base].shape, values[base].stride, values[base].dtype) == (
                values[2].shape, values[2].stride, values[2].dtype
            )  # fmt: skip
        assert len(found) == 1


def test_a_view_takes_its_base_over_only_where_it_covers_it() -> None:
    whole, part = torch.zeros(4, 6), torch.zeros(8, 6)
    for base, view in ((whole, whole.view(24)), (part, part[:4])):
        values = [value(0, base), value(1, view, base=0), value(2, view.relu())]
        found = in_place.overwrites("aten.relu.default", (Ref(1),), {}, values, 2)
        assert found == ((0,) if base is whole else ())


def test_an_operand_read_twice_is_written_over_only_at_the_same_index() -> None:
    x = torch.zeros(5, 5)
    values = [value(0, x), value(1, x.t(), base=0), value(2, x * x), value(3, x.detach(), base=0)]
    assert in_place.overwrites("aten.mul.Tensor", (Ref(0), Ref(0)), {}, values, 2) == (0,)
    assert in_place.overwrites("aten.mul.Tensor", (Ref(0), Ref(3)), {}, values, 2) == (0,)
    assert in_place.overwrites("aten.mul.Tensor", (Ref(0), Ref(1)), {}, values, 2) == ()
    assert in_place.overwrites("aten._softmax_backward_data.default", (Ref(0), Ref(0), 1, "f"), {}, values, 2) == ()


def test_what_is_not_in_the_table_has_no_form() -> None:
    x = torch.zeros(4, 4)
    values = [value(0, x), value(1, x), value(2, x)]
    assert in_place.overwrites("aten.mm.default", (Ref(0), Ref(1)), {}, values, 2) == ()
    assert in_place.overwrites("mine.op.default", (Ref(0),), {}, values, 2) == ()
    with pytest.raises(KeyError, match=r"aten\.relu\.default"):
        in_place.call_into("aten.relu.default", "other")


def test_the_operand_is_the_view_that_the_op_reads() -> None:
    base = torch.zeros(4, 6)
    values = [value(0, base), value(1, base.view(24), base=0), value(2, torch.zeros(24))]
    op = GraphOp(0, "aten.relu.default", (Ref(1),), {}, "forward", (2,), False, (0,), (2,))
    assert in_place.overwritten_operand(op, 0, values) == in_place.Operand("self", 1)


def test_dropouts_derivative_takes_a_piece_less_on_a_card() -> None:
    """By hand: pieces of 2^20 float32 of 2^24; a CPU's kernel has the mask as numbers, too."""
    shape, of_dropout = (1 << 24,), in_place.PIECEWISE["aten.native_dropout_backward.default"]
    value = Value(0, "x", "result", 0, 4 << 24, shape, (1,), "float32", 0, place="cuda:0")
    assert of_dropout.workspace({}, (), value) == 4 << 20
    on_host = of_dropout.workspace({}, (), replace(value, place="cpu"))
    assert 2 * 4 << 17 <= on_host <= (2 * 4 << 17) + 128
