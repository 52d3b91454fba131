"""doctor: hosts with faults that are made up, and this host, where it finds nothing wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from world import World, has

import trtopt
from trtopt import cli
from trtopt.cuda.device import DeviceInfo, Probe
from trtopt.diagnosis import doctor as doctors
from trtopt.diagnosis.doctor import Host, host_findings

ROOT = Path(trtopt.__file__).parent.parent
DRIVER = """
#include <string.h>
int cuInit(int flags) { return %(error)d; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Made-up GPU", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 16ul << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 8 : 9; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "made up"; return 0; }
"""


def diagnose(*arguments: Any, site: Path | None = None, **environment: str) -> dict[str, Any]:
    """What the command says as JSON, in a process of its own, with `site` before all other packages."""
    variables = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    variables |= {"PYTHONPATH": os.pathsep.join([*([str(site)] if site else []), str(ROOT)]), **environment}
    command = [sys.executable, "-m", "trtopt", "doctor", *map(str, arguments), "--json"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1), done.stderr
    return report


def library(path: Path, code: str) -> Path:
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=code, text=True, check=True)
    return path


def module(site: Path, name: str, code: str, version: str = "10.16.1.11") -> None:
    """A package of one module."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(code)
    (site / f"{name}-{version}.dist-info").mkdir()
    (site / f"{name}-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


# In processes of its own -----------------------------------------------------------------------------------------------------


def test_no_false_alarm_here_and_a_stable_form() -> None:
    report = diagnose()
    assert report["ok"], report["findings"]
    assert list(report) == ["format", "ok", "facts", "findings", "migration"]
    assert report["format"] == "trtopt.doctor/1"
    assert {"python", "system", "gpu", "cores", "cache"} <= set(report["facts"])


def test_what_went_names_what_to_type(world: World) -> None:
    has(world.refused("doctor", "m.engine"), "doctor M.engine went: trtopt inspect M.engine says what it is")
    has(world.refused("doctor", "--migrate", "trtexec", "m.onnx"), "--migrate takes one command, in quotes")
    page = ("report", "m.engine", "-o", "r.html")
    has(world.refused(*page, "--results", "p.json"), "--results went: what was measured lies beside the engine")
    has(world.refused(*page, "--against", "n.engine"), "trtopt inspect M.engine --diff OTHER.engine")


def test_it_imports_nothing_heavy() -> None:
    code = "import sys, trtopt\ntrtopt.doctor\n"
    code += "print([name for name in ('torch', 'numpy', 'onnx', 'tensorrt_rtx', 'cv2') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
AGAIN = "pip install --force-reinstall tensorrt==10.16.1.11"


@pytest.mark.parametrize(
    ("code", "said", "command"),
    [
        (CRASH, "SIGSEGV", AGAIN),
        ("import os\nos._exit(3)", "status 3", AGAIN),
        (
            "raise AttributeError(\"module 'numpy' has no attribute 'bool'\")",
            "no attribute 'bool'",
            "pip install -U tensorrt || pip install 'numpy<2'",
        ),
    ],
)
def test_an_import_that_fails_or_takes_its_process_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str, command: str
) -> None:
    module(tmp_path, "tensorrt", code)
    monkeypatch.syspath_prepend(str(tmp_path))
    at = Host({"tensorrt": "10.16.1.11"}, doctors.ask(["tensorrt"], 60.0), Probe())
    [fault] = [item for item in host_findings(at) if item.code == "import-tensorrt"]
    assert said in fault.fact and fault.command == command


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "tensorrt", "import time\ntime.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "no answer within 2 s" in doctors.ask(["tensorrt"], 2.0)["tensorrt"]["failure"]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    assert "no process can be started" in doctors.ask(["tensorrt"], 2.0)["tensorrt"]["failure"]


def test_a_driver_and_libraries_that_are_really_loaded(tmp_path: Path) -> None:
    found = library(tmp_path / "system" / "libnvinfer.so.10", "int getInferLibVersion(void) { return 101303; }")
    module(tmp_path, "tensorrt", f"import ctypes\n__version__ = '10.16.1.11'\nctypes.CDLL({str(found)!r})\n")
    module(tmp_path, "onnxruntime", "", "1.31.1")
    (tmp_path / "onnxruntime_gpu-1.31.1.dist-info").mkdir()
    (tmp_path / "onnxruntime_gpu-1.31.1.dist-info" / "METADATA").write_text("Name: onnxruntime-gpu\nVersion: 1.31.1\n")
    library(tmp_path / "onnxruntime" / "capi" / "libonnxruntime_providers_shared.so", "int shared;")
    library(tmp_path / "driver" / "libcuda.so.1", DRIVER % {"error": 0})
    report = diagnose(site=tmp_path, LD_LIBRARY_PATH=str(tmp_path / "driver"))
    faults = {item["code"]: item for item in report["findings"]}
    assert report["facts"]["gpu"] == "Made-up GPU (sm89, 16 GiB)" and "CUDA 12.4" in report["facts"]["driver"]
    assert report["facts"]["libnvinfer.so.10"] == str(found)
    assert faults["library-version"]["fact"] == f"tensorrt 10.16.1.11 runs on {found}, which is 10.13.3"
    assert "libonnxruntime_providers_cuda.so" in faults["onnxruntime-without-cuda"]["fact"]
    assert faults["onnxruntime-without-cuda"]["command"] == "pip install 'onnxruntime-gpu[cuda,cudnn]==1.31.1'"
    library(tmp_path / "driver" / "libcuda.so.1", DRIVER % {"error": 803})
    report = diagnose(LD_LIBRARY_PATH=str(tmp_path / "driver"))
    assert "error 803" in report["facts"]["gpu"]
    assert {item["code"]: item["command"] for item in report["findings"]}["driver-error"] == "sudo reboot"


# Hosts that are made up ------------------------------------------------------------------------------------------------------


def host(*gpus: int, packages: Any = {}, reason: str = "", driver: Any = (12, 4), **modules: Any) -> Host:  # noqa: B006
    """A host with these GPUs (compute capabilities) and modules by version."""
    devices = tuple(DeviceInfo(number, f"GPU of sm{sm}", sm, 16 << 30) for number, sm in enumerate(gpus))
    answers = {name: {"version": value} for name, value in modules.items()}
    return Host(packages, answers, Probe(devices, driver if gpus or reason else None, reason))


def found(at: Host) -> dict[str, str]:
    return {item.code: item.command for item in host_findings(at)}


def test_packages_over_each_other() -> None:
    names = ("onnxruntime", "onnxruntime-gpu", "opencv-contrib-python", "opencv-python")
    told = found(host(packages=dict.fromkeys(names, "1.0")))
    assert told["overlaid-onnxruntime"] == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime"
    assert told["overlaid-cv2"].endswith("&& pip install opencv-contrib-python-headless")
    on_gpu = found(host(89, packages=dict.fromkeys(names, "1.0")))
    assert on_gpu["overlaid-onnxruntime"].endswith("pip install 'onnxruntime-gpu[cuda,cudnn]'")
    assert "no-cuda-bindings" in on_gpu and "no-tensorrt" in on_gpu


def test_a_driver_for_another_cuda_than_the_wheels() -> None:
    packages = {"tensorrt-cu13": "10.16.1.11", "cuda-bindings": "13.0.1", "onnxruntime": "1.31"}
    at = host(89, packages=packages, tensorrt="10.16.1.11")
    old = {item.fact.split()[0]: item for item in host_findings(at) if item.code == "driver-too-old"}
    assert old["tensorrt-cu13"].command.endswith("&& pip install 'tensorrt-cu12==10.16.1.11'")
    assert old["cuda-bindings"].command == "pip install 'cuda-bindings==12.*'"
    assert "the driver runs CUDA 12.4 at most" in old["cuda-bindings"].fact
    assert "from driver 580 on" in old["cuda-bindings"].consequence
    assert "onnxruntime-on-cpu" in found(at)


@pytest.mark.parametrize(
    ("versions", "sm", "supported"),
    [
        ({"tensorrt": "8.6.1"}, 120, False),
        ({"tensorrt": "10.7.0"}, 120, False),
        ({"tensorrt": "10.16.1"}, 120, True),
        ({"tensorrt": "10.16.1"}, 70, False),
        ({"tensorrt": "8.6.1"}, 70, True),
        ({"tensorrt_rtx": "1.7"}, 90, False),
        ({"tensorrt_rtx": "1.7"}, 89, True),
    ],
)
def test_a_gpu_that_this_tensorrt_isnt_for(versions: dict[str, str], sm: int, supported: bool) -> None:
    assert ("gpu-not-supported" in found(host(sm, **versions))) is not supported


def test_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors, "_SYS", tmp_path / "sys")
    monkeypatch.setattr(doctors, "_DEV", tmp_path / "dev")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for code, command in ((802, "sudo systemctl enable --now nvidia-fabricmanager"), (12345, "nvidia-smi")):
        told = found(host(reason=f"cuInit failed with error {code}"))
        assert told["driver-error"] == command
    card = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x040300\n")  # its sound device
    assert "no-driver" not in found(host())
    (card / "class").write_text("0x030000\n")
    assert "no-driver" in found(host())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "gpu-hidden" in found(host(reason="none"))


def test_the_text_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors, "examine", lambda: host(packages={"onnxruntime": "1", "onnxruntime-gpu": "1"}))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1 and "    $ pip uninstall -y" in result.output
    words = {word for word in result.output.split() if len(word) > 30}
    lines = [line for line in result.output.splitlines() if not line.startswith("    $ ")]
    assert all(len(line) <= 80 or words & set(line.split()) for line in lines)
