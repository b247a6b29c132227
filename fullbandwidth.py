"""The model of "Full-bandwidth transformer" (Wang et al., arXiv 2608.08888).

A decoder hands on one token id, and throws away the top-layer state h_{t-1} that chose it. Here
that state is the next input, and the token is its gate (equation 4):
e_t (x) h_{t-1} = (W_U h_{t-1}) * sigmoid(W_G e_t). Training stays parallel (equations 10 to 12):
pass 1 is the ordinary forward, pass k reads the states of pass k - 1, shifted by one position.
This is a Jacobi iteration on the recurrence: the t-th position is exact after t passes, and a map
that contracts is close long before; the few steps that train three passes are to make it contract.
A window may hold several documents. With document_end set (in WikiText it is) no state is fed back
from one to the next, but attention looks across; without it, states cross too.

    python train.py fullbandwidth                              # train the tiny preset
    python train.py fullbandwidth --preset=running-sum         # sums past the trained length
    python fullbandwidth.py out/fullbandwidth-tiny             # the loss after each pass
    python fullbandwidth.py out/fullbandwidth-tiny --prompt="The " --mode=standard,soft,fused
    python experiments/feedback.py passes                      # compare mixes: the paper's figure 3

Letters: B batch, T tokens, D width, V vocabulary, S slots of the KV cache, nh query heads, nkv key
heads, hs their width; e embeddings, x inputs of the stack and h^(k) pass k's final-normed top
states, (B, T, D).
"""
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
    window: int = 0  # reach of attention in tokens, the query's own included; 0: block_size
    full_every: Count = 6  # with a window: every so many layers, one reaches block_size tokens
    head_gates: bool = False  # each head's output times a sigmoid of the layer's input
    rope_theta: Annotated[float, 1, 10**9] = 10_000.0  # of the angles theta^(-2i/hs) per token
    fusion: Literal["gated", "add", "concat"] = "gated"  # equation 4; e + W_U h; W_U h + W_G e
    mix: str = "0.75,0.22,0.03"  # shares of steps with 1, 2, 3 .. passes; --mix=1: standard model
    feedback_from: BelowOne = 0.5  # fraction of the steps, with one pass, before feedback starts
    depth_scale: bool = True  # residual branches times 1 / sqrt(2 n_layer)
    input_norm: bool = True  # one shared RMSNorm on embeddings and on the stack's inputs
    jitter: float = 0.02  # in training, uniform noise of this size on the states fed back
    prefix_mix: bool = True  # in training, plain inputs before a random position of each sequence
    tied: bool = True  # the readout multiplies with the input embeddings
    compute_of: str = ""  # another mix: train as many steps more as its passes would cost
    document_end: Token = -1  # no state is fed back after it; -1: none, a line's end in WikiText
    modulus: Annotated[int, 2, 1000] = 3  # of --dataset=running-sum, at most 1,000
    init_from: str = ""  # a run or checkpoint to start from; it may lack W_U and W_G

    def __post_init__(self):
        check_fields(self)
        if self.n_embd % (2 * self.n_head):
            raise UserError(f"--n_embd={self.n_embd} is not --n_head={self.n_head} times an even "
                            f"width")
        if self.n_head % self.n_kv_head:
            raise UserError(f"--n_head={self.n_head} is not divisible by "
                            f"--n_kv_head={self.n_kv_head}")
        parse_mix(self.mix)
        if self.compute_of:
            parse_mix(self.compute_of, "compute_of")

    @property
    def shares(self):
        return parse_mix(self.mix)

    def more_passes(self, mix):
        """Passes beyond the first, averaged over a training with that mix."""
        later = sum(extra * share for extra, share in enumerate(parse_mix(mix)))
        return (1 - self.feedback_from) * later


def parse_mix(mix, field="mix"):
    """[share of 1-pass steps, of 2-pass steps, ..]; UserError, naming the field, if it is none."""
    try:
        shares = [float(share) for share in mix.split(",")]
    except ValueError:
        shares = [0.0]
    adds_up = abs(sum(shares) - 1) < 1e-8  # as exact as numpy wants it, which draws from them
    if adds_up and min(shares) >= 0 and shares[-1] > 0 and len(shares) <= 1000:
        return shares
    raise UserError(f"--{field}={mix:.60}: expected at most 1,000 shares that sum to 1, "
                    f"the last above 0, as in 0.75,0.22,0.03")


