from __future__ import annotations

from pathlib import Path

import pytest

from trtopt.data.samples import write_crops


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos") / "crops"
    write_crops("imagenet-crops", folder)
    return folder
