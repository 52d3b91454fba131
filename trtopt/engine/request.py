"""What looking after an engine store is asked for."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass

from trtopt.core import shared_options as shared
from trtopt.core.options import option
from trtopt.core.progress import SILENT, Reporter


@dataclass(frozen=True)
class StoreRequest:
    """The arguments of `trtopt.list_store` and `trtopt.verify_store`, which describe them."""

    _: KW_ONLY
    store: str | os.PathLike[str] | None = shared.store()
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class PruneStoreRequest(StoreRequest):
    """The arguments of `trtopt.prune_store`, which describes them."""

    _: KW_ONLY
    max_size: str | int | None = option(
        None, help="What may stay; default: $TRTOPT_STORE_MAX_SIZE, or 20GiB; 0: nothing.", metavar="20GB", typed=str
    )
