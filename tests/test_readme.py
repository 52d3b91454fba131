"""The README's walkthrough, run as it stands by trtopt installed from a wheel, outside the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from wheel_environment import environment

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "trtopt").rglob("*.md")]


def _blocks(heading: str, language: str) -> list[str]:
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.S)


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
    assert names.split() == sorted(path.stem for path in (ROOT / "trtopt" / "recipes" / "models").glob("*.toml"))


def test_the_walkthrough_runs_and_says_what_the_readme_says(folder: Path) -> None:
    (commands,) = _blocks("Walkthrough", "bash")
    assert commands.count("trtopt ") == 6
    done = _run(folder, "bash", "-ec", commands)
    assert "49 of 49 convolutions INT8; 1 of 1 matrix products INT8" in done.stdout
    assert "Traceback" not in done.stderr
    made = {path.name for path in folder.iterdir()}
    assert {"lite0.onnx", "lite0.clean.onnx", "lite0.calib.json", "lite0.engine", "lite0.engine.json"} <= made
    (script,) = _blocks("Walkthrough", "python")
    done = _run(folder, "python", "-c", script)
    for line, said in zip(done.stdout.splitlines(), re.findall(r"print\(.*?\)\s+# (.*)", script)):
        assert line == said


def test_engines_that_take_pixels(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.calib.json")
    (commands,), (script,) = _blocks("Pixels in", "bash"), _blocks("Pixels in", "python")
    done = [_run(folder, *words) for words in (["bash", "-ec", commands], ["python", "-c", script])]
    assert "49 of 49 convolutions INT8" in done[0].stdout
    assert "same class for 95.3% of 64 samples, 16.3 dB" in done[0].stdout
    assert done[1].stdout.splitlines() == re.findall(r"print\(.*?\)\s+# (.*)", script)


def test_the_report_on_the_engine_of_the_walkthrough(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    (command,) = _blocks("See inside", "bash")
    done = _run(folder, "bash", "-ec", command)
    assert "49 of 49 convolutions INT8" in done.stdout and "not known: how long each layer takes" in done.stdout
    assert (folder / "report.html").read_bytes().startswith(b"<!DOCTYPE html>")


def test_an_engine_is_built_once(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.clean.onnx")
    (commands,) = _blocks("Build once", "bash")
    done = _run(folder, "bash", "-ec", commands)
    assert done.stderr.count("building with TensorRT-RTX") == 1
    assert (folder / "first.engine").read_bytes() == (folder / "second.engine").read_bytes()
    assert "store: 1 engine, " in done.stdout


def test_the_engine_of_the_walkthrough_runs(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    (commands,), scripts = _blocks("Run it", "bash"), _blocks("Run it", "python")
    assert commands.count("trtopt run ") == 2
    _run(folder, "bash", "-ec", commands)
    assert [_run(folder, "python", "-c", script).stdout for script in scripts] == [
        "3 classes\n",
        "(1, 1000)\n",
        "(1, 1000)\n",
    ]
    found = json.loads((folder / "results/predictions.json").read_bytes())
    assert len(found) == len(list((folder / "quickstart-out" / "calibration").glob("*.png")))
    assert all(item["predictions"][0]["name"] for item in found)


def test_the_engine_of_the_walkthrough_is_deployed(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    (command,) = _blocks("Serve it", "bash")
    done = _run(folder, "bash", "-ec", command)
    assert "python backend, version 1; batches of up to 32" in done.stdout
    assert {path.name for path in (folder / "models" / "lite0").iterdir()} == {
        "1",
        "config.pbtxt",
        "labels.txt",
        "warmup",
    }


def test_the_place_that_loses_most_is_named(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.calib.json")
    command, repair = _blocks("Where accuracy is lost", "bash")
    assert repair.startswith("trtopt calibrate lite0.clean.onnx ") and " --repair " in repair
    done = _run(folder, "bash", "-ec", command)
    for said in ("weights of node_Conv_882", "98 more: --top 0 prints all", "calibration isn't to blame"):
        assert said in README and said in done.stdout


def test_what_is_wrong_is_said(folder: Path) -> None:
    _after_the_walkthrough(folder, "lite0.engine")
    host, old = _blocks("Something is wrong", "bash")
    assert host.count("trtopt doctor") == 3
    for commands, told in ((host, ("built for       sm89", "opset ")), (old, ("$ trtopt build model.onnx --fp16",))):
        done = subprocess.run(
            ["bash", "-c", commands], cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=120
        )
        assert done.returncode in (0, 1) and "error:" not in done.stderr, done.stderr[-2000:]
        assert all(line in done.stdout for line in told), done.stdout


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


def test_what_replaces_the_flags_of_trtexec_exists() -> None:
    from typer.testing import CliRunner

    from trtopt.cli import app

    rows = re.findall(r"^\| `--.*? \| (.*) \|$", README.split("\n## From trtexec\n")[1].split("\n## ")[0], re.M)
    assert len(rows) >= 12
    for row in rows:
        command = (re.findall(r"trtopt (\w+)", row) or ["build"])[0]
        told = CliRunner().invoke(app, [command, "--help"], terminal_width=200).output
        assert [option for option in re.findall(r"--[a-z][a-z0-9-]*", row) if option not in told] == []


def test_every_extra_is_in_the_table() -> None:
    options = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = re.findall(r"^([a-z0-9-]+) = \[", options, re.M)
    table = README.split("\n## Install\n")[1].split("\n## ")[0]
    named = " ".join(re.findall(r"^\| (`.*?) \|", table, re.M))
    assert {*extras} == {*re.findall(r"`([\w-]+)`", named), "dev"}


def test_every_command_is_in_the_table() -> None:
    from trtopt.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == set(re.findall(r"^\| `(\w+)` \| [a-zA-Z]", README.split("## Install")[0], re.M))


def test_the_two_commands_exist() -> None:
    (commands,) = _blocks("Two commands", "bash")
    scripts = re.findall(r"^(scripts/\w+)", commands, re.M)
    assert scripts == ["scripts/quickstart", "scripts/test"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
    assert page != "README.md" or len(links) >= 5
