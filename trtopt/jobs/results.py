"""The results of a job list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trtopt.core.documents import AnyText, Count, Duration, Name, converted, plain
from trtopt.core.words import counted
from trtopt.jobs.joblist import BuildJob, Job

STATES = ("pending", "running", "done", "failed")
_OF_CALIBRATIONS = ("method", "digest", "samples", "tensors", "shards")
_OF_BUILDS = ("precision", "precision_summary", "targets", "resource")


@dataclass(frozen=True)
class JobResult:
    """One job.

    Attributes:
        state: one of `STATES`; after a run "done" or "failed".
        output: the table or the engine; of a failed job, where it would have been.
        error: of a failed one, "type" and "message".
        digest, samples, tensors, shards: of a table: `Table.digest`, the number of samples, how many thresholds each method
            gave, and how many pieces the samples were cut into.
        seconds: from its first task to its last, beside others.
        cached: an earlier run had finished it; an engine was up to date.
        precision, precision_summary: of an engine: as the list asks for it, and what its layers run in, in a line.
        targets: compute capabilities that an engine is for; none: the GPU that built it.
        resource: of the Ray node that was to build it.
    """

    name: Name
    state: Literal["pending", "running", "done", "failed"]
    model: AnyText = ""
    data: AnyText = ""
    method: AnyText = ""
    output: AnyText = ""
    error: Mapping[str, AnyText] | None = None
    digest: Name | None = None
    samples: Count = 0
    tensors: Mapping[Name, Count] = field(default_factory=dict)
    shards: Count = 0
    notes: tuple[Name, ...] = ()
    seconds: Duration = 0.0
    cached: bool = False
    kind: Literal["calibrate", "build"] = "calibrate"
    precision: AnyText = ""
    precision_summary: AnyText = ""
    targets: tuple[Name, ...] = ()
    resource: AnyText = ""

    @classmethod
    def of(cls, job: Job | BuildJob, record: Mapping[str, Any], *, cached: bool = False) -> JobResult:
        """Return what is recorded of a job of the list."""
        own = {"name": job.name, "model": str(job.model), "data": job.data.name if job.data else ""}
        if isinstance(job, BuildJob):
            own |= {"kind": "build", "engine": str(job.output), "precision": job.precision, "resource": job.resource}
        else:
            own |= {"kind": "calibrate", "table": str(job.output), "method": job.method}
        return cls.recorded({**record, **own}, cached=cached)

    @classmethod
    def recorded(cls, record: Mapping[str, Any], *, cached: bool = False) -> JobResult:
        """Read what `to_json` gave; Damaged: it didn't."""
        output = record.get("engine" if record.get("kind") == "build" else "table", "")
        return replace(converted({**record, "output": output}, cls), cached=cached)

    def to_json(self) -> dict[str, Any]:
        """Return what a calibration or a build is about; `output` is "table" or "engine"."""
        left_out = _OF_CALIBRATIONS if self.kind == "build" else _OF_BUILDS
        names = {"output": "engine" if self.kind == "build" else "table"}
        return {names.get(name, name): value for name, value in plain(self).items() if name not in left_out}

    @property
    def status(self) -> str:
        """The state, and whether there was anything to do."""
        if not self.cached:
            return self.state
        return f"{self.state} before" if self.kind == "calibrate" else "up to date"

    @property
    def outcome(self) -> str:
        """Say in a few words the thresholds, or the error."""
        if self.state in ("pending", "running"):
            return ""
        if self.error is not None:
            kind, message = (self.error.get(name, "") for name in ("type", "message"))  # of a state file of anything
            lines = "; ".join(" ".join(line.split()) for line in message.splitlines())
            return f"{kind}: {lines.replace(':; ', ': ')}"
        if self.kind == "build":
            return f"{self.precision_summary}; {'' if self.cached else f'{self.seconds:.1f} s; '}{self.output}"
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.tensors.items()))
        return f"{counted(sum(self.tensors.values()), 'tensor')} ({counts}) from {counted(self.samples, 'sample')}"

    def __str__(self) -> str:
        return f"{self.name}: {self.status}: {self.outcome}"


@dataclass(frozen=True)
class JobsResult:
    """All jobs, in the list's order, and the file that says what is done of them."""

    jobs: tuple[JobResult, ...]
    state: Path
    seconds: float

    @property
    def ok(self) -> bool:
        return all(job.state == "done" for job in self.jobs)

    @property
    def _counts(self) -> dict[str, int]:
        return {state: sum(job.state == state for job in self.jobs) for state in STATES}

    @property
    def summary(self) -> str:
        """Say how many jobs are in which state."""
        counts = ", ".join(f"{count} {state}" for state, count in self._counts.items() if count)
        return f"{counted(len(self.jobs), 'job')}: {counts}"

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "jobs": [job.to_json() for job in self.jobs],
            "states": self._counts,
            "state": str(self.state),
            "seconds": round(self.seconds, 3),
        }
