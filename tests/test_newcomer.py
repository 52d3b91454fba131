"""The page on an own model, run as printed; the walkthrough of an installed trtopt is in test_readme.py."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from world import World

from trtopt.data.samples import write_crops

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "your-own-model.md").read_text(encoding="utf-8")


def ran(world: World, *arguments: object) -> str:
    found = world.run(*arguments)
    assert found.status == 0, found.err
    return found.out


@pytest.mark.usefixtures("rtx")
def test_the_page_on_your_own_model(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in order: a block that begins with a file's name is that file, the others are run."""
    monkeypatch.chdir(world.output)
    Path("quickstart-out").mkdir()
    write_crops("imagenet-crops", "quickstart-out/calibration")
    commands, said = 0, ""
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S):
        name = re.match(r"# (\w+\.\w+)\n", block)
        if name:
            Path(name[1]).write_text(block)
        elif language == "python":
            done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines() == re.findall(r"print\(.*?\)\s+# (.*)", block)
        elif "\ntrtopt " not in f"\n{block}":
            subprocess.run(["bash", "-ec", f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n{block}'], check=True)
        else:
            for line in block.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line)
                if program == "python":
                    subprocess.run([sys.executable, *arguments], check=True)
                else:
                    assert program == "trtopt"
                    said += ran(world, *arguments)
                    commands += 1
    assert commands == 12
    assert "2 of 2 convolutions INT8; 1 of 1 matrix products INT8" in said
    assert "vector (embedding): cosine 0.99" in said and "outside the limit" not in said
    assert len(np.load("sentences.npz")["ids"]) == 256
