"""Request of a check."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from trtopt.core import shared_options as shared
from trtopt.core.options import option
from trtopt.core.progress import SILENT, Reporter

if TYPE_CHECKING:
    from onnx import ModelProto

    from trtopt.core.values import GivenProfile


@dataclass(frozen=True)
class CheckRequest:
    """The arguments of `trtopt.check`, which describes them."""

    model: str | os.PathLike[str] | ModelProto = field(metadata=shared.MODEL)
    _: KW_ONLY
    fix: str | os.PathLike[str] | None = shared.written(help="Write the folded, cleaned model.", metavar="OUT")
    set: Sequence[str] | str = option(
        (),
        help="Decide an input: its value (sr=16000), or its sizes and their names (x:batchx576); repeatable. --fix writes it.",
        metavar="NAME=VALUE|NAME:SHAPE",
    )
    outputs: Sequence[str] | str = option(
        (),
        help="End the model at these tensors, such as those before an NMS; --fix writes it.",
        metavar="TENSOR[,TENSOR]",
    )
    backend: str = shared.backend()
    target: str | Iterable[str] = shared.target()
    shapes: Sequence[str] | str | GivenProfile | Sequence[GivenProfile] = shared.shapes()
    images: Any = shared.images()
    data: Any = shared.data()
    preprocess: Any = shared.preprocess(beside=shared.SAMPLES)
    limit: int | None = shared.limit()
    nodes: bool = option(False, help="List the nodes and what --int8 makes of each, by the names of overrides.")
    plugins: Sequence[str] | str = shared.plugins()
    operators: Sequence[str] | str = shared.operators()
    reporter: Reporter = SILENT
