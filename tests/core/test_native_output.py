"""The command line's streams carry what Python prints, and nothing that native code writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from graphs import conv_relu

NATIVE = """
import ctypes, os, sys
from trtopt.core.native_output import keep_apart, lines
keep_apart()
keep_apart()  # once is enough
libc = ctypes.CDLL(None)
os.write(1, b"WARNING: in op clamp\\n")
libc.puts(b"buffered by C")
os.write(2, b"\\x1b[0;93mcoloured\\n")
print("own")
print("own error", file=sys.stderr)
print(lines())
"""


def _python(text: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_native_lines_reach_neither_stream_and_are_kept() -> None:
    done = _python(NATIVE)
    assert done.stdout.splitlines()[0] == "own"
    assert done.stderr == "own error\n"
    kept = sorted(eval(done.stdout.splitlines()[1]))  # C buffers its own
    assert kept == ["WARNING: in op clamp", "\\x1b[0;93mcoloured", "buffered by C"]


def _command(redirections: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    python = f'"{sys.executable}" -m trtopt {" ".join(arguments)} {redirections}'
    return subprocess.run(
        ["sh", "-c", python], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["--help"], ["version", "--json"]])
def test_a_full_standard_output_is_an_error_like_others(arguments: list[str]) -> None:
    done = _command("> /dev/full", *arguments)
    assert (done.returncode, done.stderr) == (1, "error: can't write to standard output: No space left on device\n")


def test_closed_streams_stop_nothing(tmp_path: Path) -> None:
    onnx.save(conv_relu(), tmp_path / "m.onnx")
    done = _command("<&- >&- 2>&-", "check", str(tmp_path / "m.onnx"), "--fix", str(tmp_path / "fixed.onnx"))
    assert done.returncode == 0
    assert len(onnx.load(tmp_path / "fixed.onnx").graph.node) == 2  # nothing was printed into it


def test_where_native_code_ends_the_process_python_says_where_it_stood() -> None:
    done = _python(
        "import ctypes\nfrom trtopt.core.native_output import keep_apart; keep_apart()\nctypes.CDLL(None).abort()"
    )
    assert done.returncode < 0 and "Fatal Python error: Aborted" in done.stderr and "line 3 in <module>" in done.stderr


def test_what_an_encoding_lacks_is_escaped() -> None:
    code = "from trtopt.core.native_output import keep_apart; keep_apart(); print('6 \\u2192 3 \\xd7 2')"
    done = _python(code, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "6 \\u2192 3 \\xd7 2\n"), done.stderr


@pytest.mark.parametrize("arguments", [["version"], ["--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: list[str]) -> None:
    for reader in ("| head -n 1", "| true"):
        assert _command(reader, *arguments).stderr == ""
