"""bundle: archives that install without a network. The index is a folder of stand-ins for packages; trtopt's wheel is real."""

from __future__ import annotations

import ensurepip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from importlib.metadata import requires
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import onnx
import pytest
from graphs import conv_relu
from packaging.requirements import Requirement
from wheel_environment import environment
from world import has

import trtopt
from trtopt.core.errors import BundleFailed, EngineError, EngineMismatch, OutputError, UsageError
from trtopt.graph.io import save_model
from trtopt.serving.bundle import _run

PYTHON = "{}.{}".format(*sys.version_info[:2])


def _stand_in(folder: Path, name: str, version: str, **files: str) -> Path:
    """A wheel of nothing, or of files for site-packages."""
    plain = name.replace("-", "_")
    about = f"{plain}-{version}.dist-info"
    content = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **{path.replace("__", "."): text for path, text in files.items()},
    }
    path = folder / f"{plain}-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as file:
        for place, text in content.items():
            file.writestr(place, text)
        file.writestr(f"{about}/RECORD", "".join(f"{place},,\n" for place in [*content, f"{about}/RECORD"]))
    return path


# Packs itself, as what `pip` builds from source does; it needs no other package.
_BACKEND = """
import pathlib, zipfile
def build_wheel(folder, settings=None, metadata=None):
    about = "{plain}-{version}.dist-info"
    with zipfile.ZipFile(pathlib.Path(folder, "{plain}-{version}-py3-none-any.whl"), "w") as file:
        file.writestr(about + "/METADATA", {metadata!r})
        file.writestr(about + "/WHEEL", "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr(about + "/RECORD", "")
    return "{plain}-{version}-py3-none-any.whl"
"""


def _source(folder: Path, name: str, version: str, needs: str) -> None:
    """A source distribution that no wheel was made of, and that needs another package."""
    plain, metadata = name.replace("-", "_"), f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        "PKG-INFO": metadata,
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": _BACKEND.format(plain=plain, version=version, metadata=f"{metadata}Requires-Dist: {needs}\n"),
    }
    with tarfile.open(folder / f"{plain}-{version}.tar.gz", "w:gz") as archive:
        for place, text in files.items():
            about = tarfile.TarInfo(f"{plain}-{version}/{place}")
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text.encode()))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that uv and pip see: a stand-in of each package that trtopt names, and pip itself."""
    folder = tmp_path / "index"
    folder.mkdir()
    wanted = [Requirement(text) for text in requires("trtopt") or ()]
    names = {item.name for item in wanted if not item.marker or item.marker.evaluate({"extra": "onnx"})}
    for name in sorted(names | {"onnxruntime", "networkx", "opencv-python-headless", "pillow", "cuda-bindings"}):
        # One brings the tests' own packages along, so that trtopt starts there.
        borrowed = {"borrowed__pth": sysconfig.get_path("purelib") + "\n"} if name == "typer" else {}
        _stand_in(folder, name, "99.0", **borrowed)
    (pip,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    shutil.copy(pip, folder)
    for variable in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(variable, str(folder))
    for variable in ("PIP_NO_INDEX", "UV_NO_INDEX"):
        monkeypatch.setenv(variable, "1")
    return folder


@pytest.fixture(scope="session")
def own(installed: Path) -> Path:
    (path,) = installed.parent.glob("dist/trtopt-*.whl")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An ONNX file whose weights lie beside it."""
    path = tmp_path / "net.onnx"
    save_model(conv_relu(), path)
    proto = onnx.load(path)
    onnx.save(proto, path, save_as_external_data=True, location="net.weights", size_threshold=0)
    return path


def _bundled(model: Path, own: Path, **more: Any) -> trtopt.Bundle:
    more = {"extras": ["ort"], "wheel": [own], **more}
    return trtopt.bundle(model, model.parent / "net.tar", python=PYTHON, **more)


def _unpacked(bundle: trtopt.Bundle, folder: Path) -> Path:
    with tarfile.open(bundle.path) as archive:
        archive.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder)
    return folder / bundle.name


