"""What other commands measured of an engine, as `report` takes it: their JSON, recognised by its content.

The newest of each command lies beside the engine (`keep`), with the SHA-256 of the plan that it is of.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from trtopt.core.documents import Damaged, Name, checked, one_of, read_json
from trtopt.core.errors import TrtoptError, UsageError
from trtopt.core.files import existing_file, sha256_file, write_json
from trtopt.core.progress import Duration, Reporter
from trtopt.engine.manifest import load_manifest, manifest_path, read_manifest
from trtopt.evaluation.verify import engine_file
from trtopt.graph.io import load_model
from trtopt.runtime import timing
from trtopt.runtime.session import MemoryReport

Figure = float | Literal["inf", "-inf", "nan"]
if TYPE_CHECKING:  # as plain mappings
    Spread = Mapping[str, float]
    Stage = Mapping[str, Any]
    Held = Mapping[str, Any]
else:
    Spread, Stage, Held = timing.Spread, Duration, MemoryReport


class TimedLayer(TypedDict):
    name: str
    ms: float
    kind: str
    precision: str | None
    nodes: Sequence[str]


class TimedBatch(TypedDict):
    batch: int
    total_ms: float
    gpu: Spread
    layers: Sequence[TimedLayer]


class Profiled(TypedDict):
    engine: str
    gpu: str
    inputs: str
    batches: Sequence[TimedBatch]
    notes: Sequence[str]


class NoiseMade(TypedDict):
    kind: str
    name: str
    nodes: Sequence[str]
    snr_db: dict[str, Figure]
    share: float


class Sensitive(TypedDict):
    samples: int
    output: str
    sources: Sequence[NoiseMade]
    predicted_snr_db: dict[str, Figure]
    measured_snr_db: dict[str, Figure]
    summary: str


class BenchedRow(TypedDict):
    runner: str
    batch: int
    gpu: Spread | None
    host: Spread | None
    run: Spread | None
    throughput: float | None
    streams: int
    note: str


class Benched(TypedDict):
    engine: str
    gpu: str
    inputs: str
    rows: Sequence[BenchedRow]
    memory: Held
    notes: Sequence[str]


class _Choice(TypedDict):
    left_out: int
    share: float
    snr_db: Figure
    figure: str
    missed: Sequence[str]


class Choice(_Choice, total=False):
    in_fp8: int


class Tuned(TypedDict):
    samples: int
    before: Choice
    whole: Choice
    chosen: Choice
    front: Sequence[Choice]
    tried: int
    cost: str
    seconds: float
    left_out: dict[str, str]


class _Staged(TypedDict, total=False):
    durations: Sequence[Stage]


class Built(_Staged):
    engine: str
    tuning: Tuned | None


class Channels(TypedDict):
    snr_db: Sequence[Figure | None]
    lowest: int | None


class _Parted(TypedDict, total=False):
    channels: Channels | None
    integers: bool


class ComparedOutput(_Parted):
    kind: str
    agreement: float | None
    snr_db: Figure


class Top(TypedDict):
    top1: float


class _Judged(TypedDict, total=False):
    missed: Sequence[str]


class Compared(_Judged):
    samples: int
    snr_db: Figure
    top1_agreement: float | None
    reference_accuracy: Top | None
    candidate_accuracy: Top | None
    outputs: dict[str, ComparedOutput]


class Ran(TypedDict):
    engine: str
    backend: str
    milliseconds: Sequence[float]
    timing: str


class TimedShape(TypedDict):
    shapes: dict[str, str]
    gpu_ms: float


class Candidate(TypedDict):
    precision: str
    times: Sequence[TimedShape]
    accuracy: Compared | None


class Within(TypedDict, total=False):
    min_agreement: float
    min_snr: float | None


class _Chosen(TypedDict, total=False):
    best: bool
    limits: Within | None


class Compares(_Chosen):
    """Of a manifest's comparison, what a report says."""

    candidates: Sequence[Candidate]
    kept: str


class Chained(_Staged, _Judged):
    build: Built
    agreement: Compared | None


@dataclass
class Measured:
    """What is known of one engine besides its manifest.

    Attributes:
        accuracy: `verify`'s, of the graph or the engine against FP32.   missed: what of it is outside the limits.
        durations: of the stages that `build`, `tune` or `pipeline` went through.
        ran: `run`'s times.
        strangers: what was left out, as it is of another engine; or says of none.
    """

    profile: Profiled | None = None
    sensitivity: Sensitive | None = None
    bench: Benched | None = None
    run: Ran | None = None
    tuning: Tuned | None = None
    accuracy: Compared | None = None
    missed: Sequence[str] = ()
    durations: Sequence[Stage] = ()
    strangers: list[str] = field(default_factory=list)


