"""The claims of arXiv 2608.08888, and fullbandwidth.py against naive references, in float64 where it matters."""
import contextlib, math, re, zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fullbandwidth
import train
from fullbandwidth import Config, FullBandwidthGPT
from train import UserError


@pytest.fixture(autouse=True)
def no_benchmark(monkeypatch):
    monkeypatch.setattr(train, "matmul_peak", lambda device, dtype: 1e12)  # most of a second in every run


def small(dtype=torch.float64, **fields):
    """A random model in eval mode, and one batch for it."""
    config = Config(**dict(vocab_size=31, block_size=12, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, mlp_width=24,
                           window=5, full_every=3, head_gates=True) | fields)
    model = FullBandwidthGPT(config).to(dtype).eval()
    for p in model.parameters():
        if p.ndim == 1:  # gains: anything but 1
            torch.nn.init.uniform_(p, 0.5, 1.5)
    idx = torch.randint(0, config.vocab_size, (3, 13))
    return model, idx[:, :-1], idx[:, 1:]


# The naive model, written from the paper for one sequence: one position, one head at a time, nothing shared or cached.

def naive_norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def naive_rotate(x, t, theta):
    half = len(x) // 2
    turned = torch.view_as_complex(torch.stack([x[:half], x[half:]], -1))
    turned = turned * torch.polar(torch.ones(half).double(), t * theta ** (-torch.arange(half).double() / half))
    return torch.cat([turned.real, turned.imag])


