from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.observe import Observation
from trtopt.calibration.quality import Sample
from trtopt.core.errors import OutputError, UsageError
from trtopt.jobs.state import State, packed_looks, packed_observation

PASS, SHARD = "a" * 64, "b" * 64
HOLD = """
import sys
from pathlib import Path
from trtopt.jobs.state import State
with State.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


LOOKS = [Sample(f"sample {n}", f"{n:064x}", math.inf, "1 everywhere" * (n == 2)) for n in range(4)]


def seen() -> Observation:
    """One tensor was only zeros, one held nothing."""
    histograms = {name: Histogram() for name in ("x", "zeros", "nothing")}
    histograms["x"].add(np.linspace(-3, 5, 1000, dtype=np.float32))
    histograms["zeros"].add(np.zeros(7, np.float32))
    return Observation(histograms, 4)


def content() -> dict[str, Any]:
    return {**packed_observation(seen()), "looks": packed_looks(LOOKS), "seconds": 1.5}


def test_a_shard_comes_back_to_the_bit(tmp_path: Path) -> None:
    with State.locked(tmp_path / "state") as state:
        assert state.shard(PASS, SHARD) is None
        state.save_shard(PASS, SHARD, content())
        shard = state.shard(PASS, SHARD)
        assert shard is not None
        found, looks, seconds = shard
        assert (found.samples, seconds, looks) == (4, 1.5, LOOKS)
        for name, histogram in seen().histograms.items():
            back = found.histograms[name]
            assert (back.exponent, back.low, back.high, back.total) == (
                histogram.exponent,
                histogram.low,
                histogram.high,
                histogram.total,
            )
            assert np.array_equal(back.counts, histogram.counts)
        assert state.shard(SHARD, PASS) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trtopt.shard/1", "trtopt.shard/0"),
        (SHARD, PASS),
        ('"count": 1000', '"count": 1001'),
        ("}", ""),
        ('"digest"', '"digests"'),
    ],
)
def test_a_damaged_shard_is_none(tmp_path: Path, old: str, new: str) -> None:
    with State.locked(tmp_path) as state:
        state.save_shard(PASS, SHARD, content())
        (file,) = (tmp_path / "shards").rglob("*.json")
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")
        assert state.shard(PASS, SHARD) is None


def test_records_and_shard_sizes_are_kept_and_scratch_is_not(tmp_path: Path) -> None:
    with State.locked(tmp_path) as state:
        state.record("a.b.auto", {"state": "done", "key": "k"})
        state.keep_shard_size(PASS, 48)
        (state.scratch / "left").touch()
    with State.locked(tmp_path) as state:
        assert state.job("a.b.auto")["state"] == "done"
        assert [item["name"] for item in state.jobs()] == ["a.b.auto"]
        assert state.job("other") == {}
        assert (state.shard_size(PASS), state.shard_size(SHARD)) == (48, None)
        assert list(state.scratch.iterdir()) == []


def test_one_run_at_a_time_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout
    assert run.stdin
    assert run.stdout.readline() == "held\n"
    with (
        pytest.raises(UsageError, match=f"another run is at work .*process {run.pid} on .*`state=`"),
        State.locked(tmp_path),
    ):
        pass
    run.kill()
    run.wait()
    run.stdin.close()
    run.stdout.close()
    with State.locked(tmp_path) as state:
        assert f"process {os.getpid()} " in (state.folder / "lock").read_text(encoding="utf-8")


def test_whether_a_run_is_at_work_can_be_asked(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    assert not state.at_work()
    with State.locked(tmp_path / "state"):
        assert state.at_work()
    assert not state.at_work()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"state folder .*`state=`"), State.locked(tmp_path / "state"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_place_that_cant_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"state folder .*`state=`"), State.locked(tmp_path / "file" / "state"):
        pass
