"""Names and texts of the user as C: the only forms in which they reach a compiler."""

from __future__ import annotations

import os
import re

KEYWORDS = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto if inline int long register
    restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
    """.split()  # noqa: SIM905  # thirty quoted words are harder to read
)
_TAKEN = KEYWORDS | frozenset(
    """
    assert complex ctype errno fenv inttypes iso646 limits locale math setjmp signal stdarg stdbool stddef stdint stdio
    stdlib string tgmath time wchar wctype
    aux con nul prn com0 com1 com2 com3 com4 com5 com6 com7 com8 com9
    lpt0 lpt1 lpt2 lpt3 lpt4 lpt5 lpt6 lpt7 lpt8 lpt9
    """.split()  # noqa: SIM905
)
"""Keywords; headers of C, in whose place NAME.h would be read where the folder is on the search path of headers;
devices of Windows, which no file can be named after."""
_LONGEST_NAME = 40
_LONGEST_COMMENT = 200


def c_name(text: str) -> str:
    """Return a C identifier for a name: lower case letters of ASCII, digits and underscores, 40 at most.

    It is also the name of files; nothing in it leads to another folder.

    Example:
        >>> c_name("ResNet-8"), c_name("2d"), c_name("int"), c_name("../math")
        ('resnet_8', 'net_2d', 'net_int', 'net_math')
    """
    found = re.sub(r"[^a-z0-9]+", "_", text[: 4 * _LONGEST_NAME].lower(), flags=re.ASCII).strip("_")
    found = found[:_LONGEST_NAME].rstrip("_")
    return f"net_{found}".rstrip("_") if not found or found[0].isdigit() or found in _TAKEN else found


def comment(text: str) -> str:
    r"""Return a comment in C of one line. Nothing in the text can end it: no star, backslash or question mark (which
    begins a trigraph) is left, and no character that is not printable ASCII.

    Example:
        >>> comment("fc*/ int x; /\\\n/"), comment("体积")
        ('/* fc_/ int x; /__/ */', '/* __ */')
    """
    kept = re.sub(r"[^ -~]|[*?\\]", "_", text[:_LONGEST_COMMENT])
    return f"/* {kept}{'...' if len(text) > _LONGEST_COMMENT else ''} */"


def string_literal(path: str | os.PathLike[str]) -> str:
    r"""Return a path as a string in C: what is no letter, digit or one of ``/._-`` is written by its bytes.

    Example:
        >>> print(string_literal('/tmp/a"; b/net.bin'))
        "/tmp/a\042\073\040b/net.bin"
    """
    plain = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-")
    return '"' + "".join(chr(one) if one in plain else f"\\{one:03o}" for one in os.fsencode(path)) + '"'
