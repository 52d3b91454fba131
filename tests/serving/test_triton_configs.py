"""Triton's configurations, read by the protobuf that NVIDIA publishes and held against the plans' own profiles."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import written
from manifests import made

import trtopt
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.values import ShapeRange, TensorInfo
from trtopt.engine.manifest import manifest_path
from trtopt.graph.io import load_model
from trtopt.serving.config import Word, text
from trtopt.serving.interface import Interface, find_batching

pb = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient isn't installed")
text_format = pytest.importorskip("google.protobuf.text_format")

Tensors = Mapping[str, tuple[str, Sequence[int | str]]]
IMAGES = {"x": ("float32", ("batch", 3, 8, 8))}
LOGITS = {"y": ("float32", ("batch", 10))}
ONE = ({"x": "1x3x8x8,8x3x8x8,32x3x8x8"},)


def engine(
    folder: Path,
    inputs: Tensors = IMAGES,
    outputs: Tensors = LOGITS,
    profiles: Sequence[Mapping[str, str]] = ONE,
    *,
    version: str = "10.5.0.18",
    family: str = "tensorrt10",
    spec: Mapping[str, Any] | None = None,
    content: bytes = b"plan",
    **others: Any,
) -> Path:
    """A plan that holds nothing but its header, with a manifest that says this of it."""
    ends = [
        [{"name": name, "dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tensors.items()]
        for tensors in (inputs, outputs)
    ]
    return made(
        folder / "net.engine",
        b"ftrt" + bytes(20) + bytes(map(int, version.split("."))) + content,
        generation={"family": family, "product": "TensorRT", "version": version, "gpu": None},
        targets=[],
        spec={"precision": "int8", **(spec or {})},
        inputs=ends[0],
        outputs=ends[1],
        profiles=[dict(profile) for profile in profiles],
        **others,
    )


@pytest.fixture
def deployed(tmp_path: Path) -> Callable[..., Any]:
    """Deploys such an engine with Triton's TensorRT backend, and reads its configuration."""

    def deploy(*arguments: Any, options: Mapping[str, Any] | None = None, **others: Any) -> Any:
        path = engine(tmp_path, *arguments, **others)
        [model] = trtopt.deploy_triton(path, repo=tmp_path / "repo", **(options or {})).models
        assert (model.path / str(model.version) / "model.plan").read_bytes() == path.read_bytes()
        config = text_format.Parse((model.path / "config.pbtxt").read_text(), pb.ModelConfig())
        assert (config.name, config.max_batch_size) == ("net", model.max_batch_size)
        assert bool(model.no_batches) == (model.max_batch_size == 0)
        _check(config, json.loads(manifest_path(path).read_text()))
        return config, model

    return deploy


def _check(config: Any, manifest: Mapping[str, Any]) -> None:
    """What holds for every configuration: its tensors are the plan's, and what is warmed up fits a profile."""
    batched = config.max_batch_size > 0
    for entries, tensors in ((config.input, manifest["inputs"]), (config.output, manifest["outputs"])):
        for entry, tensor in zip(entries, tensors, strict=True):
            shape = [size if isinstance(size, int) else -1 for size in tensor["shape"]]
            dims = list(entry.reshape.shape) if entry.HasField("reshape") else list(entry.dims)
            assert (entry.name, [-1] * batched + dims) == (tensor["name"], shape)
    profiles = [{name: ShapeRange.parse(item) for name, item in profile.items()} for profile in manifest["profiles"]]
    ranges = profiles or [{}]
    most = max((item.max[0] for profile in profiles for item in profile.values()), default=0)
    assert not batched or config.max_batch_size <= most
    for sample in config.model_warmup:
        shapes = {
            name: ([sample.batch_size] if batched else []) + ([] if _scalar(config, name) else list(item.dims))
            for name, item in sample.inputs.items()
        }
        assert any(
            all(
                low <= size <= high
                for name, shape in shapes.items()
                if name in profile
                for low, size, high in zip(profile[name].min, shape, profile[name].max, strict=True)
            )
            for profile in ranges
        ), sample
    for spec in config.optimization.cuda.graph_spec:
        assert spec.batch_size <= config.max_batch_size
        assert set(spec.input) == {entry.name for entry in config.input}


