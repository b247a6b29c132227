"""The full-bandwidth transformer, after "Full-bandwidth transformer" (Wang et al., arXiv 2608.08888).

Between two tokens a decoder hands on one token id, and the top-layer state h_{t-1} that chose it is thrown away. Here
the state is the next input, and the token only its gate (equation 4): e_t (x) h_{t-1} = (W_U h_{t-1}) * sigmoid(W_G e_t).
Training stays parallel (equations 10 to 12): pass 1 is the ordinary forward, pass k reads the states of pass k - 1
shifted by one. That is a Jacobi iteration, exact at position t after t passes; a few percent of three-pass steps are to
make it contract. Then the state carries on what the stack alone would have to compute anew at every position.

    python train.py fullbandwidth                                    # train the tiny preset
    python train.py fullbandwidth --sweep=passes                     # one pass / 75+25 / 75+22+3: the paper's figure 3
    python train.py fullbandwidth --dataset=running-sum --block_size=32 --mix=0.5,0.4,0.1 --feedback_from=0
    python fullbandwidth.py out/fullbandwidth-tiny                   # every diagnostic for a trained run
    python fullbandwidth.py out/fullbandwidth-tiny --prompt="The " --mode=soft

Letters: B batch, T tokens, D width, V vocabulary, e (B, T, D) embeddings, h^(k) the (B, T, D) final-normed top states of
pass k.
"""
import itertools, math, sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import train
from train import UserError, check_at_least, cross_entropy


@dataclass
class Config:
    vocab_size: int = 50_257  # types; the tokenizer lowers it to what it found
    block_size: int = 64  # tokens in a window, T, and the most that any layer looks back
    n_layer: int = 4  # layers
    n_head: int = 4  # query heads
    n_kv_head: int = 4  # key and value heads, each shared by n_head / n_kv_head query heads
    n_embd: int = 96  # width of the residual stream, D
    mlp_width: int = 256  # hidden width of the SwiGLU
    window: int = 0  # tokens that a layer looks back, itself included; 0: block_size
    full_every: int = 6  # with a window, every so manyth layer has none
    head_gates: bool = False  # each head's output times a sigmoid of the layer's input
    rope_theta: float = 10_000.0  # the slowest rotation's period is about 2 pi theta
    fusion: Literal["gated", "add", "concat"] = "gated"  # (W_U h) * sigmoid(W_G e), e + W_U h, or W_U h + W_G e
    mix: str = "0.75,0.22,0.03"  # shares of steps with 1, 2, 3 .. passes, once feedback has started; 1: a standard model
    feedback_from: float = 0.5  # share of the training that is single-pass before
    depth_scale: bool = True  # residual branches times 1 / sqrt(2 n_layer)
    input_norm: bool = True  # one shared RMSNorm on embeddings and on the stack's inputs
    jitter: float = 0.02  # in training, uniform noise of this size on the states fed back
    prefix_mix: bool = True  # in training, plain inputs before a random position of each sequence
    tied: bool = True  # the readout multiplies with the input embeddings
    document_end: int = -1  # the token after which a document starts, whose first position gets no feedback; -1: none
    modulus: int = 3  # of --dataset=running-sum
    init_from: str = ""  # start from the weights of this run or checkpoint; those of a standard model lack W_U and W_G only

    def __post_init__(self):
        check_at_least(self, 1, "vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "mlp_width",
                       "full_every", "rope_theta")
        check_at_least(self, 0, "window", "jitter")
        check_at_least(self, 2, "modulus")
        if not 0 <= self.feedback_from <= 1:
            raise UserError(f"--feedback_from={self.feedback_from}: expected a share of the training, 0 to 1")
        if self.n_embd % (2 * self.n_head):
            raise UserError(f"--n_embd={self.n_embd} is not divisible by --n_head={self.n_head} into heads of an even width")
        if self.n_head % self.n_kv_head:
            raise UserError(f"--n_head={self.n_head} is not divisible by --n_kv_head={self.n_kv_head}")
        try:
            good = min(self.shares) >= 0 and abs(sum(self.shares) - 1) < 1e-6
        except ValueError:
            good = False
        if not good:
            raise UserError(f"--mix={self.mix}: expected shares that sum to 1, as in --mix=0.75,0.22,0.03")

    @property
    def shares(self):
        """[share of 1-pass steps, of 2-pass steps, ..]."""
        return [float(share) for share in self.mix.split(",")]


