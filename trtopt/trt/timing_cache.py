"""Timing caches: what builds measured of kernels, in files that several of them share."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from trtopt.core.errors import OutputError
from trtopt.core.files import whole, write_bytes
from trtopt.core.locks import alone


def attach(config: Any, path: Path, warn: list[str]) -> None:
    """Give `config` the cache in `path`, or an empty one (with a warning) where it can't be used."""
    cache, content = _read(config, path)
    if cache is None or not config.set_timing_cache(cache, False):
        if content:
            warn.append(f"the timing cache {path} is another TensorRT's or another GPU's: it is ignored and replaced")
        config.set_timing_cache(config.create_timing_cache(b""), False)


def save(config: Any, path: Path) -> None:
    """Write the cache back, together with what another build wrote there meanwhile."""
    if (cache := config.get_timing_cache()) is None:
        return
    with alone(path.with_name(f".{path.name}.lock")):  # else of two that end at once one's timings are lost
        other, content = _read(config, path)
        if content and other is not None:
            cache.combine(other, False)  # a cache of another GPU is refused here and replaced
        write_bytes(path, memoryview(cache.serialize()).cast("B"))


def _read(config: Any, path: Path) -> tuple[Any, bytes]:
    """The cache in a file, None where it is none, and the file's content, empty where there is no file."""
    content = b""
    try:
        with contextlib.suppress(FileNotFoundError):
            content = whole(path, None)
        return config.create_timing_cache(content), content
    except (TypeError, RuntimeError):  # how pybind11 says that the native side gave nothing
        return None, content
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"can't read the timing cache {path}: {reason}; give another `timing_cache=`") from error
