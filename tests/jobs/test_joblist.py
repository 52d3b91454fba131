from __future__ import annotations

from pathlib import Path

import pytest

from trtopt.core.errors import UsageError
from trtopt.data.preprocess import PRESETS
from trtopt.evaluation.limits import Limits
from trtopt.jobs.joblist import BuildJob, Job, load_jobs

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

ENGINES = """
engines = "made"
[data.photos]
images = "photos"
preprocess = "imagenet"
limit = 5
[[job]]
kind = "build"
model = ["one.onnx", "two.onnx"]
precision = ["fp32", "fp16", "int8", "int8+bf16"]
data = "photos"
target = ["sm89", "sm89,120"]
workspace = "2GiB"
backend = "rtx"
[[job]]
model = "one.onnx"
data = "photos"
precision_override = "head*=fp32"
"""


def read(folder: Path, text: str) -> tuple[Job, ...]:
    (folder / "jobs.toml").write_text(text, encoding="utf-8")
    return tuple(job for job in load_jobs(folder / "jobs.toml") if isinstance(job, Job))


def builds(folder: Path, text: str) -> dict[str, BuildJob]:
    (folder / "jobs.toml").write_text(text, encoding="utf-8")
    return {job.name: job for job in load_jobs(folder / "jobs.toml") if isinstance(job, BuildJob)}


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
    given = ('"mine.toml"', '{ preset = "imagenet", size = [32, 48] }')
    sets = [f'[data.s{number}]\nimages = "p"\npreprocess = {value}\n' for number, value in enumerate(given)]
    file, table = read(tmp_path, f'{"".join(sets)}[[job]]\nmodel = "m.onnx"\ndata = ["s0", "s1"]\n')
    assert file.data.preprocess == table.data.preprocess and file.data.preprocess.size == (32, 48)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('output = "tables"', "output = ", "not TOML"),
        ('output = "tables"', "output = 3", "output is 3; a text is needed"),
        (
            'output = "tables"',
            'outputs = "tables"',
            "unknown key 'outputs'; known: data, device, engines, job, operators, output, plugins",
        ),
        (
            "limit = 5",
            "limits = 5",
            r"\[data.photos\]: it has an unknown key 'limits'; known: allow_unusual_data, data, images, limit",
        ),
        ("limit = 5", "limit = 0", r"\[data.photos\]: limit is 0; a whole number of at least 1"),
        ('preprocess = "imagenet"', "", "images need preprocess.*imagenet"),
        ('preprocess = "imagenet"', 'preprocess = "imagenette"', "imagenette' is neither a preset"),
        ('data = "digits.npz"', 'data = "digits.npz"\npreprocess = "imagenet"', "preprocess is for images"),
        ('data = "digits.npz"', "", 'needs either images = "FOLDER" or data'),
        ("[data.digits]", '[data."di/gits"]', "letters, digits"),
        ('method = ["auto", "entropy"]', 'method = "best"', r"\[\[job\]\] 1: method is 'best'; allowed: auto, entropy"),
        ('method = ["auto", "entropy"]', "method = []", r"method is \[\]; a text is needed"),
        (
            'data = "digits"',
            'images = "photos"',
            r"\[\[job\]\] 2: it has an unknown key 'images'; .*stands in \[data.NAME\], and engines .* kind = .build",
        ),
        ('method = ["auto", "entropy"]', "methods = []", "unknown key 'methods'; known: data, kind, method, model"),
        ('data = ["photos", "digits"]', 'data = "foto"', "data is 'foto'; the data sets are photos, digits"),
        ('data = ["photos", "digits"]', "", r"\[\[job\]\] 1: it lacks 'data'"),
        ('"head*=fp32"', '"head*"', "precision_override 'head\\*' can't be read"),
        ('"zoo/*.onnx"', '"zoo/*.pt"', "no file fits the model 'zoo/\\*.pt'"),
        ('name = "head"', "", "a second job would be named 'one.digits.auto'"),
        ('name = "head"', 'name = "a/b"', "name is 'a/b'"),
        (
            'name = "head"\nmodel = "one.onnx"',
            'name = "x"\nmodel = ["a.onnx", "b.onnx"]',
            "name is for one model; here are 2",
        ),
        ('model = "one.onnx"', "model = 3", r"\[\[job\]\] 2: model is 3; a text or a list is needed"),
        (
            '["fp32", "fp16", "int8", "int8+bf16"]',
            '["fp32", "fp16"]\nmethod = "mse"',
            'method has no effect without prec.*"int8"',
        ),
        (
            '["fp32", "fp16", "int8", "int8+bf16"]',
            '"fp32"\nprecision_override = "a=fp32"',
            "precision_override has no effect without precision",
        ),
        ('kind = "build"', 'kind = "bild"', "kind is 'bild'; allowed: calibrate, build"),
        ('kind = "build"', "", "unknown key 'backend'.*engines are made where kind ="),
        ('precision = ["fp32", "fp16", "int8", "int8+bf16"]', "", "lacks precision, one or several of fp32, fp16"),
        ('"int8+bf16"]', '"int4"]', "precision is 'int4'; allowed: fp32, fp16"),
        (
            'workspace = "2GiB"',
            'workspce = "2GiB"',
            r"\[\[job\]\] 1: it has an unknown key 'workspce'; known: .*workspace",
        ),
        ('workspace = "2GiB"', "workspace = true", "workspace is True, which isn't a size"),
        ('workspace = "2GiB"', 'optimization_level = "5"', "optimization_level is '5'; a whole number is needed"),
        ('workspace = "2GiB"', "int8 = true", "unknown key 'int8'; known: .*precision"),
        ('workspace = "2GiB"', 'save_onnx = "g.onnx"', "save_onnx would overwrite .*, which save_onnx writes, too"),
        ('workspace = "2GiB"', 'method = "best"', "method is 'best'; allowed: auto, entropy"),
        ('workspace = "2GiB"', 'classes = "absent.txt"', "absent.txt doesn't exist"),
        ('"sm89,120"]', '"sm_89"]', "a second job would be named 'one.fp32.sm89'"),
        ('"sm89,120"]', '"ada"]', "'ada' isn't a compute capability"),
        ('data = "photos"\ntarget', 'data = ["photos"]\ntarget', "data is list; a text is needed"),
    ],
)
def test_a_bad_list_is_refused_and_says_where(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "a.onnx").touch()
    good = GOOD if old in GOOD else ENGINES
    assert old in good
    with pytest.raises(UsageError, match=f"jobs.toml.*{said}"):
        read(tmp_path, good.replace(old, new, 1))


