"""The full-bandwidth transformer, after "Full-bandwidth transformer" (Wang et al., arXiv 2608.08888).

A decoder hands on one token id, and throws away the top-layer state h_{t-1} that chose it. Here that state is the next
input, and the token its gate (equation 4): e_t (x) h_{t-1} = (W_U h_{t-1}) * sigmoid(W_G e_t). Training stays parallel
(equations 10 to 12): pass 1 is the ordinary forward, pass k reads the states of pass k - 1 shifted by one. That is a
Jacobi iteration, exact at position t after t passes; a few percent of three-pass steps are to make it contract.
Documents lie packed in a window: no state is fed back from one to the next (document_end), but attention looks across.

    python train.py fullbandwidth                                    # train the tiny preset
    python train.py fullbandwidth --sweep=passes                     # one pass, and mixes of passes: the paper's figure 3
    python train.py fullbandwidth --preset=running-sum               # right at lengths that no window has reached
    python fullbandwidth.py out/fullbandwidth-tiny                   # every diagnostic for a trained run
    python fullbandwidth.py out/fullbandwidth-tiny --prompt="The " --mode=soft

Letters: B batch, T tokens, D width, V vocabulary, e embeddings and h^(k) pass k's final-normed top states, (B, T, D).
"""
import contextlib, functools, itertools, math, operator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import train
from train import BelowOne, Count, Seed, Size, Token, UserError, check_fields, cross_entropy


@dataclass
class Config:
    vocab_size: Size = 50_257  # types; the tokenizer lowers it to what it found
    block_size: Size = 64  # tokens in a window, T, and the most that any layer looks back
    n_layer: Count = 4  # layers
    n_head: Count = 4  # query heads
    n_kv_head: Count = 4  # key and value heads, each shared by n_head / n_kv_head query heads
    n_embd: Size = 96  # width of the residual stream, D
    mlp_width: Size = 256  # hidden width of the SwiGLU
    window: int = 0  # tokens that a layer looks back, itself included; 0: block_size
    full_every: Count = 6  # with a window, every so many layers one has none
    head_gates: bool = False  # each head's output times a sigmoid of the layer's input
    rope_theta: Annotated[float, 1, 10**9] = 10_000.0  # the slowest rotation's period is about 2 pi theta
    fusion: Literal["gated", "add", "concat"] = "gated"  # (W_U h) * sigmoid(W_G e), e + W_U h, or W_U h + W_G e
    mix: str = "0.75,0.22,0.03"  # shares of steps with 1, 2, 3 .. passes once feedback has started; 1: a standard model
    feedback_from: BelowOne = 0.5  # share of the training that goes by before
    depth_scale: bool = True  # residual branches times 1 / sqrt(2 n_layer)
    input_norm: bool = True  # one shared RMSNorm on embeddings and on the stack's inputs
    jitter: float = 0.02  # in training, uniform noise of this size on the states fed back
    prefix_mix: bool = True  # in training, plain inputs before a random position of each sequence
    tied: bool = True  # the readout multiplies with the input embeddings
    compute_of: str = ""  # a mix: take as many steps more as make up for its passes, to compare at equal compute
    document_end: Token = -1  # the token after which a position gets no feedback; -1: none, but a line's end in wikitext
    modulus: Annotated[int, 2, 1000] = 3  # of --dataset=running-sum, at most 1,000
    digits: Annotated[int, 2, 8] = 3  # of each operand of --dataset=addition, 2 to 8
    reversed_answers: bool = False  # the sums' lowest digit first, so that carries run forwards
    init_from: str = ""  # a run or checkpoint whose weights to start from; a standard model's lack W_U and W_G only

    def __post_init__(self):
        check_fields(self)
        if self.n_embd % (2 * self.n_head):
            raise UserError(f"--n_embd={self.n_embd} is not --n_head={self.n_head} times an even width")
        if self.n_head % self.n_kv_head:
            raise UserError(f"--n_head={self.n_head} is not divisible by --n_kv_head={self.n_kv_head}")
        parse_mix(self.mix), parse_mix(self.compute_of or "1", "compute_of")

    @property
    def shares(self):
        return parse_mix(self.mix)

    def more_passes(self, mix):
        """Passes beyond the first, averaged over a training with that mix."""
        return (1 - self.feedback_from) * sum(k * share for k, share in enumerate(parse_mix(mix)))


def parse_mix(mix, field="mix"):
    """[share of 1-pass steps, of 2-pass steps, ..]; UserError, of this field, if it is none."""
    with contextlib.suppress(ValueError):
        shares = [float(share) for share in mix.split(",")]
        adds_up = abs(sum(shares) - 1) < 1e-8  # as numpy, which draws them, wants
        if adds_up and min(shares) >= 0 < shares[-1] and len(shares) <= 1000:
            return shares
    raise UserError(f"--{field}={mix:.60}: expected at most 1,000 shares that sum to 1, the last above 0, as in "
                    f"0.75,0.22,0.03")


