"""The full TensorRT in a process of its own, for tests on the lean runtime: it builds engines and runs them.

    ask("build", model=…, output=…, options={…})      from the test; the rest of this file is what the other process runs

The engines are version-compatible and carry the lean runtime, unless `options` says otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LEAN = os.environ.get("TRTOPT_GPU_LEAN", "")  # "8": only tensorrt_lean is there; "10": only tensorrt_lean_bindings


def ask(do: str, *, without: tuple[str, ...] = (), library_path: bool = True, **values: Any) -> Any:
    """What the full TensorRT answers.

    Args:
        without: modules that can't be imported there.
        library_path: leave LD_LIBRARY_PATH as it is; else without the folders of the lean runtime.

    Raises:
        AssertionError: with its error, which names the class first.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRTOPT_GPU_LEAN"}
    if not library_path:
        folders = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(item for item in folders if "tensorrt_lean" not in item)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps({"do": do, "without": without, **values}, default=_plain))
        command = [sys.executable, __file__, str(asked), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert answer.is_file(), f"the full runtime ended with {done.returncode}: {done.stderr[-2000:]}"
        told = json.loads(answer.read_text())
    assert "error" not in told, told["error"]
    return told


def build(model: Any, output: Any, **options: Any) -> Any:
    """In place of `trtopt.build`, where this process has no builder."""
    told = ask("build", model=model, output=output, options={"version_compatible": True, **options})
    return SimpleNamespace(**{**told, "engine": Path(told["engine"])})


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else asdict(value)


def _build(model: str, output: str, options: dict[str, Any]) -> dict[str, Any]:
    import trtopt.builder.construction

    told = trtopt.builder.construction.build(model, output, **options)
    return {"engine": str(told.engine), "precision": dict(told.precision), "seconds": told.seconds} | {
        "precision_summary": told.precision_summary
    }


def _run(engine: str, inputs: str) -> dict[str, Any]:
    """Each array of a file through the engine's one input; its first output goes into a file beside it, under the same name."""
    import numpy as np

    from trtopt.runtime.session import Session

    with np.load(inputs) as arrays, Session(engine, backend="tensorrt", trust_host_code=True) as session:
        [given] = session.inputs
        results = {name: next(iter(session.run({given.name: arrays[name]}).values())) for name in arrays.files}
        np.savez(Path(inputs).with_suffix(".results.npz"), **results)  # type: ignore[arg-type]
        return {"backend": session.backend}


def main(asked: str, answer: str) -> None:
    request = json.loads(Path(asked).read_text())
    for module in request.pop("without"):
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        told = {"build": _build, "run": _run}[request.pop("do")](**request)
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}"}
    Path(answer).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
