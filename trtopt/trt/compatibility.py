"""The rules of which TensorRT runs which plan, and what they are in words; docs/lean.md has them as a table, and whence each
is known. TensorRT-RTX runs plans of its very version only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtopt.trt.facts import GENERATIONS


def numbers(version: str) -> tuple[int, ...]:
    """A version's numbers, without what follows them ("8.6.1.post1")."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@dataclass(frozen=True)
class PlanOrigin:
    """The origin of a plan.

    Attributes:
        product: "TensorRT" or "TensorRT-RTX"; version: its own, such as "10.16.1.11".
        compatible: it was built version-compatible.
        carries: and with the lean runtime in it.
    """

    product: str
    version: str
    compatible: bool = False
    carries: bool = False

    def __str__(self) -> str:
        return f"{self.product} {self.version}"


def unread(origin: PlanOrigin, here: str, *, lean: bool = False) -> str:
    """Say why version `here` of a plan's product (`lean`: its lean runtime) doesn't run it, and what to do; empty: it does."""
    plan, runtime = numbers(origin.version), numbers(here)
    parts = min(len(plan), len(runtime))  # 8.6.0's module says three numbers of four
    if lean and not origin.compatible:
        return "the lean runtime runs version-compatible plans only: build it with `version_compatible=True`"
    if plan[:parts] == runtime[:parts]:
        return ""
    if origin.product != "TensorRT":
        return "build it again here, or install that version"
    if not origin.compatible:
        return "build it again here, or with `version_compatible=True`, or install that version"
    if not origin.carries:
        only = f"it was built with `exclude_lean_runtime=True`, and so runs on {origin} only, full or lean"
        return f"{only}: build it without, or install that version"
    if runtime < plan:
        return f"version-compatible plans run on later versions, not on earlier ones: install {origin} or later"
    if runtime[0] in (plan[0], _after(plan[0])):
        return ""
    return f"version-compatible plans of {_short(plan)} run on {_later(plan)}: install one of these, or build it again"


def runs_on(origin: PlanOrigin) -> str:
    """Say what runs a plan, in a line."""
    if not origin.compatible:
        return str(origin)
    if not origin.carries:
        return f"{origin}, full or lean"
    return f"{origin}, {_later(numbers(origin.version))}, full or lean, if you trust it (`trust_host_code=True`)"


def reads(product: str, here: str, *, lean: bool = False) -> str:
    """Name the plans that this version of a product runs, in a line."""
    if product != "TensorRT":
        return f"plans of {here}"
    runtime = numbers(here)
    facts = next(facts for facts in GENERATIONS.values() if facts.first[:1] == runtime[:1])
    first = GENERATIONS[facts.before].first if facts.before else facts.first
    oldest, latest = _short((*first, 0)), _short(runtime)
    own, those = ("version-compatible plans", "those") if lean else ("plans", "version-compatible ones")
    older = "" if latest == oldest else f"; {those} of {oldest} to {latest} that carry the lean runtime"
    return f"{own} of {here}{older}"


def _short(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version[:2]))


def _after(major: int) -> int:
    """Return the major version whose runtimes take compatible plans of this one, too; 0: none is known."""
    return {GENERATIONS[row.before].first[0]: row.first[0] for row in GENERATIONS.values() if row.before}.get(major, 0)


def _later(plan: tuple[int, ...]) -> str:
    """Name the runtimes that take version-compatible plans of this version, beside itself."""
    successor = _after(plan[0])
    beyond = _after(successor)
    text = f"later {plan[0]}.x" + (f" and {successor}.x" if successor else "")
    return f"{text} (not {beyond})" if beyond else text
