"""The arguments of a run of an engine, and the options that engines are opened with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from trtopt.core import shared_options as shared
from trtopt.core.errors import UsageError
from trtopt.core.operators import load
from trtopt.core.options import FOLDER, about, fitting, option
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import choice, parse_size

BACKENDS = ("auto", "tensorrt", "lean", "rtx", "onnxruntime")


@dataclass(frozen=True)
class RunRequest:
    """The arguments of `trtopt.run`, which describes them."""

    engine: str | os.PathLike[str] = field(
        metadata=about(help="A TensorRT plan, or (onnxruntime) an ONNX file.", metavar="M.engine")
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
    limit: int | None = option(None, help="Use the first samples or images, at most so many.", least=1)
    classes: str | os.PathLike[str] | Sequence[str] | None = shared.classes()
    output_kind: Mapping[str, str] | Sequence[str] = shared.output_kind()
    output: str | os.PathLike[str] | None = option(
        None, help="Write NAME.npy, of images also predictions.json.", metavar="DIR", short="-o", writes=FOLDER
    )
    top: int = option(5, help="How many of the best classes to show.", least=1)
    backend: str = option("auto", help="auto, tensorrt, lean, rtx; onnxruntime: the kept graph, on the CPU.")
    device: int = shared.gpu()
    trust: bool = shared.trust()
    trust_host_code: bool = shared.trust_host_code()
    plugins: Sequence[str] | str = shared.plugins()
    operators: Sequence[str] | str = shared.operators()
    reporter: Reporter = SILENT


def opening_options(request: Any) -> dict[str, Any]:
    """Return what of a request `Session` opens the engine with."""
    names = ("device", "backend", "trust", "trust_host_code", "plugins", "operators")
    return {name: getattr(request, name) for name in names if hasattr(request, name)}


@dataclass(frozen=True)
class OpeningOptions:
    """The options of `Session`, which describes them; UsageError where one can't be right."""

    device: int
    devices: str | Sequence[int] | None
    backend: str
    contexts: int = field(metadata=about(least=1))
    queue: int = field(metadata=about(least=1))
    graphs: int = field(metadata=about(least=0))
    memory: str | int | None
    trust: bool
    trust_host_code: bool
    weights: str | os.PathLike[str] | None
    calib: str | os.PathLike[str] | None
    threads: int | None
    plugins: Sequence[str] | str = ()
    operators: Sequence[str] | str = ()
    require: str | None = None

    def __post_init__(self) -> None:
        choice(self.backend, BACKENDS, "`backend=`")
        if self.require is not None:
            choice(self.require, ("certified",), "`require=`")
        fitting(self)
        load(self)
        if self.threads is not None and (self.backend != "onnxruntime" or self.threads < 1):
            raise UsageError(
                f"threads is {self.threads!r}; a number of at least 1 is needed, with backend='onnxruntime'"
            )
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"memory is {self.memory!r}; at least 1 byte is needed, or None for what there is")
        if self.calib is not None and self.weights is None:
            raise UsageError("`calib=` has the scales for other weights: give the model as `weights=`, or drop it")

    @property
    def limit(self) -> int | None:
        """Bytes of GPU memory at the most."""
        return None if self.memory is None else parse_size(self.memory, "memory")
