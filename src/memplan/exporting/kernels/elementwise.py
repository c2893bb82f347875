"""The C function that computes one element of each elementwise op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import arguments_of

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The C function of an elementwise op, and which of the op's arguments it takes."""

    function: str
    """Its name in templates/element_functions.c."""
    operands: tuple[str, ...]
    """Tensor arguments by their names in the op's schema, in the order of the C function's."""
    numbers: tuple[tuple[str, float], ...] = ()
    """Number arguments that follow, by name, with their defaults."""
    suits: Callable[[Arguments], bool] = field(default=lambda arguments: True)
    """Whether the function computes a call with these arguments."""


def _unary(function: str, *numbers: tuple[str, float]) -> tuple[Elementwise, ...]:
    """Return the C function of an op with an operand, and numbers of (name in the schema, default)."""
    return (Elementwise(function, ("self",), numbers),)


def _gradient(function: str, *numbers: tuple[str, float], of: str = "self") -> tuple[Elementwise, ...]:
    """Return the C function of an activation's gradient, which also reads the activation's operand `of`."""
    return (Elementwise(function, ("grad_output", of), numbers),)


def _binary(function: str, with_number: str, *numbers: tuple[str, float]) -> tuple[Elementwise, ...]:
    """Return the C functions of an op with two operands: the one for two tensors and, if `with_number` names one, the
    one for a tensor and a number."""
    of_tensors = Elementwise(
        function, ("self", "other"), numbers, suits=lambda arguments: isinstance(arguments["other"], Ref)
    )
    if not with_number:
        return (of_tensors,)
    return of_tensors, _with_number(with_number, *numbers)


def _with_number(function: str, *numbers: tuple[str, float]) -> Elementwise:
    """Return the C function of an op with a tensor and a number `other`, and more numbers."""
    return Elementwise(function, ("self",), (("other", 0.0), *numbers))


def _comparison(function: str) -> dict[str, tuple[Elementwise, ...]]:
    """Return the C functions of a comparison, by op, with a tensor and with a number: 1 where it holds, else 0."""
    name = {"equal": "eq", "different": "ne", "less": "lt", "at_most": "le", "more": "gt", "at_least": "ge"}[function]
    number_function = f"{function}_number"
    return {f"{name}.Tensor": _binary(function, number_function), f"{name}.Scalar": (_with_number(number_function),)}


_ALPHA = ("alpha", 1.0)
_INFINITY = float("inf")
_ELU = (("alpha", 1.0), ("scale", 1.0), ("input_scale", 1.0))
_TANH = lambda arguments: arguments.get("approximate") == "tanh"  # noqa: E731