PAPER = dict(optimizer="muon", muon_lr=0.01, lr=5e-4, weight_decay=0.01, schedule="wsd",
             warmup_steps=200)
TOY = dict(optimizer="muon", muon_lr=0.02, lr=3e-3, schedule="wsd", warmup_steps=20,
           dtype="float32")  # in which matrices this small are faster
SMALL = dict(n_layer=2, n_embd=64, mlp_width=176, mix="0.5,0.4,0.1", feedback_from=0.0,
             batch_size=64, log_interval=100, eval_interval=500, eval_batches=2, **TOY)
PRESETS = {
    # not the paper's mix: few steps must teach the second pass, and every pass after it
    "tiny": dict(n_layer=2, mix="0,0.7,0.3", feedback_from=0.0, prefix_mix=False, max_steps=800,
                 **TOY),
    "running-sum": dict(dataset="running-sum", block_size=32, max_steps=3000, **SMALL),
    "124m": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, mlp_width=2048, block_size=1024,
                 tokenizer="gpt2", batch_size=16, grad_accum=16, max_steps=5000, log_interval=20,
                 eval_interval=500, **PAPER),
    "1b": dict(vocab_size=100_352, n_layer=24, n_head=16, n_kv_head=8, n_embd=1536, mlp_width=6656,
               head_gates=True, block_size=8192, window=2048, batch_size=36, tokenizer="gpt2",
               max_steps=0, eval_interval=1000, **PAPER),
}
MODES = ("standard", "soft", "fused")  # of decoding
SHOW = ("ce_1", "val_ce_1", "val_ce_2", "val_ce_3")  # printed beside the loss
CURVES = (("cross-entropy after each pass", "linear", SHOW),)  # the panels of curves.png


# --------------------------------------------------------------------------------------------------
# The model

class RMSNorm(nn.Module):
    """h / rms(h) * gain."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, h):
        return F.rms_norm(h, h.shape[-1:], self.gain.to(h.dtype), 1e-6)


def rotate(x, rope):
    """RoPE: turn each pair (x1, x2) of queries or keys (B, nh, T, hs) by its position's angle.

    The half-rotation layout: a pair is one number of the first half and one of the second."""
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def look_back(positions, num_keys, reach):
    """The mask of queries at positions (B, T), (B, 1, T, num_keys): True for each key that lies at
    most `reach` tokens back, the query's own position included, and not ahead."""
    back = positions[:, None, :, None] - torch.arange(num_keys, device=positions.device)
    return (back >= 0) & (back < reach)


class Attention(nn.Module):
    """Causal attention with normed queries and keys, RoPE, grouped queries (several query heads
    share a key head), and sigmoid gates on the heads' outputs."""

    def __init__(self, config):
        super().__init__()
        D = config.n_embd
        hs = D // config.n_head
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.qkv = nn.Linear(D, (self.n_head + 2 * self.n_kv_head) * hs, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.q_norm = RMSNorm(hs)
        self.k_norm = RMSNorm(hs)
        self.gate = nn.Linear(D, config.n_head, bias=False) if config.head_gates else None

    def forward(self, x, rope, mask=None, cache=None, positions=None):
        """x (B, T, D) is a whole window; or, if positions (B,) are given, one token a row, T = 1.

        mask: None for plainly causal. cache (2, B, nkv, S, hs): one layer's keys and values."""
        B, T, D = x.shape
        heads = self.qkv(x).view(B, T, -1, D // self.n_head).transpose(1, 2)
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        q = rotate(self.q_norm(q), rope)  # (B, nh, T, hs)
        k = rotate(self.k_norm(k), rope)  # (B, nkv, T, hs)
        if positions is None:
            y = self.attend(q, k, v, mask, cache)
        else:
            y = self.attend_to_cache(q, k, v, mask, cache, positions)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None]
        return self.out(y.transpose(1, 2).reshape(B, T, D))

    def attend(self, q, k, v, mask, cache):
        """Attention within a window; keys and values go into the first T slots of a cache."""
        if cache is not None:
            T = q.shape[2]
            cache[0, :, :, :T] = k
            cache[1, :, :, :T] = v
        group = self.n_head // self.n_kv_head
        if group > 1:  # enable_gqa would do this too; under a mask, GPUs have no fast kernel for it
            k = k.repeat_interleave(group, dim=1)  # (B, nh, T, hs)
            v = v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)

    def attend_to_cache(self, q, k, v, mask, cache, positions):
        """Attention of one token a row to the cache, into which its own key and value go first, at
        its position. What an earlier text left in later slots is masked."""
        B, _, _, hs = q.shape
        row = torch.arange(B, device=q.device)
        cache[0, row, :, positions] = k[:, :, 0]
        cache[1, row, :, positions] = v[:, :, 0]
        # Query heads that share a key head stand as rows of one attention: no key is copied.
        q = q.reshape(B, self.n_kv_head, -1, hs)  # (B, nkv, nh / nkv, hs)
        y = F.scaled_dot_product_attention(q, cache[0], cache[1], mask)
        return y.reshape(B, self.n_head, 1, hs)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x += s norm(attn(norm(x))); x += s norm(mlp(norm(x))). With s = 1 / sqrt(2 n_layer) the top
    state's norm does not grow with the number of layers."""

    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.norm1 = RMSNorm(config.n_embd)
        self.norm2 = RMSNorm(config.n_embd)
        self.norm3 = RMSNorm(config.n_embd)
        self.norm4 = RMSNorm(config.n_embd)
        self.scale = (2 * config.n_layer) ** -0.5 if config.depth_scale else 1.0

    def forward(self, x, rope, mask=None, cache=None, positions=None):
        x = x + self.scale * self.norm2(self.attn(self.norm1(x), rope, mask, cache, positions))
        return x + self.scale * self.norm4(self.mlp(self.norm3(x)))


