"""What `trtopt serve` alone may ask of its tritonserver: loading and unloading models, also those whose process died."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from trtopt.core.files import whole
from trtopt.core.terminal import visible

_KEY = "trtopt-control"  # a header
_STUB = "triton_python_backend_stub"
_EACH = 0.5  # seconds between looks at the models' processes
_LOADING = 600.0  # seconds
_FIRST, _LONGEST = 1.0, 60.0  # seconds before a model is loaded that ended soon after it was; then it doubles


def opener() -> urllib.request.OpenerDirector:
    """Opens what this machine serves, of which no proxy knows."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Control:
    """What only this process may use: Triton's model repository API, and what reads and writes outside of requests.

    Through shared memory a client reaches every region that the server's user has, the Python backend's own among them; by
    logging it fills the disk.
    """

    def __init__(self, address: str) -> None:
        self._base, self._secret = f"http://{address}/v2/repository", secrets.token_hex(16)
        self._open = opener().open

    @property
    def options(self) -> list[str]:
        """Of tritonserver."""
        restriction = f"model-repository,shared-memory,logging,trace:{_KEY}={self._secret}"
        return [
            *("--model-control-mode=explicit", "--load-model=*"),
            *(f"--http-restricted-api={restriction}", f"--grpc-restricted-protocol={restriction}"),
        ]

    def unload(self, deadline: float) -> None:
        """Unload all models, and wait until they are gone: then every request that they had is answered."""
        for model in self._post("/index"):
            if model.get("state") == "READY":
                self._post(_model(model["name"], "unload"))
        while time.monotonic() < deadline and any(
            model.get("state") in ("READY", "UNLOADING") for model in self._post("/index")
        ):
            time.sleep(0.05)

    def reload(self, name: str) -> None:
        """Unload one model, and load it again: to load it alone does nothing where its files are the same.

        One whose process died may never be through with unloading, and isn't waited for.

        Raises:
            OSError, ValueError: the server refuses, or is gone.
        """
        self._post(_model(name, "unload"))
        self._post(_model(name, "load"), _LOADING)

    def _post(self, path: str, timeout: float = 10) -> Any:
        request = urllib.request.Request(
            self._base + path, b"{}", {_KEY: self._secret, "Content-Type": "application/json"}
        )
        with self._open(request, timeout=timeout) as answer:
            content = answer.read()
        return json.loads(content) if content else None


def _model(name: str, what: str) -> str:
    return f"/models/{urllib.parse.quote(name, safe='')}/{what}"


class Watch:
    """Loads a model again whose process died, until `end` or `unload`.

    Triton (release 24.10) doesn't: it says that the model is ready, and answers each request with 500. A process dies of what a
    runtime or a driver does, for want of memory, and of a shape whose number of bytes overflows 64 bits. Where it dies soon
    after it was loaded, or can't be loaded, the next try waits twice as long as the last one, up to a minute: loading takes
    what the other models need.
    """

    def __init__(self, server: subprocess.Popen[bytes], control: Control) -> None:
        self._server, self._control, self._ended = server, control, threading.Event()
        self._known = _processes(server.pid)
        self._due: dict[str, float] = {}  # model → when it is to be loaded
        self._last: dict[str, tuple[float, float]] = {}  # model → when it was loaded, and the wait before that
        self._told: dict[str, str] = {}
        threading.Thread(target=self._look, name="trtopt-models", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def unload(self, deadline: float) -> None:
        """End, and unload all models; see `Control.unload`."""
        self.end()
        self._control.unload(deadline)

    def _look(self) -> None:
        while not self._ended.wait(_EACH):
            dead = {process: name for process, name in self._known.items() if not _words(process)}
            for process, name in dead.items():
                del self._known[process]
                if name not in self._due:
                    self._plan(name, f"a process of model {name!r} ended")
            for name in sorted(name for name, when in self._due.items() if when <= time.monotonic()):
                if self._ended.is_set() or self._server.poll() is not None:
                    return
                self._load(name)

    def _plan(self, name: str, what: str) -> None:
        """Decide when to load a model, and say it, unless that was the last that was said of it."""
        now = time.monotonic()
        loaded, waited = self._last.get(name, (-_LONGEST, 0.0))
        wait = min(max(2 * waited, _FIRST), _LONGEST) if now - loaded < _LONGEST else 0.0
        self._due[name], self._last[name] = now + wait, (loaded, wait)
        after = f"; from now on it is loaded after growing waits, of up to {_LONGEST:g} s each"
        text = what + (after if wait else "; loading it again")
        if not wait or text != self._told.get(name):
            print(visible(f"warning: {text}"), file=sys.stderr, flush=True)
        self._told[name] = text

    def _load(self, name: str) -> None:
        del self._due[name]
        # Processes of other models stay, dead ones, too, of which nothing was said yet; this one's others end now.
        before, self._known = self._known, {process: model for process, model in self._known.items() if model != name}
        problem = ""
        try:
            self._control.reload(name)
        except (OSError, ValueError) as error:
            problem = str(error)
        self._last[name] = time.monotonic(), self._last[name][1]
        if problem:
            self._plan(name, f"model {name!r} can't be loaded again: {problem}")
            return
        processes = _processes(self._server.pid).items()
        self._known |= {process: model for process, model in processes if process not in before}
        if name not in self._known.values():  # it lived too shortly to be seen
            self._plan(name, f"a process of model {name!r} ended")


def _processes(server: int) -> dict[int, str]:
    """The Python backend's processes of a server: id → name of the model."""
    models: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (words := _words(int(folder.name))):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if int(whole(folder / "stat").decode().rpartition(")")[2].split()[1]) == server:
                    models[int(folder.name)] = Path(words[1]).parts[-3]
    return models


def _words(process: int) -> list[str]:
    """The command line of one of the Python backend's processes; none for others, and where it is dead, if not yet buried."""
    try:
        words = whole(f"/proc/{process}/cmdline").decode("utf-8", "surrogateescape").split("\0")
    except OSError:
        return []
    return words if words[0].endswith(_STUB) else []
