"""experiments/blind_spot.py: what arXiv 2606.24898 measures, on small models; its sweep and its report on a run."""
import math, shutil

import pytest
import torch
import torch.nn.functional as F

import looped_gpt
import train
from experiments import blind_spot
from test_looped_gpt import TINY, naive_norm, naive_states, small


@pytest.fixture
def train_run(tmp_path, monkeypatch):
    """train_run("--field=value", ...) trains a very small looped_gpt for two steps; its directory."""
    monkeypatch.setattr(train, "matmul_peak", lambda *_: 1e12)  # which takes seconds to measure

    def run(*arguments, out="run"):
        train.main(["looped_gpt", *TINY, f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path / out}", *arguments])
        return tmp_path / out
    return run


# Lemma 1 across loops

def naive_gradient_matrix(model, idx, targets):
    """{(j, k): (fraction, cosine)} by autograd through one naive forward, the formula written out."""
    w = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    c = model.config
    states = naive_states(w, c, idx, c.num_loops)
    values = {}
    for j, h in enumerate(states, start=1):
        if c.readout == "rmsnorm" or (c.readout == "final_only" and j == c.num_loops):
            h = naive_norm(h, w["norm.gain"])
        log_p = (h @ w["wte.weight"].T).log_softmax(-1)
        ce = -log_p.gather(-1, targets[..., None]).sum()
        for k in range(1, j + 1):
            H = states[k - 1]
            g, = torch.autograd.grad(ce, H, retain_graph=True)
            cosine = torch.einsum("btd,btd->bt", g, H) / (g.square().sum(-1) * H.square().sum(-1)).sqrt()
            values[j, k] = (cosine.abs().mean().item(), cosine.mean().item())
    return values


@pytest.mark.parametrize("fields", [dict(readout="rmsnorm"), dict(readout="raw"), dict(readout="final_only"),
                                    dict(inter_loop_norm=True), dict(num_loops=1)], ids=str)
def test_the_radial_gradient_matrix_is_autograds_and_its_diagonal_is_lemma_1s(fields):
    model, idx, targets = small(**fields)
    K = model.config.num_loops
    fraction, cosine = blind_spot.radial_gradient_matrix(model, [(idx, targets)])
    naive = naive_gradient_matrix(model, idx, targets)
    for j in range(1, K + 1):
        for k in range(1, K + 1):
            found = (fraction[j - 1, k - 1].item(), cosine[j - 1, k - 1].item())
            if k > j:
                assert math.isnan(found[0]) and math.isnan(found[1])
            else:
                assert found == pytest.approx(naive[j, k], rel=1e-6, abs=1e-12)
    two = [(idx, targets), (idx.flip(0)[:2], targets.flip(0)[:2])]  # the mean over batches
    fraction, _ = blind_spot.radial_gradient_matrix(model, two)
    torch.testing.assert_close(fraction.diagonal(), looped_gpt.radial_gradient_fraction(model, two), rtol=0, atol=0)


def test_later_losses_see_the_scale_of_earlier_states_unless_a_norm_stands_between_the_loops():
    model, idx, targets = small()
    fraction, _ = blind_spot.radial_gradient_matrix(model, [(idx, targets)])
    below = torch.ones(3, 3).tril(-1) == 1
    assert fraction.diagonal().max() < 1e-5 and fraction[below].min() > 1e-3
    model, idx, targets = small(inter_loop_norm=True)
    fraction, _ = blind_spot.radial_gradient_matrix(model, [(idx, targets)])
    assert fraction[torch.ones(3, 3).tril() == 1].max() < 1e-5


# Lemma 2

def test_lemma2_remainders_shrink_as_predicted():
    """|s' - s - a_rad| is O(1/s) and |angular step - ||b_perp|| / s| is O(1/s^2): ten and a hundred times less at ten
    times the scale. In float64; 20% slack for the next order, which 1/s still carries at the smallest scale."""
    model, idx, _ = small(n_layer=3)
    table = blind_spot.lemma2_remainders(model, 100 * F.normalize(model.states(idx)[-1], dim=-1))
    for errors, order in ((table[:, 2], 10), (table[:, 4], 100)):
        ratios = (errors[:-1] / errors[1:])[:2].tolist()
        assert all(r == pytest.approx(order, rel=0.2) for r in ratios), ratios
    assert table[-1, 2] < 1e-3 * table[-1, 1].abs() and table[-1, 4] < 1e-3 * table[-1, 3]


# Exits and halting

def test_the_frontier_is_the_perplexity_of_every_exit():
    model, idx, targets = small(readout="final_only")
    points = blind_spot.frontier(model, [(idx, targets)])
    assert [K for K, _, _ in points] == [1, 2, 3]
    expected = looped_gpt.loss_per_loop(model, [(idx, targets)]).exp()
    torch.testing.assert_close(torch.tensor([ppl for _, ppl, _ in points]).double(), expected)


def test_halting_skips_loops_and_reads_each_sequence_where_it_left():
    model, idx, targets = small(readout="raw")
    states = model.states(idx)
    for threshold, expected in ((math.inf, 3), (-math.inf, 1)):
        assert blind_spot.halting_states(model, idx, threshold)[1].tolist() == [expected] * 3
    margins = blind_spot.sequence_margin(model, states[0], 1)
    h, loops = blind_spot.halting_states(model, idx, margins.median().item())
    assert 1 in loops and loops.max() > 1
    for row, k in enumerate(loops.tolist()):
        torch.testing.assert_close(h[row], states[k - 1][row])


def test_calibrated_halting_stays_within_its_tolerance():
    model, idx, targets = small(readout="raw")
    full = looped_gpt.loss_per_loop(model, [(idx, targets)])[-1].exp()
    threshold = blind_spot.calibrate_halting(model, [(idx, targets)], tolerance=1.05)
    assert blind_spot.halting(model, [(idx, targets)], threshold)["ppl"] <= 1.05 * full
    unlimited = blind_spot.calibrate_halting(model, [(idx, targets)], tolerance=math.inf)
    assert blind_spot.halting(model, [(idx, targets)], unlimited)["loops"] == 1


# The report on a run, and the sweep

def test_diagnosing_a_run_prints_every_diagnostic_and_draws_them(train_run, capsys, pictures):
    blind_spot.main([str(train_run("--readout=raw", "--num_loops=1", out="one loop"))])
    capsys.readouterr()
    out = train_run("--readout=raw", "--eval_batches=2")
    blind_spot.main([str(out)])
    text = capsys.readouterr().out
    for part in ("radial gradient fraction", "gradient fraction of CE_j at H_k", "angular step * s", "p99",
                 "freeze_loop1", "remove_radial", "tokens/s", "halting"):
        assert part in text
    assert (out / "diagnostics.png").stat().st_size > 10_000
    with pytest.raises(train.UserError, match="run is a run: its options are its own"):
        blind_spot.main([str(out), "--seeds=1,2"])


def test_the_sweep_trains_seven_conditions_once_and_tabulates_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "matmul_peak", lambda *_: 1e12)
    argv = ["table1", *TINY, f"--data_dir={tmp_path}/data", "--seeds=1,2", f"--out_dir={tmp_path}"]
    blind_spot.main(argv)
    rows = train.read_csv(tmp_path / "table1.csv")
    assert {r["condition"] for r in rows} == set(blind_spot.TABLE1) and (tmp_path / "table1.png").exists()
    last = [train.read_csv(tmp_path / f"per_loop+raw-seed{s}" / "log.csv")[-1] for s in (1, 2)]

    def found(table, column):
        """The values of seeds 1 and 2."""
        return [r["value"] for r in rows if (r["condition"], r["table"], r["column"]) == ("per_loop+raw", table, column)]
    assert found(blind_spot.NORM, 2) == pytest.approx([r["val_final_norm"] for r in last])
    ppl = [math.exp(r["val_ce_2"]) for r in last]
    assert found(blind_spot.PPL, 2) == pytest.approx(ppl)
    printed = capsys.readouterr().out.split(blind_spot.PPL)[1].splitlines()
    mean, spread = (float(line.split()[2]) for line in printed[printed.index(next(
        line for line in printed if line.startswith("per_loop+raw "))):][:2])
    assert mean == pytest.approx(sum(ppl) / 2, rel=1e-3) and spread == pytest.approx(
            abs(ppl[0] - ppl[1]) / math.sqrt(2), rel=1e-2)  # of two values, with n - 1

    model, options, tokenizer = train.load_model(tmp_path / "per_loop+raw-seed2", "looped_gpt", looped_gpt.LoopedGPT)
    _, batches = train.validation_batches(options, tokenizer, model, options.eval_batches)
    fraction = looped_gpt.radial_gradient_fraction(model, batches)
    assert found("radial gradient fraction at loop", 1)[1] == pytest.approx(fraction[0].item())
    assert len(found("change of CE under clamp", "freeze_loop1")) == 2
    before = (tmp_path / "per_loop+raw-seed1" / "ckpt.pt").stat().st_mtime_ns
    argv.append("--only=per_loop+raw")
    blind_spot.main(argv)  # finished runs are kept
    assert before == (tmp_path / "per_loop+raw-seed1" / "ckpt.pt").stat().st_mtime_ns

    def refused(*argv):
        with pytest.raises(train.UserError) as error:
            blind_spot.main(list(argv))
        return str(error.value)
    assert "was trained with --lr=0.003" in refused(*argv, "--lr=0.1")
    damaged = tmp_path / "per_loop+raw-seed2"
    (damaged / "ckpt.pt").write_bytes(b"half")
    assert f"to train it anew, delete {damaged} and repeat this command" in refused(*argv)
    shutil.rmtree(damaged)
    left_out = [word for word in argv if not word.startswith("--n_embd")]  # or a preset that has changed since
    assert "was trained with --n_embd=16: choose another --out_dir for --n_embd=128" in refused(*left_out)
    one_seed = [word for word in argv if not word.startswith("--seeds")]
    blind_spot.main([*one_seed, "--overwrite", "--max_steps=1", "--seed=1"])
    assert {r["seed"] for r in train.read_csv(tmp_path / "table1.csv")} == {1, 2}  # what was measured before stays
    assert before != (tmp_path / "per_loop+raw-seed1" / "ckpt.pt").stat().st_mtime_ns


