"""Reading, validating and writing ONNX files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import conv_relu, model, node, rapidocr, values, written
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trtopt.core.errors import InvalidModel, OutputError, TrtoptError, UsageError
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.proto import fingerprint, tensor_chunks, tensor_size


def refused(source: Path | ModelProto, *words: str, error: type[TrtoptError] = InvalidModel) -> str:
    with pytest.raises(error) as caught:
        load_model(source)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return text


def test_a_valid_model_tells_its_inputs_outputs_and_opset(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save_model(conv_relu(outputs={"y": ["batch", 4, 8, 8]}), path)
    loaded = load_model(path)
    assert [(info.name, info.dtype, info.shape) for info in loaded.inputs] == [("x", "float32", ("batch", 3, 8, 8))]
    assert [(info.name, info.shape) for info in loaded.outputs] == [("y", ("batch", 4, 8, 8))]
    assert (loaded.opset, loaded.path) == (17, path)


def test_initializers_are_no_inputs() -> None:
    proto = conv_relu()
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3, 3, 3]))
    assert [info.name for info in load_model(proto).inputs] == ["x"]
    assert load_model(conv_relu()).outputs[0].shape == ("batch", 4, 8, 8)  # inferred


def test_missing_folder_and_unreadable_files(tmp_path: Path) -> None:
    refused(tmp_path / "none.onnx", "none.onnx", "doesn't exist", error=UsageError)
    refused(tmp_path, "is a folder", error=UsageError)
    (tmp_path / "empty.onnx").touch()
    refused(tmp_path / "empty.onnx", "empty.onnx", "0 bytes")


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    content = rapidocr("cls").read_bytes()
    path = tmp_path / "cut.onnx"
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, "cut.onnx")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"PK\x03\x04rest", "trtopt export"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x1f\x8b\x08rest", "gunzip"),
        (b"vtrt\0\0\0\0", "a TensorRT engine: give the ONNX model that it was built from)"),
        (b'{\n "format": "trtopt.calib/1",', "a calibration table: give the model that it was made for"),
        (b'{\n "generation": {},\n "format": "trtopt.engine/1",', "an engine's manifest: give the ONNX model"),
        (b"\x89HDF\r\n\x1a\n", "Keras"),
        (b"\x30\x00\x00\x00ORTM", "the ONNX file that it was made from"),
    ],
)
def test_what_it_looks_like_instead(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    refused(path, word)


@pytest.mark.parametrize("suffix", [".onnxtxt", ".json", ".textproto"])
def test_a_text_form_of_onnx_is_no_web_page(tmp_path: Path, suffix: str) -> None:
    text = '<ir_version: 9, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / f"m{suffix}")
    with pytest.raises(InvalidModel) as caught:
        load_model(tmp_path / f"m{suffix}")
    assert f"onnx.save(onnx.load('m{suffix}'), 'm.onnx')" in str(caught.value)
    assert "web page" not in str(caught.value) and "truncated" not in str(caught.value)


def test_what_a_name_or_a_file_beside_it_tells(tmp_path: Path) -> None:
    (tmp_path / "m.engine").write_bytes(b"vtrt" + bytes(40))
    (tmp_path / "m.engine.json").write_text("{}")
    refused(tmp_path / "m.engine", f"which {tmp_path / 'm.engine.json'} names under source")
    np.savez(tmp_path / "s.npz", x=np.zeros(3))
    refused(tmp_path / "s.npz", f"`data={str(tmp_path / 's.npz')!r}`")
    (tmp_path / "net.py").write_text("class Net: ...\n")
    refused(tmp_path / "net.py", "trtopt export net.py:CLASS")


def changed(change: Callable[[ModelProto], Any]) -> ModelProto:
    proto = conv_relu()
    change(proto)
    return proto


@pytest.mark.parametrize(
    ("proto", "words"),
    [
        (conv_relu(opset=99), ("opset 99", f"7 to {onnx.defs.onnx_opset_version()}")),
        (conv_relu(opset=6), ("opset 6", "convert_version(model, 13)")),
        (changed(lambda proto: setattr(proto, "ir_version", 99)), ("ir_version 99", "export it again")),
        (changed(lambda proto: proto.ClearField("opset_import")), ("must specify opset_import", "export it again")),
        (model([node("Add", "x ghost", "y", "adder")]), ("Add adder", "'ghost'")),
        (model([node("Relu", "x", "h")]), ("output 'y'", "no node")),
        (changed(lambda proto: proto.graph.ClearField("output")), ("no outputs",)),
        (
            changed(lambda proto: proto.graph.input[0].type.tensor_type.ClearField("shape")),
            ("the input 'x' has no shape", "export the model with one"),
        ),
        (model([node("Conv", "x w", "y", pads=[1, 1])], weights={"w": values(4, 3, 3, 3)}), ("pads",)),
        (model([node("Conv", "x w", "y", "c")], weights={"w": values(4)}), ("node name: c", "weight tensor")),
        (
            model([node("MatMul", "x w", "y", "bad")], inputs={"x": [2, 5]}, weights={"w": values(6, 4)}),
            ("bad", ": export it again"),
        ),
        (
            model([helper.make_node("MatMul", ["x", "w"], ["y"])], inputs={"x": [2, 5]}, weights={"w": values(6, 4)}),
            ("MatMul_y", ": export it again"),
        ),
        (
            changed(lambda proto: setattr(proto.graph.initializer[0], "raw_data", b"1234")),
            ("'w'", "432 bytes", "4 are"),
        ),
        (
            ModelProto.FromString(conv_relu().SerializeToString().replace(b"test", b"t\xe9st")),
            ("isn't UTF-8", "xe9"),
        ),
    ],
)
def test_what_is_no_valid_model_is_named(proto: ModelProto, words: tuple[str, ...]) -> None:
    refused(proto, *words)


def test_a_cycle_names_its_nodes_in_order() -> None:
    proto = model([node("Add", "x c", "a", "n1"), node("Relu", "a", "b", "n2"), node("Neg", "b", "c", "n3")])
    proto.graph.output[0].name = "b"
    text = refused(proto, "is cyclic")
    assert "Add n1 → Relu n2 → Neg n3 → Add n1" in text or "Relu n2 → Neg n3 → Add n1 → Relu n2" in text


def test_a_dangling_input_inside_a_body_is_found_and_outer_names_are_seen() -> None:
    text = """(float[4] x) => (float[] y) { [choose] y = If (c) <then_branch = t () => (float[] a) { a = Relu (x) },
        else_branch = e () => (float[] b) { b = Relu (READ) }> }"""
    assert load_model(written(text.replace("READ", "x"), c=True)).outputs[0].name == "y"
    refused(written(text.replace("READ", "ghost"), c=True), "'ghost'", "choose")


def test_duplicate_names() -> None:
    twice = [node("Relu", "x", "h", "same"), node("Relu", "h", "y", "same")]
    assert load_model(model(twice)).outputs  # packages ship such files; folding tells them apart
    refused(
        model([node("Relu", "x", "y", "a"), node("Neg", "x", "y", "b")]),
        "'y' has been used as output names multiple times",
    )
    proto = conv_relu()
    proto.graph.initializer.append(proto.graph.initializer[0])
    refused(proto, "w initializer name is not unique")


def test_unsorted_nodes_are_sorted() -> None:
    proto = model([node("Relu", "h", "y", "second"), node("Neg", "x", "h", "first")])
    assert [item.name for item in load_model(proto).proto.graph.node] == ["first", "second"]


@pytest.fixture
def external(tmp_path: Path) -> Path:
    path = tmp_path / "big.onnx"
    save_model(conv_relu(weights={"w": values(64, 3, 3, 3), "b": values(64)}), path, inline_limit=1000)
    assert (tmp_path / "big.onnx.data").stat().st_size >= 64 * 27 * 4
    return path


def test_external_data_round_trip_and_fingerprint(external: Path) -> None:
    inline = conv_relu(weights={"w": values(64, 3, 3, 3), "b": values(64)})
    loaded = load_model(external)
    assert loaded.fingerprint == load_model(inline).fingerprint
    assert np.array_equal(numpy_helper.to_array(loaded.proto.graph.initializer[0]), values(64, 3, 3, 3))
    assert [item.data_location for item in onnx.load(str(external), load_external_data=False).graph.initializer] == [
        1,
        0,
    ]
    renamed = external.with_name("other.onnx")
    renamed.write_bytes(external.read_bytes())
    assert load_model(renamed).fingerprint == loaded.fingerprint


def test_the_fingerprint_sees_every_weight(tmp_path: Path) -> None:
    first, second = values(256, 128), values(256, 128)
    second[255, 127] += 1e-3
    marks = {fingerprint(model([node("MatMul", "x w", "y")], weights={"w": item})) for item in (first, second)}
    assert len(marks) == 2


def test_external_data_missing_or_short(external: Path) -> None:
    data = external.with_name("big.onnx.data")
    content = data.read_bytes()
    data.write_bytes(content[:-10])
    refused(external, "big.onnx.data", f"{len(content) - 10} bytes", "truncated")
    data.unlink()
    refused(external, "big.onnx.data", "missing", "'w'")


@pytest.mark.parametrize("location", ["/etc/hostname", "../outside.data"])
def test_external_data_outside_the_folder_is_refused(external: Path, location: str) -> None:
    """Or a model could have any file of the machine read; lazily, too."""
    proto = onnx.load(str(external), load_external_data=False)
    refused(proto, "without its path")
    proto.graph.initializer[0].external_data[0].value = location
    external.write_bytes(proto.SerializeToString())
    refused(external, location)
    with pytest.raises(InvalidModel, match="bad external data reference"):
        load_model(external, lazy=True)


def test_saving_leaves_nothing_behind_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError):
        save_model(conv_relu(), tmp_path / "missing" / "m.onnx")
    real = Path.replace

    def full(self: Path, target: str | os.PathLike[str]) -> Path:
        if str(target).endswith("m.onnx.data"):  # the first of the two
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="No space"):
        save_model(conv_relu(), tmp_path / "m.onnx", inline_limit=100)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "BFLOAT16", "INT64", "INT8", "BOOL", "INT4", "UINT4", "DOUBLE"])
def test_tensor_sizes_match_their_content(kind: str) -> None:
    tensor = helper.make_tensor("t", getattr(TensorProto, kind), [3, 5], [1] * 15)
    raw = numpy_helper.from_array(numpy_helper.to_array(tensor))
    assert tensor_size(tensor) == len(raw.raw_data) == len(b"".join(tensor_chunks(tensor)))


def beside(folder: Path, location: str = "w.bin") -> Path:
    """A model whose first weight lies in another file, which isn't written."""
    proto = conv_relu()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return folder / "m.onnx"


