"""Find values in generated source that are out of date.

TileLang keeps a vector that it has cast under the text of its address and takes it again wherever the same text stands
in the same block, also after a store to that address: a value that is read, overwritten and read again is then the
first one both times.
"""

import re
from itertools import accumulate

_NAMES = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_BUFFERS = re.compile(r"\bvoid\* (\w+) = |^ *(?:\w+ )*[\w:]+ (\w+)\[\d+\];|\* __restrict__ (\w+)", re.MULTILINE)
_VALUE = re.compile(r"^ *[\w:]+ (\w+) = (.*);$")
_READ_ONLY = re.compile(r"<const [^>]*>\(\w+ \+ ")  # a pointer that a call only reads from


def stale_values(source: str) -> list[str]:
    """Values that are used after a store to the buffer that they were read from, with the lines of their use."""
    buffers = {name for found in _BUFFERS.findall(source) for name in found if name}
    lines = source.splitlines()
    named = [set(_NAMES.findall(line)) for line in lines]
    written = [_written(line) & buffers for line in lines]
    loops = _loops(lines)
    stale = []
    for at, line in enumerate(lines):
        value = _VALUE.match(line)
        read = set(_NAMES.findall(value[2])) & buffers if value else set()
        if not read:
            continue
        for use in (i for i in range(at + 1, len(lines)) if value[1] in named[i]):
            # In a loop that the value comes into from outside, a store after the use comes before the next use.
            end = max([use, *(last for first, last in loops if at < first <= use <= last)])
            if any(read & written[i] for i in range(at + 1, end)):
                stale.append(f"{value[1]} = {value[2]} in line {use + 1}: {lines[use].strip()}")
    return stale


def _written(line: str) -> set[str]:
    """The names that a line may store to: those left of an assignment, and those given to a call as pointers."""
    if _VALUE.match(line) or re.match(r" *(for|if|extern|#)", line):
        return set()
    target, equals, _ = line.partition(" = ")
    if not equals:
        target = _READ_ONLY.sub("", line)
    return set(_NAMES.findall(target))


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    depth = list(accumulate(line.count("{") - line.count("}") for line in lines))
    starts = [i for i, line in enumerate(lines) if re.match(r" *for \(", line)]
    return [(i, next(j for j in range(i + 1, len(lines)) if depth[j] < depth[i])) for i in starts]