PAPER = dict(optimizer="muon", muon_lr=0.01, lr=5e-4, weight_decay=0.01, schedule="wsd", warmup_steps=200)
TOY = dict(optimizer="muon", muon_lr=0.02, lr=3e-3, schedule="wsd", warmup_steps=20,
           dtype="float32")  # in which matrices this small are faster
SMALL = dict(n_layer=2, n_embd=64, mlp_width=176, mix="0.5,0.4,0.1", feedback_from=0.0, batch_size=64, log_interval=100,
             eval_interval=500, eval_batches=2, **TOY)
PRESETS = {
    # not the paper's mix: few steps must teach the second pass, and every pass after it
    "tiny": dict(n_layer=2, mix="0,0.7,0.3", feedback_from=0.0, prefix_mix=False, max_steps=800, **TOY),
    "running-sum": dict(dataset="running-sum", block_size=32, max_steps=3000, **SMALL),
    "statetrack": dict(dataset="statetrack", block_size=166, max_steps=3000, **SMALL | dict(batch_size=16)),
    "addition": dict(dataset="addition", max_steps=1500, **SMALL),
    "124m": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, mlp_width=2048, block_size=1024, tokenizer="gpt2",
                 batch_size=16, grad_accum=16, max_steps=5000, log_interval=20, eval_interval=500, **PAPER),
    "1b": dict(vocab_size=100_352, n_layer=24, n_head=16, n_kv_head=8, n_embd=1536, mlp_width=6656, head_gates=True,
               block_size=8192, window=2048, batch_size=36, tokenizer="gpt2", max_steps=0, eval_interval=1000, **PAPER),
}
MODES = ("standard", "soft", "fused")  # of decoding
SHOW = ("ce_1", "val_ce_1", "val_ce_2", "val_ce_3")  # printed beside the loss, and drawn in curves.png


# ---------------------------------------------------------------------------------------------------------------------
# The model

