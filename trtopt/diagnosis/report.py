"""doctor(): what is wrong here, what comes of it, and what to type."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtopt.core.documents import plain
from trtopt.core.errors import UsageError
from trtopt.core.options import taking
from trtopt.diagnosis.checks import findings
from trtopt.diagnosis.findings import LEVELS, HostFinding
from trtopt.diagnosis.host import examine, facts
from trtopt.diagnosis.lines import command_lines, wrapped
from trtopt.diagnosis.migration import Migration, migrated
from trtopt.diagnosis.request import DoctorRequest
from trtopt.diagnosis.subjects import examine_file

FORMAT = "trtopt.doctor/1"
_ENVIRONMENT = f"{sys.prefix}{os.sep}"  # is told once; places in it are relative to it, for people


@dataclass(frozen=True)
class DoctorReport:
    """What `doctor` found.

    Attributes:
        facts: what there is, name → text; of the host, then of the file.
        findings: what is wrong or worth knowing, errors first.
        migration: of `migrate=`; then the host wasn't looked at.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[HostFinding, ...] = ()
    migration: Migration | None = None

    @property
    def ok(self) -> bool:
        """Nothing is wrong: no errors, no warnings; nothing that TensorRT dropped or trtopt lacks."""
        wrong = any(finding.level != "info" for finding in self.findings)
        return not wrong and (self.migration is None or self.migration.ok)

    def to_json(self) -> dict[str, Any]:
        facts = {name.strip(): text for name, text in self.facts.items()}
        migration = None if self.migration is None else {**plain(self.migration), "ok": self.migration.ok}
        return {
            "format": FORMAT,
            "ok": self.ok,
            "facts": facts,
            "findings": plain(self.findings),
            "migration": migration,
        }

    @property
    def lines(self) -> Iterator[str]:
        """For a terminal of 80 columns; commands are broken where a shell takes them so."""
        if self.migration is not None:
            yield from self.migration.lines
            return
        for name, text in self.facts.items():
            indent = 16 if len(name) < 16 else 4
            yield from wrapped(f"{name:<15} {text.replace(_ENVIRONMENT, '')}", indent)
        for finding in self.findings:
            yield ""
            yield from wrapped(f"{finding.level}: {finding.fact}")
            yield from wrapped(finding.consequence, start=4)
            yield from command_lines(finding.command)
        counts = {level: sum(finding.level == level for finding in self.findings) for level in LEVELS}
        yield ""
        if not self.findings:
            yield "nothing is wrong"
        else:
            many = [f"{count} {level}{'s' * (count != 1 and level != 'info')}" for level, count in counts.items()]
            yield ", ".join(many)

    def __str__(self) -> str:
        return "\n".join(self.lines)


@taking(DoctorRequest)
def doctor(request: DoctorRequest) -> DoctorReport:
    """Look for what is wrong with this host, and with a plan or a model on it.

    Nothing native runs in this process, and PyTorch isn't imported; nothing is changed.

    Args:
        subject: a plan or an ONNX file: it is held against this host, a plan before it is deserialized.
        migrate: look at this instead: the path of a shell script, or a trtexec command line. It isn't
            run: what of it TensorRT 10 and 11 no longer have is named, with what trtopt has for it.

    Raises:
        UsageError: a file that doesn't exist, a command that is not trtexec's, or both arguments.
    """
    if request.migrate is not None:
        if request.subject is not None:
            raise UsageError(
                f"`migrate=` looks at a script or a command alone, not at {request.subject} too: leave one of them out; a "
                "command is one text, in quotes"
            )
        return DoctorReport(migration=migrated(request.migrate))
    subject = None if request.subject is None else Path(request.subject)
    host = examine(None if subject is None else subject.absolute().parent)
    all_facts, all_findings = dict(facts(host)), list(findings(host))
    if subject is not None:
        file_facts, file_findings = examine_file(subject, host)
        all_facts |= file_facts
        all_findings = [*file_findings, *all_findings]
    return DoctorReport(all_facts, tuple(sorted(all_findings, key=lambda finding: LEVELS.index(finding.level))))
