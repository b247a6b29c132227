"""STARS: loops that never hurt, after "Stabilizing Recurrent Dynamics for Test-Time Scalable Latent Reasoning in Looped
Language Models" (Yang et al., arXiv 2605.26733).

A looped transformer iterates h^(t+1) = Phi(h^(t)). More loops than it was trained with never hurt if the iteration
converges: if the spectral radius rho of the Jacobian J of Phi is below 1 at the state it tends to. STARS trains for it:
external normalisation bounds the state, random loop counts move the supervised state towards the limit, and JSRR
penalises ||J v||^2 for a random unit v at h^(t), the state after the sampled loop t, which is read out:
loss = (1 - lambda) CE + lambda ||J v||^2.

    python train.py stars                                            # 4-digit addition with STARS
    python train.py stars --preset=baseline                          # the same model without: rises, peaks, collapses
    python train.py stars --sweep=normalization                      # 4 placements x 3 types of norm
    python train.py stars --sweep=ablation                           # what random loops and JSRR each do; other remedies
    python train.py stars --sweep=optimizer                          # the default against AdamW at the paper's settings
    python stars.py out/stars-addition                               # accuracy against loops, convergence, spectra
    python stars.py out/stars-addition --ask=1750+4733 --loops=1,2,4,8,64
    python train.py stars --preset=ouro-1.4b --init_from=DIRECTORY   # fine-tune Ouro-1.4B, one 80 GB GPU
    python stars.py out/stars-ouro-1.4b --eval=gsm8k --loops=1,2,4,8 # in lm-evaluation-harness

What one random v measures is *not* rho: E ||J v||^2 = ||J||_F^2 / N, the mean squared gain, for J v and J^T v alike.
Power steps on J (or on its transpose) go to the dominant eigenvector, hence to rho; on J^T J to sigma_max, the largest
singular value, which is at least rho. Where J is far from normal all three differ: `python stars.py RUN` prints them.

Letters: B batch, T tokens, D width, h^(t) the (B, T, D) state after loop t, N = T D, J the (N, N) Jacobian of one loop.
"""
import copy, itertools, json, math, re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import train
from train import BelowOne, Count, Share, Size, UserError, check_fields, cross_entropy


@dataclass
class Config:
    vocab_size: Size = 15  # types; the data set it
    block_size: Size = 16  # tokens in a window, T; the addition data set it
    digits: Annotated[int, 2, 8] = 4  # digits of each operand of the sums, 2 to 8
    n_layer: Count = 1  # layers in the stack that is looped
    n_prelude: Annotated[int, 0, 10_000] = 0  # layers before the loop
    n_coda: Annotated[int, 0, 10_000] = 0  # layers after the loop
    n_head: Count = 4  # attention heads
    n_embd: Size = 128  # width of the state, D
    mlp_width: Size = 512  # hidden width of the MLP
    activation: Literal["gelu", "swiglu"] = "gelu"  # of the MLP
    placement: Literal["pre", "post", "pre_sandwich", "post_sandwich"] = "post_sandwich"  # of a sublayer's norms
    norm: Literal["layernorm", "rmsnorm", "simple"] = "layernorm"  # of the loop; simple: LayerNorm without gain or bias
    residual_scale: float = 1.0  # a in a x + f(x); DeepNorm: (2 layers)^(1/4)
    state_norm: bool = False  # normalise the state after each loop, for the readout and for the next loop
    positions: Literal["learned", "rope"] = "learned"  # position embeddings, or rotations of queries and keys
    rope_theta: Annotated[float, 1, 10**9] = 10_000.0  # the slowest rotation's period is about 2 pi theta
    tied: bool = True  # the readout multiplies with the input embeddings
    exit_gate: bool = False  # carry Ouro's exit gate, which STARS neither uses nor trains
    dropout: BelowOne = 0.0  # on the embeddings and on each sublayer's output
    num_loops: Count = 4  # loops when fixed, the Poisson mean, and the loops of an evaluation
    loop_sampling: Literal["fixed", "lognormal", "poisson", "uniform"] = "lognormal"  # t of each training step
    loop_mu: Annotated[float, -10, 10] = 1.4  # log-normal: log of the median
    loop_sigma: float = 0.5  # log-normal: std of the log
    min_loops: Count = 1  # random t are clipped from below, and uniform ones start here
    max_loops: Count = 16  # and from above, and end here
    l2_penalty: float = 0.0  # weight of mean ||h^(t) - h^(t-1)||, a remedy that fails
    jsrr_lambda: Share = 0.1  # weight of JSRR against the cross-entropy, 0 to 1; 0: none
    jsrr_mode: Literal["vjp", "jvp"] = "vjp"  # J^T v in reverse mode, cheaper here, or J v in forward mode
    jsrr_rows: Annotated[float, 0.001, 1] = 0.25  # share of the batch's rows at which J is taken, one row at least
    jsrr_detach: bool = False  # no gradient of JSRR through the state, as in the authors' release
    jsrr_after: int = 0  # training steps before JSRR sets in; in the authors' release those of the warm-up
    checkpointing: bool = False  # keep only each layer's input for the backward pass and run the layer again there
    init_from: str = ""  # a Hugging Face directory of Ouro's layout to start from: weights, tokenizer, chat template

    def __post_init__(self):
        check_fields(self)
        if self.min_loops > self.max_loops:
            raise UserError(f"--min_loops={self.min_loops} is more than --max_loops={self.max_loops}")
        if self.n_embd % self.n_head:
            raise UserError(f"--n_embd={self.n_embd} is not divisible by --n_head={self.n_head}")
        if self.positions == "rope" and self.n_embd // self.n_head % 2:
            raise UserError(f"--positions=rope needs heads of an even width, not {self.n_embd // self.n_head}")
        if self.checkpointing and self.jsrr_lambda and self.jsrr_mode == "vjp":
            raise UserError("--checkpointing needs --jsrr_mode=jvp: reverse mode cannot run a layer again")


TOY = dict(dataset="addition", optimizer="muon", muon_lr=0.008, lr=2e-3, max_steps=1800, batch_size=256, schedule="wsd",
           decay_share=0.4, warmup_steps=20, log_interval=25, eval_interval=250, eval_batches=4)
OURO = dict(vocab_size=49_152, block_size=2048, n_layer=24, n_head=16, n_embd=2048, mlp_width=5632, activation="swiglu",
            placement="pre_sandwich", norm="rmsnorm", state_norm=True, positions="rope", rope_theta=1e6, tied=False,
            exit_gate=True, num_loops=4)