def _installing(folder: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
    command = ["sh", str(folder / "install.sh"), *words]
    place = folder.parent.parent
    return subprocess.run(
        command, env={**plain, "PYTHON": python}, cwd=place, capture_output=True, text=True, check=False
    )


def test_it_installs_from_the_archive_alone(model: Path, own: Path, index: Path, tmp_path: Path) -> None:
    model = model.rename(model.with_name("$(touch pwned) `touch pwned` 'ü\".onnx"))
    bundle = _bundled(model, own)
    assert bundle.packages["onnxruntime"] == "99.0" and bundle.packages["trtopt"] == trtopt.__version__
    shutil.rmtree(index)
    folder = _unpacked(bundle, tmp_path / "there")
    assert {path.name for path in (folder / "model").iterdir()} == {model.name, "net.weights"}
    told = json.loads((folder / "bundle.json").read_text())
    assert told["packages"] == dict(bundle.packages) and told["next"] == bundle.next
    done = _installing(folder, "own venv")
    assert done.returncode == 0, done.stderr
    assert bundle.next in done.stdout
    assert not list(tmp_path.rglob("pwned"))
    venv = tmp_path / "own venv"
    ran = subprocess.run(
        [venv / "bin" / "trtopt", "check", folder / "model" / model.name, "--json"],
        env=environment(venv, tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0 and json.loads(ran.stdout)["inputs"], ran.stderr


def test_equal_content_gives_equal_bytes_and_files_of_nobody(model: Path, own: Path, index: Path) -> None:
    first = _bundled(model, own)
    assert _bundled(model, own).sha256 == first.sha256
    with tarfile.open(first.path) as archive:
        for item in archive:
            assert item.isreg() and item.name.startswith("net/") and ".." not in item.name
            assert (item.uid, item.gid, item.uname, item.mtime) == (0, 0, "", 0)


@pytest.mark.parametrize("change", ["wheel", "model", "added", "below", "gone", "link", "linked_folder"])
def test_what_was_changed_on_the_way_is_refused(
    model: Path, own: Path, index: Path, tmp_path: Path, change: str
) -> None:
    folder = _unpacked(_bundled(model, own), tmp_path / "there")
    if change == "added":
        _stand_in(folder / "wheels", "onnxruntime", "100.0")
    elif change == "below":
        (folder / "model" / "more").mkdir()
        (folder / "model" / "more" / "sitecustomize.py").write_text("")
    elif change == "link":
        (folder / "model" / "net.onnx").rename(tmp_path / "elsewhere")
        (folder / "model" / "net.onnx").symlink_to(tmp_path / "elsewhere")
    elif change == "linked_folder":
        (folder / "wheels").rename(tmp_path / "elsewhere")
        (folder / "wheels").symlink_to(tmp_path / "elsewhere")
    elif change == "gone":
        (folder / "model" / "net.weights").unlink()
    else:
        path = folder / "model" / "net.onnx" if change == "model" else next((folder / "wheels").glob("onnx-*"))
        path.write_bytes(path.read_bytes() + b"\0")
    done = _installing(folder)
    assert done.returncode == 1 and not (folder / "venv").exists()
    has(
        done.stderr,
        {"wheel": "was changed", "model": "was changed", "gone": "net.weights"}.get(
            change, "isn't in SHA256SUMS" if change in ("added", "below") else "is a link"
        ),
    )
    has(done.stderr, "copy it again")


def test_another_python_is_refused(model: Path, own: Path, index: Path, tmp_path: Path) -> None:
    folder = _unpacked(_bundled(model, own), tmp_path / "there")
    script = folder / "install.sh"
    script.write_text(
        script.read_text().replace(f"Python {PYTHON}", "Python 2.7").replace(f'" = {PYTHON} ]', '" = 2.7 ]')
    )
    done = _installing(folder)
    assert done.returncode == 1
    has(done.stderr, f"is {PYTHON}: name another with PYTHON=")


def test_an_engine_brings_its_manifest_its_graph_and_its_tensorrt(
    rtx: None, own: Path, index: Path, tmp_path: Path
) -> None:
    engine, graph = tmp_path / "m.engine", tmp_path / "graph.onnx"
    trtopt.build(conv_relu(), engine, fp16=True, target="sm89", save_onnx=graph)
    manifest = trtopt.Session(engine, backend="onnxruntime").manifest
    assert manifest is not None
    version = manifest.generation["version"]
    with pytest.raises(BundleFailed, match="tensorrt-rtx"):  # the index hasn't got it
        trtopt.bundle(engine, tmp_path / "m.tar", wheel=[own], python=PYTHON)
    assert not (tmp_path / "m.tar").exists()
    _stand_in(index, "tensorrt-rtx", version)
    found = trtopt.bundle(engine, tmp_path / "m.tar", wheel=[own], python=PYTHON)
    assert found.packages["tensorrt-rtx"] == version and "cuda-bindings" in found.packages
    assert {item.path for item in found.files if item.path.startswith("model/")} == {
        "model/m.engine", "model/m.engine.json", "model/graph.onnx",
    }  # fmt: skip
    has(found.next, "trtopt run m.engine")
    with pytest.raises(UsageError, match="version_compatible=True"):
        trtopt.bundle(engine, tmp_path / "m.tar", wheel=[own], python=PYTHON, extras=["lean8"])
    kept = graph.read_bytes()
    onnx.save(conv_relu(), graph)
    with pytest.raises(EngineMismatch, match=r"graph\.onnx has content .*: build it again with `save_onnx=`"):
        trtopt.bundle(engine, tmp_path / "m.tar", wheel=[own], python=PYTHON)
    graph.write_bytes(kept)
    engine.write_bytes(engine.read_bytes() + b"\0")
    with pytest.raises(EngineMismatch, match="isn't the plan"):
        trtopt.bundle(engine, tmp_path / "m.tar", wheel=[own], python=PYTHON)
    Path(f"{engine}.json").unlink()
    with pytest.raises(EngineError, match="no manifest"):
        trtopt.bundle(engine, tmp_path / "other.tar", wheel=[own], python=PYTHON)


def test_nvidias_packages_that_are_source_alone_become_wheels(model: Path, own: Path, index: Path) -> None:
    """Of TensorRT-RTX, 10 and 11 no index has a wheel of what has TensorRT's own name: it needs others, which do the work."""
    _source(index, "tensorrt-rtx", "1.7.9", "tensorrt_rtx_cu13==1.7.9")
    _source(index, "tensorrt-rtx-cu13", "1.7.9", "tensorrt_rtx_cu13_libs==1.7.9")
    with pytest.raises(BundleFailed, match="NVIDIA's own index"):
        _bundled(model, own, extras=["rtx", "gpu"])
    _stand_in(index, "tensorrt-rtx-cu13-libs", "1.7.9")
    found = _bundled(model, own, extras=["rtx", "gpu"])
    assert {name for name in found.packages if name.startswith("tensorrt")} == {
        "tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu13-libs",
    }  # fmt: skip


def test_c_code_for_another_machine_is_refused(model: Path, own: Path, index: Path, tmp_path: Path) -> None:
    pure = shutil.copy(own, tmp_path / "trtopt-0.1.0-py3-none-any.whl")
    native = shutil.copy(own, tmp_path / "trtopt-0.1.0-cp310-abi3-linux_x86_64.whl")
    with pytest.raises(UsageError, match=r"isn't for aarch64: make trtopt's wheel on such a machine"):
        _bundled(model, native, platform="manylinux_2_28_aarch64")
    assert _bundled(model, pure, platform="manylinux_2_28_aarch64").platform == "manylinux_2_28_aarch64"


def test_a_module_beside_the_script_does_not_run_before_the_check(
    model: Path, own: Path, index: Path, tmp_path: Path
) -> None:
    folder = _unpacked(_bundled(model, own), tmp_path / "there")
    (folder / "hashlib.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert _installing(folder).returncode == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extras": ["ort", "trt9"]}, "`extras=` is 'trt9'; allowed: onnx, "),
        ({"platform": "win_amd64"}, "manylinux_2_N_x86_64"),
        ({"platform": "manylinux_2_5_x86_64"}, "at least 17"),
        ({"python": "3.9"}, "3.10, 3.11, 3.12, 3.13"),
        ({"extras": ()}, "says what builds the model there"),
        ({"calib": "none.json"}, "none.json"),
        ({"wheel": ["none.whl"]}, "none.whl"),
        ({"constraint": "none.lock"}, "none.lock"),
        ({"requirement": ["no such!"]}, "`requirement=` 'no such!' can't be read (Expected"),
        ({"requirement": ["--index-url=http://x"]}, "`requirement=` '--index-url=http://x' can't be read"),
    ],
)
def test_requests_that_can_not_be_right(
    model: Path, own: Path, index: Path, options: dict[str, Any], words: str
) -> None:
    options = {"python": PYTHON, "extras": ["ort"], "wheel": [own], **options}
    with pytest.raises(UsageError) as caught:
        trtopt.bundle(model, model.parent / "net.tar", **options)
    has(str(caught.value), words)
    assert not (model.parent / "net.tar").exists()


