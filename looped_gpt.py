"""Looped GPT and the readout blind spot, after "Dense Supervision Is Not Enough" (Sharma & Vu, arXiv 2606.24898).

A stack of pre-norm layers is applied K times, and cross-entropy on every loop's readout trains early exits. But a
readout through RMSNorm gives r(aH) = r(H): the loss cannot see the scale of the state (Lemma 1), which the residual
stream keeps moving, while the direction turns ever less, as 1 / ||H|| (Lemma 2). So dense supervision trains exits, and
only a loss that sees the scale (a raw readout, a norm penalty), or a loop without scale (inter-loop norm), controls it.

    python train.py looped_gpt                                       # train the tiny preset
    python train.py looped_gpt --sweep=table1                        # the paper's seven conditions
    python looped_gpt.py out/looped_gpt-tiny                         # every diagnostic of the paper for a trained run
    python looped_gpt.py out/looped_gpt-tiny --prompt="The " --loops=2

Letters: B batch, T tokens, D width, V vocabulary, K loops, H_k the (B, T, D) state after loop k; u = H / s, s = ||H||.
"""
import copy, math, statistics, time
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

import train
from train import BelowOne, Count, Seed, Size, UserError, check_fields, cross_entropy


@dataclass
class Config:
    vocab_size: Size = 20_000  # types; the tokenizer lowers it to what it found
    block_size: Size = 64  # tokens in a window, T
    n_layer: Count = 2  # layers in the stack that is looped
    n_head: Count = 4  # attention heads
    n_embd: Size = 128  # width of the residual stream, D
    num_loops: Count = 4  # times the stack is applied, K
    dropout: BelowOne = 0.0  # on the embeddings and on each sublayer's output
    readout: Literal["rmsnorm", "raw", "final_only"] = "rmsnorm"  # r in logits = r(H) E^T; final_only: raw before loop K
    supervision: Literal["terminal", "per_loop", "adaptive"] = "per_loop"  # loss at loop K, at every loop, by exit gate
    gate_input: Literal["normed", "raw"] = "normed"  # of adaptive's exit gate: r(H_k), as in Ouro; H_k, as in the release
    norm_penalty: float = 0.0  # lambda of lambda * mean_k mean(H_k^2); the paper: 0.01
    inter_loop_norm: bool = False  # RMSNorm the state before it enters the next loop
    embd_std: float = 1.0  # std of the initial embeddings; 1.0 is what the authors' release has

    def __post_init__(self):
        check_fields(self)
        if self.n_embd % self.n_head:
            raise UserError(f"--n_embd={self.n_embd} is not divisible by --n_head={self.n_head}")


PAPER = dict(block_size=256, stride=128, tokenizer="regex", dropout=0.1, lr=3e-4, max_steps=0, epochs=4,
             log_interval=50, eval_interval=1000, eval_batches=20)
PRESETS = {
    "tiny": dict(max_steps=600, batch_size=32, lr=3e-3, warmup_steps=20),
    "44m": dict(n_layer=8, n_head=8, n_embd=512, batch_size=64, **PAPER),
    "129m": dict(n_layer=12, n_head=12, n_embd=768, batch_size=32, **PAPER),
}
SHOW = ("final_norm",)  # printed beside the loss, and drawn in curves.png


# ---------------------------------------------------------------------------------------------------------------------
# The model

class RMSNorm(nn.Module):
    """h / rms(h) * gain: blind to the scale of h, up to eps."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, h):
        return F.rms_norm(h, h.shape[-1:], self.gain, self.eps)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cache=None, start=0):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # each (B, nh, T, hs)
        if cache is not None:  # (2, B, nh, block_size, hs): this (loop, layer)'s keys and values so far
            cache[0, :, :, start:start + T], cache[1, :, :, start:start + T] = k, v
            k, v = cache[:, :, :, :start + T]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=not start)  # behind a cache T is 1
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 8 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm: x += attn(norm(x)); x += ffn(norm(x))."""

    def __init__(self, config):
        super().__init__()
        self.norm1, self.attn = RMSNorm(config.n_embd), Attention(config)
        self.norm2, self.ffn = RMSNorm(config.n_embd), SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None, start=0):
        x = x + self.dropout(self.attn(self.norm1(x), cache, start))
        return x + self.dropout(self.ffn(self.norm2(x)))


