"""Which models are loaded again, when: with processes in the place of tritonserver's and its Python backend's."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trtopt.serving import control
from trtopt.serving.control import Control, Watch

# For each line it starts a process that is called as the Python backend's are, and lives as long as the line says.
SERVER = """
import subprocess, sys
for line in sys.stdin:
    script, seconds = line.split()
    made = subprocess.Popen(["triton_python_backend_stub", script, seconds], executable="/bin/sh")
    while made.poll() is None and not open(f"/proc/{made.pid}/cmdline").read():
        pass  # the system names it a moment after it was started
    print("started", flush=True)
"""


class Server(Control):
    """A server of which a model's process lives as many seconds as `lives` says of its number; None: it can't be loaded."""

    def __init__(self, folder: Path) -> None:
        super().__init__("localhost:0")
        self.folder, self.loads, self.lives = (
            folder,
            list[tuple[str, float]](),
            dict[str, Callable[[int], float | None]](),
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def reload(self, name: str) -> None:
        number = len([model for model, _ in self.loads if model == name])
        self.loads.append((name, time.monotonic()))
        seconds = self.lives[name](number)
        if seconds is None:
            raise OSError("HTTP Error 400: Bad Request")
        script = self.folder / name / "1" / "model.py"
        if not script.exists():
            script.parent.mkdir(parents=True)
            script.write_text("sleep $1\n")  # in a process of its own: the shell keeps its name
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{script} {seconds}\n".encode())
        self.process.stdin.flush()
        if self.process.stdout.readline() != b"started\n":
            raise OSError("the server is gone")

    def waits(self, name: str) -> list[float]:
        times = [when for model, when in self.loads if model == name]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(control, "_EACH", 0.01)
    monkeypatch.setattr(control, "_FIRST", 0.1)
    monkeypatch.setattr(control, "_LONGEST", 0.4)
    played = Server(tmp_path)
    yield played
    os.killpg(played.process.pid, signal.SIGKILL)  # what it started, too
    played.process.wait()


def watched(server: Server, *names: str, loads: int) -> None:
    """Load these, and watch until there were so many loads in all."""
    for name in names:
        server.reload(name)
    watch, deadline = Watch(server.process, server), time.monotonic() + 60
    while len(server.loads) < loads and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.end()
    assert len(server.loads) >= loads


def test_a_model_that_dies_at_each_load_waits_longer_each_time(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.lives = {"bad": lambda number: 0 if number else 0.5, "good": lambda number: 600}
    watched(server, "good", "bad", loads=8)
    waits = server.waits("bad")
    for wait, least in zip(waits[1:6], (0.1, 0.2, 0.4, 0.4)):  # the first time it is loaded at once
        assert wait >= least
    assert [name for name, _ in server.loads].count("good") == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: a process of model 'bad' ended; loading it again",
        "warning: a process of model 'bad' ended; from now on it is loaded after growing waits, of up to 0.4 s each",
    ]


def test_one_that_lived_long_is_loaded_at_once_again(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.lives = {"model": lambda number: (0.5, 0, 1, 600)[number]}
    watched(server, "model", loads=4)
    assert capsys.readouterr().err.count("loading it again") == 2


def test_one_that_can_not_be_loaded_is_tried_again(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.lives = {"model": lambda number: (0.5, None, None, None, 600)[number]}
    watched(server, "model", loads=5)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[1] == (
        "warning: model 'model' can't be loaded again: HTTP Error 400: Bad Request; from now on it is loaded after growing "
        "waits, of up to 0.4 s each"
    )
