"""Pages whose commands are run as printed by trtopt installed from a wheel, outside the checkout, and the site made of all."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from documented import ROOT, commands, complaint
from graphs import points_of, quantized
from tritons import executable, ports, started, why_not
from wheel_environment import environment

import trtopt
from trtopt.cli.application import EXIT_STATUSES
from trtopt.core.values import Precision
from trtopt.data import open_data
from trtopt.data.rebatch import joined
from trtopt.data.samples import write_crops
from trtopt.diagnosis.migration import OPTIONS
from trtopt.graph.io import load_model

NET = """
import torch

def Net():
    conv = lambda wide, out: [torch.nn.Conv2d(wide, out, 3, stride=4, padding=1), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 32)]
    return torch.nn.Sequential(*conv(3, 32), *conv(32, 64), *head)
"""


def section(place: str) -> str:
    """Return what stands under a heading of a page, "PAGE#HEADING"; of the page alone what stands before the first."""
    page, _, heading = place.partition("#")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    whole = page in ("your-own-model.md", "store.md") or page.startswith("manual/") or place == "preprocessing.md"
    return text if whole else (text.split(f"\n## {heading}\n")[1] if heading else text).split("\n## ")[0]


# Folder, page and heading => what its commands say => what is there afterwards. The first of a folder makes what others need.
STEPS = """
lite0 walkthrough.md => 49 of 49 convolutions INT8; 1 of 1 matrix products INT8 | 95.3% of 64 samples, 16.3 dB
    => lite0.onnx | lite0.clean.onnx | lite0.calib.json | lite0.engine | lite0.engine.json
lite0 preprocessing.md#In the engine => 49 of 49 convolutions INT8 | same class for 95.3% of 64 samples, 16.3 dB =>
lite0 report.md => 49 of 49 convolutions INT8 | not known: how long each layer takes => report.html
lite0 running.md#In a shell => => results/predictions.json
lite0 running.md#In a service => =>
lite0 running.md#Many requests of one image => =>
lite0 running.md#The same arrays again and again => =>
lite0 serving.md => python backend, version 1; batches of up to 32
    => models/lite0/1 | models/lite0/config.pbtxt | models/lite0/labels.txt
