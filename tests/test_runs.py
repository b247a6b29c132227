"""Run directories, caches, signals: nothing is lost, nothing is written where it does not belong, no two runs meet."""
import fcntl, os, random, resource, shutil, signal, subprocess, sys, termios, threading, time, zipfile
from pathlib import Path

import pytest
import torch

from experiments import blind_spot, feedback, stability
import looped_gpt
import train
from test_train import (ROOT, TINY, assert_same_weights, command, config, data_dir, error_of, interrupt_after, losses,
                        options, weights)
from train import UserError


def start(out, data_dir, *arguments, launcher=(), **popen):
    """A training in a process of its own, with nothing saved before it is asked to stop."""
    argv = [sys.executable, *launcher, "train.py", "looped_gpt", *TINY, "--max_steps=100000", "--eval_interval=100000",
            f"--data_dir={data_dir}", f"--out_dir={out}", *arguments]
    return subprocess.Popen(argv, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
                            **dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE) | popen)


def read_until(process, beginning):
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    pytest.fail(process.stderr.read())


# Going on

def test_a_finished_run_that_goes_on_says_what_becomes_of_its_rate(command, capsys):
    schedule = ["--schedule=cosine", "--warmup_steps=0"]
    command(*schedule)
    interrupt_after(5, command, *schedule, out="stopped")
    command("--resume", out="stopped")
    assert "warning" not in capsys.readouterr().out
    command("--resume", "--max_steps=16")  # cosines by hand: 0.5 (1 + cos(7/8 pi)) and 0.5 (1 + cos(7/16 pi)) of 0.003
    assert "the learning rate of step 8 was 0.00011 there and is 0.0018 here" in capsys.readouterr().out


def test_a_run_from_before_a_field_existed_goes_on_with_its_default(command, capsys):
    whole, out = command(out="whole"), command("--max_steps=4")
    ckpt = train.load_checkpoint(out, "looped_gpt")
    for part in ("config", "given"):
        del ckpt[part]["cut_gradient"]
    torch.save(ckpt, out / "ckpt.pt")
    command("--resume")
    assert_same_weights(weights(whole), weights(out))


def test_the_random_state_survives_another_number_of_processes_and_it_is_said(command, capsys):
    whole, out = command(out="whole"), command("--max_steps=4")  # with dropout
    ckpt = train.load_checkpoint(out, "looped_gpt")
    torch.save(ckpt | {"rng": [*ckpt["rng"], [torch.Generator().get_state(), None]]}, out / "ckpt.pt")
    command("--resume")
    assert "warning: 2 processes there, 1 here" in capsys.readouterr().out
    assert_same_weights(weights(whole), weights(out))


def test_a_changed_text_is_noticed_however_it_was_changed(tmp_path, capsys):
    path, out = tmp_path / "some.txt", tmp_path / "run"
    argv = ["looped_gpt", *TINY, f"--dataset={path}", f"--data_dir={tmp_path}/data", f"--out_dir={out}"]
    path.write_text("some words here\n" * 100)
    saved = path.stat()
    train.main(argv)
    path.write_text("here some words\n" * 100)  # the same characters, size and time
    os.utime(path, ns=(saved.st_atime_ns, saved.st_mtime_ns))
    data = train.TextData(options(tmp_path, dataset=str(path)), config())
    assert data.tokenizer.decode(data.tokens["train"][:16]) == "here some words\n"
    error = error_of(capsys, *argv, "--resume", "--max_steps=9")
    assert "does not fit looped_gpt.py and these options" in error and ": text: " in error


