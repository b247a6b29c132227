"""experiments/ledger.py: its verdicts follow from the single values, and README's table is what it computes from the runs."""
import json, shutil

import numpy as np
import pytest

import fullbandwidth, looped_gpt, stars, train
from experiments import blind_spot, claims, feedback, ledger, stability, state_tracking, sweeps, tiny_ouro

OURS = {name: ledger.Runs(ledger.HERE / "runs" / folder) for name, (folder, _) in ledger.SWEEPS.items()}


def runs_of(tmp_path, **values):
    """Runs in which condition a has these values of seeds 1, 2, .. and b has 10 at every seed."""
    rows = []
    for name, of_seeds in values.items():
        for seed, value in enumerate(of_seeds, start=1):
            rows.append({"condition": name, "seed": seed, "table": "t", "row": "", "column": 4, "value": value})
    train.write_csv(tmp_path / "measure.csv", rows)
    return {"s": ledger.Runs(tmp_path)}


def larger(runs):
    a, b = runs("a", "t", 4), runs("b", "t", 4)
    return a > b, f"{claims.show(a)} against {claims.show(b)}"


@pytest.mark.parametrize("a, verdict, figures", [
    ((20, 30), "two seeds: reproduced in kind", "25 ± 7.07 against 10 ± 0"),
    ((5, 30), "in 1 of 2 seeds", "17.5 ± 17.7 against 10 ± 0"),
    ((5, 6), "two seeds: not seen at this scale", "5.5 ± 0.707 against 10 ± 0"),
    ((20, 25, 30), "reproduced in kind", "25 ± 5 against 10 ± 0")])
def test_a_verdict_follows_from_every_seed(tmp_path, a, verdict, figures):
    claim = claims.Claim("paper", "text", "theirs", "s", larger)
    assert ledger.judge(claim, runs_of(tmp_path, a=a, b=(10,) * len(a))) == (figures, verdict)


def test_one_seed_is_one_observation_and_none_is_open(tmp_path):
    claim = claims.Claim("paper", "text", "theirs", "s", larger)
    assert ledger.judge(claim, runs_of(tmp_path, a=(20,), b=(10,))) == ("20 against 10", "one observation: reproduced in kind")
    assert ledger.judge(claim, runs_of(tmp_path, a=(20,))) == ("not run yet", "open")


def test_conditions_are_compared_on_the_seeds_that_they_share(tmp_path):
    claim = claims.Claim("paper", "text", "theirs", "s", larger)
    rows = [{"condition": c, "seed": seed, "table": "t", "row": "", "column": 4, "value": value}
            for c, seed, value in (("a", 1, 50), ("a", 2, 20), ("b", 2, 10), ("b", 3, 40))]
    train.write_csv(tmp_path / "measure.csv", rows)
    expected = ("20 against 10", "one observation: reproduced in kind")
    assert ledger.judge(claim, {"s": ledger.Runs(tmp_path)}) == expected
    train.write_csv(tmp_path / "measure.csv", [row for row in rows if row["seed"] != 2])
    assert ledger.judge(claim, {"s": ledger.Runs(tmp_path)}) == ("not run yet", "open")


def test_a_damaged_table_is_named(tmp_path):
    (tmp_path / "measure.csv").write_text("condition,seed,table,row,column\na,1,t,,4\n")
    with pytest.raises(train.UserError, match="measure.csv is damaged: restore it"):
        ledger.Runs(tmp_path)


def test_nothing_to_collect_is_said(tmp_path):
    for folder, reason in ((tmp_path, "no folder of a sweep is in it"), (ledger.HERE / "runs", "that is where they are collected")):
        with pytest.raises(train.UserError, match=reason):
            ledger.main([f"--collect={folder}"])


def test_the_commands_train_what_the_ledger_reads():
    """Each command names a sweep of its experiment, and the folder is the one that this sweep writes into."""
    modules = {"blind_spot.py": blind_spot, "stability.py": stability, "feedback.py": feedback,
               "state_tracking.py": state_tracking, "tiny_ouro.py": tiny_ouro}
    scripts = {"blind_spot.py": looped_gpt, "stability.py": stars, "tiny_ouro.py": tiny_ouro}
    for folder, command in ledger.SWEEPS.values():
        file, name, *options = command.split()
        sweep = modules[file].SWEEPS[name]
        script = scripts.get(file, fullbandwidth)
        asked = dict(option.removeprefix("--").split("=") for option in options).get("preset")
        preset = asked or sweep.preset or next(iter(script.PRESETS))
        assert folder == f"{sweeps.script_name(script)}-{preset}-{name}"


