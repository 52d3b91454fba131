"""sign and trusted_keys: what isn't signed as it is doesn't get as far as the plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import conv_relu
from world import has

import trtopt
from trtopt.core.errors import DeviceError, EngineError, EngineMismatch, SignatureRefused, UsageError
from trtopt.engine.manifest import manifest_path

serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
x25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.x25519")

PEM = serialization.Encoding.PEM


def _keys(
    folder: Path, name: str, kind: Any = ed25519.Ed25519PrivateKey, password: bytes | None = None
) -> tuple[Path, Path]:
    key = kind.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, how))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def engine(rtx: None, tmp_path: Path) -> Path:
    path = tmp_path / "m.engine"
    trtopt.build(conv_relu(), path, fp16=True, target="sm89", save_onnx=tmp_path / "graph.onnx")
    return path


def _open(engine: Path, *trusted: Path) -> trtopt.Session:
    return trtopt.Session(engine, backend="onnxruntime", trusted_keys=trusted)


def test_what_a_trusted_key_has_signed_is_opened(engine: Path, tmp_path: Path) -> None:
    private, public = _keys(tmp_path, "ours")
    _, other = _keys(tmp_path, "other")
    signed = trtopt.sign(engine, private)
    assert signed.path == engine.with_name("m.engine.sig") and len(signed.key) == 64
    with _open(engine, other, public) as session:
        inputs = {item.name: np.zeros([abs(int(size)) for size in item.shape], item.dtype) for item in session.inputs}
        assert session.run(inputs)
    with pytest.raises(DeviceError, match="needs an NVIDIA GPU"):  # as far as a signed one gets here
        trtopt.Session(engine, trusted_keys=[public])


@pytest.mark.parametrize(
    "change", ["no signature", "another key", "manifest", "signature", "not JSON", "no manifest", "swapped"]
)
def test_anything_else_is_refused_before_the_plan_is_read(engine: Path, tmp_path: Path, change: str) -> None:
    private, public = _keys(tmp_path, "ours")
    stored = trtopt.sign(engine, private).path
    manifest = manifest_path(engine)
    if change == "no signature":
        stored.unlink()
    elif change == "another key":
        trtopt.sign(engine, _keys(tmp_path, "other")[0])
    elif change == "manifest":
        manifest.write_bytes(manifest.read_bytes().replace(b"fp16", b"fp32", 1))
    elif change == "signature":
        told = json.loads(stored.read_text())
        stored.write_text(json.dumps({**told, "signature": "AAAA" + told["signature"][4:]}))
    elif change == "not JSON":
        stored.write_text("{")
    elif change == "no manifest":
        manifest.unlink()
    else:  # of another engine by the same key
        other = tmp_path / "other.engine"
        trtopt.build(conv_relu(), other, target="sm89")
        shutil.copy(trtopt.sign(other, private).path, stored)
    engine.write_bytes(b"never read")
    with pytest.raises(SignatureRefused, match="sign it"):
        trtopt.Session(engine, trusted_keys=[public])


def test_a_changed_plan_is_refused_by_the_signed_manifest(engine: Path, tmp_path: Path) -> None:
    private, public = _keys(tmp_path, "ours")
    trtopt.sign(engine, private)
    content = bytearray(engine.read_bytes())
    content[-1] ^= 1
    engine.write_bytes(content)
    with pytest.raises(EngineMismatch):
        _open(engine, public)
    with pytest.raises(EngineMismatch):
        trtopt.sign(engine, private)
    manifest_path(engine).unlink()
    with pytest.raises(EngineError, match="no manifest"):
        trtopt.sign(engine, private)


def test_keys(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = _keys(tmp_path, "ours", password=b"secret")
    with pytest.raises(UsageError, match="TRTOPT_KEY_PASSWORD"):
        trtopt.sign(engine, private)
    monkeypatch.setenv("TRTOPT_KEY_PASSWORD", "wrong")
    with pytest.raises(UsageError, match="can't be read as a private key"):
        trtopt.sign(engine, private)
    monkeypatch.setenv("TRTOPT_KEY_PASSWORD", "secret")
    trtopt.sign(engine, private)
    _open(engine, public).close()
    monkeypatch.delenv("TRTOPT_KEY_PASSWORD")
    wrong, wrong_public = _keys(tmp_path, "wrong", x25519.X25519PrivateKey)
    for call in (lambda: trtopt.sign(engine, wrong), lambda: _open(engine, wrong_public)):
        with pytest.raises(UsageError, match="isn't an Ed25519 key"):
            call()
    for call in (
        lambda: trtopt.sign(engine, public),
        lambda: _open(engine, engine),
        lambda: _open(engine, tmp_path / "none"),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        has(str(caught.value), "none" if "none" in str(caught.value) else "openssl genpkey")