PAPER = dict(optimizer="muon", muon_lr=0.01, lr=5e-4, weight_decay=0.01, schedule="wsd", warmup_steps=200)
PRESETS = {
    "tiny": dict(optimizer="muon", muon_lr=0.02, lr=3e-3, max_steps=800, batch_size=32, schedule="wsd", warmup_steps=20,
                 feedback_from=0.25),
    "124m": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, mlp_width=2048, block_size=1024, tokenizer="gpt2",
                 batch_size=16, grad_accum=16, max_steps=5000, log_interval=20, eval_interval=500, **PAPER),
    "1b": dict(vocab_size=100_352, n_layer=24, n_head=16, n_kv_head=8, n_embd=1536, mlp_width=6656, head_gates=True,
               block_size=8192, window=2048, batch_size=36, tokenizer="gpt2", max_steps=0, eval_interval=1000, **PAPER),
}
SHOW = ("ce_1", "val_ce_1", "val_ce_2", "val_ce_3")  # printed beside the loss, and drawn in curves.png


# ---------------------------------------------------------------------------------------------------------------------
# The model

class RMSNorm(nn.Module):
    """h / rms(h) * gain."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, h):
        return F.rms_norm(h, h.shape[-1:], self.gain.to(h.dtype), self.eps)


def rotate(x, rope):
    """RoPE: queries or keys (B, nh, T, hs), each pair (x1, x2) turned by its position's angle; half-rotation layout."""
    (x1, x2), (cos, sin) = x.chunk(2, dim=-1), rope
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with normed queries and keys, RoPE, grouped queries, and sigmoid gates on the heads' outputs."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head, D = config.n_head, config.n_kv_head, config.n_embd
        hs = D // config.n_head
        self.qkv = nn.Linear(D, (self.n_head + 2 * self.n_kv_head) * hs, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.q_norm, self.k_norm = RMSNorm(hs), RMSNorm(hs)
        self.gate = nn.Linear(D, config.n_head, bias=False) if config.head_gates else None

    def forward(self, x, rope, mask=None, cache=None, positions=None):
        B, T, D = x.shape
        heads = self.qkv(x).view(B, T, -1, D // self.n_head).transpose(1, 2)  # (B, nh + 2 nkv, T, hs)
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        if cache is not None and positions is None:  # (2, B, nkv, S, hs): a prefill fills the first T slots
            cache[0, :, :, :T], cache[1, :, :, :T] = k, v
        elif cache is not None:  # one token a row, at a position of its own: what stands in later slots is masked
            rows = torch.arange(B, device=x.device)
            cache[0, rows, :, positions], cache[1, rows, :, positions] = k[:, :, 0], v[:, :, 0]
            k, v = cache
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.n_head > self.n_kv_head)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None]
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x += s norm(attn(norm(x))); x += s norm(mlp(norm(x))). With s = 1 / sqrt(2 n_layer) the top state of unit inputs has
    a norm that does not grow with the number of layers."""

    def __init__(self, config):
        super().__init__()
        self.attn, self.mlp = Attention(config), SwiGLU(config)
        self.norm1, self.norm2, self.norm3, self.norm4 = (RMSNorm(config.n_embd) for _ in range(4))
        self.scale = (2 * config.n_layer) ** -0.5 if config.depth_scale else 1.0

    def forward(self, x, rope, mask=None, cache=None, positions=None):
        x = x + self.scale * self.norm2(self.attn(self.norm1(x), rope, mask, cache, positions))
        return x + self.scale * self.norm4(self.mlp(self.norm3(x)))


class FullBandwidthGPT(nn.Module):
    """Embeddings, a stack of blocks, a readout; with more than one pass in the mix, W_U and W_G that feed states back."""

    def __init__(self, config):
        super().__init__()
        self.config, D = config, config.n_embd
        self.wte = nn.Embedding(config.vocab_size, D)
        self.norm_in = RMSNorm(D) if config.input_norm else nn.Identity()
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.norm = RMSNorm(D)
        self.head = None if config.tied else nn.Linear(D, config.vocab_size, bias=False)
        self.W_U = nn.Linear(D, D, bias=False) if len(config.shares) > 1 else None
        self.W_G = nn.Linear(D, D, bias=False) if len(config.shares) > 1 and config.fusion != "add" else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5)
        for matrix in (self.wte, self.head) if self.head else (self.wte,):
            nn.init.normal_(matrix.weight, std=0.02)

    @property
    def readout_weight(self):
        return self.wte.weight if self.head is None else self.head.weight

    def embed(self, idx):
        """e of tokens (B, T): normed in every pass, so that a plain input is the same in all of them."""
        return self.norm_in(self.wte(idx))

    def stack(self, x, cache=None, positions=None, residuals=None):
        """Final-normed top states (B, T, D) of inputs x (B, T, D).

        cache (n_layer, 2, B, nkv, S, hs): filled from slot 0; with positions (B,), x is one token a row at positions
        of its own and attends to the cache. residuals, a list: receives the residual stream, n_layer + 1 of (B, T, D).
        """
        c, x = self.config, self.norm_in(x)
        hs, kind = c.n_embd // c.n_head, dict(dtype=self.wte.weight.dtype, device=x.device)
        at = torch.arange(x.shape[1], device=x.device)[None] if positions is None else positions[:, None]  # (1, T) or (B, 1)
        angles = at[:, None, :, None] * c.rope_theta ** (-torch.arange(0, hs, 2, **kind) / hs)
        rope, depths, masks = (angles.cos(), angles.sin()), [x], {}
        for i, block in enumerate(self.blocks):
            reach = min(c.window, c.block_size) if c.window and (i + 1) % c.full_every else c.block_size
            if reach not in masks:
                far = positions is not None or x.shape[1] > reach
                masks[reach] = self.mask(at, x.shape[1] if positions is None else cache.shape[-2], reach) if far else None
            x = block(x, rope, masks[reach], None if cache is None else cache[i], positions)
            depths.append(x)
        if residuals is not None:
            residuals[:] = depths
        return self.norm(x)

    @staticmethod
    def mask(at, keys, reach):
        """Which keys, at positions 0 .. keys - 1, the queries at positions `at` may see: the `reach` latest."""
        back = at[:, None, :, None] - torch.arange(keys, device=at.device)
        return (back >= 0) & (back < reach)

    def paths(self, e, h):
        """What the fusion multiplies (gated) or adds: the state's path and the token's."""
        match self.config.fusion:
            case "gated":
                return self.W_U(h), torch.sigmoid(self.W_G(e))
            case "add":
                return self.W_U(h), e
            case "concat":  # one (2 D -> D) matrix on [h, e] is two on h and e
                return self.W_U(h), self.W_G(e)

    def fuse(self, e, h):
        """Equation 4: e_t (x) h_{t-1}, of embeddings e and the states h of the positions before, (.., D) each."""
        state, token = self.paths(e, h)
        return state * token if self.config.fusion == "gated" else state + token

    def plain(self, idx, before=None):
        """Where the input is the plain embedding, (B, T): at the first position of every document. before (B,): the token
        before idx; without, idx starts a document."""
        before = torch.cat([idx.new_full((len(idx), 1), -1) if before is None else before[:, None], idx[:, :-1]], dim=1)
        first = before == self.config.document_end
        return first | (before < 0)

    def feedback(self, h, e, plain):
        """The inputs of the pass after the one with states h, (B, T, D): jitter, shift, fusion, plain inputs restored."""
        if self.training and self.config.jitter:
            h = h + torch.empty_like(h).uniform_(-self.config.jitter, self.config.jitter)
        shifted = F.pad(h[:, :-1], (0, 0, 1, 0))  # position t gets the state of t - 1
        return torch.where(plain[..., None], e, self.fuse(e, shifted))

    def iterate(self, idx):
        """Yield h^(1), h^(2), .. for idx (B, T), without end. Nothing is detached."""
        (B, T), e, plain = idx.shape, self.embed(idx), self.plain(idx)
        if self.training and self.config.prefix_mix:
            plain = plain | (torch.arange(T, device=idx.device) < torch.randint(T, (B, 1), device=idx.device))
        h = self.stack(e)
        while True:
            yield h
            h = self.stack(self.feedback(h, e, plain))

    def passes(self, idx, k):
        """[h^(1) .. h^(k)], each (B, T, D), for idx (B, T); equations 10 and 11."""
        if k < 1:
            raise UserError(f"{k} passes: expected at least 1")
        if k > 1:
            self.need_feedback("a second pass")
        return list(itertools.islice(self.iterate(idx), k))

    def need_feedback(self, what):
        if self.W_U is None:
            raise UserError(f"{what} needs a model trained with feedback, and this one's --mix={self.config.mix} has none")

    def readout(self, h):
        """Logits, (.., D) -> (.., V)."""
        return F.linear(h, self.readout_weight)

    def loss(self, idx, targets, passes=None):
        """(loss, metrics) for idx and targets (B, T), targets -1 where there is no loss; all of the mix's passes by default.

        Equation 12 with lambda = 1: CE_1 + mean_{k >= 2} CE_k. metrics: ce_k, nats.
        """
        k = len(self.config.shares) if passes is None else passes
        rows = torch.cat(self.passes(idx, k)).flatten(0, 1)  # of all passes in one call: no more logits live than for one
        given = (targets >= 0).flatten()
        share = given.to(rows.dtype) / given.sum()
        scale = torch.cat([share] + [share / (k - 1)] * (k - 1))
        loss, ce = cross_entropy(rows, self.readout_weight, targets.clamp_min(0).flatten().repeat(k), scale)
        return loss, {f"ce_{i}": ce_i for i, ce_i in enumerate((ce.view(k, -1) * share).sum(1), 1)}

    def flops_per_token(self):
        """Training FLOPs per token, averaged over the schedule of passes: 6 per weight used, 12 D per key attended to."""
        c = self.config
        reach = [min(c.window, c.block_size) if c.window and (i + 1) % c.full_every else c.block_size for i in range(c.n_layer)]
        keys = sum(r - r * r / (2 * c.block_size) for r in reach)  # the first r positions of a window see fewer
        one = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2) + 2 * keys * c.n_embd + c.vocab_size * c.n_embd
        more = (1 - c.feedback_from) * sum(k * share for k, share in enumerate(c.shares))  # passes beyond the first
        fusion = sum(m.weight.numel() for m in (self.W_U, self.W_G) if m is not None)
        return 6 * (one + more * (one + fusion))

    def load_weights(self, path, tokenizer):
        """Start from a checkpoint of this architecture with the same tokenizer, W_U and W_G missing or not."""
        ckpt = train.load_checkpoint(path, "fullbandwidth")
        try:
            missing, unexpected = self.load_state_dict(ckpt["weights"], strict=False)
        except RuntimeError as error:
            raise UserError(f"--init_from={path} has other shapes: {' '.join(str(error).split())[:200]}") from None
        if extra := [*unexpected, *(set(missing) - {"W_U.weight", "W_G.weight"})]:
            raise UserError(f"--init_from={path} is of another architecture: {', '.join(sorted(extra))}")
        if ckpt["tokenizer"] != tokenizer.spec:
            raise UserError(f"--init_from={path} was trained with another tokenizer or vocabulary")

    def new_cache(self, B, S):
        c, like = self.config, self.wte.weight
        return like.new_zeros(c.n_layer, 2, B, c.n_kv_head, S, c.n_embd // c.n_head)

    @torch.no_grad()
    def recurrent(self, idx, prefill=1, residuals=None):
        """Final-normed states (B, T, D) of the sequential recurrence, which is soft decoding with idx (B, T) as the tokens:
        a plain prefill of the first `prefill`, then each position fused with the state of the one before, with a KV cache.
        residuals, a list: receives the residual stream of the last call of the stack."""
        (B, T), e, plain = idx.shape, self.embed(idx), self.plain(idx)[..., None]
        if prefill < T:
            self.need_feedback("the recurrence")
        cache = self.new_cache(B, T)
        states = [self.stack(e[:, :prefill], cache, residuals=residuals)]
        for t in range(prefill, T):
            x = torch.where(plain[:, t:t + 1], e[:, t:t + 1], self.fuse(e[:, t:t + 1], states[-1][:, -1:]))
            states.append(self.stack(x, cache[..., :t + 1, :], idx.new_full((B,), t), residuals))
        return torch.cat(states, dim=1)

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, mode="standard", prefill_passes=1, temperature=1.0, top_k=None, seed=None,
                 stop=()):
        """The tokens that continue each prompt, as lists; each ends with its first token of `stop`. temperature 0 is greedy.

        prompts: lists of tokens, of any lengths up to block_size. standard: a plain prefill, then token embeddings. soft: a
        plain prefill, then every generated token is fused with the state that chose it. fused: the prompt gets
        prefill_passes fused passes more, each one's cache replacing the last one's; then as soft.
        """
        if mode not in MODES:
            raise UserError(f"--mode={mode}: no such mode; {train.nearest(mode, MODES)}")
        if mode != "standard":
            self.need_feedback(f"--mode={mode}")
        if not min(map(len, prompts), default=0):
            raise UserError("an empty prompt: there is nothing to continue")
        if (T := max(map(len, prompts))) > self.config.block_size:
            raise UserError(f"a prompt of {T} tokens is longer than the context of {self.config.block_size}: shorten it")
        device, B = self.wte.weight.device, len(prompts)
        generator = torch.Generator(device).manual_seed(seed) if seed is not None else None
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        idx = torch.tensor([[*p] + [0] * (T - len(p)) for p in prompts], device=device)  # what pads the right is never seen
        cache, e = self.new_cache(B, T + max_new_tokens), self.embed(idx)
        h = self.stack(e, cache)
        for _ in range(prefill_passes if mode == "fused" else 0):
            h = self.stack(self.feedback(h, e, self.plain(idx)), cache)
        last = torch.arange(B, device=device), lengths - 1
        h, token, new = h[last], idx[last], [[] for _ in prompts]
        for n in range(max_new_tokens):
            if n:
                x = e = self.embed(token[:, None])
                if mode != "standard":
                    x = torch.where(self.plain(token[:, None], before)[..., None], e, self.fuse(e, h[:, None]))
                h = self.stack(x, cache[..., :T + n, :], lengths + n - 1)[:, 0]
            before, token = token, sample_token(self.readout(h), temperature, top_k, generator)
            for row, t in zip(new, token.tolist()):
                if not row or row[-1] not in stop:
                    row.append(t)
            if all(row[-1] in stop for row in new):
                break
        return new


MODES = ("standard", "soft", "fused")


def sample_token(logits, temperature, top_k, generator):
    """One token per row of logits (B, V)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return logits.argmax(-1)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:], -math.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


