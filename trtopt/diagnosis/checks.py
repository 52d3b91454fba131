"""What is looked for on a host: each check is a function of a `Host` that gives what it finds, under `@check`.

What goes wrong most on users' hosts is from the threads of TensorRT, ONNX Runtime, OpenCV and PyTorch; driver errors are
numbered as in CUDA's `cuda.h`, and which GPUs a TensorRT is for is in its support matrices.
"""

from __future__ import annotations

from trtopt.diagnosis import gpu_checks, machine_checks, package_checks
from trtopt.diagnosis.findings import LEVELS, Check, HostFinding
from trtopt.diagnosis.host import Host

CHECKS = (*package_checks.CHECKS, *gpu_checks.CHECKS, *machine_checks.CHECKS)


def findings(host: Host) -> tuple[HostFinding, ...]:
    """What all checks find, errors first. A check that fails itself is told of, and the others go on."""
    host_findings: list[HostFinding] = []
    for check in CHECKS:
        host_findings += _findings_of(check, host)
    return tuple(sorted(host_findings, key=lambda finding: LEVELS.index(finding.level)))


def _findings_of(check: Check, host: Host) -> list[HostFinding]:
    try:
        return list(check(host))
    except Exception as error:  # on a host that nobody thought of
        fact = f"the check {getattr(check, '__name__', check)} failed: {type(error).__name__}: {error}"
        consequence = "what it looks for isn't known here; please report this"
        return [HostFinding("check-failed", "warning", fact, consequence, "trtopt version --json")]
