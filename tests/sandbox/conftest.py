"""A folder that a sandbox can show."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder on disk: of /dev, where the other tests have theirs, a sandbox shows nothing."""
    with TemporaryDirectory() as folder:
        yield Path(folder)
