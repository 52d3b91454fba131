"""A name that went says what to use instead, on the command line and in Python."""

from __future__ import annotations

import pytest
from world import World

import trtopt
from trtopt.core.removed import AT_URL, WENT


def test_a_command_that_went_says_what_to_use_instead(world: World) -> None:
    for command in ("bundle", "sign"):
        found = world.run(command, "model.engine")
        assert found.status == 2 and WENT[command] in found.err and len(found.err.splitlines()) == 1
        with pytest.raises(AttributeError) as refused:
            getattr(trtopt, command)
        assert str(refused.value) == WENT[command]


def test_an_option_that_went_says_what_to_use_instead(world: World) -> None:
    for command in ("run", "bench", "profile"):
        found = world.run(command, "m.engine", "--trusted-keys", "key.pem")
        assert (found.status, found.err) == (2, f"error: {WENT['trusted_keys']}; try 'trtopt {command} -h'\n")
    for call in (trtopt.Session, trtopt.run, trtopt.bench, trtopt.profile):
        with pytest.raises(TypeError) as refused:
            call(world.folder / "m.engine", trusted_keys=["key.pem"])  # type: ignore[operator]
        assert WENT["trusted_keys"] in str(refused.value)


def test_a_store_at_a_url_is_refused_before_the_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = world.folder / "absent.onnx"  # of which nothing is said, since it isn't looked at yet
    build = (nothing, "-o", world.output / "m.engine")
    for words in (("store", "list"), ("build", *build)):
        assert WENT[AT_URL] in world.refused(*words, "--store", "s3://team/engines")
    monkeypatch.setenv("TRTOPT_STORE", "s3://team/engines")
    said = world.refused("tune", *build, "--min-snr", "20")
    assert WENT[AT_URL] in said and "$TRTOPT_STORE is s3://team/engines" in said
    with pytest.raises(trtopt.UsageError, match="stores at URLs went"):
        trtopt.Session.for_model(nothing, backend="onnxruntime")
