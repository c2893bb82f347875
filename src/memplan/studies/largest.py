"""The largest batch, size or sequence that fits."""


def largest() -> int:
    return 0
