"""Why autograd saves a tensor: the derivative formulas that torch ships, read for who needs what."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import dataclass

import yaml

_NAME = re.compile(r"\b[A-Za-z_]\w*\b")
# What a formula asks of a tensor without reading its values; autograd keeps these apart, not the tensor.
_METADATA = re.compile(
    r"\b\w+\s*(?:\.|->)\s*(?:sym_)?(?:sizes?|strides?|numel|dim|layout|scalar_type|options|device|dtype|defined)\([^()]*\)"
)

# Formulas that give several gradients at once do not say which of them reads what; these do.
# Sources: aten/src/ATen/native/{Convolution,Normalization,layer_norm,group_norm,Activation}.cpp.
_READS: dict[str, dict[str, frozenset[str]]] = {
    "convolution": {"input": frozenset({"weight"}), "weight": frozenset({"input"})},
    "_prelu_kernel": {"self": frozenset({"self", "weight"}), "weight": frozenset({"self"})},
}
_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "batch_norm_with_update", "native_layer_norm",
          "native_group_norm", "cudnn_batch_norm", "_fused_rms_norm")  # fmt: skip
for _norm in _NORMS:
    # the gradient of bias needs nothing; the weight's needs the normalized input, the input's everything
    _READS[_norm] = {"weight": frozenset({"input"})}


@dataclass(frozen=True, slots=True)
class Formula:
    """A derivative formula: for which arguments of the op it gives a gradient, and its text."""

    variables: tuple[str, ...]
    text: str

    def reads(self, role: str) -> bool:
        """Return whether the text mentions an argument, or any result for the role ``result``."""
        names = set(_NAME.findall(_METADATA.sub("", self.text)))
        if role in ("result", "kept"):
            return True if role == "kept" else bool(names - set(self.variables))
        return role in names

    @property
    def function(self) -> str:
        """Return the function that the formula calls: ``convolution_backward``, ``threshold_backward``."""
        calls = [name for name in re.findall(r"([A-Za-z_]\w*)\(", self.text) if name.endswith("_backward")]
        calls = calls or [name for name in re.findall(r"([A-Za-z_]\w*)\(", self.text) if "backward" in name]
        return calls[0].removesuffix("_symint") if calls else self.text


def formulas(op: str) -> tuple[Formula, ...]:
    """Return the formulas of an op, by its overload name (``aten.convolution.default``); () where torch lists none."""
    name = op.removeprefix("aten.").removesuffix(".default")
    table = _table()
    found = table.get(name)
    if found is None:  # in place: the formula of the op out of place, read with the result
        base, dot, overload = name.partition(".")
        found = table.get(base.removesuffix("_") + dot + overload, ())
    return found


def needing(op: str, role: str, needs_grad: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return for which arguments' gradients an op keeps a tensor, each with the function that computes it.

    ``role`` is the tensor's (an argument's name or ``result``), ``needs_grad`` the arguments that get a gradient.
    """
    base = op.removeprefix("aten.").split(".")[0]
    exact = _READS.get(base, {})
    found: list[tuple[str, str]] = []
    for formula in formulas(op):
        for variable in formula.variables:
            if variable not in needs_grad or not formula.reads(role):
                continue
            reads = exact.get(variable)
            if reads is not None and role != "result" and role not in reads:
                continue
            if variable == "bias" and len(formula.variables) > 1:
                continue  # the sum of the incoming gradient
            found.append((variable, formula.function))
    return found


@functools.cache
def _table() -> dict[str, tuple[Formula, ...]]:
    """derivatives.yaml as {op name: formulas}."""
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
        rules = entry.get("dispatch", {}).get("Default", entry)
        rows = [
            Formula(tuple(part.strip() for part in key.split(",")), text)
            for key, text in rules.items()
            if isinstance(text, str) and text not in ("non_differentiable", "not_differentiable")
            and all(part.strip() in arguments for part in key.split(","))
        ]  # fmt: skip
        table[signature.split("(")[0]] = tuple(rows)
    return table