lite0 your-own-model.md => 2 of 2 convolutions INT8 | vector (embedding): cosine 0.99 => sentences.npz
net manual/from-torch2trt.md => => model.engine
net manual/from-trtexec.md => $ trtopt build model.onnx --fp16 =>
net manual/from-polygraphy.md => => clean.onnx
net manual/from-calibrators.md => from old.cache => model.calib.json
net manual/from-modelopt.md => => built.onnx
net store.md => up to date; manifest b.engine.json | store: 1 engine, => b.engine
net tiers.md => trtopt tune model.onnx --min-snr 30 => tiers/int8-20db.engine
net certify.md => all holds; => sure.engine | kept.onnx
net preprocessing.md => => detector.engine
"""
ROWS = [row for row in STEPS.replace("\n    =>", " =>").splitlines() if row]
FIRST = {"lite0": "walkthrough.md", "net": "manual/from-torch2trt.md"}


def blocks(place: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w[\w ]*)\n(.*?)^```$", section(place), re.S | re.M)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Callable[[str], Path]:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")

    @functools.cache
    def get(name: str) -> Path:
        made = tmp_path_factory.mktemp(name)
        (made / ".venv").symlink_to(installed)
        (made / "my_model.py").write_text(NET)
        (made / "quickstart-out").mkdir()
        write_crops("imagenet-crops", made / ("quickstart-out/calibration" if name == "lite0" else "photos"))
        return made

    return get


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    variables = environment(folder / ".venv", folder)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


def ran(folder: Path, *command: str) -> str:
    done = run(folder, *command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return done.stdout


def printed(script: str) -> list[str]:
    """List what the comments of a script say that it prints."""
    return re.findall(r"^ *print\(.*?\)\s+# (.*)$", script, re.M)


def on_the_model(folder: Path) -> None:
    """The model of from-torch2trt.md, quantized as another tool leaves it; samples; a cache; a detector that is the same."""
    model = folder / "model.onnx"
    batches = open_data(load_model(model).inputs, images=folder / "photos", preprocess="imagenet", limit=32)
    np.savez(folder / "samples.npz", **joined(batches))  # type: ignore[arg-type]
    proto = load_model(model).proto
    points = points_of(proto, Precision.INT8)
    onnx.save(quantized(proto, points, dict.fromkeys(points.activations, 4.0)), folder / "model.quant.onnx")
    shutil.copy(model, folder / "detector.onnx")
    words = [
        "--data",
        folder / "samples.npz",
        "--export-cache",
        folder / "old.cache",
        "-o",
        folder / "model.calib.json",
    ]
    ran(folder, "trtopt", "calibrate", str(model), *map(str, words))


@pytest.mark.parametrize("row", ROWS)
def test_a_page_runs_and_says_what_it_says(folders: Callable[[str], Path], row: str) -> None:
    where, *told = row.split("=>")
    says, makes = ([item.strip() for item in part.split("|") if item.strip()] for part in told)
    name, _, place = where.strip().partition(" ")
    folder, said, count = folders(name), "", 0
    if place == FIRST[name]:
        (folder / "begun").touch()
    elif not (folder / "begun").exists():
        pytest.skip(f"needs {FIRST[name]}, which comes first")
    elif name == "net" and not (folder / "samples.npz").exists():
        on_the_model(folder)
    for language, block in blocks(place):
        block = block.replace("640x640", "224x224").replace("640, 640", "224, 224")
        if file := re.match(r"# (\w+\.\w+)\n", block):
            (folder / file[1]).write_text(block)
        elif language == "bash" or (language, name) == ("bash walkthrough", "lite0"):
            said += ran(folder, "bash", "-ec", block)
            count += 1
        elif language == "python" and name == "lite0":
            assert ran(folder, "python", "-c", block).splitlines() == printed(block)
            count += 1
    assert count and [line for line in says if line not in said] == []
    assert [file for file in makes if not (folder / file).exists()] == []


def made_by(folder: Path, file: str) -> Path:
    if not (folder / file).exists():
        pytest.skip("needs the page that makes it, which comes first")
    return folder / file


def test_the_walkthrough_is_the_same_in_python(folders: Callable[[str], Path]) -> None:
    (_, typed), (_, script) = blocks("walkthrough.md")
    called = re.findall(r"^trtopt (\w+)", typed, re.M)
    assert re.findall(r"trtopt\.(\w+)\(", script) == called and len(called) == 7
    found = json.loads(made_by(folders("lite0"), "results/predictions.json").read_bytes())
    assert len(found) == len(list((folders("lite0") / "quickstart-out" / "calibration").glob("*.png")))
    assert all(item["predictions"][0]["name"] for item in found)


def test_the_place_that_loses_most_is_named(folders: Callable[[str], Path]) -> None:
    folder, place = made_by(folders("lite0"), "lite0.calib.json").parent, "accuracy.md#Where accuracy is lost"
    (_, command), (_, repair), (_, layers) = blocks(place)
    assert repair.startswith("trtopt calibrate lite0.clean.onnx ") and " --repair " in repair
    assert layers.startswith("trtopt verify lite0.clean.onnx ") and " --per-layer" in layers
    said = ran(folder, "bash", "-ec", command)
    for words in ("weights of node_Conv_882", "98 more: --top 0 prints all", "calibration isn't to blame"):
        assert words in section(place) and words in said


def test_the_engine_that_the_store_gives_is_the_one_that_was_built(folders: Callable[[str], Path]) -> None:
    folder = made_by(folders("net"), "b.engine").parent
    assert (folder / "a.engine").read_bytes() == (folder / "b.engine").read_bytes()


def test_what_the_page_on_serving_wrote_is_served(folders: Callable[[str], Path]) -> None:
    folder = made_by(folders("lite0"), "models").parent
    pytest.importorskip("tritonclient.http", reason="tritonclient isn't installed")
    if why := why_not():
        pytest.skip(why)
    scripts = dict(blocks("serving.md") + blocks("serving.md#Requests"))
    assert scripts["bash serve"] == "trtopt serve models\n"
    places = ports()  # another test may hold the usual ones
    words = [str(folder / "models"), f"--server={executable(folder / 'server')}"]
    process = started(words, folder / "log", **places)
    try:
        script = scripts["python client"].replace("127.0.0.1:8000", f"127.0.0.1:{places['http_port']}")
        assert script != scripts["python client"]
        assert ran(folder, "python", "-c", script).splitlines() == printed(script)
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 0, (folder / "log").read_text()[-2000:]


# The site ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manual() -> ModuleType:
    spec = importlib.util.spec_from_file_location("manual", ROOT / "scripts" / "manual.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "manual").glob("*.md")), ids=lambda page: page.name)
def test_every_command_of_a_page_parses(page: Path, manual: ModuleType) -> None:
    found = list(commands(manual.with_trtopt(page.read_text(encoding="utf-8"))))
    assert len(found) >= 3
    assert [said for said in map(complaint, found) if said] == []


def test_every_option_of_trtexec_has_a_row(manual: ModuleType) -> None:
    rows = re.findall(r"^\| `--(\w+)[^|]*\| [^|]*\| (.+) \|$", manual.table_of_options(), re.M)
    assert {name for name, _ in rows} == {*OPTIONS} - {"onnx", "saveEngine", "loadEngine"}
    assert ("noTF32", "`trtopt build M.onnx --no-tf32 -o M.engine`") in rows


def test_the_site_builds_and_is_complete(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Zensical and mkdocstrings need Python 3.11")
    for name in ("zensical", "mkdocstrings"):
        pytest.importorskip(name, reason=f"{name} isn't installed: pip install 'trtopt[docs]'")
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
        item for text in pages.values() for item in re.findall(r"<(?:script|link|img)[^>]+https?://[^>]+>", text)
    ]
    assert fetched == []
