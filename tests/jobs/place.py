"""What workers are asked in test_gpus.py: they import this, not the test."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from trtopt.builder.request import BuildRequest


def seen() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def crash() -> None:
    os._exit(3)


def built(request: BuildRequest) -> dict[str, Any]:
    """As `build_engine`; writes down which GPU it had, and from when to when."""
    started = time.monotonic()
    time.sleep(0.2)
    path = Path(request.output)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{seen()} {request.device} {started} {time.monotonic()}")
    return {"cached": False, "precision_summary": "", "targets": [], "sha256": "", "notes": [], "peak": 0}