def test_overlapping_patterns_name_a_model_once_and_broken_links_too(tmp_path: Path) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "a.onnx").touch()
    (tmp_path / "zoo" / "folder.onnx").mkdir()
    (tmp_path / "zoo" / "gone.onnx").symlink_to("nowhere.onnx")  # its job fails and says so; it was passed over
    text = GOOD.replace('["one.onnx", "zoo/*.onnx"]', '["zoo/a*.onnx", "zoo/*.onnx"]')
    names = [job.name for job in read(tmp_path, text) if job.data.name == "digits" and job.method == "auto"]
    assert names == ["a.digits.auto", "gone.digits.auto", "head.digits.auto"]


def test_a_list_without_jobs_shows_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no jobs; write \[\[job\]\] with model"):
        read(tmp_path, GOOD.split("[[job]]", maxsplit=1)[0])
    with pytest.raises(UsageError, match=r"absent\.toml doesn't exist"):
        load_jobs(tmp_path / "absent.toml")


# Engines -----------------------------------------------------------------------------------------------------------------


def test_an_engine_for_each_model_precision_and_target(tmp_path: Path) -> None:
    jobs = builds(tmp_path, ENGINES)
    assert list(jobs) == [
        f"{model}.{precision}.{target}"
        for model in ("one", "two")
        for precision in ("fp32", "fp16", "int8", "int8+bf16")
        for target in ("sm89", "sm89-sm120")
    ]
    plain, half, quantized = (jobs[f"one.{name}.sm89"].request for name in ("fp32", "fp16", "int8"))
    assert plain.output == tmp_path / "made" / "one.fp32.sm89.engine"
    assert {item.workspace for item in (plain, half, quantized)} == {"2GiB"}
    assert (plain.fp16, plain.images, plain.calib) == (False, None, None)
    assert (half.fp16, half.images, half.limit) == (True, tmp_path / "photos", 5)
    assert (quantized.int8, quantized.images) == (True, None)
    assert jobs["two.int8+bf16.sm89-sm120"].request.bf16


