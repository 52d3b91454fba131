"""Engines' files with manifests that are made up."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from trtopt.engine.manifest import Manifest


def made(path: Path, written: bytes = b"", **changes: Any) -> Path:
    """Write a plan that is none, and its manifest, of which some values are given."""
    path.write_bytes(written or b"vtrt" + path.name.encode() + bytes(200))
    size, digest = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    values: dict[str, Any] = {
        "generation": {"family": "rtx", "product": "TensorRT-RTX", "version": "1.7.1.116", "gpu": None},
        "targets": ["sm89"],
        "spec": {"precision": "int8", "workspace": 1 << 30},
        "precision": {"int8": 1, "fp16": 0, "fp32": 0, "total": 1},
        "precision_summary": "as asked",
        **dict.fromkeys(("layers", "kept", "inputs", "outputs", "profiles"), ()),
        "source": {"path": "somewhere/net.onnx", "sha256": "5" * 64},
        "plan": {"sha256": digest, "bytes": size},
        "key": "k",
        "seconds": 1.5,
        "trtopt": "0",
    }
    Manifest(**{**values, **changes}).save(path)
    return path
