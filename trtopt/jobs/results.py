"""What became of a job list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trtopt.core.documents import converted
from trtopt.jobs.joblist import Job

STATES = ("pending", "running", "done", "failed")


@dataclass(frozen=True)
class JobResult:
    """One job.

    Attributes:
        state: one of `STATES`; after a run "done" or "failed".
        output: the table; of a failed job, where it would have been.
        error: of a failed one, "type" and "message".
        digest: `Table.digest`.
        samples: that the table was made from.
        tensors: how many thresholds each method gave.
        shards: how many pieces its samples were cut into.
        notes: what the user should know about the data.
        seconds: from its first task to its last, beside others.
        cached: an earlier run had finished it.
    """

    name: str
    state: Literal["pending", "running", "done", "failed"]
    model: str = ""
    data: str = ""
    method: str = ""
    output: str = ""
    error: Mapping[str, str] | None = None
    digest: str | None = None
    samples: int = 0
    tensors: Mapping[str, int] = field(default_factory=dict)
    shards: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    cached: bool = False

    @classmethod
    def of(cls, job: Job, record: Mapping[str, Any], *, cached: bool = False) -> JobResult:
        """As recorded of a job of the list."""
        own = {"name": job.name, "model": str(job.model), "data": job.data.name, "method": job.method}
        return cls.recorded({**record, **own, "table": str(job.output)}, cached=cached)

    @classmethod
    def recorded(cls, record: Mapping[str, Any], *, cached: bool = False) -> JobResult:
        """As `to_json` gave it; Damaged: it didn't."""
        return replace(converted({**record, "output": record.get("table", "")}, cls), cached=cached)

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self) | {"notes": list(self.notes)}
        return {"table" if name == "output" else name: value for name, value in plain.items()}

    @property
    def outcome(self) -> str:
        """In a few words: the thresholds, or the error."""
        if self.state in ("pending", "running"):
            return ""
        if self.error is not None:
            return f"{self.error['type']}: {self.error['message']}"
        taken = ", ".join(f"{count} {name}" for name, count in sorted(self.tensors.items()))
        return f"{sum(self.tensors.values())} tensors ({taken}) from {self.samples} samples"

    def __str__(self) -> str:
        return f"{self.name}: {self.state}: {self.outcome}"


@dataclass(frozen=True)
class JobsResult:
    """All jobs, in the list's order.

    Attributes:
        state: the folder that holds what is done.
        observed: shards that this run measured.
        reused: shards that an earlier run had measured.
    """

    jobs: tuple[JobResult, ...]
    state: Path
    observed: int
    reused: int
    seconds: float

    @property
    def ok(self) -> bool:
        return all(job.state == "done" for job in self.jobs)

    @property
    def _counts(self) -> Counter[str]:
        return Counter(job.state for job in self.jobs)

    @property
    def summary(self) -> str:
        """How many jobs are in which state."""
        counts = self._counts
        return f"{len(self.jobs)} jobs: " + ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "jobs": [job.to_json() for job in self.jobs],
            "states": {state: self._counts[state] for state in STATES},
            "shards": {"observed": self.observed, "reused": self.reused},
            "state": str(self.state),
            "seconds": round(self.seconds, 3),
        }
