"""What options, configs and checkpoints may hold: nonsense is one line, never a traceback, nor a run without end."""
import dataclasses, json, math
from typing import Annotated, Literal, get_args, get_origin

import pytest
import torch

import fullbandwidth
import looped_gpt
import stars
import train
from test_train import TINY, error_of

CLASSES = [train.Options, *(cls for module in (looped_gpt, stars, fullbandwidth)
                            for cls in (module.Config, module.Arguments))]


def nonsense(kind):
    """Values that no field of this annotation may have."""
    if get_origin(kind) is Literal:
        return ["bogus", "", None, 1, []]
    of_type = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if of_type is int:
        too_many = 2**63 if kind == train.Seed else 10**10
        return [-2, 2.5, 1.0, "1", True, None, math.nan, too_many, 10**30, [], torch.tensor(1)]
    if of_type is float:
        return [math.nan, math.inf, -math.inf, -11.0, 1e300, 10**30, "0.1", True, None, []]
    return [1, "no", None, 0.0] if of_type is bool else [5, b"x", [], "a\0b", "\ud800"]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_field_refuses_what_its_annotation_does_not_allow(cls):
    cls()
    for f in dataclasses.fields(cls):
        for value in nonsense(f.type):
            if value is not None or f.default is not None:
                with pytest.raises(train.UserError, match=f"^--{f.name}=") as error:
                    cls(**{f.name: value})
                assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize("argv, message", [
    (["looped_gpt", "--num_loops=10000000"], "--num_loops=10000000: expected a whole number from 1 to 10,000"),
    (["stars", "--loop_mu=nan"], "--loop_mu=nan: expected a number from -10 to 10"),
    (["stars", "--dropout=1.0"], "--dropout=1.0: expected a number from 0 to 0.9999"),
    (["stars", "--n_prelude=10000000"], "--n_prelude=10000000"),
    (["stars", "--digits=8", "--max_steps=0"], "--max_steps=31640625000000"),  # 8.1e15 pairs by 256
    (["stars", f"--seed={2**64}"], f"--seed={2**64}: expected a whole number from 0 to 9,223,372,036,854,775,807"),
    (["fullbandwidth", "--mix=" + "0," * 2000 + "1"], "at most 1,000 shares"),
    (["fullbandwidth", f"--vocab_size={10**30}"], "expected a whole number from 1 to 10,000,000"),
    (["looped_gpt", "--device=meta"], "--device=meta cannot be used here"),
])
def test_a_number_out_of_its_range_ends_before_anything_is_written(argv, message, capsys, tmp_path):
    dataset = "addition" if argv[0] == "stars" else "python-docs"
    assert message in error_of(capsys, *argv, f"--out_dir={tmp_path}/run", f"--dataset={dataset}", f"--data_dir={tmp_path}")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """config.json and checkpoint of a very small run."""
    path = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "matmul_peak", lambda *_: 1e12)  # which takes seconds to measure
        train.main(["looped_gpt", *TINY, "--max_steps=2", f"--data_dir={path}/data", f"--out_dir={path}/run"])
    return path / "run"


@pytest.fixture
def spoil(good, tmp_path, capsys):
    """spoil(change of the saved dict, file, main, argv): the error of a command that reads a changed copy of the run."""
    resume = ("looped_gpt", "--out_dir=RUN", "--resume", "--max_steps=4")

    def error(change, file="ckpt.pt", main=train.main, argv=resume):
        for name in ("config.json", "ckpt.pt"):
            (tmp_path / name).write_bytes((good / name).read_bytes())
        path = tmp_path / file
        saved = torch.load(path, weights_only=True) if file == "ckpt.pt" else json.loads(path.read_text())
        change(saved)
        torch.save(saved, path) if file == "ckpt.pt" else path.write_text(json.dumps(saved))
        argv = [word.replace("RUN", str(tmp_path)) for word in argv]
        return error_of(capsys, *argv, f"--data_dir={good.parent}/data", main=main)
    return error


@pytest.mark.parametrize("part, field, value, message", [
    ("options", "schedule", "bogus", "--schedule=bogus: expected one of constant, cosine, wsd"),
    ("options", "seed", "1", "--seed=1: expected a whole number"),
    ("options", "dataset", "a\0b", "expected text in UTF-8"),
    ("config", "n_layer", "2", "--n_layer=2: expected a whole number"), ("config", "num_loops", 2.5, "--num_loops=2.5"),
    ("config", "inter_loop_norm", "no", "--inter_loop_norm=no: expected a value of type bool"),
])
def test_values_of_a_config_file_are_checked_like_the_command_lines(spoil, part, field, value, message):
    assert message in spoil(lambda saved: saved[part].update({field: value}), "config.json")