def _scalar(config: Any, name: str) -> bool:
    return any(entry.name == name and entry.HasField("reshape") for entry in config.input)


def test_a_dynamic_batch(deployed: Callable[..., Any]) -> None:
    config, model = deployed(options={"instances": 2, "max_delay": "500us"})
    found = config.backend, config.platform, config.default_model_filename
    assert found == ("tensorrt", "tensorrt_plan", "model.plan")
    assert config.max_batch_size == 32
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 32]
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    [group] = config.instance_group
    assert (group.count, group.kind, list(group.profile)) == (2, pb.ModelInstanceGroup.KIND_GPU, [])
    assert config.optimization.cuda.graphs
    assert [spec.batch_size for spec in config.optimization.cuda.graph_spec] == [8, 32]
    assert [sample.batch_size for sample in config.model_warmup] == [1, 8, 32]
    assert config.input[0].data_type == pb.TYPE_FP32
    assert any("the very TensorRT 10.5.0.18 that made" in note and "support-matrix" in note for note in model.notes)


def test_a_fixed_batch(deployed: Callable[..., Any]) -> None:
    fixed = {"x": ("float16", (4, 3, 8, 8))}, {"y": ("float16", (4, 10))}, ()
    config, model = deployed(*fixed, options={"max_delay": "5ms"})
    assert model.no_batches == "the first dimension of input 'x' is always 4"
    assert not config.HasField("dynamic_batching")
    assert "`max_delay=` has no effect: without batches no request waits for others" in model.notes
    assert list(config.input[0].dims) == [4, 3, 8, 8]
    assert [(sample.batch_size, list(sample.inputs["x"].dims)) for sample in config.model_warmup] == [(0, [4, 3, 8, 8])]


def test_several_profiles(deployed: Callable[..., Any]) -> None:
    profiles = ({"x": "1x3x8x8,2x3x8x8,4x3x8x8"}, {"x": "5x3x8x8,16x3x8x8,64x3x8x8"})
    config, _ = deployed(IMAGES, LOGITS, profiles)
    assert config.max_batch_size == 64
    assert list(config.instance_group[0].profile) == ["0", "1"]
    assert [sample.batch_size for sample in config.model_warmup] == [1, 2, 4, 5, 16, 64]
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 4, 16, 64]


def test_sizes_that_no_profile_takes_are_no_batches(deployed: Callable[..., Any]) -> None:
    config, _ = deployed(IMAGES, LOGITS, ({"x": "1x3x8x8,2x3x8x8,4x3x8x8"}, {"x": "8x3x8x8,8x3x8x8,8x3x8x8"}))
    assert config.max_batch_size == 4  # a batch of 5 fits neither
    config, model = deployed(IMAGES, LOGITS, ({"x": "4x3x8x8,8x3x8x8,8x3x8x8"},), options={"overwrite": True})
    assert "no profile takes a batch of 1; the smallest is 4" in model.no_batches
    assert list(config.input[0].dims) == [-1, 3, 8, 8]


def test_sequences(deployed: Callable[..., Any]) -> None:
    ids = dict.fromkeys(("ids", "mask"), ("int64", ("batch", "sequence")))
    outputs = {"hidden": ("float32", ("batch", "sequence", 384)), "pooled": ("float32", ("batch", 384))}
    ranges = dict.fromkeys(ids, "1x8,8x64,32x256")
    config, _ = deployed(ids, outputs, (ranges,))
    assert [list(entry.dims) for entry in (*config.input, *config.output)] == [[-1], [-1], [-1, 384], [384]]
    assert [{name: list(item.dims) for name, item in sample.inputs.items()} for sample in config.model_warmup] == [
        {"ids": [size], "mask": [size]} for size in (8, 64, 256)
    ]
    graph = config.optimization.cuda.graph_spec[0]
    assert (graph.batch_size, list(graph.input["ids"].dim)) == (8, [64])


