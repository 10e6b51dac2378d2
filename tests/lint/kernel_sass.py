# SPDX-License-Identifier: Apache-2.0
"""Reads a kernel's SASS, as `cuobjdump -sass` prints it, and counts its loads in flight.

A load of global memory is in flight from its own instruction to the first one that reads or overwrites its destination
(for LDGSTS: to the next DEPBAR). The measure is taken along every path through the kernel's control flow graph, loops
included; where two paths meet, the one with more bytes in flight is followed.

The kernel's main loop is where loads count: those at a given depth of loops or deeper (1: in the loop over blocks or
tiles, or in one inside it; 0: anywhere). A loop is what lies between a branch backwards and its target.

Counted are loads of data: LDG, LD and LDGSTS whose address depends on a loaded pointer, or, in a kernel whose pointers
are all parameters, any. Loads of a job table's entries, whose address depends on parameters alone, are not counted, nor
are loads of what other blocks of the same launch have written (.STRONG).
"""

import dataclasses
import re

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"\b(U?R)(\d+)\b")
_NO_DESTINATION = ("ST", "RED", "BAR", "BRA", "EXIT", "MEMBAR", "DEPBAR", "LDGDEPBAR", "LDGSTS", "BSSY", "BSYNC", "CCTL",
                   "ERRBAR", "WARPSYNC", "NOP", "RET", "CALL", "ISETP", "FSETP", "DSETP", "PLOP3", "HSETP2", "BRX")
_ENDS = ("EXIT", "RET", "BRX")
_LOAD = ("LDG", "LD", "LDGSTS")
_ROUNDS = 12  # passes over the graph; two settle a loop, and nested loops a few more


@dataclasses.dataclass
class Instruction:
    """One line of SASS."""

    at: int
    predicate: str
    opcode: str
    operands: str

    def __post_init__(self):
        self.family = self.opcode.split(".")[0]
        self.parts = self.opcode.split(".")
        registers = [(kind, int(number)) for kind, number in _REGISTER.findall(self.operands)]
        bracket = re.findall(r"\[([^\]]*)\]", self.operands)
        self.address = [(k, int(n)) for k, n in _REGISTER.findall(bracket[-1])] if bracket else []
        self.writes, self.reads = [], registers
        if registers and not self.family.startswith(_NO_DESTINATION):
            kind, first = registers[0]
            self.writes = [(kind, first + i) for i in range(self._width())]
            self.reads = registers[1:]

    def _width(self):
        if "128" in self.parts or self.family.endswith("MMA"):
            return 4
        wide = {"64", "WIDE", "F64"} & set(self.parts) or self.family in ("DADD", "DMUL", "DFMA")
        return 2 if wide else 1

    def load_bytes(self):
        if self.family not in _LOAD:
            return 0
        sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((sizes[part] for part in self.parts if part in sizes), 4)

    def target(self):
        found = re.search(r"0x([0-9a-f]+)", self.operands)
        return int(found.group(1), 16) if self.family == "BRA" and found else None


@dataclasses.dataclass
class InFlight:
    """Returns the most that a thread has in flight."""

    loads: int = 0
    bytes: int = 0


def kernels(text):
    """(mangled name, instructions) of each kernel that `cuobjdump -sass` has printed."""
    for part in re.split(r"\n\s*Function : ", text)[1:]:
        name = part.split("\n", 1)[0].strip()
        code = [Instruction(int(at, 16), predicate or "", opcode, operands)
                for at, predicate, opcode, operands in _LINE.findall(part)]
        yield name, code


def _blocks(code):
    """[(begin, end, successors)] by index of instruction and of block."""
    index = {instruction.at: i for i, instruction in enumerate(code)}
    starts = {0}
    for i, instruction in enumerate(code):
        if instruction.target() in index:
            starts.add(index[instruction.target()])
        if instruction.family in _ENDS + ("BRA",):
            starts.add(i + 1)
    bounds = sorted(start for start in starts if start < len(code)) + [len(code)]
    number = {begin: block for block, begin in enumerate(bounds[:-1])}
    blocks = []
    for begin, end in zip(bounds, bounds[1:]):
        last = code[end - 1]
        after = [number[index[last.target()]]] if last.target() in index else []
        stops = last.family in _ENDS + ("BRA",) and not last.predicate and "P" not in last.operands.split(",")[0]
        if not stops and end in number:
            after.append(number[end])
        blocks.append((begin, end, after))
    return blocks


def _run(blocks, start, step, merge):
    """State before each block after some rounds, of `step(state, index)` over its instructions."""
    before = {0: start}
    for _ in range(_ROUNDS):
        changed = False
        for block, (begin, end, after) in enumerate(blocks):
            if block not in before:
                continue
            state = before[block]
            for i in range(begin, end):
                state = step(state, i)
            for successor in after:
                merged = merge(before[successor], state) if successor in before else state
                if merged != before.get(successor):
                    before[successor] = merged
                    changed = True
        if not changed:
            break
    return before


def _data_loads(code, blocks, has_table):
    """Indices of the loads of data: by whether a loaded value reaches the address."""
    found = set()

    def step(loaded, i):
        instruction = code[i]
        if instruction.load_bytes() and ".STRONG" not in instruction.opcode:
            if not has_table or any(register in loaded for register in instruction.address):
                found.add(i)
        if not instruction.writes:
            return loaded
        from_memory = instruction.family in ("LDS", "LDSM") + _LOAD
        if from_memory or any(register in loaded for register in instruction.reads):
            return loaded | frozenset(instruction.writes)
        return loaded if instruction.predicate else loaded - frozenset(instruction.writes)

    _run(blocks, frozenset(), step, lambda a, b: a | b)
    return found


def _loops(code):
    """The loops that each instruction lies in, as (begin, end), the innermost first. Branches back to one place are one."""
    loops = {}
    for instruction in code:
        target = instruction.target()
        if target is not None and target < instruction.at:
            loops[target] = max(loops.get(target, 0), instruction.at)
    around = [[(begin, end) for begin, end in loops.items() if begin <= instruction.at <= end] for instruction in code]
    return [sorted(loops, key=lambda loop: loop[1] - loop[0]) for loops in around]


def in_flight(code, has_table, depth=0):
    """InFlight of a kernel's instructions. has_table: its pointers come from a table of jobs. depth: of loops."""
    blocks, loops = _blocks(code), _loops(code)
    data = {i for i in _data_loads(code, blocks, has_table) if len(loops[i]) >= depth}
    most = InFlight()

    def size(state):
        return sum(code[i].load_bytes() for i in state)

    def step(state, i):
        instruction = code[i]
        # A load that its own loop does not wait for is one that the loop's last turn does not issue.
        state = tuple(load for load in state if loops[load][:1] == [l for l in loops[i] if l in loops[load]][:1])
        touched = set(instruction.reads) | set(instruction.writes)
        arrived = [n for n, load in enumerate(state) if touched & set(code[load].writes)
                   or (instruction.family == "DEPBAR" and code[load].family == "LDGSTS") or load == i]
        if arrived:
            state = state[arrived[-1] + 1:]  # what was issued before it is taken to have arrived too
        if i in data:
            state = state + (i,)
            if (size(state), len(state)) > (most.bytes, most.loads):
                most.bytes, most.loads = size(state), len(state)
        return state

    _run(blocks, (), step, lambda a, b: max(a, b, key=lambda state: (size(state), len(state))))
    return most
