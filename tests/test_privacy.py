"""Nothing is reported to anybody: ONNX Runtime's wheels send telemetry unless they are told not to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from world import net, samples

import trtopt
from trtopt.core.library_output import TELEMETRY_OFF, unreported

EVERYTHING = """
import os, sys
imported = []
class Door:
    def find_spec(name, path=None, target=None):
        if name == "onnxruntime" and "load" in sys._getframe(2).f_code.co_name:  # not only looked for
            imported.append(os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Door)
import torch, trtopt
from trtopt.data import open_data
from trtopt.graph.io import load_model
layers = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3))
trtopt.export(layers, "e.onnx", inputs={"x": ("batch", 3, 32, 32)})
trtopt.check("m.onnx", fix="c.onnx")
trtopt.calibrate("m.onnx", "t.calib.json", data="d.npz")
trtopt.verify("m.onnx", "c.onnx", open_data(load_model("m.onnx").inputs, data="d.npz"))
trtopt.run("c.onnx", input="d.npz", backend="onnxruntime")
assert trtopt.run_jobs("jobs.toml", workers=1).ok
assert imported and set(imported) == {"1"}, imported
assert "ORT_DISABLE_TELEMETRY" not in os.environ  # the host's, which is left as it was
"""
JOBS = '[data.arrays]\ndata = "d.npz"\n[[job]]\nmodel = "m.onnx"\ndata = "arrays"\n'


def _can(*command: str) -> bool:
    return bool(shutil.which(command[0])) and subprocess.run([*command, "true"], capture_output=True).returncode == 0


def test_no_file_and_no_connection(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch isn't installed: pip install 'trtopt[torch]'")
    for name in ("home", "tmp", "cache", "work"):
        (tmp_path / name).mkdir()
    work = tmp_path / "work"
    onnx.save(net(), work / "m.onnx")
    np.savez(work / "d.npz", x=samples(40))
    (work / "jobs.toml").write_text(JOBS)
    environment = {name: value for name, value in os.environ.items() if name != TELEMETRY_OFF and "XDG" not in name}
    places = {"HOME": "home", "TMPDIR": "tmp", "TRTOPT_CACHE": "cache"}
    environment |= {name: str(tmp_path / place) for name, place in places.items()}
    log = tmp_path / "connections"
    watched = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect,sendto,sendmsg"]
    can_watch = _can(*watched, "-o", os.devnull)
    command = [*watched, "-o", str(log)] if can_watch else []
    command += ["unshare", "-n"] if _can("unshare", "-n") else []
    done = subprocess.run(
        [*command, sys.executable, "-c", EVERYTHING],
        cwd=work,
        env=environment | {"PYTHONPATH": str(Path(trtopt.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    left = [path.name for name in ("home", "tmp") for path in (tmp_path / name).rglob("*")]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # PyTorch makes that folder
    if not can_watch:
        pytest.skip("no file was left; connections weren't looked at, as strace isn't there or not allowed")
    tried = [line for line in log.read_text().splitlines() if "AF_INET" in line]
    assert tried == []


def test_a_value_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)  # once it is imported, nothing has to be set
    monkeypatch.setenv(TELEMETRY_OFF, "0")
    with unreported():
        assert os.environ[TELEMETRY_OFF] == "0"
    monkeypatch.delenv(TELEMETRY_OFF)
    with unreported():
        assert os.environ[TELEMETRY_OFF] == "1"
    assert TELEMETRY_OFF not in os.environ