PRESETS = {
    "addition": TOY,
    "small": TOY | dict(digits=3, n_embd=64, mlp_width=256, batch_size=128, max_steps=2000, eval_interval=100),
    "baseline": TOY | dict(loop_sampling="fixed", jsrr_lambda=0.0),
    "paper": dict(dataset="addition", n_head=8, n_embd=512, mlp_width=1024, dropout=0.1, loop_mu=2.0, loop_sigma=0.7,
                  max_loops=100, num_loops=8, jsrr_rows=1.0, jsrr_detach=True, jsrr_after=2000, lr=1e-4, warmup_steps=2000,
                  schedule="cosine", grad_clip=0.0, max_steps=10_000, batch_size=512, log_interval=50,
                  eval_interval=500, eval_batches=4),
    "ouro-1.4b": OURO | dict(
        loop_mu=1.7, loop_sigma=0.4, jsrr_mode="jvp", jsrr_rows=1.0, checkpointing=True, lr=1e-6, beta2=0.95,
        weight_decay=0.0, max_steps=12_500, schedule="wsd", warmup_steps=1250, decay_share=0.1, batch_size=2, grad_accum=16,
        dataset="AI-MO/NuminaMath-1.5", tokenizer="hub", log_interval=10, eval_interval=500, eval_batches=32),
}
SHOW = ("loops", "jsrr", "val_exact")  # printed beside the loss, and drawn in curves.png
LOOPS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)  # where accuracy is measured
ANSWER_LOOPS = (1, 2, 3, 4, 6, 8, 12, 16)  # of a fine-tuned Ouro


# ---------------------------------------------------------------------------------------------------------------------
# The model

class Norm(nn.Module):
    """layernorm: (h - mean) / std * gain + bias. rmsnorm: h / rms * gain. simple: (h - mean) / std.

    In PyTorch 2.13 the gradient of F.layer_norm's forward-mode derivative is wrong; that of F.rms_norm's is right.
    """

    def __init__(self, config):
        super().__init__()
        self.kind, self.by_rms, D = config.norm, config.jsrr_mode == "jvp", config.n_embd
        self.gain = nn.Parameter(torch.ones(D)) if self.kind != "simple" else None
        self.bias = nn.Parameter(torch.zeros(D)) if self.kind == "layernorm" else None

    def forward(self, h):
        if self.kind == "rmsnorm":
            return F.rms_norm(h.to(self.gain.dtype), h.shape[-1:], self.gain, 1e-6)  # float32 under autocast
        if self.by_rms:
            h = F.rms_norm(h - h.mean(-1, keepdim=True), h.shape[-1:], self.gain, 1e-6)
            return h if self.bias is None else h + self.bias
        return F.layer_norm(h, h.shape[-1:], self.gain, self.bias, 1e-6)


