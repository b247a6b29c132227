"""Looped GPT and the readout blind spot (arXiv 2606.24898).

After Sharma & Vu, "Dense Supervision Is Not Enough: The Readout Blind Spot in Looped Language
Models". A stack of pre-norm layers is applied K times, and cross-entropy on every loop's readout
trains early exits. But a readout through RMSNorm gives r(a H) = r(H) for every a > 0: CE_k cannot
see the scale of the H_k that it reads (Lemma 1; the CE of a later loop can, through the residual
stream). The residual stream keeps moving that scale, while the direction turns less and less, as
1 / ||H|| (Lemma 2). So dense supervision (per_loop) trains exits but does not control the scale.
What does: a loss that sees it (readout raw, norm_penalty), or a norm between the loops
(inter_loop_norm), after which no loop depends on it.

    python train.py looped_gpt                         # train the tiny preset
    python looped_gpt.py out/looped_gpt-tiny           # what each loop's loss is, and what it sees
    python looped_gpt.py out/looped_gpt-tiny --prompt="The " --loops=1,2,4
    python experiments/blind_spot.py table1            # the paper's seven conditions

Letters: B batch, T tokens, D width, V vocabulary, nh heads of size hs, K loops, E the embeddings
(V, D). H_k is the state (B, T, D) after loop k; s = ||H|| its scale and u = H / s its direction,
per token. In a shape, B T is the product.
"""
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

import train
from train import BelowOne, Count, Seed, Size, UserError, check_fields, cross_entropy

Readout = Literal["rmsnorm", "raw", "final_only"]
Supervision = Literal["terminal", "per_loop", "adaptive"]
GateInput = Literal["normed", "raw"]


@dataclass
class Config:
    vocab_size: Size = 20_000  # types; the tokenizer lowers it to what it found
    block_size: Size = 64  # tokens in a window, T
    n_layer: Count = 2  # layers in the stack that is looped
    n_head: Count = 4  # attention heads
    n_embd: Size = 128  # width of the residual stream, D
    num_loops: Count = 4  # times the stack is applied, K
    dropout: BelowOne = 0.0  # on the embeddings and on each sublayer's output
    readout: Readout = "rmsnorm"  # r in logits = r(H) E^T; final_only: raw before loop K
    supervision: Supervision = "per_loop"  # loss at loop K, at every loop, or by an exit gate
    gate_input: GateInput = "normed"  # the exit gate reads r(H_k), or H_k as in the release
    norm_penalty: float = 0.0  # lambda of lambda * mean_k mean(H_k^2); the paper: 0.01
    inter_loop_norm: bool = False  # RMSNorm the state before it enters the next loop
    cut_gradient: bool = False  # no gradient of a loop's loss flows into the loops before it
    embd_std: float = 1.0  # std of the initial embeddings; 1.0 is what the authors' release has

    def __post_init__(self):
        check_fields(self)
        if self.n_embd % self.n_head:
            raise UserError(f"--n_embd={self.n_embd} is not divisible by --n_head={self.n_head}")


PAPER = dict(block_size=256, stride=128, tokenizer="regex", dropout=0.1, lr=3e-4, max_steps=0,
             epochs=4, log_interval=50, eval_interval=1000, eval_batches=20)
PRESETS = {
    "tiny": dict(max_steps=600, batch_size=32, lr=3e-3, warmup_steps=20),
    "44m": dict(n_layer=8, n_head=8, n_embd=512, batch_size=64, **PAPER),
    "129m": dict(n_layer=12, n_head=12, n_embd=768, batch_size=32, **PAPER),
}
SHOW = ("final_norm",)  # printed beside the loss
CURVES = (("loss", "linear", ("train_loss", "val_loss")),  # the panels of curves.png
          ("mean ||H_K||", "log", ("final_norm", "val_final_norm")))


# --------------------------------------------------------------------------------------------------
# The model