def naive_stack(w, c, x):
    """Final-normed states of inputs x (T, D)."""
    T, hs, group = len(x), c.n_embd // c.n_head, c.n_head // c.n_kv_head
    x = naive_norm(x, w["norm_in.gain"])
    for i in range(c.n_layer):
        g = {name[len(f"blocks.{i}."):]: p for name, p in w.items() if name.startswith(f"blocks.{i}.")}
        a = naive_norm(x, g["norm1.gain"])
        q, k, v = (a @ g["attn.qkv.weight"].T).split([c.n_embd, c.n_kv_head * hs, c.n_kv_head * hs], -1)
        reach = c.window if c.window and (i + 1) % c.full_every else c.block_size
        rows = []
        for t in range(T):
            heads = []
            for n in range(c.n_head):
                head = lambda z, m, s, gain: naive_rotate(naive_norm(z[s, m * hs:][:hs], gain), s, c.rope_theta)
                seen = range(max(0, t - reach + 1), t + 1)
                keys = torch.stack([head(k, n // group, s, g["attn.k_norm.gain"]) for s in seen])
                values = v[seen[0]:t + 1, n // group * hs:][:, :hs]
                y = (keys @ head(q, n, t, g["attn.q_norm.gain"]) / math.sqrt(hs)).softmax(0) @ values
                heads.append(y * torch.sigmoid(a[t] @ g["attn.gate.weight"][n]))
            rows.append(torch.cat(heads))
        x = x + naive_norm(torch.stack(rows) @ g["attn.out.weight"].T, g["norm2.gain"]) / math.sqrt(2 * c.n_layer)
        gate, up = (naive_norm(x, g["norm3.gain"]) @ g["mlp.gate_up.weight"].T).chunk(2, -1)
        y = gate * torch.sigmoid(gate) * up @ g["mlp.down.weight"].T
        x = x + naive_norm(y, g["norm4.gain"]) / math.sqrt(2 * c.n_layer)
    return naive_norm(x, w["norm.gain"])


def naive_embed(w, idx):
    return naive_norm(w["wte.weight"][idx], w["norm_in.gain"])


def naive_fuse(w, e, h):
    """Equation 4."""
    return (w["W_U.weight"] @ h) * torch.sigmoid(w["W_G.weight"] @ e)


def naive_passes(w, c, idx, k):
    """Equations 10 and 11 for one sequence (T,)."""
    e = naive_embed(w, idx)
    states = [naive_stack(w, c, e)]
    for _ in range(k - 1):
        fused = [naive_fuse(w, e[t], states[-1][t - 1]) for t in range(1, len(idx))]
        states.append(naive_stack(w, c, torch.stack([e[0], *fused])))
    return states


def naive_recurrence(w, c, idx, prefill=1):
    """One position after another, each fused with the state of the one before; the first `prefill` are plain."""
    e = naive_embed(w, idx)
    inputs = list(e[:prefill])
    for t in range(prefill, len(idx)):
        inputs.append(naive_fuse(w, e[t], naive_stack(w, c, torch.stack(inputs))[-1]))
    return naive_stack(w, c, torch.stack(inputs))


# Passes and the loss

def test_passes_equal_the_naive_model():
    model, idx, _ = small()
    w = model.state_dict()
    for row in range(2):
        for ours, naive in zip(model.states(idx, 3), naive_passes(w, model.config, idx[row], 3), strict=True):
            torch.testing.assert_close(ours[row], naive, rtol=1e-10, atol=1e-10)


def test_pass_k_is_the_sequential_recurrence_at_every_position_up_to_k():
    model, idx, _ = small()
    exact = naive_recurrence(model.state_dict(), model.config, idx[0])
    for k, h in enumerate(model.states(idx, 12), 1):
        torch.testing.assert_close(h[0, :k], exact[:k], rtol=1e-10, atol=1e-10)
        if k < 12:
            assert (h[0, k] - exact[k]).abs().max() > 1e-6  # and not before


def test_fusion_is_equation_4():
    model, *_ = small()
    e, h = torch.randn(2, 32).double()
    torch.testing.assert_close(model.fuse(e, h), model.W_U.weight @ h / (1 + torch.exp(-model.W_G.weight @ e)))
    assert not model.fuse(e, torch.zeros_like(h)).any()  # dropping the state drops the input: it cannot be ignored


def test_the_other_fusions_leave_the_token_when_the_state_is_dropped():
    for fusion in ("add", "concat"):
        model, *_ = small(fusion=fusion)
        e, h = torch.randn(2, 32).double()
        dropped = model.fuse(e, torch.zeros_like(h))
        torch.testing.assert_close(model.fuse(e, h) - dropped, model.W_U.weight @ h)
        torch.testing.assert_close(dropped, e if fusion == "add" else model.W_G.weight @ e)


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_loss_is_equation_12_and_its_gradients_run_through_every_pass(num_passes, monkeypatch):
    monkeypatch.setitem(train.CHUNK, "cpu", 31 * 7)  # several chunks, the last one short
    model, idx, targets = small(block_size=6)
    idx, targets = idx[:2, :6], targets[:2, :6].clone()
    targets[0, 2] = -1
    model.train()
    model.config.jitter, model.config.prefix_mix = 0.0, False
    w = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    states = [naive_passes(w, model.config, row, num_passes) for row in idx]
    ces = []
    for k in range(num_passes):
        log_p = (torch.stack([s[k] for s in states]) @ w["wte.weight"].T).log_softmax(-1)
        ces.append(-log_p.gather(-1, targets.clamp_min(0)[..., None])[targets >= 0].mean())
    expected = ces[0] + (sum(ces[1:]) / (num_passes - 1) if num_passes > 1 else 0)
    loss, metrics = model.loss(idx, targets, num_passes)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.stack(list(metrics.values())), torch.stack(ces).detach())
    loss.backward()
    expected.backward()
    for name, p in model.named_parameters():
        if num_passes == 1 and name in ("W_U.weight", "W_G.weight"):
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, w[name].grad, rtol=1e-8, atol=1e-10, msg=name)


def test_feedback_does_not_cross_document_boundaries():
    model, idx, _ = small(document_end=30)
    idx = idx % 30
    idx[:, 5] = 30  # the second document begins at position 6
    h, e = model.states(idx, 1)[0].detach().requires_grad_(), model.embed(idx)
    x = model.feedback(h, e, model.plain(idx))
    assert (x == e).all(-1).sum(0).tolist() == [3 if t in (0, 6) else 0 for t in range(12)]  # of 3 rows
    x[:, 6].sum().backward()
    assert not h.grad.any()


def test_prefix_mix_in_restores_the_first_pass_inputs_and_jitter_is_bounded():
    model, idx, _ = small(jitter=0.02)
    model.train()
    seen = []
    model.stack, stack = lambda x: seen.append(x) or stack(x), model.stack
    for _ in range(20):
        model.states(idx, 2)
    cuts = set()
    for first, second in zip(seen[::2], seen[1::2]):
        same = (first == second).all(-1)  # (B, T)
        assert same[:, 0].all() and (same[:, 1:] <= same[:, :-1]).all()  # a prefix
        cuts |= set(same.sum(1).tolist())
    assert len(cuts) > 6
    model.config.prefix_mix = False
    h, e, plain = torch.randn(3, 12, 32).double(), model.embed(idx), model.plain(idx)
    noisy = model.feedback(h, e, plain)
    model.eval()
    exact = model.feedback(h, e, plain)
    assert 0 < (noisy - exact).abs().max() <= 0.02 * model.W_U.weight.abs().sum(1).max()


def test_depth_scaling_keeps_the_top_state_of_order_one_as_layers_grow():
    for depth_scale in (True, False):
        sizes = []
        for n_layer in (4, 32):
            model, idx, _ = small(torch.float32, n_layer=n_layer, depth_scale=depth_scale)
            for p in model.parameters():
                if p.ndim == 1:
                    torch.nn.init.ones_(p)
            top = []  # the last norm's input
            model.norm.register_forward_pre_hook(lambda module, inputs: top.append(inputs[0]))
            model.stack(model.embed(idx))
            sizes.append(top[0].square().mean().sqrt().item())
        assert (sizes[1] < 1.5 * sizes[0]) == depth_scale


# Sizes, memory, cost

def test_presets_have_the_parameters_they_name():
    counts = {}
    for preset, fields in fullbandwidth.PRESETS.items():
        with torch.device("meta"):
            config, = train.split_fields(fields, Config)
            counts[preset] = sum(p.numel() for p in FullBandwidthGPT(Config(**config)).parameters())
    # 1b by hand: qkv 16 + 2 * 8 heads of 96, output, gates, the MLP's matrices, gains; embeddings; W_U, W_G, gains
    block = 32 * 96 * 1536 + 1536**2 + 16 * 1536 + 3 * 6656 * 1536 + 4 * 1536 + 2 * 96
    assert counts["1b"] == 24 * block + 100_352 * 1536 + 2 * 1536**2 + 2 * 1536
    assert round(counts["124m"] / 1e6) == 125 and round(counts["1b"] / 1e9, 2) == 1.07


def test_flops_are_those_that_torch_counts():
    model, idx, targets = small(torch.float32, n_embd=96, mlp_width=200, window=0, mix="0,1", feedback_from=0.0)
    model.train()
    with FlopCounterMode(display=False) as counter:
        model.loss(idx, targets, 2)[0].backward()
    # torch counts all T^2 of attention, and 5 instead of 4 products in its backward; T << D keeps that below 5%
    assert counter.get_total_flops() == pytest.approx(model.flops_per_token() * idx.numel(), rel=0.05)


def test_three_passes_keep_no_more_logits_than_one():
    model, idx, targets = small(vocab_size=5000)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        model.loss(idx, targets, 3)
    assert max(kept) == model.wte.weight.numel() < targets.numel() * 5000


def test_bfloat16_loss_is_close_to_float32():
    model, idx, targets = small(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        low = model.loss(idx, targets)[0]
    assert low.item() == pytest.approx(model.loss(idx, targets)[0].item(), rel=2e-2)  # 8 bits of mantissa


# The schedule, and starting from a standard model

def test_pass_counts_follow_the_schedule_and_depend_on_seed_and_step_only():
    config = Config(mix="0.75,0.22,0.03", feedback_from=0.25)
    draws = [fullbandwidth.sample_passes(config, 7, step, 20_000) for step in range(1, 20_001)]
    assert set(draws[:5000]) == {1}
    for k, share in enumerate(config.shares, 1):
        assert draws[5000:].count(k) / 15_000 == pytest.approx(share, abs=0.01)
    torch.manual_seed(1)
    assert draws[9000:9100] == [fullbandwidth.sample_passes(config, 7, step, 20_000) for step in range(9001, 9101)]
    assert draws[9000:9100] != [fullbandwidth.sample_passes(config, 8, step, 20_000) for step in range(9001, 9101)]


@pytest.mark.parametrize("fields, message", [
    (dict(mix="0.5,0.4"), "sum to 1"), (dict(mix="1.5,-0.5"), "sum to 1"), (dict(mix="most"), "sum to 1"),
    (dict(mix="1,0"), "the last above 0"), (dict(window=-1), "window"),
    (dict(n_embd=100, n_head=8), "not --n_head=8 times an even width"), (dict(n_kv_head=3), "--n_kv_head=3"),
    (dict(feedback_from=1.0), "feedback_from"), (dict(compute_of="1,1"), "--compute_of=1,1"),
    (dict(modulus=1), "modulus"), (dict(jitter=-1.0), "jitter")])
def test_impossible_configs_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Config(**fields)


def test_passes_that_cannot_be_are_refused():
    model, idx, targets = small()
    with pytest.raises(UserError, match="0 passes: expected at least 1"):
        model.states(idx, 0)
    with pytest.raises(UserError, match="trained with feedback"):
        small(mix="1")[0].states(idx, 2)


# Decoding

def naive_generate(model, prompts, n, mode, prefill_passes=1, temperature=1.0, top_k=None, seed=None):
    """No cache, no padding: for every token, every row is run again from its start, with the inputs that it has had."""
    generator = torch.Generator().manual_seed(seed)
    inputs, rows = [], [list(p) for p in prompts]
    for p in prompts:
        idx = torch.tensor([p])
        e = x = model.embed(idx)
        for _ in range(prefill_passes if mode == "fused" else 0):
            x = torch.cat([e[:, :1], model.fuse(e[:, 1:], model.stack(x)[:, :-1])], 1)
        inputs.append(x)
    for _ in range(n):
        h = torch.cat([model.stack(x)[:, -1] for x in inputs])
        logits = h @ model.wte.weight.T
        if top_k:
            least = logits.sort(-1, descending=True).values[:, top_k - 1:top_k]
            logits = torch.where(logits >= least, logits, -math.inf)
        tokens = logits.argmax(-1) if temperature == 0 else torch.multinomial(
            (logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        for i, token in enumerate(tokens):
            e = model.embed(token[None, None])
            inputs[i] = torch.cat([inputs[i], e if mode == "standard" else model.fuse(e, h[i:i + 1, None])], 1)
            rows[i].append(token.item())
    return [row[len(p):] for row, p in zip(rows, prompts)]


@pytest.mark.parametrize("temperature", [0, 0.05])
@pytest.mark.parametrize("mode, prefill_passes", [("standard", 1), ("soft", 1), ("fused", 1), ("fused", 3)])
def test_cached_decoding_of_a_batch_equals_naive_decoding_past_the_context(mode, prefill_passes, temperature):
    model, idx, _ = small()
    prompts = [idx[0, :5].tolist(), idx[1].tolist(), idx[2, :1].tolist()]
    options = dict(prefill_passes=prefill_passes, temperature=temperature, top_k=20, seed=1)
    with torch.no_grad():
        expected = naive_generate(model, prompts, 20, mode, **options)
    assert model.generate(prompts, 20, mode, **options) == expected


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_decoding_a_token_copies_no_layers_cache(n_kv_head):
    model, _, _ = small(n_kv_head=n_kv_head, block_size=4096)
    cache, sizes = model.new_cache(2, 4096), []

    class Results(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr():
                    sizes.append(x.numel())
            return result
    with torch.no_grad(), Results():
        model.stack_one(torch.randn(2, 1, 32).double(), cache, torch.tensor([4000, 4095]))
    assert max(sizes) == 2 * 4096 < cache[0, 0].numel()  # the mask: 2 rows of 4,096 keys


def test_the_three_modes_differ_and_seeds_repeat():
    model, idx, _ = small()
    prompts = idx.tolist()
    outputs = [model.generate(prompts, 20, mode, temperature=0.05, seed=seed)
               for mode in fullbandwidth.MODES for seed in (1, 2, 1)]
    assert all(outputs[i] == outputs[i + 2] != outputs[i + 1] for i in (0, 3, 6))
    assert len({str(output) for output in outputs}) == 6


def test_soft_decoding_with_given_tokens_is_the_sequential_recurrence():
    model, idx, _ = small()
    h = model.recurrent(idx)
    torch.testing.assert_close(h[0], naive_recurrence(model.state_dict(), model.config, idx[0]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, model.states(idx, 12)[-1], rtol=1e-10, atol=1e-10)
    new = model.generate(idx[:, :4].tolist(), 8, "soft", temperature=0)
    h = model.recurrent(torch.cat([idx[:, :4], torch.tensor(new)], 1), prompt_length=4)
    assert torch.equal(model.readout(h[:, 3:-1]).argmax(-1), torch.tensor(new))


def test_a_generated_document_starts_plain():
    model, idx, _ = small(document_end=30, window=0)
    prompts = [[1, 2, 30], [30, 4, 5]]
    for mode in ("soft", "fused"):
        new = model.generate(prompts, 9, mode, prefill_passes=2, temperature=0.05, seed=1)  # two are exact for 3 tokens
        idx = torch.cat([torch.tensor(prompts), torch.tensor(new)], 1)
        with torch.no_grad():  # by the Jacobi iteration, fused over the whole text or from the end of the prompt on
            e, h, plain = model.embed(idx), model.states(idx, 1)[0], model.plain(idx)
            if mode == "soft":
                plain[:, :3] = True
            for _ in range(12):
                h = model.stack(model.feedback(h, e, plain))
        generator = torch.Generator().manual_seed(1)
        for t in range(9):
            token = train.sample_token(model.readout(h[:, 2 + t]), 0.05, None, generator)
            assert token[:, 0].tolist() == [row[t] for row in new]


def test_rows_end_with_their_first_stop_token():
    model, idx, _ = small()
    prompts = idx[:, :3].tolist()
    free = model.generate(prompts, 30, "soft", seed=3)
    stop = [free[0][4], free[1][7]]
    for row, stopped in zip(free, model.generate(prompts, 30, "soft", seed=3, stop=stop), strict=True):
        end = next((i for i, t in enumerate(row) if t in stop), 29)
        assert stopped == row[:end + 1]
    assert model.generate(prompts, 0) == [[], [], []]


@pytest.mark.parametrize("fields, prompt, mode, message", [
    ({}, [1], "sotf", "did you mean soft"), ({}, [], "soft", "an empty prompt"),
    ({}, [1] * 13, "fused", "13 tokens is longer than the context, 12"),
    (dict(mix="1"), [1], "soft", "--mode=soft needs a model trained with feedback"),
    (dict(mix="1"), [1], "fused", "--mode=fused needs a model trained with feedback")])
def test_prompts_and_modes_that_cannot_be_are_refused(fields, prompt, mode, message):
    with pytest.raises(UserError, match=message):
        small(**fields)[0].generate([prompt], 3, mode)


# Diagnostics

def test_pass_curve_measures_losses_and_updates_and_knows_a_fixed_point():
    model, idx, targets = small()
    curve = fullbandwidth.pass_curve(model, [(idx, targets)], (1, 2, 3, 12, 1000))
    with torch.no_grad():
        states = model.states(idx, 13)
        ces = model.loss(idx, targets, 3)[1]
    torch.testing.assert_close(curve[:3, 0], torch.stack([ces[f"ce_{k}"] for k in (1, 2, 3)]))
    torch.testing.assert_close(curve[2, 1], (states[2] - states[1]).norm(dim=-1).mean())
    assert torch.equal(states[12], states[11])  # T passes are exact, so later ones change nothing
    assert curve[4, 0] == curve[3, 0] and curve[4, 1] == 0


def test_feedback_gains_are_those_of_the_jacobian_which_is_nilpotent():
    model, idx, _ = small(n_embd=8, n_head=2, n_layer=1, block_size=5)
    idx = idx[:1, :5]
    h, e, plain = model.recurrent(idx), model.embed(idx), model.plain(idx)
    J = torch.autograd.functional.jacobian(lambda h: model.stack(model.feedback(h, e, plain)), h).reshape(40, 40)
    power = torch.linalg.matrix_power
    assert power(J, 4).norm() > 1e-9 and power(J, 5).norm() < 1e-12
    gains = fullbandwidth.feedback_gains(model, idx, 5, torch.Generator().manual_seed(1))[:, 0]
    v = torch.randn(1, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).flatten()
    norms = torch.stack([(power(J.T, n) @ v).norm() for n in range(5)])
    torch.testing.assert_close(gains[:4], norms[1:] / norms[:-1])
    assert gains[4] == 0


# The task

def test_running_sums_are_right_at_every_position_for_any_modulus_and_length():
    for modulus, length in ((2, 5), (3, 33), (40, 64)):
        options = train.Options(dataset="running-sum", batch_size=4)
        data = train.load_data(options, Config(modulus=modulus, block_size=length))
        idx, targets = data.batch("train", 3)
        assert idx.shape == targets.shape == (4, length) and data.vocab_size == modulus
        for row, answers in zip(idx.tolist(), targets.tolist()):
            assert set(row) <= {0, 1}
            assert answers == [sum(row[:t + 1]) % modulus for t in range(length)]
        assert not torch.equal(data.batch("train", 4)[0], idx)


def test_a_task_of_this_model_is_none_of_another():
    with pytest.raises(UserError, match="nor a task of this model"):
        train.load_data(train.Options(dataset="running-sum"), SimpleNamespace(block_size=8, vocab_size=8))


# With the driver

TINY = ["--n_layer=1", "--n_head=1", "--n_kv_head=1", "--n_embd=16", "--mlp_width=16", "--block_size=16",
        "--batch_size=4", "--eval_batches=1", "--max_steps=8", "--eval_interval=4", "--log_interval=1", "--device=cpu",
        "--compile=off", "--optimizer=adamw", "--dataset=running-sum", "--overwrite"]


def test_a_standard_checkpoint_lacks_the_two_new_matrices_only_and_one_pass_stays_what_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.txt").write_text("abc" * 300)
    train.main(["fullbandwidth", *TINY, "--mix=1", f"--out_dir={tmp_path}/old"])
    train.main(["fullbandwidth", *TINY, f"--init_from={tmp_path}/old", "--lr=0", f"--out_dir={tmp_path}/new"])
    old, new = (train.load_model(tmp_path / name, "fullbandwidth", FullBandwidthGPT)[0] for name in ("old", "new"))
    assert new.state_dict().keys() - old.state_dict().keys() == {"W_U.weight", "W_G.weight"}
    idx = torch.randint(0, 3, (4, 16))
    assert torch.equal(old.states(idx, 1)[0], new.states(idx, 3)[0])
    for argv, message in ((["--n_layer=2"], "blocks.1.* differs"), (["--mlp_width=8"], "mlp.gate_up.weight differs"),
                          (["--modulus=5"], "wte.weight differs"), (["--init_from=nowhere"], "no such checkpoint"),
                          (["--dataset=three.txt", f"--data_dir={tmp_path}"], "another tokenizer")):
        with pytest.raises(UserError, match=message):
            train.main(["fullbandwidth", *TINY, f"--init_from={tmp_path}/old", f"--out_dir={tmp_path}/bad", *argv])


def test_resuming_makes_the_same_draws(tmp_path):
    arguments = ["fullbandwidth", *TINY, "--feedback_from=0", "--mix=0.4,0.3,0.3"]
    train.main([*arguments, f"--out_dir={tmp_path}/whole"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        optimizer_step = train.Run.optimizer_step
        patch.setattr(train.Run, "optimizer_step", lambda run, norm: (
            optimizer_step(run, norm), run.step == 3 and run.interrupts.handle(2, None)))
        train.main([*arguments, f"--out_dir={tmp_path}/stopped"])
    train.main(["fullbandwidth", f"--out_dir={tmp_path}/stopped", "--resume"])
    whole, resumed = (train.read_csv(tmp_path / name / "log.csv") for name in ("whole", "stopped"))
    assert [r.get("train_loss") for r in whole] == [r.get("train_loss") for r in resumed]
    assert len({"ce_2" in r for r in whole[1:]}) == len({"ce_3" in r for r in whole[1:]}) == 2


def test_muon_gets_the_matrices_of_the_blocks_and_of_the_feedback():
    model, *_ = small()
    adamw, muon = train.build_optimizers(model, train.Options(optimizer="muon"))
    names = {name for name, p in model.named_parameters() if any(p is q for g in muon.param_groups for q in g["params"])}
    assert {"W_U.weight", "W_G.weight", "blocks.0.attn.qkv.weight"} <= names
    assert names == {n for n, p in model.named_parameters() if p.ndim == 2} - {"wte.weight"}
    assert sum(len(g["params"]) for g in adamw.param_groups) + len(names) == len(list(model.parameters()))


def test_a_checkpoint_from_before_the_feedback_is_a_standard_model(tmp_path):
    train.main(["fullbandwidth", *TINY, "--lr=0", "--feedback_from=0.9", f"--out_dir={tmp_path}"])  # best.pt stays at step 0
    with pytest.raises(UserError, match="--mode=soft needs a model trained with feedback, .* saved after step 0"):
        fullbandwidth.main([str(tmp_path / "best.pt"), "--prompt=01", "--mode=soft"])
    fullbandwidth.main([str(tmp_path / "ckpt.pt"), "--prompt=01", "--mode=soft", "--max_new_tokens=2"])
    model, _, _, batches = fullbandwidth.load_run(tmp_path / "best.pt")
    assert len(fullbandwidth.pass_curve(model, batches)) == 1


def test_a_wrong_init_from_costs_no_run(tmp_path):
    train.main(["fullbandwidth", *TINY, "--max_steps=1", f"--out_dir={tmp_path}/run"])
    for arguments in ([f"--init_from={tmp_path}/nope", f"--out_dir={tmp_path}/run", "--overwrite"],
                      [f"--init_from={tmp_path}/nope", f"--out_dir={tmp_path}/other"]):
        with pytest.raises(UserError, match="no such checkpoint"):
            train.main(["fullbandwidth", *TINY, "--max_steps=1", *arguments])
    assert train.load_checkpoint(tmp_path / "run", "fullbandwidth")["step"] == 1
    train.main(["fullbandwidth", *TINY, "--max_steps=1", f"--init_from={tmp_path}/run", f"--out_dir={tmp_path}/other"])


def test_in_wikitext_the_position_after_a_line_gets_no_feedback(tmp_path):
    with zipfile.ZipFile(tmp_path / "wikitext-2.zip", "w") as z:
        for split in ("train", "valid", "test"):
            z.writestr(f"wikitext-2-raw/wiki.{split}.raw", " = ab = \n \n abba = b \n" * 40)
    for tokenizer, end in (("char", "\n"), ("regex", "\n\n")):
        train.main(["fullbandwidth", *TINY, "--dataset=wikitext-2", f"--tokenizer={tokenizer}", "--max_steps=1",
                    f"--data_dir={tmp_path}", f"--out_dir={tmp_path}/{tokenizer}"])
        model, _, vocabulary = fullbandwidth.load_model(tmp_path / tokenizer)
        assert vocabulary.vocab[model.config.document_end] == end


# The command line

def test_help_lists_every_field_with_its_meaning(capsys):
    for main, argv, cls in ((train.main, ["fullbandwidth", "--help"], Config),
                            (fullbandwidth.main, ["--help"], fullbandwidth.Arguments)):
        with contextlib.suppress(SystemExit):
            main(argv)
        text = " ".join(capsys.readouterr().out.split())
        for name in cls.__dataclass_fields__:
            assert re.search(rf"--{name}[ ,].{{0,80}}\w+.*?\[", text), name


def test_a_run_prints_its_passes_and_continues_a_prompt_in_every_mode(tmp_path, capsys):
    out = tmp_path / "run"
    train.main(["fullbandwidth", *TINY, "--feedback_from=0", f"--out_dir={out}"])
    capsys.readouterr()
    fullbandwidth.main([str(out)])
    title, columns, *rows = capsys.readouterr().out.splitlines()[-2 - len(fullbandwidth.PASSES):]
    assert "mix 0,0.7,0.3" in title
    assert " ".join(columns.split()) == "pass loss update right at 1 .. 16 right at 17 .. 32"
    model, options, _, batches = fullbandwidth.load_run(out)
    idx, targets = fullbandwidth.RunningSumData(options, replace(model.config, block_size=32)).batch("val", 0)
    with torch.no_grad():
        curve, states = fullbandwidth.pass_curve(model, batches), model.states(idx, 30)
    assert [int(row.split()[0]) for row in rows] == list(fullbandwidth.PASSES)
    for k, row in zip(fullbandwidth.PASSES[:8], rows):
        right = (model.readout(states[k - 1]).argmax(-1) == targets).double()
        figures = [*curve[fullbandwidth.PASSES.index(k)], right[:, :16].mean(), right[:, 16:].mean()]
        assert row.split()[1:] == [f"{figure:.4g}" for figure in figures]
    assert not list(out.glob("passes.*"))
    capsys.readouterr()
    texts = []
    for mode in fullbandwidth.MODES:
        fullbandwidth.main([str(out), "--prompt=0110", f"--mode={mode}", "--max_new_tokens=40", "--stop=2"])
        texts.append(capsys.readouterr().out.strip())
    assert all(re.fullmatch("0110([01]{40}|[01]*2)", text) for text in texts)
    fullbandwidth.main([str(out), "--prompt=0110", "--mode=soft,fused", "--max_new_tokens=40", "--stop=2"])
    assert capsys.readouterr().out.splitlines() == ["--- soft", texts[1], "--- fused", texts[2]]
    for argv, message in ((["--prompt="], "an empty prompt"), (["--prompt=01", "--mode=sotf"], "--mode=sotf: no such mode; did you mean soft"),
                          (["--prompt=abc"], "not in the vocabulary"), ([f"--prompt={'0' * 17}"], "longer than"),
                          (["--prompt=0", "--prefill_passes=0"], "prefill_passes")):
        with pytest.raises(UserError, match=message):
            fullbandwidth.main([str(out), *argv])


def test_a_stop_that_the_vocabulary_lacks_is_one_clear_line(tmp_path):
    tokenizer = train.Tokenizer("regex", ["What", "is", " ", "\n", "?", "<unk>"])
    model = FullBandwidthGPT(Config(vocab_size=6, block_size=12, n_layer=1, n_head=2, n_kv_head=2, n_embd=16, mlp_width=16))
    torch.save({"model": "fullbandwidth", "preset": "tiny", "config": vars(model.config), "step": 600, "max_steps": 600, "best": 0.0,
                "tokenizer": tokenizer.spec, "options": vars(train.Options()), "weights": model.state_dict()}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=r"--stop='!\?': the vocabulary lacks \['!'\]"):
        fullbandwidth.main([str(tmp_path), "--prompt=What", "--stop=!?"])