class Transformer(nn.Module):
    """An ordinary decoder: embeddings, a stack of blocks, a readout."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        D = config.n_embd
        self.wte = nn.Embedding(config.vocab_size, D)
        self.norm_in = RMSNorm(D) if config.input_norm else nn.Identity()
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.norm = RMSNorm(D)
        self.head = None if config.tied else nn.Linear(D, config.vocab_size, bias=False)

    @property
    def readout_weight(self):
        return self.wte.weight if self.head is None else self.head.weight

    def readout(self, h):
        """Logits, (.., D) -> (.., V)."""
        return F.linear(h, self.readout_weight)

    def embed(self, idx):
        """e = norm_in(wte) of tokens (B, T). run_blocks applies the same norm to every input, so to
        a plain one once more: in every pass, so that a plain input is the same in all."""
        return self.norm_in(self.wte(idx))

    def stack(self, x, cache=None):
        """Final-normed top states (B, T, D) of inputs x (B, T, D).

        cache (n_layer, 2, B, nkv, S, hs): its first T slots are filled for the tokens to come."""
        B, T, D = x.shape
        positions = torch.arange(T, device=x.device)[None]  # (1, T)
        masks = {}  # {reach: mask}; None, plainly causal, where a layer sees the whole window
        for reach in set(self.reaches()):
            masks[reach] = look_back(positions, T, reach) if reach < T else None
        return self.run_blocks(x, self.rope(positions), masks, cache)

    def stack_one(self, x, cache, positions):
        """The same for one token a row, x (B, 1, D) at positions (B,), which reads the cache and
        leaves its own keys and values there."""
        at = positions[:, None]  # (B, 1)
        masks = {reach: look_back(at, cache.shape[-2], reach) for reach in set(self.reaches())}
        return self.run_blocks(x, self.rope(at), masks, cache, positions)

    def run_blocks(self, x, rope, masks, cache=None, positions=None):
        x = self.norm_in(x)
        for i, (block, reach) in enumerate(zip(self.blocks, self.reaches())):
            x = block(x, rope, masks[reach], None if cache is None else cache[i], positions)
        return self.norm(x)

    def rope(self, positions):
        """cos and sin of the rotary angles at positions (B, T), (B, 1, T, hs / 2) each."""
        hs = self.config.n_embd // self.config.n_head
        like = dict(dtype=self.wte.weight.dtype, device=positions.device)
        frequencies = self.config.rope_theta ** (-torch.arange(0, hs, 2, **like) / hs)
        angles = positions[:, None, :, None] * frequencies
        return angles.cos(), angles.sin()

    def reaches(self):
        """How many tokens each layer looks back, itself included."""
        c = self.config
        window = min(c.window or c.block_size, c.block_size)
        return [window if (i + 1) % c.full_every else c.block_size for i in range(c.n_layer)]

    def new_cache(self, B, S):
        c = self.config
        hs = c.n_embd // c.n_head
        return self.wte.weight.new_zeros(c.n_layer, 2, B, c.n_kv_head, S, hs)

    def load_weights(self, path, tokenizer):
        """Start from a checkpoint of this architecture with the same tokenizer; W_U and W_G keep
        their random weights if it has none."""
        ckpt = train.load_checkpoint(path, "fullbandwidth")
        there = {name: w.shape for name, w in ckpt["weights"].items()}
        here = {name: w.shape for name, w in self.state_dict().items()}
        for name in {**there, **here}:
            if there.get(name) != here.get(name) and not name.startswith("W_"):
                raise UserError(f"--init_from={path} is of another architecture or vocabulary: "
                                f"{name} differs")
        if ckpt["tokenizer"] != tokenizer.spec:
            raise UserError(f"--init_from={path} was trained with another tokenizer")
        with train.restoring(f"--init_from={path} does not fit fullbandwidth.py as it is now"):
            self.load_state_dict(ckpt["weights"], strict=False)


def target_weights(targets, dtype, num_targets=None):
    """A weight for each position of targets (B, T), (B T,): 0 where there is no target, else
    1 / num_targets, by default how many there are. A sum with these weights is a mean."""
    weights = (targets >= 0).flatten().to(dtype)
    return weights / (weights.sum() if num_targets is None else num_targets)


class FeedbackTransformer(Transformer):
    """A transformer whose top states are fed back, by W_U and W_G, in passes over whole windows. If
    the mix is of single passes only, it has neither matrix and stays an ordinary one."""

    def __init__(self, config):
        super().__init__(config)
        D = config.n_embd
        has_feedback = len(config.shares) > 1
        has_gate = has_feedback and config.fusion != "add"
        self.W_U = nn.Linear(D, D, bias=False) if has_feedback else None
        self.W_G = nn.Linear(D, D, bias=False) if has_gate else None
        self.why_no_feedback = f"had --mix={config.mix}"  # if W_U is None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.readout_weight, std=0.02)

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
        """Equation 4: e_t (x) h_{t-1}, of embeddings e and the states h of the positions before
        them, (.., D) each."""
        state, token = self.paths(e, h)
        return state * token if self.config.fusion == "gated" else state + token

    def next_input(self, e, h_before, plain):
        """Inputs (B, T, D) of the stack: each embedding fused with the state of the position
        before, or the embedding alone where plain (B, T)."""
        return torch.where(plain[..., None], e, self.fuse(e, h_before))

    def plain(self, idx):
        """Where the input is the plain embedding, (B, T): at the first position and after the end
        of a document."""
        before = F.pad(idx[:, :-1], (1, 0), value=-1)
        return (before < 0) | (before == self.config.document_end)

    def feedback(self, h, e, plain):
        """The inputs (B, T, D) of the pass after the one with states h, in the order of the
        paper's listing: noise, shift, fusion, plain inputs restored."""
        jitter = self.config.jitter
        if self.training and jitter:
            h = h + torch.empty_like(h).uniform_(-jitter, jitter)
        shifted = F.pad(h[:, :-1], (0, 0, 1, 0))  # position t gets the state of t - 1
        return self.next_input(e, shifted, plain)

    def states(self, idx, num_passes):
        """[h^(1), h^(2), ..], each (B, T, D), for idx (B, T): equations 10 and 11. Nothing is
        detached."""
        if num_passes < 1:
            raise UserError(f"{num_passes} passes: expected at least 1")
        if num_passes > 1:
            self.need_feedback("a second pass")
        B, T = idx.shape
        e = self.embed(idx)
        plain = self.plain(idx)
        if self.training and self.config.prefix_mix:
            cut = torch.randint(T, (B, 1), device=idx.device)
            plain = plain | (torch.arange(T, device=idx.device) < cut)
        h = self.stack(e)
        states = [h]
        for _ in range(num_passes - 1):
            h = self.stack(self.feedback(h, e, plain))
            states.append(h)
        return states

    def modes(self):
        """The decoding modes that this model has."""
        return MODES if self.W_U is not None else MODES[:1]

    def need_feedback(self, what):
        if self.W_U is None:
            raise UserError(f"{what} needs a model trained with feedback, and this one "
                            f"{self.why_no_feedback}")

    def loss(self, idx, targets, num_passes=None, num_targets=None):
        """(loss, metrics) for idx and targets (B, T), targets -1 where there is none.

        Equation 12 with lambda = 1: CE_1 + mean_{k >= 2} CE_k, over num_passes passes, by default
        all of the mix. A CE is a sum over tokens, divided by num_targets, by default how many
        targets there are. metrics: ce_k in nats; in evaluation also the mean norms of the fusion's
        two paths. With one pass it is CE_1 alone, with more about twice a CE: compare mixes by
        val_ce_k, not by val_loss.
        """
        if num_passes is None:
            num_passes = len(self.config.shares)
        states = self.states(idx, num_passes)
        token_weights = target_weights(targets, self.wte.weight.dtype, num_targets)  # (B T,)
        weights = [token_weights]  # of pass 1; the mean over the later passes counts as much
        for _ in range(num_passes - 1):
            weights.append(token_weights / (num_passes - 1))
        # All passes in one call, as more rows: no more logits are alive than for one pass.
        rows = torch.cat(states).flatten(0, 1)  # (k B T, D)
        answers = targets.clamp_min(0).flatten().repeat(num_passes)  # (k B T,)
        loss, ce = cross_entropy(rows, self.readout_weight, answers, torch.cat(weights))
        ce_of_pass = (ce.view(num_passes, -1) * token_weights).sum(1)  # (k,)
        metrics = {f"ce_{k}": ce_k for k, ce_k in enumerate(ce_of_pass, 1)}
        if num_passes > 1 and not self.training:
            # Not shifted: each path's mean norm is taken by itself.
            state, token = self.paths(self.embed(idx), states[0])
            metrics["state_path"] = state.norm(dim=-1).mean().detach()
            metrics["token_path"] = token.norm(dim=-1).mean().detach()
        return loss, metrics

    def flops_per_token(self):
        """Training FLOPs per token, averaged over the schedule: 6 per weight and pass, and 12 D per
        key that a token attends to."""
        c = self.config
        # In a window of T tokens the first r positions of a layer see fewer than r keys.
        keys = sum(r - r * r / (2 * c.block_size) for r in self.reaches())
        weights = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        one_pass = weights + (2 * keys + c.vocab_size) * c.n_embd
        fusion = sum(m.weight.numel() for m in (self.W_U, self.W_G) if m is not None)
        return 6 * (one_pass + c.more_passes(c.mix) * (one_pass + fusion))


