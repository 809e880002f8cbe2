"""docs/checking.md: its snippets run unchanged in a user's project."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import snippets

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checking.md").read_text()
SNIPPETS = snippets(ROOT / "docs" / "checking.md")
WORKFLOW = (ROOT / "examples" / "ci.yml").read_text()
BIN = Path(sys.executable).parent


def run(command, folder):
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment, check=False
    )


def _words(line):
    """The line without its numbers, which depend on the processor."""
    return re.sub(r"[-+\d.]*\d(e[-+]?\d+)?(\+cpu)?", "#", line)


@pytest.fixture
def project(tmp_path):
    """The files that the page names in the first line of a snippet."""
    for package in ("torch", "onnxruntime", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; pip install '.[torch,onnx]'")
    for snippet in SNIPPETS:
        name = re.match(r"# (\S+\.py)\n", snippet)
        if name:
            path = tmp_path / name.group(1)
            path.parent.mkdir(exist_ok=True)
            path.write_text(snippet)
    return tmp_path


@pytest.mark.slow
def test_the_workflow_runs_and_finds_a_mistake(project):
    """Every command of the workflow except the installation, which the environment of the test replaces."""
    install, test = re.findall(r"- run: (.*)", WORKFLOW)
    assert install.startswith("pip install")
    done = run(["bash", "-c", test], project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'tests="1"' in (project / "parity.xml").read_text()

    path = project / "my_norm.py"
    path.write_text(path.read_text().replace("1e-6", "1e-5"))
    done = run(["bash", "-c", test], project)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "eps is 1e-05, llama has 1e-06" in done.stdout
    assert 'failures="1"' in (project / "parity.xml").read_text()


OTHERS = [snippet for snippet in SNIPPETS if not re.match(r"# \S+\.py\n", snippet)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_the_other_snippets_in_python_run(number, project):
    """Each one alone; what one prints is shown below it, but for numbers."""
    done = run([sys.executable, "-c", OTHERS[number]], project)
    assert done.returncode == 0, done.stdout + done.stderr
    if "print(report.text)" in OTHERS[number]:
        (shown,) = re.findall(r"((?:^    .*\n)+)", PAGE.split("print(report.text)")[1], re.MULTILINE)[:1]
        printed = [_words(line) for line in done.stdout.splitlines()]
        assert [line for line in shown.splitlines() if _words(line[4:]) not in printed] == []