class LoopedGPT(nn.Module):
    """Embeddings, one stack of blocks applied K times, a readout through the tied embeddings (section 3)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.norm = RMSNorm(config.n_embd) if config.readout != "raw" else nn.Identity()
        self.loop_norm = RMSNorm(config.n_embd) if config.inter_loop_norm else nn.Identity()
        self.gate = nn.Linear(config.n_embd, 1) if config.supervision == "adaptive" else None
        self.dropout = nn.Dropout(config.dropout)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=config.embd_std)

    def embed(self, idx, start=0):
        return self.dropout(self.wte(idx) + self.wpe.weight[start:start + idx.shape[1]])

    def loop(self, h, cache=None, start=0):
        """One application of the stack, (B, T, D) -> (B, T, D)."""
        for i, block in enumerate(self.blocks):
            h = block(h, None if cache is None else cache[i], start)
        return h

    def states(self, idx, num_loops=None, clamp=None, cache=None, start=0):
        """[H_1 .. H_K], each (B, T, D), for idx (B, T) and any number of loops, more than the trained K too.

        clamp, an intervention on every H_k before it is read out and fed on: "freeze_loop1" rescales each token to its norm
        after loop 1, "remove_radial" drops from H_k - H_{k-1} what is parallel to H_{k-1}.
        """
        h, states = self.embed(idx, start), []
        for k in range(num_loops or self.config.num_loops):
            before = h
            h = self.loop(self.loop_norm(h) if k else h, None if cache is None else cache[k], start)
            if clamp == "freeze_loop1" and k:
                h = h * (states[0].norm(dim=-1, keepdim=True) / h.norm(dim=-1, keepdim=True))
            elif clamp == "remove_radial" and k:
                u = F.normalize(before, dim=-1)
                h = h - ((h - before) * u).sum(-1, keepdim=True) * u
            states.append(h)
        return states

    def normed(self, h, final):
        """r(H): what the embeddings are multiplied with. `final`: this is the state of loop K (or of a later one)."""
        return self.norm(h) if self.config.readout == "rmsnorm" or self.config.readout == "final_only" and final else h

    def readout(self, h, final=True):
        """Logits r(H) E^T, (..., D) -> (..., V)."""
        return F.linear(self.normed(h, final), self.wte.weight)

    def loss(self, idx, targets, num_loops=None, num_targets=None):
        """(loss, metrics) for idx and targets (B, T), targets -1 where there is no loss.

        terminal: CE_K. per_loop: mean_k CE_k. adaptive: sum_k p_k CE_k - 0.1 entropy(p), p from the exit gate, per token.
        The gate reads r(H_k), as Ouro's does, or the raw H_k, as in the authors' release: then the loss sees the scale
        through it, whatever r is, and Lemma 1 does not hold.
        All plus norm_penalty * mean_k mean(H_k^2). metrics: ce_k for the loops read out, final_norm = mean ||H_K||.
        num_targets: what sums over tokens are divided by, by default how many targets there are here.
        """
        c, K = self.config, num_loops or self.config.num_loops
        states = self.states(idx, K)
        read = [K] if c.supervision == "terminal" and self.training else range(1, K + 1)
        rows = [self.normed(states[k - 1], final=k >= c.num_loops).flatten(0, 1) for k in read]  # each (B T, D)
        given = (targets >= 0).flatten().to(self.wte.weight.dtype)
        share = given / (given.sum() if num_targets is None else num_targets)  # (B T): of each token in a mean
        if c.supervision == "adaptive":
            p = self.exit_probabilities([h.flatten(0, 1) for h in states] if c.gate_input == "raw" else rows)
            scale = p * share  # (K, B T): the weight of each CE in the loss
        else:
            scale = share.repeat(len(read), 1)
            supervised = scale[-1:] if c.supervision == "terminal" else scale
            unsupervised = len(read) - len(supervised)
            scale[:unsupervised] = 0
            scale /= len(supervised)
        loss, ce = cross_entropy(torch.cat(rows), self.wte.weight, targets.clamp_min(0).flatten().repeat(len(read)),
                                 scale.flatten())
        if c.supervision == "adaptive":
            loss = loss + 0.1 * (share * p * p.clamp_min(1e-9).log()).sum()  # minus 0.1 times the entropy
        if c.norm_penalty:
            loss = loss + c.norm_penalty * sum(h.square().mean() for h in states) / K
        metrics = {f"ce_{k}": ce_k for k, ce_k in zip(read, (share * ce.view(len(read), -1)).sum(1))}
        return loss, metrics | {"final_norm": states[-1].detach().norm(dim=-1).mean()}

    def exit_probabilities(self, rows):
        """p_k = g_k prod_{j<k} (1 - g_j), g = sigmoid(gate(row)), the last loop taking the rest: (K, B T)."""
        g = torch.sigmoid(self.gate(torch.stack(rows)))[..., 0].to(rows[0].dtype)  # (K, B T)
        one = torch.ones_like(g[:1])
        return torch.cat([g[:-1], one]) * torch.cat([one, (1 - g[:-1]).cumprod(0)])

    def flops_per_token(self):
        """Training FLOPs per token: 6 per weight and loop, and causal attention's 6 T D per layer and loop."""
        c = self.config
        reads = 1 if c.supervision == "terminal" else c.num_loops
        stack = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2) + c.n_layer * c.block_size * c.n_embd
        return 6 * (stack * c.num_loops + c.vocab_size * c.n_embd * reads)

    def new_cache(self, B, S, K):
        """Keys and values of S tokens, a slot per (loop, layer)."""
        c = self.config
        return self.wte.weight.new_empty(K, c.n_layer, 2, B, c.n_head, S, c.n_embd // c.n_head)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, num_loops=None, temperature=1.0, top_k=None, seed=None, use_cache=True):
        """Continue idx (B, T) by max_new_tokens, exiting after num_loops. temperature 0 is greedy.

        When the window is full, the newest half is read again as a window of its own, since learned positions cannot slide;
        without the cache too, so that both give the same tokens.
        """
        c, K = self.config, num_loops or self.config.num_loops
        generator = torch.Generator(idx.device).manual_seed(seed) if seed is not None else None
        cache = self.new_cache(len(idx), c.block_size, K) if use_cache else None
        begin, length = max(0, idx.shape[1] - c.block_size), 0  # of the window; length: how many of its tokens are cached
        for _ in range(max_new_tokens):
            if idx.shape[1] - begin > c.block_size:
                begin, length = idx.shape[1] - max(1, c.block_size // 2), 0
            h = self.states(idx[:, begin + length:], K, cache=cache, start=length)[-1][:, -1]
            length = idx.shape[1] - begin if use_cache else 0
            token = train.sample_token(self.readout(h, final=K >= c.num_loops), temperature, top_k, generator)
            idx = torch.cat([idx, token], dim=1)
        return idx


# ---------------------------------------------------------------------------------------------------------------------
# Training. train.py's Run does the rest: devices, data, optimiser, schedule, evaluation, log, checkpoints.

def train_model(run):
    model = run.start(LoopedGPT(run.config))
    for step in run.steps():
        for idx, targets, num_targets in run.batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, num_targets=num_targets)
            run.backward(loss, metrics)
        run.update()
    evaluations = [row for row in run.rows if "val_loss" in row]
    first, last = evaluations[0], evaluations[-1]
    run.say(f"validation loss {first['val_loss']:.2f} -> {last['val_loss']:.2f}, "
            f"mean ||H_K|| {first['val_final_norm']:.1f} -> {last['val_final_norm']:.1f}: "
            f"see {run.out}/curves.png, then run\npython looped_gpt.py {run.out}")


# ---------------------------------------------------------------------------------------------------------------------
# Diagnostics. `batches` is a list of (idx, targets), each (B, T).

def mean_over(batches, function):
    """The mean over batches of a function of (idx, targets) that returns a tensor."""
    return sum(function(idx, targets) for idx, targets in batches) / len(batches)


def token_loss(model, h, k, targets):
    """CE of each token, (B, T), read out from the state h after loop k."""
    rows, scale = model.normed(h, k >= model.config.num_loops).flatten(0, 1), h.new_ones(targets.numel())
    return cross_entropy(rows, model.wte.weight, targets.flatten(), scale)[1].view(targets.shape)


@torch.no_grad()
def loss_per_loop(model, batches, num_loops=None, clamp=None):
    """Cross-entropy in nats of every loop's readout, (K,); PPL is its exp."""
    def losses(idx, targets):
        states = model.states(idx, num_loops, clamp)
        return torch.stack([token_loss(model, h, k, targets).mean() for k, h in enumerate(states, 1)])
    return mean_over(batches, losses)


def radial_gradient_fraction(model, batches):
    """Lemma 1's quantity, (K,): |<g, H_k>| / (||g|| ||H_k||) per token, g the gradient of loop k's own CE, averaged."""
    def fraction(idx, targets):
        with torch.no_grad():
            states = model.states(idx)
        values = []
        for k, h in enumerate(states, 1):
            h = h.detach().requires_grad_()
            logits = model.readout(h, final=k >= model.config.num_loops)
            g, = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), h)
            g = g / g.abs().amax(-1, keepdim=True)  # its square would underflow; NaN, and left out, where g = 0
            values.append(((g * h).sum(-1).abs() / (g.norm(dim=-1) * h.norm(dim=-1))).nanmean().detach())
        return torch.stack(values)
    return mean_over(batches, fraction)


