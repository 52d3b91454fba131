"""What checks find, and how each module has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trtopt.diagnosis.host import Host

LEVELS = ("error", "warning", "info")


@dataclass(frozen=True)
class HostFinding:
    """Something that `doctor` found.

    Attributes:
        code: stable name, for scripts.
        level: "error": something doesn't work; "warning": it works, but worse or by chance; "info": worth knowing.
        fact: what is there.
        consequence: what comes of it.
        command: what to type.
    """

    code: str
    level: str
    fact: str
    consequence: str
    command: str


Check = Callable[[Host], Iterator[HostFinding]]


def registering(checks: list[Check]) -> Callable[[Check], Check]:
    """A decorator that adds a function to these checks."""

    def added(function: Check) -> Check:
        checks.append(function)
        return function

    return added
