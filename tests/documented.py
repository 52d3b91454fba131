"""Commands as the pages have them: in blocks, fenced or indented, in running text and in tables; and what is wrong with one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from trtopt import cli

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "models", "calibration", "scripts", "benchmarks")
WENT = "docs/decisions/001-what-went.md"  # names what there is no more
PAGES = sorted(
    {
        path.relative_to(ROOT).as_posix()
        for path in (*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md")))
    }
    - {WENT}
)
_ENDS = ("||", "|", ">", ">>", "2>", "&")  # of a command in a line of the shell
_PLACEHOLDERS = {"N", "X"}  # that stand for a number


def application() -> Any:
    return typer.main.get_command(cli.app)


def options() -> set[str]:
    """Those of all commands."""
    found, left = {"--help", "--install-completion", "--show-completion"}, [application()]
    while left:
        command = left.pop()
        left += getattr(command, "commands", {}).values()
        found |= {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
    return found


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def spans(text: str) -> list[str]:
    """What stands in backticks in running text and in tables, each on one line."""
    running = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", running) if span.strip()]


def typed(text: str) -> Iterator[str]:
    """Each `trtopt …` of blocks: what is to be typed as it stands."""
    for block in re.findall(r"^(?:```\w[^\n]*\n.*?^```$|(?:(?: {4,}|\t)[^\n]*\n)+)", text, re.S | re.M):
        for part in re.split(r" && |; |\n", block.replace("\\\n", " ")):
            yield from re.findall(r"^\s*(?:\$ |[A-Z_]+=\S* )*(trtopt .*)", part)


def commands(text: str) -> Iterator[str]:
    """Those, and what running text and tables have: `trtopt …`, `COMMAND --option …`."""
    yield from typed(text)
    names = set(application().commands)
    for span in spans(text):
        for part in re.split(r" && |; ", span.replace("\\|", "|")):
            words = part.split() or [""]
            if words[0] == "trtopt" and len(words) > 1 and "COMMAND" not in words:  # which stands for any
                yield part
            elif words[0] in names and any(word.startswith("--") for word in words):
                yield f"trtopt {part}"


def parse(command: str) -> None:
    """Parse a command as the command line does; nothing is run.

    Raises:
        Exception: of the parser: an unknown command or option, a value of another type, or an argument that is missing.
    """
    words = shlex.split(command, comments=True)[1:]
    words = words[: next((index for index, word in enumerate(words) if word in _ENDS), None)]
    found: Any = application()
    while hasattr(found, "commands"):
        name, *words = [word for word in words if word not in ("-v", "-q")]  # which may stand anywhere
        if name.startswith("-"):
            words = [name, *words]
            break
        found = found.commands[name]
        words = [word for word in words if word not in ("--help", "-h")]  # which ends the parsing, and the process
    else:
        found.make_context(name, words)
        return
    unknown = [word for word in words if word not in options()]
    assert not unknown, f"no option of trtopt: {unknown[0]}"


def complaint(command: str) -> str:
    """What is wrong with a command that may be a part of one: what stands in it has to exist. Empty: nothing."""
    plain = re.sub(r"[\[\]]|…", " ", command)
    plain = " ".join("1" if word in _PLACEHOLDERS else word for word in plain.split(" "))
    try:
        parse(plain)
    except Exception as error:
        partial = type(error).__name__ == "MissingParameter" or "requires an argument" in str(error)
        return "" if partial else f"{command}: {error}"
    return ""
