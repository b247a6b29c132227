"""Sweeps and reports on runs of stars.py: tests of experiments/stability.py."""
import pytest
import torch

import stars, train
from experiments import stability

PLACEMENTS, NORMS = ("pre", "post", "pre_sandwich", "post_sandwich"), ("layernorm", "rmsnorm", "simple")
TINY = ["--digits=2", "--n_embd=16", "--mlp_width=32", "--batch_size=8", "--max_steps=2", "--eval_batches=1"]


def test_the_report_on_a_run_has_its_table_its_spectra_and_its_figure(tmp_path, capsys, monkeypatch, pictures, few_products):
    train.main(["stars", *TINY, f"--out_dir={tmp_path}/run"])
    capsys.readouterr()
    monkeypatch.setattr(stability, "LOOPS", (1, 4, 20))
    stability.main([f"{tmp_path}/run"])
    printed = capsys.readouterr().out
    assert "exact match" in printed and "largest rho" in printed
    assert (tmp_path / "run/diagnostics.png").stat().st_size > 10_000
    at_loops = [line.split()[0] for line in printed.split("largest rho")[1].splitlines()[1:3]]
    assert at_loops == ["4", "20"], "the trained number of loops, and where they have settled"


def test_sweeps_are_complete():
    assert set(stability.SWEEPS["normalization"].conditions) == {f"{p}+{n}" for p in PLACEMENTS for n in NORMS}
    for sweep in stability.SWEEPS.values():
        for fields in sweep.conditions.values():
            config, options = train.split_fields(fields, stars.Config, train.Options)
            assert len(config) + len(options) == len(fields) and stars.Config(**config) and train.Options(**options)


def test_a_sweep_measures_every_condition_on_held_out_sums(tmp_path, capsys, monkeypatch, pictures, few_products):
    monkeypatch.setattr(stability, "LOOPS", (1, 4))
    stability.main(["ablation", *TINY, "--only=fixed,random+jsrr", f"--out_dir={tmp_path}/sweep"])
    rows = train.read_csv(tmp_path / "sweep/accuracy.csv")
    assert {row["condition"] for row in rows} == {"fixed", "random+jsrr"} and "random+jsrr" in capsys.readouterr().out
    assert (tmp_path / "sweep/accuracy.png").stat().st_size > 10_000
    found = {(row["table"], row["column"]): row["value"] for row in rows if row["condition"] == "fixed"}
    model, options = stars.load_run(tmp_path / "sweep/fixed-seed42")
    idx, targets = stars.held_out_sums(model, options, 1000)
    assert found["exact match at loop", 4] == pytest.approx(model.loss(idx, targets, 4)[1]["exact"].item(), abs=1e-6)
    change, norm = stars.convergence(model, idx[:250], 4)[-1].tolist()
    assert found["relative step at loop", 4] == pytest.approx(change, rel=1e-5)
    assert found["mean ||h^(t)|| at loop", 4] == pytest.approx(norm, rel=1e-5)
    *_, settled = stars.trajectory(model.double(), idx[:8], 4)
    rho = stars.spectral_radius_arnoldi(model, settled, generator=torch.Generator().manual_seed(0))
    assert found["J at loop 4", "rho"] == pytest.approx(rho.mean().item(), rel=1e-6)


def test_the_race_counts_seconds_without_the_evaluations(tmp_path, capsys, pictures):
    for name, rate, exact in (("fast", 500, 1.0), ("slow", 50, 0.5)):  # two intervals of 1,000 tokens
        (tmp_path / name).mkdir()
        train.write_csv(tmp_path / name / "log.csv", [
            {"step": 0, "tokens": 0, "val_exact": 0.0}, {"step": 5, "tokens": 1000, "tokens_per_sec": rate},
            {"step": 10, "tokens": 2000, "tokens_per_sec": rate, "val_exact": exact}])
    stability.race({("fast", 1): tmp_path / "fast", ("slow", 1): tmp_path / "slow"}, tmp_path)
    out = capsys.readouterr().out
    assert "fast, seed 1: all sums right at step 10, 4 s" in out and "slow, seed 1: all sums right never; 50.00%" in out
    assert "40 s" in out and (tmp_path / "race.png").exists()
    values = [(row["condition"], row["column"], row["value"]) for row in train.read_csv(tmp_path / "race.csv")]
    assert values == [("fast", 0, 0), ("fast", 10, 1), ("slow", 0, 0), ("slow", 10, 0.5)]


def test_a_run_of_another_task_is_refused_in_one_line(tmp_path):
    train.main(["stars", "--dataset=python-docs", "--n_embd=16", "--mlp_width=32", "--batch_size=4", "--max_steps=1",
                "--eval_batches=1", f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/run"])
    with pytest.raises(train.UserError, match="needs a model that was trained on sums"):
        stability.main([f"{tmp_path}/run"])


def test_a_seed_of_a_sweep_is_checked_like_any_other():
    with pytest.raises(train.UserError, match="--seeds=1,-1: expected whole numbers, as in 42"):
        stability.main(["ablation", "--seeds=1,-1"])
