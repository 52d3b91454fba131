from __future__ import annotations

from pathlib import Path

import pytest

from trtopt.core.errors import UsageError
from trtopt.data.preprocess import PRESETS
from trtopt.jobs.joblist import Job, load_jobs

GOOD = """
output = "tables"
[data.photos]
images = "photos"
preprocess = "imagenet"
limit = 5
[data.digits]
data = "digits.npz"
[[job]]
model = ["one.onnx", "zoo/*.onnx"]
data = ["photos", "digits"]
method = ["auto", "entropy"]
precision_override = "head*=fp32"
[[job]]
name = "head"
model = "one.onnx"
data = "digits"
"""


def read(folder: Path, text: str) -> tuple[Job, ...]:
    (folder / "jobs.toml").write_text(text, encoding="utf-8")
    return load_jobs(folder / "jobs.toml")


def test_every_combination_is_a_job(tmp_path: Path) -> None:
    (tmp_path / "zoo").mkdir()
    for name in ("b.onnx", "a.onnx", "notes.txt"):
        (tmp_path / "zoo" / name).touch()
    jobs = read(tmp_path, GOOD)
    assert [job.name for job in jobs] == [
        f"{model}.{data}.{method}"
        for model in ("one", "a", "b")
        for data in ("photos", "digits")
        for method in ("auto", "entropy")
    ] + ["head.digits.auto"]
    first, last = jobs[0], jobs[-1]
    assert first.model == tmp_path / "one.onnx"
    assert first.output == tmp_path / "tables" / "one.photos.auto.calib.json"
    assert first.precision_override == ("head*=fp32",)
    assert last.precision_override == ()
    assert (first.data.images, first.data.data, first.data.limit) == (tmp_path / "photos", None, 5)
    assert first.data.preprocess == PRESETS["imagenet"]
    assert (last.data.images, last.data.data, last.data.preprocess) == (None, tmp_path / "digits.npz", None)


def test_preprocessing_may_be_a_file_beside_the_list_or_a_table(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('preset = "imagenet"\nsize = [32, 48]\n', encoding="utf-8")
    text = """
        [data.file]
        images = "photos"
        preprocess = "mine.toml"
        [data.table]
        images = "photos"
        preprocess = { preset = "imagenet", size = [32, 48] }
        [[job]]
        model = "m.onnx"
        data = ["file", "table"]
    """
    file, table = (job.data.preprocess for job in read(tmp_path, text))
    assert file == table
    assert file is not None
    assert file.size == (32, 48)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('output = "tables"', "output = ", "not TOML"),
        ('output = "tables"', "output = 3", "output is 3; a text is needed"),
        ('output = "tables"', 'outputs = "tables"', "unknown key outputs; known: output, device, data, job"),
        ("limit = 5", "limits = 5", r"\[data.photos\]: unknown key limits; known: images, data, preprocess, limit"),
        ("limit = 5", "limit = 0", r"\[data.photos\]: limit is 0; a whole number from 1"),
        ("limit = 5", "limit = true", "limit is True; a whole number"),
        ('preprocess = "imagenet"', "", "images need preprocess.*imagenet"),
        ('preprocess = "imagenet"', 'preprocess = "imagenette"', "imagenette' is neither a preset"),
        ('data = "digits.npz"', 'data = "digits.npz"\npreprocess = "imagenet"', "preprocess is for images"),
        ('data = "digits.npz"', "", 'needs either images = "FOLDER" or data'),
        ("[data.digits]", '[data."di/gits"]', "letters, digits"),
        ('data = "digits.npz"', 'data = "digits.npz"\nimages = "photos"', "either images"),
        ('method = ["auto", "entropy"]', 'method = "best"', r"\[\[job\]\] 1: method is 'best'; allowed: auto, entropy"),
        ('method = ["auto", "entropy"]', "method = []", "method is an empty list"),
        ('method = ["auto", "entropy"]', "methods = []", "unknown key methods; known: name, model, data, method"),
        ('data = ["photos", "digits"]', 'data = "foto"', "data is 'foto'; the data sets are photos, digits"),
        ('data = ["photos", "digits"]', "", r"\[\[job\]\] 1: lacks data"),
        ('"head*=fp32"', '"head*"', "`precision_override=` 'head\\*' can't be read"),
        ('"zoo/*.onnx"', '"zoo/*.pt"', "no file fits the model 'zoo/\\*.pt'"),
        ('name = "head"', "", "a second job would be named 'one.digits.auto'"),
        ('name = "head"', 'name = "a/b"', "name is 'a/b'"),
        (
            'name = "head"\nmodel = "one.onnx"',
            'name = "x"\nmodel = ["a.onnx", "b.onnx"]',
            "name is for one model; here are 2",
        ),
        ('model = "one.onnx"', "model = 3", r"\[\[job\]\] 2: model is 3; a text is needed"),
    ],
)
def test_a_bad_list_is_refused_and_says_where(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "a.onnx").touch()
    assert old in GOOD
    with pytest.raises(UsageError, match=f"jobs.toml.*{said}"):
        read(tmp_path, GOOD.replace(old, new))


def test_a_list_without_jobs_shows_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no jobs; write \[\[job\]\] with model"):
        read(tmp_path, GOOD.split("[[job]]", maxsplit=1)[0])
    with pytest.raises(UsageError, match=r"absent\.toml doesn't exist"):
        load_jobs(tmp_path / "absent.toml")
