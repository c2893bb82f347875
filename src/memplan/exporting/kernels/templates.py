"""Read the C templates of the package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

REQUIRED_TEMPLATES: dict[str, tuple[str, ...]] = {
    "axpy_rows": ("axpy",),
    "matmul": ("axpy_rows", "dot", "product"),
    "fill_panel": ("panel", "product"),
    "matmul_int8": ("product",),
    "matmul_bytes": ("product",),
    "tile": ("panel",),
    "convolution_tiles": ("fill",),
    "convolution_add": ("panel", "tiled_convolution"),
    "convolution_weight_gradient_tiles": ("inside",),
    "convolution_gather": ("axpy", "convolution", "inside"),
    "convolution_scatter": ("axpy", "convolution", "inside"),
    "convolution_weight_gradient": ("dot", "convolution", "inside"),
    "strided": ("strided_loop",),
    "max_pool": ("pool",),
    "max_pool_gradient": ("pool",),
    "average_pool": ("pool",),
    "average_pool_forward": ("average_pool",),
    "average_pool_gradient": ("average_pool",),
    "adaptive_average_pool": ("pool",),
    "pad_mirror": ("pool",),
    "resize": ("pool",),
    "reduce_sum": ("reduction",),
    "reduce_extreme": ("reduction",),
    "dropout_mask": ("random",),
    "batch_norm_statistics": ("sum_of", "moment"),
    "batch_norm_sums": ("sum_of", "moment"),
    "channel_sum": ("sum_of",),
    "recurrent": ("dot", "axpy"),
    **{f"{kind}{suffix}": ("recurrent",) for kind in ("lstm", "gru", "rnn") for suffix in ("", "_backward")},
    "clip_norm": ("dot",),
    "update_sgd_int8": ("drawn",),
    "row_norm_statistics": ("sum_of", "moment"),
    "int8_stage": ("int8_rescaled",),
    "int8_four": ("int8_stage",),
    "int8_one": ("int8_stage",),
    "int8_linear": ("int8_stage",),
    "int8_add": ("int8_rescaled",),
    "int8_multiply": ("int8_rescaled",),
    "int8_average": ("int8_rescaled", "pool"),
    "int8_largest": ("pool",),
}
"""By template: the templates that must come before it."""


@cache
def template(name: str) -> str:
    """Return the text of a template; a name without a suffix is a C file."""
    file = name if "." in name else f"{name}.c"
    return (files("memplan.exporting.kernels") / "templates" / file).read_text(encoding="utf-8")


def filled(name: str, replacements: Mapping[str, str]) -> str:
    """Return the text of a template with each ``@MARK@`` replaced."""
    text = template(name)
    for mark, value in replacements.items():
        text = text.replace(f"@{mark}@", value)
    return text


@cache
def element_functions() -> dict[str, str]:
    """Return the C functions of templates/element_functions.c, by name."""
    text = template("element_functions").replace(" {\n", "\n{\n")  # as in the other templates: a line of its own
    functions = {}
    for paragraph in text.split("\n\n"):
        match = re.match(r"static float (\w+)\(", paragraph)
        if match:
            functions[match.group(1)] = paragraph.strip() + "\n"
    return functions
