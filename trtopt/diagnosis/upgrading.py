"""One model's engines of several TensorRTs side by side: `upgrade`, and the files that `certify` keeps for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from trtopt.certification.relations import MODEL
from trtopt.core.documents import Damaged, Plain, converted, plain, read_json
from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file, write_bytes
from trtopt.core.options import taking
from trtopt.diagnosis.report import rendered
from trtopt.diagnosis.request import UpgradeRequest
from trtopt.engine.manifest import REASONS, Manifest, described_spec, manifest_of
from trtopt.evaluation.limits import share_of
from trtopt.evaluation.measures import decibels
from trtopt.evaluation.timing import Times
from trtopt.trt.capabilities import Capabilities, refusals

WRONG, SLOWER, LARGER, PRECISION, TIMES = "wrong", "slower", "larger", "precision", "times"
_SHARE = 0.01  # of the arithmetic: less is no change
_COLUMNS = ("", "TensorRT", "GPU", "right", "dB to the model", "GPU ms", "plan MiB", "scratch MiB", "runs", "build s")


@dataclass(frozen=True)
class _Trial:
    name: str
    output: str
    worst_db: float | Literal["inf", "-inf", "nan"]
    limit_db: float | Literal["inf", "-inf"]


@dataclass(frozen=True)
class _Verdict:
    ok: bool
    on_gpu: bool
    samples: Annotated[int, Meta(ge=1)]
    relations: list[_Trial]
    failed: list[_Trial]


@dataclass(frozen=True)
class Certified:
    """An engine as `certify` has kept it.

    Attributes:
        manifest: the engine's; certificate: what was found.
        times: at the shapes that each profile is tuned for; none without a GPU.
        capabilities: of the TensorRT that made it, where it was there.
    """

    manifest: Mapping[str, Any]
    certificate: _Verdict
    times: list[Times]
    format: Literal["trtopt.certified/1"]  # `FORMAT` of certification/certificate.py
    capabilities: Capabilities | None = None

    @functools.cached_property
    def known(self) -> Manifest:
        """The engine's manifest; Damaged where it can't be one."""
        return manifest_of(self.manifest)

    def cells(self) -> tuple[str, ...]:
        """Return its row of the table."""
        found, verdict = self.known, self.certificate
        model = [float(item.worst_db) for item in verdict.relations if item.name == MODEL]
        right = "yes" if verdict.ok else f"NO: {verdict.failed[0].name}"
        return (
            str(found.origin),
            str(found.generation.get("gpu") or "none"),
            right + " (its graph)" * (not verdict.on_gpu),
            f"{min(model):.1f}" if model else "-",
            ", ".join(f"{item.gpu_ms:.4g}" for item in self.times) or "-",
            f"{found.plan['bytes'] / 2**20:.1f}",
            "-" if found.scratch is None else f"{found.scratch / 2**20:.1f}",
            REASONS.split(found.precision_summary)[0],
            f"{found.seconds:.1f}",
        )


@dataclass(frozen=True)
class Change(Plain):
    """A difference of an engine from the first one.

    Attributes:
        engine: its file's name.
        kind: "wrong", "slower", "larger", "precision", "times": they can't be compared, or "option": what the first one was
            built with and this TensorRT hasn't.
        share: how much more, where that is a number.
        gate: `fail_on` asks that it isn't so.
    """

    engine: str
    kind: str
    text: str
    share: float | None = None
    gate: bool = False


@dataclass(frozen=True)
class Upgrade:
    """The result of `upgrade`: a row for each engine, and what changes from the first one to the others."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    changes: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing of what `fail_on` names is found."""
        return not any(item.gate for item in self.changes)

    def describe(self) -> dict[str, Any]:
        return {**plain(self), "ok": self.ok}

    def lines(self) -> list[str]:
        return [f"{'FAILS: ' * item.gate}{item.engine}: {item.text}" for item in self.changes]