class FullBandwidthGPT(FeedbackTransformer):
    """The same model one token after another, with a KV cache: recurrence and decoding modes."""

    def prefill(self, idx, cache, fused_passes):
        """States (B, T, D) of a prompt after one plain pass and fused_passes fused ones. Each pass
        overwrites what the one before has left in the cache."""
        e = self.embed(idx)
        plain = self.plain(idx)
        h = self.stack(e, cache)
        for _ in range(fused_passes):
            h = self.stack(self.feedback(h, e, plain), cache)
        return h

    @torch.no_grad()
    def recurrent(self, idx, prompt_length=1, fused_passes=0):
        """Final-normed states (B, T, D) of the sequential recurrence, which is soft decoding with
        idx (B, T) as its tokens: a prefill of the prompt, then each position fused with the state
        before it, with a KV cache. fused_passes of the prefill: as in fused decoding."""
        B, T = idx.shape
        if prompt_length < T:
            self.need_feedback("the recurrence")
        e = self.embed(idx)
        plain = self.plain(idx)
        cache = self.new_cache(B, T)
        states = [self.prefill(idx[:, :prompt_length], cache, fused_passes)]
        for t in range(prompt_length, T):
            here = slice(t, t + 1)
            x = self.next_input(e[:, here], states[-1][:, -1:], plain[:, here])  # (B, 1, D)
            states.append(self.stack_one(x, cache[..., :t + 1, :], idx.new_full((B,), t)))
        return torch.cat(states, dim=1)

    def check_prompts(self, prompts, mode):
        """UserError unless these prompts can be continued in this mode."""
        if mode not in MODES:
            raise UserError(f"--mode={mode}: no such mode; {train.nearest(mode, MODES)}")
        if mode != "standard":
            self.need_feedback(f"--mode={mode}")
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths, default=0) == 0:
            raise UserError("an empty prompt: there is nothing to continue")
        if max(lengths) > self.config.block_size:
            raise UserError(f"a prompt of {max(lengths)} tokens is longer than the context, "
                            f"{self.config.block_size}: shorten it")

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, mode="standard", prefill_passes=1, temperature=1.0,
                 top_k=None, seed=None, stop=()):
        """The tokens that continue each prompt, as lists, up to and including the first of `stop`.

        prompts: lists of 1 to block_size tokens. temperature 0 is greedy. standard: a plain
        prefill, then token embeddings. soft: a plain prefill, then every generated token is fused
        with the state that chose it. fused: the prompt gets prefill_passes fused passes more, each
        one's cache replacing the one before; then as soft.
        """
        self.check_prompts(prompts, mode)
        B = len(prompts)
        T = max(len(prompt) for prompt in prompts)
        device = self.wte.weight.device
        generator = None
        if seed is not None:
            generator = torch.Generator(device).manual_seed(seed)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        padded = [[*prompt] + [0] * (T - len(prompt)) for prompt in prompts]
        idx = torch.tensor(padded, device=device)  # (B, T); no token of a prompt sees the padding
        cache = self.new_cache(B, T + max_new_tokens)
        h = self.prefill(idx, cache, prefill_passes if mode == "fused" else 0)  # (B, T, D)
        rows = torch.arange(B, device=device)
        h = h[rows, lengths - 1][:, None]  # (B, 1, D), the state of each prompt's last token
        token = idx[rows, lengths - 1][:, None]  # (B, 1)
        token_before = token
        answers = [[] for _ in prompts]
        for n in range(max_new_tokens):
            if n > 0:  # the token drawn last is an input; h, at token_before, is what chose it
                x = self.embed(token)
                if mode != "standard":
                    x = self.next_input(x, h, plain=token_before == self.config.document_end)
                h = self.stack_one(x, cache[..., :T + n, :], lengths + n - 1)
            token_before = token
            token = train.sample_token(self.readout(h[:, 0]), temperature, top_k, generator)
            for answer, new in zip(answers, token[:, 0].tolist()):
                if not answer or answer[-1] not in stop:  # else it has ended
                    answer.append(new)
            if all(answer[-1] in stop for answer in answers):
                break
        return answers


