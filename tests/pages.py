"""The commands on the pages of the documentation."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_BLOCK = re.compile(
    r"^```console\n(.*?)^```|^```.*?^```|((?:^    [^\n]*\n)+)", re.MULTILINE | re.DOTALL
)
_COMMAND = re.compile(
    r"^ *(?:(?:\$ |until |node\d\$ )?batchinfer [a-z]|(?:aws|bash|export|grep|python|sed|sky) )",
    re.MULTILINE,
)


class Step(NamedTuple):
    """A command, and what the page says that it prints; None if the page shows no session."""

    command: str
    shown: str | None


@cache
def steps_of(text: str) -> list[Step]:
    """The commands in the blocks of a page. In a session they follow `$ `, their further lines `> `."""
    found: list[Step] = []
    for fenced, indented in _BLOCK.findall(text):
        block = fenced or textwrap.dedent(indented)
        if not (fenced or _COMMAND.search(block)):
            continue
        if not block.startswith("$ "):
            for command in whole(block):
                said = re.search(r"# (… .* …)$", command)
                found.append(Step(command, said and re.sub(" *… *", "…", said[1])))
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, *lines = part.splitlines()
            count = next((at for at, line in enumerate(lines) if line[:1] != ">"), len(lines))
            command = "\n".join([first, *(line[2:] for line in lines[:count])])
            found.append(Step(command, "\n".join(lines[count:])))
    return found


def whole(block: str) -> Iterator[str]:
    """Join lines until they are a whole command: no quote or loop is open, and no backslash ends them."""
    command = ""
    for line in block.splitlines():
        command += f"{line}\n"
        try:
            words = shlex.split(command.replace(";", " ; "), comments=True)
        except ValueError:  # a quote is open
            continue
        if words.count("do") == words.count("done") and not line.endswith("\\"):
            yield from [command.rstrip()] if words else []
            command = ""
    assert not command.strip(), f"never ends: {command}"