@taking(UpgradeRequest)
def upgrade(request: UpgradeRequest) -> Upgrade:
    """Compare engines of one model that several TensorRTs have made: what a move from one to another changes.

        trtopt certify net.onnx net.engine --data samples.npz --save net-8.6.results     # in each environment
        trtopt upgrade net-8.6.results net-10.6.results --fail-on wrong,slower=5%

    Args:
        results: what `certify(save=)` wrote: the old one's first.
        fail_on: what makes `ok` False, of any later one: "wrong", "slower=5%" (GPU time of any profile, or one that can't be
            compared), "larger=5%" (plan or scratch memory), "precision" (less of the arithmetic in the precision asked for).
        output: an HTML page with the table; it takes jinja2.

    Raises:
        MissingDependency: jinja2 isn't installed.
        UsageError: fewer than two files, one that isn't certify's, engines of different models, an unknown gate.
    """
    listed = [request.results] if isinstance(request.results, (str, os.PathLike)) else request.results
    given = [Path(item) for item in listed]
    if len(given) < 2:
        raise UsageError("a comparison takes two files or more of trtopt certify `save=F.results`, the old one's first")
    gates = dict(map(_gate, request.fail_on))
    engines = [_read(path) for path in given]
    sources = [item.known.source for item in engines]
    if odd := next((source for source in sources if source["sha256"] != sources[0]["sha256"]), None):
        raise UsageError(
            f"the engines are of different models: {sources[0]['path']} and {odd['path']} differ in content"
        )
    changes = [
        Change(path.name, kind, text, share, _gated(gates, kind, share))
        for path, engine in zip(given[1:], engines[1:])
        for kind, text, share in _changes(given[0].name, engines[0], engine)
    ]
    rows = tuple((path.name, *item.cells()) for path, item in zip(given, engines))
    result = Upgrade(_COLUMNS, rows, tuple(changes))
    if request.output is not None:
        table = {"engine": f"{len(rows)} engines of one model", "columns": result.columns, "cells": rows}
        page = rendered("table.html", {**table, "name": "Engines", "chart": None, "commands": result.lines()})
        write_bytes(request.output, page.encode())
    return result


def _gate(text: str) -> tuple[str, float]:
    kind, _, share = text.strip().partition("=")
    least = share_of(share) if share else 0.0
    if kind not in (WRONG, SLOWER, LARGER, PRECISION) or not least >= 0 or (share and kind in (WRONG, PRECISION)):
        raise UsageError(f"`fail_on=` has {text!r}; of wrong, slower=5%, larger=5% and precision it may have any")
    return kind, least


def _gated(gates: Mapping[str, float], kind: str, share: float | None) -> bool:
    """Tell if a gate closes; that of times does, too, where they can't be compared."""
    kind = SLOWER if kind == TIMES else kind
    return kind in gates and (share is None or share > gates[kind])


def _read(path: Path) -> Certified:
    try:
        content = read_json(existing_file(path, "the results"))
        found = converted(content, Certified)
        assert found.known  # read here, where a damaged one is told
    except Damaged as error:
        raise UsageError(f"{path} isn't what trtopt certify `save=` writes ({error}): make it again") from None
    return found


def _changes(first: str, old: Certified, new: Certified) -> Iterator[tuple[str, str, float | None]]:
    """Yield what is other in `new` than in `old`, which is called `first`: kind, words, and by how much."""
    was, now = old.known, new.known
    for item in new.certificate.failed[:3]:
        where = f"{item.output}: {decibels(float(item.worst_db))}, {decibels(float(item.limit_db))} wanted"
        yield WRONG, f"isn't right: {item.name} ({where})", None
    if was.generation.get("gpu") != now.generation.get("gpu") or not (old.times and new.times):
        missing = "one of them wasn't timed" if not (old.times and new.times) else "they were timed on different GPUs"
        yield TIMES, f"times aren't compared: {missing}", None
    else:
        before = {str(each.shapes): each.gpu_ms for each in old.times}
        for timed in new.times:
            ms = before.get(str(timed.shapes))
            shapes = ", ".join(f"{name} {shape}" for name, shape in timed.shapes.items())
            if ms is None:
                yield TIMES, f"times aren't compared at {shapes}, at which {first} wasn't timed", None
            elif timed.gpu_ms != ms:
                ratio = f"{timed.gpu_ms / ms:.2f} times {first}'s time ({timed.gpu_ms:.4g}, {ms:.4g} ms)"
                yield SLOWER, f"at {shapes} it takes {ratio}", timed.gpu_ms / ms - 1
    for what, then, size in (("plan", was.plan["bytes"], now.plan["bytes"]), ("scratch", was.scratch, now.scratch)):
        if then and size and then != size:
            yield LARGER, f"its {what} has {size / 2**20:.1f} MiB, {first}'s {then / 2**20:.1f}", size / then - 1
    for names in (("int8", "fp8"), ("int8", "fp8", "fp16", "bf16")):
        share, then = (sum(item.coverage.get(name, 0.0) for name in names) for item in (now, was))
        if then - share > _SHARE:
            said = " or ".join(name.upper() for name in names)
            yield PRECISION, f"{share:.1%} of the arithmetic runs in {said}, {first}'s {then:.1%}", None
    if new.capabilities is not None:
        spec = described_spec(was.spec)
        for text in refusals(spec, new.capabilities, str(now.origin), None):
            yield "option", f"{first} was asked for what isn't there: {text}", None
