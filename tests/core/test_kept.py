"""No request is a way to lose a file: each option that writes is given each file that the same request reads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import values, written
from world import requests

from trtopt.certification.request import CertifyRequest
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import write_bytes, writing_together
from trtopt.core.kept import Call, keeping
from trtopt.core.options import FOLDER, call_of, options

# What is given for options that read, and which of the user's files that must keep.
READS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "model": ("m.onnx", ("m.onnx", "w.bin")),
    "reference": ("m.onnx", ("m.onnx", "w.bin")),
    "engine": ("e.engine", ("e.engine", "e.engine.json", "e.engine.results.json", "m.onnx", "w.bin", "kept.onnx")),
    "candidate": ("e.engine", ("e.engine", "e.engine.json")),
    "engines": (["e.engine"], ("e.engine", "e.engine.json")),
    "subject": ("m.onnx", ("w.bin",)),
    "diff": ("o.engine", ("o.engine",)),
    "data": ("dd", ("dd/x.npy", "dd/sub/y.npz")),
    "images": ("photos", ("photos/a.JPG",)),
    "input": (["x=n.npy", "d.npz"], ("n.npy", "d.npz")),
    "calib": ("t.calib.json", ("t.calib.json",)),
    "preprocess": ({"preset": "p.toml"}, ("p.toml",)),
    "labels": ("l.txt", ("l.txt",)),
    "classes": ("c.txt", ("c.txt",)),
    "metric": ("measures:top", ("measures.py",)),
    "import_cache": ("old.cache", ("old.cache",)),
    "results": (["profile.json"], ("profile.json",)),
    "recipe": ("r.toml", ("r.toml", "m.onnx", "w.bin", "c.txt", "dd/x.npy", "net.py")),
    "source": ("net.py:Net", ("net.py",)),
    "weights": ("net.pth", ("net.pth",)),
    "factory_arg": ({"names": "c.txt"}, ("c.txt",)),
    "sample": ("d.npz", ("d.npz",)),
    "jobs": ("jobs.toml", ("jobs.toml",)),
    "migrate": ("script.sh", ("script.sh",)),
}
WRITES = [
    (request, name)
    for request in requests()
    for name, (_, said) in options(request).items()
    if said.writes and said.writes != FOLDER
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user's files."""
    folder = tmp_path_factory.mktemp("home")
    model = written("(float[1,4] x) => (float[1,4] y) { y = MatMul (x, w) }", w=values(4, 4))
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    for name in ("dd/sub", "photos"):
        (folder / name).mkdir(parents=True)
    (folder / "e.engine.json").write_text(
        json.dumps({"source": {"path": str(folder / "m.onnx")}, "graph_file": "kept.onnx"})
    )
    (folder / "r.toml").write_text(
        'source = "m.onnx"\ndata = "dd"\nclasses = "c.txt"\noptions = { code = "net.py:Net", loop = "r.toml" }\n'
    )
    for name in {name for _, names in READS.values() for name in names}:
        if not (folder / name).exists():
            (folder / name).write_bytes(name.encode())
    return folder