def test_external_data_is_judged_by_where_its_links_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = conv_relu().graph.initializer[0].raw_data
    path = beside(tmp_path / "model")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "w.bin").write_bytes(content)
    (path.parent / "w.bin").symlink_to("../outside/w.bin")
    text = refused(path, "outside the model's folder", "TRTOPT_ALLOW_EXTERNAL=")
    name, _, value = text.rpartition(" ")[2].partition("=")
    monkeypatch.setenv(name, value)
    assert load_model(path).proto.graph.initializer[0].raw_data == content
    monkeypatch.setenv(name, str(tmp_path / "another"))
    refused(path, "outside the model's folder")
    (path.parent / "w.bin").unlink()
    (path.parent / "blob").write_bytes(content)
    (path.parent / "w.bin").symlink_to("blob")
    assert load_model(path).proto.graph.initializer[0].raw_data == content


def test_a_hugging_face_cache_links_all_files_into_one_folder(tmp_path: Path) -> None:
    content = conv_relu().graph.initializer[0].raw_data
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "4f2a" / "onnx", tmp_path / "models--a--b" / "blobs"
    made = beside(blobs)
    made.rename(blobs / "11aa")
    (blobs / "22bb").write_bytes(content)
    snapshot.mkdir(parents=True)
    (snapshot / "m.onnx").symlink_to("../../../blobs/11aa")
    (snapshot / "w.bin").symlink_to("../../../blobs/22bb")
    assert load_model(snapshot / "m.onnx").proto.graph.initializer[0].raw_data == content
    (tmp_path / "secret").write_bytes(content)
    (snapshot / "w.bin").unlink()
    (snapshot / "w.bin").symlink_to(tmp_path / "secret")
    refused(snapshot / "m.onnx", "outside the model's folder")