def scale_and_direction(before, after):
    """Lemma 2's quantities for one loop, per token: scale s, radial increment <u, H' - H>, angular step ||u' - u||."""
    s, u = before.norm(dim=-1), F.normalize(before, dim=-1)
    return s, (u * (after - before)).sum(-1), (F.normalize(after, dim=-1) - u).norm(dim=-1)


@torch.no_grad()
def scale_dynamics(model, batches, num_loops=30):
    """Lemma 2 beyond the trained depth: (num_loops - 1, 4), for k = 1 .. the means over tokens of s_k, the radial
    increment, the angular step to loop k + 1, and angular step * s_k, which should stay about constant."""
    def dynamics(idx, targets):
        states = model.states(idx, num_loops)
        s, radial, angular = scale_and_direction(torch.stack(states[:-1]), torch.stack(states[1:]))  # (num_loops - 1, B, T)
        return torch.stack([x.mean((1, 2)) for x in (s, radial, angular, angular * s)], 1)
    return mean_over(batches, dynamics)


@torch.no_grad()
def lemma2_prediction(model, h):
    """What Lemma 2 predicts for one loop from h (B, T, D): (a_rad, ||b_perp|| / s), each (B, T).

    b(u) = lim_{s -> inf} F(su) - su: every sublayer sees Norm(u), since what the earlier ones add vanishes beside su. The
    radial increment is a_rad + O(1/s), the angular step ||b_perp|| / s + O(1/s^2).
    """
    s, u = h.norm(dim=-1), F.normalize(h, dim=-1)
    x = u * math.sqrt(u.shape[-1])  # the RMSNorm, but for its gain, of so large a state that eps does not matter
    b = sum(block.attn(x * block.norm1.gain) + block.ffn(x * block.norm2.gain) for block in model.blocks)
    a_rad = (b * u).sum(-1)
    return a_rad, (b - a_rad[..., None] * u).norm(dim=-1) / s


