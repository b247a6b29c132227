"""README.md: each of its commands runs, in a short form where it trains, and its Python runs as it stands."""
import importlib, re, shlex, zipfile
from pathlib import Path

import pytest

import looped_gpt, stars
import train

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.M | re.S)
PYTHON = [block for language, block in BLOCK.findall(README) if language == "python"]

SMALL = " --n_layer=1 --n_head=1 --max_steps=2 --batch_size=2 --eval_batches=1 --compile=off --device=cpu"
LOOPED = SMALL + " --n_embd=16 --block_size=16"
STARS = SMALL + " --n_embd=16 --mlp_width=16"
FULL = SMALL + " --n_embd=16 --mlp_width=16 --n_kv_head=1 --block_size=16"
SHORT = {  # in the order in which they are run: what is added to each
    "python train.py looped_gpt": LOOPED,
    "python train.py looped_gpt --resume": "",
    "python looped_gpt.py out/looped_gpt-tiny": "",
    "python stars.py notebooks/runs/stars --ask=1750+4733 --loops=1,2,4,64,256": "",
    "python stars.py notebooks/runs/stars-baseline --ask=1750+4733 --loops=1,2,4,64,256": "",
    'python looped_gpt.py notebooks/runs/looped_gpt --prompt="The " --loops=1,4': " --max_new_tokens=20",
    "python fullbandwidth.py notebooks/runs/running-sum": "",
    "python train.py stars": STARS,
    "python train.py stars --preset=baseline": STARS,
    "python stars.py out/stars-addition": " --loops=1,2",
    "python train.py fullbandwidth --preset=running-sum": FULL,
    "python fullbandwidth.py out/fullbandwidth-running-sum": "",
    "python experiments/blind_spot.py table1 --max_steps=300 --eval_interval=20 --seeds=42,101,202": LOOPED + " --only=per_loop+raw",
    "python experiments/stability.py ablation --only=random": STARS + " --digits=2",
    "python train.py looped_gpt --preset=44m --dataset=wikitext-103": LOOPED,
    "torchrun --nproc_per_node=4 train.py looped_gpt --preset=129m --dataset=wikitext-103": LOOPED,  # one process here
    "python train.py fullbandwidth --preset=124m --dataset=PATH": FULL + " --tokenizer=char",
    "python train.py looped_gpt --dataset=PATH --out_dir=out/mine": LOOPED,
    "python train.py stars --help": "",
    "python train.py stars --dataset=reversal --out_dir=out/reversal": STARS,
    "python stars.py out/reversal": " --loops=1,2",
}
MODEL = ("sed s/looped_gpt/mine/g looped_gpt.py > mine.py", "python train.py mine")
ELSEWHERE = {  # the file that runs or tests it
    "git clone ADDRESS loops": ".github/workflows/tests.yml", "cd loops": ".github/workflows/tests.yml",
    "pip install -r requirements.txt": ".ci/run",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": ".github/workflows/tests.yml",
    "python -m pytest -n auto --dist loadfile": ".ci/run",
    "python -m pytest tests/test_stars.py -k jsrr": "tests/test_stars.py",
    "python tests/bench.py": "tests/test_bench.py", "jupyter lab notebooks": "tests/test_notebooks.py",
    "bash tests/gpu.sh": "tests/gpu.sh",  # on a machine with a GPU
}


def commands():
    """The lines of the code blocks, and what stands in the text between backticks and begins with a program's name."""
    plain = [block for language, block in BLOCK.findall(README) if not language]
    lines = [line.split("  #")[0] for block in plain for line in block.splitlines()]
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", README))]
    program = re.compile(r"(python|torchrun|pip|git|cd|bash|jupyter|sed) ")
    return {part.strip() for line in lines for part in line.split(" && ") if program.match(part)}


def test_every_command_is_run_by_a_test():
    assert commands() == {*SHORT, *MODEL, *ELSEWHERE}
    for command, file in ELSEWHERE.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        if file.endswith(".yml") or "ci" in file:
            assert command.startswith(("git", "cd")) or command in text.replace(" -q", ""), command
    assert sum("jsrr" in line for line in (ROOT / "tests/test_stars.py").read_text(encoding="utf-8").splitlines()
               if line.startswith("def test_")) > 0