class RMSNorm(nn.Module):
    """h / rms(h) * gain, with rms(h) = ||h|| / sqrt(D): blind to the scale of h, except for eps."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, h):
        return F.rms_norm(h, h.shape[-1:], self.gain, self.eps)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cache=None, start=0):
        """x (B, T, D): the tokens from position `start` on. cache (2, B, nh, S, hs): the keys and
        values of the tokens before, to which theirs are added."""
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, D // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 x (B, nh, T, hs)
        if cache is not None:
            end = start + T
            cache[0, :, :, start:end] = k
            cache[1, :, :, start:end] = v
            k, v = cache[:, :, :, :end]  # 2 x (B, nh, end, hs)
        # Behind cached tokens x is one token, which may look at all that there is: no mask.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0)
        y = y.transpose(1, 2).reshape(B, T, D)  # (B, nh, T, hs) -> (B, T, D)
        return self.out(y)


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x), of hidden width 4 D."""

    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 8 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm: x += attn(norm(x)); x += ffn(norm(x)). A sublayer is blind to its input's scale."""

    def __init__(self, config):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.n_embd)
        self.ffn = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None, start=0):
        x = x + self.dropout(self.attn(self.norm1(x), cache, start))
        x = x + self.dropout(self.ffn(self.norm2(x)))
        return x


