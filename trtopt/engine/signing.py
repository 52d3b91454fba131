"""Signatures of engines, by Ed25519 (RFC 8032, through the package cryptography).

What is signed is the manifest, and its SHA-256 of the plan covers that: the bytes that are hashed are those that TensorRT gets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import Damaged, Plain, converted, plain, read_json
from trtopt.core.errors import EngineError, SignatureRefused, UsageError, require
from trtopt.core.files import check_writable, existing_file, write_json
from trtopt.core.options import taking
from trtopt.engine.manifest import load_manifest, manifest_path
from trtopt.engine.request import SignRequest

FORMAT = "trtopt-signature-1"
PASSWORD = "TRTOPT_KEY_PASSWORD"
_MADE = (
    "make one: openssl genpkey -algorithm ed25519 -out key.pem, and openssl pkey -in key.pem -pubout -out key.pub.pem"
)
Keys = Sequence["str | os.PathLike[str]"]


@dataclass(frozen=True)
class Signature(Plain):
    """A signature that was written.

    Attributes:
        path: M.engine.sig.
        key: SHA-256 of the public key's 32 bytes, in hexadecimal digits: which one has to be trusted.
    """

    path: Path
    key: str


@dataclass(frozen=True)
class _Stored:
    """M.engine.sig."""

    format: str
    key: str
    signature: str


def signature_path(engine: str | os.PathLike[str]) -> Path:
    path = Path(engine)
    return path.with_name(f"{path.name}.sig")


@taking(SignRequest)
def sign(request: SignRequest) -> Signature:
    """Sign an engine, so that `Session(engine, trusted_keys=…)` knows whose it is: writes M.engine.sig.

    Args:
        engine: a plan with its manifest, which must belong together. A later build needs a new signature.
        key: a private Ed25519 key (PEM); $TRTOPT_KEY_PASSWORD opens one with a password.

    Raises:
        UsageError: no such file, or no such key.
        EngineError, EngineMismatch: there is no manifest, it can't be read, or it is another plan's.
        MissingDependency: cryptography isn't installed (the extra sign).
        OutputError: the signature can't be written.
    """
    engine, key_file = existing_file(request.engine, "the engine"), existing_file(request.key, "the key")
    path = signature_path(engine)
    check_writable(path)
    manifest = load_manifest(engine)
    if manifest is None:
        raise EngineError(
            f"{engine} has no manifest ({manifest_path(engine).name}), which is what is signed: build it by trtopt"
        )
    manifest.check_plan(engine)
    serialization, ed25519 = _library()
    password = os.environ.get(PASSWORD)
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), password.encode() if password else None)
    except (ValueError, TypeError) as error:  # TypeError: a password lacks, or is too many
        raise UsageError(
            f"{key_file} can't be read as a private key ({error}; its password is ${PASSWORD}); {_MADE}"
        ) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UsageError(f"{key_file} isn't an Ed25519 key; {_MADE}")
    signed = key.sign(_message(manifest_path(engine).read_bytes()))
    record = _Stored(FORMAT, _identity(serialization, key.public_key()), base64.b64encode(signed).decode())
    write_json(path, plain(record))
    return Signature(path, record.key)


def check_signed(engine: Path, manifest: bytes, trusted: Keys) -> None:
    """Raise SignatureRefused unless one of the trusted keys (PEM files) has signed this manifest.

    Raises:
        UsageError: a key's file can't be read.
        MissingDependency: cryptography isn't installed.
    """
    serialization, ed25519 = _library()
    keys = {}
    for name in trusted:
        file = existing_file(name, "`trusted_keys=`")
        try:
            key = serialization.load_pem_public_key(file.read_bytes())
        except ValueError as error:
            raise UsageError(f"{file} can't be read as a public key: {error}; {_MADE}") from None
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise UsageError(f"{file} isn't an Ed25519 key; {_MADE}")
        keys[_identity(serialization, key)] = key
    path = signature_path(engine)
    again = f"sign it with one that is trusted: trtopt sign {engine.name} --key KEY.pem"
    if not path.is_file():
        raise SignatureRefused(f"{engine} isn't signed (there is no {path.name}); {again}")
    try:
        record = converted(read_json(path), _Stored)
        if record.format != FORMAT:
            raise Damaged(f"its format is {record.format!r}, this trtopt reads {FORMAT!r}")
        signature = base64.b64decode(record.signature, validate=True)
    except (Damaged, binascii.Error) as error:
        raise SignatureRefused(f"{path} can't be read ({error}); {again}") from error
    if record.key not in keys:
        ids = ", ".join(name[:16] for name in keys)
        raise SignatureRefused(f"{engine} is signed by {record.key[:16]}…, and {ids}… is trusted; {again}")
    invalid = require("cryptography.exceptions", "sign", "checking signatures").InvalidSignature
    try:
        keys[record.key].verify(signature, _message(manifest))
    except invalid:
        raise SignatureRefused(
            f"{path} isn't the signature of {manifest_path(engine).name} as it is now: the engine was built again, or "
            f"changed; {again}"
        ) from None


def _message(manifest: bytes) -> bytes:
    return f"{FORMAT}\n{hashlib.sha256(manifest).hexdigest()}".encode()


def _identity(serialization: Any, key: Any) -> str:
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()


def _library() -> tuple[Any, Any]:
    where = "cryptography.hazmat.primitives"
    return tuple(  # type: ignore[return-value]
        require(f"{where}.{name}", "sign", "signing engines") for name in ("serialization", "asymmetric.ed25519")
    )