@torch.no_grad()
def lemma2_remainders(model, h, factors=(1, 10, 100, 1000)):
    """Lemma 2 against measurement in float64, for one loop from a * H: per factor a, means over tokens of s, the radial
    increment and |increment - a_rad| = O(1/s), the angular step and |step - ||b_perp|| / s| = O(1/s^2). (factors, 5)."""
    model, rows = copy.deepcopy(model).cpu().double(), []  # some devices have no float64
    for state in (a * h.cpu().double() for a in factors):
        s, radial, angular = scale_and_direction(state, model.loop(state))
        a_rad, step = lemma2_prediction(model, state)
        rows.append(torch.stack([x.mean() for x in (s, radial, (radial - a_rad).abs(), angular, (angular - step).abs())]))
    return torch.stack(rows)


@torch.no_grad()
def norm_quantiles(model, batches):
    """Mean, median, p99, max and std of ||H_K|| over tokens."""
    norms = torch.cat([model.states(idx)[-1].norm(dim=-1).flatten() for idx, _ in batches]).float()
    values = dict(mean=norms.mean(), median=norms.median(), p99=norms.quantile(0.99), max=norms.max(), std=norms.std())
    return {name: value.item() for name, value in values.items()}


def timed(function):
    """(result, seconds) of a function whose result is on the CPU: the best of 3 calls."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


@torch.no_grad()
def frontier(model, batches):
    """[(K, PPL, tokens/s)] for exits after K = 1 .. num_loops: one checkpoint, several speeds."""
    points, tokens = [], sum(idx.numel() for idx, _ in batches)
    for K in range(1, model.config.num_loops + 1):
        ce_K = lambda idx, targets: token_loss(model, model.states(idx, K)[-1], K, targets).mean()
        ce, seconds = timed(lambda: mean_over(batches, ce_K).item())
        points.append((K, train.perplexity(ce), tokens / seconds))
    return points


def sequence_margin(model, h, k):
    """Mean over tokens of top1 - top2 of loop k's logits, (B,); 0 where the vocabulary has one type only."""
    top = model.readout(h, k >= model.config.num_loops).topk(min(2, model.config.vocab_size), dim=-1).values
    return (top[..., 0] - top[..., -1]).mean(-1).float()