class LoopedGPT(nn.Module):
    """Embeddings, a stack of blocks applied K times, readout through the embeddings (section 3)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.norm = RMSNorm(config.n_embd) if config.readout != "raw" else None
        self.loop_norm = RMSNorm(config.n_embd) if config.inter_loop_norm else nn.Identity()
        self.gate = nn.Linear(config.n_embd, 1) if config.supervision == "adaptive" else None
        self.dropout = nn.Dropout(config.dropout)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=config.embd_std)

    def embed(self, idx, start=0):
        """(B, T) tokens from position `start` on -> (B, T, D)."""
        end = start + idx.shape[1]
        if end > self.config.block_size:
            raise UserError(f"{end} tokens are more than the model's window of "
                            f"{self.config.block_size}, --block_size: cut the text into windows")
        return self.dropout(self.wte(idx) + self.wpe.weight[start:end])

    def loop(self, h, k=1, cache=None, start=0):
        """One application of the stack, (B, T, D) -> (B, T, D). k only says whose cache it uses."""
        for layer, block in enumerate(self.blocks):
            slot = None if cache is None else cache[k - 1, layer]
            h = block(h, slot, start)
        return h

    def states(self, idx, num_loops=None, clamp=None, cache=None, start=0):
        """[H_1 .. H_K], each (B, T, D), for idx (B, T); num_loops may be more than the trained K.

        clamp: "freeze_loop1" or "remove_radial" changes every later H_k, before it is read out and
        fed into the next loop.
        """
        K = num_loops or self.config.num_loops
        h = self.loop(self.embed(idx, start), 1, cache, start)
        states = [h]
        for k in range(2, K + 1):
            if self.config.cut_gradient:
                h = h.detach()
            h = self.loop(self.loop_norm(h), k, cache, start)
            if clamp == "freeze_loop1":
                h = freeze_loop1(h, states[0])
            elif clamp == "remove_radial":
                h = remove_radial(h, states[-1])
            states.append(h)
        return states

    def readout_input(self, h, final):
        """r(H), which is multiplied with the embeddings. final: H is H_K, or of a later loop."""
        match self.config.readout:
            case "rmsnorm":
                return self.norm(h)
            case "raw":
                return h
            case "final_only":
                return self.norm(h) if final else h

    def readout(self, h, final=True):
        """Logits r(H) E^T, (..., D) -> (..., V)."""
        return F.linear(self.readout_input(h, final), self.wte.weight)

    def loss(self, idx, targets, num_targets=None):
        """(loss, metrics) for idx and targets (B, T); a target of -1 is none.

        The loss is the mean over targets of
            terminal   CE_K
            per_loop   mean_k CE_k
            adaptive   sum_k p_k CE_k - 0.1 entropy(p), p from the exit gate
        plus norm_penalty * mean_k mean(H_k^2). A gate that reads the raw H_k lets the adaptive loss
        see the scale, whatever r is: then Lemma 1 does not hold.
        num_targets: what the mean divides by, where this is a part of a larger batch.
        metrics: ce_k for the loops that are read out, final_norm = mean ||H_K||.
        """
        c = self.config
        K = c.num_loops
        states = self.states(idx)
        loops = range(1, K + 1)
        if c.supervision == "terminal" and self.training:
            loops = [K]  # in training no other readout is needed
        x = torch.stack([self.readout_input(states[k - 1], final=k == K) for k in loops])
        x = x.flatten(1, 2)  # (loops, B, T, D) -> (loops, B T, D)

        # A mean over targets is a sum in which each token has the share 1 / num_targets, or 0.
        targets = targets.flatten()
        is_target = targets >= 0
        if num_targets is None:
            num_targets = is_target.sum()
        share = is_target.to(self.wte.weight.dtype) / num_targets  # (B T)

        # With ce (loops, B T) the cross-entropies, the loss is (weights * ce).sum(). train.py
        # computes it together with its gradient, so it needs the weights beforehand.
        if c.supervision == "terminal":  # the mean of ce[-1]
            weights = share.new_zeros(len(loops), len(share))
            weights[-1] = share
        elif c.supervision == "per_loop":  # the mean of ce.mean(0)
            weights = share.expand(len(loops), -1) / len(loops)
        else:  # the mean of (p * ce).sum(0)
            gate_input = torch.stack(states).flatten(1, 2) if c.gate_input == "raw" else x
            g = torch.sigmoid(self.gate(gate_input))[..., 0]  # (K, B T)
            p = exit_probabilities(g.to(x.dtype))  # out of autocast's bfloat16
            weights = p * share  # the gate learns through it: its gradient is that of p, times ce
        loss, ce = cross_entropy(x.flatten(0, 1), self.wte.weight,
                                 targets.clamp_min(0).repeat(len(loops)), weights.flatten())
        ce = ce.view(len(loops), -1)  # without gradient
        if c.supervision == "adaptive":
            minus_entropy = (share * p * p.clamp_min(1e-9).log()).sum()
            loss = loss + 0.1 * minus_entropy
        if c.norm_penalty:
            loss = loss + c.norm_penalty * sum(h.square().mean() for h in states) / K

        metrics = {f"ce_{k}": ce_k for k, ce_k in zip(loops, (share * ce).sum(1))}
        metrics["final_norm"] = states[-1].detach().norm(dim=-1).mean()
        return loss, metrics

    def flops_per_token(self):
        """Training FLOPs per token: 6 per weight and loop; 6 T D per causal attention and loop."""
        c = self.config
        weights = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        attention = c.n_layer * c.block_size * c.n_embd
        readouts = 1 if c.supervision == "terminal" else c.num_loops
        return 6 * ((weights + attention) * c.num_loops + c.vocab_size * c.n_embd * readouts)

    def new_cache(self, B, S, K):
        """Room for keys and values of S tokens, one slot for each (loop, layer)."""
        c = self.config
        return self.wte.weight.new_empty(K, c.n_layer, 2, B, c.n_head, S, c.n_embd // c.n_head)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, num_loops=None, temperature=1.0, top_k=None, seed=None,
                 use_cache=True):
        """Continue idx (B, T) by max_new_tokens, exiting after num_loops. temperature 0 is greedy.

        When the window is full, its newest half is read again as a window of its own, since learned
        positions cannot slide; without the cache too, so that both give the same tokens.
        """
        c = self.config
        K = num_loops or c.num_loops
        generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        cache = self.new_cache(len(idx), c.block_size, K) if use_cache else None
        begin = max(0, idx.shape[1] - c.block_size)  # where the window begins in idx
        cached = 0  # how many of the window's tokens are in the cache
        for _ in range(max_new_tokens):
            if idx.shape[1] - begin > c.block_size:
                begin = idx.shape[1] - max(1, c.block_size // 2)
                cached = 0
            h = self.states(idx[:, begin + cached:], K, cache=cache, start=cached)[-1]
            if use_cache:
                cached = idx.shape[1] - begin
            logits = self.readout(h[:, -1], final=K >= c.num_loops)
            token = train.sample_token(logits, temperature, top_k, generator)
            idx = torch.cat([idx, token], dim=1)
        return idx


def exit_probabilities(g):
    """p_k = g_k prod_{j<k} (1 - g_j) of an exit gate's g, (K, N); loop K takes the rest."""
    one = torch.ones_like(g[:1])
    leaves = torch.cat([g[:-1], one])
    not_left_before = torch.cat([one, (1 - g[:-1]).cumprod(0)])
    return leaves * not_left_before


# The paper's two interventions at inference. h, h_1, before: H_k, H_1, H_{k-1}, each (B, T, D).

def freeze_loop1(h, h_1):
    """Rescale every token to the norm that it had after loop 1."""
    return h * (h_1.norm(dim=-1, keepdim=True) / h.norm(dim=-1, keepdim=True))


def remove_radial(h, before):
    """Drop from H_k - H_{k-1} what is parallel to H_{k-1}."""
    u = F.normalize(before, dim=-1)
    radial = ((h - before) * u).sum(-1, keepdim=True)
    return h - radial * u


# --------------------------------------------------------------------------------------------------
# Training. train.py's Run does what stands behind these names: devices, data, log, checkpoints.