def test_a_committed_sweep_answers_all_of_its_claims():
    """A claim is open only for a condition that has not been trained, not for a table or a column that is named wrongly."""
    assert len(claims.CLAIMS) >= 45
    assert {claim.paper for claim in claims.CLAIMS} == {"2606.24898", "2605.26733", "2608.08888"}
    for claim in claims.CLAIMS:
        if claim.sweep:
            try:
                claim.figures(OURS[claim.sweep])
            except ledger.Missing as missing:
                trained = {condition for condition, *_ in OURS[claim.sweep].values}
                assert str(missing).split(":")[0] not in trained, (claim.text, missing)


def test_readme_has_what_the_committed_runs_give():
    text = (ledger.HERE / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- ledger -->") == 1 and text.count("<!-- ") == 2 * text.count("<!-- end -->") > 6
    assert ledger.fill(text, OURS) == text, "run python experiments/ledger.py --write"


def test_a_table_is_computed_between_its_marks(tmp_path):
    runs = runs_of(tmp_path, a=(0.25, 0.75), b=(1.0,))
    text = "before <!-- s | t | 4, 8 | percent -->old<!-- end --> after"
    expected = "| t | 4 | 8 |\n| --- | --- | --- |\n| a | 50.0 ± 35.4% |  |\n| b | 100.0% |  |"
    assert ledger.fill(text, runs) == f"before <!-- s | t | 4, 8 | percent -->\n\n{expected}\n\n<!-- end --> after"


def test_collecting_copies_tables_logs_and_configs_of_finished_runs_and_no_weights(tmp_path, capsys, monkeypatch):
    folder = ledger.SWEEPS["passes"][0]
    run = tmp_path / "out" / folder / "standard-seed42"
    run.mkdir(parents=True)
    half = run.parent / "standard-x3-seed42"
    half.mkdir()
    record = {"model": "fullbandwidth", "preset": "tiny", "config": {}, "options": {"max_steps": 300}}
    monkeypatch.setattr(train, "load_checkpoint", lambda path: {"step": 400, "max_steps": 900 if path == half else 400})
    for path in (run, half):
        (path / "config.json").write_text(json.dumps(record))
        train.write_csv(path / "log.csv", [{"step": 0}, {"step": 400}])
        (path / "ckpt.pt").write_text("x")
    (run.parent / "passes.png").write_text("x")
    train.write_csv(run.parent / "passes.csv", [{"condition": "standard", "seed": 42, "table": "t", "column": 1, "value": 1.5}])
    ledger.collect(tmp_path / "out", tmp_path / "runs")
    assert f"not finished: {half}" in capsys.readouterr().out
    found = {str(p.relative_to(tmp_path / "runs" / folder)) for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    assert found == {"standard-seed42/log.csv", "standard-seed42/config.json", "passes.csv"}


def test_seeds_of_one_condition_with_other_options_are_named(tmp_path, capsys):
    folder = ledger.SWEEPS["passes"][0]
    for name, seed, lr, dtype in (("runs", 42, 0.1, "float32"), ("out", 1, 0.1, "bfloat16"), ("out", 2, 0.2, "float32")):
        run = tmp_path / name / folder / f"standard-seed{seed}"
        run.mkdir(parents=True)
        options = dict(max_steps=3, lr=lr, dtype=dtype, seed=seed)
        (run / "config.json").write_text(json.dumps({"model": "m", "preset": "p", "config": {}, "options": options}))
        train.write_csv(run / "log.csv", [{"step": 3}])
    ledger.collect(tmp_path / "out", tmp_path / "runs")
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warnings and all(line.count("--lr=") == 2 and "dtype" not in line and "seed=" not in line for line in warnings)


def test_collecting_keeps_the_other_seeds_and_replaces_the_same(tmp_path):
    folder = ledger.SWEEPS["passes"][0]
    for name, values in (("runs", {("a", 1): 1, ("a", 2): 2, ("b", 1): 3}), ("out", {("a", 2): 20, ("a", 3): 30})):
        rows = [{"condition": c, "seed": seed, "table": "t", "column": 4, "value": value} for (c, seed), value in values.items()]
        (tmp_path / name / folder).mkdir(parents=True)
        train.write_csv(tmp_path / name / folder / "passes.csv", rows)
    ledger.collect(tmp_path / "out", tmp_path / "runs")
    runs = ledger.Runs(tmp_path / "runs" / folder)
    assert runs("a", "t", 4).tolist() == [1, 20, 30] and runs("b", "t", 4).tolist() == [3]


def test_the_least_and_the_most_are_taken_seed_by_seed():
    runs = lambda condition, table, t: np.array({2: [1.0, 0.5], 3: [0.9, 0.7]}[t])
    assert claims.worst(runs, "random+jsrr", (2, 3)).tolist() == [0.9, 0.5]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(train.UserError, match="nowhere: no such folder"):
        ledger.main([f"--runs={tmp_path}/nowhere"])
