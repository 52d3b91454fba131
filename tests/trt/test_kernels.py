"""Plugins compiled from kernels, by an nvcc that is played: what it is asked, what is kept, and what is refused."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

import trtopt
from trtopt.core import operators
from trtopt.core.errors import BuildFailed, MissingDependency, UsageError
from trtopt.core.operators import Operator, known, load_reference
from trtopt.trt import kernels

pytestmark = pytest.mark.usefixtures("no_operators")
NVCC = """#!/bin/sh
printf '%s\\n' "$@" >>"$NVCC_LOG"
while [ "$1" != -o ]; do
  case "$1" in *.cu) cp "$1" "$NVCC_LOG.cu"; cp "$(dirname "$1")/description.h" "$NVCC_LOG.h";; esac
  shift
done
if [ -n "$NVCC_FAULT" ]; then echo "$NVCC_FAULT" >&2; exit 1; fi
echo library >"$2"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A played nvcc, headers of TensorRT 10, and an empty cache."""
    compiler, include = tmp_path / "bin" / "nvcc", tmp_path / "include"
    compiler.parent.mkdir()
    compiler.write_text(NVCC)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    include.mkdir()
    (include / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 10\n#define NV_TENSORRT_MINOR 6\n")
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(kernels.HEADERS, str(include))
    monkeypatch.setenv("NVCC_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "log"


@pytest.fixture
def swishy(tmp_path: Path) -> Operator:
    (tmp_path / "swishy").mkdir()
    result = trtopt.init("operator", name="acme::Swishy", output=tmp_path / "swishy" / "Swishy.py")
    assert sorted(path.name for path in result.recipe.parent.iterdir()) == ["Swishy.cu", "Swishy.py", "test_Swishy.py"]
    assert result.commands == (f"pytest {tmp_path / 'swishy' / 'test_Swishy.py'}",)
    load_reference(result.recipe)
    found = known("acme", "Swishy")
    assert found is not None
    return found


def _compiled(operator: Operator, version: str = "10.6.0", capability: int = 90) -> Path:
    return kernels.library(operator, version, capability)


def test_a_library_is_compiled_once_and_again_when_anything_changes(log: Path, swishy: Operator) -> None:
    first = _compiled(swishy)
    assert first.name.startswith("libSwishy-trt10-sm90-") and first.read_text() == "library\n"
    asked = log.read_text().splitlines()
    assert "-arch=sm_90" in asked and "-shared" in asked
    assert '#include "v3.h"' in log.with_name("log.cu").read_text()
    described = log.with_name("log.h").read_text()
    assert 'kNAME = "Swishy"' in described and "kINPUTS = 2, kOUTPUTS = 1" in described
    assert "kTYPES[] = {0, 1}" in described and '{"scale", false, {1.0}}' in described
    assert _compiled(swishy) == first and log.read_text().splitlines() == asked
    assert swishy.kernel is not None
    moved = Path(shutil.copytree(swishy.kernel.parent, log.with_name("moved"))) / swishy.kernel.name
    assert _compiled(replace(swishy, kernel=moved)) == first, (
        "one library, or a process would have two plugins of a name"
    )
    moved.with_name("helper.cuh").write_text("// included")
    assert _compiled(replace(swishy, kernel=moved)) != first
    swishy.kernel.write_text(swishy.kernel.read_text() + "\n")
    assert len({first, _compiled(swishy), _compiled(swishy, capability=89), _compiled(swishy, "10.7.0")}) == 4


def test_trt8_gets_the_older_plugin(log: Path, swishy: Operator, tmp_path: Path) -> None:
    with pytest.raises(
        MissingDependency, match=r"headers of TensorRT 8.6.0, and \$TENSORRT_INCLUDE is .*TensorRT at v8.6.0"
    ):
        _compiled(swishy, "8.6.0")
    (tmp_path / "include" / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 8\n")
    _compiled(swishy, "8.6.0")
    assert '#include "v2.h"' in log.with_name("log.cu").read_text()


def test_what_is_missing_is_told(log: Path, swishy: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_FAULT", 'swishy.cu(3): error: identifier "what" is undefined')
    with pytest.raises(
        BuildFailed, match=r"nvcc can't compile .*Swishy.cu for 10.6.0: swishy.cu\(3\): error: identifier"
    ):
        _compiled(swishy)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    monkeypatch.setattr(kernels, "_packages", lambda: iter(()))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        with pytest.raises(MissingDependency, match=r"nvcc.*pip install nvidia-cuda-nvcc.*plugins=\['LIB.so'\]"):
            _compiled(swishy)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda *xs: xs, r"takes \*xs; a plugin's inputs and attributes are fixed"),
        (lambda x, *, mode: x, "has the attribute mode; a plugin's has a default"),
        (lambda x, *, mode="fast": x, "has the attribute mode='fast'; a plugin's has a default, a number"),
    ],
)
def test_functions_that_no_plugin_can_be_made_of(log: Path, tmp_path: Path, function: object, message: str) -> None:
    (tmp_path / "f.cu").write_text("")
    operator = Operator("acme::F", function, kernel=tmp_path / "f.cu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        _compiled(operator)


def test_types_and_lists_are_described(log: Path, tmp_path: Path) -> None:
    (tmp_path / "f.cu").write_text("")

    def f(x: object, places: object, y: object, *, sizes: object = (2, 3), share: object = 0.5) -> None: ...

    operator = Operator("F", f, None, ("", "int64"), ("fp16", "bf16"), (1,), "", tmp_path / "f.cu")
    text, old = kernels._description(operator, False), kernels._description(operator, True)
    assert "kINPUTS = 3, kOUTPUTS = 2" in text and "kFP32_INPUTS[] = {false, true, false}" in text
    assert "kTYPES[] = {1, 7}" in text and "kOUTPUT_TYPES[] = {-1, 8}" in text
    assert '{"sizes", true, {2.0, 3.0}}, {"share", false, {0.5}}' in text
    assert "kTYPES[] = {1}" in old and "kOUTPUT_TYPES[] = {-1, 3}" in old  # 8.6 has neither BF16 nor INT64


def test_a_project_is_not_written_over(tmp_path: Path) -> None:
    trtopt.init("operator", name="acme::Swishy", output=tmp_path / "Swishy.py")
    with pytest.raises(UsageError, match=r"Swishy.py is there already.*force=True"):
        trtopt.init("operator", name="acme::Swishy", output=tmp_path / "Swishy.py")
    trtopt.init("operator", name="acme::Swishy", output=tmp_path / "Swishy.py", force=True)
    for name in ("Swishy", "acme::", "a b::C", "acme::9", "acme::class"):
        with pytest.raises(UsageError, match="write domain::Operator"):
            trtopt.init("operator", name=name, output=tmp_path / "other.py")
    with pytest.raises(UsageError, match="Gelu is an operator of ONNX's own"):
        trtopt.init("operator", name="acme::Gelu", output=tmp_path / "other.py")
    with pytest.raises(UsageError, match=r"has to end in \.py"):
        trtopt.init("operator", name="acme::Other", output=tmp_path / "other.txt")
    with pytest.raises(UsageError, match="takes both words"):
        trtopt.init("operator")
    assert not [*tmp_path.glob("other*")] and operators.plugins() == ()
