"""However a signal is answered inside, the command ends by it: with its status, and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import sys, time
import trtopt
from trtopt.core import stopping
from trtopt.__main__ import main
from trtopt.core.temporary import scratch
def version(**_):
    with scratch() as folder:
        print("at work", flush=True)
        {work}
trtopt.version = version
sys.argv = ["trtopt", "version"]
main()
"""
WORKS = {
    "Python": "time.sleep(60)",
    # CPython may turn an exception within an import into another, and libraries may swallow it
    "turned": "\n        try: time.sleep(60)\n        except KeyboardInterrupt: raise SyntaxError('\\\\N escapes')",
    "caught": "\n        try: time.sleep(60)\n        except KeyboardInterrupt: raise trtopt.TrtoptError('import failed')",
    "in a text's code": "\n        exec('time.sleep(60)')",  # dataclasses run such texts as modules are imported
    "in a callback": "\n        stopping.PATIENCE = 60\n        class Gone:\n            def __del__(self): time.sleep(60)"
    "\n        Gone(); time.sleep(60)",
    "swallowed": "\n        try: time.sleep(60)\n        except: pass\n        return trtopt_version()",
    "swallowed for long": "stopping.PATIENCE = 0.3\n        try: time.sleep(60)\n        except: time.sleep(60)",
    "in native code": "stopping.PATIENCE = 0.3; __import__('ctypes').CDLL(None).sleep(60)",
}


def _run(tmp_path: Path, work: str, *numbers: signal.Signals, before: str = "") -> subprocess.CompletedProcess[str]:
    code = before + "import trtopt\ntrtopt_version = trtopt.version\n" + COMMAND.replace("{work}", work)
    (tmp_path / "command.py").write_text(code)
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "command"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # where the tests' is ignored
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    for number in numbers:
        process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return subprocess.CompletedProcess([], process.returncode, out, err)


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGINT), (signal.SIGHUP,)])
def test_each_signal_ends_a_command(tmp_path: Path, numbers: tuple[signal.Signals, ...]) -> None:
    done = _run(tmp_path, WORKS["Python"], *numbers)
    assert done.returncode in [128 + number for number in numbers]  # which of them Python saw first
    assert done.stderr == "stopped\n"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("work", list(WORKS)[1:])
def test_an_interruption_that_is_lost_still_counts(tmp_path: Path, work: str) -> None:
    done = _run(tmp_path, WORKS[work], signal.SIGTERM)
    assert (done.returncode, done.stderr) == (143, "stopped\n")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_under_nohup_a_lost_terminal_ends_nothing(tmp_path: Path) -> None:
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = _run(tmp_path, "time.sleep(0.3)\n        return trtopt_version()", signal.SIGHUP, before=before)
    assert done.returncode == 0, done.stderr