class RMSNorm(nn.Module):
    """h / rms(h) * gain."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, h):
        return F.rms_norm(h, h.shape[-1:], self.gain.to(h.dtype), 1e-6)


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
        group = self.n_head // self.n_kv_head
        if positions is not None:  # the query heads that share a key head stand as rows: nothing of the cache is copied
            q = q.reshape(B, self.n_kv_head, group, -1)
        elif group > 1:  # enable_gqa would not: under a mask, GPUs have no fused kernel for it
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).reshape(B, self.n_head, T, -1)
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
    """x += s norm(attn(norm(x))); x += s norm(mlp(norm(x))). With s = 1 / sqrt(2 n_layer) the top state's norm does not
    grow with the number of layers."""

    def __init__(self, config):
        super().__init__()
        self.attn, self.mlp = Attention(config), SwiGLU(config)
        self.norm1, self.norm2, self.norm3, self.norm4 = (RMSNorm(config.n_embd) for _ in range(4))
        self.scale = (2 * config.n_layer) ** -0.5 if config.depth_scale else 1.0

    def forward(self, x, rope, mask=None, cache=None, positions=None):
        x = x + self.scale * self.norm2(self.attn(self.norm1(x), rope, mask, cache, positions))
        return x + self.scale * self.norm4(self.mlp(self.norm3(x)))


class FullBandwidthGPT(nn.Module):
    """Embeddings, a stack of blocks, a readout; if the mix has more than one pass, W_U and W_G to feed states back."""

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
        self.why_not = f"had --mix={config.mix}"  # no state can be fed back, where W_U is None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.readout_weight, std=0.02)

    @property
    def readout_weight(self):
        return self.wte.weight if self.head is None else self.head.weight

    def embed(self, idx):
        """e of tokens (B, T): normed in every pass, so that a plain input is the same in all of them."""
        return self.norm_in(self.wte(idx))

    def stack(self, x, cache=None, positions=None, residuals=None):
        """Final-normed top states (B, T, D) of inputs x (B, T, D).

        cache (n_layer, 2, B, nkv, S, hs): filled from slot 0; or, with positions (B,), x is one token a row, each at
        its own position, and attends to the cache. residuals, a list: gets the residual stream, n_layer + 1 tensors.
        """
        c, x, one_token = self.config, self.norm_in(x), positions is not None
        at = positions[:, None] if one_token else torch.arange(x.shape[1], device=x.device)[None]  # (B, 1) or (1, T)
        hs, kind = c.n_embd // c.n_head, dict(dtype=self.wte.weight.dtype, device=x.device)
        angles = at[:, None, :, None] * c.rope_theta ** (-torch.arange(0, hs, 2, **kind) / hs)
        rope, masks, depths = (angles.cos(), angles.sin()), {}, [x]
        for i, (block, reach) in enumerate(zip(self.blocks, self.reaches())):
            if one_token or x.shape[1] > reach:  # else plainly causal
                if reach not in masks:
                    keys = cache.shape[-2] if one_token else x.shape[1]
                    back = at[:, None, :, None] - torch.arange(keys, device=x.device)
                    masks[reach] = (back >= 0) & (back < reach)
            x = block(x, rope, masks.get(reach), None if cache is None else cache[i], positions)
            depths.append(x)
        if residuals is not None:
            residuals[:] = depths
        return self.norm(x)

    def reaches(self):
        """How many tokens each layer looks back, itself included."""
        c = self.config
        window = min(c.window or c.block_size, c.block_size)
        return [window if (i + 1) % c.full_every else c.block_size for i in range(c.n_layer)]

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

    def plain(self, idx):
        """Where the input is the plain embedding, (B, T): at the first position and after the end of a document."""
        before = F.pad(idx[:, :-1], (1, 0), value=-1)
        return (before < 0) | (before == self.config.document_end)

    def feedback(self, h, e, plain):
        """The inputs (B, T, D) of the pass after the one with states h: jitter, shift, fusion, plain inputs kept."""
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

    def modes(self):
        """The decoders that this model has."""
        return MODES if self.W_U is not None else MODES[:1]

    def need_feedback(self, what):
        if self.W_U is None:
            raise UserError(f"{what} needs a model trained with feedback, and this one {self.why_not}")

    def readout(self, h):
        """Logits, (.., D) -> (.., V)."""
        return F.linear(h, self.readout_weight)

    def loss(self, idx, targets, passes=None, num_targets=None):
        """(loss, metrics) for idx and targets (B, T), targets -1 where there is none; all the mix's passes by default.

        Equation 12 with lambda = 1: CE_1 + mean_{k >= 2} CE_k. metrics: ce_k in nats; in evaluation also the mean norms
        of the fusion's two paths. num_targets: what the sum over tokens is divided by, by default how many there are.
        """
        k = len(self.config.shares) if passes is None else passes
        states = self.passes(idx, k)
        rows = torch.cat(states).flatten(0, 1)  # of all passes in one call: no more logits live than for one
        given = (targets >= 0).flatten().to(self.wte.weight.dtype)
        share = given / (given.sum() if num_targets is None else num_targets)
        scale = torch.cat([share] + [share / (k - 1)] * (k - 1))
        loss, ce = cross_entropy(rows, self.readout_weight, targets.clamp_min(0).flatten().repeat(k), scale)
        metrics = {f"ce_{i}": ce_i for i, ce_i in enumerate((ce.view(k, -1) * share).sum(1), 1)}
        if k > 1 and not self.training:
            for name, path in zip(("state_path", "token_path"), self.paths(self.embed(idx), states[0])):
                metrics[name] = path.norm(dim=-1).mean().detach()
        return loss, metrics

    def flops_per_token(self):
        """Training FLOPs per token, averaged over the schedule: 6 per weight and pass, 12 D per key attended to."""
        c = self.config
        keys = sum(r - r * r / (2 * c.block_size) for r in self.reaches())  # the first r positions see fewer
        one = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2) + (2 * keys + c.vocab_size) * c.n_embd
        fusion = sum(m.weight.numel() for m in (self.W_U, self.W_G) if m is not None)
        return 6 * (one + c.more_passes(c.mix) * (one + fusion))

    def load_weights(self, path, tokenizer):
        """Start from a checkpoint of this architecture with the same tokenizer, W_U and W_G missing or not."""
        ckpt = train.load_checkpoint(path, "fullbandwidth")
        there, here = ({name: w.shape for name, w in weights.items() if not name.startswith("W_")}
                       for weights in (ckpt["weights"], self.state_dict()))
        if differing := [name for name in {**there, **here} if there.get(name) != here.get(name)]:
            raise UserError(f"--init_from={path} is of another architecture or vocabulary: {differing[0]} differs")
        if ckpt["tokenizer"] != tokenizer.spec:
            raise UserError(f"--init_from={path} was trained with another tokenizer")
        with train.restoring(f"--init_from={path} does not fit fullbandwidth.py as it is now"):
            self.load_state_dict(ckpt["weights"], strict=False)

    def new_cache(self, B, S):
        c, like = self.config, self.wte.weight
        return like.new_zeros(c.n_layer, 2, B, c.n_kv_head, S, c.n_embd // c.n_head)

    def prefill(self, idx, cache, passes, residuals=None):
        """States (B, T, D) of a prompt after a plain pass and `passes` fused ones, each one's cache replacing the last."""
        e, plain = self.embed(idx), self.plain(idx)
        h = self.stack(e, cache, residuals=residuals)
        for _ in range(passes):
            h = self.stack(self.feedback(h, e, plain), cache, residuals=residuals)
        return h

    @torch.no_grad()
    def recurrent(self, idx, prefill=1, residuals=None, prefill_passes=0):
        """Final-normed states (B, T, D) of the sequential recurrence, which is soft decoding with idx (B, T) as tokens:
        a plain prefill of the first `prefill`, then each position fused with the state before it, with a KV cache.
        prefill_passes: fused passes of the prefill more, as in fused decoding. residuals, a list: receives the residual
        stream of the last call of the stack."""
        (B, T), e, plain = idx.shape, self.embed(idx), self.plain(idx)[..., None]
        if prefill < T:
            self.need_feedback("the recurrence")
        cache = self.new_cache(B, T)
        states = [self.prefill(idx[:, :prefill], cache, prefill_passes, residuals)]
        for t in range(prefill, T):
            now = e[:, t:t + 1]
            x = torch.where(plain[:, t:t + 1], now, self.fuse(now, states[-1][:, -1:]))
            states.append(self.stack(x, cache[..., :t + 1, :], idx.new_full((B,), t), residuals))
        return torch.cat(states, dim=1)

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, mode="standard", prefill_passes=1, temperature=1.0, top_k=None,
                 seed=None, stop=()):
        """The tokens that continue each prompt, as lists, up to the first token of `stop`. temperature 0 is greedy.

        prompts: lists of 1 to block_size tokens. standard: a plain prefill, then token embeddings. soft: a plain
        prefill, then every generated token is fused with the state that chose it. fused: the prompt gets prefill_passes
        fused passes more, each one's cache replacing the one before; then as soft.
        """
        if mode not in MODES:
            raise UserError(f"--mode={mode}: no such mode; {train.nearest(mode, MODES)}")
        if mode != "standard":
            self.need_feedback(f"--mode={mode}")
        if not min(map(len, prompts), default=0):
            raise UserError("an empty prompt: there is nothing to continue")
        if (T := max(map(len, prompts))) > self.config.block_size:
            raise UserError(f"a prompt of {T} tokens is longer than the context, {self.config.block_size}: shorten it")
        device, B = self.wte.weight.device, len(prompts)
        generator = torch.Generator(device).manual_seed(seed) if seed is not None else None
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        idx = torch.tensor([[*p] + [0] * (T - len(p)) for p in prompts], device=device)  # no token sees the padding
        cache, last = self.new_cache(B, T + max_new_tokens), (torch.arange(B, device=device), lengths - 1)
        h = self.prefill(idx, cache, prefill_passes if mode == "fused" else 0)[last][:, None]  # (B, 1, D)
        before = token = idx[last][:, None]  # (B, 1)
        new = [[] for _ in prompts]
        for n in range(max_new_tokens):
            if n:
                x = e = self.embed(token)
                if mode != "standard":
                    x = torch.where((before == self.config.document_end)[..., None], e, self.fuse(e, h))
                h = self.stack(x, cache[..., :T + n, :], lengths + n - 1)
            before, token = token, train.sample_token(self.readout(h[:, 0]), temperature, top_k, generator)
            for row, t in zip(new, token[:, 0].tolist()):
                if not row or row[-1] not in stop:
                    row.append(t)
            if all(row[-1] in stop for row in new):
                break
        return new


