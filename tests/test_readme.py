"""The README's walkthrough, run as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trtopt.data.samples import write_crops

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(heading: str, language: str) -> list[str]:
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    made = tmp_path_factory.mktemp("readme")
    write_crops("imagenet-crops", made / "photos")
    return made


def _environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TRTOPT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def test_the_walkthrough_runs_and_says_what_the_readme_says(folder: Path) -> None:
    (commands,) = _blocks("Walkthrough", "bash")
    assert commands.count("trtopt ") == 6
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "49 of 49 convolutions INT8; 1 of 1 matrix products INT8" in done.stdout
    assert "Traceback" not in done.stderr
    made = {path.name for path in folder.iterdir()}
    assert {"lite0.onnx", "lite0.clean.onnx", "lite0.calib.json", "lite0.engine", "lite0.engine.json"} <= made
    (script,) = _blocks("Walkthrough", "python")
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line, said in zip(done.stdout.splitlines(), re.findall(r"print\(.*?\)\s+# (.*)", script)):
        assert line == said


def test_the_engine_of_the_walkthrough_runs(folder: Path) -> None:
    if not (folder / "lite0.engine").is_file():
        pytest.skip("needs the walkthrough, which comes first")
    (commands,), scripts = _blocks("Run it", "bash"), _blocks("Run it", "python")
    assert commands.count("trtopt run ") == 2
    said = []
    for line in [["bash", "-ec", commands], *([sys.executable, "-c", script] for script in scripts)]:
        done = subprocess.run(line, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout)
    assert said[1:] == ["3 classes\n", "(1, 1000)\n"]
    found = json.loads((folder / "results/predictions.json").read_bytes())
    assert len(found) == len(list((folder / "photos").glob("*.png")))
    assert all(item["predictions"][0]["name"] for item in found)


def test_the_options_of_the_comparison_exist() -> None:
    from typer.testing import CliRunner

    from trtopt.cli import app

    section = README.split("\n## Never slower than FP16\n")[1].split("\n## ")[0]
    options = set(re.findall(r"--[a-z][a-z0-9-]*", section))
    assert {"--best", "--no-compare", "--min-agreement", "--min-snr"} <= options
    told = CliRunner().invoke(app, ["build", "--help"], terminal_width=200).output
    assert [option for option in options if option not in told] == []
    (command,) = _blocks("Never slower than FP16", "bash")
    assert command.startswith("trtopt build ")


def test_every_command_is_in_the_table() -> None:
    from trtopt.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == set(re.findall(r"^\| `(\w+)` \| [a-zA-Z]", README.split("## Install")[0], re.M))


def test_the_two_commands_exist() -> None:
    (commands,) = _blocks("Two commands", "bash")
    scripts = re.findall(r"^(scripts/\w+)", commands, re.M)
    assert scripts == ["scripts/quickstart", "scripts/test"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link).exists()] == []
