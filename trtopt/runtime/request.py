"""Request of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
    data: Any = option(
        None,
        help="Arrays, in an .npz by input name, or a folder of them; repeatable.",
        metavar="[NAME=]x.npy|x.npz|DIR",
        typed=list[str],
    )
    input: Any = option(None, help="Another name of --data.", metavar="[NAME=]x.npy|x.npz|DIR", typed=list[str])
    images: Any = option(None, help="Images, prepared as at calibration.", metavar="DIR|FILE…", typed=list[Path])
    preprocess: Any = shared.preprocess()
    limit: int | None = option(None, help="Use the first samples or images, at most so many.", typed=int, least=1)
    classes: str | os.PathLike[str] | Sequence[str] | None = shared.classes()
    output_kind: Mapping[str, str] | Sequence[str] = shared.output_kind()
    output: str | os.PathLike[str] | None = option(
        None,
        help="Write NAME.npy, of images also predictions.json.",
        metavar="DIR",
        typed=Path,
        short="-o",
        writes=FOLDER,
    )
    top: int = option(5, help="How many of the best classes to show.", least=1)
    backend: str = option("auto", help="auto, tensorrt, lean, rtx; onnxruntime: the kept graph, on the CPU.")
    device: int = shared.gpu()
    trust: bool = shared.trust()
    trust_host_code: bool = shared.trust_host_code()
    reporter: Reporter = SILENT


def opening_options(request: Any) -> dict[str, Any]:
    """Return the options of a request that `Session` opens the engine with."""
    names = ("device", "backend", "trust", "trust_host_code")
    return {name: getattr(request, name) for name in names}
