"""The request of `pipeline`: a recipe's run through every stage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from trtopt.core import shared_options as shared
from trtopt.core.options import FOLDER, about, option
from trtopt.core.progress import SILENT, Reporter


@dataclass(frozen=True)
class PipelineRequest:
    """The arguments of `trtopt.pipeline`."""

    recipe: str | os.PathLike[str] = field(metadata=about(help="A model recipe: its name, or a file.", typed=str))
    output: str | os.PathLike[str] = field(
        metadata=about(help="Folder for everything it makes.", short="-o", writes=FOLDER)
    )
    _: KW_ONLY
    precision: str | None = option(None, help="int8, fp8, fp16, bf16 or fp32; default: the recipe's, else int8.")
    images: str | os.PathLike[str] | None = shared.images(help="Folder of real images, instead of the recipe's.")
    data: str | os.PathLike[str] | None = shared.data(
        help="Arrays instead of the recipe's, as the model takes them: one per input name."
    )
    method: str = shared.method()
    target: Sequence[str] | str = shared.target()
    backend: str = shared.backend()
    plugins: Sequence[str] | str = shared.plugins()
    operators: Sequence[str] | str = shared.operators()
    certify: bool = option(False, help="Hold the engine against itself and the model, as trtopt certify does.")
    report: str | os.PathLike[str] | None = shared.report()
    log: str | os.PathLike[str] | None = shared.log()
    reporter: Reporter = SILENT
