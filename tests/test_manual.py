"""The manual: its tutorial and its pages' commands run as printed, those of tables parse, no link of the site is dead."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from documented import commands, complaint
from graphs import points_of, quantized
from tritons import executable, why_not
from wheel_environment import environment

import trtopt
from trtopt.cli.application import EXIT_STATUSES
from trtopt.core.values import Precision
from trtopt.data import open_data
from trtopt.data.rebatch import joined
from trtopt.data.samples import write_crops
from trtopt.diagnosis.migration import OPTIONS
from trtopt.graph.io import load_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "manual").glob("*.md"))
TUTORIAL = (ROOT / "docs" / "manual" / "tutorial.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def manual() -> ModuleType:
    spec = importlib.util.spec_from_file_location("manual", ROOT / "scripts" / "manual.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The tutorial ------------------------------------------------------------------------------------------------------------


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)```", TUTORIAL, re.S | re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Path:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    made = tmp_path_factory.mktemp("tutorial")
    (made / ".venv").symlink_to(installed)
    return made


def _ran(folder: Path, *command: str) -> str:
    variables = environment(folder / ".venv", folder)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return done.stdout


def test_the_tutorial_runs_and_says_what_it_says(folder: Path) -> None:
    said = "".join(_ran(folder, "bash", "-ec", block) for block in _blocks("bash"))
    (line,) = re.findall(r"^lite0\.engine: .*", TUTORIAL, re.M)
    assert line in said
    assert (folder / "report.html").is_file() and (folder / "models" / "lite0" / "config.pbtxt").is_file()
    (script,) = _blocks("python")
    assert _ran(folder, "python", "-c", script).splitlines() == re.findall(r"print\(.*\)\s+# (.*)", script)


def test_what_the_tutorial_made_is_served(folder: Path) -> None:
    if not (folder / "models").is_dir():
        pytest.skip("needs the tutorial, which comes first")
    pytest.importorskip("tritonclient.http", reason="tritonclient isn't installed")
    if why := why_not():
        pytest.skip(why)
    (command,), (client,) = _blocks("bash serve"), _blocks("python client")
    with contextlib.ExitStack() as stack:  # another test may hold the usual ports
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        ports = [item.getsockname()[1] for item in sockets]
    words = [
        *shlex.split(command),
        *(f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports)),
        f"--server={executable(folder / 'server')}",
    ]
    variables = environment(folder / ".venv", folder)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(process, folder / "log")
            script = client.replace("127.0.0.1:8000", f"127.0.0.1:{ports[0]}")
            assert script != client
            assert _ran(folder, "python", "-c", script).splitlines() == re.findall(r"print\(.*\)\s+# (.*)", client)
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
    assert status == 0, (folder / "log").read_text()[-2000:]


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it says that it is ready: before that it warms up, and a signal interrupts it."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if "ready: HTTP" in log.read_text():
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-2000:])


# The other pages ---------------------------------------------------------------------------------------------------------

NET = """
import torch

def Net():
    conv = lambda wide, out: [torch.nn.Conv2d(wide, out, 3, stride=4, padding=1), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 32)]
    return torch.nn.Sequential(*conv(3, 32), *conv(32, 64), *head)
"""
TYPED_PAGES = [  # what they make, and what they then have said
    ("manual/from-torch2trt.md", "model.engine", []),  # which makes the model that the others start from
    ("manual/from-trtexec.md", "", ["$ trtopt build model.onnx --fp16"]),
    ("manual/from-polygraphy.md", "", ["$ trtopt build model.onnx --fp16"]),
    ("manual/from-calibrators.md", "model.calib.json", ["from old.cache"]),
    ("manual/from-modelopt.md", "built.onnx", []),
    ("store.md", "b.engine", ["up to date; manifest b.engine.json", "store: 1 engine, "]),
    ("preprocessing.md", "detector.engine", []),
]


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Path:
    """A folder with what the pages' commands are typed on."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    made = tmp_path_factory.mktemp("typed")
    (made / ".venv").symlink_to(installed)
    (made / "my_model.py").write_text(NET)
    (made / "detector.toml").write_text('preset = "imagenet"\nsize = [224, 224]\n')
    write_crops("imagenet-crops", made / "photos")
    return made