def test_a_module_in_the_place_of_a_model_file_says_what_to_type() -> None:
    for named in ("my_model.py:Net", "torchvision:resnet18"):
        with pytest.raises(UsageError, match=f"trtopt export {named} -o model.onnx"):
            load_model(named)
    with pytest.raises(UsageError) as caught:
        load_model("missing.onnx")
    assert "export" not in str(caught.value)


def test_weights_that_are_no_inputs_in_an_old_file(tmp_path: Path) -> None:
    proto = conv_relu(opset=8)
    proto.ir_version = 3
    onnx.save(proto, tmp_path / "old.onnx")
    loaded = load_model(tmp_path / "old.onnx")
    assert loaded.proto.ir_version == 4 and [info.name for info in loaded.inputs] == ["x"]


def test_sizes_that_were_edited_leave_nothing_behind(tmp_path: Path) -> None:
    """onnx#3483: what the file says of results is of the sizes before."""
    proto = onnx.shape_inference.infer_shapes(conv_relu(inputs={"x": [1, 3, 32, 32]}, outputs={"y": [1, 4, 32, 32]}))
    for dim in proto.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_value = 64
    assert proto.graph.value_info
    loaded = load_model(proto)
    assert loaded.outputs[0].shape == (1, 4, 64, 64) and not loaded.proto.graph.value_info
    assert [dim.dim_value for dim in loaded.proto.graph.output[0].type.tensor_type.shape.dim] == [1, 4, 64, 64]