def test_it_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 150
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://arxiv.org/abs/") or (ROOT / link).exists(), link


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the trained runs, a text, and an archive in WikiText-103's place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    (tmp_path / "PATH").write_text("Some text of one's own.\n" * 200)
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data/wikitext-103.zip", "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103-raw/wiki.{split}.raw", " = Title = \n \n Some text , more text . \n" * 200)
    monkeypatch.setitem(train.DOWNLOADS, "wikitext-103", (train.DOWNLOADS["wikitext-103"][0], None, None))
    monkeypatch.setattr(train, "LOGGERS", [])
    monkeypatch.setattr(stars, "DATA", stars.DATA)  # which the class in README extends
    return tmp_path


def test_the_commands_run(folder, capsys, monkeypatch, few_products):
    monkeypatch.setattr(importlib.import_module("experiments.stability"), "LOOPS", (1, 2, 4))
    exec(PYTHON[0], vars(stars))
    for command, more in SHORT.items():
        program, *argv = shlex.split(command + more)
        if program == "torchrun":
            argv.pop(0)
        module = importlib.import_module(argv.pop(0).removesuffix(".py").replace("/", "."))
        capsys.readouterr()
        try:
            module.main(argv)
        except SystemExit as exit:
            assert exit.code == 0 and "--help" in argv
        assert capsys.readouterr().out, command


def test_a_task_of_ones_own_is_measured_as_sums_are(folder, capsys, pictures):
    exec(PYTHON[0], vars(stars))
    train.main(shlex.split("stars --dataset=reversal --out_dir=out/reversal" + STARS))
    idx, targets = stars.DATA["reversal"](train.Options(batch_size=3), stars.Config()).batch("train", 0)
    for row, wanted in zip(idx.tolist(), targets.tolist()):
        letters = "".join("abcdefgh>§"[i] for i in row)[:8]
        assert "".join("abcdefgh>§"[i] for i in row) == f"{letters}>{letters[::-1]}"
        assert "".join("abcdefgh>§"[i] for i in wanted if i >= 0) == f"{letters[::-1]}§"
    assert [row["val_exact"] for row in train.read_csv(folder / "out/reversal/log.csv") if "val_loss" in row] == [0, 0]
    assert (folder / "out/reversal/curves.png").exists()
    capsys.readouterr()
    stars.main(["out/reversal", "--loops=1,2"])
    assert "exact match" in capsys.readouterr().out
    with pytest.raises(train.UserError, match="--ask is for sums: ReversalData has no parse"):
        stars.main(["out/reversal", "--ask=abc"])


def test_a_model_of_ones_own_trains_and_reports(folder, capsys, monkeypatch):
    source = (ROOT / "looped_gpt.py").read_text(encoding="utf-8")
    (folder / "mine.py").write_text(source.replace("looped_gpt", "mine"), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(train, "MODELS", (*train.MODELS, "mine"))
    train.main(shlex.split("mine" + LOOPED))
    assert capsys.readouterr().out.endswith("python mine.py out/mine-tiny\n")
    importlib.import_module("mine").main(["out/mine-tiny"])
    assert "Lemma 1" in capsys.readouterr().out


def test_a_model_is_used_from_python(folder, capsys):
    names = {}
    exec(PYTHON[1], names)
    loops = [line.split()[0] for line in capsys.readouterr().out.splitlines()[:8]]
    assert loops == [*"12345678"] and train.LOGGERS == [print]
    model, idx = names["model"], names["idx"]
    with pytest.raises(train.UserError, match="65 tokens are more than the model's window of 64, --block_size: cut"):
        model.states(idx[:, :1].repeat(1, 65))
    with pytest.raises(train.UserError, match="17 tokens are more than the model's window of 16"):
        stars.LoopedTransformer(stars.Config()).embed(idx[:, :1].repeat(1, 17))
    assert isinstance(model, looped_gpt.LoopedGPT)
