"""Which of NVIDIA's Triton containers reads a plan.

A plan is read by the very TensorRT that made it, down to the build number ("expecting library version 8.6.1.2 got 8.6.1.6"),
unless it was built to be version-compatible. NVIDIA publishes the TensorRT of each container in its release notes; only rows
that were read there, or in what NVIDIA's or users' threads quote from a container itself, stand here.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtopt.trt.compatibility import PlanOrigin, unread
from trtopt.trt.plans import PlanHeader

IMAGE = "nvcr.io/nvidia/tritonserver"
MATRIX = "https://docs.nvidia.com/deeplearning/frameworks/support-matrix/index.html"
_NOTES = "https://github.com/triton-inference-server/server/blob/{}/docs/introduction/release_notes.md"


@dataclass(frozen=True)
class Container:
    """A container's tag, its TensorRT, and where that is said."""

    tag: str
    tensorrt: str
    source: str

    @property
    def image(self) -> str:
        return f"{IMAGE}:{self.tag}"


CONTAINERS = (
    Container("23.04-py3", "8.6.1.2", "https://github.com/triton-inference-server/server/issues/5812"),
    Container("23.05-py3", "8.6.1.2", "https://github.com/NVIDIA/TensorRT/issues/3071"),
    Container("24.02-py3", "8.6.3.1", "https://github.com/triton-inference-server/server/issues/7221"),
    Container("24.03-py3", "8.6.3.1", "https://github.com/triton-inference-server/server/issues/7221"),
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
