"""Find which gradients need a saved tensor, from the derivative formulas that torch ships."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import dataclass

import yaml

_NAME = re.compile(r"\b[A-Za-z_]\w*\b")
# Uses of a tensor in a formula that do not read its values: for them autograd does not save the tensor.
_METADATA = re.compile(
    r"\b\w+\s*(?:\.|->)\s*(?:sym_)?(?:sizes?|strides?|numel|dim|layout|scalar_type|options|device|dtype|defined)\([^()]*\)"
)

# Variable -> the arguments that its gradient reads, for formulas that compute several gradients in a single call.
# Sources: aten/src/ATen/native/{Convolution,Normalization,layer_norm,group_norm,Activation}.cpp.
_READS: dict[str, dict[str, frozenset[str]]] = {
    "convolution": {"input": frozenset({"weight"}), "weight": frozenset({"input"})},
    "_prelu_kernel": {"self": frozenset({"self", "weight"}), "weight": frozenset({"self"})},
}
_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "batch_norm_with_update", "native_layer_norm",
          "native_group_norm", "cudnn_batch_norm", "_fused_rms_norm")  # fmt: skip
for _norm in _NORMS:
    # The gradient of bias needs nothing, that of the weight the normalized input, that of the input everything.
    _READS[_norm] = {"weight": frozenset({"input"})}


@dataclass(frozen=True, slots=True)
class Formula:
    """A derivative formula: the arguments whose gradients it computes, and its text."""

    variables: tuple[str, ...]
    text: str

    def reads(self, role: str) -> bool:
        """Check whether the formula reads the argument ``role``, or any result of the op for the role ``result``."""
        if role == "kept":  # by a custom autograd function, whose formula is not known
            return True
        names = set(_NAME.findall(_METADATA.sub("", self.text)))
        return bool(names - set(self.variables)) if role == "result" else role in names

    @property
    def function(self) -> str:
        """Return the function that the formula calls: ``convolution_backward``; the formula itself if there is none."""
        called = re.findall(r"([A-Za-z_]\w*)\(", self.text)
        candidates = [name for name in called if name.endswith("_backward")]
        candidates += [name for name in called if "backward" in name]  # as in convolution_backward_symint
        return candidates[0].removesuffix("_symint") if candidates else self.text


def formulas(op: str) -> tuple[Formula, ...]:
    """Return the formulas of an op, by its overload name (``aten.convolution.default``); () if torch lists none."""
    name = op.removeprefix("aten.").removesuffix(".default")
    table = _derivative_table()
    if name in table:
        return table[name]
    base, dot, overload = name.partition(".")  # an in-place op has the formula of the out-of-place op
    return table.get(base.removesuffix("_") + dot + overload, ())


def gradients_reading(op: str, role: str, needs_grad: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the gradients for which an op saves a tensor: (argument, name of the function that computes it).

    ``role``: of the tensor: the name of an argument, or ``result``.
    """
    base = op.removeprefix("aten.").split(".")[0]
    reads_by_variable = _READS.get(base, {})  # of formulas of several gradients, none of which reads all
    gradients: list[tuple[str, str]] = []
    for formula in formulas(op):
        for variable in formula.variables:
            if variable not in needs_grad or not formula.reads(role):
                continue
            reads = reads_by_variable.get(variable)
            if reads is not None and role != "result" and role not in reads:
                continue
            if variable == "bias" and len(formula.variables) > 1:
                continue  # the sum of the incoming gradient
            gradients.append((variable, formula.function))
    return gradients


@functools.cache
def _derivative_table() -> dict[str, tuple[Formula, ...]]:
    """Return {op name: formulas} from torchgen's derivatives.yaml; {} if it is not installed."""
    torchgen = importlib.util.find_spec("torchgen")
    if torchgen is None or torchgen.origin is None:
        return {}
    path = os.path.join(os.path.dirname(torchgen.origin), "packaged", "autograd", "derivatives.yaml")
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        entries = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    table: dict[str, tuple[Formula, ...]] = {}
    for entry in entries:
        signature = entry["name"]
        arguments = set(re.findall(r"\b(\w+)(?=[,=)])", signature[: signature.rindex("->")]))
        rows: list[Formula] = []
        for key, text in entry.get("dispatch", {}).get("Default", entry).items():
            variables = tuple(part.strip() for part in key.split(","))  # other keys, such as "name", are no arguments
            is_formula = isinstance(text, str) and text not in ("non_differentiable", "not_differentiable")
            if is_formula and arguments.issuperset(variables):
                rows.append(Formula(variables, text))
        table[signature.split("(")[0]] = tuple(rows)
    return table
