"""Names out of files do nothing to a terminal."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hostile_values import TERMINAL
from world import Terminal, World

from trtopt.core.errors import TrtoptError, UnsupportedOperator
from trtopt.core.progress import StreamReporter
from trtopt.core.values import Issue
from trtopt.core.words import visible

MARKS = map(chr, (*range(32), *range(127, 160), 0x200E, 0x2028, 0x2029, 0x202E, 0x2066, 0xFEFF, 0xD800))


def test_what_is_printable_stays_and_nothing_else() -> None:
    for text in ("plain", "größer → 日本語 ✓", ""):
        assert visible(text) is text
    for mark in MARKS:
        shown = visible(f"a{mark}b")
        assert shown.isprintable() and shown.startswith("a\\") and shown.endswith("b")
    assert visible("\x1b[2J\n") == "\\x1b[2J\\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_is_one_line_whatever_it_names(stream: io.StringIO) -> None:
    said = StreamReporter(stream)
    said.note(TERMINAL)
    with said.phase(f"phase {TERMINAL}") as phase:
        phase.detail(TERMINAL)
        said.warn(f":warning: {TERMINAL}")
    text = re.sub(r"\x1b\[K|\r", "", stream.getvalue())  # without the sequences that the line in place takes
    assert text.replace("\n", "").isprintable(), ascii(text)
    assert text.count("\\x1b]0;PWNED") >= 3
    assert not any(line.startswith("error: forged") for line in text.splitlines())
    assert ":warning:" in text


def test_a_failures_lines_are_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: TrtoptError) -> str:
        def version(**_: object) -> None:
            raise error

        monkeypatch.setattr("trtopt.version", version)
        return world.run("version").err

    assert failing(TrtoptError("a\nerror: b")) == "error: a\\nerror: b\n"
    issues = [Issue("n\nerror: x", "Foo", "r"), Issue("m", "Bar", "s")]
    assert failing(UnsupportedOperator("can't take", issues, "do this")) == (
        "error: can't take:\n  n\\nerror: x (Foo): r\n  m (Bar): s\ndo this\n"
    )
    many = UnsupportedOperator("can't take", [Issue(f"n{index}", "Foo", f"r{index}") for index in range(70)], "do this")
    assert failing(many).splitlines()[6:] == ["  n5 (Foo): r5", "  and 64 more of Foo", "do this"]
    assert len(many.retold(str).issues) == 70
    same = [*(Issue(f"n{index}", "Foo", "r") for index in range(9)), Issue("m", "Foo", "s"), Issue("k", "Bar", "r")]
    same += [Issue("", "", "t")] * 2
    said = failing(UnsupportedOperator("can't take", same)).splitlines()[1:]
    assert said == ["  n0, n1, n2, n3, n4, n5 and 3 more (Foo): r", "  m (Foo): s", "  k (Bar): r", "  t"]


def test_names_of_files_members_and_options(world: World) -> None:
    name = TERMINAL.replace("/", "").replace("\r\n", "\n")
    strange, arrays = (world.folder / f"{name}{ending}" for ending in (".onnx", ".npz"))
    strange.write_bytes(world.model.read_bytes())
    (world.photos / f"{name}.jpg").write_bytes(b"no image")
    np.savez(arrays, **{name: np.zeros((4, 3), np.float32)})
    images = ("--images", world.photos, "--preprocess", "imagenet", "--allow-unusual-data")
    for command in (
        ("check", strange, "--json"),
        ("calibrate", strange, *images, "-o", world.output / "t.json"),
        ("calibrate", world.model, "--data", arrays, "-o", world.output / "t.json"),
        ("build", world.model, "--shapes", name, "-o", world.output / "e"),
        (name,),
        ("check", f"--{name}"),
    ):
        found = world.run(*command)
        assert found.status != 70, found
        for text in (found.out, found.err):
            assert text.replace("\n", "").isprintable(), ascii(text)
