"""The claims of arXiv 2606.24898, and the fast paths of looped_gpt.py against naive ones, in float64 where it matters."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import looped_gpt
import train
from looped_gpt import Config, LoopedGPT


TINY = ["--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=4", "--eval_batches=1",
        "--max_steps=2", "--device=cpu", "--compile=off"]


def small(dtype=torch.float64, **fields):
    """A random model in eval mode, and one batch for it."""
    config = Config(**dict(vocab_size=31, block_size=12, n_layer=2, n_head=2, n_embd=16, num_loops=3, embd_std=1.0) | fields)
    model = LoopedGPT(config).to(dtype).eval()
    idx = torch.randint(0, 31, (3, 13))
    return model, idx[:, :-1], idx[:, 1:]


# The naive model, written from the paper's section 3: explicit mask, softmax, norms by hand, every logit kept.

def naive_norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def naive_states(w, c, idx, K):
    T = idx.shape[1]
    h, states = w["wte.weight"][idx] + w["wpe.weight"][:T], []
    mask = torch.ones(T, T).tril() == 0
    for k in range(K):
        if c.inter_loop_norm and k:
            h = naive_norm(h, w["loop_norm.gain"])
        for i in range(c.n_layer):
            x = naive_norm(h, w[f"blocks.{i}.norm1.gain"]) @ w[f"blocks.{i}.attn.qkv.weight"].T
            heads = []
            for n in range(c.n_head):
                hs = c.n_embd // c.n_head
                q, k_, v = (x[..., part * c.n_embd + n * hs:][..., :hs] for part in range(3))
                heads.append((q @ k_.mT / math.sqrt(hs)).masked_fill(mask, -math.inf).softmax(-1) @ v)
            h = h + torch.cat(heads, -1) @ w[f"blocks.{i}.attn.out.weight"].T
            x = naive_norm(h, w[f"blocks.{i}.norm2.gain"]) @ w[f"blocks.{i}.ffn.gate_up.weight"].T
            gate, up = x[..., :4 * c.n_embd], x[..., 4 * c.n_embd:]
            h = h + (gate / (1 + torch.exp(-gate)) * up) @ w[f"blocks.{i}.ffn.down.weight"].T
        states.append(h)
    return states


def naive_loss(w, c, idx, targets):
    states = naive_states(w, c, idx, c.num_loops)
    ces, normed = [], []
    for k, h in enumerate(states, 1):
        if c.readout == "rmsnorm" or c.readout == "final_only" and k == c.num_loops:
            h = naive_norm(h, w["norm.gain"])
        normed.append(h)
        log_p = (h @ w["wte.weight"].T).log_softmax(-1)
        ces.append(-log_p.gather(-1, targets[..., None])[..., 0])
    if c.supervision == "terminal":
        loss = ces[-1].mean()
    elif c.supervision == "per_loop":
        loss = sum(ce.mean() for ce in ces) / len(ces)
    else:
        g = [torch.sigmoid(h @ w["gate.weight"].T + w["gate.bias"])[..., 0]
             for h in (states if c.gate_input == "raw" else normed)]
        p = [g[0], (1 - g[0]) * g[1], (1 - g[0]) * (1 - g[1])]  # three loops
        loss = sum((p_k * ce).mean() for p_k, ce in zip(p, ces)) + 0.1 * sum((p_k * p_k.log()).mean() for p_k in p)
    return loss + c.norm_penalty * sum(h.square().mean() for h in states) / len(states)


VARIANTS = [dict(readout=r, supervision=s) for r in ("rmsnorm", "raw", "final_only")
            for s in ("terminal", "per_loop", "adaptive")] + [dict(norm_penalty=0.01), dict(inter_loop_norm=True)] + [
            dict(readout=r, supervision="adaptive", gate_input="raw") for r in ("rmsnorm", "raw", "final_only")]


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda f: "-".join(map(str, f.values())))
def test_loss_and_gradients_equal_the_naive_model(fields, monkeypatch):
    monkeypatch.setitem(train.CHUNK, "cpu", 31 * 7)  # several chunks, the last one short
    model, idx, targets = small(**fields)
    model.train()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = naive_loss(weights, model.config, idx, targets)
    loss, _ = model.loss(idx, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    loss.backward()
    expected.backward()
    for name, p in model.named_parameters():
        if weights[name].grad is None:  # the gain of a norm that this variant does not read
            assert p.grad is None or not p.grad.any()
        else:
            torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-8, atol=1e-10, msg=name)


def test_states_equal_the_naive_model_beyond_the_trained_loops():
    model, idx, _ = small(inter_loop_norm=True)
    for ours, naive in zip(model.states(idx, 7), naive_states(model.state_dict(), model.config, idx, 7), strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-10)


def test_a_cut_gradient_stays_within_its_loop():
    """The gradient is the sum over loops of that of CE_k where the state before the loop is a constant."""
    model, idx, targets = small(n_layer=1, cut_gradient=True)
    model.loss(idx, targets)[0].backward()
    cut = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with torch.no_grad():
        states = model.states(idx)
    for k, before in enumerate([None, *states[:-1]], start=1):
        h = model.loop(model.embed(idx) if before is None else before)
        ce = F.cross_entropy(model.readout(h).flatten(0, 1), targets.flatten())
        (ce / len(states)).backward()
    for name, p in model.named_parameters():
        if name in cut:
            torch.testing.assert_close(cut[name], p.grad, rtol=0, atol=1e-14)
    whole, *_ = small(n_layer=1)
    whole.load_state_dict(model.state_dict())
    whole.loss(idx, targets)[0].backward()
    assert not torch.allclose(whole.wpe.weight.grad, cut["wpe.weight"], rtol=0, atol=1e-6)


def test_parameter_counts_are_the_papers():
    for preset, millions in (("44m", 43.9), ("129m", 128.8)):
        with torch.device("meta"):
            fields, = train.split_fields(looped_gpt.PRESETS[preset] | {"vocab_size": 20_000}, Config)
            model = LoopedGPT(Config(**fields))
        assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


def test_flops_are_those_that_torch_counts():
    model, idx, targets = small(torch.float32, n_embd=64)
    model.train()
    with FlopCounterMode(display=False) as counter:
        model.loss(idx, targets)[0].backward()
    # torch counts all T^2 of attention, and 5 instead of 4 products in its backward; T << D keeps that below 5%
    assert counter.get_total_flops() == pytest.approx(model.flops_per_token() * idx.numel(), rel=0.05)


# Lemma 1

def test_rmsnorm_readout_hides_scale():
    model, idx, targets = small()
    model.norm.eps = 0.0
    assert looped_gpt.radial_gradient_fraction(model, [(idx, targets)]).max() < 1e-12
    model, idx, targets = small(torch.float32)
    assert looped_gpt.radial_gradient_fraction(model, [(idx, targets)]).max() < 1e-6


def test_raw_readout_and_norm_penalty_see_scale():
    model, idx, targets = small(readout="raw")
    assert looped_gpt.radial_gradient_fraction(model, [(idx, targets)]).min() > 1e-3
    for penalty, sees in ((0.0, False), (0.01, True)):
        model, idx, targets = small(norm_penalty=penalty, num_loops=1)
        h = model.states(idx)[0].detach().requires_grad_()
        rows = model.readout_input(h, final=True).flatten(0, 1)
        loss = train.cross_entropy(rows, model.wte.weight, targets.flatten(), torch.ones(36).double())[0]
        g, = torch.autograd.grad(loss + penalty * h.square().sum(), h)
        fraction = ((g * h).sum(-1).abs() / (g.norm(dim=-1) * h.norm(dim=-1))).mean()
        assert (fraction > 1e-3) == sees


def test_the_adaptive_loss_sees_scale_through_a_gate_on_the_raw_state_only():
    """<g, H> / (||g|| ||H||) of the whole adaptive loss, H read out by RMSNorm and not fed on; loop K has no gate."""
    for gate_input, sees in (("raw", True), ("normed", False)):
        model, idx, targets = small(supervision="adaptive", gate_input=gate_input)
        model.norm.eps = 0.0
        states = [h.detach().requires_grad_() for h in model.states(idx)]
        model.states = lambda idx: states
        for h, g in zip(states, torch.autograd.grad(model.loss(idx, targets)[0], states)):
            fraction = ((g * h).sum(-1).abs() / (g.norm(dim=-1) * h.norm(dim=-1))).mean()
            assert fraction > 1e-3 if sees and h is not states[-1] else fraction < 1e-12


def test_tokens_without_a_gradient_do_not_spoil_the_radial_fraction():
    model, idx, targets = small(torch.float32, readout="raw", n_embd=512)
    idx[:, 4] = targets[:, 4] = idx[:, 5]  # predicted with certainty: its softmax is saturated and g = 0
    assert looped_gpt.radial_gradient_fraction(model, [(idx, targets)]).isfinite().all()


def test_the_loss_is_blind_to_rescaled_states_only_through_rmsnorm():
    for readout, blind in (("rmsnorm", True), ("raw", False)):
        model, idx, targets = small(readout=readout)
        h = model.states(idx)[-1] * 10
        ces = [looped_gpt.token_loss(model, a * h, 3, targets).mean() for a in (1, 10)]
        assert (abs(ces[0] - ces[1]) < 1e-5) == blind


# Lemma 2

def test_scale_dynamics_measures_what_the_states_do():
    model, idx, targets = small()
    table = looped_gpt.scale_dynamics(model, [(idx, targets)], 6)
    h2, h3 = model.states(idx, 6)[1:3]
    cosine = F.cosine_similarity(h2, h3, dim=-1)
    expected = torch.stack([h2.norm(dim=-1).mean(), ((h3 - h2) * h2).sum(-1).div(h2.norm(dim=-1)).mean(),
                            (2 - 2 * cosine).sqrt().mean()])  # the chord between two unit vectors
    torch.testing.assert_close(table[1, :3], expected)
    assert table.shape == (5, 4)


# Interventions and exits

def test_freeze_loop1_keeps_norms_and_remove_radial_keeps_increments_tangent():
    model, idx, _ = small()
    first, *later = model.states(idx, 6, clamp="freeze_loop1")
    for h in later:
        torch.testing.assert_close(h.norm(dim=-1), first.norm(dim=-1))
    states = model.states(idx, 6, clamp="remove_radial")
    for before, after in zip(states, states[1:]):
        torch.testing.assert_close(((after - before) * before).sum(-1), torch.zeros(3, 12).double(), rtol=0, atol=1e-9)


def test_exit_probabilities_by_hand():
    p = looped_gpt.exit_probabilities(torch.full((3, 1), 3 / 4).double())
    torch.testing.assert_close(p[:, 0], torch.tensor([3 / 4, 3 / 16, 1 / 16]).double())


# Generation

@pytest.mark.parametrize("num_loops", [1, 3, 5])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_cached_generation_equals_uncached_past_the_window(num_loops, temperature):
    model, idx, _ = small(readout="final_only", inter_loop_norm=True)
    options = dict(num_loops=num_loops, temperature=temperature, top_k=20, seed=1)
    cached = model.generate(idx[:, :5], 40, **options)
    assert cached.shape == (3, 45)
    assert torch.equal(cached, model.generate(idx[:, :5], 40, **options, use_cache=False))
    logits = model.readout(model.states(idx[:, :5], num_loops)[-1][:, -1], final=num_loops >= 3)
    if temperature == 0:
        assert torch.equal(cached[:, 5], logits.argmax(-1))


def test_a_prompt_longer_than_the_window_is_read_from_its_end():
    model, idx, _ = small()
    long = torch.cat([idx, idx, idx], 1)
    assert torch.equal(model.generate(long, 3, temperature=1e-40, seed=1), model.generate(long, 3, temperature=0))
    new = model.generate(long, 3, temperature=0)
    assert torch.equal(new[:, 36], model.readout(model.states(long[:, -12:])[-1][:, -1]).argmax(-1))


# Memory and the command line

def test_no_tensor_of_vocabulary_size_per_token_is_kept_for_backward():
    model, idx, targets = small(vocab_size=5000)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        model.loss(idx, targets)
    assert max(kept) == model.wte.weight.numel() < targets.numel() * 5000


def test_bfloat16_loss_is_close_to_float32():
    model, idx, targets = small(torch.float32, embd_std=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        low = model.loss(idx, targets)[0]
    assert low.item() == pytest.approx(model.loss(idx, targets)[0].item(), rel=2e-2)  # 8 bits of mantissa


def test_a_run_answers_with_one_small_table_that_shows_the_claim(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "matmul_peak", lambda *_: 1e12)  # which takes seconds to measure
    argv = ["looped_gpt", *TINY, "--num_loops=3", f"--data_dir={tmp_path}"]
    for readout, sees in (("rmsnorm", 0), ("raw", 3), ("final_only", 2)):
        out = tmp_path / readout
        train.main([*argv, f"--readout={readout}", f"--out_dir={out}"])
        files = set(out.iterdir())
        capsys.readouterr()
        looped_gpt.main([str(out), f"--data_dir={tmp_path}"])
        first, head, *loops, lemma1, lemma2 = capsys.readouterr().out.splitlines()
        assert first == f"readout {readout}, supervision per_loop, norm penalty 0.0, K = 3" and len(loops) == 3
        for name in ("CE", "PPL", "scale", "radial gradient fraction", "angular step"):
            assert name in head
        assert f"cross-entropies of {sees} of the 3 loops see the scale of the state" in lemma1 and "angular step from" in lemma2
        model, options, tokenizer = train.load_model(out, "looped_gpt", LoopedGPT)
        _, batches = train.validation_batches(options, tokenizer, model, options.eval_batches)
        ce, dynamics = looped_gpt.loss_per_loop(model, batches), looped_gpt.scale_dynamics(model, batches, 4)
        for k, line in enumerate(loops):
            values = [k + 1, ce[k].item(), ce[k].exp().item(), dynamics[k, 0].item(),
                      looped_gpt.radial_gradient_fraction(model, batches)[k].item(), dynamics[k, 2].item()]
            assert [float(x) for x in line.split()] == pytest.approx(values, rel=0.06, abs=1e-5)  # printed rounded
        assert set(out.iterdir()) == files  # no figure
    for argument, message in (("--loops=1,2", "--loops has no effect here"), ("--eval=x", "--eval: no such field")):
        with pytest.raises(train.UserError, match=message):
            looped_gpt.main([str(out), argument])


@pytest.mark.parametrize("fields, message", [
    (dict(num_loops=0), "num_loops"), (dict(n_embd=130), "not divisible by --n_head=4"), (dict(dropout=1.5), "dropout"),
    (dict(norm_penalty=-1.0), "norm_penalty")])
def test_impossible_configs_are_refused(fields, message):
    with pytest.raises(train.UserError, match=message):
        Config(**fields)
