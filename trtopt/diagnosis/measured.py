"""What other commands measured of an engine, as `report` takes it: their JSON, recognised by its content."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from trtopt.core.documents import Damaged, Rule, converted, read_json
from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file
from trtopt.core.progress import Duration
from trtopt.runtime import timing
from trtopt.runtime.session import MemoryReport

Figure = float | Literal["inf", "-inf", "nan"]
Spread = Annotated[Mapping[str, float], timing.Spread]
Stage = Annotated[Mapping[str, Any], Duration]


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
    rows: Annotated[Sequence[BenchedRow], Rule("at most 2000 rows", lambda rows: len(rows) <= 2000)]
    memory: Annotated[Mapping[str, Any], MemoryReport]
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


def _is_there(channels: Channels) -> bool:
    lowest, values = channels["lowest"], channels["snr_db"]
    return lowest is None or (0 <= lowest < len(values) and values[lowest] is not None)


class _Parted(TypedDict, total=False):
    channels: Annotated[Channels, Rule("a lowest that is one of the channels", _is_there)] | None


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
        strangers: of which engine something says it is, where that is neither this one nor the one beside it.
    """

    profile: Profiled | None = None
    sensitivity: Sensitive | None = None
    bench: Benched | None = None
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
    "verify": (frozenset({"outputs", "snr_db", "samples"}), Compared),
}
_MAKING = "trtopt COMMAND … --json > F.json"
COMMANDS = "profile, sensitivity, bench, build, tune, pipeline or verify"


def measurements(results: Sequence[Any], engine: Path, other: Path | None) -> tuple[Measured, Measured]:
    """What results say of `engine`, and of `other`; of two results of one kind the later counts.

    Args:
        results: files with the JSON of commands, mappings of it, or results of the functions (with `to_json` or `describe`).

    Raises:
        UsageError: one of them isn't there, can't be read, or is nothing that a command here prints.
    """
    ours, theirs = Measured(), Measured()
    for result in results:
        what, command, content = _recognised(result, _PROOFS, f"{COMMANDS}: make such a file by {_MAKING}")
        engine_name = str((content["build"] if command == "pipeline" else content).get("engine", ""))
        place = ours
        if engine_name:
            home = _home(Path(engine_name), [engine] if other is None else [engine, other])
            if home is None:
                ours.strangers.append(f"{what} is of {Path(engine_name).name}, taken for {engine.name}")
            place = theirs if home == 1 else ours
        _keep(place, command, content)
    return ours, theirs


def profiled(result: Any) -> Profiled:
    """What `profile` gives, or its JSON.

    Args: as one of the results of `measurements`.

    Raises:
        UsageError: it is something else, or can't be read.
    """
    content: Profiled = _recognised(
        result, ("profile",), "profile: make it by trtopt profile ENGINE --json > F.json, on a GPU"
    )[2]
    return content


def _recognised(result: Any, commands: Iterable[str], alternatives: str) -> tuple[str, str, Any]:
    """What a result is called in messages, which of these commands gave it, and its content.

    Args:
        alternatives: what is named to the user where none of them did.
    """
    what, content = _content(result)
    command = next((name for name in commands if _PROOFS[name][0] <= set(content)), None)
    if command is None:
        raise UsageError(f"{what} isn't the JSON of {alternatives}")
    try:
        return what, command, converted(content, _PROOFS[command][1], what)
    except Damaged as error:
        raise UsageError(f"{what} isn't what {command} prints: {error}; run it again") from None


def _home(path: Path, engines: Sequence[Path]) -> int | None:
    """Which of the engines is meant: the one at that place, else the first of that name."""
    same_place = [number for number, engine in enumerate(engines) if engine.absolute() == path.absolute()]
    same_name = [number for number, engine in enumerate(engines) if engine.name == path.name]
    return next(iter([*same_place, *same_name]), None)


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
