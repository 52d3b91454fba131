"""Results of other commands, as `report` takes them: the newest of each lies beside the engine (`keep`), with the SHA-256 of
the plan that it is of."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from trtopt.core.documents import Damaged, checked, plain, read_json
from trtopt.core.errors import TrtoptError, UsageError
from trtopt.core.files import sha256_file, write_json
from trtopt.core.progress import Reporter
from trtopt.engine.manifest import Manifest, load_manifest
from trtopt.engine.reports import EngineReport
from trtopt.evaluation.verify import engine_file
from trtopt.graph.io import load_model

BESIDE, DIGEST = ".results.json", "engine_sha256"
_FORMAT = "trtopt.results/1"


class _Top(TypedDict):
    top1: float


class Compared(TypedDict):
    """Results of `verify`, as a manifest or a state file has them."""

    samples: int
    snr_db: float | Literal["inf", "-inf", "nan"]
    top1_agreement: float | None
    reference_accuracy: _Top | None
    candidate_accuracy: _Top | None
    outputs: dict[str, dict[str, Any]]


class _Candidate(TypedDict):
    precision: str
    times: list[dict[str, Any]]
    accuracy: Compared | None


class _Comparison(TypedDict, total=False):
    best: bool
    limits: dict[str, float | None]
    candidates: list[_Candidate]
    kept: str


class _Kept(TypedDict):
    format: Literal["trtopt.results/1"]
    engine: str
    sha256: str
    results: dict[str, dict[str, Any]]


_PROOFS = {  # command → keys that only its result has together
    "profile": {"batches", "engine", "gpu"},
    "sensitivity": {"sources", "predicted_snr_db"},
    "bench": {"rows", "memory", "engine"},
    "build": {"tuning", "engine", "precision_summary"},
    "pipeline": {"build", "agreement"},
    "run": {"milliseconds", "backend", "engine"},
    "verify": {"outputs", "snr_db", "samples"},
}


@dataclass
class Subject:
    """An engine, and all that was measured of it; of `accuracy`, `verify`'s, what `missed` the limits."""

    plan: Path
    engine: EngineReport
    manifest: Manifest
    candidates: Mapping[str, Any]  # the comparison of precisions
    profile: Any = None
    sensitivity: Any = None
    bench: Any = None
    run: Any = None
    tuning: Any = None
    accuracy: Any = None
    missed: Sequence[str] = ()


def measured(plan: Path, engine: EngineReport, manifest: Manifest, results: Sequence[Any]) -> Subject:
    """Gather what was measured of an engine: what lies beside it, if it is of this very plan, and what functions gave."""
    subject, kept = Subject(plan, engine, manifest, comparison_of(manifest)), _kept(plan)
    same = kept["sha256"] == manifest.plan["sha256"]  # which was held against the file
    found = [(command, item["result"]) for command, item in kept["results"].items() if same]
    for result in results:
        content: Mapping[str, Any] = getattr(result, "to_json", getattr(result, "describe", dict))()
        command = next((name for name, keys in _PROOFS.items() if keys <= content.keys()), "")
        name = str((content["build"] if command == "pipeline" else content).get("engine", plan))
        if not command or Path(name).name != plan.name:
            raise UsageError(
                f"results are what {', '.join(_PROOFS)} gave of {plan.name}, not "
                f"{type(result).__name__}{f' of {name}' * bool(command)}"
            )
        found.append((command, content))
    for command, content in found:
        if command in ("build", "tune", "pipeline"):
            built = content["build"] if command == "pipeline" else content
            subject.tuning = built["tuning"] or subject.tuning
        if command in ("verify", "pipeline"):
            subject.accuracy = (content if command == "verify" else content["agreement"]) or subject.accuracy
            subject.missed = content.get("missed") or ()
        elif command not in ("build", "tune"):
            setattr(subject, command, content)
    return subject


def comparison_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return what a manifest says of the precisions that were compared; none where it can't be read, as of another version."""
    said = plain(dict(manifest.comparison or {}))
    with contextlib.suppress(Damaged, KeyError):
        checked(said, _Comparison)
        if any(item["precision"] == said["kept"] for item in said["candidates"]):
            return dict(said)
    return {"candidates": [], "kept": None}


def keep(
    result: Any, command: str, content: Mapping[str, Any], asked: Mapping[str, Any], reporter: Reporter
) -> dict[str, str]:
    """Write what a command measured, and what it was asked, beside the engine; of a model, beside its quantized engines there.

    What is there of other commands stays, if it is of the same plan; a file that isn't trtopt's stays as it is. Return what
    tells whose the result is, besides the name.
    """
    digests = {}
    own = {name: value for name, value in content.items() if command != "run" or name in _RUN}
    given = {name: str(value) for name, value in asked.items() if value not in (None, (), False)}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for engine in filter(engine_file, [result.engine] if hasattr(result, "engine") else _made_of(asked["model"])):
        place = Path(f"{engine}{BESIDE}")
        try:
            kept, digests[DIGEST] = _kept(engine), sha256_file(engine)
            if not kept["sha256"] and os.path.lexists(place):
                raise UsageError("a file that isn't trtopt's has that name")
            others = kept["results"] if kept["sha256"] == digests[DIGEST] else {}
            results = {**others, command: {"date": now, "options": given, "result": own}}
            head = {"format": _FORMAT, "engine": Path(engine).name, "sha256": digests[DIGEST]}
            write_json(place, {**head, "results": results})
        except (OSError, TrtoptError) as error:
            reporter.note(f"{place} isn't written, so that report won't know of this: {error}")
    return digests if hasattr(result, "engine") else {}


_RUN = ("engine", "backend", "milliseconds", "timing")  # of `run`'s result, without each sample


def _made_of(model: str | os.PathLike[str]) -> Iterator[Path]:
    """Find the quantized engines of a model that lie beside it."""
    fingerprint = load_model(model, lazy=True).fingerprint
    for path in sorted(Path(model).parent.glob("*.json")):
        with contextlib.suppress(TrtoptError, OSError):
            manifest = load_manifest(path.with_suffix("")) if engine_file(path.with_suffix("")) else None
            if manifest is not None and manifest.calibration and manifest.source["sha256"] == fingerprint:
                yield path.with_suffix("")


def _kept(engine: str | os.PathLike[str]) -> _Kept:
    """Read what lies beside the engine; nothing of no plan, where that isn't trtopt's."""
    try:
        return checked(read_json(f"{os.fspath(engine)}{BESIDE}"), _Kept)
    except Damaged:
        return {"format": "trtopt.results/1", "engine": "", "sha256": "", "results": {}}
