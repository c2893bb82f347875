"""How deep the stack of a program's functions gets: frames along the deepest path of calls.

Both are read from the disassembly, for Arm and RISC-V, so that libm and the compiler's runtime library count as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import networkx as nx

Block = tuple[int, str, list[str]]
"""Address, name and instructions of a function, or of what follows a label in assembler code."""

_FUNCTION = re.compile(r"^([0-9a-f]+) <([^>]+)>:$")
_INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\s+(?!\.|nop|c\.nop)(\S.*)$")
"""Without data and padding."""
_COMMENT = re.compile(r"\s+[#@;] ")
_TARGET = re.compile(r"(?:^|[\s,])([0-9a-f]+) <")
_LEAVES = re.compile(r"^(?:bx|b|b\.n|b\.w|ret|j|jr|tail|udf|ebreak)(?: |$)|^(?:pop|ldmia|ldr).*\bpc\b")
"""Behind these instructions a function does not run on into the next one."""
_REGISTERS = re.compile(r"^(?:push|vpush|stmdb(?:\.w)? sp!,) ?\{(.*)\}")
_BYTES = re.compile(
    r"^(?:sub(?:w|\.w)? sp,(?: sp,)? #|(?:str|strd)(?:\.w)? .*\[sp, #-|(?:c\.)?addi?(?:16sp)? sp,(?:sp,)?-)(\d+)"
)
_OF_REGISTER = re.compile(r"^sub(?:\.w)? sp, (?:sp, )?(?!sp)[a-z]|^add sp,sp,[a-z]")
"""Of Arm and of RISC-V: the size of the frame, or on RISC-V of what is freed, is in a register."""
_SAVES = re.compile(r"^jal t0,([0-9a-f]+) <__riscv_save_")
"""RISC-V, ``-msave-restore``: a function of the compiler's library makes room for the caller's registers."""


def stack_depth(disassembly: str, functions: Collection[str]) -> dict[str, int]:
    r"""Return the bytes of stack that a call of each function takes, with all that it calls.

    A function's frame is the sum of all that its instructions take from the stack pointer; a jump to another function
    counts as a call. Both make the result an upper bound. Labels of assembler code that jump to each other count once
    each. What is called through a pointer does not count.

    Args:
        disassembly: what ``objdump -d --no-show-raw-insn`` prints of a linked program for Arm or RISC-V.
        functions: names of global functions.

    Raises:
        ValueError: a function is not in the program, or its frame depends on a register.

    Example:
        >>> text = '''
        ... 00000000 <twice>:
        ...    0:\tpush\t{r4, lr}
        ...    2:\tbl\t8 <once>
        ...    6:\tpop\t{r4, pc}
        ...
        ... 00000008 <once>:
        ...    8:\tsub\tsp, #16
        ...    a:\tadd\tsp, #16
        ...    c:\tbx\tlr
        ... '''
        >>> stack_depth(text, ["twice"])
        {'twice': 24}
    """
    blocks = list(_blocks(disassembly))
    address_of = {name: address for address, name, _ in blocks}
    frame_bytes = {address: sum(map(_pushed_bytes, instructions)) for address, _, instructions in blocks}
    calls = nx.DiGraph()
    calls.add_nodes_from(frame_bytes)
    for position, (address, _, instructions) in enumerate(blocks):
        for line in instructions:
            if saves := _SAVES.match(line):  # it makes room in the caller's frame
                frame_bytes[address] += frame_bytes[int(saves[1], 16)]
                continue
            targets = (int(digits, 16) for digits in _TARGET.findall(line))
            calls.add_edges_from((address, target) for target in targets if target in frame_bytes)
        if instructions and not _LEAVES.match(instructions[-1]):  # it runs on into the next block
            calls.add_edges_from((address, following) for following, _, _ in blocks[position + 1 : position + 2])
    _check(blocks, calls, {name: address_of.get(name) for name in functions})
    # functions that call each other in a cycle are one node, whose frames are added up
    groups = nx.condensation(calls)
    depth = dict[int, int]()
    for group in reversed(list(nx.topological_sort(groups))):
        own = sum(frame_bytes[address] for address in groups.nodes[group]["members"])
        depth[group] = own + max((depth[callee] for callee in groups.successors(group)), default=0)
    return {name: depth[groups.graph["mapping"][address_of[name]]] for name in functions}


def _check(blocks: Sequence[Block], calls: nx.DiGraph, functions: Mapping[str, int | None]) -> None:
    """Raise ValueError where a function is missing, or the frame of one that it calls has no fixed size."""
    called = set[int]()
    for name, address in functions.items():
        if address is None:
            raise ValueError(f"the program has no function {name}")
        called |= {address, *nx.descendants(calls, address)}
    for address, name, instructions in blocks:
        variable_frame = next(filter(_OF_REGISTER.match, instructions), None)
        if variable_frame is not None and address in called:
            raise ValueError(f"{name} has the instruction {variable_frame!r}: expected frames of a fixed size")


def _blocks(disassembly: str) -> Iterator[Block]:
    """Yield address, name and instructions of each function."""
    head: tuple[int, str] | None = None
    instructions = list[str]()
    for line in disassembly.splitlines():
        if function := _FUNCTION.match(line):
            if head is not None:
                yield *head, instructions
            head, instructions = (int(function[1], 16), function[2]), []
        elif decoded := _INSTRUCTION.match(line):
            instructions.append(_COMMENT.split(decoded[1].replace("\t", " "))[0])
    if head is not None:
        yield *head, instructions


def _pushed_bytes(instruction: str) -> int:
    """Return the bytes that an instruction takes from the stack pointer."""
    if registers := _REGISTERS.match(instruction):
        return sum(map(_register_bytes, registers[1].split(",")))
    size = _BYTES.match(instruction)
    return int(size[1]) if size else 0


def _register_bytes(text: str) -> int:
    """Return the bytes of a register, or of a range of registers, in a list such as ``r4-r7`` or ``d8-d10``."""
    first, _, last = text.strip().partition("-")
    size = 8 if first.startswith("d") else 4  # d: a double of the floating-point unit
    return size * (int(last[1:]) - int(first[1:]) + 1) if last else size
