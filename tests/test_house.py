"""The house: experiments import scripts, scripts import train.py, and each can be deleted with what stands above it."""
import ast, json, os, shutil, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ("looped_gpt", "stars", "fullbandwidth")
SMALL = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--max_steps=1", "--batch_size=2", "--eval_batches=1", "--device=cpu",
         "--compile=off"]
OF_SCRIPT = {"looped_gpt": ["--block_size=8"], "stars": ["--digits=2"], "fullbandwidth": ["--n_kv_head=1", "--block_size=8"]}

ONE_BY_ONE = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
        run(sys.argv[0], run_name="__main__")
    except SystemExit as exit:
        if exit.code:
            raise
    print("--- exit")
"""  # programs, as a shell would run them, in one process: importing torch takes longer than they do


def imports(path):
    """The modules of this repository that a file imports, at any level."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names & {*SCRIPTS, "train", "experiments"}


def test_imports_run_one_way():
    assert imports(ROOT / "train.py") == {"train"}  # itself, where it is run as a program
    for name in SCRIPTS:
        assert imports(ROOT / f"{name}.py") == {"train"}
        assert not imports(ROOT / "tests" / f"test_{name}.py") & ({*SCRIPTS, "experiments"} - {name})


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_and_its_tests_stand_without_the_others_and_without_experiments(name, tmp_path):
    (tmp_path / "tests").mkdir()
    for file in ("train.py", f"{name}.py", "tests/conftest.py", f"tests/test_{name}.py"):
        shutil.copy(ROOT / file, tmp_path / file)

    programs = [["train.py", name, *SMALL, *OF_SCRIPT[name], "--out_dir=run"],
                [f"{name}.py", "run", *["--loops=1,2"] * (name == "stars")],
                ["pytest", "-q", "--collect-only", f"tests/test_{name}.py"]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    result = subprocess.run([sys.executable, "-c", ONE_BY_ONE, json.dumps(programs)], cwd=tmp_path, env=environment,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    _, table, collected = result.stdout.split("--- exit\n")[:3]
    assert len(table.splitlines()) > 2
    assert f"tests/test_{name}.py::" in collected
