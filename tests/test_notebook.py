"""examples/share_prompts.ipynb, cell by cell, on a CPU."""

import json
import subprocess
import sys

import pytest

from experiments.config import ROOT


@pytest.mark.slow
def test_the_notebook_trains_and_shares(tmp_path):
    cells = json.loads((ROOT / "examples" / "share_prompts.ipynb").read_text())["cells"]
    programs = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "%pip" in programs[0] and not any(
        "%" in line[:1] for program in programs[1:] for line in program.splitlines()
    )
    end = "assert found['shared prompts']['tokens of whole rows for each one'] > 3; plt.savefig('chart.png')"
    program = "\n".join(["import matplotlib; matplotlib.use('agg')", *programs[1:], end])
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "share_prompts: each prompt is computed once for its 8 completions" in run.stdout
    assert (tmp_path / "chart.png").stat().st_size > 5000
