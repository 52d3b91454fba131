"""Faults to be found: packages, libraries and drivers that are made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trtopt

ROOT = Path(trtopt.__file__).parent.parent
DRIVER = """
#include <string.h>
#define DEVICES %(devices)d
int cuInit(int flags) { return %(error)d; }
int cuDriverGetVersion(int *version) { *version = %(version)d; return 0; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Made-up GPU", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 16ul << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? %(sm)d / 10 : %(sm)d %% 10; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "made up"; return 0; }
"""


def package(site: Path, name: str, version: str, *requires: str) -> None:
    """Metadata of a package, as pip leaves it."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {x}" for x in requires),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def module(site: Path, name: str, code: str) -> None:
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(code)


def library(path: Path, code: str) -> Path:
    """A native library of this code."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=code, text=True, check=True)
    return path


def nvidia_driver(
    folder: Path,
    *,
    error: int = 0,
    cuda: tuple[int, int] = (13, 0),
    sm: int = 89,
    devices: int = 1,
    name: str = "580.65.06",
) -> Path:
    """A folder for LD_LIBRARY_PATH whose libcuda says this."""
    version = 1000 * cuda[0] + 10 * cuda[1]
    library(folder / f"libcuda.so.{name}", DRIVER % {"error": error, "version": version, "sm": sm, "devices": devices})
    (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{name}")
    return folder


def diagnose(*arguments: Any, site: Path | None = None, cwd: Path | None = None, **environment: str) -> dict[str, Any]:
    """What the command says as JSON, in a process of its own, with `site` before all other packages."""
    places = [*([str(site)] if site else []), str(ROOT)]
    variables = {
        name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "OMP_NUM_THREADS")
    }
    variables |= {"PYTHONPATH": os.pathsep.join(places), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "trtopt", "doctor", *map(str, arguments), "--json"],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1), done.stderr
    return report


def commands(report: dict[str, Any]) -> dict[str, str]:
    """Code → command of what was found."""
    return {item["code"]: item["command"] for item in report["findings"]}
