"""What a run of an engine is asked for."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from trtopt.core import shared_options as shared
from trtopt.core.options import FOLDER, about, option
from trtopt.core.progress import SILENT, Reporter


@dataclass(frozen=True)
class RunRequest:
    """The arguments of `trtopt.run`, which describes them."""

    engine: str | os.PathLike[str] = field(
        metadata=about(help="A TensorRT plan, or (onnxruntime) an ONNX file.", metavar="M.engine", typed=Path)
    )
    _: KW_ONLY
    input: Any = option(
        None,
        help="Arrays, in an .npz by input name; repeatable.",
        metavar="[NAME=]x.npy|x.npz",
        typed=list[str],
    )
    images: Any = option(None, help="Images, prepared as at calibration.", metavar="DIR|FILE…", typed=list[Path])
    preprocess: Any = shared.preprocess()
    output: str | os.PathLike[str] | None = option(
        None, help="Write NAME.npy, or predictions.json.", metavar="DIR", typed=Path, short="-o", writes=FOLDER
    )
    top: int = option(5, help="How many of the best classes to show.", least=1)
    backend: str = option("auto", help="auto, tensorrt, lean, rtx; onnxruntime: the kept graph, on the CPU.")
    device: int = shared.gpu()
    trust: bool = shared.trust()
    trust_host_code: bool = shared.trust_host_code()
    reporter: Reporter = SILENT


def opening_options(request: Any) -> dict[str, Any]:
    """What of a request `Session` opens the engine with."""
    names = ("device", "backend", "trust", "trust_host_code")
    return {name: getattr(request, name) for name in names}