@torch.no_grad()
def calibrate_halting(model, batches, tolerance=1.01):
    """The lowest margin threshold at which the sequences that pass it may leave early, and PPL stays within `tolerance`
    times the full depth's on these batches. math.inf if there is none."""
    margins, losses = [], []
    for idx, targets in batches:
        states = list(enumerate(model.states(idx), 1))
        margins.append(torch.stack([sequence_margin(model, h, k) for k, h in states]))
        losses.append(torch.stack([token_loss(model, h, k, targets).mean(1) for k, h in states]))
    margins, losses = torch.cat(margins, 1), torch.cat(losses, 1)  # (K, N)
    limit, margins[-1] = losses[-1].mean() + math.log(tolerance), math.inf  # who passes nowhere leaves at the end
    for threshold in margins[:-1].flatten().sort().values:
        exit_loop = (margins >= threshold).int().argmax(0)  # the first loop that passes
        if losses.gather(0, exit_loop[None]).mean() <= limit:
            return threshold.item()
    return math.inf


@torch.no_grad()
def halting_states(model, idx, threshold):
    """The state of each sequence after the loop at which it left, (B, T, D), and that loop, (B,). Later loops run only for
    the sequences left."""
    h, loops = model.embed(idx), torch.full((len(idx),), model.config.num_loops, device=idx.device)
    result, active = torch.empty_like(h), torch.arange(len(idx), device=idx.device)
    for k in range(1, model.config.num_loops + 1):
        h = model.loop(model.loop_norm(h) if k > 1 else h)
        result[active] = h
        if k < model.config.num_loops:
            leaves = sequence_margin(model, h, k) >= threshold
            loops[active[leaves]] = k
            h, active = h[~leaves], active[~leaves]
            if not len(active):
                break
    return result, loops


@torch.no_grad()
def halting(model, batches, threshold):
    """{average loops, PPL, tokens/s} of halting at a calibrated threshold, with real skipping."""
    def halt():
        results = [halting_states(model, idx, threshold) for idx, _ in batches]
        return results, torch.cat([loops for _, loops in results]).float().mean().item()  # waits for the device
    (results, average), seconds = timed(halt)
    losses = [token_loss(model, h[loops == k], k, targets[loops == k]).mean(1)
              for (h, loops), (_, targets) in zip(results, batches) for k in loops.unique().tolist()]
    return {"loops": average, "ppl": train.perplexity(torch.cat(losses).mean().item()),
            "tokens_per_sec": sum(idx.numel() for idx, _ in batches) / seconds}


