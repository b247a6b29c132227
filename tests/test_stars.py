"""Claims of arXiv 2605.26733, as tests of stars.py."""
import dataclasses, math, sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import stars, train

SMALL = dict(digits=2, block_size=10, n_head=2, n_embd=8, mlp_width=16)
PLACEMENTS, NORMS = ("pre", "post", "pre_sandwich", "post_sandwich"), ("layernorm", "rmsnorm", "simple")


def small_model(seed=0, spread=1.0, **fields):
    """A float64 model whose weights are large enough that its Jacobian is far from that of nothing."""
    torch.manual_seed(seed)
    model = stars.LoopedTransformer(stars.Config(**SMALL | fields)).double()
    for block in model.blocks:
        for p in block.parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=spread / math.sqrt(p.shape[1]))
    return model


def small_data(**options):
    return stars.AdditionData(train.Options(**dict(dataset="addition", batch_size=16) | options), stars.Config(**SMALL))


def state(rows=3, T=4, D=8, seed=1):
    return torch.randn(rows, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def full_jacobians(model, h):
    """(B, N, N): row i's Jacobian, column by column of the definition."""
    one = lambda x: model.step(x.view(1, *h.shape[1:])).flatten()
    return torch.stack([torch.autograd.functional.jacobian(one, x.flatten()) for x in h]).detach()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------------------------
# The loop map

@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fields", [{}, dict(residual_scale=2 ** 0.25, n_layer=2, n_prelude=1, n_coda=1, state_norm=True)])
def test_every_structure_decodes_the_same_with_a_cache_slot_per_loop_and_layer(placement, norm, fields):
    model = small_model(placement=placement, norm=norm, **fields)
    idx, _ = small_data().batch("val", 0)
    for loops in (1, 3):
        cached = model.generate(idx[:, :6], 5, loops)
        assert torch.equal(cached, model.generate(idx[:, :6], 5, loops, use_cache=False))
        assert cached.shape == (16, 11) and torch.equal(cached[:, :6], idx[:, :6])


@pytest.mark.parametrize("fields", [{}, dict(placement="pre_sandwich", norm="rmsnorm", state_norm=True, n_layer=2)])
def test_the_loop_map_is_a_pure_function_of_each_row_of_the_state(fields):
    model, h = small_model(**fields), state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept, out = h.clone(), model.step(h)
    assert torch.equal(h, kept) and torch.equal(out, model.step(h))
    assert torch.allclose(out[1:2], model.step(h[1:2]), atol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ahead = h.clone()
    ahead[:, -1] += 1
    assert torch.equal(model.step(ahead)[:, :-1], out[:, :-1]), "a token may not see a later one"


@pytest.mark.parametrize("norm", NORMS)
def test_external_norms_bound_the_state_and_internal_ones_let_it_grow(norm):
    for placement in PLACEMENTS:
        model = small_model(placement=placement, norm=norm)
        norms = stars.convergence(model, small_data().batch("val", 0)[0], 200)[:, 1]
        if placement in ("post", "post_sandwich"):
            assert torch.allclose(norms, torch.full_like(norms, math.sqrt(8)), rtol=1e-3)
        else:
            assert norms[-1] > 10 * norms[0] and norms[-1] > 1.5 * norms[99]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_are_the_formulas_of_the_normalisation_study(placement):
    model, x, a = small_model(placement=placement, residual_scale=1.7), state(), 1.7
    block = model.blocks[0]
    n = lambda y: (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    for f in (block.attn, block.mlp):
        x = {"pre": lambda: a * x + f(n(x)), "pre_sandwich": lambda: a * x + n(f(n(x))),
             "post": lambda: n(a * x + f(x)), "post_sandwich": lambda: n(a * x + f(n(x)))}[placement]()
    assert torch.allclose(block(state()), x, atol=1e-9)


@pytest.mark.parametrize("name", ["postnorm", "post ", "sideways"])
def test_a_placement_that_is_none_of_the_four_is_an_error(name):
    model = small_model()
    model.blocks[0].placement = name  # past the check of the config's fields
    with pytest.raises(train.UserError, match=f"--placement={name}: no such placement"):
        model.step(state())


@pytest.mark.parametrize("norm", NORMS)
def test_the_readout_is_through_an_affine_layernorm_whatever_the_norm_of_the_loop(norm):
    model, h = small_model(norm=norm), state()
    torch.nn.init.normal_(model.norm.gain)
    torch.nn.init.normal_(model.norm.bias)
    unit = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    expected = (unit * model.norm.gain + model.norm.bias) @ model.wte.weight.T
    torch.testing.assert_close(model.readout(h), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_within_the_loop_is_of_the_loops_kind_and_read_out_once(norm):
    model, h = small_model(norm=norm, state_norm=True), state()
    centred = h if norm == "rmsnorm" else h - h.mean(-1, keepdim=True)  # gains are 1 and biases 0 at the start
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    model.looped = range(0)  # a loop of its norm alone
    torch.testing.assert_close(model.step(h), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.readout(h), h @ model.wte.weight.T, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# JSRR

@pytest.mark.parametrize("fields", [{}, dict(placement="pre", norm="rmsnorm"),
                                    dict(norm="simple", state_norm=True, n_layer=2)])
def test_products_are_those_of_the_full_jacobian(fields):
    model, h = small_model(**fields), state()
    J, v = full_jacobians(model, h), stars.random_directions(h, generator())
    for mode, matrix in (("jvp", J), ("vjp", J.transpose(1, 2))):
        after, Jv = stars.jacobian_product(model.step, h, v, mode)
        assert torch.allclose(after, model.step(h), atol=1e-12)
        assert torch.allclose(Jv.flatten(1), (matrix @ v.flatten(1)[:, :, None])[:, :, 0], atol=1e-12)


@pytest.mark.parametrize("mode", ["jvp", "vjp", "jsrr"])
@pytest.mark.parametrize("detach", [False, True])
def test_jsrr_has_the_gradient_of_finite_differences(mode, detach):
    """Over a weight and over the state; detached, the state's part is missing and only that. Both kinds of product, that in
    forward mode without LayerNorm."""
    model = small_model(jsrr_detach=detach, jsrr_rows=1.0, norm="rmsnorm" if mode == "jvp" else "layernorm")
    h, weight = state(rows=2).requires_grad_(), model.blocks[0].mlp.up.weight

    def jsrr():
        torch.manual_seed(5)
        if mode == "jsrr":
            return model.jsrr(h)
        at = h.detach() if detach else h
        return stars.jacobian_product(model.step, at, stars.random_directions(h), mode)[1].square().sum() / len(h)
    of_weight, of_state = torch.autograd.grad(jsrr(), (weight, h), allow_unused=True)
    assert (of_state is None) == detach
    for tensor, gradient in ((weight, of_weight), (h, of_state)):
        if gradient is None:
            continue
        direction, eps = torch.randn_like(tensor), 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                tensor += sign * eps * direction
            values.append(jsrr().item())
            with torch.no_grad():
                tensor -= sign * eps * direction
        assert (gradient * direction).sum().item() == pytest.approx((values[0] - values[1]) / (2 * eps), rel=1e-5)


@pytest.mark.parametrize("mode", ["jvp", "vjp"])
def test_one_step_of_jsrr_measures_the_mean_gain_not_the_spectral_radius(mode):
    model, h = small_model(jsrr_rows=1.0), state(rows=1)
    J = full_jacobians(model, h)[0]
    mean_gain = J.square().sum().item() / len(J)
    rho, sigma = torch.linalg.eigvals(J).abs().max().item(), torch.linalg.matrix_norm(J, 2).item()
    many = h.repeat(20_000, 1, 1)  # a v of its own for each row
    if mode == "vjp":  # as JSRR has it
        estimate = model.jsrr(many).item()
    else:
        Jv = stars.jacobian_product(model.step, many, stars.random_directions(many), mode)[1]
        estimate = Jv.square().sum().item() / len(many)
    assert estimate == pytest.approx(mean_gain, rel=0.02)
    assert abs(estimate - rho ** 2) > 0.2 * rho ** 2 and estimate < 0.5 * sigma ** 2


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_jsrr_is_taken_at_the_state_that_is_read_out(num_loops):
    """L_JSRR^(t) has J at h^(t): with one loop too, where J at h^(t-1) would be that at the raw embeddings."""
    model, (idx, targets) = small_model(jsrr_rows=1.0), small_data().batch("train", 0)
    torch.manual_seed(3)
    measured = model.loss(idx, targets, num_loops)[1]["jsrr"].item()
    h = list(stars.trajectory(model, idx, num_loops))
    torch.manual_seed(3)
    v = stars.random_directions(h[-1]).flatten(1)
    gains = {t: (full_jacobians(model, h[t]).transpose(1, 2) @ v[:, :, None]).square().sum((1, 2)).mean().item()
             for t in (num_loops, num_loops - 1)}
    assert measured == pytest.approx(gains[num_loops], rel=1e-9)
    assert abs(gains[num_loops - 1] / gains[num_loops] - 1) > 0.05, "the two states are told apart"


def test_at_the_raw_embeddings_the_jacobian_is_a_thousand_times_larger():
    """Why JSRR at h^(t-1) made spikes wherever one loop was drawn: embeddings have std 0.02, a normed state has 1."""
    torch.manual_seed(0)
    model = stars.LoopedTransformer(stars.Config(n_embd=512, n_head=8, mlp_width=1024))
    idx, _ = stars.AdditionData(train.Options(dataset="addition", batch_size=2), model.config).batch("train", 0)
    embedded, once = list(stars.trajectory(model, idx, 1))
    gain = lambda h: stars.jacobian_gain(model, h, 16, generator()).square().mean().item()
    assert gain(embedded) > 1000 and 0.8 < gain(once) < 1.1


def test_jsrr_costs_one_more_loop_of_its_rows():
    for fields, rows_of_jsrr in ((dict(jsrr_rows=0.25), 4), (dict(jsrr_rows=1.0), 16)):
        model, rows = small_model(**fields), []
        step = model.step
        model.step = lambda h: rows.append(len(h)) or step(h)
        model.loss(*small_data().batch("train", 0), num_loops=5)
        assert rows == [16] * 5 + [rows_of_jsrr]


def test_the_loss_is_the_convex_combination():
    model, batch = small_model(jsrr_lambda=0.3), small_data().batch("train", 0)
    combined, metrics = model.loss(*batch, num_loops=3)
    ce, plain = model.loss(*batch, num_loops=3, with_jsrr=False)
    assert combined.item() == pytest.approx(0.7 * ce.item() + 0.3 * metrics["jsrr"].item()) and "jsrr" not in plain
    model.config = dataclasses.replace(model.config, jsrr_lambda=0.0)
    assert model.loss(*batch, num_loops=3)[0].item() == ce.item()
    model.config = dataclasses.replace(model.config, l2_penalty=0.5)
    h = list(stars.trajectory(model, batch[0], 3))
    update = (h[3] - h[2]).norm(dim=-1).mean().item()
    assert model.loss(*batch, num_loops=3)[0].item() == pytest.approx(ce.item() + 0.5 * update)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_training_on_jsrr_alone_shrinks_the_gain_where_it_is_taken(seed):
    """At h^(4). Whether the loop then converges is another matter: from seed 2 the state goes on in steps of 1.7."""
    model = small_model(seed, jsrr_lambda=1.0, jsrr_rows=1.0, spread=3.0)
    idx, targets = small_data().batch("train", 0)
    gain = lambda: stars.jacobian_gain(model, list(stars.trajectory(model, idx, 4))[-1], 64, generator()).square().mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = gain()
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(idx, targets, num_loops=4)[0].backward()
        optimizer.step()
    assert gain() < 0.4 * before


# ---------------------------------------------------------------------------------------------------------------------
# The instruments, against the full Jacobian

@pytest.mark.parametrize("fields", [{}, dict(placement="pre", norm="rmsnorm"), dict(norm="simple", n_layer=2)])
def test_instruments_agree_with_the_full_jacobian(fields):
    model, h = small_model(**fields), state(rows=2)
    J = full_jacobians(model, h)
    rho, N = torch.linalg.eigvals(J).abs().amax(-1), J.shape[-1]
    close = lambda a, b, tolerance: torch.allclose(a, b, rtol=tolerance)
    copies = stars.jacobian_gain(model, h.repeat(30, 1, 1), 10, generator()).view(30, 2)  # each with v of its own
    assert close(copies.square().mean(0).sqrt(), J.flatten(1).norm(dim=1) / math.sqrt(N), 0.05)
    assert close(stars.sigma_max(model, h, 150, generator()), torch.linalg.matrix_norm(J, 2), 1e-6)
    assert close(stars.spectral_radius_arnoldi(model, h, N, generator()), rho, 1e-8)
    assert close(stars.spectral_radius_power(model, h, 300, generator()), rho, 0.02)


def test_arnoldi_finds_the_spectral_radius_in_a_small_krylov_space():
    model, h = small_model(), state(T=10)
    rho = torch.linalg.eigvals(full_jacobians(model, h)).abs().amax(-1)
    assert torch.allclose(stars.spectral_radius_arnoldi(model, h, 40, generator()), rho, rtol=1e-3)


def test_a_fixed_point_attracts_where_the_spectral_radius_is_below_one():
    model = small_model(spread=0.3)
    h = state()
    for _ in range(1000):
        h = model.step(h).detach()
    rho = stars.spectral_radius_arnoldi(model, h, 32, generator())
    error = 1e-6 * stars.random_directions(h, generator())
    near = h + error
    for _ in range(60):
        near = model.step(near).detach()
    assert (model.step(h) - h).norm() < 1e-10 and (rho < 1).all()
    measured = ((near - h).flatten(1).norm(dim=1) / 1e-6) ** (1 / 60)
    assert torch.allclose(measured, rho, rtol=0.15)


# ---------------------------------------------------------------------------------------------------------------------
# The loop counts, the task and the decoding

def test_loop_counts_are_rounded_and_clipped():
    draw = lambda **fields: torch.tensor(stars.sample_loops(stars.Config(**fields), np.random.default_rng(0), 20_000)).double()
    t = draw(loop_mu=2.0, loop_sigma=0.7, max_loops=100)
    assert t.median() == 7 and t.min() >= 1 and t.max() <= 100
    assert t.mean().item() == pytest.approx(math.exp(2 + 0.7 ** 2 / 2), rel=0.02)
    t = draw(loop_sampling="uniform", min_loops=3, max_loops=9)
    assert [(t == n).double().mean().item() for n in range(2, 11)] == pytest.approx([0] + [1 / 7] * 7 + [0], abs=0.01)
    t = draw(loop_sampling="poisson", num_loops=6, min_loops=0 + 1)
    assert t.mean().item() == pytest.approx(6, rel=0.02) and t.var().item() == pytest.approx(6, rel=0.1)
    assert draw(loop_sampling="lognormal", loop_mu=5.0).unique().tolist() == [16]
    assert draw(loop_sampling="fixed", num_loops=5).unique().tolist() == [5]


@pytest.mark.parametrize("digits", [2, 4, 8])
def test_sums_are_right_reversed_and_masked(digits):
    config = stars.Config(digits=digits)
    data = stars.AdditionData(train.Options(dataset="addition", batch_size=200), config)
    for split in ("train", "val"):
        idx, targets = data.batch(split, 3)
        assert idx.shape == targets.shape == (200, 3 * digits + 4)
        for row, wanted in zip(idx.tolist(), targets.tolist()):
            question, answer = data.tokenizer.decode(row).split("=")
            a, b = question.split("+")
            supervised = data.tokenizer.decode([t for t in wanted if t >= 0])
            assert len(a) == len(b) == digits and a[0] != "0" != b[0]
            assert supervised == f" {str(int(a) + int(b))[::-1]}§"
            assert answer.startswith(supervised[:-1]) and set(wanted[:2 * digits + 1]) == {-1}


def test_the_example_of_the_docs():
    data = stars.AdditionData(train.Options(dataset="addition"), stars.Config())
    idx, targets = data.encode(np.array([1750, 9999]), np.array([4733, 1000]))
    assert [data.tokenizer.decode(row) for row in idx.tolist()] == ["1750+4733= 3846§", "9999+1000= 99901"]
    assert targets[:, -1].tolist() == [-1, data.tokenizer.ids["§"]]


def test_no_held_out_pair_is_ever_trained_on_in_either_order():
    data = small_data(batch_size=4000)
    pairs = {split: {tuple(pair) for i in range(5) for pair in data.operands(split, i, 4000).T.tolist()}
             for split in ("train", "val")}
    assert len(pairs["train"]) > 7000 and 150 < len(pairs["val"]) < 400
    assert not pairs["train"] & pairs["val"] and not pairs["train"] & {(b, a) for a, b in pairs["val"]}


def test_batches_are_a_function_of_seed_and_index_and_held_out_sums_of_the_index_alone():
    one, other = small_data(seed=1), small_data(seed=2)
    same = lambda x, y: torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])
    assert same(one.batch("train", 5), small_data(seed=1).batch("train", 5))
    assert not same(one.batch("train", 5), one.batch("train", 6))
    assert not same(one.batch("train", 5), other.batch("train", 5))
    assert same(one.batch("val", 5), other.batch("val", 5))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two-digit sums, trained until some are right: the path of the run."""
    out = tmp_path_factory.mktemp("stars") / "run"
    train.main(["stars", "--digits=2", "--n_embd=64", "--mlp_width=256", "--max_steps=160", "--batch_size=128",
                "--loop_mu=1", "--eval_interval=80", "--eval_batches=2", f"--out_dir={out}"])
    return out


def test_training_learns_sums_it_has_not_seen(run):
    rows = train.read_csv(run / "log.csv")
    assert rows[0]["val_exact"] == 0 and rows[-1]["val_loss"] < 0.5 * rows[0]["val_loss"]


def decoded_share(model, idx, targets, num_loops):
    """Share of the sums whose whole answer, end mark included, greedy decoding gets right."""
    question = int((targets[0] >= 0).int().argmax()) + 1
    written = model.generate(idx[:, :question], idx.shape[1] + 1 - question, num_loops)[:, 1:]
    return ((written == targets) | (targets < 0)).all(1).float().mean().item()


def test_greedy_decoding_is_right_exactly_where_every_forced_token_is(run):
    model, options, _ = train.load_model(run, "stars", stars.LoopedTransformer)
    idx, targets = stars.held_out_sums(model, options, 300)
    for loops in (1, 2, 7):
        assert decoded_share(model, idx, targets, loops) == pytest.approx(
            model.loss(idx, targets, loops)[1]["exact"].item(), abs=1e-6)


def test_resuming_is_exact(run, tmp_path):
    command = ["stars", "--digits=2", "--n_embd=16", "--mlp_width=32", "--batch_size=8", "--max_steps=8",
               "--dropout=0.1", "--schedule=constant", "--log_interval=1", "--eval_interval=4", "--eval_batches=1"]
    train.main(command + [f"--out_dir={tmp_path}/whole"])
    train.main(command + [f"--out_dir={tmp_path}/parts", "--max_steps=4"])
    train.main(["stars", f"--out_dir={tmp_path}/parts", "--resume", "--max_steps=8"])
    whole, parts = (train.load_checkpoint(tmp_path / name, "stars")["weights"] for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_run_prints_one_table_and_its_answers(run, capsys):
    files = set(run.iterdir())
    stars.main([str(run), "--loops=1,4,20"])
    settings, title, *rows = capsys.readouterr().out.splitlines()
    assert "2000 held-out rows" in settings and "exact match" in title and [int(row.split()[0]) for row in rows] == [1, 4, 20]
    model, options = stars.load_run(run)
    idx, targets = stars.held_out_sums(model, options, 2000)
    before, at, after = list(stars.trajectory(model, idx[:250], 5))[3:]
    expected = [4, 100 * decoded_share(model, idx, targets, 4),
                ((after - at).flatten(1).norm(dim=1) / at.flatten(1).norm(dim=1)).mean().item(), at.norm(dim=-1).mean().item()]
    assert [float(cell.rstrip("%")) for cell in rows[1].split()] == pytest.approx(expected, rel=0.01)
    assert set(run.iterdir()) == files
    stars.main([str(run), "--ask=17+47", "--loops=1,4"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("17+47=" in line for line in lines)


def test_answers_are_right_only_with_their_end_mark_and_read_forwards(capsys, monkeypatch):
    model, data = small_model(), small_data()
    for written, verdict in ((" 46§_", "64, right"), (" 4600", "0064, wrong"), (" 47§_", "74, wrong"), ("46§__", "64, wrong")):
        monkeypatch.setattr(model, "generate", lambda idx, n, loops: torch.tensor(
            [idx[0].tolist() + data.tokenizer.encode(written)]))
        stars.ask(model, data, "17+47", [4])
        assert verdict in capsys.readouterr().out


def test_a_task_says_alone_what_a_right_answer_is(monkeypatch):
    """Another operation, as an exercise has it: data and answers are of it then, and so is whatever scores them."""
    class SubtractionData(stars.AdditionData):
        symbol = "-"
        vocab = [*"0123456789-= §_"]
        result = staticmethod(lambda a, b: a - b)
    monkeypatch.setitem(stars.DATA, "addition", SubtractionData)
    model = small_model()
    idx, targets = stars.held_out_sums(model, train.Options(dataset="addition"), 300)
    data = SubtractionData(train.Options(dataset="addition"), model.config)
    assert data.text(17, 47) == "17-47= 03-§" and data.parse("17-47=") == (17, 47)
    for row, wanted in zip(idx.tolist(), targets.tolist()):
        a, b = map(int, data.tokenizer.decode(row).split("=")[0].split("-"))
        assert data.tokenizer.decode([t for t in wanted if t >= 0]) == f" {str(a - b)[::-1]}§"

    def right(start, n, loops):  # what a model would write that knows how
        texts = [data.text(*data.parse(data.tokenizer.decode(row))).ljust(11, "_") for row in start.tolist()]
        return torch.tensor([data.tokenizer.encode(text) for text in texts])
    model.generate = right
    assert decoded_share(model, idx, targets, 4) == 1


@pytest.mark.parametrize("arguments, message", [
    (["--jsrr_lambda=1.5"], "--jsrr_lambda=1.5: expected a number from 0 to 1"),
    (["--jsrr_lambda=nan"], "from 0 to 1"),
    (["--loop_sigma=-0.1"], "--loop_sigma=-0.1: expected a number from 0 to"),
    (["--num_loops=0"], "--num_loops=0: expected a whole number from 1 to"),
    (["--min_loops=9", "--max_loops=4"], "--min_loops=9 is more than --max_loops=4"),
    (["--digits=9"], "--digits=9: expected a whole number from 2 to 8"), (["--digits=1"], "from 2 to 8"),
    (["--jsrr_rows=0"], "from 0.001 to 1"), (["--jsrr_rows=1.5"], "from 0.001 to 1"),
    (["--placement=sideways"], "invalid choice"),
    (["--n_embd=130"], "not divisible"),
])
def test_bad_settings_are_named_in_one_line(arguments, message, tmp_path):
    with pytest.raises(train.UserError) as error:
        train.main(["stars", f"--out_dir={tmp_path}", *arguments])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("question", ["17", "17+", "17+4733", "a+b", "-17+47", "17+-4", "07+11", "17+47+11", "17*47",
                                      "1７+47", "="])
def test_sums_it_was_not_trained_on_are_refused_in_one_line(run, question):
    with pytest.raises(train.UserError, match="trained on sums of two numbers of 2 digits each, from 10 to") as error:
        stars.main([str(run), f"--ask={question}"])
    assert "\n" not in str(error.value)


def test_a_model_of_text_is_asked_no_sums(tmp_path):
    train.main(["stars", "--dataset=python-docs", "--n_embd=16", "--mlp_width=32", "--batch_size=4", "--max_steps=1",
                "--eval_batches=1", f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/run"])
    for arguments in (["--ask=1750+4733"], ["--loops=1,2"]):
        with pytest.raises(train.UserError, match="needs a model that was trained on sums"):
            stars.main([f"{tmp_path}/run", *arguments])


@pytest.mark.parametrize("loops", ["0", "", "-1", "4,0", "x", "1,,2"])
def test_loop_counts_below_one_are_refused(run, loops):
    with pytest.raises(train.UserError, match="expected a"):
        stars.main([str(run), "--ask=17+47", f"--loops={loops}"])


def test_addition_is_refused_to_models_of_other_tasks(tmp_path):
    with pytest.raises(train.UserError, match="--dataset=addition: no such data set or file, nor a task of this model"):
        train.load_data(train.Options(dataset="addition", data_dir=str(tmp_path)), SimpleNamespace(block_size=8, vocab_size=9))
