"""Results of other commands, as `report` takes them.

The newest of each lies beside the engine (`keep`), with the SHA-256 of the plan that it is of; others are files or mappings,
known by their content.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Union

import msgspec

from trtopt.core.documents import Damaged, plain, read_json
from trtopt.core.errors import TrtoptError, UsageError
from trtopt.core.files import existing_file, sha256_file, write_json
from trtopt.core.progress import Reporter
from trtopt.engine.manifest import Manifest, load_manifest, manifest_path, read_manifest
from trtopt.evaluation.verify import engine_file
from trtopt.graph.io import load_model

BESIDE, DIGEST = ".results.json", "engine_sha256"
_FORMAT = "trtopt.results/1"
_MAKING = "trtopt COMMAND … --json > F.json"
Figure = float | Literal["inf", "-inf", "nan"]


# The JSON that commands print, as far as it is used: a list holds items of one shape, a tuple is a choice, and "?" ends the
# name of what may be missing.
_SPREAD = {"median": float, "p90": float, "p99": float, "minimum": float}
_CHOICE = {"left_out": int, "share": float, "snr_db": Figure, "figure": str, "missed": [str]}
_TUNED = {
    "samples": int,
    "before": _CHOICE,
    "whole": _CHOICE,
    "chosen": _CHOICE,
    "front": [_CHOICE],
    "tried": int,
    "cost": str,
}
_OUTPUT = {
    "kind": str,
    "agreement": (float, None),
    "snr_db": Figure,
    "channels?": ({"snr_db": [(Figure, None)], "lowest": (int, None)}, None),
    "integers?": (bool, None),
    "samples?": ({"worst": [{"name": str, "snr_db": Figure, "agreement": (float, None)}]}, None),
}
_COMPARED = {
    "samples": int,
    "snr_db": Figure,
    "top1_agreement": (float, None),
    "reference_accuracy": ({"top1": float}, None),
    "candidate_accuracy": ({"top1": float}, None),
    "outputs": {str: _OUTPUT},
}
_PROFILED = {
    "engine": str,
    "gpu": str,
    "inputs": str,
    "batches": [
        {
            "batch": int,
            "total_ms": float,
            "gpu": _SPREAD,
            "layers": [{"name": str, "ms": float, "kind": str, "precision": (str, None), "nodes": [str]}],
        }
    ],
    "notes": [str],
}
_SENSITIVE = {
    "samples": int,
    "output": str,
    "sources": [{"nodes": [str], "snr_db": {str: Figure}}],
    "measured_snr_db": {str: Figure},
    "summary": str,
}
_ROW = {
    "runner": str,
    "batch": int,
    "gpu": (_SPREAD, None),
    "run": (_SPREAD, None),
    "throughput": (float, None),
    "note": str,
}
_BUILT = {"engine": str, "tuning": (_TUNED, None)}
_COMPARISON = {  # of a manifest: which precision was kept, and of `--best` and `tune` within which limits
    "candidates": [
        {"precision": str, "times": [{"shapes": {str: str}, "gpu_ms": float}], "accuracy": (_COMPARED, None)}
    ],
    "kept": str,
    "best?": bool,
    "limits?": ({str: (float, None)}, None),
}


def _type(shape: Any) -> Any:
    """Make a type for msgspec of a shape as above."""
    if isinstance(shape, list):
        return list[_type(shape[0])]  # type: ignore[misc]
    if isinstance(shape, tuple):
        return Union[tuple(map(_type, shape))]  # noqa: UP007
    if isinstance(shape, dict) and str in shape:
        return dict[str, _type(shape[str])]  # type: ignore[misc]
    if isinstance(shape, dict):
        fields = [(key.rstrip("?"), _type(item), *[None] * key.endswith("?")) for key, item in shape.items()]
        return msgspec.defstruct("Result", fields, kw_only=True, omit_defaults=True)
    return shape


class _KeptResult(TypedDict):
    date: str
    options: dict[str, str]
    result: dict[str, Any]


class _Kept(TypedDict):
    format: Literal["trtopt.results/1"]
    engine: str
    sha256: str
    results: dict[str, _KeptResult]


_PROOFS: Mapping[str, tuple[set[str], Any]] = {  # command → keys that only its JSON has together, and its shape
    "profile": ({"batches", "engine", "gpu"}, _type(_PROFILED)),
    "sensitivity": ({"sources", "predicted_snr_db"}, _type(_SENSITIVE)),
    "bench": (
        {"rows", "memory", "engine"},
        _type({"engine": str, "gpu": str, "inputs": str, "rows": [_ROW], "notes": [str]}),
    ),
    "build": ({"tuning", "engine", "precision_summary"}, _type(_BUILT)),
    "pipeline": ({"build", "agreement"}, _type({"build": _BUILT, "agreement": (_COMPARED, None)})),
    "run": ({"milliseconds", "backend", "engine"}, _type({"engine": str, "backend": str, "timing": str})),
    "verify": ({"outputs", "snr_db", "samples"}, _type(_COMPARED)),
}
Compared = _type(_COMPARED)
_COMPARISONS = _type(_COMPARISON)


@dataclass
class Results:
    """All that was measured of one engine.

    Attributes:
        accuracy: `verify`'s, of the graph or the engine against FP32.   missed: what of it is outside the limits.
        strangers: what was left out, as it is of another engine; or says of none.
    """

    profile: Any = None
    sensitivity: Any = None
    bench: Any = None
    run: Any = None
    tuning: Any = None
    accuracy: Any = None
    missed: Sequence[str] = ()
    strangers: list[str] = field(default_factory=list)

    def take(self, command: str, content: Mapping[str, Any]) -> None:
        """Add a result."""
        if command in ("build", "pipeline"):
            built = content["build"] if command == "pipeline" else content
            self.tuning = built["tuning"] or self.tuning
        if command in ("verify", "pipeline"):
            self.accuracy = (content if command == "verify" else content["agreement"]) or self.accuracy
            missed = content.get("missed")
            self.missed = [item for item in missed if isinstance(item, str)] if isinstance(missed, list) else []
        elif command != "build":
            setattr(self, command, content)


def measurements(results: Sequence[Any], engine: Path, other: Path | None) -> tuple[Results, Results]:
    """Sort results by the engine that they are of, `engine` or `other`; of two results of one kind the later counts, and any
    after those that lie beside the engine.

    Args:
        results: files with the JSON of commands, mappings of it, or results of the functions (with `to_json` or `describe`).

    Raises:
        UsageError: one of them isn't there, can't be read, or is nothing that a command here prints.
    """
    ours, theirs = Results(), Results()
    engines = {path: _digest(path) for path in (engine, other) if path is not None}
    beside = [f"{path}{BESIDE}" for path, digest in engines.items() if _kept(path)["sha256"] == digest]
    for what, found in (item for result in [*beside, *results] for item in _each(result)):
        command = _recognised(what, found)
        origin = found["build"] if command == "pipeline" else found
        name, digest = str(origin.get("engine", "")), str(found.get(DIGEST, ""))
        home = _home(Path(name), digest, engines) if name else engine
        if home is not None:
            (ours if home == engine else theirs).take(command, found)
        if not name and command == "verify":
            ours.strangers.append(f"{what} says of no engine that it is of it, taken for {engine.name}")
        elif home is None:
            of = f"{Path(name).name}{f' (sha256 {digest[:12]}…)' * bool(digest)}"
            ours.strangers.append(f"{what} is of {of}, not of this engine, and was left out")
    return ours, theirs


def comparison_of(manifest: Manifest | None) -> Any:
    """Return what a manifest says of the precisions that were compared; None where it can't be read, as of another version."""
    if manifest is None or manifest.comparison is None:
        return None
    said = plain(dict(manifest.comparison))
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.convert(said, _COMPARISONS)
        if any(item["precision"] == said["kept"] for item in said["candidates"]):
            return said
    return None


