"""Which of NVIDIA's Triton containers reads a plan.

A plan is read by the very TensorRT that made it, down to the build number ("expecting library version 8.6.1.2 got 8.6.1.6"),
unless it was built to be version-compatible. NVIDIA publishes the TensorRT of each container in its release notes; only rows
that were read there, or in what NVIDIA's or users' threads quote from a container itself, stand here.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trtopt.core.files import opened_regular
from trtopt.core.temporary import is_scratch
from trtopt.trt.compatibility import PlanOrigin, unread
from trtopt.trt.plans import PlanHeader, plan_header

IMAGE = "nvcr.io/nvidia/tritonserver"
MATRIX = "https://docs.nvidia.com/deeplearning/frameworks/support-matrix/index.html"
_NOTES = "https://github.com/triton-inference-server/server/blob/{}/docs/introduction/release_notes.md"


class Container(NamedTuple):
    """A container's tag, its TensorRT, and where that is said."""

    tag: str
    tensorrt: str
    source: str

    @property
    def image(self) -> str:
        return f"{IMAGE}:{self.tag}"


CONTAINERS = (  # the newest with each TensorRT
    Container("23.05-py3", "8.6.1.2", "https://github.com/NVIDIA/TensorRT/issues/3071"),
    Container("24.04-py3", "8.6.3.1", "https://github.com/triton-inference-server/server/issues/7221"),
    Container("24.10-py3", "10.5.0.18", _NOTES.format("r24.10")),
    Container("25.01-py3", "10.8.0.43", _NOTES.format("r25.01")),
)


def container_for(header: PlanHeader | None, *, version_compatible: bool = False) -> tuple[Container | None, str]:
    """The newest container known to read a plan, and a sentence on it; None where none is known to.

    Args:
        version_compatible: the plan was built so, and carries the lean runtime: later versions read it, too.
    """
    if header is None or header.product != "TensorRT":
        maker = "what made it isn't known" if header is None else f"{header.product} made it"
        return None, f"no container's TensorRT reads this plan: {maker}; serve it with `backend='python'`"
    origin = PlanOrigin(header.product, header.version, version_compatible, version_compatible)
    for container in reversed(CONTAINERS):
        if not unread(origin, container.tensorrt):
            return container, f"{container.image} has TensorRT {container.tensorrt} ({container.source})"
    return None, (
        f"which container has {header} isn't known here; NVIDIA lists them: {MATRIX}. A plan needs the very same version, to "
        "the build number, unless it was built with `version_compatible=True`"
    )


def docker_line(repo: Path, addresses: Sequence[str]) -> tuple[str, str]:
    """Return the line that serves a repository in NVIDIA's container, and what its words stand for."""
    image = f"{IMAGE}:YY.MM-py3"
    for plan in repo.glob("*/[0-9]*/model.plan"):
        with opened_regular(plan) as file:
            container, _ = container_for(plan_header(file.read(64)))
        image = container.image if container else image
    ports = " ".join(f"-p {address}:{inside}" for address, inside in zip(addresses, (8000, 8001, 8002)))
    volume = shlex.quote(f"{Path('REPO') if is_scratch(repo) else repo.resolve()}:/models:ro")
    line = f"docker run --rm --gpus all {ports} -v {volume} {image} tritonserver --model-repository=/models"
    return line, (
        "YY.MM is a release of the container, REPO what `trtopt deploy triton` wrote; the Python backend needs a container in "
        "whose Python trtopt is installed. Or name the executable: `server=`"
    )