def train_model(run):
    model = run.prepare(LoopedGPT(run.config))  # to its device, compiled; with --resume, as saved
    while run.step < run.max_steps:
        run.begin_step()  # and set its learning rate
        for idx, targets, num_targets in run.micro_batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, num_targets)
            run.backward(loss, metrics)
        run.average_gradients()  # over the processes of torchrun
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.options.max_grad_norm)
        run.optimizer_step(grad_norm)
        run.end_step()  # log, evaluate, save; exit here if Ctrl-C has asked for it
    run.finish()
    evaluations = [row for row in run.rows if "val_loss" in row]
    first, last = evaluations[0], evaluations[-1]
    ce = f"val_ce_{run.config.num_loops}"
    run.say(f"validation loss at full depth {first[ce]:.2f} -> {last[ce]:.4f}, "
            f"mean ||H_K|| {first['val_final_norm']:.1f} -> {last['val_final_norm']:.1f}: "
            f"see {run.out}/curves.png, then run\npython looped_gpt.py {run.out}")


# --------------------------------------------------------------------------------------------------
# The paper's instruments. `batches` is a list of (idx, targets), each (B, T).

def token_loss(model, h, k, targets):
    """CE of each token, (B, T), read out from the state h after loop k."""
    x = model.readout_input(h, final=k >= model.config.num_loops).flatten(0, 1)  # (B T, D)
    _, ce = cross_entropy(x, model.wte.weight, targets.flatten(), x.new_ones(len(x)))
    return ce.view(targets.shape)


@torch.no_grad()
def loss_per_loop(model, batches, num_loops=None, clamp=None):
    """Cross-entropy in nats of every loop's readout, (K,); PPL is its exp."""
    total = 0.0
    for idx, targets in batches:
        states = model.states(idx, num_loops, clamp)
        ce = [token_loss(model, h, k, targets).mean() for k, h in enumerate(states, start=1)]
        total = total + torch.stack(ce)
    return total / len(batches)


def radial_cosine(g, h):
    """<g, h> / (||g|| ||h||) of each token, (B, T), for g and h (B, T, D)."""
    # The squares of a small g would underflow; scaled, it has the same cosine. A token with g = 0
    # gives NaN, which nanmean leaves out.
    g = g / g.abs().amax(-1, keepdim=True)
    return (g * h).sum(-1) / (g.norm(dim=-1) * h.norm(dim=-1))


def radial_gradient_fraction(model, batches):
    """Lemma 1's quantity, (K,): the mean over tokens of |<g, H_k>| / (||g|| ||H_k||), g being the
    gradient of CE_k with respect to H_k. 0: the loss does not see the scale; 1: it sees only that.

    CE_k(a H_k) is constant in a if its derivative at a = 1, <g, H_k>, is 0. Only the path through
    loop k's own readout counts here, not the one through later loops.
    """
    total = 0.0
    for idx, targets in batches:
        with torch.no_grad():
            states = model.states(idx)
        fractions = []
        for k, h in enumerate(states, start=1):
            h = h.detach().requires_grad_()
            logits = model.readout(h, final=k >= model.config.num_loops)
            ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            g, = torch.autograd.grad(ce, h)
            fractions.append(radial_cosine(g, h.detach()).abs().nanmean())
        total = total + torch.stack(fractions)
    return total / len(batches)


def scale_and_direction(before, after):
    """Lemma 2's quantities for one loop from H to H', per token: the scale s, the radial increment
    <u, H' - H>, and the angular step ||u' - u||."""
    s = before.norm(dim=-1)
    u = F.normalize(before, dim=-1)
    radial = (u * (after - before)).sum(-1)
    angular = (F.normalize(after, dim=-1) - u).norm(dim=-1)
    return s, radial, angular


@torch.no_grad()
def scale_dynamics(model, batches, num_loops=30):
    """Lemma 2 along any number of loops, also beyond the trained K: (num_loops - 1, 4).

    Row k - 1 has the means over tokens of s_k, of the radial increment and of the angular step from
    H_k to H_{k+1}, and of angular step * s_k, which should stay about constant.
    """
    total = 0.0
    for idx, _ in batches:
        states = torch.stack(model.states(idx, num_loops))  # (num_loops, B, T, D)
        s, radial, angular = scale_and_direction(states[:-1], states[1:])
        columns = [x.mean((1, 2)) for x in (s, radial, angular, angular * s)]
        total = total + torch.stack(columns, dim=1)
    return total / len(batches)


