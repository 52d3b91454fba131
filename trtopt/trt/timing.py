"""TensorRT's timing cache in a file: read before a build, merged and replaced whole after it; OutputError where it can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtopt.core.errors import OutputError
from trtopt.core.files import write_bytes


def attach(config: Any, path: Path, warn: list[str]) -> None:
    """Give `config` the cache in `path`, or an empty one (with a warning) where it can't be used."""
    content = _read(path)
    if content:
        cache = _create(config, content)
        if cache is not None and config.set_timing_cache(cache, False):
            return
        warn.append(f"the timing cache {path} is another TensorRT's or another GPU's: it is ignored and replaced")
    empty = _create(config, b"")
    if empty is not None:
        config.set_timing_cache(empty, False)


def save(config: Any, path: Path) -> None:
    """Write the cache back, together with what another build wrote there meanwhile."""
    if (cache := config.get_timing_cache()) is None:
        return
    if (content := _read(path)) and (other := _create(config, content)) is not None:
        cache.combine(other, False)  # a cache of another GPU is refused here and replaced
    write_bytes(path, memoryview(cache.serialize()).cast("B"))


def _create(config: Any, content: bytes) -> Any:
    try:
        return config.create_timing_cache(content)
    except (TypeError, RuntimeError):  # how pybind11 says that the native side gave nothing
        return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"can't read the timing cache {path}: {reason}; give another `timing_cache=`") from error