@pytest.mark.parametrize("key", ["model", "preset", "config", "options"])
def test_a_config_file_of_other_types_is_damaged(good, tmp_path, key):
    saved = json.loads((good / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {key: []}))
    with pytest.raises(train.UserError, match="config.json is damaged"):
        train.read_config(tmp_path, "looped_gpt")
    (tmp_path / "ckpt.pt").write_bytes((good / "ckpt.pt").read_bytes())
    assert train.read_config(tmp_path, "looped_gpt") == {k: saved[k] for k in ("model", "preset", "config", "options")}


GENERATE = dict(main=looped_gpt.main, argv=["RUN", "--prompt=The ", "--max_new_tokens=3"])


@pytest.mark.parametrize("key, values", [
    ("config", [[], {"n_layer": 1}, {"num_loops": 10**9}]), ("options", [None, {"lr": "x"}]),
    ("tokenizer", [[], {}, {"name": "bogus"}, {"name": "char", "vocab": 5}, {"name": "char", "vocab": ["a"]}]),
    ("step", [-5, 2.5, "2"]), ("max_steps", ["x"]), ("best", ["x", math.nan]), ("weights", [[], {"wte.weight": 5}]),
])
def test_a_checkpoint_that_loads_but_holds_nonsense_is_one_line(spoil, key, values):
    assert "does not fit looped_gpt.py as it is now: KeyError" in spoil(lambda saved: saved.pop(key), **GENERATE)
    for value in values:
        assert "does not fit looped_gpt.py" in spoil(lambda saved: saved.update({key: value}), **GENERATE)


@pytest.mark.parametrize("key, values", [
    ("step", [2.5]), ("optimizers", [None, [], [{"state": {}}]]), ("tokens", [-5]), ("rng", [None, [[5, 5]]])])
def test_what_is_resumed_from_is_checked_too(spoil, key, values):
    for value in values:
        assert "ckpt.pt does not fit looped_gpt.py" in spoil(lambda saved: saved.update({key: value}))


def test_moments_of_another_shape_are_refused(spoil):
    def change(saved):
        for moments in saved["optimizers"][0]["state"].values():
            moments["exp_avg"] = torch.zeros(3)
    assert "the optimizer's state is of another model" in spoil(change)


# Advice that fits the cause

def no_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("method, arguments, advice", [
    ("__init__", [], "the model is too large for it"), ("loss", ["--batch_size=1"], "the model is too large for it"),
    ("loss", [], "halve --batch_size and double --grad_accum")])
def test_too_large_a_model_is_not_told_to_halve_its_batch(method, arguments, advice, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(looped_gpt.LoopedGPT, method, no_memory)
    error = error_of(capsys, "looped_gpt", *TINY, f"--data_dir={tmp_path}", f"--out_dir={tmp_path}/run", *arguments)
    assert error.startswith("error: out of memory: ") and advice in error


def test_generation_without_memory_is_not_told_to_halve_a_batch(good, capsys, monkeypatch):
    def no_memory_of_a_mac(*_, **__):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")
    monkeypatch.setattr(looped_gpt.LoopedGPT, "generate", no_memory_of_a_mac)
    error = error_of(capsys, good, "--prompt=The ", main=looped_gpt.main)
    assert error.startswith("error: out of memory: ") and "batch" not in error


@pytest.mark.parametrize("step, advice", [(1, "so it is not --lr"), (2, "try a lower --lr")])
def test_the_rate_is_blamed_only_after_an_update(step, advice, capsys, tmp_path, monkeypatch):
    loss, calls = looped_gpt.LoopedGPT.loss, []

    def nan_at_step(model, *arguments, **fields):
        calls.append(model.training)
        value, metrics = loss(model, *arguments, **fields)
        return value * (math.nan if model.training and sum(calls) == step else 1.0), metrics
    monkeypatch.setattr(looped_gpt.LoopedGPT, "loss", nan_at_step)
    error = error_of(capsys, "looped_gpt", *TINY, f"--data_dir={tmp_path}", f"--out_dir={tmp_path}/run")
    assert f"not finite at step {step}: " in error and advice in error
