"""The notebook of the documentation runs, and prints what it shows."""

import json
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parent.parent / "docs" / "stepping.ipynb"
# In a process of its own, as the clients of kernels have warnings that are errors here.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def read_outputs(path):
    """Return what each cell of code prints or returns."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    shown = [[each.get("text") or each["data"]["text/plain"] for each in cell.get("outputs", ())] for cell in cells]
    return [["".join(text) for text in texts] for texts in shown]


def test_the_notebook_prints_what_it_shows(tmp_path):
    """All of its cells, executed from the beginning by a new kernel."""
    executed = tmp_path / "executed.ipynb"
    words = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(executed)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert read_outputs(executed) == read_outputs(NOTEBOOK)
    assert sum(map(bool, read_outputs(NOTEBOOK))) > 8