_FUNCTIONS: dict[str, tuple[Elementwise, ...]] = {
    **{
        name: functions
        for function in ("equal", "different", "less", "at_most", "more", "at_least")
        for name, functions in _comparison(function).items()
    },
    "abs.default": _unary("absolute"),
    "add.Scalar": (_with_number("add_number", _ALPHA),),
    "add.Tensor": _binary("add", "add_number", _ALPHA),
    "clamp.default": _unary("clip", ("min", -_INFINITY), ("max", _INFINITY)),
    "atan2.default": _binary("angle", with_number=""),
    "ceil.default": _unary("round_up"),
    "clamp_max.default": _unary("clip", ("min", -_INFINITY), ("max", _INFINITY)),
    "clamp_min.default": _unary("clip", ("min", -_INFINITY), ("max", _INFINITY)),
    "clone.default": _unary("copy"),
    "cos.default": _unary("cosine"),
    "cosh.default": _unary("hyperbolic_cosine"),
    "erf.default": _unary("error_function"),
    "expm1.default": _unary("exponential_less_1"),
    "floor.default": _unary("round_down"),
    "logical_and.default": _binary("both", with_number=""),
    "logical_not.default": _unary("is_zero"),
    "logical_or.default": _binary("either", with_number=""),
    "sinh.default": _unary("hyperbolic_sine"),
    "trunc.default": _unary("round_to_zero"),
    "where.self": (Elementwise("choose", ("condition", "self", "other")),),
    "div.Scalar": (_with_number("divide_number"),),
    "div.Tensor": _binary("divide", "divide_number"),
    "elu.default": _unary("elu", *_ELU),
    "elu_backward.default": (
        Elementwise(
            "elu_gradient_of_result", ("grad_output", "self_or_result"), _ELU, lambda arguments: arguments["is_result"]
        ),
        Elementwise("elu_gradient", ("grad_output", "self_or_result"), _ELU),
    ),
    "exp.default": _unary("exponential"),
    "gelu.default": (Elementwise("gelu_tanh", ("self",), (), _TANH), Elementwise("gelu", ("self",))),
    "gelu_backward.default": (
        Elementwise("gelu_tanh_gradient", ("grad_output", "self"), (), _TANH),
        Elementwise("gelu_gradient", ("grad_output", "self")),
    ),
    "hardshrink_backward.default": (Elementwise("shrink_gradient", ("grad_out", "self"), (("lambd", 0.5),)),),
    "hardsigmoid.default": _unary("hardsigmoid"),
    "hardsigmoid_backward.default": _gradient("hardsigmoid_gradient"),
    "hardswish.default": _unary("hardswish"),
    "hardswish_backward.default": _gradient("hardswish_gradient"),
    "hardtanh.default": _unary("clip", ("min_val", -1.0), ("max_val", 1.0)),
    "hardtanh_backward.default": _gradient("clip_gradient", ("min_val", -1.0), ("max_val", 1.0)),
    "isinf.default": _unary("is_infinite"),
    "isnan.default": _unary("is_nan"),
    "leaky_relu.default": _unary("leaky_relu", ("negative_slope", 0.01)),
    "leaky_relu_backward.default": _gradient("leaky_relu_gradient", ("negative_slope", 0.01)),
    "log.default": _unary("logarithm"),
    "log1p.default": _unary("logarithm_1p"),
    "maximum.default": _binary("larger", with_number=""),
    "minimum.default": _binary("smaller", with_number=""),
    "mul.Scalar": (_with_number("scale"),),
    "mul.Tensor": _binary("multiply", "scale"),
    "neg.default": _unary("negate"),
    "pow.Tensor_Scalar": _unary("power", ("exponent", 2.0)),
    "reciprocal.default": _unary("reciprocal"),
    "relu.default": _unary("relu"),
    "rsqrt.default": _unary("reciprocal_root"),
    "rsub.Scalar": (_with_number("subtract_from", _ALPHA),),
    "sgn.default": _unary("sign"),
    "sigmoid.default": _unary("sigmoid"),
    "sigmoid_backward.default": _gradient("sigmoid_gradient", of="output"),
    "sign.default": _unary("sign"),
    "silu.default": _unary("silu"),
    "silu_backward.default": _gradient("silu_gradient"),
    "sin.default": _unary("sine"),
    "softshrink_backward.default": _gradient("shrink_gradient", ("lambd", 0.5)),
    "softplus.default": _unary("softplus", ("beta", 1.0), ("threshold", 20.0)),
    "softplus_backward.default": _gradient("softplus_gradient", ("beta", 1.0), ("threshold", 20.0)),
    "sqrt.default": _unary("square_root"),
    "sub.Scalar": (_with_number("subtract_number", _ALPHA),),
    "sub.Tensor": _binary("subtract", "subtract_number", _ALPHA),
    "tanh.default": _unary("hyperbolic_tangent"),
    "tanh_backward.default": _gradient("hyperbolic_tangent_gradient", of="output"),
    "threshold_backward.default": _gradient("relu_gradient", ("threshold", 0.0)),
}

ELEMENTWISE: Mapping[str, tuple[Elementwise, ...]] = {
    **{f"aten.{name}": functions for name, functions in _FUNCTIONS.items()},
    "memplan.is_not_zero.default": _unary("is_not_zero"),
}
"""C functions of each op; a call uses the first that suits its arguments."""


def element_call_of(
    target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Elementwise, list[Any], list[float]] | None:
    """Return the C function of a call, its operands and its numbers; None if no function suits the arguments."""
    arguments = arguments_of(target, args, kwargs)
    for function in ELEMENTWISE[target]:
        if function.suits(arguments):
            numbers = [
                default if arguments.get(name) is None else float(arguments[name]) for name, default in function.numbers
            ]
            return function, [arguments[name] for name in function.operands], numbers
    return None
