"""Request of `certify`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from trtopt.core import shared_options as shared
from trtopt.core.options import FOLDER, about, option
from trtopt.core.progress import SILENT, Reporter

if TYPE_CHECKING:
    from onnx import ModelProto

    from trtopt.evaluation.agreement import Runner

SAMPLES = 32


@dataclass(frozen=True)
class CertifyRequest:
    """The arguments of `trtopt.certify`, which describes them."""

    model: str | os.PathLike[str] | ModelProto = field(metadata=shared.MODEL)
    engine: str | os.PathLike[str] | ModelProto | Runner = field(
        metadata=about(help="A TensorRT plan; or a graph, for ONNX Runtime.", metavar="M.engine", adds_to=(".json",))
    )
    _: KW_ONLY
    images: Any = shared.images()
    data: Any = shared.data()
    preprocess: Any = shared.preprocess(beside=shared.SAMPLES)
    limit: int = option(SAMPLES, help="Use at most so many samples.", least=1)
    batch: Sequence[int] = option(
        (), help="Batches to try; default: each profile's, and two between.", metavar="N[,N]", typed=str, least=1
    )
    min_snr: float | None = option(
        None, help="Least dB to the model; default: from the noise of its own graph.", metavar="DB"
    )
    locate: bool = option(
        False, help="Find the first tensor at which what fails does so, by builds with tensors as outputs."
    )
    bundle: str | os.PathLike[str] | None = option(
        None,
        help="Write what a report of what fails needs: a small graph, inputs, a script for TensorRT alone.",
        metavar="DIR",
        writes=FOLDER,
    )
    save: str | os.PathLike[str] | None = shared.written(
        help="Keep verdict, times and what the engine is, for trtopt upgrade.", metavar="F.results"
    )
    rebuild: bool = option(False, help="Build the engine's graph once more, and compare.")
    threads: int | None = shared.threads()
    plugins: Sequence[str] | str = shared.plugins()
    operators: Sequence[str] | str = shared.operators()
    reporter: Reporter = SILENT
