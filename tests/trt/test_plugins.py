"""Plugins of the user's own, in stand-ins of each generation's registry: loaded when named, matched by name, told by hash."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from custom import OPERATORS, PLUGIN, custom_net
from graphs import values, written
from standins import VERSIONS, Simulation

import trtopt
from trtopt.builder.request import BuildRequest
from trtopt.core import _native, operators
from trtopt.core.errors import EngineMismatch, UnsupportedOperator, UsageError
from trtopt.engine.manifest import load_manifest
from trtopt.runtime import stored
from trtopt.trt import plugins
from trtopt.trt.generation import Generation

pytestmark = pytest.mark.usefixtures("no_operators")
Install = Callable[[str], tuple[Simulation, Generation]]
FULL = [version for version in VERSIONS if not version.startswith("rtx")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(plugins, "_loaded", {})
    (tmp_path / "ops.py").write_text(OPERATORS)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    onnx.save(custom_net(), tmp_path / "custom.onnx")
    np.savez(tmp_path / "data.npz", x=values(40, 3, 16, 16))
    return tmp_path


def _build(folder: Path, **options: Any) -> Any:
    own = {"data": folder / "data.npz", "operators": str(folder / "ops.py"), "compare": False}
    given = {"shapes": "x:1x3x16x16,8x3x16x16,8x3x16x16", "int8": True, "allow_precision_fallback": True}
    return trtopt.build(folder / "custom.onnx", folder / "custom.engine", **given, **own, **options)


@pytest.mark.parametrize("version", FULL)
def test_a_build_with_a_plugin_says_in_the_manifest_what_it_needs(
    version: str, stand_in: Install, folder: Path
) -> None:
    stand_in(version)
    with pytest.raises(UnsupportedOperator, match=r"has no plugin of that name here[\s\S]*plugins=\['LIB.so'\]"):
        _build(folder)
    assert not (folder / "custom.engine").exists()
    _build(folder, plugins=str(folder / "plugin.py"))
    manifest = load_manifest(folder / "custom.engine")
    assert manifest is not None
    (needed,) = manifest.plugins
    assert needed["library"] == "plugin.py" and needed["creators"] == ["Swishy"]
    with pytest.raises(EngineMismatch, match=r"uses Swishy of the plugin library plugin.py.*isn't given: `plugins="):
        manifest.check_plugins("custom.engine", ())
    assert manifest.check_plugins("custom.engine", operators.plugins()) == (folder / "plugin.py",)
    (folder / "other").mkdir()
    other = folder / "other" / "plugin.py"
    other.write_text(PLUGIN + "\n# another\n")
    with pytest.raises(EngineMismatch, match=r"other/plugin.py has [0-9a-f]{16}….*the one it was built with"):
        manifest.check_plugins("custom.engine", [other])
    assert replace(manifest, plugins=()).check_plugins("custom.engine", [other]) == ()


def test_another_plugin_or_reference_is_another_engine(stand_in: Install, folder: Path) -> None:
    stand_in("10.16.1")
    _build(folder, plugins=str(folder / "plugin.py"))
    assert _build(folder, plugins=str(folder / "plugin.py")).cached
    (folder / "ops.py").write_text(OPERATORS.replace("scale * x", "x * scale"))
    assert not _build(folder, plugins=str(folder / "plugin.py")).cached
    (folder / "plugin.py").write_text(PLUGIN + "\n# another\n")
    with pytest.raises(UsageError, match=r"plugin.py was changed after this process had loaded it: start again"):
        _build(folder, plugins=str(folder / "plugin.py"))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (custom_net("scale = 2.0, gain = 1.0"), r"doesn't read the attribute gain; it reads scale"),
        (custom_net('plugin_version = "3"'), r"the plugin's version 3 .*; here is version 1"),
        (custom_net('plugin_namespace = "acme"'), r"version 1 of acme .*; here is version 1"),
        (custom_net(op="Swishi"), r"no plugin of that name here; near: Swishy"),
    ],
)
def test_what_differs_is_said(net: onnx.ModelProto, message: str, stand_in: Install, folder: Path) -> None:
    stand_in("10.16.1")
    report = trtopt.check(net, plugins=str(folder / "plugin.py"), operators=str(folder / "ops.py"))
    (found,) = [item for item in report.findings if item.level == "error" and "swish1" in item.node]
    assert re.search(message, found.message)
    with pytest.raises(UnsupportedOperator, match=message):  # which TensorRT 8.6 builds, and passes over
        trtopt.build(net, folder / "net.engine", fp16=True, operators=str(folder / "ops.py"))


def test_version_lists_the_plugins_of_each_tensorrt(
    stand_in: Install, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("8.6.0")
    monkeypatch.setenv(operators.PLUGINS, str(folder / "plugin.py"))
    report = trtopt.version(plugins=True)
    assert report.plugins is not None
    (mine,) = [item for item in report.plugins["TensorRT 8.6.0"] if item.name == "Swishy"]
    assert (mine.version, mine.fields, mine.library) == ("1", ("scale",), str(folder / "plugin.py"))
    assert json.loads(json.dumps(report.to_json()))["plugins"]["TensorRT 8.6.0"]
    assert trtopt.version().plugins is None


def test_a_library_that_cannot_be_loaded_is_told(stand_in: Install, folder: Path) -> None:
    stand_in("10.16.1")
    hostile = folder / "libhostile.so"
    hostile.write_bytes(b"\x7fELF, or not")
    with pytest.raises(
        UsageError, match=r"libhostile.so can't be loaded into TensorRT 10.16.1.*: .*built for this TensorRT"
    ):
        trtopt.check(folder / "custom.onnx", plugins=str(hostile), backend="tensorrt")


def test_a_library_that_adds_no_plugin_is_refused(stand_in: Install, folder: Path) -> None:
    """TensorRT keeps the first plugin of a name: a second library's kernel would never run."""
    stand_in("10.16.1")
    library = Path(shutil.copy(_native.__file__, folder / "libsecond.so"))
    with pytest.raises(
        UsageError, match=r"libsecond.so adds no plugin: .*a process can't replace a plugin: start again"
    ):
        trtopt.check(folder / "custom.onnx", plugins=str(library), backend="tensorrt")


