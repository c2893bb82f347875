"""Names of ops as the checks compare them."""


def base_name(name: str) -> str:
    """Return the name of an op without namespace, overload and the underscore of an in-place op.

    Example:
        >>> base_name("aten.relu_.default"), base_name("aten._softmax.default")
        ('relu', '_softmax')
    """
    base = name.split(".")[1] if name.count(".") > 1 else name.split(".")[0]
    return base if base.endswith("__") else base.removesuffix("_")  # "__and__" is no in-place op
