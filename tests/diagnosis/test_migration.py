"""Old scripts and command lines: the manual has every name that was dropped, and the commands that are given run here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trtopt
from trtopt import cli
from trtopt.core.documents import read_toml
from trtopt.core.errors import UsageError
from trtopt.diagnosis.migration import migrated

API = Path(__file__).parent.parent / "trt" / "api"
REMOVED: Any = read_toml(Path(__file__).parents[2] / "docs" / "manual" / "removed.toml")["removed"]


def names(version: str) -> set[str]:
    api = json.loads((API / f"{version}.json").read_text())
    members = {f"{owner}.{name}" for kind in ("enums", "classes") for owner, held in api[kind].items() for name in held}
    return members | set(api["functions"]) | set(api["enums"]) | set(api["classes"])


GENERATIONS = {8: names("8.6.0"), 10: names("10.16.1"), 11: names("11.4.0")}
READ_ONLY = {"IExecutionContext.active_optimization_profile"}  # from 10 on
OF_LAYERS = re.compile(
    r"I\w+Layer\.(precision|precision_is_set|reset_precision|set_output_type|reset_output_type|output_type_is_set)"
)


def test_the_names_are_those_that_tensorrt_dropped() -> None:
    for row in REMOVED:
        for name in row["names"] if "library" not in row else ():
            before = {10: 8, 11: 10}.get(row["gone"])
            assert before is None or name in GENERATIONS[before], name
            if name in READ_ONLY:
                assert row["stored"]
                continue
            assert not any(name in held for generation, held in GENERATIONS.items() if generation >= row["gone"]), name


@pytest.mark.parametrize(("before", "after"), [(8, 10), (10, 11)])
def test_no_name_that_was_dropped_is_missing(before: int, after: int) -> None:
    known = {name for row in REMOVED for name in row["names"]}
    gone = {name for name in GENERATIONS[before] - GENERATIONS[after] if not name.endswith("__init__")}
    missing = {name for name in gone if name not in known and name.split(".")[0] not in known}
    assert {name for name in missing if not OF_LAYERS.fullmatch(name)} == set()  # ILayer's stand for theirs


@pytest.mark.parametrize("name", ["old.py", "old.sh"])
def test_a_script_is_answered_by_what_to_give_instead(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{name} is a script.*grep -E .* {name} lists.*docs/manual/from-calibrators\.md"
    ):
        migrated(name)


COMMANDS = {
    "trtexec --onnx=m.onnx": ["trtopt build m.onnx -o m.engine", "trtopt bench m.engine"],
    "trtexec --onnx=m.onnx --saveEngine=e.plan --fp16 --skipInference": ["trtopt build m.onnx --fp16 -o e.plan"],
    "trtexec --onnx=m.onnx --int8 --fp16 --calib=c.cache --skipInference": [
        "trtopt build m.onnx --int8 --calib c.cache -o m.engine"
    ],
    "trtexec --onnx=m.onnx --int8 --buildOnly": [
        "trtopt build m.onnx --int8 --images DIR --preprocess PRESET -o m.engine"
    ],
    "trtexec --onnx=m.onnx --best --skipInference --device=1": [
        "trtopt build m.onnx --best --images DIR --preprocess PRESET --device 1 -o m.engine"
    ],
    "trtexec --onnx=m.onnx --minShapes=a:1x8,b:1x3 --optShapes=a:8x64,b:8x3 --maxShapes=a:32x128,b:32x3 --skipInference": [
        "trtopt build m.onnx --shapes 'a:1x8,8x64,32x128;b:1x3,8x3,32x3' -o m.engine"
    ],
    "trtexec --onnx=m.onnx --shapes='in:0':4x3 --memPoolSize=workspace:2048,dlaSRAM:1 --noTF32 --vc --refit": [
        "trtopt build m.onnx --shapes in:0:4x3 --workspace 2048MiB --no-tf32 --version-compatible --refit -o m.engine",
        "trtopt bench m.engine --batch 4",
    ],
    "trtexec --onnx=m.onnx --profile=0 --optShapes=a:1x8 --profile=1 --optShapes=a:4x8 --skipInference": [
        "trtopt build m.onnx --shapes a:1x8 --shapes a:4x8 -o m.engine"
    ],
    "X=1 /opt/trtexec --loadEngine=m.engine --iterations=50 --infStreams=2 --dumpLayerInfo": [
        "trtopt bench m.engine --iterations 50 --streams 2",
    ],
    "trtexec --onnx=m.onnx --inputIOFormats=fp16:chw --outputIOFormats=fp16:chw --sparsity=enable --stripWeights "
    "--timingCacheFile=t --builderOptimizationLevel=5 --hardwareCompatibilityLevel=ampere+ --skipInference "
    "--layerPrecisions=conv1:fp32 --precisionConstraints=obey --excludeLeanRuntime --maxAuxStreams=2": [
        (
            "trtopt build m.onnx --sparsity keep --strip --timing-cache t --optimization-level 5 "
            "--hardware-compatibility ampere_plus --precision-override conv1=fp32 --exclude-lean-runtime --max-aux-streams 2 "
            "-o m.engine"
        )
    ],
    "trtexec --onnx=m.onnx --fp16 --sparsity=force --skipInference": [
        "trtopt build m.onnx --fp16 --sparsity prune -o m.engine"
    ],
    "trtexec --onnx=m.onnx --fp16 --sparsity=disable --skipInference": ["trtopt build m.onnx --fp16 -o m.engine"],
    "trtexec --onnx=m.onnx --fp16 --int4 --skipInference": ["trtopt build m.onnx --fp16 --int4 -o m.engine"],
}  # fmt: skip


@pytest.mark.parametrize("old", COMMANDS)
def test_commands(old: str) -> None:
    assert list(migrated(old).commands) == COMMANDS[old]


@pytest.mark.parametrize("old", COMMANDS)
def test_the_commands_are_ones_that_trtopt_takes(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Called(Exception):
        pass

    def call(*_: Any, **__: Any) -> None:
        raise Called

    for name in ("build", "bench", "run", "check", "inspect", "verify", "tune"):
        monkeypatch.setattr(trtopt, name, call, raising=False)
    for command in migrated(old).commands:
        program, *words = shlex.split(command)
        result = CliRunner().invoke(cli.app, words)
        assert program == "trtopt"
        assert isinstance(result.exception, Called), result.output


def test_plugins_are_named_in_the_build() -> None:
    (build, *_) = migrated("trtexec --onnx=m.onnx --fp16 --plugins=p.so --saveEngine=m.engine").commands
    assert "--plugins p.so" in build and "--fp16" in build


def test_what_has_no_counterpart_is_said() -> None:
    old = (
        "trtexec --onnx=m.onnx --allowGPUFallback --useDLACore=0 --maxBatch=8 --frobnicate --memPoolSize=dlaSRAM:1 fp16"
    )
    lacking = {item.what: item.gone for item in migrated(old).replaced if item.lacking}
    assert lacking == {
        "--allowGPUFallback": "", "--useDLACore": "", "--maxBatch": "TensorRT 10", "--frobnicate": "",
        "--memPoolSize=dlaSRAM:1": "",
        "fp16": "",
    }  # fmt: skip
    assert not migrated(old).ok
    for words in ("--best", "--int8 --calib=c.cache", "--fp16 --int4"):  # with which build refuses to prune
        pruned = migrated(f"trtexec --onnx=m.onnx {words} --sparsity=force --refit --skipInference")
        assert not pruned.ok and "--sparsity" not in pruned.commands[0] and "--refit" in pruned.commands[0]
    for words in ("--best", "--int8", "--fp8"):
        coded = migrated(f"trtexec --onnx=m.onnx {words} --int4 --skipInference")
        assert not coded.ok and words in coded.commands[0] and "--int4" not in coded.commands[0]
    gone = {
        item.what: item.gone for item in migrated("trtexec --onnx=m.onnx --fp16 --workspace=1 --useCudaGraph").replaced
    }
    assert gone == {"--fp16": "TensorRT 11", "--workspace": "TensorRT 10", "--useCudaGraph": ""}
    assert migrated("trtexec --onnx=m.onnx --useCudaGraph").ok


@pytest.mark.parametrize(
    "wrong", ["ls -l", "trtexec '", "", "absent.py", "polygraphy inspect model m.onnx", "trtexec --onnx=m --shapes=??"]
)
def test_what_isnt_known_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError):
        migrated(wrong)


def test_it_is_told_in_eighty_columns_and_as_json() -> None:
    shapes = "--minShapes=x:1x3x224x224 --optShapes=x:8x3x224x224 --maxShapes=x:32x3x224x224"
    old = f"trtexec --onnx=m.onnx --int8 {shapes} --useDLACore=0"
    result = CliRunner().invoke(cli.app, ["doctor", "--migrate", old])
    assert result.exit_code == 1
    assert all(len(line) <= 80 for line in result.output.splitlines() if "$" not in line)
    assert "    $ trtopt build m.onnx --int8 --images DIR --preprocess PRESET --shapes x:1x3x224x224," in result.output
    said = json.loads(CliRunner().invoke(cli.app, ["doctor", "--migrate", old, "--json"]).stdout)
    assert said["migration"]["commands"] == list(migrated(old).commands)
    assert set(said["migration"]["replaced"][0]) == {"what", "gone", "instead", "lacking"}
    assert said["migration"]["ok"] is said["ok"] is False