# --------------------------------------------------------------------------------------------------
# The task

class RunningSumData:
    """Random bits; the target at every position is the sum of the bits so far, modulo
    config.modulus (0110 -> 0122 for 3). Rows of block_size bits, made on the fly; the validation
    split's are the same at every seed."""

    def __init__(self, options, config):
        self.options = options
        self.T = config.block_size
        self.vocab_size = config.modulus
        self.tokenizer = train.Tokenizer("char", [chr(ord("0") + i) for i in range(config.modulus)])
        self.steps_per_epoch = max(1, 2 ** min(self.T, 20) // options.step_rows)

    def batch(self, split, i):
        random = train.stream(self.options, split, i)
        bits = torch.from_numpy(random.integers(0, 2, (self.options.step_rows, self.T)))
        return bits, bits.cumsum(1) % self.vocab_size


DATA = {"running-sum": RunningSumData}


# --------------------------------------------------------------------------------------------------
# Training. train.py's Run does the rest: devices, data, optimiser, evaluation, log, checkpoints.

def sample_passes(config, seed, step, max_steps):
    """The number of passes of a training step, a pure function of (seed, step): resuming makes the
    same draws."""
    if step <= config.feedback_from * max_steps:
        return 1
    random = np.random.default_rng([seed, step, 1])  # 1: another stream than the data's
    return 1 + int(random.choice(len(config.shares), p=config.shares))


def train_model(run):
    if run.config.compute_of:
        run.max_steps = round(run.max_steps * (1 + run.config.more_passes(run.config.compute_of)))
    if run.options.dataset in ("wikitext-2", "wikitext-103") and run.config.document_end < 0:
        # There each line is a document. Its end, as it is encoded before more text (= stands for
        # that): one token or two, of which the last counts.
        run.config.document_end = run.data.tokenizer.encode("\n\n=")[-2]
    model = FullBandwidthGPT(run.config)
    if run.config.init_from and not run.resumes:
        model.load_weights(run.config.init_from, run.data.tokenizer)
    model = run.prepare(model)  # to its device, compiled; with --resume, as saved
    while run.step < run.max_steps:
        run.begin_step()  # and set its learning rate
        num_passes = sample_passes(run.config, run.options.seed, run.step, run.max_steps)
        for idx, targets, num_targets in run.micro_batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, num_passes, num_targets)
            run.backward(loss, metrics)
        run.average_gradients()  # over the processes of torchrun
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.options.max_grad_norm)
        run.optimizer_step(grad_norm)
        run.end_step()  # log, evaluate, save; exit here if Ctrl-C has asked for it
    run.finish()
    evaluations = [row for row in run.rows if "val_loss" in row]
    if evaluations:
        last = evaluations[-1]
        ces = [f"{last[f'val_ce_{k}']:.3f}" for k in range(1, len(run.config.shares) + 1)]
        run.say(f"validation loss after each pass: {', '.join(ces)}: see {run.out}/curves.png, "
                f"then run\npython fullbandwidth.py {run.out}")