def test_a_number_for_each_sample(deployed: Callable[..., Any]) -> None:
    config, _ = deployed({"x": ("float32", ("batch",))}, {"y": ("float32", ("batch",))}, ({"x": "1,8,32"},))
    for entry in (config.input[0], config.output[0]):
        assert (list(entry.dims), list(entry.reshape.shape)) == ([1], [])
        assert entry.HasField("reshape")


@pytest.mark.parametrize(
    ("inputs", "outputs", "profiles", "why"),
    [
        (IMAGES, {"y": ("float32", (1, 10))}, ONE, "first dimension of output 'y' is always 1"),
        (
            {"x": ("float32", ("batch", 4)), "boxes": ("float32", ("boxes", 4))},
            LOGITS,
            ({"x": "1x4,2x4,4x4", "boxes": "1x4,2x4,4x4"},),
            "different names: batch, boxes",
        ),
        (
            {"x": ("float32", (-1, 4)), "z": ("float32", (-1, 4))},
            LOGITS,
            ({"x": "1x4,2x4,4x4", "z": "1x4,2x4,8x4"},),
            "different ranges in profile 0",
        ),
        (
            IMAGES,
            {"found": ("int64", ("detections", 7))},
            ONE,
            "the first dimension of output 'found' is the batch isn't known: name the inputs' first one",
        ),
        (IMAGES, LOGITS, ({"x": "1x3x8x8,1x3x8x8,1x3x8x8"},), "no profile takes more than one sample"),
    ],
)
def test_what_shares_no_batch(
    deployed: Callable[..., Any], inputs: Tensors, outputs: Tensors, profiles: Any, why: str
) -> None:
    _, model = deployed(inputs, outputs, profiles)
    assert why in model.no_batches


def test_samples_elsewhere_than_on_the_first_axis_are_no_batch() -> None:
    state = TensorInfo("state", "float32", ("n", "batch"), 1)
    assert find_batching(Interface((state,), (TensorInfo("y", "float32", ("n", 4)),), ())) == (
        0,
        "the first dimension of input 'state' doesn't count samples",
    )


def test_types_are_those_of_the_plan(deployed: Callable[..., Any]) -> None:
    ids = {"ids": ("int64", ("batch", 8)), "x": ("float32", ("batch", 4))}
    ranges = ({"ids": "1x8,2x8,4x8", "x": "1x4,2x4,4x4"},)
    config, _ = deployed(ids, LOGITS, ranges, family="tensorrt8", version="8.6.1.6", spec={"io_fp32": False})
    assert [entry.data_type for entry in (*config.input, *config.output)] == [pb.TYPE_INT32, pb.TYPE_FP16, pb.TYPE_FP16]
    config, _ = deployed(ids, LOGITS, ranges, spec={"precision": "bf16", "io_fp32": False}, options={"overwrite": True})
    assert [entry.data_type for entry in (*config.input, *config.output)] == [pb.TYPE_INT64, pb.TYPE_BF16, pb.TYPE_BF16]


def test_class_names_become_labels(deployed: Callable[..., Any]) -> None:
    names = [f"class {number}" for number in range(10)]
    names[3] = "a\nb"
    config, model = deployed(classes=names, output_kinds={"y": "classes"})
    assert config.output[0].label_filename == "labels.txt"
    lines = (model.path / "labels.txt").read_text().splitlines()
    assert (len(lines), lines[3], lines[9]) == (10, "a b", "class 9")


SIZED = {"x": ("float32", (1, 3, -1, -1)), "size": ("int64", (2,))}


