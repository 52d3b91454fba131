"""The state file of a job list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trtopt.core.errors import OutputError, UsageError
from trtopt.jobs.results import JobResult
from trtopt.jobs.state import State, is_at_work, read_state

HOLD = """
import sys
from pathlib import Path
from trtopt.jobs.state import State
with State.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_records_are_kept_and_scratch_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    with State.locked(path) as state:
        state.record("a.b.auto", {"state": "done", "key": "k"})
        (state.scratch / "left").touch()
    assert sorted(tmp_path.iterdir()) == [path]
    with State.locked(path) as state:
        assert state.jobs["a.b.auto"]["key"] == "k"
        state.record("c", {"state": "failed", "error": {"type": "E", "message": "m"}})
    assert list(read_state(path)) == ["a.b.auto", "c"]


def test_one_run_at_a_time_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout and run.stdin
    assert run.stdout.readline() == "held\n"
    assert is_at_work(path)
    with pytest.raises(UsageError, match=r"another run is at work .*`state=`"), State.locked(path):
        pass
    run.kill()
    run.wait()
    run.stdin.close()
    run.stdout.close()
    assert not is_at_work(path)
    with State.locked(path):
        assert len(list(tmp_path.glob(".trtopt-jobs-*"))) == 1  # what the killed run had is gone


@pytest.mark.parametrize(
    "content",
    [
        "mine",
        "{}",
        '{"format": "trtopt.jobs/0", "jobs": {}}',
        '{"format": "trtopt.jobs/1", "jobs": {"odd": {"state": "odd"}}}',
        None,
    ],
)
def test_what_isnt_a_state_is_refused_and_stays(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.state"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    with pytest.raises(UsageError, match="isn't the state file of a job list: remove it"), State.locked(path):
        pass
    assert path.is_dir() if content is None else path.read_text() == content


def test_a_place_that_cant_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"state file .*`state=`"), State.locked(tmp_path / "file" / "state"):
        pass


def test_the_lines_of_a_message_stay_apart() -> None:
    message = "m.onnx can't be built:\n  nms: do it on the boxes outside the engine\nexport what comes before NMS"
    result = JobResult("j", "failed", error={"type": "UnsupportedOperator", "message": message})
    said = "m.onnx can't be built: nms: do it on the boxes outside the engine; export what comes before NMS"
    assert result.outcome == f"UnsupportedOperator: {said}"