# --------------------------------------------------------------------------------------------------
# Instruments. `batches` is a list of (idx, targets), each (B, T).

PASSES = (1, 2, 3, 4, 5, 10, 20, 30, 100, 1000)


def load_model(path):
    """A trained model, its Options and its tokenizer. A model that was saved before its feedback
    started is a standard one."""
    ckpt = train.load_checkpoint(path, "fullbandwidth")
    model, options, tokenizer = train.restore_model(ckpt, path, "fullbandwidth", FullBandwidthGPT)
    start = model.config.feedback_from * ckpt["max_steps"]
    if model.W_U is not None and ckpt["step"] <= start:
        model.W_U = None
        model.why_no_feedback = (f"was saved after step {ckpt['step']}, before its feedback "
                                 f"starts, after step {start:.0f}")
    return model, options, tokenizer


def load_run(path, n=2):
    """A trained model, its Options, its data and n of its validation batches; None: all."""
    model, options, tokenizer = load_model(path)
    data, batches = train.validation_batches(options, tokenizer, model, n)
    return model, options, data, batches


@torch.no_grad()
def token_loss(model, h, targets):
    """Mean CE in nats of states h (B, T, D)."""
    weights = target_weights(targets, h.dtype)
    answers = targets.clamp_min(0).flatten()
    loss, _ = cross_entropy(h.flatten(0, 1), model.readout_weight, answers, weights)
    return loss