@pytest.mark.parametrize(("page", "makes", "says"), TYPED_PAGES)
def test_what_a_page_types_runs(typed: Path, page: str, makes: str, says: list[str]) -> None:
    if page != TYPED_PAGES[0][0] and not (typed / "samples.npz").exists():
        _on_the_model(typed)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)```", text, re.S | re.M)
    assert blocks
    said = [_ran(typed, "bash", "-ec", block.replace("640x640", "224x224")) for block in blocks]
    assert not makes or (typed / makes).is_file()
    assert [line for line in says if line not in "".join(said)] == []


def test_the_engine_that_the_store_gives_is_the_one_that_was_built(typed: Path) -> None:
    if not (typed / "b.engine").exists():
        pytest.skip("needs what store.md types, which comes first")
    assert (typed / "a.engine").read_bytes() == (typed / "b.engine").read_bytes()


def _on_the_model(typed: Path) -> None:
    """The model of from-torch2trt.md, quantized as another tool leaves it; samples; a cache; a detector that is the same."""
    model = typed / "model.onnx"
    if not model.exists():
        _ran(typed, "trtopt", "export", "my_model.py:Net", "--inputs", "x:batchx3x224x224", "-o", str(model))
    batches = open_data(load_model(model).inputs, images=typed / "photos", preprocess="imagenet", limit=32)
    np.savez(typed / "samples.npz", **joined(batches))  # type: ignore[arg-type]
    proto = load_model(model).proto
    points = points_of(proto, Precision.INT8)
    onnx.save(quantized(proto, points, dict.fromkeys(points.activations, 4.0)), typed / "model.quant.onnx")
    shutil.copy(model, typed / "detector.onnx")
    words = ["--data", typed / "samples.npz", "--export-cache", typed / "old.cache", "-o", typed / "model.calib.json"]
    _ran(typed, "trtopt", "calibrate", str(model), *map(str, words))


# Commands ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [path.name for path in PAGES])
def test_every_command_of_a_page_parses(page: str, manual: ModuleType) -> None:
    text = manual.with_trtopt((ROOT / "docs" / "manual" / page).read_text(encoding="utf-8"))
    found = list(commands(text))
    assert len(found) >= 3
    assert [said for said in map(complaint, found) if said] == []


def test_every_option_of_trtexec_has_a_row(manual: ModuleType) -> None:
    rows = re.findall(r"^\| `--(\w+)[^|]*\| [^|]*\| (.+) \|$", manual.table_of_options(), re.M)
    assert {name for name, _ in rows} == {*OPTIONS} - {"onnx", "saveEngine", "loadEngine"}
    assert ("noTF32", "`trtopt build M.onnx --no-tf32 -o M.engine`") in rows


# The site ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def zensical() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Zensical and mkdocstrings need Python 3.11")
    for name in ("zensical", "mkdocstrings"):
        pytest.importorskip(name, reason=f"{name} isn't installed: pip install 'trtopt[docs]'")


@pytest.mark.usefixtures("zensical")
def test_the_site_builds_and_is_complete(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, ROOT / "scripts" / "manual.py", "--output", site]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    wanted = {path.relative_to(ROOT).with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in wanted if not name.endswith("README.html")} <= set(pages)
    told = "".join(pages[f"docs/manual/{name}.html"] for name in ("functions", "classes", "errors"))
    names = {name for name in trtopt.__all__ if callable(getattr(trtopt, name))}
    assert {name for name in names if not re.search(rf'id="trtopt\.[\w.]*\b{name}"', told)} == set()
    assert "allow_precision_fallback" in pages["docs/manual/functions.html"]  # of a request
    assert all(f"trtopt {name}" in pages["docs/manual/cli.html"] for name in ("build", "jobs run", "store prune"))
    assert all(f"<code>{status}</code>" in pages["docs/manual/errors.html"] for status in EXIT_STATUSES)
    assert [name for name, text in pages.items() if "```" in text] == []  # a block that became running text
    fetched = [
        found for text in pages.values() for found in re.findall(r"<(?:script|link|img)[^>]+https?://[^>]+>", text)
    ]
    assert fetched == []
