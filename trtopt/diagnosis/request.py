"""What a diagnosis is asked for."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from trtopt.core.options import option


@dataclass(frozen=True)
class DoctorRequest:
    """The arguments of `trtopt.doctor`, which describes them."""

    subject: str | os.PathLike[str] | None = option(
        None,
        help="A plan or an ONNX file to look at, too.",
        metavar="M.onnx|M.engine",
        typed=Path,
        positional=True,
    )
    _: KW_ONLY
    migrate: str | None = option(
        None,
        help="Instead of the host: what of a script, or of a trtexec or polygraphy command in quotes, TensorRT 10 and 11 "
        "don't have, and trtopt's way.",
        metavar="SCRIPT|COMMAND",
        typed=str,
    )