_PROOFS: Mapping[str, tuple[frozenset[str], Any]] = {  # command → keys that only its JSON has together, and its shape
    "profile": (frozenset({"batches", "engine", "gpu"}), Profiled),
    "sensitivity": (frozenset({"sources", "predicted_snr_db"}), Sensitive),
    "bench": (frozenset({"rows", "memory", "engine"}), Benched),
    "build": (frozenset({"tuning", "engine", "precision_summary"}), Built),
    "pipeline": (frozenset({"build", "agreement"}), Chained),
    "run": (frozenset({"milliseconds", "backend", "engine"}), Ran),
    "verify": (frozenset({"outputs", "snr_db", "samples"}), Compared),
}
_MAKING = "trtopt COMMAND … --json > F.json"
COMMANDS = "profile, sensitivity, bench, build, tune, pipeline or verify"


def measurements(results: Sequence[Any], engine: Path, other: Path | None) -> tuple[Measured, Measured]:
    """What results say of `engine`, and of `other`; of two results of one kind the later counts, and any after those that lie
    beside the engine.

    Args:
        results: files with the JSON of commands, mappings of it, or results of the functions (with `to_json` or `describe`).

    Raises:
        UsageError: one of them isn't there, can't be read, or is nothing that a command here prints.
    """
    ours, theirs = Measured(), Measured()
    engines = {path: _digest(path) for path in (engine, other) if path is not None}
    beside = [f"{path}{BESIDE}" for path, digest in engines.items() if _kept(path)["sha256"] == digest]
    for what, found in chain(*map(_each, [*beside, *results])):
        command, content = _recognised(what, found, _PROOFS, f"{COMMANDS}: make such a file by {_MAKING}")
        origin = content["build"] if command == "pipeline" else content
        name, digest = str(origin.get("engine", "")), str(content.get(DIGEST, ""))
        home = _home(Path(name), digest, engines) if name else engine
        if home is not None:
            _keep(ours if home == engine else theirs, command, content)
        if not name and command == "verify":
            ours.strangers.append(f"{what} says of no engine that it is of it, taken for {engine.name}")
        elif home is None:
            of = f"{Path(name).name}{f' (sha256 {digest[:12]}…)' * bool(digest)}"
            ours.strangers.append(f"{what} is of {of}, not of this engine, and was left out")
    return ours, theirs


# Beside an engine --------------------------------------------------------------------------------------------------------

BESIDE, DIGEST = ".results.json", "engine_sha256"
_FORMAT = "trtopt.results/1"


class _KeptResult(TypedDict):
    date: str
    options: dict[str, str]
    result: dict[str, Any]


class _Kept(TypedDict):
    format: Annotated[str, one_of([_FORMAT])]
    engine: Name
    sha256: str
    results: dict[str, _KeptResult]


def keep(
    result: Any, command: str, content: Mapping[str, Any], asked: Mapping[str, Any], reporter: Reporter
) -> dict[str, str]:
    """Write what a command measured, and what it was asked, beside the engine; where that can't be, a note says so.

    What is there of other commands stays, if it is of the same plan; a file that isn't trtopt's stays as it is. Of a model, the
    engines are meant that lie beside it and are quantized.

    Returns: what tells whose the result is, besides the name.
    """
    digests = {}
    own = {name: content[name] for name in Ran.__annotations__} if command == "run" else content  # without each sample
    given = {name: str(value) for name, value in asked.items() if value not in (None, (), False)}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for engine in filter(engine_file, [result.engine] if hasattr(result, "engine") else _made_of(asked["model"])):
        place = Path(f"{engine}{BESIDE}")
        try:
            kept, digests[DIGEST] = _kept(engine), sha256_file(engine)
            if not kept["format"] and os.path.lexists(place):
                raise UsageError("a file that isn't trtopt's has that name")
            others = kept["results"] if kept["sha256"] == digests[DIGEST] else {}
            results = {**others, command: {"date": now, "options": given, "result": own}}
            head = {"format": _FORMAT, "engine": Path(engine).name, "sha256": digests[DIGEST]}
            write_json(place, {**head, "results": results})
        except (OSError, TrtoptError) as error:
            reporter.note(f"{place} isn't written, so that report won't know of this: {error}")
    return digests if hasattr(result, "engine") else {}


