"""Loops of machine code: natural loops of its control flow graph.

A jump back alone does not make one: compilers move waits behind the instruction that ends a
kernel, from where a jump leads back into the middle of a loop. A loop is a jump to a block that
every way to the jump leads through, and the blocks that reach the jump without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_BRANCH = re.compile(r"(?:@\S+ )?BRA|s_c?branch")
_CONDITIONAL = re.compile(r"@\S+ BRA|BRA\.DIV|BRA\S* !?U?P\d|s_cbranch")
_END = re.compile(r"EXIT|RET|BPT|s_endpgm")  # without a predicate: nothing follows
_TARGET = re.compile(r"\.[A-Z][\w.$]*\d")


def longest_loop(lines: list[str], wanted: Callable[[str], object]) -> list[str]:
    """Instructions of the longest loop that has a `wanted` one, or of any where none has.

    lines: labels, which end in a colon, and instructions, jumps with their predicates.
    """
    blocks = _blocks(lines)
    after = _successors(blocks)
    dominators = _dominators(after)
    loops: dict[int, set[int]] = {}
    for tail, heads in enumerate(after):
        for head in heads & dominators[tail]:
            loops.setdefault(head, set()).update(_body(head, tail, after))
    bodies = [[x for b in sorted(loop) for x in blocks[b][1]] for loop in loops.values()]
    found = [(any(map(wanted, body)), len(body), body) for body in bodies]
    return max(found, key=lambda loop: loop[:2])[2] if found else []


def _blocks(lines: list[str]) -> list[tuple[set[str], list[str]]]:
    """(labels, instructions) of each run that is entered at its start and left at its end."""
    blocks: list[tuple[set[str], list[str]]] = [(set(), [])]
    for line in lines:
        if line.endswith(":"):
            if blocks[-1][1]:
                blocks.append((set(), []))
            blocks[-1][0].add(line[:-1])
            continue
        blocks[-1][1].append(line)
        if _BRANCH.match(line) or _END.match(line):
            blocks.append((set(), []))
    return blocks


def _successors(blocks: list[tuple[set[str], list[str]]]) -> list[set[int]]:
    at = {label: i for i, (labels, _) in enumerate(blocks) for label in labels}
    after: list[set[int]] = []
    for i, (_, instructions) in enumerate(blocks):
        last = instructions[-1] if instructions else ""
        ends = i + 1 == len(blocks) or _END.match(last) is not None
        following = set() if ends else {i + 1}
        if _BRANCH.match(last):
            target = _TARGET.search(last)
            jumped = {at[target[0]]} if target is not None and target[0] in at else set()
            following = jumped | (following if _CONDITIONAL.match(last) else set())
        after.append(following)
    return after


def _dominators(after: list[set[int]]) -> list[set[int]]:
    """Of each block, those that every way to it from the first leads through."""
    every = set(range(len(after)))
    dominators = [{0}] + [set(every) for _ in after[1:]]
    reached = _reached(after)
    before = [{i for i in reached if block in after[i]} for block in every]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(after)):
            ways = [dominators[b] for b in before[block]]
            now = {block} | (set.intersection(*ways) if ways else set())
            changed |= now != dominators[block]
            dominators[block] = now
    return dominators


def _reached(after: list[set[int]]) -> set[int]:
    """The blocks that some way from the first leads to."""
    reached, waiting = {0}, [0]
    while waiting:
        new = after[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def _body(head: int, tail: int, after: list[set[int]]) -> set[int]:
    """Blocks that reach `tail` without `head`, and both."""
    body, waiting = {head, tail}, [tail] if tail != head else []
    while waiting:
        block = waiting.pop()
        for b in range(len(after)):
            if block in after[b] and b not in body:
                body.add(b)
                waiting.append(b)
    return body