def test_sizes_that_were_edited_leave_nothing_behind_in_an_if() -> None:
    proto = written(
        "(float[2,4,8] x) => (float[2,4,8] y) { s = ReduceSum <keepdims = 0> (x) c = Cast <to = 9> (s) "
        "y = If (c) <then_branch = t () => (float[2,4,9] a) { a = Relu (x) }, "
        "else_branch = e () => (float[2,4,9] b) { b = Neg (x) }> }"
    )
    assert load_model(proto).outputs[0].shape == (2, 4, 8)


DIVIDED = "(float[2,2] x) => (float[] y) { c = Cast <to = 7> (x) q = %s (c, d) y = Cast <to = 1> (q) }"
PICKED = "(float[2,4] x) => (float[] y) { y = Gather <axis = 1> (x, i) }"


@pytest.mark.parametrize(
    ("proto", "told"),
    [
        (
            written("(float[2,4] x) => (float[] y) { y = GatherElements <axis = -1> (x, i) }", i=[[3], [4]]),
            "place 4 of 4",
        ),
        (written("(float[2,4] x) => (float[] y) { y = GatherElements <axis = 1> (x, i) }", i=[[-4], [3]]), ""),
        (written("(float[2,4] x) => (float[] y) { y = GatherND (x, i) }", i=[[1, 3], [-3, 0]]), "place -3 of 2 in x"),
        (written("(float[2,4] x) => (float[] y) { y = GatherND (x, i) }", i=[[-2, 3], [1, -4]]), ""),
        (written("(float[n,4] x) => (float[] y) { y = GatherND (x, i) }", i=[[99]]), ""),
        (
            written("(float[2,4] x) => (float[] y) { y = GatherND <batch_dims = 1> (x, i) }", i=[[3], [4]]),
            "place 4 of 4",
        ),
        (
            written("(float[2,4] x) => (float[] y) { y = ScatterElements (x, i, u) }", i=[[2]], u=values(1, 1)),
            "place 2 of 2",
        ),
        (written("(float[2,4] x) => (float[] y) { y = ScatterND (x, i, u) }", i=[[1, 5]], u=values(1)), "place 5 of 4"),
        (written(PICKED, i=[-1, 10**9]), "entry 1000000000 of 4"),
        (written(PICKED, i=[-4, 3]), ""),
        (written(PICKED, i=np.zeros(0, np.int64)), ""),
        (written(DIVIDED % "Div", d=[2, 0]), "in which there is a 0"),
        (written(DIVIDED % "Mod", d=0), "in which there is a 0"),
        (written("(float[2,4] x) => (float[] y) { y = Div (x, d) }", d=np.zeros(4, np.float32)), ""),
    ],
)
def test_constants_that_can_not_be_are_named(proto: ModelProto, told: str) -> None:
    if told:
        refused(proto, told)
    else:
        load_model(proto)


