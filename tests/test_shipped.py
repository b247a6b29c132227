"""The trained runs in notebooks/runs: small, read by the scripts as any run, and each shows what README says of it."""
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fullbandwidth, looped_gpt, stars
import train

RUNS = Path(__file__).parent.parent / "notebooks" / "runs"
NAMES = {"stars": "stars", "stars-baseline": "stars", "looped_gpt": "looped_gpt", "looped_gpt-raw": "looped_gpt",
         "running-sum": "fullbandwidth"}


def test_they_are_small_in_half_precision_and_hold_no_path_of_the_machine_that_trained_them():
    assert {path.name for path in RUNS.iterdir() if path.is_dir() and path.name[0] != "_"} == NAMES.keys()
    assert sum(path.stat().st_size for path in RUNS.rglob("*")) < 4e6
    for name, model in NAMES.items():
        ckpt, config = train.load_checkpoint(RUNS / name, model), json.loads((RUNS / name / "config.json").read_text())
        assert all(weight.dtype == torch.float16 for weight in ckpt["weights"].values())
        assert ckpt["step"] == ckpt["max_steps"] == train.read_csv(RUNS / name / "log.csv")[-1]["step"]
        assert config == {key: ckpt[key] for key in ("model", "preset", "config", "options")}
        assert config["options"]["out_dir"] == f"notebooks/runs/{name}" and config["options"]["data_dir"] == "data"


def test_they_are_what_the_presets_train_today():
    for name, changed in {"stars": {}, "stars-baseline": dict(loop_sampling="fixed", jsrr_lambda=0.0), "looped_gpt": {}, "looped_gpt-raw": {"readout": "raw"},
                          "running-sum": {}}.items():
        module = {"stars": stars, "looped_gpt": looped_gpt, "fullbandwidth": fullbandwidth}[NAMES[name]]
        ckpt = train.load_checkpoint(RUNS / name, NAMES[name])
        fields = vars(module.Config()) | vars(train.Options()) | module.PRESETS[ckpt["preset"]] | changed
        saved = vars(module.Config(**ckpt["config"])) | ckpt["options"]
        of_the_data = ("vocab_size", "block_size", "out_dir", "dtype")
        assert {k: v for k, v in fields.items() if saved[k] != v and k not in of_the_data} == {}, name


def test_stars_is_right_at_every_loop_count_and_the_baseline_at_its_own_only(capsys):
    for name, right in (("stars", (2, 4, 16, 64)), ("stars-baseline", (4,))):
        model, options = stars.load_run(RUNS / name)
        idx, targets = stars.held_out_sums(model, options, 200)
        exact = stars.exact_match(model, idx, targets, (2, 4, 16, 64))
        assert all(exact[t] == 1 if t in right else exact[t] < 0.2 for t in exact), (name, exact)
        stars.main([str(RUNS / name), "--ask=1750+4733", "--loops=2,4,64,256"])
        verdicts = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
        assert verdicts == (["right"] * 4 if name == "stars" else ["wrong", "right", "wrong", "wrong"])


def test_what_the_loss_does_not_see_grows(capsys):
    norms = {name: [row["val_final_norm"] for row in train.read_csv(RUNS / name / "log.csv") if "val_final_norm" in row]
             for name in ("looped_gpt", "looped_gpt-raw")}
    assert norms["looped_gpt"][-1] > 10 * norms["looped_gpt"][0]
    assert norms["looped_gpt-raw"][-1] < norms["looped_gpt-raw"][0]
    looped_gpt.main([str(RUNS / "looped_gpt"), "--prompt=The ", "--loops=2", "--max_new_tokens=20"])
    assert capsys.readouterr().out.startswith("The ")
    for name, seen in (("looped_gpt", False), ("looped_gpt-raw", True)):
        model, _, tokenizer = train.load_model(RUNS / name, "looped_gpt", looped_gpt.LoopedGPT)
        idx = torch.tensor([tokenizer.encode("The value of the name is the value of the expression.")])
        fraction = looped_gpt.radial_gradient_fraction(model, [(idx[:, :-1], idx[:, 1:])])
        assert all((value > 1e-3) == seen for value in fraction.tolist())


@torch.no_grad()
def test_the_state_fed_back_counts_past_the_trained_length():
    model, options, _ = fullbandwidth.load_model(RUNS / "running-sum")
    idx, targets = fullbandwidth.long_sums(model, replace(options, batch_size=128))
    within, beyond = fullbandwidth.right_shares(model, model.recurrent(idx), targets).tolist()
    assert within > 0.99 and beyond > 0.98
    assert fullbandwidth.right_shares(model, model.states(idx, 1)[0], targets)[1] < 0.45  # chance is a third


def test_a_shipped_run_cannot_be_resumed_and_one_line_says_so(tmp_path):
    import shutil
    shutil.copytree(RUNS / "stars", tmp_path / "stars")
    with pytest.raises(train.UserError, match="does not fit stars.py and these options"):
        train.main(["stars", f"--out_dir={tmp_path}/stars", "--resume", "--max_steps=1900", "--device=cpu"])
