"""The walkthrough and what goes on from it, run as printed by trtopt installed from a wheel, outside the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from wheel_environment import environment

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(path for name in ("docs", "models", "calibration") for path in (ROOT / name).rglob("*.md")),
]


def _section(page: str, heading: str = "") -> str:
    """Return what stands under a heading of a page; without one, what stands before the first."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return (text.split(f"\n## {heading}\n")[1] if heading else text).split("\n## ")[0]


def _blocks(language: str, page: str, heading: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", _section(page, heading), re.S | re.M)


def _said(script: str) -> list[str]:
    """List what the comments of a script say that it prints."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", script, re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Path:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    made = tmp_path_factory.mktemp("readme")
    (made / ".venv").symlink_to(installed)
    script = "from trtopt.data.samples import write_crops; write_crops('imagenet-crops', 'quickstart-out/calibration')"
    (made / "quickstart-out").mkdir()
    subprocess.run(["python", "-c", script], cwd=made, env=_environment(made), check=True)
    return made


def _environment(folder: Path) -> dict[str, str]:
    return environment(folder / ".venv", folder)


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def _after_the_walkthrough(folder: Path, file: str) -> None:
    if not (folder / file).is_file():
        pytest.skip("needs the walkthrough, which comes first")


def test_what_is_run_is_installed_and_complete(folder: Path) -> None:
    script = "import trtopt; from trtopt.recipes.loader import *; print(trtopt.__file__); print(*known_recipes()); "
    script += "load_recipe('models/resnet50.toml')"
    done = _run(folder, "python", "-c", script)
    place, names = done.stdout.splitlines()
    assert Path(place).is_relative_to(folder / ".venv")
    assert names.split() == sorted(path.stem for path in (ROOT / "models").glob("*.toml"))


def test_the_walkthrough_runs_and_says_what_the_readme_says(folder: Path) -> None:
    (commands,), (script,) = (_blocks(language, "docs/walkthrough.md") for language in ("bash", "python"))
    assert commands.count("trtopt ") == 7
    done = _run(folder, "bash", "-ec", commands)
    assert "49 of 49 convolutions INT8; 1 of 1 matrix products INT8" in done.stdout
    assert "logits (classes): same class for 95.3% of 64 samples, 16.3 dB" in done.stdout
    assert "Traceback" not in done.stderr
    made = {path.name for path in folder.iterdir()}
    assert {"lite0.onnx", "lite0.clean.onnx", "lite0.calib.json", "lite0.engine", "lite0.engine.json"} <= made
    called = re.findall(r"^trtopt (\w+)", commands, re.M)
    assert re.findall(r"trtopt\.(\w+)\(", script) == called
    assert _run(folder, "python", "-c", script).stdout.splitlines() == _said(script)


def test_engines_that_take_pixels(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.calib.json")
    page = ("docs/preprocessing.md", "In the engine")
    (commands,), (script,) = _blocks("bash walkthrough", *page), _blocks("python", *page)
    done = _run(folder, "bash", "-ec", commands)
    assert "49 of 49 convolutions INT8" in done.stdout
    assert "same class for 95.3% of 64 samples, 16.3 dB" in done.stdout
    assert _run(folder, "python", "-c", script).stdout.splitlines() == _said(script)


def test_the_report_on_the_engine_of_the_walkthrough(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    (command,) = _blocks("bash", "docs/report.md")
    done = _run(folder, "bash", "-ec", command)
    assert "49 of 49 convolutions INT8" in done.stdout and "not known: how long each layer takes" in done.stdout
    assert (folder / "report.html").read_bytes().startswith(b"<!DOCTYPE html>")


def test_the_engine_of_the_walkthrough_runs(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    (commands,) = _blocks("bash", "docs/running.md", "In a shell")
    assert commands.count("trtopt run ") == 2
    _run(folder, "bash", "-ec", commands)
    found = json.loads((folder / "results/predictions.json").read_bytes())
    assert len(found) == len(list((folder / "quickstart-out" / "calibration").glob("*.png")))
    assert all(item["predictions"][0]["name"] for item in found)


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("docs/running.md", "In a service"),
        ("docs/running.md", "Many requests of one image"),
        ("docs/running.md", "The same arrays again and again"),
    ],
)
def test_a_service_runs_the_engine_of_the_walkthrough(folder: Path, page: str, heading: str) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    (script,) = _blocks("python", page, heading)
    assert _run(folder, "python", "-c", script).stdout.splitlines() == _said(script) != []


def test_the_engine_of_the_walkthrough_is_deployed(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    (command,) = _blocks("bash", "docs/serving.md")
    done = _run(folder, "bash", "-ec", command)
    assert "python backend, version 1; batches of up to 32" in done.stdout
    made = {path.name for path in (folder / "models" / "lite0").iterdir()}
    assert made == {"1", "config.pbtxt", "labels.txt"}
    (script,) = _blocks("python", "docs/serving.md")
    assert _run(folder, "python", "-c", script).stdout.splitlines() == _said(script) != []


def test_the_place_that_loses_most_is_named(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.calib.json")
    page = ("docs/accuracy.md", "Where accuracy is lost")
    command, repair, layers = _blocks("bash", *page)
    assert repair.startswith("trtopt calibrate lite0.clean.onnx ") and " --repair " in repair
    assert layers.startswith("trtopt verify lite0.clean.onnx ") and " --per-layer" in layers
    done = _run(folder, "bash", "-ec", command)
    for said in ("weights of node_Conv_882", "98 more: --top 0 prints all", "calibration isn't to blame"):
        assert said in _section(*page) and said in done.stdout


def test_what_is_wrong_is_said(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    (host,) = _blocks("bash", "docs/doctor.md")
    assert host.count("trtopt doctor") == 2
    done = subprocess.run(
        ["bash", "-c", host], cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1) and "error:" not in done.stderr, done.stderr[-2000:]
    assert "built for       sm89" in done.stdout, done.stdout


def test_what_replaces_the_flags_of_trtexec_exists() -> None:
    from typer.testing import CliRunner

    from trtopt.cli import app

    rows = re.findall(r"^\| `--.*? \| (.*) \|$", _section("docs/manual/from-trtexec.md", "The usual options"), re.M)
    assert len(rows) >= 12
    for row in rows:
        command = (re.findall(r"trtopt (\w+)", row) or ["build"])[0]
        told = CliRunner().invoke(app, [command, "--help"], terminal_width=200).output
        assert [option for option in re.findall(r"--[a-z][a-z0-9-]*", row) if option not in told] == []


def test_every_extra_is_in_the_table() -> None:
    options = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = re.findall(r"^([a-z0-9-]+) = \[", options, re.M)
    named = " ".join(re.findall(r"^\| (`.*?) \|", _section("docs/install.md"), re.M))
    assert {*extras} == {*re.findall(r"`([\w-]+)`", named), "dev"}


def test_every_command_is_in_the_table() -> None:
    from trtopt.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == set(re.findall(r"^\| `(\w+)` \| ", _section("docs/commands.md"), re.M))


def test_the_two_commands_exist() -> None:
    (commands,) = _blocks("bash", "README.md", "Two commands")
    scripts = re.findall(r"^(scripts/\w+)", commands, re.M)
    assert scripts == ["scripts/quickstart", "scripts/test"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_page_is_listed_and_in_the_navigation() -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    listed = {(ROOT / "docs" / link).resolve().relative_to(ROOT).as_posix() for link in links}
    pages = {path.relative_to(ROOT).as_posix() for path in PAGES} - {"README.md", "docs/README.md"}
    assert {page for page in pages if not page.startswith(("docs/results/", "docs/decisions/"))} <= listed
    navigation = (ROOT / "docs" / "manual" / "zensical.toml").read_text(encoding="utf-8")
    assert [page for page in sorted(pages) if f'"{page}"' not in navigation] == []


def test_the_readme_is_read_in_two_minutes() -> None:
    lengths = {"README.md": 130, "docs/architecture.md": 200, "CHANGELOG.md": 60}
    assert [page for page, most in lengths.items() if len((ROOT / page).read_text().splitlines()) > most] == []


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", text).lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", (ROOT / page).read_text(encoding="utf-8"))
    places = [((ROOT / page).parent / link if link else ROOT / page, anchor) for link, anchor in links]
    assert [path for path, _ in places if not path.exists()] == []
    assert [anchor for path, anchor in places if anchor and anchor not in _anchors(path)] == []
    assert page != "README.md" or len(links) >= 5