def keep(
    result: Any, command: str, content: Mapping[str, Any], asked: Mapping[str, Any], reporter: Reporter
) -> dict[str, str]:
    """Write what a command measured, and what it was asked, beside the engine; where that can't be, a note says so.

    What is there of other commands stays, if it is of the same plan; a file that isn't trtopt's stays as it is. Of a model, the
    engines are meant that lie beside it and are quantized.

    Returns: what tells whose the result is, besides the name.
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
        return msgspec.convert(read_json(f"{os.fspath(engine)}{BESIDE}"), _Kept)
    except (Damaged, msgspec.ValidationError):
        return {"format": "trtopt.results/1", "engine": "", "sha256": "", "results": {}}


def _each(result: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and content of the results in a file that lies beside an engine, each with whose it is; or of a single one."""
    what, content = _content(result)
    if content.get("format") != _FORMAT:
        return [(what, content)]
    try:
        kept = msgspec.convert(content, _Kept)
    except msgspec.ValidationError as error:
        raise UsageError(f"{what} is damaged: {error}; remove it") from None
    whose = {"engine": kept["engine"], DIGEST: kept["sha256"]}
    return [(what, {**item["result"], **whose}) for item in kept["results"].values()]


def _digest(engine: Path) -> str:
    """The plan's SHA-256; where the manifest lies alone, the one that it says."""
    return sha256_file(engine) if engine.is_file() else str(read_manifest(manifest_path(engine)).plan["sha256"])


def _recognised(what: str, content: Mapping[str, Any]) -> str:
    """Tell which command gave a result that messages call `what`."""
    command = next((name for name, (keys, _) in _PROOFS.items() if keys <= set(content)), None)
    if command is None:
        names = "profile, sensitivity, bench, build, tune, pipeline or verify"
        raise UsageError(f"{what} isn't the JSON of {names}: make such a file by {_MAKING}")
    try:
        msgspec.convert(dict(content), _PROOFS[command][1])
    except msgspec.ValidationError as error:
        raise UsageError(f"{what} isn't what {command} prints: {error}; run it again") from None
    return command


def _home(path: Path, digest: str, engines: Mapping[Path, str]) -> Path | None:
    """Tell which engine is meant: the one of that digest; where none is said, the one at that place, else of that name."""
    if digest:
        return next((engine for engine in engines if engines[engine] == digest), None)
    same_place = [engine for engine in engines if engine.absolute() == path.absolute()]
    return next(iter([*same_place, *(engine for engine in engines if engine.name == path.name)]), None)


def _content(result: Any) -> tuple[str, Mapping[str, Any]]:
    """A result's name in messages, and its JSON."""
    name = next((name for name in ("to_json", "describe") if hasattr(result, name)), "")
    result = getattr(result, name)() if name else result
    if not isinstance(result, (str, os.PathLike)):
        return "a result", result if isinstance(result, Mapping) else {}
    path = existing_file(result, "the result")
    try:
        content = read_json(path)
    except Damaged as error:
        raise UsageError(f"{path} can't be read: {error}; make such a file by {_MAKING}") from None
    return path.name, content if isinstance(content, Mapping) else {}
