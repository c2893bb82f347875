"""Turn names and texts of the user into C that cannot break out of its place."""

from __future__ import annotations

import os
import re

KEYWORDS = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto if inline int long register
    restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
    """.split()  # noqa: SIM905  # thirty quoted words are harder to read
)
_RESERVED = KEYWORDS | frozenset(
    """
    assert complex ctype errno fenv inttypes iso646 limits locale math setjmp signal stdarg stdbool stddef stdint stdio
    stdlib string tgmath time wchar wctype
    aux con nul prn com0 com1 com2 com3 com4 com5 com6 com7 com8 com9
    lpt0 lpt1 lpt2 lpt3 lpt4 lpt5 lpt6 lpt7 lpt8 lpt9
    """.split()  # noqa: SIM905
)
"""Keywords; standard headers, which NAME.h would shadow if the folder is on the include path; device names of Windows,
which files cannot have."""
_LONGEST_NAME = 40
_LONGEST_COMMENT = 200


def c_name(text: str) -> str:
    """Return a C identifier for a name: at most 40 lower-case ASCII letters, digits and underscores.

    It is safe as a file name, too.

    Example:
        >>> c_name("ResNet-8"), c_name("2d"), c_name("int"), c_name("../math")
        ('resnet_8', 'net_2d', 'net_int', 'net_math')
    """
    name = re.sub(r"[^a-z0-9]+", "_", text[: 4 * _LONGEST_NAME].lower(), flags=re.ASCII).strip("_")
    name = name[:_LONGEST_NAME].rstrip("_")
    return f"net_{name}".rstrip("_") if not name or name[0].isdigit() or name in _RESERVED else name


def comment(text: str) -> str:
    r"""Return a one-line C comment that nothing in the text can end.

    Stars, backslashes, question marks (which begin trigraphs) and all but printable ASCII become underscores.

    Example:
        >>> comment("fc*/ int x; /\\\n/"), comment("体积")
        ('/* fc_/ int x; /__/ */', '/* __ */')
    """
    safe = re.sub(r"[^ -~]|[*?\\]", "_", text[:_LONGEST_COMMENT])
    return f"/* {safe}{'...' if len(text) > _LONGEST_COMMENT else ''} */"


def string_literal(path: str | os.PathLike[str]) -> str:
    r"""Return a path as a C string literal, with octal escapes for all but ASCII letters, digits and ``/._-``.

    Example:
        >>> print(string_literal('/tmp/a"; b/net.bin'))
        "/tmp/a\042\073\040b/net.bin"
    """
    plain = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-")
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in os.fsencode(path)) + '"'
