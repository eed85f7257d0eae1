"""Settings for the whole test run, made before anything reads them, and shared fixtures."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.update(
    {
        # gcsfs reads this when imported; otherwise it probes by gRPC for a minute before each use.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # No one may look for a metadata server: there is none, and the search takes long.
        "NO_GCE_CHECK": "true",
        "GCE_METADATA_HOST": "127.0.0.1:1",
        "GCE_METADATA_ROOT": "127.0.0.1:1",
        # TensorStore: a fixed bearer token instead of a search for credentials.
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test-token",
        "GOOGLE_CLOUD_PROJECT": "test",
        "EPATH_USE_TF": "false",
        "FSSPEC_GCS": json.dumps(
            {
                "token": "anon",
                "project": "test",
                "use_listings_cache": False,
                "requests_timeout": 60,
            }
        ),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
)
for _name in ("GOOGLE_APPLICATION_CREDENTIALS", "http_proxy", "HTTP_PROXY"):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
from warm import start_warm  # noqa: E402

start_warm()

_MEMORY = Path("/dev/shm")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long runs are for ``-m soak`` only."""
    if "soak" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="a long run: pytest -m soak"))


@pytest.fixture
def volume_root(tmp_path: Path) -> Iterator[Path]:
    """A fresh folder in memory, as a node's RAM disk is; on disk where there is no tmpfs."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="mtcheckpoint-test-", dir=_MEMORY))
    yield folder
    shutil.rmtree(folder)
