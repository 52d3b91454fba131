"""Requests of `inspect` and of the store's commands."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field

from trtopt.core import shared_options as shared
from trtopt.core.options import about, option


@dataclass(frozen=True)
class InspectRequest:
    """The arguments of `trtopt.inspect`, which describes them."""

    engine: str | os.PathLike[str] = field(
        metadata=about(help="A TensorRT plan, or its manifest.", metavar="MODEL.engine")
    )
    _: KW_ONLY
    diff: str | os.PathLike[str] | None = option(
        None, help="Say what differs from this engine, or manifest.", metavar="OTHER.engine"
    )
    layers: bool = option(False, help="List the layers: precision, formats, tactic, ONNX nodes.")


@dataclass(frozen=True)
class VersionRequest:
    """The arguments of `trtopt.version`, which describes them."""

    _: KW_ONLY
    plugins: bool = option(False, help="List each TensorRT's plugins: name, version, namespace and fields.")


@dataclass(frozen=True)
class StoreRequest:
    """The arguments of `trtopt.list_store`, which describes them."""

    _: KW_ONLY
    store: str | os.PathLike[str] | None = shared.store()


@dataclass(frozen=True)
class PruneStoreRequest(StoreRequest):
    """The arguments of `trtopt.prune_store`, which describes them."""

    _: KW_ONLY
    max_size: str | int | None = option(
        None, help="What may stay; default: $TRTOPT_STORE_MAX_SIZE, or 20GiB; 0: nothing.", metavar="20GB"
    )