# ---------------------------------------------------------------------------------------------------------------------
# The task

class RunningSumData:
    """Random bits; the target at every position is the sum of the bits so far, modulo config.modulus (0110 -> 0122 for
    3). Rows of block_size bits, made on the fly; the validation split's are the same at every seed."""

    def __init__(self, options, config):
        self.options, self.T, self.vocab_size = options, config.block_size, config.modulus
        self.tokenizer = train.Tokenizer("char", [chr(ord("0") + i) for i in range(self.vocab_size)])
        self.steps_per_epoch = max(1, 2 ** min(self.T, 20) // options.step_rows)

    def batch(self, split, i):
        bits = torch.from_numpy(train.stream(self.options, split, i).integers(0, 2, (self.options.step_rows, self.T)))
        return bits, bits.cumsum(1) % self.vocab_size


DATA = {"running-sum": RunningSumData, "statetrack": train.StateTrackData}


# ---------------------------------------------------------------------------------------------------------------------
# Training. train.py's Run does the rest: devices, data, optimiser, schedule, evaluation, log, checkpoints.

def sample_passes(config, seed, step, max_steps):
    """The number of passes of a training step, a pure function of (seed, step): resuming makes the same draws."""
    if step <= config.feedback_from * max_steps:
        return 1
    return 1 + int(np.random.default_rng([seed, step, 1]).choice(len(config.shares), p=config.shares))


def train_model(run):
    run.max_steps = round(run.max_steps * (1 + run.config.more_passes(run.config.compute_of or "1")))
    if run.options.dataset in ("wikitext-2", "wikitext-103") and run.config.document_end < 0:  # whose documents are lines
        run.config.document_end = run.data.tokenizer.encode("\n\n=")[-2]
    model = FullBandwidthGPT(run.config)
    if run.config.init_from and not run.resumes:
        model.load_weights(run.config.init_from, run.data.tokenizer)
    model = run.start(model)
    for step in run.steps():
        passes = sample_passes(run.config, run.options.seed, step, run.max_steps)
        for idx, targets, num_targets in run.batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, passes, num_targets)
            run.backward(loss, metrics)
        run.update()
    for last in [row for row in run.rows if "val_loss" in row][-1:]:
        ces = [f"{last[f'val_ce_{k}']:.3f}" for k in range(1, len(run.config.shares) + 1)]
        run.say(f"validation loss after each pass: {', '.join(ces)}: see {run.out}/curves.png, then run\n"
                f"python fullbandwidth.py {run.out}")