def test_an_attribute_that_a_plugin_needs_is_asked_for() -> None:
    """As seen on 8.6.0 and 10.6.0: "Could not create the plugin" is all that their parsers say."""
    net = written(
        """(float[1,9,4] b, float[1,9,2] s) => (int32[1,1] c, float[1,5,4] k, float[1,5] p, int32[1,5] l) {
        c, k, p, l = TRT.EfficientNMS_TRT <score_threshold = 0.4, iou_threshold = 0.5, max_output_boxes = 5> (b, s) }"""
    )
    fields = ("score_threshold", "iou_threshold", "max_output_boxes", "background_class", "box_coding")
    (issue,) = plugins.problems(net, [plugins.Creator("EfficientNMS_TRT", "1", "", fields)], gpu=True)
    assert issue.reason == "it lacks background_class, box_coding, score_activation, which the plugin needs"


def test_nothing_is_loaded_from_a_models_folder_by_itself(stand_in: Install, folder: Path) -> None:
    stand_in("10.16.1")
    for name in ("custom.so", "Swishy.so", "libSwishy.so", "custom.py", "Swishy.py"):
        (folder / name).write_text("raise SystemExit('loaded')")
    with pytest.raises(UnsupportedOperator):
        _build(folder)
    assert not plugins._loaded and operators.plugins() == ()


def test_an_operator_with_the_name_of_one_of_onnx_is_refused(stand_in: Install, folder: Path) -> None:
    """TensorRT's parser would take acme's Gelu for ONNX's: seen on TensorRT-RTX 1.7, which built it without a word."""
    stand_in("10.16.1")
    operators.operator("acme::Gelu", shapes=lambda x, beta, **_: [x])(lambda x, beta, scale=1.0: x)
    report = trtopt.check(custom_net(op="Gelu"))
    assert any("takes it for ONNX's own operator" in item.message for item in report.findings if item.level == "error")


def test_a_known_engine_depends_on_the_files_of_its_operators(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.engine.store.SETTLED", -10)  # seconds: files just written count as old
    request = BuildRequest(folder / "custom.onnx", "e", int8=True, operators=(str(folder / "ops.py"),), plugins=())
    operators.load(request)
    found = stored._stamps(request)
    assert found is not None and str(folder / "ops.py") in found


def test_a_known_engine_depends_on_operators_without_a_file(stand_in: Install, folder: Path) -> None:
    stand_in("10.16.1")
    request = BuildRequest(folder / "custom.onnx", "e", fp16=True)
    operators.operator("acme::Swishy")(lambda x, beta, scale=1.0: x)
    first = stored._question(request)
    operators.operator("acme::Swishy")(lambda x, beta, scale=1.0: -x)
    assert first is not None and first != stored._question(request)