def diagnose(path):
    """Print every diagnostic of a trained run on its validation split and draw them into RUN/diagnostics.png."""
    model, options, tokenizer = train.load_model(path, "looped_gpt", LoopedGPT)
    _, batches = train.validation_batches(options, tokenizer, model, options.eval_batches)
    c, ce = model.config, loss_per_loop(model, batches)
    print(f"{path}: readout {c.readout}, supervision {c.supervision}, norm penalty {c.norm_penalty}, K = {c.num_loops}")
    radial = radial_gradient_fraction(model, batches)
    print("\nloop      CE      PPL   radial gradient fraction (Lemma 1)")
    for k in range(c.num_loops):
        print(f"{k + 1:4d}  {ce[k]:6.4f}  {ce[k].exp():7.3f}   {radial[k]:.1e}")
    dynamics = scale_dynamics(model, batches).cpu()
    print("\nloop   scale s   radial increment   angular step   angular step * s (Lemma 2)")
    for k in (1, 2, 3, 4, 6, 8, 12, 16, 20, 29):
        print("{:4d}  {:8.2f}   {:16.3f}   {:12.5f}   {:16.3f}".format(k, *dynamics[k - 1].tolist()))
    print("\none loop from a * H_K: scale s   radial increment   its remainder   angular step   its remainder (Lemma 2)")
    for a, row in zip((1, 10, 100, 1000), lemma2_remainders(model, model.states(batches[0][0])[-1]).tolist()):
        print("{:15d} {:14.2f}   {:16.4f}   {:13.1e}   {:12.3e}   {:13.1e}".format(a, *row))
    print("\n||H_K|| over tokens: " + ", ".join(f"{k} {v:.2f}" for k, v in norm_quantiles(model, batches).items()))
    for clamp in ("freeze_loop1", "remove_radial"):
        change = loss_per_loop(model, batches, clamp=clamp)[-1] - ce[-1]
        print(f"clamp {clamp}: change in CE {change:+.4f}")
    points = frontier(model, batches)
    print("\nexit after loop      PPL    tokens/s")
    for K, ppl, speed in points:
        print(f"{K:15d}  {ppl:7.3f}  {speed:10,.0f}")
    halves = [[(idx[i::2], targets[i::2]) for idx, targets in batches] for i in range(2)]
    threshold = calibrate_halting(model, halves[0])
    halted = halting(model, [pair for pair in halves[1] if len(pair[0])] or halves[0], threshold)
    print(f"halting at margin {threshold:.3f} (calibrated on every other sequence, measured on the rest): "
          f"{halted['loops']:.2f} loops on average, PPL {halted['ppl']:.3f}, {halted['tokens_per_sec']:,.0f} tokens/s")

    figure, axes = train.new_figure(2)
    axes[0].plot(range(1, 30), dynamics[:, [0, 2, 3]], label=["scale s", "angular step", "angular step * s"])
    axes[0].axvline(c.num_loops, color="gray", linestyle=":", label="trained K")
    axes[0].set(xlabel="loop", yscale="log", title="Lemma 2: scale and direction")
    axes[0].legend()
    axes[1].plot([speed for _, _, speed in points], [ppl for _, ppl, _ in points], "o-")
    for K, ppl, speed in points:
        axes[1].annotate(f" K={K}", (speed, ppl))
    axes[1].plot(halted["tokens_per_sec"], halted["ppl"], "s", label=f"halting, {halted['loops']:.2f} loops")
    axes[1].set(xlabel="tokens/s", ylabel="perplexity", title="Variable depth")
    axes[1].legend()
    figure.savefig(train.run_directory(path) / "diagnostics.png", dpi=120)
    print(f"\ndrawn in {train.run_directory(path) / 'diagnostics.png'}")


def evaluate(path, evaluation, loops):
    """The tasks of lm-evaluation-harness, exiting after each of the loops, with KV caches of loops x layers slots."""
    model, _, tokenizer = train.load_model(path, "looped_gpt", LoopedGPT)
    c, device = model.config, model.wte.weight.device

    def at(K):
        states = lambda idx, cache=None, start=0: model.states(idx, K, cache=cache, start=start)[-1]
        readout = lambda h: model.readout(h, final=K >= c.num_loops)
        new_cache = lambda B, S: model.new_cache(B, S, K)
        return (lambda idx, n: readout(states(idx.to(device))[:, n - 1:]),
                lambda *arguments: train.decode(states, readout, new_cache, *arguments))
    train.evaluate(path, evaluation, tokenizer, c.block_size, {f"loops={K}": at(K) for K in loops or [c.num_loops]})


# ---------------------------------------------------------------------------------------------------------------------
# The paper's Table 1: what each loss does to the scale.

