"""Values that no honest file holds, documents with one of them in each place, and a child that reads such files."""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]
TERMINAL = "\x1b]0;PWNED\x07\x1b[31mred\x1b[2J\x9b31m\x85\u2028\u202eleft\u2066\r\nerror: forged\x00\x7f"
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    5000,
    0.0,
    -0.5,
    1e308,
    -1e308,
    1e-320,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "..",
    "../../../../etc/passwd",
    "/dev/zero",
    "/etc/passwd",
    "x" * 5000,
    "**x/[",
    "a;b:c",
    "nul\x00nul",
    TERMINAL,
    "\ud800",
    "fp64",
    "1x2x" * 300,
    "9" * 5000,
    [],
    [[]],
    [None],
    [1, "a", {}],
    [[1, 2, 3]],
    {},
    {"": {}},
    {TERMINAL: TERMINAL},
    {"a": [{"b": None}]},
    DEEP,
)
MISSING = object()
MEMORY, SECONDS = 2 << 30, 60  # of one child in all; for each file
CHILD = """
import json, signal, sys
from pathlib import Path
sys.path += sys.argv[4:]
from trtopt.core.errors import TrtoptError
from trtopt.core.host import peak_memory
from {module} import {name} as read
for path in sorted(Path(sys.argv[1]).iterdir()):
    signal.alarm(int(sys.argv[2]))
    place = Path(sys.argv[3] or path)
    if place != path:
        place.write_bytes(path.read_bytes())
    try:
        told = read(place) or "used"
    except TrtoptError as error:
        told = f"refused: {{error}}"
    except BaseException as error:
        told = f"internal: {{type(error).__name__}}: {{error}}"
    print(json.dumps([path.name, told, peak_memory()]), flush=True)
"""


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a document, itself aside; of a list's first two items alone."""
    items: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        items = list(document.items())
    elif isinstance(document, list):
        items = list(enumerate(document))[:2]
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place, or without that place (`MISSING`)."""
    key, rest = path[0], path[1:]
    copy: Any = dict(document) if isinstance(document, dict) else list(document)
    if rest:
        copy[key] = changed(document[key], rest, value)
    elif value is MISSING:
        del copy[key]
    else:
        copy[key] = value
    return copy


def mutants(document: Any, count: int, *, seed: int = 16) -> Iterator[tuple[str, Any]]:
    """What was done, and the document with it done: `count` times, every place in turn, with drawn values."""
    drawn, everywhere = random.Random(seed), list(places(document))
    for number in range(count):
        path = everywhere[number % len(everywhere)]
        value = drawn.choice((*HOSTILE, MISSING))
        said = (
            "nothing"
            if value is MISSING
            else f"{type(value).__name__} {ascii(value)[:40]}"
            if value is not DEEP
            else "deep"
        )
        yield f"{'.'.join(map(ascii, path))} = {said}", changed(document, path, value)


def toml(value: Any) -> str:
    """A document as TOML, in inline tables; what TOML can't say (null) is left out."""
    if isinstance(value, dict):
        pairs = (f"{toml(str(key))} = {toml(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(toml(item) for item in value if item is not None)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return f"{'-' if value < 0 else ''}{hex(abs(value))}" if abs(value) >= 2**63 else str(value)
    return str(value)  # nan and inf are TOML's own words


def toml_file(document: dict[str, Any]) -> bytes:
    lines = (f"{toml(str(key))} = {toml(item)}\n" for key, item in document.items() if item is not None)
    return "".join(lines).encode("utf-8", "surrogatepass")


def answers(read: Callable[[Path], str | None], files: Path, place: str = "") -> dict[str, str]:
    """Have one child read each file of a folder by `read`, a test module's function, in bounded memory and time.

    Args:
        place: where, beside the folder, each file is copied to before it is read.

    Returns:
        for each file's name "used", "refused: …" or what `read` told.
    """
    code = CHILD.format(module=read.__module__, name=read.__name__)
    folders = {str(Path(file).parent) for file in (__file__, inspect.getfile(read))}
    command = [sys.executable, "-c", code, str(files.absolute()), str(SECONDS), place]
    done = subprocess.run([*command, *folders], cwd=files.parent, capture_output=True, text=True, timeout=900)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and done.stderr == "", (told[-1:], done.stderr[-2000:])
    found = {name: answer for name, answer, _ in told}
    assert sorted(found) == sorted(path.name for path in files.iterdir())
    assert [item for item in found.items() if item[1].startswith("internal")] == []
    assert told[-1][2] < MEMORY, f"{told[-1][2] >> 20} MiB"
    return found