@torch.no_grad()
def lemma2_prediction(model, h):
    """What Lemma 2 predicts for one loop from h (B, T, D): (a_rad, ||b_perp|| / s), each (B, T).

    Phi being one loop, without a norm between loops, b(u) = lim Phi(su) - su for s -> inf: every
    sublayer sees Norm(su), since what the earlier ones add vanishes beside su. The radial increment
    is a_rad + O(1/s), the angular step ||b_perp|| / s + O(1/s^2).
    """
    s = h.norm(dim=-1)
    u = F.normalize(h, dim=-1)
    x = u * math.sqrt(u.shape[-1])  # Norm(su) without its gain: beside this s, eps is nothing
    b = torch.zeros_like(h)
    for block in model.blocks:
        b += block.attn(x * block.norm1.gain) + block.ffn(x * block.norm2.gain)
    a_rad = (b * u).sum(-1)
    b_perp = b - a_rad[..., None] * u
    return a_rad, b_perp.norm(dim=-1) / s


@torch.no_grad()
def norm_quantiles(model, batches):
    """Mean, median, p99, max and std of ||H_K|| over tokens."""
    norms = [model.states(idx)[-1].norm(dim=-1).flatten() for idx, _ in batches]
    norms = torch.cat(norms).float()
    values = {"mean": norms.mean(), "median": norms.median(), "p99": norms.quantile(0.99),
              "max": norms.max(), "std": norms.std()}
    return {name: value.item() for name, value in values.items()}


def print_loops(model, batches):
    """The paper's claim in one table: each loop's loss, what it sees, what the state does."""
    c = model.config
    K = c.num_loops
    print(f"readout {c.readout}, supervision {c.supervision}, norm penalty {c.norm_penalty}, "
          f"K = {K}")
    ce = loss_per_loop(model, batches).tolist()
    fraction = radial_gradient_fraction(model, batches).tolist()
    # One loop more than was trained: the angular step at loop K leads there.
    scale, _, angular_step, _ = scale_dynamics(model, batches, K + 1).T.tolist()
    print("loop      CE      PPL   scale   radial gradient fraction   angular step to next loop")
    for i in range(K):
        print(f"{i + 1:4d}  {ce[i]:6.4f}  {train.perplexity(ce[i]):7.3f}  {scale[i]:6.1f}"
              f"  {fraction[i]:25.1e}  {angular_step[i]:26.5f}")
    seen = sum(value > 1e-4 for value in fraction)  # rounding and RMSNorm's eps leave less
    print(f"Lemma 1: the cross-entropies of {seen} of the {K} loops see the scale of the "
          f"state that they read.\n"
          f"Lemma 2: from loop 1 to {K} the scale goes from {scale[0]:.1f} to {scale[-1]:.1f}, "
          f"the angular step from {angular_step[0]:.3f} to {angular_step[-1]:.3f}.")


# --------------------------------------------------------------------------------------------------
# python looped_gpt.py RUN

@dataclass
class Arguments:
    prompt: str = None  # text to continue; without it, the table of loops is printed
    loops: str = None  # exit after this loop, or each of some, as 1,2; by default the trained one
    max_new_tokens: int = 200  # how many tokens to generate
    temperature: Annotated[float, 0, 100] = 0.8  # 0: greedy
    top_k: int = 50  # sample from the k likeliest; 0: from all
    seed: Seed = 42  # seed of the sampling

    def __post_init__(self):
        check_fields(self)
        if self.prompt == "":
            raise UserError("--prompt is empty: give at least one character to continue")


def main(argv):
    usage = "python looped_gpt.py RUN [--prompt=TEXT] [--field=value ...]"
    path, a = train.parse_run(usage, Arguments, argv)
    model, options, tokenizer = train.load_model(path, "looped_gpt", LoopedGPT)
    if a.prompt is None:
        _, batches = train.validation_batches(options, tokenizer, model)
        return print_loops(model, batches)
    prompt = train.encode_prompt(tokenizer, a.prompt)
    idx = torch.tensor([prompt], device=model.wte.weight.device)
    loops = train.loop_counts(a.loops) or [model.config.num_loops]
    for num_loops in loops:
        if len(loops) > 1:
            print(f"--- exit after loop {num_loops}")
        text = model.generate(idx, a.max_new_tokens, num_loops, a.temperature, a.top_k, a.seed)
        print(tokenizer.decode(text[0].tolist()))


if __name__ == "__main__":
    train.command_line(main)