def test_an_output_that_is_a_weight_has_its_shape() -> None:
    proto = written("(float[2,3] x) => (float[] y, float[] w) { y = Add (x, w) }", w=values(2, 3))
    assert [value.shape for value in load_model(proto).outputs] == [(2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("ours", "its", "op"),
    [
        ("", ', "acme": 1', "acme.Swishy"),
        (', "acme": 1', "", "acme.Swishy"),
        (', "acme": 1', ', "acme": 2', "acme.Swishy"),
        ("", "", "Swishy"),
    ],
    ids=["function alone", "model alone", "other version", "in the name of onnx"],
)
def test_a_custom_operator_in_a_function_is_as_one_in_the_graph(ours: str, its: str, op: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 17, "own": 1{ours}]> g (float[n, 4] x) => (float[n, 4] y) {{
        a = Neg(x) y = own.Act(a, x) }}
        <opset_import: ["": 17{its}], domain: "own"> Act (a, b) => (c) {{ d = {op}<scale = 2.0>(a, b) c = Relu(d) }}"""
    loaded = load_model(onnx.parser.parse_model(text))
    assert [item.op_type for item in loaded.proto.graph.node] == ["Neg", "Swishy", "Relu"]
    assert loaded.proto.graph.node[1].name == "Swishy_d" and not loaded.proto.functions
    assert (custom := loaded.proto.graph.node[1].domain) and custom in {
        item.domain for item in loaded.proto.opset_import
    }
    folded, report = fold(loaded.proto)
    assert not report.problem and [item.op_type for item in folded.graph.node] == ["Neg", "Swishy", "Relu"]


def test_a_plugin_in_the_name_of_onnx_has_a_domain_of_its_own() -> None:
    """onnx-graphsurgeon writes them so, and onnx's checker refuses the model."""
    loaded = load_model(written("(float[n,3] x) => (float[] y) { r = Relu (x) y = EfficientNMS_TRT (r, r) }"))
    assert loaded.mended and [item.domain for item in loaded.proto.graph.node] == ["", "trt.plugins"]
    assert not load_model(written("(float[n,3] x) => (float[] y) { y = Relu (x) }")).mended
    with pytest.raises(InvalidModel, match="No Op registered for Gelu"):  # ONNX's own, of a newer opset
        load_model(written("(float[n,3] x) => (float[] y) { y = Gelu (x) }"))
