"""The driver: what a user types, what a kill leaves behind, what the data are. No network: a server on this machine."""
import base64, contextlib, http.server, inspect, io, json, os, random, re, signal, subprocess, sys, threading
import time, zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fullbandwidth, looped_gpt, stars
import train
from conftest import step_gradients
from train import Options, UserError

ROOT = Path(__file__).parent.parent
TINY = ["--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=4", "--eval_batches=1",
        "--max_steps=8", "--eval_interval=3", "--log_interval=1", "--dropout=0.1", "--device=cpu", "--compile=off"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def command(tmp_path, data_dir):
    """command('--field=value', ...) trains a very small looped_gpt into tmp_path/run, in this process."""
    def run(*arguments, out="run"):
        train.main(["looped_gpt", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path / out}", *arguments])
        return tmp_path / out
    return run


def error_of(capsys, *argv, main=train.main):
    """The one line that a user's mistake is answered with."""
    with pytest.raises(SystemExit) as exit, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *map(str, argv)])
        train.command_line(main)
    assert isinstance(exit.value.code, str) and "\n" not in exit.value.code  # printed to stderr, status 1
    return exit.value.code


def weights(path, name="ckpt.pt"):
    return train.load_checkpoint(path / name, "looped_gpt")["weights"]


def assert_same_weights(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def losses(path):
    return [(r["step"], r.get("train_loss", 0), r.get("val_loss", 0)) for r in train.read_csv(path / "log.csv")]


# The command line

def test_help_lists_every_field_with_its_meaning(capsys):
    for argv, classes in (([], [Options]), (["looped_gpt"], [Options, looped_gpt.Config])):
        with contextlib.suppress(SystemExit):
            train.main([*argv, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        for cls in classes:
            for name in cls.__dataclass_fields__:
                assert re.search(rf"--{name}[ ,].{{0,80}}\w+.*?\[", text), name


def test_help_begins_with_what_people_change_and_says_what_will_run(capsys):
    for module in (looped_gpt, stars, fullbandwidth):
        with pytest.raises(SystemExit):
            train.main([module.__name__, "--help"])
        text = capsys.readouterr().out
        first, own, _ = re.split(r"\n(?:%s.Config|train.Options):\n" % module.__name__, text)
        shown = re.findall(r"^  --(\w+)", first, re.M)
        assert shown == ["preset", "dataset", "out_dir", "max_steps", "batch_size", "lr"]
        preset, fields = next(iter(module.PRESETS.items()))
        values = vars(module.Config()) | vars(Options()) | fields | {"out_dir": f"out/{module.__name__}-{preset}"}
        for name, value in values.items():
            assert re.search(rf"--{name}[ ,][^\[]*\[{re.escape(str(value))}\]", text), name
        assert "--n_embd" in own


def test_a_flag_takes_a_value_as_every_other_field_does():
    for words, value in ((["--tied"], True), (["--tied=True"], True), (["--tied=true"], True), (["--no-tied"], False),
                         (["--tied=False"], False), (["--tied=false"], False)):
        parser = train.training_parser("", fullbandwidth)
        assert parser.parse(words) == {"tied": value, "preset": None}


@pytest.mark.parametrize("argv, message", [
    (["looped_gtp"], "did you mean looped_gpt?"),
    (["looped_gpt", "--preset=44"], "invalid choice: '44' (choose from"),
    (["looped_gpt", "--sweep=table1"], "--sweep: no such field; type python experiments/NAME.py SWEEP"),
    (["looped_gpt", "--max_step=3"], "did you mean --max_steps"),
    (["looped_gpt", "--learning_rate=3"], "--learning_rate: no such field; did you mean --lr"),
    (["looped_gpt", "--hidden-size=3"], "did you mean --n_embd"),
    (["looped_gpt", "--resume=maybe"], "--resume/--no-resume: ignored explicit argument 'maybe'"),
    (["looped_gpt", "--readout=rms"], "choose from"),
    (["looped_gpt", "--lr=fast"], "--lr: invalid float value"),
    (["looped_gpt", "--num_loops=0"], "--num_loops=0: expected a whole number from 1 to 10,000"),
    (["looped_gpt", "--n_embd=130"], "not divisible by --n_head=4"),
    (["looped_gpt", "--batch_size=0"], "--batch_size=0"),
    (["looped_gpt", "--lr=nan"], "--lr=nan"),
    (["looped_gpt", "--max_steps=1", "--seeds=1,2"], "--seeds: no such field; did you mean --seed"),
    (["looped_gpt", "--max_steps=1", "--resume"], "run holds no run to resume"),
    (["looped_gpt", "--dataset=shakespear"], "did you mean shakespeare?"),
    (["looped_gpt", "--device=tpu"], "--device=tpu cannot be used here"),
    (["looped_gpt", "--seed=-1"], "--seed=-1"),
    (["looped_gpt", "--beta2=1"], "--beta2=1.0: expected a number from 0 to 0.9999"),
    (["looped_gpt", "--preset"], "argument --preset: expected one argument"),
    (["looped_gpt", "--resume", "--overwrite"], "choose one"),
    (["looped_gpt", "--max_steps=0", "--batch_size=40000"], "has not one step"),
    (["looped_gpt", "--out_dir=/dev/null/run"], "/dev/null/run"),
])
def test_a_mistake_is_answered_by_one_line_that_names_the_way_out(capsys, argv, message, data_dir, tmp_path):
    assert message in error_of(capsys, argv[0], f"--data_dir={data_dir}", f"--out_dir={tmp_path}/run", *argv[1:])


@pytest.mark.parametrize("content, message", [
    (b"", "0 tokens"), (b"too short", "a window takes 17"), (b"\xff\xfe\x00abc" * 99, "is not UTF-8 text"),
    (None, "no such data set or file")])
def test_unusable_text_files_are_named(capsys, tmp_path, content, message):
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    error = error_of(capsys, "looped_gpt", *TINY, f"--dataset={path}", f"--data_dir={tmp_path}", f"--out_dir={tmp_path}/run")
    assert message in error and "some.txt" in error


def test_too_large_a_batch_names_the_knob(capsys, tmp_path, data_dir):
    resource = pytest.importorskip("resource")
    argv = ["looped_gpt", "--batch_size=1000000", "--eval_batches=1", "--compile=off", "--device=cpu",
            f"--data_dir={data_dir}", f"--out_dir={tmp_path}/run"]
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = 16 << 30  # it would need 33 GB
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        with contextlib.suppress(RuntimeError):
            torch.empty(limit + 1, dtype=torch.uint8)
            pytest.skip("this system does not limit memory")
        assert "halve --batch_size and double --grad_accum" in error_of(capsys, *argv)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# The run directory

def test_a_run_leaves_its_files_and_a_log_with_the_promised_columns(command, pictures):
    out = command("--norm_penalty=0.01")
    assert {p.name for p in out.iterdir()} == {"config.json", "log.csv", "ckpt.pt", "best.pt", "curves.png", "run.lock"}
    assert (out / "curves.png").stat().st_size > 10_000
    rows = train.read_csv(out / "log.csv")
    assert [r["step"] for r in rows] == list(range(9))
    assert list(rows[3])[:6] == ["step", "tokens", "train_loss", "val_loss", "lr", "tokens_per_sec"]
    assert all("mfu" not in row for row in rows)  # on a CPU, which others use too, it would say nothing
    assert {"final_norm", "val_ce_4"} <= rows[3].keys()
    assert rows[-1]["tokens"] == 8 * 4 * 16
    best = train.load_checkpoint(out / "best.pt", "looped_gpt")
    assert best["best"] == min(r["val_loss"] for r in rows if "val_loss" in r)
    assert json.loads((out / "config.json").read_text())["config"]["norm_penalty"] == 0.01


def test_a_report_finds_the_loss_that_training_ended_with(tmp_path, data_dir, capsys):
    """The same windows, also in micro-batches, and the same precision."""
    for name, fields, column in (("looped_gpt", [], "val_ce_4"), ("fullbandwidth", ["--n_kv_head=1"], "val_ce_2")):
        out = tmp_path / name
        train.main([name, *[f for f in TINY if name == "looped_gpt" or "dropout" not in f], *fields, "--eval_batches=3",
                    "--grad_accum=2", "--dtype=bfloat16", f"--data_dir={data_dir}", f"--out_dir={out}"])
        logged = train.read_csv(out / "log.csv")[-1][column]
        capsys.readouterr()
        {"looped_gpt": looped_gpt, "fullbandwidth": fullbandwidth}[name].main([str(out), f"--data_dir={data_dir}"])
        report = capsys.readouterr()
        assert "6 of the 6 batches of an evaluation" in report.err
        row, = (line.split() for line in report.out.splitlines() if line.split()[0] == column[-1])
        assert float(row[1]) == pytest.approx(logged, rel=1e-3)  # four digits are printed


def test_a_long_wait_says_what_it_is_for(capsys, monkeypatch):
    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda seconds, *arguments: timer(seconds / 100, *arguments))
    for seconds, said in ((0, ""), (0.5, "evaluating ..\n")):
        with train.waiting_for("evaluating"):
            time.sleep(seconds)
        assert capsys.readouterr().err == said


def test_every_logger_gets_every_row(command, monkeypatch):
    rows = []
    monkeypatch.setattr(train, "LOGGERS", [rows.append])
    out = command()
    assert [row["step"] for row in rows] == list(range(9))
    assert [row.get("val_loss") for row in rows] == [row.get("val_loss") for row in train.read_csv(out / "log.csv")]


def test_a_directory_that_holds_a_run_is_not_overwritten_by_accident(command, capsys, tmp_path, data_dir):
    out = command()
    before = weights(out)
    again = ["looped_gpt", *TINY, f"--data_dir={data_dir}", f"--out_dir={out}"]
    assert "already holds a run" in error_of(capsys, *again)
    assert "n_embd: 16 there, 32 here" in error_of(capsys, *again, "--n_embd=32", "--resume")
    assert "holds a run of looped_gpt-tiny, not of looped_gpt-44m" in error_of(capsys, *again, "--preset=44m", "--resume")
    assert_same_weights(before, weights(out))
    command("--overwrite", "--seed=1")
    assert not torch.equal(before["wte.weight"], weights(out)["wte.weight"])


# Checkpoints

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_is_bit_for_bit_and_needs_only_the_directory(command, tmp_path, data_dir, optimizer):
    whole = command(f"--optimizer={optimizer}", "--schedule=cosine", "--grad_accum=2", out="whole")
    interrupt_after(5, command, f"--optimizer={optimizer}", "--schedule=cosine", "--grad_accum=2", out="stopped")
    assert train.load_checkpoint(tmp_path / "stopped", "looped_gpt")["step"] == 5
    train.main(["looped_gpt", f"--out_dir={tmp_path / 'stopped'}", f"--data_dir={data_dir}", "--resume"])
    assert_same_weights(weights(whole), weights(tmp_path / "stopped"))
    assert losses(whole) == losses(tmp_path / "stopped")


def test_a_run_killed_before_its_first_checkpoint_starts_again(command, tmp_path, data_dir):
    whole = command(out="whole")
    before = weights(whole)
    for name in ("ckpt.pt", "best.pt", "log.csv"):
        (whole / name).unlink()
    train.main(["looped_gpt", f"--out_dir={whole}", f"--data_dir={data_dir}", "--resume"])
    assert_same_weights(before, weights(whole))


def test_a_damaged_or_lost_config_is_taken_from_the_checkpoint_or_is_one_line(command, capsys, tmp_path, data_dir):
    whole, out = command(out="whole"), command("--max_steps=4")
    before = (out / "config.json").read_text()
    for text in (None, "", '{"model": "looped_gpt", "pre', "[]", "{}"):
        (out / "config.json").unlink() if text is None else (out / "config.json").write_text(text)
        assert "already holds a run" in error_of(capsys, "looped_gpt", f"--out_dir={out}")
        train.main(["looped_gpt", f"--out_dir={out}", f"--data_dir={data_dir}", "--resume"])  # it is finished
    train.main(["looped_gpt", f"--out_dir={out}", f"--data_dir={data_dir}", "--resume", "--max_steps=8"])
    assert_same_weights(weights(whole), weights(out))
    assert json.loads((out / "config.json").read_text())["config"] == json.loads(before)["config"]
    (out / "ckpt.pt").unlink()
    (out / "config.json").write_text("{}")
    error = error_of(capsys, "looped_gpt", f"--out_dir={out}", "--resume")
    assert f"{out}/config.json is damaged, and there is no checkpoint to take its place: add --overwrite" in error
    command("--overwrite", "--max_steps=1")
    assert json.loads((out / "config.json").read_text())["model"] == "looped_gpt"


def test_resuming_takes_what_the_command_line_says_now(command):
    interrupt_after(2, command, out="run")
    out = command("--resume", "--lr=0.5", "--max_steps=4")
    rows = train.read_csv(out / "log.csv")
    assert [r.get("lr") for r in rows] == [None, 0.003 / 20, 0.003 * 2 / 20, 0.5 * 3 / 20, 0.5 * 4 / 20]
    assert json.loads((out / "config.json").read_text())["options"]["lr"] == 0.5


def test_a_finished_run_whose_log_is_gone_is_evaluated_again(command):
    """Every trainer ends with a line about its last evaluation, and every sweep's report reads the last row."""
    out = command()
    last, after = losses(out)[-1], weights(out)
    (out / "log.csv").unlink()
    command("--resume")
    assert losses(out) == [(8, 0, last[2])]
    assert_same_weights(weights(out), after)


def interrupt_after(step, command, *arguments, out):
    """Press Ctrl-C while the given step runs."""
    with pytest.MonkeyPatch.context() as patch:
        optimizer_step = train.Run.optimizer_step
        patch.setattr(train.Run, "optimizer_step", lambda run, norm: (
            run.step == step and signal.raise_signal(signal.SIGINT), optimizer_step(run, norm)))
        with pytest.raises(SystemExit) as exit:
            command(*arguments, out=out)
        assert exit.value.code == 130


def test_ctrl_c_saves_and_says_how_to_go_on(command, capsys, tmp_path, data_dir):
    interrupt_after(2, command, out="my run")
    assert f"'--out_dir={tmp_path}/my run' --data_dir={data_dir} --resume" in capsys.readouterr().out


def test_killed_anywhere_a_run_resumes_to_the_same_weights(tmp_path, data_dir):
    """SIGKILL at random moments (KILLS of them, 2 by default), saving included; run by hand with KILLS=20."""
    argv = ["looped_gpt", *TINY, "--max_steps=60", "--eval_interval=1", f"--data_dir={data_dir}"]
    train.main([*argv, f"--out_dir={tmp_path}/whole"])
    draw, kills, steps = random.Random(0), int(os.environ.get("KILLS", 2)), []
    run = [*argv, f"--out_dir={tmp_path}/killed"]
    for kill in range(kills):
        process = subprocess.Popen([sys.executable, "train.py", *run] + ["--resume"] * (kill > 0), cwd=ROOT, text=True,
                                   stdout=subprocess.PIPE)
        for line in process.stdout:  # let it take a few steps, then kill it at a random moment of the next one
            if line.startswith("step") and draw.random() < 0.5:
                break
        time.sleep(draw.random() * 0.05)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL  # so it was running
        checkpoint = tmp_path / "killed" / "ckpt.pt"
        steps.append(train.load_checkpoint(checkpoint, "looped_gpt")["step"] if checkpoint.exists() else 0)
    train.main([*run, "--resume"])
    print("checkpoints after each kill:", steps)
    assert steps[-1] < 60 and steps == sorted(steps)
    assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")


def test_damaged_foreign_and_pickled_checkpoints_are_refused(command, capsys, tmp_path, data_dir):
    out = command()
    good = (out / "ckpt.pt").read_bytes()

    def refused(write):
        write(out / "ckpt.pt")
        return error_of(capsys, out, main=looped_gpt.main)
    assert "is damaged" in refused(lambda p: p.write_bytes(good[:len(good) // 2]))
    assert "is damaged" in refused(lambda p: p.write_bytes(b"not a checkpoint"))
    assert "is damaged" in refused(lambda p: torch.save({"model": "looped_gpt", "x": Path("/")}, p))
    assert "is a checkpoint of stars" in refused(lambda p: torch.save({"model": "stars"}, p))
    assert "does not fit looped_gpt.py" in refused(lambda p: torch.save({"model": "looped_gpt"}, p))
    assert "does not fit looped_gpt.py" in refused(
        lambda p: torch.save(torch.load(io.BytesIO(good), weights_only=True) | {"weights": {}}, p))
    (out / "ckpt.pt").write_bytes((out / "best.pt").read_bytes())  # has no optimiser
    before = (out / "config.json").read_text()
    assert "does not fit" in error_of(capsys, "looped_gpt", f"--out_dir={out}", f"--data_dir={data_dir}", "--resume", "--max_steps=9")
    (out / "ckpt.pt").write_bytes(good)
    error = error_of(capsys, "looped_gpt", f"--out_dir={out}", f"--data_dir={data_dir}", "--resume", "--optimizer=muon")
    assert "optimizer: adamw there, muon here" in error
    error = error_of(capsys, "looped_gpt", f"--out_dir={out}", f"--data_dir={data_dir}", "--resume", "--max_steps=5")
    assert "step 8 there, --max_steps=5 here" in error
    train.main(["looped_gpt", f"--out_dir={out}", f"--data_dir={data_dir}", "--resume", "--lr=1"])  # nothing is left to train at that rate
    assert (out / "config.json").read_text() == before
    assert "no such checkpoint" in error_of(capsys, tmp_path / "nowhere", main=looped_gpt.main)
    (out / "ckpt.pt").unlink()
    assert error_of(capsys, out, main=looped_gpt.main).endswith(f"python train.py looped_gpt --out_dir={out} --resume")


def test_a_full_disk_keeps_the_last_good_checkpoint(command, capsys, tmp_path, data_dir, monkeypatch):
    save, saved = torch.save, []

    def full(state, file):
        saved.append(file)
        if len(saved) > 3:
            file.write(b"half a check")
            raise OSError(28, "No space left on device")
        save(state, file)
    monkeypatch.setattr(torch, "save", full)
    error = error_of(capsys, "looped_gpt", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path}/run", "--eval_interval=1")
    assert "No space left on device" in error
    assert train.load_checkpoint(tmp_path / "run", "looped_gpt")["step"] == 1
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(command, capsys, tmp_path, data_dir, monkeypatch):
    loss = looped_gpt.LoopedGPT.loss
    calls = []

    def nan_in_step_5(model, *arguments, **keywords):
        calls.append(model.training)
        value, metrics = loss(model, *arguments, **keywords)
        return value * (float("nan") if calls.count(True) == 5 and model.training else 1.0), metrics
    monkeypatch.setattr(looped_gpt.LoopedGPT, "loss", nan_in_step_5)
    error = error_of(capsys, "looped_gpt", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path}/run", "--log_interval=7")
    assert "not finite at step 5" in error
    assert train.load_checkpoint(tmp_path / "run", "looped_gpt")["step"] == 3
    assert all(w.isfinite().all() for w in weights(tmp_path / "run").values())


def test_a_compiled_run_has_the_eager_losses_and_keys(command):
    if not any(os.access(Path(d) / "g++", os.X_OK) for d in os.get_exec_path()):
        pytest.skip("torch.compile needs a C++ compiler")
    torch._dynamo.reset()
    eager = command("--dropout=0", "--dtype=float32", out="eager")
    compiled = command("--dropout=0", "--dtype=float32", "--compile=on", out="compiled")
    assert weights(eager).keys() == weights(compiled).keys()
    for name, w in weights(eager).items():  # float32 sums in another order, over 8 steps
        torch.testing.assert_close(w, weights(compiled)[name], rtol=1e-3, atol=1e-4)


def test_the_cross_entropy_refuses_to_be_differentiated_twice():
    E, targets, weights = torch.randn(9, 5, requires_grad=True), torch.randint(9, (6,)), torch.ones(6)
    for loss_of in (lambda ce, h: ce, lambda ce, h: ce ** 2, lambda ce, h: ce + h.square().sum()):
        h = torch.randn(6, 5, requires_grad=True)
        loss = loss_of(train.cross_entropy(h, E, targets, weights)[0], h)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, h, create_graph=True)


def test_the_peak_is_that_of_random_matrices_and_leaves_the_runs_random_numbers_alone():
    before, factors = torch.get_rng_state(), []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mm.default:
                factors.extend(args)
                return args[0]
            return function(*args, **kwargs or {})
    with Products():
        train.matmul_peak(torch.device("cpu"), torch.float32)
    assert factors and all(abs(x[:100].std() - 1) < 0.01 for x in factors)  # of 200,000 numbers: to 0.002
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_that_nobody_counts_ends_no_run(monkeypatch):
    pytest.importorskip("resource")
    assert 1e7 < train.peak_memory(torch.device("cpu")) < 1e12
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows, importing it fails
    assert np.isnan(train.peak_memory(torch.device("cpu")))


def test_two_processes_train_as_one(tmp_path, data_dir):
    """Random loop counts too: every process draws the same. JSRR's directions, jitter and dropout are each process's own."""
    argvs = [[name, *TINY, *fields, "--dropout=0", "--dtype=float32", f"--data_dir={data_dir}"]
             for name, fields in (("looped_gpt", []), ("stars", ["--jsrr_lambda=0", "--mlp_width=16"]))]
    program = tmp_path / "both.py"
    program.write_text("import json, sys, train\nfor argv in json.loads(sys.argv[1]):\n    train.main(argv)\n")
    both = json.dumps([[*argv, f"--out_dir={tmp_path}/{argv[0]} in two"] for argv in argvs])
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29617", program, both],
                   env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    for argv in argvs:
        train.main([*argv, f"--out_dir={tmp_path}/{argv[0]}"])
        for a, b in zip(losses(tmp_path / argv[0]), losses(tmp_path / f"{argv[0]} in two"), strict=True):
            assert a == pytest.approx(b, rel=1e-5)  # gradients are summed in another order
        assert train.load_checkpoint(tmp_path / f"{argv[0]} in two", argv[0])["tokens"] == 8 * 4 * 16


# The script's own command line

def test_generating_from_a_run(command, capsys):
    out = command()
    capsys.readouterr()
    looped_gpt.main([str(out), "--prompt=The ", "--loops=2", "--max_new_tokens=30"])
    first = capsys.readouterr().out
    assert first.startswith("The ") and len(first) == 4 + 30 + 1
    looped_gpt.main([str(out / "best.pt"), "--prompt=The ", "--loops=2", "--max_new_tokens=30"])
    assert first == capsys.readouterr().out  # best is last here, and the seed is fixed
    looped_gpt.main([str(out), "--prompt=The ", "--loops=1,2", "--max_new_tokens=30"])
    one, two = capsys.readouterr().out.split("--- exit after loop 2\n")
    assert one.startswith("--- exit after loop 1\nThe ") and two == first
    assert "required: RUN" in error_of(capsys, "--prompt=The ", main=looped_gpt.main)
    for argument, message in (("--prompt=\u2603", "not in the vocabulary: '\u2603'"), ("--prompt=", "--prompt is empty"),
                              ("--loops=0", "--loops=0: expected a whole number from 1 to 10,000"),
                              ("--loop=2", "did you mean --loops")):
        assert message in error_of(capsys, out, "--prompt=The ", argument, main=looped_gpt.main)
    for argument in ("--loops=2", "--temperature=0"):
        assert "goes with --prompt" in error_of(capsys, out, argument, main=looped_gpt.main)


# Optimiser and schedule

def test_schedules_by_hand():
    at = lambda step, **fields: train.schedule(Options(**fields), step, 100)
    assert [at(s, warmup_steps=4) for s in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1, 1, 1]
    assert [round(at(s, schedule="cosine"), 3) for s in (1, 51, 100)] == [1, 0.5, 0]


def test_wsd_decays_in_a_share_of_all_steps_however_long_the_warm_up():
    at = lambda step, max_steps, **fields: train.schedule(Options(schedule="wsd", **fields), step, max_steps)
    for warmup in (0, 1, 50):  # of 100 steps the last 4 decay, by a quarter of the peak each: the next one would be at 0
        fields = dict(warmup_steps=warmup, decay_share=0.04)
        assert [at(s, 100, **fields) for s in (51, 96, 97, 98, 99, 100)] == pytest.approx([1, 1, 1, 0.75, 0.5, 0.25])
    assert [at(s, 3, decay_share=0) for s in (1, 2, 3)] == [1, 1, 1]
    fields, = train.split_fields(stars.PRESETS["addition"], Options)
    o, warmup, decaying = Options(**fields), 20, 720
    rates = [train.schedule(o, s, o.max_steps) for s in range(warmup + 1, o.max_steps + 1)]
    stable = o.max_steps - warmup - decaying
    assert rates == pytest.approx([1] * stable + [k / decaying for k in range(decaying, 0, -1)])


def test_muon_takes_the_blocks_matrices_and_nothing_else():
    model = looped_gpt.LoopedGPT(looped_gpt.Config(vocab_size=9))
    adamw, muon = train.build_optimizers(model, Options(optimizer="muon"))
    names = {id(p): name for name, p in model.named_parameters()}
    of = lambda optimizer: {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    assert of(muon) == {n for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
    assert of(adamw) | of(muon) == set(names.values()) and not of(adamw) & of(muon)
    assert all(p.ndim < 2 for g in adamw.param_groups if g["weight_decay"] == 0 for p in g["params"])


# Text, tokenizers, windows

def options(tmp_path, **fields):
    return Options(**dict(data_dir=str(tmp_path / "data"), batch_size=4, eval_batches=2) | fields)


def config(block_size=16, vocab_size=50):
    return looped_gpt.Config(block_size=block_size, vocab_size=vocab_size)


def test_python_docs_hold_out_every_tenth_topic(tmp_path):
    from pydoc_data.topics import topics
    data = train.TextData(options(tmp_path, dataset="python-docs"), config())
    text = {split: data.tokenizer.decode(tokens) for split, tokens in data.tokens.items()}
    for i, name in enumerate(sorted(topics)):
        assert topics[name].strip() in text["val" if i % 10 == 9 else "train"]
    assert len(text["train"]) + len(text["val"]) == sum(len(t.strip()) + 2 for t in topics.values())


def test_a_text_file_is_cut_at_a_line_or_anywhere_where_there_are_none(tmp_path):
    path = tmp_path / "text"
    for text in ("wörter über\r\n" * 400, "ö" * 4001, "ö" * 4001 + "\n"):
        path.write_text(text, encoding="utf-8", newline="")
        parts = train.read_splits(str(path), path)
        assert parts["train"] + parts["val"] == text and 0.09 < len(parts["val"]) / len(text) < 0.11
        assert parts["train"].endswith("\n") == (text[0] == "w")


def test_the_regex_tokenizer_by_hand(tmp_path):
    tokenizer = train.fit_tokenizer("regex", {"train": "b a a, b\n\nb: é é c\n"}, 50, tmp_path)
    # counts: ' ' 5, b 3, a 2, é 2; seen once and so unknown: ',' ':' c and the runs '\n\n', '\n'
    assert tokenizer.vocab == ["<pad>", "<bos>", "<eos>", "<unk>", " ", "b", "a", "é"]
    assert tokenizer.encode("a b, é") == [6, 4, 5, 3, 4, 7]
    assert tokenizer.decode([6, 4, 5, 3]) == "a b<unk>" and tokenizer.missing("a c") == ["c"]


def test_blocks_cut_no_token(tmp_path, monkeypatch):
    draw = random.Random(0)
    text = "".join(draw.choice(["word", " ", "\n", "\n\n", "  ", "é", "\u3000", "\r\n", "!?", "x1"]) for _ in range(30_000))
    assert "".join(train.blocks(text, size=100)) == text
    write_gpt2_ranks(tmp_path, monkeypatch)
    for name in ("char", "gpt2", "regex"):
        tokenizer = train.fit_tokenizer(name, {"train": text}, 50, tmp_path)
        pieces = [tokenizer.encode(block) for block in train.blocks(text, size=100)]
        assert len(pieces) > 20 and sum(pieces, []) == tokenizer.encode(text)


def test_a_cache_of_another_text_or_half_built_is_built_again(tmp_path):
    path = tmp_path / "text"
    path.write_text("some text, more text\n" * 50)
    o = options(tmp_path, dataset=str(path))
    expected = train.TextData(o, config()).tokens["train"].tolist()
    cache, = (p for p in (tmp_path / "data").iterdir())
    built = (cache / "train.bin").stat().st_mtime_ns
    assert train.TextData(o, config()).tokens["train"].tolist() == expected
    assert (cache / "train.bin").stat().st_mtime_ns == built  # read, not built again
    (cache / "tokenizer.json").unlink()
    (cache / "train.bin").write_bytes(b"")  # as a kill before the end leaves it
    assert train.TextData(o, config()).tokens["train"].tolist() == expected
    path.write_text("other text entirely\n" * 60)
    data = train.TextData(o, config())
    assert data.tokenizer.decode(data.tokens["train"]).startswith("other text")


def test_an_epoch_visits_every_window_once_and_each_epoch_in_another_order(tmp_path):
    path = tmp_path / "text"
    path.write_text("".join(chr(97 + i % 26) for i in range(1200)))
    o = options(tmp_path, dataset=str(path), stride=8)
    data = train.TextData(o, config())
    n = data.steps_per_epoch
    assert n == ((1080 - 17) // 8 + 1) // 4
    epochs = [np.concatenate([data.starts("train", e * n + i) for i in range(n)]) for e in range(2)]
    for starts in epochs:
        assert len(set(starts)) == 4 * n and not (starts % 8).any() and starts.max() <= 1080 - 17
    assert (epochs[0] != epochs[1]).any()
    idx, targets = data.batch("train", 3)
    assert idx.shape == (4, 16) and torch.equal(idx[:, 1:], targets[:, :-1])
    shares = [train.own_part(SimpleNamespace(rank=rank, world=2, device=torch.device("cpu")), (idx, targets))
              for rank in range(2)]  # of two processes
    for whole, *halves in zip((idx, targets), *shares):
        assert sorted(torch.cat(halves).tolist()) == sorted(whole.tolist())


SPLITS = ((8, 1, 1), (4, 2, 1), (1, 8, 1), (8, 1, 2), (4, 2, 2))  # batch_size, grad_accum, processes
TINY_MODEL = dict(n_layer=1, n_head=2, n_embd=8)
FULL = dict(**TINY_MODEL, n_kv_head=2, mlp_width=16, jitter=0.0, prefix_mix=False)  # what is drawn depends on the split
SPLIT_CASES = {  # (script, Config, dataset, arguments of the loss)
    "text": (looped_gpt, dict(**TINY_MODEL, norm_penalty=0.1), "text", {}),
    "text, windows in turn": (looped_gpt, dict(**TINY_MODEL, supervision="terminal"), "text stride", {}),
    "text, exit gate": (looped_gpt, dict(**TINY_MODEL, supervision="adaptive"), "text", {}),
    "text, three passes": (fullbandwidth, FULL, "text", dict(num_passes=3)),
    "addition": (stars, dict(**TINY_MODEL, mlp_width=16, digits=2, jsrr_rows=1.0, l2_penalty=0.1), "addition",
                 dict(num_loops=3)),
    "running-sum": (fullbandwidth, FULL, "running-sum", dict(num_passes=2)),
}


@pytest.mark.parametrize("case", SPLIT_CASES)
def test_a_step_is_the_same_however_it_is_split(case, tmp_path, monkeypatch):
    """The rows, their loss, the gradients and the validation rows, of micro-batches and of processes; a mean over all the
    step's targets, as one cross-entropy gives it. Only JSRR's v is replaced, by one that depends on the row alone."""
    module, fields, dataset, arguments = SPLIT_CASES[case]
    monkeypatch.setattr(stars, "random_directions", lambda h: stars.normalize(h.detach().cos()))
    text = tmp_path / "text"
    text.write_text("".join(random.Random(0).choices("abcdefg \n", k=2000)))
    results, rows = {}, {}
    for batch_size, grad_accum, world in SPLITS:
        o = options(tmp_path, dataset=str(text) if "text" in dataset else dataset, batch_size=batch_size,
                    grad_accum=grad_accum, stride=8 * ("stride" in dataset))
        data = train.load_data(o, module.Config(**dict(block_size=16) | fields))
        torch.manual_seed(0)
        config = module.Config(**dict(block_size=16) | fields | dict(vocab_size=data.vocab_size))
        config.block_size = data.T
        model = next(getattr(module, name) for name in ("LoopedGPT", "LoopedTransformer", "FullBandwidthGPT")
                     if hasattr(module, name))(config).double()
        results[batch_size, grad_accum, world] = step_gradients(model, data, world, **arguments)
        rows[batch_size, grad_accum, world] = torch.cat([data.batch(split, i)[j] for split, i in (
            ("train", 0), ("train", 77), ("val", 0), ("val", 1)) for j in range(2)]), data.steps_per_epoch
    model.zero_grad()
    model.loss(*data.batch("train", 3), **arguments)[0].backward()  # all at once
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for split in SPLITS:
        assert torch.equal(rows[split][0], rows[8, 1, 1][0]) and rows[split][1] == rows[8, 1, 1][1], split
        assert (results[split] - whole).norm() < 1e-12 * whole.norm(), split


@pytest.mark.parametrize("dataset", ["text", "addition", "running-sum"])
def test_no_training_batch_of_any_seed_is_a_validation_batch(dataset, tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(random.Random(0).choices("abcdefg \n", k=2000)))
    module = stars if dataset == "addition" else fullbandwidth
    draws = {"train": set(), "val": set()}
    for seed in range(50):
        o = options(tmp_path, dataset=str(text) if dataset == "text" else dataset, seed=seed, batch_size=2)
        data = train.load_data(o, module.Config(block_size=90))
        for i in (0, 1, 2, seed):
            draws["train"].add(data.batch("train", i)[0].numpy().tobytes())
            draws["val"].add(data.batch("val", i)[0].numpy().tobytes())
    assert len(draws["train"]) > 140 and not draws["train"] & draws["val"]


def write_gpt2_ranks(directory, monkeypatch):
    """A file of GPT-2's format with every byte and three merges."""
    ranks = [bytes([i]) for i in range(256)] + [b"th", b"the", b"\n\n"]
    lines = (f"{base64.b64encode(r).decode()} {i}\n" for i, r in enumerate(ranks))
    (directory / "gpt2.tiktoken").write_text("".join(lines))
    monkeypatch.setattr(train, "GPT2_RANKS", ("http://127.0.0.1:9/ranks",))  # of no known checksum


def test_gpt2_ranks_are_checked_and_their_absence_is_explained(tmp_path, monkeypatch):
    import tiktoken_ext.openai_public
    url, _, sha256 = train.GPT2_RANKS
    assert all(part in inspect.getsource(tiktoken_ext.openai_public) for part in (url, sha256))
    (tmp_path / "gpt2.tiktoken").write_text("dGhl 0\n")
    with pytest.raises(UserError, match="gpt2.tiktoken should have 835,554 bytes and has 7"):
        train.GPT2Tokenizer(tmp_path)
    write_gpt2_ranks(tmp_path, monkeypatch)
    tokenizer = train.GPT2Tokenizer(tmp_path)
    assert tokenizer.encode("the é") == [257, 32, 0xC3, 0xA9]
    assert tokenizer.decode(tokenizer.encode("the é\n")) == "the é\n"
    assert tokenizer.vocab_size == tokenizer.bpe.n_vocab
    with pytest.raises(UserError, match="Put http://127.0.0.1:9/ranks at .*empty/gpt2.tiktoken by hand, .*--tokenizer=char"):
        train.GPT2Tokenizer(tmp_path / "empty")


# Downloads

class Server(http.server.BaseHTTPRequestHandler):
    files, cut = {}, 0

    def do_GET(self):
        content = self.files.get(self.path)
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write((content or b"")[:len(content or b"") - Server.cut])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_downloads_are_whole_or_not_there(server, tmp_path, monkeypatch):
    import hashlib
    Server.files["/text"] = b"abc" * 1000
    sha = hashlib.sha256(b"abc" * 1000).hexdigest()
    path = tmp_path / "text.txt"
    for check, message in (((2999,), "should have 2,999 bytes"), ((3000, "0" * 64), "another SHA-256")):
        with pytest.raises(UserError, match=message):
            train.download(path, f"{server}/text", *check)
    monkeypatch.setattr(Server, "cut", 500)
    with pytest.raises(UserError, match="ended after 2,500 of 3,000 bytes"):
        train.download(path, f"{server}/text")
    monkeypatch.setattr(Server, "cut", 0)
    assert [p.name for p in tmp_path.iterdir()] == ["data.lock"]
    train.download(path, f"{server}/text", 3000, sha)
    assert path.read_bytes() == b"abc" * 1000
    with pytest.raises(UserError, match="another SHA-256 .* delete it"):
        train.download(path, f"{server}/text", 3000, "0" * 64)
    path.write_bytes(b"abc")
    with pytest.raises(UserError, match="should have 3,000 bytes and has 3: delete it"):
        train.download(path, f"{server}/text", 3000, sha)


def test_without_a_network_one_sentence_names_the_address_the_file_and_the_way_out(server, tmp_path):
    for url in (f"{server}/missing", "http://127.0.0.1:9/closed"):
        with pytest.raises(UserError) as error:
            train.download(tmp_path / "file", url)
        for part in (url, str(tmp_path / "file"), "--dataset=python-docs"):
            assert part in str(error.value)


def test_wikitext_comes_from_its_archive_split_by_split(server, tmp_path, monkeypatch):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as z:
        for member in ("train", "valid", "test"):
            z.writestr(f"wikitext-2-raw/wiki.{member}.raw", f" \n = {member} = \n \n Some text . \n" * 40)
        z.writestr("../../outside", "never written")
    Server.files["/w.zip"] = content.getvalue()
    monkeypatch.setitem(train.DOWNLOADS, "wikitext-2", (f"{server}/w.zip", None, None))
    data = train.TextData(options(tmp_path, dataset="wikitext-2", tokenizer="regex"), config())
    assert data.tokens.keys() == {"train", "val", "test"}
    text = data.tokenizer.decode(data.tokens["train"])
    assert text.startswith("= train =\n\nSome text .\n\n= train =") and text.count("Some") == 40
    assert not (tmp_path.parent / "outside").exists()
    (tmp_path / "data" / "wikitext-2.zip").write_bytes(b"PK not a zip")
    with pytest.raises(UserError, match="not the WikiText archive"):
        train.TextData(options(tmp_path, dataset="wikitext-2", tokenizer="regex"), config())


def test_an_optimizer_without_moments_is_resumed_and_one_that_lost_them_is_not():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    for optimizer, is_refused in ((torch.optim.SGD([weight], lr=0.1), False), (torch.optim.AdamW([weight], lr=0.1), True)):
        with pytest.raises(ValueError, match="of another model") if is_refused else contextlib.nullcontext():
            train.load_optimizer(optimizer, {"state": {}})