def after_passes(model, idx, ks):
    """Yield (h^(k), mean ||h^(k) - h^(k-1)|| over tokens) for each k of ks, ascending; h^(0) = 0.
    Of a model without feedback for k = 1 only."""
    if model.W_U is None:
        ks = [k for k in ks if k == 1]
    e = model.embed(idx)
    plain = model.plain(idx)
    h = model.stack(e)
    update = h.norm(dim=-1).mean()
    for k in range(1, max(ks, default=0) + 1):
        if k > 1 and update > 0:  # where a pass changes nothing, bit for bit, no later one does
            before = h
            h = model.stack(model.feedback(before, e, plain))
            update = (h - before).norm(dim=-1).mean()
        if k in ks:
            yield h, update


@torch.no_grad()
def pass_curve(model, batches, ks=PASSES):
    """(len(ks), 2): CE after pass k, that is after k - 1 prefill passes, and the mean size of the
    update, ||h^(k) - h^(k-1)||. (1, 2) of a model without feedback."""
    curves = []
    for idx, targets in batches:
        rows = []
        for h, update in after_passes(model, idx, ks):
            rows.append(torch.stack([token_loss(model, h, targets), update]))
        curves.append(torch.stack(rows))
    return sum(curves) / len(curves)


def feedback_gains(model, idx, steps=16, generator=None):
    """||J^T v|| at each power-iteration step, (steps, B), at the exact states of idx (B, T), from
    random unit v.

    J is the Jacobian of h^(k-1) -> h^(k). A position reads only earlier ones, so J is nilpotent:
    its spectral radius is 0, after T steps nothing is left. Contraction or growth shows in the
    geometric mean over fewer steps.
    """
    h = model.recurrent(idx).requires_grad_()
    after = model.stack(model.feedback(h, model.embed(idx), model.plain(idx)))
    v = torch.randn(h.shape, dtype=h.dtype, device=h.device, generator=generator)
    tiny = torch.finfo(v.dtype).tiny  # divides in place of 0, once nothing is left
    gains = []
    for _ in range(steps):
        v = v / v.flatten(1).norm(dim=1).clamp_min(tiny)[:, None, None]
        (v,) = torch.autograd.grad(after, h, v, retain_graph=True)  # J^T v
        gains.append(v.flatten(1).norm(dim=1))
    return torch.stack(gains)


