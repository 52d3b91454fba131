"""What may crash is asked in child processes, all at once, each with its own time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.library_output import TELEMETRY_OFF

_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Answer:
    """What came of a probe: an answer, what it raised, or how its process ended.

    Attributes:
        values: the answer; None: there is none.
        failure: "ImportError: …", or what ended the process; empty: it answered.
        signal: the name of the signal that ended the process, such as "SIGSEGV".
        started: there was a process.
    """

    values: Mapping[str, Any] | None = None
    failure: str = ""
    signal: str = ""
    started: bool = True


def ask(probes: Mapping[str, Sequence[str]], patience: float) -> dict[str, Answer]:
    """Run probes at the same time; their answers by the same names. Never raises for what a probe does.

    Args:
        probes: name → what `trtopt.diagnosis.child` is to do, such as ("module", "tensorrt").
        patience: seconds until what hasn't answered is ended.
    """
    until = time.monotonic() + patience
    path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])  # "" is the working directory
    environment = {TELEMETRY_OFF: "1", **os.environ}
    children = {name: _started([path, *words], environment) for name, words in probes.items()}
    try:
        return {name: _answer(child, until, patience) for name, child in children.items()}
    finally:
        for child in children.values():
            if not isinstance(child, Answer) and child.poll() is None:
                child.kill()
                child.communicate()


def _started(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str] | Answer:
    try:
        return subprocess.Popen(
            [sys.executable, str(_CHILD), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
    except OSError as error:
        return Answer(failure=f"no process can be started ({error.strerror or error})", started=False)


def _answer(child: subprocess.Popen[str] | Answer, until: float, patience: float) -> Answer:
    if isinstance(child, Answer):
        return child
    try:
        output, errors = child.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Answer(failure=f"no answer within {patience:.0f} s")
    reply: Any = None
    with contextlib.suppress(ValueError):
        reply = json.loads(output)
    if isinstance(reply, dict) and isinstance(reply.get("answer"), dict):
        return Answer(reply["answer"])
    if isinstance(reply, dict) and "failure" in reply:
        return Answer(failure=" ".join(str(reply["failure"]).split())[:600])
    status = child.returncode
    if status < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
            return Answer(failure=f"the process ended with {name}", signal=name)
    last = " ".join(errors.split()[-40:])
    return Answer(failure=f"the process ended with status {status} and no answer{last and f': {last}'}")