# ---------------------------------------------------------------------------------------------------------------------
# Training. train.py's Run does the rest: devices, data, optimiser, schedule, evaluation, log, checkpoints.

def sample_passes(config, seed, step, max_steps):
    """The number of passes of a training step, a pure function of (seed, step): resuming makes the same draws."""
    if step <= config.feedback_from * max_steps:
        return 1
    return 1 + int(np.random.default_rng([seed, step, 1]).choice(len(config.shares), p=config.shares))


def train_model(run):
    model = run.start(FullBandwidthGPT(run.config))
    if run.config.init_from and run.step == 0:
        model.load_weights(run.config.init_from, run.data.tokenizer)
    for step in run.steps():
        passes = sample_passes(run.config, run.options.seed, step, run.max_steps)
        for idx, targets in run.batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, passes)
            run.backward(loss, metrics)
        run.update()
    ces = [f"{run.rows[-1][f'val_ce_{k}']:.3f}" for k in range(1, len(run.config.shares) + 1)]
    run.say(f"validation loss after each pass: {', '.join(ces)}: see {run.out}/curves.png, then run\n"
            f"python fullbandwidth.py {run.out}")


# ---------------------------------------------------------------------------------------------------------------------

def main(argv):
    raise UserError("not written yet")


if __name__ == "__main__":
    train.command_line(main)