@torch.no_grad()
def zeroed_loss(model, batches):
    """CE of the second pass with h = 0: what the fusion's token path alone is worth, the shortcut
    past the state. By construction that is pass 1's for `add`, and an input of 0 for `gated`."""
    total = 0.0
    for idx, targets in batches:
        e = model.embed(idx)
        x = model.feedback(torch.zeros_like(e), e, model.plain(idx))
        total = total + token_loss(model, model.stack(x), targets)
    return total.item() / len(batches)


def long_sums(model, options):
    """Validation rows of running sums, idx and targets (B, 2 T): twice the trained length T."""
    config = replace(model.config, block_size=2 * model.config.block_size)
    batch = RunningSumData(options, config).batch("val", 0)
    return [rows.to(model.wte.weight.device) for rows in batch]


def right_shares(model, h, targets):
    """Shares of right sums by states h (B, 2 T, D), (2,): at the positions 1 .. T, and at T + 1 ..
    2 T, which no window has reached."""
    T = model.config.block_size
    right = (model.readout(h).argmax(-1) == targets).double()
    return torch.stack([right[:, :T].mean(), right[:, T:].mean()])


# --------------------------------------------------------------------------------------------------
# The command line

@dataclass
class Arguments:
    prompt: str = None  # text to continue; without it, the passes are measured
    mode: str = "standard"  # soft: feed back new states; fused: the prompt's too; some: soft,fused
    prefill_passes: Count = 1  # fused passes over the prompt, with --mode=fused
    max_new_tokens: int = 200  # how many tokens to generate
    temperature: Annotated[float, 0, 100] = 0.8  # 0: greedy
    top_k: int = 50  # sample from the k likeliest; 0: from all
    seed: Seed = 42  # seed of the sampling
    stop: str = ""  # end at any of these tokens

    __post_init__ = check_fields


def main(argv):
    usage = "python fullbandwidth.py RUN [--prompt=TEXT] [--field=value ...]"
    path, arguments = train.parse_run(usage, Arguments, argv)
    if arguments.prompt is None:
        print_passes(path)
    else:
        print_continuation(path, arguments)


@torch.no_grad()
def print_passes(path):
    """What the passes of a trained run bring: the loss and the size of the update after each; for
    running sums also the shares of right ones, within and past the trained length."""
    model, options, _, batches = load_run(path, None)
    with train.waiting_for(f"measuring up to {PASSES[-1]:,} passes"):
        losses, updates = pass_curve(model, batches).T
    columns = {"loss": losses, "update": updates}
    if options.dataset == "running-sum":
        idx, targets = long_sums(model, options)
        shares = [right_shares(model, h, targets) for h, _ in after_passes(model, idx, PASSES)]
        within, beyond = torch.stack(shares).T
        T = model.config.block_size
        columns |= {f"right at 1 .. {T}": within, f"right at {T + 1} .. {2 * T}": beyond}
    print(f"{path}: mix {model.config.mix}, fusion {model.config.fusion}")
    print(f"{'pass':>5}" + "".join(f"{name:>20}" for name in columns))
    for k, *values in zip(PASSES, *columns.values()):
        print(f"{k:>5}" + "".join(f"{value:>20.4g}" for value in values))


def print_continuation(path, a):
    model, _, tokenizer = load_model(path)
    prompt = train.encode_prompt(tokenizer, a.prompt)
    if tokenizer.spec["name"] == "regex":
        missing = tokenizer.missing(a.stop)
        if missing:
            raise UserError(f"--stop={a.stop!r}: the vocabulary lacks {missing}")
    stop = tokenizer.encode(a.stop)
    modes = a.mode.split(",")
    for mode in modes:
        if len(modes) > 1:
            print(f"--- {mode}")
        (new,) = model.generate([prompt], a.max_new_tokens, mode, a.prefill_passes, a.temperature,
                                a.top_k, a.seed, stop)
        print(a.prompt + tokenizer.decode(new))


if __name__ == "__main__":
    train.command_line(main)