class Attention(nn.Module):
    """Causal, in elementary operations: the fused kernels have neither second derivatives nor forward mode. Of a model for
    windows above 64 tokens, where T x T weights are large, it is a fused kernel after all, and `product` has PyTorch take
    that apart."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.fused = config.block_size > 64  # by the model, not by the window: a compiled graph serves every length
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, rope=None, cache=None, start=0):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # each (B, nh, T, hs)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:  # (2, B, nh, block_size, hs): this (loop, layer)'s keys and values so far
            cache[0, :, :, start:start + T], cache[1, :, :, start:start + T] = k, v
            k, v = cache[:, :, :, :start + T]
        if self.fused and not start:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(B, T, D))
        future = torch.ones(T, start + T, dtype=torch.bool, device=x.device).triu(start + 1)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(D // self.n_head)).masked_fill(future, -math.inf).softmax(-1)
        return self.out((weights.to(v.dtype) @ v).transpose(1, 2).reshape(B, T, D))


def rope_table(config):
    """cos and sin, (2, block_size, hs): position times theta^(-2i / hs), in the half-rotation layout."""
    hs = config.n_embd // config.n_head
    frequencies = config.rope_theta ** (-torch.arange(0, hs, 2, dtype=torch.float64) / hs)
    angles = torch.arange(config.block_size)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2).float()


def rotate(x, rope):
    """Queries or keys (B, nh, T, hs), each pair (x1, x2) turned by its position's angle."""
    x1, x2 = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat([-x2, x1], dim=-1) * rope[1]).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.up = nn.Linear(config.n_embd, config.mlp_width * (2 if self.gated else 1), bias=False)  # gate and up
        self.down = nn.Linear(config.mlp_width, config.n_embd, bias=False)

    def forward(self, x):
        if self.gated:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then MLP: each an f, with norms N where the placement has them (the paper's normalisation study).

    internal, the state grows:     pre  a x + f(N(x))     pre_sandwich   a x + N(f(N(x)))
    external, the state is bound:  post  N(a x + f(x))    post_sandwich  N(a x + f(N(x)))
    """

    def __init__(self, config):
        super().__init__()
        self.a, self.external = config.residual_scale, config.placement.startswith("post")
        self.attn, self.mlp = Attention(config), MLP(config)
        self.norm1, self.norm3 = (nn.Identity() if config.placement == "post" else Norm(config) for _ in range(2))
        self.norm2, self.norm4 = (nn.Identity() if config.placement == "pre" else Norm(config) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, cache=None, start=0):
        x = self.add(x, self.attn(self.norm1(x), rope, cache, start), self.norm2)
        return self.add(x, self.mlp(self.norm3(x)), self.norm4)

    def add(self, x, y, norm):
        x, y = x if self.a == 1 else self.a * x, self.dropout(y)
        return norm(x + y) if self.external else x + norm(y)


NO_CACHE = itertools.repeat(None)  # in the place of iter(cache), which hands each layer its slot as the layers run


class LoopedTransformer(nn.Module):
    """Embeddings, prelude, one stack applied t times, coda, readout."""

    def __init__(self, config):
        super().__init__()
        self.config, D = config, config.n_embd
        self.wte = nn.Embedding(config.vocab_size, D)
        self.wpe = nn.Embedding(config.block_size, D) if config.positions == "learned" else None
        self.register_buffer("rope", rope_table(config) if config.positions == "rope" else None, persistent=False)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_prelude + config.n_layer + config.n_coda)])
        # applied in the loop it is one of the loop's norms; else an affine LayerNorm whatever those are, as in the release
        self.norm = Norm(config if config.state_norm else replace(config, norm="layernorm"))
        self.head = None if config.tied else nn.Linear(D, config.vocab_size, bias=False)
        self.gate = nn.Linear(D, 1) if config.exit_gate else None
        self.dropout = nn.Dropout(config.dropout)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def run_blocks(self, h, first, n, slots, start):
        rope = None if self.rope is None else self.rope[:, start:start + h.shape[1]]
        for block, slot in zip(self.blocks[first:first + n], slots):
            h = checkpoint(block, h, rope, use_reentrant=False) if self.checkpoints() else block(h, rope, slot, start)
        return h

    def checkpoints(self):
        return self.config.checkpointing and self.training and torch.is_grad_enabled()

    def embed(self, idx, slots=NO_CACHE, start=0):
        """h^(0), (B, T, D), of tokens (B, T) at positions start ..: embeddings, then the prelude."""
        h = self.wte(idx)
        if self.wpe is not None:
            h = h + self.wpe.weight[start:start + idx.shape[1]]
        return self.run_blocks(self.dropout(h), 0, self.config.n_prelude, slots, start)

    def step(self, h, slots=NO_CACHE, start=0):
        """The loop map Phi, (B, T, D) -> (B, T, D), row by row; without a cache a pure function of the state."""
        h = self.run_blocks(h, self.config.n_prelude, self.config.n_layer, slots, start)
        return self.norm(h) if self.config.state_norm else h

    def normed(self, h, slots=NO_CACHE, start=0):
        """What the readout's matrix is multiplied with: coda, then the final norm, unless the loop has applied it."""
        c = self.config
        h = self.run_blocks(h, c.n_prelude + c.n_layer, c.n_coda, slots, start)
        return h if c.state_norm and not c.n_coda else self.norm(h)

    @property
    def readout_weight(self):
        return self.wte.weight if self.head is None else self.head.weight

    def readout(self, h):
        """Logits, (B, T, D) -> (B, T, V)."""
        return F.linear(self.normed(h), self.readout_weight)

    def loss(self, idx, targets, num_loops=None, num_targets=None, with_jsrr=True):
        """(loss, metrics) for idx and targets (B, T), targets -1 where there is no loss, after num_loops loops.

        In training (1 - lambda) CE + lambda JSRR, plus l2_penalty * mean ||h^(t) - h^(t-1)||; metrics: loops, jsrr. In
        evaluation CE; metrics: exact. num_targets: what the CEs' sum is divided by, by default how many there are here.
        """
        c = self.config
        t = num_loops or c.num_loops
        h = self.embed(idx)
        for _ in range(t):
            before = h
            h = self.step(h)
        answer = (targets >= 0).flatten().to(self.wte.weight.dtype)
        share = answer / (answer.sum() if num_targets is None else num_targets)  # of each token in the mean
        ce, _ = cross_entropy(self.normed(h).flatten(0, 1), self.readout_weight, targets.clamp_min(0).flatten(), share)
        if not self.training:
            return ce, {"exact": self.exact(h, targets)}
        loss, metrics = ce, {"loops": torch.full((), float(t), device=idx.device)}  # a copy from the CPU would wait
        if c.jsrr_lambda and with_jsrr:
            metrics["jsrr"] = jsrr = self.jsrr(h)
            loss = (1 - c.jsrr_lambda) * ce + c.jsrr_lambda * jsrr
        if c.l2_penalty:
            loss = loss + c.l2_penalty * (h - before).float().norm(dim=-1).mean()
        return loss, metrics

    def exact(self, h, targets):
        """The share of rows that are right at every target, given the last state: by induction over the tokens, the
        share whose whole answer greedy decoding gets right."""
        return ((self.readout(h).argmax(-1) == targets) | (targets < 0)).all(1).float().mean()

    def jsrr(self, h):
        """L_JSRR^(t): the mean of ||J v||^2 over the first jsrr_rows of the rows of h = h^(t), v a random unit vector each.

        J at h^(t) is that of loop t + 1, which is run for it, of those rows only. It runs uncompiled: torch.compile has no
        second derivatives. In training a gradient flows into the state as well, unless jsrr_detach.
        """
        c = self.config
        at = h[:max(1, round(c.jsrr_rows * len(h)))]
        if c.jsrr_detach:
            at = at.detach()
        with torch.compiler.set_stance("force_eager"):
            _, Jv = self.step_and_product(at, random_directions(at))
        return Jv.to(torch.promote_types(Jv.dtype, torch.float32)).square().sum() / len(at)

    def step_and_product(self, h, v):
        """`product` of one loop in the configured mode; with checkpointing layer by layer, each J v run again later."""
        c = self.config
        if not self.checkpoints():
            return product(self.step, h, v, c.jsrr_mode)

        def layer(block, h, v):
            with torch.compiler.set_stance("force_eager"):  # here, since the backward pass runs it again
                return product(lambda x: block(x, None if self.rope is None else self.rope[:, :x.shape[1]]), h, v, "jvp")
        for block in self.blocks[c.n_prelude:c.n_prelude + c.n_layer]:
            h, v = checkpoint(layer, block, h, v, use_reentrant=False)
        return product(self.norm, h, v, "jvp") if c.state_norm else (h, v)

    def flops_per_token(self):
        """Training FLOPs per token at the mean loop count, without JSRR's: 6 per weight used, 6 T D per attention."""
        c = self.config
        layer = sum(p.numel() for p in self.blocks[0].parameters() if p.ndim == 2) + c.block_size * c.n_embd
        loops = sample_loops(c, np.random.default_rng(0), 10_000).mean().item()
        return 6 * (layer * (c.n_layer * loops + c.n_prelude + c.n_coda) + c.vocab_size * c.n_embd)

    def final(self, idx, num_loops, cache=None, start=0):
        """What the readout's matrix is multiplied with after num_loops loops, (B, T, D), of tokens at start .."""
        slots = NO_CACHE if cache is None else iter(cache)
        h = self.embed(idx, slots, start)
        for _ in range(num_loops):
            h = self.step(h, slots, start)
        return self.normed(h, slots, start)

    def new_cache(self, B, S, num_loops):
        """Keys and values of S tokens: a slot per prelude layer, per (loop, layer), and per coda layer."""
        c, device, dtype = self.config, self.wte.weight.device, self.wte.weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        slots = c.n_prelude + num_loops * c.n_layer + c.n_coda
        return torch.empty(slots, 2, B, c.n_head, S, c.n_embd // c.n_head, device=device, dtype=dtype)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, num_loops=None, use_cache=True):
        """Continue idx (B, T) greedily by max_new_tokens, to block_size + 1 tokens at most, with num_loops loops."""
        K, length = num_loops or self.config.num_loops, 0  # length: how many tokens are in the cache
        cache = self.new_cache(len(idx), self.config.block_size, K) if use_cache else None
        for _ in range(max_new_tokens):
            h = self.final(idx[:, length:], K, cache, length)[:, -1:]
            length = idx.shape[1] if use_cache else 0
            idx = torch.cat([idx, F.linear(h, self.readout_weight).argmax(-1)], dim=1)
        return idx


def sample_loops(config, rng, n=1):
    """n loop counts t, an int array, from a numpy Generator: clip(round(LogNormal(mu, sigma)), min, max), or the others."""
    c = config
    match c.loop_sampling:
        case "fixed":
            return np.full(n, c.num_loops)
        case "lognormal":
            t = rng.lognormal(c.loop_mu, c.loop_sigma, n)
        case "poisson":
            t = rng.poisson(c.num_loops, n)
        case "uniform":
            t = rng.integers(c.min_loops, c.max_loops, n, endpoint=True)
    return np.clip(np.rint(t), c.min_loops, c.max_loops).astype(int)


# ---------------------------------------------------------------------------------------------------------------------
# The task

class AdditionData:
    """Sums made on the fly, `1750+4733= 3846§`: two numbers of `digits` digits, the answer reversed (so that carries run
    forwards) unless the config's reversed_answers is False, an end mark, padding. Targets are -1 where there is no loss:
    before the answer and after its end.

    A pair is held out if a hash of it, the same for a + b and b + a, falls into one bucket of 32: no training batch draws
    such a pair, and the validation split draws no other, the same ones at every seed.
    """
    vocab = [*"0123456789+= §_"]

    def __init__(self, options, config):
        self.options, self.digits, self.T = options, config.digits, 3 * config.digits + 4
        self.reversed_answers = getattr(config, "reversed_answers", True)
        self.tokenizer = train.Tokenizer("char", self.vocab)
        self.vocab_size = self.tokenizer.vocab_size
        self.steps_per_epoch = max(1, (9 * 10 ** (self.digits - 1)) ** 2 // options.step_rows)

    @staticmethod
    def held_out(a, b):
        """Whether each pair of operands belongs to the validation split."""
        low, high = np.minimum(a, b).astype(np.uint64), np.maximum(a, b).astype(np.uint64)
        mixed = (low * np.uint64(0x9E3779B97F4A7C15) + high) * np.uint64(0xD1B54A32D192ED03)  # modulo 2^64
        return mixed >> np.uint64(59) == 0

    def operands(self, split, i, n):
        """n pairs of operands, (2, n), of batch i of a split."""
        rng = train.stream(self.options, split, i)
        a, b = drawn = rng.integers(10 ** (self.digits - 1), 10 ** self.digits, (2, n))
        while (wrong := self.held_out(a, b) == (split == "train")).any():
            drawn[:, wrong] = rng.integers(10 ** (self.digits - 1), 10 ** self.digits, (2, wrong.sum()))
        return drawn

    def encode(self, a, b):
        """The sums as (idx, targets), each (n, T) int64."""
        order = slice(None, None, -1) if self.reversed_answers else slice(None)
        texts = (f"{x}+{y}= {str(x + y)[order]}§".ljust(self.T + 1, "_") for x, y in zip(a.tolist(), b.tolist()))
        ids = "".join(texts).translate({ord(c): i for c, i in self.tokenizer.ids.items()}).encode()  # each below 15: a byte
        rows = torch.from_numpy(np.frombuffer(ids, np.uint8).astype(np.int64)).view(len(a), -1)
        targets = rows[:, 1:].masked_fill(rows[:, 1:] == self.tokenizer.ids["_"], -1)
        targets[:, :2 * self.digits + 1] = -1
        return rows[:, :-1], targets

    def batch(self, split, i):
        return self.encode(*self.operands(split, i, self.options.step_rows))


DATA = {"addition": AdditionData}


# ---------------------------------------------------------------------------------------------------------------------
# Training. train.py's Run does the rest: devices, data, optimiser, schedule, evaluation, log, checkpoints.

def train_model(run):
    c = run.config
    if c.checkpointing:
        parts = training_memory(c, run.options.batch_size // run.world)
        run.say("estimated memory: " + ", ".join(f"{part} {n / 1e9:.2f} GB" for part, n in parts.items()))
    model = LoopedTransformer(c)
    if c.init_from and not run.resumes:
        load_ouro(model, c.init_from)
    model = run.start(model)
    for step in run.steps():
        rng = np.random.default_rng([run.options.seed, step, 1])  # so that resuming, and every process, draws the same t
        t = int(sample_loops(c, rng)[0])
        for idx, targets, num_targets in run.batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, t, num_targets, with_jsrr=step > c.jsrr_after)
            run.backward(loss, metrics)
        run.update()
    if c.checkpointing:
        run.say(f"measured at the peak: {train.peak_memory(run.device) / 1e9:.2f} GB")
    if run.options.tokenizer == "hub":  # whole solutions are never exactly right: look at their tokens
        if run.first:
            o = run.options
            _, batches = train.validation_batches(o, run.data.tokenizer, model, o.eval_batches)
            diagnose_answers(model.eval(), batches, ANSWER_LOOPS)
        return run.say(f"see {run.out}/curves.png, then run\npython stars.py {run.out} --eval=gsm8k --loops=1,2,4,8")
    last = [row for row in run.rows if "val_exact" in row][-1]
    run.say(f"{last['val_exact']:.2%} of the held-out answers exactly right at {c.num_loops} loops: see "
            f"{run.out}/curves.png, then run\npython stars.py {run.out}")


# ---------------------------------------------------------------------------------------------------------------------
# Products with the Jacobian, for JSRR too, and the instruments. Each row of a state (B, T, D) has its own Jacobian, (N, N).

def normalize(v):
    """Each row of v (B, T, D) as a unit vector of N dimensions."""
    return v / v.flatten(1).norm(dim=1).clamp_min(torch.finfo(v.dtype).tiny)[:, None, None]


def random_directions(h, generator=None):
    """One unit v per row of h, uniform on the sphere."""
    return normalize(torch.randn(h.shape, dtype=h.dtype, device=h.device, generator=generator))


def product(f, h, v, mode):
    """(f(h), J v) for mode jvp, forward mode; (f(h), J^T v) for vjp, reverse mode. Both can be differentiated again."""
    with sdpa_kernel(SDPBackend.MATH):
        if mode == "jvp":
            return torch.func.jvp(f, (h,), (v,))
        after, pull = torch.func.vjp(f, h)
        return after, pull(v.to(after.dtype))[0]


@torch.no_grad()
def power_iteration(model, h, steps, mode, generator=None):
    """||J v|| at each of `steps` power steps, (steps, B), from a random unit v: the first is the one-step estimate.

    v <- J v (jvp) and v <- J^T v (vjp) tend to rho, or circle it where a complex pair dominates; v <- J^T J v (both)
    rises to sigma_max.
    """
    v, gains = random_directions(h, generator), []
    for _ in range(steps):
        w = product(model.step, h, v, "vjp" if mode == "vjp" else "jvp")[1]
        gains.append(w.flatten(1).norm(dim=1))
        v = normalize(product(model.step, h, w, "vjp")[1] if mode == "both" else w)
    return torch.stack(gains)


def jacobian_gain(model, h, draws=64, generator=None):
    """||J||_F / sqrt(N) of each row of h, (B,): the root of the mean of ||J v||^2 over random unit v."""
    return sum(power_iteration(model, h, 1, "jvp", generator)[0].square() for _ in range(draws)).div(draws).sqrt()


def sigma_max(model, h, steps=64, generator=None):
    """The largest singular value of each row's J, (B,), from below: power iteration on J^T J."""
    return power_iteration(model, h, steps, "both", generator)[-1]


def spectral_radius_power(model, h, steps=256, generator=None):
    """rho of each row's J, (B,): the geometric mean growth of ||J^k v|| over the last half of many power steps."""
    return power_iteration(model, h, steps, "jvp", generator)[steps // 2:].log().mean(0).exp()


@torch.no_grad()
def spectral_radius_arnoldi(model, h, size=48, generator=None):
    """rho of each row's J, (B,): the largest |Ritz value| of a Krylov space of `size` dimensions, J v products only."""
    size = min(size, h[0].numel())
    Q, H = random_directions(h, generator).flatten(1)[:, None], h.new_zeros(len(h), size + 1, size)  # (B, j + 1, N)
    for j in range(size):
        w = product(model.step, h, Q[:, j].view_as(h), "jvp")[1].flatten(1)
        for _ in range(2):  # Gram-Schmidt twice: once leaves rounding errors that grow
            overlap = torch.einsum("bjn,bn->bj", Q, w)
            H[:, :j + 1, j] += overlap
            w = w - torch.einsum("bjn,bj->bn", Q, overlap)
        H[:, j + 1, j] = w.norm(dim=1)
        Q = torch.cat([Q, normalize(w[:, None])], dim=1)
    return torch.linalg.eigvals(H[:, :size]).abs().amax(-1)


@torch.no_grad()
def trajectory(model, idx, num_loops):
    """Yield h^(0) .. h^(num_loops), each (B, T, D), one at a time."""
    h = model.embed(idx)
    yield h
    for _ in range(num_loops):
        h = model.step(h)
        yield h


def convergence(model, idx, num_loops):
    """(num_loops, 2), for t = 0 ..: ||h^(t+1) - h^(t)|| / ||h^(t)||, mean over rows; ||h^(t+1)||, mean over tokens."""
    rows = []
    for before, h in itertools.pairwise(trajectory(model, idx, num_loops)):
        change = (h - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
        rows.append(torch.stack([change.mean(), h.norm(dim=-1).mean()]))
    return torch.stack(rows).cpu()


def exact_match(model, idx, targets, num_loops):
    """Share of the sums whose whole answer greedy decoding gets right, end mark included. idx, targets: (B, T)."""
    start, right = int((targets[0] >= 0).int().argmax()) + 1, 0
    for rows, wanted in zip(idx.split(250), targets.split(250)):  # a cache of 256 loops x 250 rows is a GB
        new = model.generate(rows[:, :start], idx.shape[1] + 1 - start, num_loops)
        right += ((new[:, 1:] == wanted) | (wanted < 0)).all(1).sum().item()
    return right / len(idx)


def held_out_sums(model, options, n):
    """n held-out sums as (idx, targets), each (n, T), the same at every call, on the model's device."""
    data = AdditionData(options, model.config)
    return [t.to(model.wte.weight.device) for t in data.encode(*data.operands("val", 0, n))]


def diagnose(path, model, options, loops):
    """Print accuracy and convergence against loops, then the spectrum, of a trained run; draw RUN/diagnostics.png."""
    c, (idx, targets) = model.config, held_out_sums(model, options, 2000)
    print(f"{path}: {c.placement} {c.norm}, {c.loop_sampling} loops, lambda {c.jsrr_lambda}; {len(idx)} held-out sums")
    dynamics = convergence(model, idx[:250], max(loops) + 1)
    accuracy = [exact_match(model, idx, targets, t) for t in loops]
    print("\nloops t   exact match   ||h^(t+1) - h^(t)|| / ||h^(t)||   mean ||h^(t)||")
    for t, right in zip(loops, accuracy):
        print(f"{t:7d}   {right:11.2%}   {dynamics[t, 0]:31.2e}   {dynamics[t - 1, 1]:14.2f}")

    model = copy.deepcopy(model).cpu().double()  # products of many Jacobians want float64
    idx, settle = idx[:8].cpu(), max(loops)
    print(f"\nthe Jacobian of one loop, N = {c.block_size * c.n_embd}, means over {len(idx)} sums\n"
          "at loop t   one-step ||J v||   ||J||_F / sqrt(N)   sigma_max   rho (power)   rho (Arnoldi)   largest rho")
    for t, h in enumerate(trajectory(model, idx, settle)):
        if t in (c.num_loops, settle):
            g = torch.Generator().manual_seed(0)
            rho = spectral_radius_arnoldi(model, h, generator=g)
            print("{:9d}   {:16.4f}   {:17.4f}   {:9.3f}   {:11.4f}   {:13.4f}   {:11.4f}".format(
                t, power_iteration(model, h, 1, "jvp", g).mean(), jacobian_gain(model, h, generator=g).mean(),
                sigma_max(model, h, generator=g).mean(), spectral_radius_power(model, h, generator=g).mean(),
                rho.mean(), rho.max()))
    steps = [2 ** i for i in range(7)]
    print(f"\n||J v|| at loop {settle} after power steps  " + "".join(f"{n:9d}" for n in steps))
    for mode, towards in (("jvp", "J v: to rho"), ("vjp", "J^T v: to rho"), ("both", "J^T J v: to sigma_max")):
        gains = power_iteration(model, h, 64, mode, torch.Generator().manual_seed(1)).mean(1)
        print(f"{towards:34}" + "".join(f"{gains[n - 1]:9.4f}" for n in steps))

    figure, axes = train.new_figure(3)
    axes[0].plot(loops, accuracy, "o-")
    axes[0].set(xlabel="loops", xscale="log", ylabel="exact match", ylim=(-0.02, 1.02), title="Accuracy against loops")
    axes[1].plot(range(len(dynamics)), dynamics[:, 0], label="||h^(t+1) - h^(t)|| / ||h^(t)||")
    axes[1].plot(range(1, len(dynamics) + 1), dynamics[:, 1], label="mean ||h^(t)||")
    axes[1].set(xlabel="loop t", xscale="symlog", yscale="log", title="Step and norm against loops")
    axes[1].legend()
    answer = targets[0].cpu() >= 0  # the state at the answer's tokens, as one vector per loop and sum
    states = torch.stack([h[:, answer].flatten(1) for h in trajectory(model, idx, min(settle, 64))])
    states -= states.mean((0, 1))
    components = torch.linalg.svd(states.flatten(0, 1), full_matrices=False)[2][:2]
    for line in (states @ components.T).transpose(0, 1):
        axes[2].plot(*line.T, ".-", alpha=0.7)
        axes[2].plot(*line[-1], "k*")
    axes[2].set(xlabel="PC 1", ylabel="PC 2", title=f"Trajectories of {len(idx)} sums, * at the end")
    figure.savefig(train.run_directory(path) / "diagnostics.png", dpi=120)
    print(f"\ndrawn in {train.run_directory(path) / 'diagnostics.png'}")


def ask(model, tokenizer, question, loops):
    """Answer one sum at each loop count."""
    d = model.config.digits
    operands = re.fullmatch(rf"\s*([1-9]\d{{{d - 1}}})\s*\+\s*([1-9]\d{{{d - 1}}})\s*=?\s*", question, re.ASCII)
    if not operands:
        raise UserError(f"--ask={question!r}: this model was trained on sums of two numbers of {d} digits each, from "
                        f"{10 ** (d - 1)} to {10 ** d - 1}, written like {'17504733'[:d]}+{'47331750'[:d]}")
    a, b = map(int, operands.groups())
    idx = torch.tensor([tokenizer.encode(f"{a}+{b}=")], device=model.wte.weight.device)
    for t in loops:
        text, end, _ = tokenizer.decode(model.generate(idx, d + 3, t)[0].tolist()).partition("§")
        answer = text[2 * d + 2:][::-1].rstrip()
        print(f"loops {t:4d}:  {text + end:{3 * d + 5}}  {answer}, {'right' if answer == str(a + b) else 'wrong'}")


# ---------------------------------------------------------------------------------------------------------------------
# Sweeps: the normalisation study, what each part of STARS does, and how soon each optimiser is there.

@torch.no_grad()
def compare(runs, out):
    """Print exact match, mean ||h^(t)|| and the relative step, ||h^(t) - h^(t-1)|| / ||h^(t-1)||, of every run against
    loops; write accuracy.csv and accuracy.png into out."""
    rows = []
    for (condition, seed), path in runs.items():
        model, options, _ = train.load_model(path, "stars", LoopedTransformer)
        idx, targets = held_out_sums(model, options, 1000)
        change, norm = convergence(model, idx[:250], max(LOOPS)).T.tolist()
        row = {"condition": condition, "seed": seed}
        for t, h in enumerate(trajectory(model, idx, max(LOOPS))):
            if t in LOOPS:
                row |= {f"exact_{t}": model.exact(h, targets).item(), f"norm_{t}": norm[t - 1],
                        f"change_{t}": change[t - 1]}
        rows.append(row)
    train.write_csv(out / "accuracy.csv", rows)
    figure, axes = train.new_figure(3)
    for axis, (name, title, form, scale) in zip(axes, (
            ("exact", "exact match", "9.1%", "linear"), ("norm", "mean ||h^(t)||", "9.3g", "log"),
            ("change", "relative step", "9.1e", "log"))):
        print(f"\n{title + ' at loops':34}" + "".join(f"{t:9d}" for t in LOOPS))
        for row in rows:
            values = [row[f"{name}_{t}"] for t in LOOPS]
            cells = "".join(f"{value:{form}}" for value in values)
            print(f"{row['condition'] + ', seed ' + str(row['seed']):34}{cells}")
            axis.plot(LOOPS, values, "o-", markersize=3, label=row["condition"])
        axis.set(xlabel="loops", xscale="log", ylabel=title, yscale=scale)
    axes[0].legend(fontsize="x-small")
    figure.savefig(out / "accuracy.png", dpi=120)
    print(f"\nwritten to {out}/accuracy.csv and accuracy.png")


def race(runs, out):
    """Print when each run first has every evaluated sum right; draw exact match against steps and seconds of training."""
    figure, axes = train.new_figure(2)
    for (condition, seed), path in runs.items():
        seconds, before, points = 0.0, 0, []  # the log has the rate of each interval, evaluations left out
        for row in train.read_csv(path / "log.csv"):
            if "tokens_per_sec" in row:
                seconds, before = seconds + (row["tokens"] - before) / row["tokens_per_sec"], row["tokens"]
            if "val_exact" in row:
                points.append((row["step"], seconds, row["val_exact"]))
        steps, times, exact = zip(*points)
        first = next((f"at step {step}, {s:.0f} s" for step, s, share in points if share == 1), "never")
        print(f"{condition}, seed {seed}: all sums right {first}; {exact[-1]:.2%} at step {steps[-1]}, {seconds:.0f} s")
        axes[0].plot(steps, exact, "o-", markersize=3, label=f"{condition}, seed {seed}")
        axes[1].plot(times, exact, "o-", markersize=3)
    axes[0].set(xlabel="step", ylabel="exact match")
    axes[1].set(xlabel="seconds of training")
    axes[0].legend(fontsize="x-small")
    figure.savefig(out / "race.png", dpi=120)
    print(f"drawn in {out}/race.png")


SUMS = dict(dataset="addition")  # what `compare` judges by
PLAIN = dict(loop_sampling="fixed", jsrr_lambda=0.0)
SWEEPS = {
    "normalization": ({f"{placement}+{norm}": SUMS | PLAIN | dict(placement=placement, norm=norm)
                       for placement in ("pre", "pre_sandwich", "post", "post_sandwich")
                       for norm in ("layernorm", "rmsnorm", "simple")}, compare),
    "ablation": ({
        "fixed": SUMS | PLAIN,
        "prelude+coda": SUMS | PLAIN | dict(n_prelude=1, n_coda=1),
        "l2": SUMS | PLAIN | dict(l2_penalty=0.01),
        "random": SUMS | dict(jsrr_lambda=0.0),
        "jsrr": SUMS | dict(loop_sampling="fixed"),
        "random+jsrr": SUMS,
    }, compare),
    "optimizer": ({
        "muon": {},
        "adamw-paper": dict(optimizer="adamw", lr=1e-4, warmup_steps=2000, schedule="cosine", max_steps=10_000),
    }, race),
}


# ---------------------------------------------------------------------------------------------------------------------
# Ouro-1.4B: its files as Hugging Face lays them out (config.json, safetensors in one file or in shards with an index,
# tokenizer), what fine-tuning it takes, and how it is judged.

def ouro_config(directory):
    """The Config of a Hugging Face directory of Ouro's layout; the context stays at the preset's block_size."""
    try:
        hub = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
        heads, layers = hub["num_attention_heads"], hub["num_hidden_layers"]
        required = {"num_key_value_heads": heads, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
        implied = {"model_type": "ouro", "head_dim": hub["hidden_size"] // heads, "use_sliding_window": False,
                   "sliding_window": None, "layer_types": ["full_attention"] * layers, "early_exit_threshold": 1}
        rope = {"rope_type": "default", "rope_theta": hub.get("rope_theta")}
        rope |= (hub.get("rope_scaling") or {}) | (hub.get("rope_parameters") or {})  # of older and of newer files
        rope_theta = rope.pop("rope_theta")
        given = implied | {k: v for k, v in hub.items() if v is not None} | {"rope_scaling": rope}
        if hub.get("use_sliding_window") is False:
            given["sliding_window"] = None
        expected = required | implied | {"rope_scaling": {"rope_type": "default"}}
        if differing := [f"{k} is {given[k]}, not {v}" for k, v in expected.items() if given[k] != v]:
            raise ValueError("; ".join(differing))
        hub_dtype(hub)
        return Config(**OURO | dict(
            vocab_size=hub["vocab_size"], n_layer=layers, n_head=heads, n_embd=hub["hidden_size"],
            mlp_width=hub["intermediate_size"], rope_theta=rope_theta, num_loops=hub["total_ut_steps"]))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"{directory}/config.json does not describe a model of Ouro's form ({type(error).__name__}: "
                        f"{error})") from None


def hub_dtype(hub):
    """The dtype that a config.json asks for, as "bfloat16" or "torch.bfloat16"; without one float32."""
    name = str(hub.get("dtype") or hub.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise UserError(f"torch_dtype is {name}, not one of float16, bfloat16, float32, float64")
    return getattr(torch, name)


def ouro_tensors(model):
    """{name in Ouro's files: this model's tensor, or its rows of a fused one}: views, to be read and written through."""
    tensors = {"model.embed_tokens.weight": model.wte.weight, "model.norm.weight": model.norm.gain,
               "model.early_exit_gate.weight": model.gate.weight, "model.early_exit_gate.bias": model.gate.bias,
               "lm_head.weight": model.head.weight}
    for i, block in enumerate(model.blocks):
        q, k, v = block.attn.qkv.weight.chunk(3)
        gate, up = block.mlp.up.weight.chunk(2)
        layer = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
                 "self_attn.o_proj": block.attn.out.weight, "mlp.gate_proj": gate, "mlp.up_proj": up,
                 "mlp.down_proj": block.mlp.down.weight,
                 "input_layernorm": block.norm1.gain, "input_layernorm_2": block.norm2.gain,
                 "post_attention_layernorm": block.norm3.gain, "post_attention_layernorm_2": block.norm4.gain}
        tensors |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    return tensors


@torch.no_grad()
def load_ouro(model, directory):
    """Copy a Hugging Face directory's weights, of any float dtype, into the model. UserError names the tensors that are
    missing, extra or of another shape."""
    safetensors, directory = train.optional("safetensors.torch"), Path(directory)
    there, here = vars(ouro_config(directory)), vars(model.config)
    differing = [k for k in OURO if k not in ("block_size", "num_loops") and there[k] != here[k]]
    if differing:
        raise UserError(f"{directory} has another architecture than this run: to --preset=ouro-1.4b add "
                        f"{' '.join(f'--{k}={there[k]}' for k in differing)}")
    weights, file = {}, "model.safetensors.index.json"
    try:
        files = {"model.safetensors"}
        if (directory / file).exists():
            files = set(json.loads((directory / file).read_text(encoding="utf-8"))["weight_map"].values())
        for file in sorted(files):
            weights |= safetensors.load_file(directory / file)
    except Exception as error:  # of the disk, of JSON or of safetensors: absent, truncated, of another kind
        raise UserError(f"{directory / file} cannot be read: {type(error).__name__}, "
                        f"{' '.join(str(error).split())}") from None
    ours = ouro_tensors(model)
    weights = {k: v for k, v in weights.items() if not re.search(r"\.rotary_emb\.\w+$", k)}  # RoPE's table, computed here
    wrong = [f"{name} is {'extra' if name in weights else 'missing'}" for name in sorted(ours.keys() ^ weights.keys())]
    wrong += [f"{name} is {[*weights[name].shape]}, not {[*tensor.shape]}" for name, tensor in ours.items()
              if name in weights and weights[name].shape != tensor.shape]
    wrong += [f"{k} is {str(v.dtype)[6:]}, not of floats" for k, v in weights.items() if not v.is_floating_point()]
    if wrong:
        raise UserError(f"{directory}: {len(wrong)} tensors do not fit; {'; '.join(wrong[:4])}{' ..' * (len(wrong) > 4)}")
    for name, tensor in ours.items():
        tensor.copy_(weights[name])


def export_ouro(model, tokenizer, directory):
    """Write the model as load_ouro reads it, in the dtype of its config.json, with the files that the weights came with."""
    safetensors, directory = train.optional("safetensors.torch"), Path(directory)
    if tokenizer.spec["name"] != "hub":
        raise UserError("--export: only a model that was fine-tuned from Ouro's files can go back to them")
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"--export={directory} is not empty: choose another directory")
    dtype = hub_dtype(json.loads(tokenizer.spec["files"]["config.json"]))
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer.spec["files"].items():
        (directory / name).write_bytes(text.encode())
    tensors = {name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in ouro_tensors(model).items()}
    path = directory / "model.safetensors"
    with train.whole_file(path) as f:
        f.write(safetensors.save(tensors, metadata={"format": "pt"}))
    print(f"{len(tensors)} tensors in {str(dtype)[6:]} written to {path}")


def load(path):
    """(model, options, tokenizer) of a run, or of a Hugging Face directory of Ouro's layout."""
    if not (Path(path) / "tokenizer.json").exists():
        return train.load_model(path, "stars", LoopedTransformer)
    model, tokenizer = LoopedTransformer(ouro_config(path)), train.HubTokenizer.read(path)
    load_ouro(model, path)
    return model.to(train.pick_device("auto")).eval(), train.Options(tokenizer="hub"), tokenizer


def training_memory(config, rows):
    """{part: bytes} of a training step with checkpointing on `rows` full windows, with AdamW, in bfloat16: an estimate
    at max_loops, and the total."""
    c, tokens = config, rows * config.block_size
    with torch.device("meta"):
        P = sum(p.numel() for p in LoopedTransformer(c).parameters())
    parts = {"weights, gradients and AdamW's moments": 16 * P, "bfloat16 weights": 2 * P,
             "layer inputs": 4 * tokens * c.n_embd * c.n_layer * (c.max_loops + 1),
             "one layer": tokens * (90 * c.n_embd + 16 * c.mlp_width),
             "J v of one layer": 48 * math.ceil(rows * c.jsrr_rows) * c.n_head * c.block_size ** 2 * (c.jsrr_lambda > 0),
             "logits": 12 * min(train.CHUNK["cuda"], tokens * c.vocab_size)}
    return parts | {"together": sum(parts.values())}


@torch.compiler.set_stance("force_eager")  # compiled blocks have no J v
def diagnose_answers(model, batches, loops):
    """Print, on held-out rows in batches of (idx, targets), at each loop count: CE of the solutions' tokens, the share of
    them that greedy decoding gets right given those before, and, as means over the rows, how far one more loop moves the
    state and the one-step gain ||J v||."""
    print("loops t       CE   right tokens   ||h^(t+1) - h^(t)|| / ||h^(t)||   one-step ||J v||")
    table, device = torch.zeros(len(loops), 4), model.wte.weight.device.type
    tokens, rows = sum(int((targets >= 0).sum()) for _, targets in batches), sum(len(idx) for idx, _ in batches)
    for idx, targets in batches:
        given, generator = targets >= 0, torch.Generator(idx.device).manual_seed(0)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            for t, h in enumerate(trajectory(model, idx, max(loops))):
                if t in loops:
                    logits = F.linear(model.normed(h)[given], model.readout_weight).float()
                    ce = F.cross_entropy(logits, targets[given], reduction="sum")
                    right = logits.argmax(-1) == targets[given]
                    after, Jv = product(model.step, h, random_directions(h, generator), "jvp")
                    change = (after - h).flatten(1).norm(dim=1) / h.flatten(1).norm(dim=1)
                    gain = Jv.flatten(1).norm(dim=1)
                    table[loops.index(t)] += torch.stack([ce, right.sum(), change.sum(), gain.sum()]).cpu()
    table /= torch.tensor([tokens, tokens, rows, rows])
    for t, row in zip(loops, table.tolist()):
        print("{:7d}   {:6.4f}   {:12.2%}   {:31.2e}   {:16.4f}".format(t, *row))


def evaluate(path, model, tokenizer, evaluation, loops):
    """The tasks of lm-evaluation-harness at each loop count, with KV caches of loops x layers slots."""
    device = model.wte.weight.device

    def at(t):
        states = lambda idx, cache=None, start=0: model.final(idx, t, cache, start)
        readout = lambda h: F.linear(h, model.readout_weight)
        new_cache = lambda B, S: model.new_cache(B, S, t)
        return (lambda idx, n: readout(states(idx.to(device))[:, n - 1:]),
                lambda *arguments: train.decode(states, readout, new_cache, *arguments))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        train.evaluate(path, evaluation, tokenizer, model.config.block_size,
                       {f"loops={t}": at(t) for t in loops or [model.config.num_loops]})


# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Arguments:
    ask: str = ""  # a sum to answer, as 1750+4733; without it, the diagnostics are printed
    export: str = ""  # a directory to write a fine-tuned Ouro to, in its Hugging Face layout
    loops: str = None  # loop counts, separated by commas; by default 1 to 256, with --eval the trained number

    __post_init__ = check_fields


def main(argv):
    usage = "python stars.py RUN [--ask=1750+4733 | --eval=TASK,.. | --export=DIRECTORY] [--field=value ...]"
    path, arguments, evaluation = train.parse_run(usage, Arguments, argv)
    loops, (model, options, tokenizer) = train.loop_counts(arguments.loops), load(path)
    if arguments.export:
        return export_ouro(model, tokenizer, arguments.export)
    if evaluation.eval:
        return evaluate(path, model, tokenizer, evaluation, loops)
    sums = options.dataset == "addition"
    if arguments.ask and not sums:
        raise UserError("--ask needs a model that was trained on sums: python train.py stars")
    if arguments.ask:
        return ask(model, tokenizer, arguments.ask, loops or LOOPS)
    if (Path(path) / "tokenizer.json").exists():
        raise UserError(f"{path} is a Hugging Face directory, not a run with held-out rows: add --eval=TASK")
    if not sums:
        _, batches = train.validation_batches(options, tokenizer, model, options.eval_batches)
        return diagnose_answers(model, batches, loops or ANSWER_LOOPS)
    diagnose(path, model, options, loops or LOOPS)


if __name__ == "__main__":
    train.command_line(main)