def test_a_log_that_a_spreadsheet_has_saved_does_not_stop_a_run(command, tmp_path):
    whole, six = command(out="whole"), command("--max_steps=6", out="six")
    text = (six / "log.csv").read_bytes()
    short = b"\n".join(line.rstrip(b",") for line in text.splitlines())
    for name, spoiled in (("mark", b"\xef\xbb\xbf" + text), ("short rows", short), ("utf-16", text.decode().encode("utf-16")),
                          ("semicolons", text.replace(b",", b";").replace(b".", b",")), ("half", text[:len(text) // 2])):
        out = shutil.copytree(six, tmp_path / name)
        (out / "log.csv").write_bytes(spoiled)
        command("--resume", out=name)
        assert_same_weights(weights(whole), weights(out))
        if name in ("mark", "short rows"):
            assert losses(out) == losses(whole)
        else:  # it begins again, with an evaluation, and what could not be read is kept
            assert [row[0] for row in losses(out)] == [6, 7, 8] and losses(out)[1:] == losses(whole)[7:]
            assert (out / "log.csv.old").read_bytes() == spoiled


# What a run directory holds

def test_a_folder_that_holds_anything_of_ours_is_refused_and_left_as_it_is(tmp_path, command, capsys):
    for name in ("ckpt.pt", "best.pt", "log.csv", "curves.png", "eval.json"):
        out = tmp_path / name
        out.mkdir()
        for file in (name, "notes.tmp", "notes.12.tmp", "x.ckpt.pt.12.tmp", "ckpt.pt.old.tmp"):
            (out / file).write_text("mine")
        error = error_of(capsys, "looped_gpt", *TINY, f"--out_dir={out}")
        assert f"already holds a run ({name})" in error
        assert [p.read_text() for p in out.glob("*[!k]")] == ["mine"] * 5
        assert "cannot be written" not in error
    command("--max_steps=1", "--overwrite", out="curves.png")
    assert len([*(tmp_path / "curves.png").glob("*.tmp")]) == 4


def test_overwriting_leaves_nothing_of_the_run_before(command, capsys, tmp_path, data_dir, monkeypatch):
    out, loss = command(), looped_gpt.LoopedGPT.loss
    for name in ("eval.json", "diagnostics.png", "passes.csv", "ckpt.pt.123.tmp", "notes.txt"):
        (out / name).write_text("of the run before")
    monkeypatch.setattr(looped_gpt.LoopedGPT, "loss", lambda model, *arguments, **named: (
        loss(model, *arguments, **named)[0] * (float("nan") if model.training else 1), {}))
    argv = ["looped_gpt", *TINY, f"--data_dir={data_dir}", f"--out_dir={out}"]
    assert "keeps its last good checkpoint" not in error_of(capsys, *argv, "--lr=0.1", "--overwrite")
    assert {p.name for p in out.iterdir()} == {"config.json", "log.csv", "best.pt", "notes.txt", "run.lock"}
    assert train.load_checkpoint(out / "best.pt", "looped_gpt")["options"]["lr"] == 0.1


def test_an_overwriting_that_is_killed_leaves_the_old_run_or_none(command, capsys, tmp_path, data_dir, monkeypatch):
    old, unlink = command(out="old"), Path.unlink
    for moment in range(4):
        out, done = tmp_path / f"killed{moment}", []
        shutil.copytree(old, out)

        def kill(path, missing_ok=False):
            if len(done) == moment:
                raise KeyboardInterrupt  # as good as a kill: nothing is cleaned up behind it
            done.append(unlink(path, missing_ok))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "unlink", kill)
            command("--overwrite", "--lr=0.1", out=out.name)
        argv = ["looped_gpt", f"--out_dir={out}", f"--data_dir={data_dir}", "--resume"]
        if moment < 2:
            train.main(argv)
            assert_same_weights(weights(old), weights(out))
        else:
            assert "holds no run to resume" in error_of(capsys, *argv)


def test_a_saved_run_does_not_say_where_caches_are_written(command, capsys, tmp_path):
    out = tmp_path / "run"
    train.main(["looped_gpt", *TINY, f"--data_dir={tmp_path}/theirs", f"--out_dir={out}"])
    shutil.rmtree(tmp_path / "theirs")
    capsys.readouterr()
    looped_gpt.main([str(out), f"--data_dir={tmp_path}/ours"])
    assert "validation split of python-docs" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "ours")
    train.main(["looped_gpt", f"--out_dir={out}", f"--data_dir={tmp_path}/ours", "--resume", "--max_steps=9"])
    assert "looped_gpt-tiny on python-docs" in capsys.readouterr().out
    assert (tmp_path / "ours").exists() and not (tmp_path / "theirs").exists()


def test_a_flipped_bit_in_a_checkpoint_is_found(command):
    out = command("--max_steps=1")
    good, draw = (out / "ckpt.pt").read_bytes(), random.Random(0)
    with zipfile.ZipFile(out / "ckpt.pt") as archive:
        weights = max(archive.infolist(), key=lambda entry: entry.file_size)
        start = good.index(archive.read(weights))
    for _ in range(10):
        bad = bytearray(good)
        bad[start + draw.randrange(weights.file_size)] ^= 1 << draw.randrange(8)
        (out / "ckpt.pt").write_bytes(bad)
        with pytest.raises(UserError, match="ckpt.pt is not a checkpoint of this project, or is damaged"):
            train.load_checkpoint(out, "looped_gpt")


def test_a_full_disk_is_one_line(capsys, tmp_path, data_dir, monkeypatch):
    """Where torch.save itself runs into it. The whole message is torch's otherwise, and says nothing of a disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(train, "compile_blocks", lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard)))
    try:
        error = error_of(capsys, "looped_gpt", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path}/run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error == f"error: {tmp_path}/run/best.pt cannot be written: [Errno 27] File too large"
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"config.json", "log.csv", "run.lock"}


# Texts and their caches

def test_a_byte_order_mark_is_no_character_of_a_text(tmp_path):
    (tmp_path / "text").write_text("wörter über\n" * 100, encoding="utf-8-sig")
    data = train.TextData(options(tmp_path, dataset=str(tmp_path / "text")), config())
    assert data.tokenizer.vocab == sorted(set("wörter über\n"))


@pytest.mark.parametrize("tokenizer, text, vocab_size", [("char", "aaaa", 50), ("regex", "a b ", 1), ("regex", "a b ", 4)])
def test_a_text_that_leaves_nothing_to_learn_is_refused(tmp_path, tokenizer, text, vocab_size):
    (tmp_path / "text").write_text(text * 1000)
    with pytest.raises(UserError, match="leaves nothing to learn"):
        train.TextData(options(tmp_path, dataset=str(tmp_path / "text"), tokenizer=tokenizer), config(16, vocab_size))


def test_a_damaged_cache_is_named_and_built_again(tmp_path, capsys):
    (tmp_path / "text").write_text("some text, more text\n" * 50)
    o = options(tmp_path, dataset=str(tmp_path / "text"))
    expected = train.TextData(o, config()).tokens["train"].tolist()
    cache, = (tmp_path / "data").iterdir()
    tokenizer = (cache / "tokenizer.json").read_text()
    for name, content in (("train.bin", bytes(2 * len(expected))), ("train.bin", bytes(len(expected))), ("val.bin", b"odd"),
                          ("tokenizer.json", b'{"spe'), ("tokenizer.json", tokenizer.replace(",", "!", 1).encode()),
                          ("tokenizer.json", tokenizer.replace('"x"', '"y"').encode())):
        (cache / name).write_bytes(content)
        capsys.readouterr()
        data = train.TextData(o, config())
        assert data.tokens["train"].tolist() == expected and data.tokenizer.decode(expected).startswith("some text")
        assert f"{cache} is damaged: built again" in capsys.readouterr().out


def test_what_a_kill_leaves_of_a_cache_is_swept_up(tmp_path):
    (tmp_path / "text").write_text("some text, more text\n" * 50)
    build = (f"import os, train, looped_gpt; train.encode_block = lambda *_: os.kill(os.getpid(), 9)\n"
             f"train.TextData(train.Options(dataset='{tmp_path}/text', data_dir='{tmp_path}/data'), looped_gpt.Config())")
    assert subprocess.run([sys.executable, "-c", build], cwd=ROOT).returncode == -9
    left, = (tmp_path / "data").glob("*/*.tmp")
    (left.parent / "mine.1.tmp").write_text("")
    train.TextData(options(tmp_path, dataset=str(tmp_path / "text")), config())
    assert [p.name for p in left.parent.glob("*.tmp")] == ["mine.1.tmp"]


def test_a_damaged_archive_of_texts_is_one_line(tmp_path):
    path, draw = tmp_path / "wikitext-2.zip", random.Random(0)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for split in ("train", "valid", "test"):
            z.writestr(f"wikitext-2-raw/wiki.{split}.raw", "".join(f"{draw.random()} \n" for _ in range(2000)))
    good = path.read_bytes()
    for _ in range(30):
        at = draw.randrange(len(good) - 20)
        path.write_bytes(good[:at] + draw.randbytes(20) + good[at + 20:])
        with pytest.raises(UserError, match="wikitext-2.zip is not"):
            train.read_splits("wikitext-2", path)


# Processes and signals

def test_one_run_at_a_time_in_a_directory_and_a_hangup_saves_it(tmp_path, data_dir, capsys):
    process = start(tmp_path / "run", data_dir)
    read_until(process, "step      1/")
    for argument in ("--seed=1", "--overwrite", "--resume"):
        error = error_of(capsys, "looped_gpt", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path}/run", argument)
        assert error.startswith(f"error: another process is training in {tmp_path}/run")
    process.send_signal(signal.SIGHUP)
    process.stdout.close()  # as the terminal is; before the signal, it would stop for want of a reader
    assert process.wait(60) == 128 + signal.SIGHUP and process.stderr.read() == ""
    step = train.load_checkpoint(tmp_path / "run", "looped_gpt")["step"]
    train.main(["looped_gpt", f"--out_dir={tmp_path}/run", f"--data_dir={data_dir}", "--resume", f"--max_steps={step + 1}"])


def test_a_run_whose_output_nobody_reads_on_is_saved(tmp_path, data_dir):
    """As `| head -1` leaves it."""
    process = start(tmp_path / "run", data_dir)
    read_until(process, "looped_gpt-tiny")
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE and process.stderr.read() == ""
    assert train.load_checkpoint(tmp_path / "run", "looped_gpt")["step"] >= 1


def test_a_signal_saves_a_run_that_waits_for_a_full_pipe(tmp_path, data_dir):
    process = start(tmp_path / "run", data_dir)
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    read_until(process, "step      1/")
    while int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder) < 3900:
        time.sleep(0.1)
    time.sleep(0.5)  # it waits in print by now
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT and process.stderr.read() == ""
    assert train.load_checkpoint(tmp_path / "run", "looped_gpt")["step"] >= 1


def test_with_slow_steps_two_processes_save_at_the_next_one(tmp_path, data_dir):
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29619")
    process = start(tmp_path / "run", data_dir, "--batch_size=1024", launcher=torchrun)
    read_until(process, "step      3/")
    process.terminate()
    process.communicate(timeout=60)
    assert 3 <= train.load_checkpoint(tmp_path / "run", "looped_gpt")["step"] <= 7  # not 10


def test_a_run_can_be_started_in_a_thread(tmp_path, data_dir):
    failed = []
    thread = threading.Thread(target=lambda: train.main(["looped_gpt", *TINY, "--max_steps=1", f"--data_dir={data_dir}",
                                                         f"--out_dir={tmp_path}/run"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda e: failed.append(e.exc_value))
        thread.start()
        thread.join()
    assert not failed and train.load_checkpoint(tmp_path / "run", "looped_gpt")["step"] == 1


def test_a_closed_stdout_is_no_hindrance(tmp_path, data_dir):
    argv = [sys.executable, "train.py", "looped_gpt", *TINY, "--max_steps=1", f"--data_dir={data_dir}",
            f"--out_dir={tmp_path}/run"]
    result = subprocess.run(argv, cwd=ROOT, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert (result.returncode, result.stderr) == (0, b"")
    assert train.load_checkpoint(tmp_path / "run", "looped_gpt")["step"] == 1


# Sweeps and reports

def test_ctrl_c_in_a_conditions_last_evaluation_ends_the_sweep(tmp_path, data_dir, monkeypatch, capsys):
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda run: (
        run.step == 2 and signal.raise_signal(signal.SIGINT), evaluate(run))[1])
    with pytest.raises(SystemExit) as exit:
        blind_spot.main(["table1", *TINY, "--max_steps=2", f"--data_dir={data_dir}", f"--out_dir={tmp_path}"])
    assert exit.value.code == 130 and [p.name for p in tmp_path.iterdir()] == ["terminal+rmsnorm-seed42"]
    assert train.load_checkpoint(tmp_path / "terminal+rmsnorm-seed42", "looped_gpt")["step"] == 2
    assert capsys.readouterr().out.endswith("--resume\nor repeat this command, which goes on with the sweep\n")


def test_a_sweep_refuses_what_its_conditions_set_themselves(tmp_path, capsys):
    for sweep, argument in (("ablation", "--dataset=python-docs"), ("normalization", "--dataset=python-docs"),
                            ("ablation", "--loop_sampling=poisson"), ("optimizer", "--schedule=wsd")):
        error = error_of(capsys, sweep, argument, f"--out_dir={tmp_path}/sweep", main=stability.main)
        assert f"{argument}: the sweep sets" in error and not (tmp_path / "sweep").exists()


def test_a_window_of_one_token_is_diagnosed(tmp_path, data_dir, capsys):
    train.main(["fullbandwidth", "--n_layer=1", "--n_head=1", "--n_kv_head=1", "--n_embd=16", "--mlp_width=16",
                "--block_size=1", "--batch_size=4", "--eval_batches=1", "--max_steps=1", "--device=cpu", "--compile=off",
                f"--data_dir={data_dir}", f"--out_dir={tmp_path}/run"])
    feedback.main([f"{tmp_path}/run", f"--data_dir={data_dir}"])
    assert "1,000 tokens" in capsys.readouterr().out
