"""experiments/feedback.py: its measures count what they say, its sweeps tabulate them."""
import pytest
import torch

import fullbandwidth
import train
from experiments import feedback
from fullbandwidth import Config
from test_fullbandwidth import TINY, no_benchmark


def test_running_sums_are_counted_within_and_beyond_the_trained_length(tmp_path):
    train.main(["fullbandwidth", *TINY, "--feedback_from=0", f"--out_dir={tmp_path}"])
    model, options, *_ = fullbandwidth.load_run(tmp_path)
    idx, targets = fullbandwidth.RunningSumData(options, Config(block_size=32)).batch("val", 0)
    with torch.no_grad():
        states = model.states(idx, 32)
    within, beyond = feedback.running_sum(tmp_path)
    for part, (*_, figures) in ((slice(16), within), (slice(16, 32), beyond)):
        for h, figure in zip((states[0], states[1], states[2], states[31]), figures, strict=True):
            right = model.readout(h).argmax(-1)[:, part] == targets[:, part]
            assert figure == pytest.approx(right.sum().item() / right.numel())


def test_a_sweep_reports_losses_and_updates_over_passes(tmp_path, pictures):
    conditions = ("standard-equal-compute", "75+22+3")
    feedback.main(["passes", *TINY[:-1], "--max_steps=20", "--seeds=1,2", f"--only={','.join(conditions)}",
                   f"--out_dir={tmp_path}"])
    rows = train.read_csv(tmp_path / "passes.csv")
    found = {(r["condition"], r["seed"], r["table"], r["column"]): r["value"] for r in rows}
    assert {r["condition"] for r in rows} == set(conditions)
    for seed in (1, 2):
        model, _, _, batches = fullbandwidth.load_run(tmp_path / f"75+22+3-seed{seed}")
        curve = fullbandwidth.pass_curve(model, batches)
        log = train.read_csv(tmp_path / f"standard-equal-compute-seed{seed}" / "log.csv")
        assert log[-1]["step"] == 46  # 20 steps of 2.3 passes in the mean
        for i, k in enumerate(fullbandwidth.PASSES):
            loss, update = (found["75+22+3", seed, table, k] for table in (feedback.LOSS, feedback.UPDATE))
            assert [loss, update] == pytest.approx(curve[i].tolist(), rel=1e-6)
            assert ((conditions[0], seed, feedback.LOSS, k) in found) == (k == 1)
        assert ("75+22+3", seed, "loss of pass 2", "with h = 0") in found
    assert (tmp_path / "passes.png").exists()


def test_every_diagnostic_of_a_trained_run(tmp_path, capsys, pictures):
    out = tmp_path / "run"
    train.main(["fullbandwidth", *TINY, "--feedback_from=0", f"--out_dir={out}"])
    capsys.readouterr()
    feedback.main([str(out)])
    text = capsys.readouterr().out
    assert "validation loss at pass" in text and "contraction rate" in text and "right sums at T + 1 .. 2 T" in text
    assert (out / "passes.png").exists()


def test_the_conditions_are_baselines_and_single_changes():
    passes, stabilisers = (feedback.SWEEPS[name].conditions for name in ("passes", "stabilisers"))
    assert passes["standard"] == dict(mix="1") and passes["standard-equal-compute"]["compute_of"] == "0,0.7,0.3"
    for mix in ("0+100", "0+97+3"):
        all_on = stabilisers[f"all-on-{mix}"]
        off = {name: fields for name, fields in stabilisers.items() if name.startswith("no-") and name.endswith(f"-{mix}")}
        changed = [{k for k in fields if all_on.get(k) != fields[k]} for fields in off.values()]
        assert sorted(map(sorted, changed)) == [["depth_scale"], ["input_norm"], ["jitter"], ["prefix_mix"], ["tied"]]
        assert set(stabilisers[f"none-{mix}"]) == set.union(*changed) | {"mix"}
    for sweep in feedback.SWEEPS.values():
        for fields in sweep.conditions.values():
            Config(**{name: value for name, value in fields.items() if name != "dataset"})