@pytest.mark.parametrize(
    ("inputs", "outputs", "profile", "said"),
    [
        (
            {"x": ("float8_e4m3fn", ("batch", 4))},
            LOGITS,
            {"x": "1x4,2x4,4x4"},
            "'x' is float8_e4m3fn; Triton takes bool",
        ),
        (
            SIZED,
            {"y": ("float32", (1, 3, -1, -1))},
            {"x": "1x3x8x8", "size": "8x8,16x16,32x32"},
            "'size' decides shapes by",
        ),
        (IMAGES, {"y": ("float32", ())}, ONE[0], "scalar"),
        ({}, {}, {}, r"has no manifest beside it \(net.engine.json\).*build it with `trtopt build`"),
    ],
)
def test_what_triton_can_not_serve_is_refused_before_anything_is_written(
    tmp_path: Path, inputs: Tensors, outputs: Tensors, profile: Mapping[str, str], said: str
) -> None:
    path = engine(tmp_path, inputs, outputs, (profile,))
    if not inputs:
        manifest_path(path).unlink()
    (tmp_path / "good").mkdir()
    good = engine(tmp_path / "good").rename(tmp_path / "good.engine")
    manifest_path(tmp_path / "good" / "net.engine").rename(manifest_path(good))
    with pytest.raises(UsageError, match=said):
        trtopt.deploy_triton([good, path], repo=tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


def test_names_of_any_kind_come_back_from_the_text() -> None:
    name = 'a "b" \\ c\n\tü/0'
    message = {"name": name, "input": [{"name": name, "data_type": Word("TYPE_INT8"), "dims": [-1, 3]}], "output": []}
    config = text_format.Parse(text(message), pb.ModelConfig())
    assert (config.name, config.input[0].name, list(config.input[0].dims)) == (name, name, [-1, 3])


# Repositories ------------------------------------------------------------------------------------------------------------


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_what_is_unchanged_is_left_alone_and_a_changed_plan_is_a_new_version(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    first = trtopt.deploy_triton(engine(tmp_path), repo=repo).models[0]
    before = _state(repo)
    again = trtopt.deploy_triton(engine(tmp_path), repo=repo).models[0]
    assert ((first.version, first.changed), (again.version, again.changed)) == ((1, True), (1, False))
    assert _state(repo) == before
    changed = trtopt.deploy_triton(engine(tmp_path, content=b"another"), repo=repo).models[0]
    assert (changed.version, changed.changed) == (2, True)
    assert {name: _state(repo)[name] for name in before if "/1" in name} == {
        name: state for name, state in before.items() if "/1" in name
    }


def test_a_configuration_is_not_overwritten_unless_asked_for(tmp_path: Path) -> None:
    path, repo = engine(tmp_path), tmp_path / "repo"
    config = trtopt.deploy_triton(path, repo=repo).models[0].path / "config.pbtxt"
    mine = config.read_text().replace("max_batch_size: 32", "max_batch_size: 16")
    config.write_text(mine)
    engine(tmp_path, content=b"another")
    with pytest.raises(UsageError, match=r"-max_batch_size: 16; \+max_batch_size: 32.*`overwrite=True` replaces it"):
        trtopt.deploy_triton(path, repo=repo)
    assert config.read_text() == mine
    assert not (config.parent / "2").exists()
    [model] = trtopt.deploy_triton(path, repo=repo, overwrite=True).models
    assert "max_batch_size: 32" in config.read_text()
    assert any("replaced" in note for note in model.notes)


def test_nothing_is_linked_to_what_lies_outside(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = engine(tmp_path / "elsewhere")
    link = tmp_path / "net.engine"
    link.symlink_to(path)
    manifest_path(link).symlink_to(manifest_path(path))
    [model] = trtopt.deploy_triton(link, repo=tmp_path / "repo").models
    plan = model.path / "1" / "model.plan"
    assert not plan.is_symlink()
    assert plan.stat().st_nlink == 1  # writing into the engine doesn't change what is served


def test_a_plan_that_can_not_be_written_leaves_no_folder_that_triton_takes_for_a_model(tmp_path: Path) -> None:
    path = engine(tmp_path, content=bytes(1 << 22))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OutputError, match="nothing was left behind"):
            trtopt.deploy_triton(path, repo=tmp_path / "repo")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "repo").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file: a file, pipe or device has that name"):
        trtopt.deploy_triton(path, repo=tmp_path / "file")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "onnxruntime"}, "allowed: tensorrt, python"),
        ({"name": "../x"}, "can't be a model's name"),
        ({"name": ""}, "can't be a model's name"),
        ({"instances": 0}, "at least 1"),
        ({"max_delay": "soon"}, "length of time"),
        ({"runtime": "rtx"}, "`runtime=` is for `backend='python'`"),
        ({"backend": "python", "runtime": "onnxruntime"}, "build with `save_onnx=`"),
    ],
)
def test_options_that_can_not_be_right(tmp_path: Path, options: Mapping[str, Any], said: str) -> None:
    path = engine(tmp_path)
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        trtopt.deploy_triton(path, repo=tmp_path / "repo", **options)
    assert not (tmp_path / "repo").exists()


