"""The words said where native code ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from trtopt.core import native

pytestmark = pytest.mark.skipif(not hasattr(native._module, "last_words"), reason="the C extension isn't built")
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def ended(code: str) -> subprocess.CompletedProcess[str]:
    start = "from trtopt.core.native import last_words\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)


def test_a_crash_is_put_into_words_and_ends_the_process_as_it_does_without() -> None:
    done = ended(f"with last_words('error: it ended'):\n    {CRASH}")
    assert (done.returncode, done.stderr) == (-signal.SIGSEGV, "\nerror: it ended\n")
    done = ended("import ctypes\nwith last_words('first'), last_words('error: abort'):\n    ctypes.CDLL(None).abort()")
    assert (done.returncode, done.stderr) == (-signal.SIGABRT, "\nerror: abort\n")


def test_a_name_that_is_no_utf8_is_written_with_escapes() -> None:
    done = ended(f"with last_words('error: mod\\udce8le'):\n    {CRASH}")
    assert (done.returncode, done.stderr) == (-signal.SIGSEGV, "\nerror: mod\\udce8le\n")


def test_afterwards_the_process_is_as_it_was() -> None:
    done = ended(f"with last_words('a'):\n    with last_words('b'):\n        pass\n    pass\n{CRASH}")
    assert (done.returncode, done.stderr) == (-signal.SIGSEGV, "")
    late = "import faulthandler\nwith last_words('error: it ended'):\n    faulthandler.enable()\n"
    assert ended(late + CRASH).stderr.startswith("Fatal Python error: Segmentation fault")
    closed = f"import sys; sys.stderr = None\nwith last_words('nobody reads it'):\n    {CRASH}"
    assert ended(closed).returncode == -signal.SIGSEGV


def test_who_handles_crashes_goes_on_doing_so() -> None:
    done = ended(f"import faulthandler; faulthandler.enable()\nwith last_words('error: it ended'):\n    {CRASH}")
    assert done.returncode == -signal.SIGSEGV and done.stderr.startswith("Fatal Python error: Segmentation fault")