def table1(runs, out):
    """Print PPL per loop and final norm of every condition, mean (and spread over seeds); write table1.csv, table1.png."""
    rows, logs = [], {}
    for (condition, _), path in runs.items():
        logs.setdefault(condition, []).append(train.read_csv(path / "log.csv"))
    for condition, of_seeds in logs.items():
        last = [log[-1] for log in of_seeds]
        K = sum(name.startswith("val_ce_") for name in last[0])
        columns = {f"ppl_{k}": [train.perplexity(row[f"val_ce_{k}"]) for row in last] for k in range(1, K + 1)}
        columns["final_norm"] = [row["val_final_norm"] for row in last]
        rows.append({"condition": condition, "seeds": len(last)})
        for name, values in columns.items():
            rows[-1] |= {name: statistics.mean(values), f"{name}_std": statistics.pstdev(values)}
    train.write_csv(out / "table1.csv", rows)
    print(f"\n{'condition':28}" + "".join(f"{name.replace('ppl_', 'PPL '):>18}" for name in columns))
    for row in rows:
        cells = [f"{row[name]:.2f}" + f" +- {row[name + '_std']:.2f}" * (row["seeds"] > 1) for name in columns]
        print(f"{row['condition']:28}" + "".join(f"  {cell:>16}" for cell in cells))
    figure, axes = train.new_figure(2)
    for row, (condition, (log, *_)) in zip(rows, logs.items()):
        points = [(r["step"], r["val_final_norm"]) for r in log if "val_final_norm" in r]
        axes[0].plot(*zip(*points), label=condition)
        axes[1].plot(range(1, K + 1), [row[f"ppl_{k}"] for k in range(1, K + 1)], "o-", label=condition)
    axes[0].set(xlabel="step", ylabel="mean ||H_K||", yscale="log", title="Only a visible scale stays controlled")
    axes[1].set(xlabel="exit after loop", ylabel="validation perplexity", yscale="log", xticks=range(1, K + 1),
                title="Dense supervision trains exits")
    axes[1].legend(fontsize="x-small")
    figure.savefig(out / "table1.png", dpi=120)
    print(f"\nwritten to {out}/table1.csv and table1.png")


SWEEPS = {"table1": ({
    "terminal+rmsnorm": dict(supervision="terminal", readout="rmsnorm"),
    "terminal+raw": dict(supervision="terminal", readout="raw"),
    "terminal+rmsnorm+penalty": dict(supervision="terminal", readout="rmsnorm", norm_penalty=0.01),
    "per_loop+rmsnorm": dict(supervision="per_loop", readout="rmsnorm"),
    "per_loop+raw": dict(supervision="per_loop", readout="raw"),
    "per_loop+final_only": dict(supervision="per_loop", readout="final_only"),
    "per_loop+rmsnorm+penalty": dict(supervision="per_loop", readout="rmsnorm", norm_penalty=0.01),
}, table1)}


# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Arguments:
    prompt: str = None  # text to continue; without it, the diagnostics are printed
    loops: str = None  # exit after this loop, with --eval after each of 1,2,..; by default after the trained number
    max_new_tokens: int = 200  # how many tokens to generate
    temperature: Annotated[float, 0, 100] = 0.8  # 0: greedy
    top_k: int = 50  # sample from the k likeliest; 0: from all
    seed: Seed = 42  # seed of the sampling

    def __post_init__(self):
        check_fields(self)
        if self.prompt == "":
            raise UserError("--prompt is empty: give at least one character to continue")


def main(argv):
    usage = "python looped_gpt.py RUN [--prompt=TEXT | --eval=TASK,..] [--field=value ...]"
    path, arguments, evaluation = train.parse_run(usage, Arguments, argv)
    loops = train.loop_counts(arguments.loops)
    if evaluation.eval:
        return evaluate(path, evaluation, loops)
    if arguments.prompt is None:
        return diagnose(path)
    model, _, tokenizer = train.load_model(path, "looped_gpt", LoopedGPT)
    idx = torch.tensor([train.encode_prompt(tokenizer, arguments.prompt)], device=model.wte.weight.device)
    new = model.generate(idx, arguments.max_new_tokens, (loops or [None])[-1], arguments.temperature, arguments.top_k,
                         arguments.seed)
    print(tokenizer.decode(new[0].tolist()))


if __name__ == "__main__":
    train.command_line(main)