def test_a_plan_of_rtx_is_for_the_python_backend(tmp_path: Path) -> None:
    path = engine(tmp_path)
    path.write_bytes(b"vtrt" + path.read_bytes()[4:])
    found = json.loads(manifest_path(path).read_text())
    found["plan"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest_path(path).write_text(json.dumps(found))
    with pytest.raises(UsageError, match=r"TensorRT backend can't read: give `backend='python'`"):
        trtopt.deploy_triton(path, repo=tmp_path / "repo")
    [model] = trtopt.deploy_triton(path, repo=tmp_path / "repo", backend="python").models
    config = text_format.Parse((model.path / "config.pbtxt").read_text(), pb.ModelConfig())
    assert config.instance_group[0].kind == pb.ModelInstanceGroup.KIND_GPU
    assert {key: item.string_value for key, item in config.parameters.items()} == {
        "engine": "net.engine",
        "runtime": "auto",
    }


def test_a_kept_graph_is_served_with_its_external_weights(tmp_path: Path) -> None:
    model = written("(float[batch,4] x) => (float[batch,300] y) { y = MatMul (x, w) }", w=np.ones((4, 300), np.float32))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.weights", size_threshold=0)
    with pytest.raises(UsageError, match=r"m.onnx has no manifest.*an ONNX file alone"):
        trtopt.deploy_triton(tmp_path / "m.onnx", repo=tmp_path / "repo")
    about = {"graph_file": "m.onnx", "graph": load_model(tmp_path / "m.onnx").fingerprint}
    path = engine(tmp_path, {"x": ("float32", ("batch", 4))}, LOGITS, [{"x": "1x4,8x4,32x4"}], **about)
    options: dict[str, Any] = {"backend": "python", "runtime": "onnxruntime"}
    [deployed] = trtopt.deploy_triton(path, repo=tmp_path / "repo", **options).models
    kept = {"m.onnx", "m.weights", "model.py", "net.engine", "net.engine.json"}
    assert {path.name for path in (deployed.path / "1").iterdir()} == kept
    with trtopt.Session(deployed.path / "1" / "net.engine", backend="onnxruntime") as session:
        assert session.run({"x": np.ones((2, 4), np.float32)})["y"].tolist() == [[4.0] * 300] * 2
    assert deployed.max_batch_size == 32


@pytest.mark.parametrize("name", [None, "plain"])
def test_names_that_tritons_python_can_not_open(tmp_path: Path, name: str | None) -> None:
    (path := engine(tmp_path)).rename(odd := tmp_path / "größe.engine")
    manifest_path(path).rename(manifest_path(odd))
    with pytest.raises(UsageError, match=r"'größe(\.engine)?': only ASCII"):
        trtopt.deploy_triton(odd, repo=tmp_path / "repo", name=name, backend="python")
    assert not (tmp_path / "repo").exists()
