"""The arguments of a calibration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from trtopt.core import shared_options as shared
from trtopt.core.options import option
from trtopt.core.progress import SILENT, Reporter

if TYPE_CHECKING:
    from onnx import ModelProto

    from trtopt.calibration.table import Table


@dataclass(frozen=True)
class CalibrateRequest:
    """The arguments of `trtopt.calibrate`, which describes them."""

    model: str | os.PathLike[str] | ModelProto = field(metadata=shared.MODEL)
    output: str | os.PathLike[str] | None = shared.written(
        help="The table to write (*.calib.json).", short="-o", needed=True, group="Usual"
    )
    _: KW_ONLY
    images: Any = shared.images()
    data: Any = shared.data()
    method: str = shared.method()
    limit: int | None = shared.limit()
    preprocess: Any = shared.preprocess(beside=f"{shared.SAMPLES}, or `import_cache='OLD.cache'`")
    batch: int = shared.batch(group="Input")
    calib: str | os.PathLike[str] | Table | None = shared.table(help="Choose again from an earlier table; no data.")
    import_cache: str | os.PathLike[str] | None = option(
        None, help="Take the scales of a TensorRT 7 to 10 cache; no data.", metavar="OLD.cache"
    )
    missing: str = option(
        "error",
        help="What an imported cache lacks: error, or float (stays out of INT8).",
        beside="`import_cache='OLD.cache'`",
    )
    allow_unusual_data: bool = shared.allow_unusual_data()
    precision_override: Sequence[str] = shared.precision_override(group="Calibration")
    repair: bool = option(False, help="Round weights so that outputs keep most; kept where it helps.")
    all_tensors: bool = option(
        False, help="Every tensor: tune may put more in INT8 (8.6), or scales beside the graph (10)."
    )
    threads: int | None = shared.threads(beside=shared.SAMPLES, group="Run")
    device: str = option("cpu", help="cpu, or cuda: run the model on the GPU (onnxruntime-gpu).", beside=shared.SAMPLES)
    cache: bool = option(True, help="Reuse an earlier pass over the same data.")
    export_cache: str | os.PathLike[str] | None = shared.written(
        help="Write a cache for TensorRT 8.6 and 10 too.", metavar="OUT.cache", group="Output"
    )
    operators: Sequence[str] | str = shared.operators(group="Custom operators")
    reporter: Reporter = SILENT