def _made_of(model: str | os.PathLike[str]) -> Iterator[Path]:
    """The quantized engines of a model that lie beside it."""
    fingerprint = load_model(model, lazy=True).fingerprint
    for path in sorted(Path(model).parent.glob("*.json")):
        with contextlib.suppress(TrtoptError, OSError):
            manifest = load_manifest(path.with_suffix("")) if engine_file(path.with_suffix("")) else None
            if manifest is not None and manifest.calibration and manifest.source["sha256"] == fingerprint:
                yield path.with_suffix("")


def _kept(engine: str | os.PathLike[str]) -> _Kept:
    """What lies beside the engine; nothing of no plan, where that isn't trtopt's."""
    try:
        return checked(read_json(f"{os.fspath(engine)}{BESIDE}"), _Kept)
    except Damaged:
        return {"format": "", "engine": "", "sha256": "", "results": {}}


def _each(result: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and content of the results in a file that lies beside an engine, each with whose it is; or of a single one."""
    what, content = _content(result)
    if content.get("format") != _FORMAT:
        return [(what, content)]
    try:
        whose = {"engine": checked(content, _Kept, what)["engine"], DIGEST: content["sha256"]}
        return [(what, {**item["result"], **whose}) for item in content["results"].values()]
    except Damaged as error:
        raise UsageError(f"{what} is damaged: {error}; remove it") from None


def _digest(engine: Path) -> str:
    """Of a plan, or by its manifest where that lies there alone."""
    return sha256_file(engine) if engine.is_file() else str(read_manifest(manifest_path(engine)).plan["sha256"])


# What a result is --------------------------------------------------------------------------------------------------------


def profiled(result: Any) -> Profiled:
    """What `profile` gives, or its JSON.

    Args: as one of the results of `measurements`.

    Raises:
        UsageError: it is something else, or can't be read.
    """
    how = "profile: make it by trtopt profile ENGINE --json > F.json, on a GPU"
    content: Profiled = _recognised(*_content(result), ("profile",), how)[1]
    return content


def _recognised(what: str, content: Mapping[str, Any], commands: Iterable[str], alternatives: str) -> tuple[str, Any]:
    """Which of these commands gave a result that messages call `what`, and its content.

    Args:
        alternatives: what is named to the user where none of them did.
    """
    command = next((name for name in commands if _PROOFS[name][0] <= set(content)), None)
    if command is None:
        raise UsageError(f"{what} isn't the JSON of {alternatives}")
    try:
        checked(content, _PROOFS[command][1], what)
        return command, content
    except Damaged as error:
        raise UsageError(f"{what} isn't what {command} prints: {error}; run it again") from None


def _home(path: Path, digest: str, engines: Mapping[Path, str]) -> Path | None:
    """Which of the engines is meant: the one of that digest; where none is said, the one at that place, else of that name."""
    if digest:
        return next((engine for engine in engines if engines[engine] == digest), None)
    same_place = [engine for engine in engines if engine.absolute() == path.absolute()]
    return next(iter([*same_place, *(engine for engine in engines if engine.name == path.name)]), None)


def _content(result: Any) -> tuple[str, Mapping[str, Any]]:
    """What a result is called in messages, and its JSON."""
    for name in ("to_json", "describe"):
        if hasattr(result, name):
            result = getattr(result, name)()
            break
    if isinstance(result, (str, os.PathLike)):
        path = existing_file(result, "the result")
        try:
            content = read_json(path)
        except Damaged as error:
            raise UsageError(f"{path} can't be read: {error}; make such a file by {_MAKING}") from None
        what = path.name
    else:
        content, what = result, "a result"
    return what, content if isinstance(content, Mapping) else {}


def _keep(place: Measured, command: str, content: Any) -> None:
    if command in ("build", "pipeline"):
        place.durations = content.get("durations") or place.durations
    if command == "build":
        place.tuning = content["tuning"] or place.tuning
    elif command == "pipeline":
        place.tuning = content["build"]["tuning"] or place.tuning
        place.accuracy = content["agreement"] or place.accuracy
        place.missed = content.get("missed", ())
    elif command == "verify":
        place.accuracy, place.missed = content, content.get("missed", ())
    else:
        setattr(place, command, content)