@pytest.fixture
def inside(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(home)
    before = contents(home)
    yield home
    assert contents(home) == before


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def asked(request: type[Any], **given: Any) -> Any:
    read = {name: READS[name][0] for name in options(request) if name in READS}
    needed = {item.name: "x" for item in dataclasses.fields(request) if item.default is dataclasses.MISSING}
    return request(**{**needed, **read, **given})


@pytest.mark.parametrize(("request_type", "option"), WRITES, ids=lambda item: getattr(item, "__name__", item))
def test_nothing_that_is_read_is_written(inside: Path, tmp_path: Path, request_type: type[Any], option: str) -> None:
    assert len(WRITES) > 15
    files = {name for read in options(request_type) if read in READS for name in READS[read][1]}
    for number, name in enumerate(sorted(files)):
        link, twin = tmp_path / f"link{number}", tmp_path / f"twin{number}"
        link.symlink_to(inside / name)
        os.link(inside / name, twin)
        paths: list[str | Path] = [name, inside / name, f"./dd/../{name}", link]
        # A folder's file has lost nothing where its twin is replaced.
        for path in paths if "/" in name else [*paths, twin]:
            call = call_of(asked(request_type, **{option: path}))
            refused = pytest.raises(
                UsageError, match=rf"`{option}=` would overwrite .*which .* reads.*give another name"
            )
            with refused, keeping(call):
                write_bytes(path, b"lost")
        twin.unlink()  # so that only one of its names is left for what comes then
    for _ in range(2):  # what is no input may be replaced
        with keeping(call_of(asked(request_type, **{option: tmp_path / "old.engine"}))):
            write_bytes(tmp_path / "old.engine", b"new")


def test_two_outputs_are_two_files(inside: Path, tmp_path: Path) -> None:
    from trtopt.builder.request import BuildRequest

    (tmp_path / "link").symlink_to(tmp_path / "a.engine.json")
    for other in ("a.engine", "a.engine.json", "a.engine.results.json", "link", "../" + tmp_path.name + "/a.engine"):
        request = BuildRequest("m.onnx", tmp_path / "a.engine", save_onnx=tmp_path / other)
        with (
            pytest.raises(UsageError, match=r"`save_onnx=` would overwrite .* which `output=` writes, too"),
            keeping(call_of(request)),
        ):
            pass


def test_names_that_follow_are_asked_about_when_they_are_written(inside: Path, tmp_path: Path) -> None:
    """In a folder of results nobody knows the names before."""
    from trtopt.runtime.request import RunRequest

    (tmp_path / "linked.npy").symlink_to(inside / "n.npy")
    (tmp_path / "other.npy").symlink_to(inside / "l.txt")
    said = r"`output=` would overwrite n.npy, which `input=` reads"
    with keeping(call_of(RunRequest("e.engine", input=["x=n.npy"], output="."))):
        for path in ("n.npy", tmp_path / "linked.npy"):
            with pytest.raises(UsageError, match=said):
                write_bytes(path, b"lost")
        with pytest.raises(UsageError, match=said), writing_together(tmp_path / "first", "n.npy"):
            pass
        assert not (tmp_path / "first").exists()
        write_bytes(tmp_path / "other.npy", b"y")  # no name of the user's: the link makes way
    assert not (tmp_path / "other.npy").is_symlink()


def test_a_folder_that_a_call_makes_may_hold_its_other_outputs(inside: Path, tmp_path: Path) -> None:
    Call({}, [("output", str(tmp_path / "made"), os.sep), ("log", str(tmp_path / "made/log.txt"), "")]).check_writable()
    with pytest.raises(UsageError, match=r"`output=` would overwrite n\.npy"):  # the one of the two that it lies in
        Call({"input": "n.npy"}, [("log", "log.txt", ""), ("output", ".", os.sep)]).refuse(Path("n.npy"))


def test_what_a_call_without_outputs_reads_is_kept_too(inside: Path) -> None:
    from trtopt.evaluation.request import VerifyRequest

    with keeping(call_of(VerifyRequest("m.onnx", "e.engine", data="dd"))):
        with pytest.raises(UsageError, match=r"would overwrite w\.bin, which `reference=` reads"):
            write_bytes("w.bin", b"lost")
        before = Path("e.engine.results.json").read_bytes()
        write_bytes("e.engine.results.json", b"another measurement")
        write_bytes("e.engine.results.json", before)


def test_a_link_that_was_named_is_followed(inside: Path, tmp_path: Path) -> None:
    from trtopt.linting.request import CheckRequest

    (tmp_path / "real.onnx").write_bytes(b"old")
    (tmp_path / "link.onnx").symlink_to("real.onnx")
    with keeping(call_of(CheckRequest("m.onnx", fix=tmp_path / "link.onnx"))):
        write_bytes(tmp_path / "link.onnx", b"new")
    assert (tmp_path / "real.onnx").read_bytes() == b"new"
    with (
        pytest.raises(OutputError, match="mkdir -p"),
        keeping(call_of(CheckRequest("m.onnx", fix=tmp_path / "no" / "x"))),
    ):
        pytest.fail("the work began")


def test_samples_in_a_folder_are_kept_and_the_rest_of_it_may_change(inside: Path, tmp_path: Path) -> None:
    """`--images .` is how photos beside a model are given, and the engine lies there, too."""
    from trtopt.builder.request import BuildRequest

    call = call_of(BuildRequest("m.onnx", "e2.engine", images="photos", data=".", preprocess="dd"))
    for path in ("n.npy", "photos/a.JPG"):
        with pytest.raises(UsageError, match="would overwrite"):
            call.refuse(Path(path))
    os.link("l.txt", tmp_path / "twin")
    for path in ("l.txt", "e.engine", tmp_path / "twin"):
        call.refuse(Path(path))
    (tmp_path / "twin").unlink()
    call_of(BuildRequest("m.onnx", "e2.engine", preprocess="photos")).refuse(
        Path("photos/a.JPG")
    )  # a preset is no folder


def test_what_a_call_adds_to_is_written_and_nothing_else_beside_an_input(tmp_path: Path) -> None:
    engine = tmp_path / "a.engine"
    for name in ("a.engine", "a.engine.json", "m.onnx"):
        (tmp_path / name).write_text("{}")
    call = call_of(CertifyRequest(tmp_path / "m.onnx", engine))
    with keeping(call):
        write_bytes(f"{engine}.json", b"{} ")
        for name in ("a.engine", "m.onnx"):
            with pytest.raises(UsageError, match="would overwrite"):
                write_bytes(tmp_path / name, b"lost")
    with (
        pytest.raises(UsageError, match="would overwrite"),
        keeping(call_of(CertifyRequest("m", engine, save=f"{engine}.json"))),
    ):
        pass