def test_an_unknown_extra_is_refused_before_a_wheel_is_made(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr("trtopt.serving.bundle._run", lambda *words: ran.append(words))
    with pytest.raises(UsageError, match=r"`extras=` is 'nope'; allowed: onnx, .*gpu"):
        trtopt.bundle(model, model.parent / "net.tar", extras=["gpu", "nope"])
    assert not ran


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("trtopt-0-py3-none-any.whl", b"junk", "can't be read as a wheel (File is not a zip file)"),
        ("a-1-py3-none-any.whl", b"PK\x05\x06" + bytes(18), "can't be read as a wheel"),
        ("a.whl", b"junk", "hasn't a wheel's name"),
    ],
)
def test_what_is_no_wheel_is_refused(model: Path, index: Path, name: str, content: bytes, words: str) -> None:
    wheel = model.with_name(name)
    wheel.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        _bundled(model, wheel)
    has(str(caught.value), words)


def test_what_pip_has_started_ends_with_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it has unpacked goes."""
    (tmp_path / "stand_in.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(sys.argv[1]).write_text(f'{other.pid} {os.environ[\"TMPDIR\"]}')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = tmp_path / "said"

    def interrupt() -> None:
        while not (said.exists() and said.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        _run("stand_in", str(said))
    thread.join()
    pid, folder = said.read_text().split()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not Path(folder).exists()


def test_a_name_of_several_lines_is_refused(model: Path, own: Path, index: Path) -> None:
    with pytest.raises(UsageError, match="line break"):
        _bundled(model.rename(model.with_name("a\nNEXT\ntouch pwned\n.onnx")), own)


def test_it_overwrites_nothing_that_goes_in(model: Path, own: Path, index: Path) -> None:
    with pytest.raises((UsageError, OutputError)):
        trtopt.bundle(model, model, python=PYTHON, extras=["ort"], wheel=[own])
    assert onnx.load(model).graph.node