def test_a_quantized_build_takes_the_lists_own_table_or_has_one_made(tmp_path: Path) -> None:
    jobs = builds(tmp_path, ENGINES)
    listed = {job.name: job for job in read(tmp_path, ENGINES)}
    assert list(listed) == ["two.photos.auto", "one.photos.auto"]  # the first is the builds' own
    own, given = jobs["two.int8.sm89"], jobs["one.int8.sm89"]
    assert (own.calibration, given.calibration) == (listed["two.photos.auto"], listed["one.photos.auto"])
    assert given.request.calib == tmp_path / "calibrated" / "one.photos.auto.calib.json"
    assert given.calibration is not None and given.calibration.precision_override == ("head*=fp32",)
    assert jobs["one.fp16.sm89"].calibration is None
    table = builds(
        tmp_path,
        ENGINES.replace('data = "photos"\ntarget', 'calib = "t.calib.json"\ntarget', 1).replace('"fp16", ', ""),
    )
    assert (table["one.int8.sm89"].calibration, table["one.int8.sm89"].request.calib) == (
        None,
        tmp_path / "t.calib.json",
    )
    limited = builds(tmp_path, ENGINES.replace('workspace = "2GiB"', "min_snr = 30"))["one.int8.sm89"]
    for share in ("0.99", '"99%"'):
        judged = builds(tmp_path, ENGINES.replace('workspace = "2GiB"', f"min_agreement = {share}"))["one.int8.sm89"]
        assert Limits.of(judged.request.min_agreement, None) == Limits(0.99)
    assert limited.calibration is not None and limited.request.images == tmp_path / "photos"  # which judge


def test_a_resource_is_part_of_the_name(tmp_path: Path) -> None:
    text = ENGINES.replace('target = ["sm89", "sm89,120"]', 'resource = ["accelerator_type:H200", "edge box"]')
    jobs = builds(tmp_path, text.replace('backend = "rtx"', 'backend = "tensorrt"'))
    assert jobs["two.int8.H200"].resource == "accelerator_type:H200"
    assert jobs["two.int8.edge_box"].resource == "edge box"


def test_an_option_holds_for_the_engines_that_it_has_an_effect_in(tmp_path: Path) -> None:
    jobs = builds(tmp_path, ENGINES.replace('workspace = "2GiB"', 'method = "mse"\nprecision_override = "a=fp32"'))
    found = {
        name: (job.request.method, len(job.request.precision_override))
        for name, job in jobs.items()
        if name.endswith("sm89")
    }
    assert found["one.int8.sm89"] == found["one.int8+bf16.sm89"] == ("mse", 1)
    assert found["one.fp16.sm89"] == ("auto", 1) and found["one.fp32.sm89"] == ("auto", 0)


def test_paths_in_options_are_relative_to_the_list_and_words_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "imagenet.txt").write_text("cat\ndog\n")
    given = 'timing_cache = "t"\nstore = "kept"\nmetric = "m.py:top"\nmin = 0.9\nclasses = "imagenet.txt"'
    request = builds(tmp_path, ENGINES.replace('workspace = "2GiB"', given))["one.int8.sm89"].request
    found = [request.timing_cache, request.store, request.metric, request.classes]
    assert found == [tmp_path / "t", tmp_path / "kept", f"{tmp_path / 'm.py'}:top", ("cat", "dog")]
    words = 'timing_cache = "none"\nstore = "~/kept"\nmetric = "module:top"\nmin = 0.9'
    request = builds(tmp_path, ENGINES.replace('workspace = "2GiB"', words))["one.int8.sm89"].request
    assert (request.timing_cache, request.store, request.metric) == ("none", "~/kept", "module:top")


def test_a_lists_custom_operators_are_each_jobs(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    (tmp_path / "list.toml").write_text(
        'operators = ["ops.py"]\nplugins = ["libacme.so"]\n[data.d]\ndata = "d.npz"\n'
        '[[job]]\nkind = "build"\nmodel = "m.onnx"\nprecision = "int8"\ndata = "d"\n'
    )
    table, engine = load_jobs(tmp_path / "list.toml")
    assert isinstance(table, Job) and isinstance(engine, BuildJob)
    assert table.operators == engine.request.operators == (str(tmp_path / "ops.py"),)
    assert engine.request.plugins == (str(tmp_path / "libacme.so"),)