@pytest.mark.parametrize("argv, message", [
    (["table2"], "table2: neither a sweep nor a run; did you mean table1?"),
    (["table1", "--only=per_loop+row"], "--only=per_loop+row: no such condition; did you mean per_loop+raw"),
    (["table1", "--seeds=1,x"], "--seeds=1,x: expected whole numbers, as in 42,101,202"),
    (["table1", "--seeds=-1,2"], "--seeds=-1,2: expected whole numbers, as in 42,101,202"),
    (["table1", "--seed=1", "--seeds=2"], "--seed and --seeds: choose one"),
    (["table1", "--preset=44"], "invalid choice: '44'"),
    (["--seeds=1,2"], "required: SWEEP|RUN")])
def test_a_mistake_is_answered_by_one_line_that_names_the_way_out(argv, message):
    with pytest.raises(train.UserError) as error:
        blind_spot.main(argv)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_leap_is_read_from_the_log_of_every_condition(tmp_path, monkeypatch):
    blind_spot.main(["leap", *TINY, f"--data_dir={tmp_path}/data", "--seeds=1", f"--out_dir={tmp_path}"])
    rows = train.read_csv(tmp_path / "leap.csv")
    assert {r["condition"] for r in rows} == set(blind_spot.LEAP)
    last = train.read_csv(tmp_path / "cut-gradient-seed1" / "log.csv")[-1]
    found = [r["value"] for r in rows if r["condition"] == "cut-gradient"]
    assert found[-1] == last["val_final_norm"]