# ---------------------------------------------------------------------------------------------------------------------
# Diagnostics. `batches` is a list of (idx, targets), each (B, T).

PASSES = (1, 2, 3, 4, 5, 10, 20, 30, 100, 1000)


def load_model(path):
    """A trained model, its Options and its tokenizer. One that was saved before its feedback started is a standard one."""
    ckpt = train.load_checkpoint(path, "fullbandwidth")
    model, options, tokenizer = train.restore_model(ckpt, path, "fullbandwidth", FullBandwidthGPT)
    step, start = ckpt["step"], model.config.feedback_from * ckpt["max_steps"]
    if model.W_U is not None and step <= start:
        model.W_U, model.why_not = None, f"was saved after step {step}, before its feedback starts, after step {start:.0f}"
    return model, options, tokenizer


def load_run(path):
    """A trained model, its Options, its data and at most two validation batches, and the passes to look at."""
    model, options, tokenizer = load_model(path)
    data, batches = train.validation_batches(options, tokenizer, model, min(2, options.eval_batches))
    return model, options, data, batches, PASSES if model.W_U is not None else (1,)


@torch.no_grad()
def token_loss(model, h, targets):
    """Mean CE in nats of states h (B, T, D)."""
    given = (targets >= 0).flatten()
    scale = given.to(h.dtype) / given.sum()
    return cross_entropy(h.flatten(0, 1), model.readout_weight, targets.clamp_min(0).flatten(), scale)[0]


@torch.no_grad()
def pass_curve(model, batches, ks=PASSES):
    """(len(ks), 2): for ascending k, CE after pass k, that is after k - 1 prefill passes, and mean ||h^(k) - h^(k-1)||
    over tokens, h^(0) = 0. It stops only where a pass changes nothing, bit for bit: then no later one does."""
    def curve(idx, targets):
        states, rows, k, h, update = model.iterate(idx), [], 0, 0.0, math.inf
        for last in ks:
            while k < last and update:
                before, h, k = h, next(states), k + 1
                update = (h - before).norm(dim=-1).mean()
            rows.append(torch.stack([token_loss(model, h, targets), update]))
        return torch.stack(rows)
    return sum(curve(*batch) for batch in batches) / len(batches)


def feedback_gains(model, idx, steps=16, generator=None):
    """||J^T v|| at each power-iteration step, (steps, B), at the exact states of idx (B, T), from random unit v.

    J is the Jacobian of h^(k-1) -> h^(k). A position reads only earlier ones, so J is nilpotent: its spectral radius is
    0, after T steps nothing is left. Contraction or growth shows in the geometric mean over fewer steps.
    """
    h, e, plain = model.recurrent(idx).requires_grad_(), model.embed(idx), model.plain(idx)
    after = model.stack(model.feedback(h, e, plain))
    v, gains = torch.randn(h.shape, dtype=h.dtype, device=h.device, generator=generator), []
    for _ in range(steps):
        v = v / v.flatten(1).norm(dim=1).clamp_min(torch.finfo(v.dtype).tiny)[:, None, None]
        v, = torch.autograd.grad(after, h, v, retain_graph=True)
        gains.append(v.flatten(1).norm(dim=1))
    return torch.stack(gains)


@torch.no_grad()
def zeroed_loss(model, batches):
    """CE of the second pass with h = 0: what the fusion's token path alone is worth, its shortcut past the state."""
    def loss(idx, targets):
        e = model.embed(idx)
        return token_loss(model, model.stack(model.feedback(torch.zeros_like(e), e, model.plain(idx))), targets)
    return sum(loss(*batch) for batch in batches).item() / len(batches)


