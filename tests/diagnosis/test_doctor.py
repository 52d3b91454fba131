"""The whole command on hosts with seeded faults, and on this one, where it finds none."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from seeding import ROOT, commands, diagnose, library, module, nvidia_driver, package

import trtopt
from trtopt.diagnosis import checks, host as hosts
from trtopt.diagnosis.host import Host, examine
from trtopt.diagnosis.probes import ask


def faults(report: dict[str, Any]) -> dict[str, str]:
    wrong = [item for item in report["findings"] if item["level"] != "info"]
    return commands({"findings": wrong})


def test_no_false_alarm_here_and_a_stable_form() -> None:
    report = diagnose()
    assert faults(report) == {}, report["findings"]
    assert report["ok"]
    assert list(report) == ["format", "ok", "facts", "findings", "migration"]
    assert report["format"] == "trtopt.doctor/1"
    assert {"python", "system", "gpu", "cores", "output", "cache", "temporary"} <= set(report["facts"])


def test_it_takes_little_time_and_imports_nothing_heavy() -> None:
    code = "import sys\nsys.argv = ['trtopt', 'doctor']\nfrom trtopt import cli\n"
    code += "heavy = ('torch', 'numpy', 'onnx', 'tensorrt_rtx', 'cv2')\n"
    code += "try:\n    cli.main()\nfinally:\n    print([name for name in heavy if name in sys.modules])"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    # Processor time of all its processes together: other tests beside this one don't count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_onnx_runtime_without_the_libraries_of_cuda(tmp_path: Path) -> None:
    site = tmp_path / "site"
    package(site, "onnxruntime_gpu", "1.31.1")
    module(site, "onnxruntime", "")
    library(site / "onnxruntime" / "capi" / "libonnxruntime_providers_shared.so", "int shared;")
    driver = str(nvidia_driver(tmp_path / "driver"))
    found = diagnose(site=site, LD_LIBRARY_PATH=driver)["findings"]
    [fault] = [item for item in found if item["code"] == "onnxruntime-without-cuda"]
    assert "libonnxruntime_providers_cuda.so" in fault["fact"]
    assert fault["command"] == "pip install 'onnxruntime-gpu[cuda,cudnn]==1.31.1'"
    assert "onnxruntime-without-cuda" not in commands(diagnose(site=site))  # no GPU: nobody misses it
    library(site / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so", "int cuda;")
    assert "onnxruntime-without-cuda" not in commands(diagnose(site=site, LD_LIBRARY_PATH=driver))


def test_the_library_that_is_loaded_is_told() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    told = diagnose()["facts"]
    assert told["TensorRT-RTX"].startswith("1.")
    assert any(Path(path).is_file() for name, path in told.items() if name.startswith("libtensorrt_rtx.so"))


def test_packages_over_each_other_and_against_each_other(tmp_path: Path) -> None:
    site = tmp_path / "site"
    package(site, "onnxruntime_gpu", "1.20.1")
    package(site, "onnxruntime", "1.20.1")
    package(site, "opencv_contrib_python", "4.10.0.84")
    package(site, "opencv_python", "4.10.0.84")
    for cuda in (12, 13):
        package(site, f"tensorrt_cu{cuda}", "10.16.1.11")
        package(site, f"tensorrt_cu{cuda}_libs", "10.16.1.11")
    package(site, "tensorrt", "10.13.0.35")
    package(site, "polygraphy", "0.49.0", "numpy<2", "protobuf<4,>=3.20")
    package(site, "numpy", "1.26.4")
    found = faults(diagnose(site=site))
    assert found["overlaid-onnxruntime"] == ("pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime")
    assert found["overlaid-cv2"].endswith("&& pip install opencv-contrib-python-headless")
    assert found["tensorrt-parts"].startswith("pip install --force-reinstall tensorrt==10.13.0.35 ")
    assert found["unmet-requirement"] == "pip install 'protobuf<4,>=3.20'"


def test_parts_of_a_post_release(tmp_path: Path) -> None:
    package(tmp_path, "tensorrt", "8.6.1.post1")
    package(tmp_path, "tensorrt_libs", "8.6.1")
    assert "tensorrt-parts" not in commands(diagnose(site=tmp_path))


CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(
    ("code", "said", "command"),
    [
        (CRASH, "SIGSEGV", "pip install --force-reinstall tensorrt==10.16.1.11"),
        (
            "raise ImportError('libnvinfer.so.10: cannot open shared object file: No such file or directory')",
            "libnvinfer.so.10",
            "pip install --force-reinstall tensorrt==10.16.1.11",
        ),
        (
            "raise AttributeError(\"module 'numpy' has no attribute 'bool'\")",
            "no attribute 'bool'",
            "pip install -U tensorrt || pip install 'numpy<2'",
        ),
        ("import os\nos._exit(3)", "status 3", "pip install --force-reinstall tensorrt==10.16.1.11"),
    ],
)
def test_an_import_that_fails_or_takes_its_process_along(tmp_path: Path, code: str, said: str, command: str) -> None:
    package(tmp_path, "tensorrt", "10.16.1.11")
    module(tmp_path, "tensorrt", code)
    report = diagnose(site=tmp_path)
    [fault] = [item for item in report["findings"] if item["code"] == "import-tensorrt"]
    assert said in fault["fact"]
    assert fault["command"] == command


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "tensorrt", "import time\ntime.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hosts, "PATIENCE", 5.0)
    [fault] = [item for item in trtopt.doctor().findings if item.code == "import-tensorrt"]
    assert "no answer within 5 s" in fault.fact


VERSION = "int getInferLibVersion(void) {{ return {number}; }}"
LOADS = "import ctypes\n__version__ = '10.16.1.11'\nctypes.CDLL({path!r})\n"


def test_bindings_of_one_tensorrt_on_the_library_of_another(tmp_path: Path) -> None:
    found = library(tmp_path / "system" / "libnvinfer.so.10", VERSION.format(number=101303))
    module(tmp_path, "tensorrt", LOADS.format(path=str(found)))
    report = diagnose(site=tmp_path)
    [fault] = [item for item in report["findings"] if item["code"] == "library-version"]
    assert fault["fact"] == f"tensorrt 10.16.1.11 runs on {found}, which is 10.13.3"
    assert fault["command"] == "unset LD_LIBRARY_PATH; pip install --force-reinstall tensorrt==10.16.1.11"
    assert report["facts"]["libnvinfer.so.10"] == str(found)


@pytest.mark.parametrize(
    ("error", "command"),
    [
        (803, "sudo reboot"),
        (802, "sudo systemctl enable --now nvidia-fabricmanager"),
        (999, "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm"),
        (12345, "nvidia-smi"),
    ],
)
def test_what_the_driver_says(tmp_path: Path, error: int, command: str) -> None:
    folder = nvidia_driver(tmp_path, error=error)
    report = diagnose(LD_LIBRARY_PATH=str(folder))
    assert commands(report)["driver-error"] == command
    assert f"error {error}" in report["facts"]["gpu"]


def test_hidden_gpus(tmp_path: Path) -> None:
    folder = nvidia_driver(tmp_path, devices=0)
    found = commands(diagnose(LD_LIBRARY_PATH=str(folder), CUDA_VISIBLE_DEVICES="-1"))
    assert found["gpu-hidden"] == "unset CUDA_VISIBLE_DEVICES"


def test_a_driver_for_another_cuda_than_the_wheels(tmp_path: Path) -> None:
    site = tmp_path / "site"
    package(site, "tensorrt_cu13", "10.16.1.11")
    package(site, "cuda_bindings", "13.0.1")
    package(site, "torch", "2.9.0")
    module(site, "torch", "")
    (site / "torch" / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    folder = nvidia_driver(tmp_path / "driver", cuda=(12, 4))
    report = diagnose(site=site, LD_LIBRARY_PATH=str(folder))
    old = {item["fact"].split()[0]: item for item in report["findings"] if item["code"] == "driver-too-old"}
    assert old["tensorrt-cu13"]["command"].endswith("&& pip install 'tensorrt-cu12==10.16.1.11'")
    assert old["cuda-bindings"]["command"] == "pip install 'cuda-bindings==12.*'"
    assert "the driver runs CUDA 12.4 at most" in old["torch"]["fact"]
    assert "from driver 580 on" in old["torch"]["consequence"]
    assert report["facts"]["gpu"] == "Made-up GPU (sm89, 16 GiB)"


@pytest.mark.parametrize(
    ("version", "sm", "supported"),
    [
        ("8.6.1", 120, False),
        ("10.7.0", 120, False),
        ("10.16.1", 120, True),
        ("10.16.1", 70, False),
        ("8.6.1", 70, True),
    ],
)
def test_a_gpu_that_this_tensorrt_isnt_for(tmp_path: Path, version: str, sm: int, supported: bool) -> None:
    module(tmp_path, "tensorrt", f"__version__ = {version!r}")
    folder = nvidia_driver(tmp_path / "driver", sm=sm)
    found = commands(diagnose(site=tmp_path, LD_LIBRARY_PATH=str(folder)))
    assert ("gpu-not-supported" in found) is not supported


def test_a_gpu_that_tensorrt_rtx_has_no_engines_for(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    folder = nvidia_driver(tmp_path, sm=90)
    assert "tensorrt" in commands(diagnose(LD_LIBRARY_PATH=str(folder)))["gpu-not-supported"]
    assert "gpu-not-supported" not in commands(diagnose(LD_LIBRARY_PATH=str(nvidia_driver(tmp_path / "ada"))))


# The machine's files are read in this process, from folders that can be others.


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PROC", "SYS", "DEV", "ETC"):
        (tmp_path / name.lower()).mkdir()
        monkeypatch.setattr(hosts, f"_{name}", tmp_path / name.lower())
    (tmp_path / "dev" / "shm").mkdir()
    monkeypatch.setattr("trtopt.core.host.CGROUP", str(tmp_path / "cgroup"))
    monkeypatch.setattr(
        hosts, "ask", lambda probes, patience: {"gpu": hosts.Answer({"devices": [], "reason": "no driver"})}
    )
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def found(host: Host) -> dict[str, str]:
    return {item.code: item.command for item in checks.findings(host)}


def test_a_clean_machine(machine: Path) -> None:
    assert set(found(examine())) <= {"no-extension"}


def test_a_check_that_fails_itself(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(host: Host) -> Any:
        raise KeyError("nobody thought of it")

    monkeypatch.setattr("trtopt.diagnosis.checks.CHECKS", (broken, *checks.CHECKS))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert {"check-failed", "variable"} <= set(found(examine()))


def test_a_gpu_without_a_driver(machine: Path) -> None:
    card = machine / "sys" / "bus" / "pci" / "devices" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x040300\n")  # its sound device
    assert "no-driver" not in found(examine())
    (card / "class").write_text("0x030000\n")
    (machine / "etc" / "os-release").write_text('NAME="Ubuntu"\nID=ubuntu\n')
    host = examine()
    expected = "docker run --gpus all …" if host.container else "sudo ubuntu-drivers install && sudo reboot"
    assert found(host)["no-driver"] == expected


def test_a_kernel_module_of_another_driver(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = machine / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n")
    for library_version, wrong in (("550.54.15", True), ("550.54.14", False)):
        name = f"libcuda.so.{library_version}"
        said = {"devices": [], "reason": "", "driver": [12, 4], "libraries": {name: f"/usr/lib/{name}"}}
        monkeypatch.setattr(hosts, "ask", lambda probes, patience, said=said: {"gpu": hosts.Answer(said)})
        assert ("driver-mismatch" in found(examine())) is wrong
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert examine().kernel_driver == "580.65.06"


def test_little_memory(machine: Path) -> None:
    (machine / "cgroup").mkdir()
    for name, value in (("memory.max", "2147483648"), ("memory.current", "2000000000"), ("memory.stat", "file 0")):
        (machine / "cgroup" / name).write_text(f"{value}\n")
    assert found(examine())["little-memory"] == "ps aux --sort=-rss | head"


def test_full_disks(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        total, free = 64 << 20, 1 << 20

    monkeypatch.setattr(hosts.shutil, "disk_usage", lambda path: Usage)
    codes = found(examine())
    assert codes["temporary-disk-full"] == "export TMPDIR=FOLDER_WITH_ROOM"
    assert {"output-disk-full", "cache-disk-full"} <= set(codes)


def test_where_no_process_can_be_started_that_is_said_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(machine / "no python"))
    monkeypatch.setattr(hosts, "ask", ask)
    host = examine()
    codes = found(host)
    assert f"ls -lL '{machine / 'no python'}'; ulimit -u" == codes["no-processes"]
    assert not [code for code in codes if code.startswith("import-") or code == "driver-crash"]


def test_a_cache_that_cant_be_written_to(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "file").write_text("")
    monkeypatch.setenv("TRTOPT_CACHE", str(machine / "file" / "cache"))
    assert found(examine())["cache-not-writable"] == "export TRTOPT_CACHE=FOLDER_WITH_ROOM"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("CUDA_MODULE_LOADING", "EAGER"),
    ],
)
def test_variables_that_slow_things_down(machine: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert found(examine())["variable"] == f"unset {name}"


def test_old_pythons_and_other_c_libraries(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.platform, "python_version", lambda: "3.14.0")
    monkeypatch.setattr(hosts, "_glibc", lambda: "")
    assert {"python-version", "no-glibc"} <= set(found(examine()))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_text_fits_the_terminal_and_eighty_columns(
    machine: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long = machine.joinpath(*["a-folder-with-a-long-name"] * 5)
    monkeypatch.setenv("TRTOPT_CACHE", str(long))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(hosts, "_glibc", lambda: "")
    lines = str(trtopt.doctor()).split("\n")
    assert max(map(len, lines)) <= min(80, columns)
    assert "    $ unset CUDA_LAUNCH_BLOCKING" in lines
    assert lines[-1] == "1 error, 1 warning, 0 info"
