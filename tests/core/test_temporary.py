"""Temporary folders outlive nobody: what a killed process leaves, a later one removes, and only that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trtopt.core.temporary import SUFFIX, folder_in, remove_leftovers

HOLD = """
import sys, time
from pathlib import Path
from trtopt.core.temporary import folder_in
with folder_in(Path(sys.argv[1]), ".out."):
    print("held", flush=True)
    time.sleep(600)
"""


def test_what_a_living_process_holds_stays_and_what_a_killed_one_held_goes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        (theirs,) = tmp_path.iterdir()
        (theirs / "half").write_text("x")
        with folder_in(tmp_path, ".out.") as own:
            remove_leftovers(tmp_path)
            assert own.is_dir()
        assert list(tmp_path.iterdir()) == [theirs]
        process.kill()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_own_folders_are_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    (tmp_path / f".link{SUFFIX}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f".file{SUFFIX}").write_text("x")
    (tmp_path / ".other.partial").mkdir()
    before = sorted(tmp_path.rglob("*"))
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    remove_leftovers(tmp_path / "gone")