def probe(features, labels, groups, folds=4, l2=1.0):
    """Held-out accuracy of L2-regularised logistic regression of labels (N,), 0 or 1, on features (N, D). Groups are
    held out whole, in folds drawn at random: in order, a fold could hold all groups of one number."""
    names = np.random.default_rng(0).permutation(sorted(set(groups))).tolist()
    fold = torch.tensor([names.index(group) * folds // len(names) for group in groups], device=labels.device)
    x, y, right = features.double(), labels.double(), 0
    for i in range(folds):
        held = fold == i
        z = (x - x[~held].mean(0)) / x[~held].std(0).clamp_min(1e-6)
        w = torch.zeros(x.shape[1] + 1, dtype=x.dtype, device=x.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([w], max_iter=100, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(z[~held] @ w[1:] + w[0], y[~held], reduction="sum")
            loss = loss + l2 / 2 * w[1:].square().sum()
            loss.backward()
            return loss
        optimizer.step(closure)
        right += ((z[held] @ w[1:] + w[0] > 0) == (y[held] > 0)).sum().item()
    return right / len(y)


def probe_depths(model, idx, labels, groups, recurrent=(0, 1, 2, 4, None)):
    """State accessibility (section 4.4): probe accuracy at the last token of idx (N, T), (len(recurrent), n_layer + 1),
    at each depth of the residual stream, 0 the stack's input, after a recurrent prefill of the last so many tokens
    (None: of all). Readable is not the same as used: a random model's state is readable too."""
    table, T = [], idx.shape[1]
    for last in recurrent:
        residuals = []
        model.recurrent(idx, 1 if last is None else T - last, residuals)
        table.append([probe(x[:, -1], labels, groups) for x in residuals])
    return torch.tensor(table)


def diagnose(path):
    """Print every diagnostic of a trained run on its validation split and draw passes into RUN/passes.png."""
    model, options, _, batches, ks = load_run(path)
    out, runs = train.run_directory(path), {("this run", options.seed): path}
    print(f"{path}: mix {model.config.mix}, fusion {model.config.fusion}")
    report(passes, runs, out)
    if len(ks) > 1 and model.config.block_size > 1:  # a single position is fed back to none
        gains = feedback_gains(model, batches[0][0], min(16, model.config.block_size // 2)).log().mean(0).exp()
        print(f"\nlocal contraction rate at the exact states: {gains.mean():.3f}, in the worst row {gains.max():.3f}")
    report(TASKS.get(options.dataset, decoding), runs, out)


def evaluate(path, evaluation, modes, prefill_passes):
    """The tasks of lm-evaluation-harness under each decoding mode, log-likelihoods too: those of soft and fused read the
    continuation token by token, each fused with the state before it."""
    model, _, tokenizer = load_model(path)

    def under(mode):
        if mode != "standard":
            model.need_feedback(f"--mode={mode}")

        def score(idx, n):
            prefill, passes = idx.shape[1] if mode == "standard" else n, prefill_passes if mode == "fused" else 0
            h = model.recurrent(idx.to(model.wte.weight.device), prefill, prefill_passes=passes)
            return model.readout(h[:, n - 1:])
        return score, lambda prompts, limits, stop: model.generate(prompts, max(limits), mode, prefill_passes,
                                                                   temperature=0, stop=stop)
    train.evaluate(path, evaluation, tokenizer, model.config.block_size, {mode: under(mode) for mode in modes})


# ---------------------------------------------------------------------------------------------------------------------
# Reports on trained runs, one or a sweep's. A measure of a run yields (title of a table, columns, name of a row, values).

def report(measure, runs, out):
    """Print the tables of runs {(condition, seed): run}: each row's mean and, of several seeds, its spread below it. Write
    them into the folder out, MEASURE.csv, and draw those over numbers, MEASURE.png. A row may lack the last columns."""
    tables, rows = {}, []
    for (condition, _), run in runs.items():
        for title, columns, name, values in measure(run):
            row = tables.setdefault((title, *columns), {}).setdefault(f"{condition}{name}", [])
            row.append(torch.as_tensor(values).double().cpu())
    drawn = [key for key in tables if isinstance(key[1], int)]
    figure, axes = train.new_figure(max(1, len(drawn)))
    for (title, *columns), figures in tables.items():
        width = max(map(len, (title, *figures)))
        print(f"\n{title:{width}}" + "".join(f"{column:>12}" for column in columns))
        for name, values in figures.items():
            mean, spread, seeds = torch.stack(values).mean(0), torch.stack(values).std(0, correction=0), len(values)
            for kind, row in (("mean", mean), ("spread", spread))[:seeds]:
                print(f"{name if row is mean else '  +-':{width}}" + "".join(f"{value:>12.4g}" for value in row.tolist()))
                rows.append({"table": title, "condition": name, "seeds": seeds, "of": kind}
                            | dict(zip(map(str, columns), row.tolist())))
            if (title, *columns) in drawn:
                axis = axes[drawn.index((title, *columns))]
                axis.plot(columns[:len(mean)], mean, "o-", label=name)
                axis.set(title=title, xscale="log" if columns[0] else "linear", yscale="log" if "||" in title else "linear")
                axis.legend(fontsize="x-small")
    train.write_csv(out / f"{measure.__name__}.csv", rows)
    if drawn:
        figure.savefig(out / f"{measure.__name__}.png", dpi=120)


def passes(run):
    """Loss and update size over passes, pass k being k - 1 fused prefill passes; the loss of the token path alone."""
    model, _, _, batches, ks = load_run(run)
    losses, updates = pass_curve(model, batches, ks).T
    yield "validation loss of pass", PASSES, "", losses
    yield "||h^(k) - h^(k-1)|| of pass", PASSES, "", updates
    if model.W_U is not None:
        yield "loss of pass 2", ["with h = 0"], "", [zeroed_loss(model, batches)]


def fusion(run):
    """As `passes`; and the mean norms of the fusion's two paths over training."""
    yield from passes(run)
    log = [row for row in train.read_csv(run / "log.csv") if "val_state_path" in row]
    for name in ("state", "token") if log else ():
        yield "norm of path at step", [row["step"] for row in log], f", {name}", [row[f"val_{name}_path"] for row in log]


@torch.no_grad()
def decoding(run, n=1000):
    """Of n tokens sampled in modes standard and soft: mean ||h|| in their first and last tenth, share of 4-grams new."""
    model, _, _, batches, _ = load_run(run)
    prompt = batches[0][0][0, :8].tolist()
    for mode in model.modes()[:2]:
        new, = model.generate([prompt], n, mode, seed=42)
        idx = torch.tensor([[*prompt, *new]], device=model.wte.weight.device)
        h = model.stack(model.embed(idx)) if mode == "standard" else model.recurrent(idx, prefill=len(prompt))
        norms, grams = h[0, len(prompt):].norm(dim=-1), {tuple(new[i:i + 4]) for i in range(n - 3)}
        yield "1,000 tokens", ("first ||h||", "last ||h||", "new"), f", {mode}", [
            norms[:n // 10].mean(), norms[-(n // 10):].mean(), len(grams) / (n - 3)]


@torch.no_grad()
def running_sum(run):
    """Share of right sums on the trained length T and on the T positions behind it, which no window has reached."""
    model, options, *_ = load_run(run)
    T, device = model.config.block_size, model.wte.weight.device
    data = RunningSumData(options, replace(model.config, block_size=2 * T))
    idx, targets = (x.to(device) for x in data.batch("val", 0))
    states = [*model.passes(idx, 3), model.recurrent(idx)] if model.W_U is not None else model.passes(idx, 1)
    right = torch.stack([model.readout(h).argmax(-1) == targets for h in states]).double()
    for where, part in (("1 .. T", right[..., :T]), ("T + 1 .. 2 T", right[..., T:])):
        yield f"right sums at {where}", ("pass 1", "pass 2", "pass 3", "soft"), "", part.mean((1, 2))


def addition(run, n=500):
    """Of n held-out sums, the share answered right and the mean length, up to the model's own end mark."""
    model, _, data, *_ = load_run(run)
    (idx, targets), start, end = data.encode(*data.operands("val", 0, n)), 2 * data.digits + 2, data.vocab.index("§")
    answers = [row[row >= 0].tolist() for row in targets]
    new = [model.generate(idx[:, :start].tolist(), data.digits + 3, mode, temperature=0, stop=[end])
           for mode in model.modes()]
    yield "right answers", MODES, "", [sum(map(operator.eq, rows, answers)) / n for rows in new]
    yield "tokens in an answer", MODES, "", [sum(map(len, rows)) / n for rows in new]


def statetrack(run, n=400):
    """For every task and size that fits, right answers under each decoder and what probes read at the last token, at
    each depth of the residual stream; beside it the same of the model before training, which is readable too."""
    model, options, data, *_ = load_run(run)
    torch.manual_seed(options.seed)
    untrained = FullBandwidthGPT(model.config).to(model.wte.weight.device).eval()
    prefills = {"standard prefill": 0}
    if model.W_U is not None:
        prefills |= {"last 1 recurrent": 1, "last 2 recurrent": 2, "last 4 recurrent": 4, "recurrence": None}
    cases = [(task, size, 16) for task, sizes in data.sizes.items() for size in sizes]
    for task, size, writes in (*cases, ("registers", 8, 32), ("registers", 8, 64)):
        texts, labels, groups = zip(*(data.program("val", task, i, size, writes) for i in range(n)))
        prompts = [data.tokenizer.encode(text) for text in texts]
        if len(prompts[0]) > data.T:
            continue
        case = f"{task}, size {size}" + f", {writes} writes" * (task == "registers")
        answers = [[data.tokenizer.ids[data.answers[task][label]]] for label in labels]
        yield f"{case}: right answers", MODES, "", [
            sum(map(operator.eq, model.generate(prompts, 1, mode, temperature=0), answers)) / n for mode in model.modes()]
        idx, labels = (torch.tensor(x, device=model.wte.weight.device) for x in (prompts, labels))
        for who, probed in (("", model), (", untrained", untrained)):
            for prefill, row in zip(prefills, probe_depths(probed, idx, labels, groups, prefills.values())):
                yield f"{case}: probes", [f"depth {i}" for i in range(len(row))], f"{who}, {prefill}", row


TASKS = {"running-sum": running_sum, "addition": addition, "statetrack": statetrack}


# ---------------------------------------------------------------------------------------------------------------------
# Sweeps: the same size and data with and without feedback, at equal steps and at equal compute; without each stabiliser.

def beside_standard(mixes, **fields):
    """Conditions: a standard model of equal steps, one of equal compute as the last mix, and the mixes."""
    mixes = {"standard": dict(mix="1"), "standard-equal-compute": dict(mix="1", compute_of=list(mixes.values())[-1])} | {
        name: dict(mix=mix) for name, mix in mixes.items()}
    return {name: mix | fields for name, mix in mixes.items()}


MIXES = {"75+25": "0.75,0.25", "75+22+3": "0.75,0.22,0.03",  # the paper's
         "0+100": "0,1", "0+97+3": "0,0.97,0.03", "0+70+30": "0,0.7,0.3"}
WITHOUT = {"all-on": {}, "no-depth-scale": dict(depth_scale=False), "no-input-norm": dict(input_norm=False),
           "no-jitter": dict(jitter=0.0), "no-prefix-mix": dict(prefix_mix=False), "no-tying": dict(tied=False)}
WITHOUT["none"] = {field: value for fields in WITHOUT.values() for field, value in fields.items()}
SWEEPS = {
    "passes": (beside_standard(MIXES), functools.partial(report, passes)),
    "stabilisers": ({f"{name}-{mix}": dict(prefix_mix=True) | fields | dict(mix=MIXES[mix])
                     for name, fields in WITHOUT.items() for mix in ("0+100", "0+97+3")}, functools.partial(report, passes)),
    "fusion": ({name: dict(fusion=name) for name in ("gated", "add", "concat")}, functools.partial(report, fusion)),
} | {task: (beside_standard({"feedback": "0.5,0.4,0.1"}, dataset=task), functools.partial(report, measure))
     for task, measure in TASKS.items()}  # each with --preset of that name


# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Arguments:
    prompt: str = None  # text to continue; without it, the diagnostics are printed
    mode: str = "standard"  # of decoding: standard, soft (feed back new tokens' states), fused (the prompt's too)
    prefill_passes: Count = 1  # fused passes over the prompt, with --mode=fused
    max_new_tokens: int = 200  # how many tokens to generate
    temperature: Annotated[float, 0, 100] = 0.8  # 0: greedy
    top_k: int = 50  # sample from the k likeliest; 0: from all
    seed: Seed = 42  # seed of the sampling
    stop: str = ""  # end at any of these tokens

    def __post_init__(self):
        check_fields(self)
        for mode in self.mode.split(","):
            if mode not in MODES:
                raise UserError(f"--mode={mode}: invalid choice; {train.nearest(mode, MODES)}")


def main(argv):
    usage = "python fullbandwidth.py RUN [--prompt=TEXT | --eval=TASK,..] [--field=value ...]"
    path, a, evaluation = train.parse_run(usage, Arguments, argv)
    if evaluation.eval:
        return evaluate(path, evaluation, a.mode.split(","), a.prefill_passes)
    if a.prompt is None:
        return diagnose(path)
    model, _, tokenizer = load_model(path)
    prompt, stop = train.encode_prompt(tokenizer, a.prompt), tokenizer.encode(a.stop)
    if tokenizer.spec["name"] == "regex" and (missing := tokenizer.missing(a.stop)):
        raise UserError(f"--stop={a.stop!r}: the vocabulary lacks {missing}")
    new, = model.generate([prompt], a.max_new_tokens, a.mode, a.prefill_passes, a.temperature, a.top_k, a.seed, stop)
    print(a.prompt + tokenizer.decode(new))


if __name__ == "__main__":
    train.command_line(main)
