"""STARS: loops that never hurt, after "Stabilizing Recurrent Dynamics for Test-Time Scalable Latent
Reasoning in Looped Language Models" (Yang et al., arXiv 2605.26733).

A looped transformer iterates h^(t+1) = Phi(h^(t)). More loops than it was trained with do not hurt
if the iteration settles at a fixed point that reads out right. States near a fixed point tend to it
if the spectral radius rho (the largest |eigenvalue|) of the Jacobian J of Phi is below 1 there.
STARS trains for it. External norms bound the state; random loop counts train the readout of states
near the limit; and JSRR, Jacobian spectral radius regularisation, penalises ||J v||^2 for a random
unit v at h^(t), the state after the sampled number of loops t, which is read out:
loss = (1 - lambda) CE + lambda ||J v||^2.

    python train.py stars                        # 4-digit addition with STARS
    python train.py stars --preset=baseline      # always 4 loops, no JSRR: peaks, collapses
    python stars.py out/stars-addition           # exact match, relative step and norm against loops
    python stars.py out/stars-addition --ask=1750+4733 --loops=1,2,4,8,64
    python experiments/stability.py normalization  # more tables and figures: see there

What one random v measures is *not* rho: E v v^T = I / N, so E ||J v||^2 = ||J||_F^2 / N, the mean
squared gain, for J v and J^T v alike. Power steps on J (or on its transpose) go to the dominant
eigenvector, so the gain to rho; on J^T J to sigma_max, the largest singular value, at least rho.
`python experiments/stability.py RUN` prints all three.

Letters: B batch, T tokens, D width, V vocabulary, nh heads of width hs, h^(t) the (B, T, D) state
after loop t, N = T D, J the (N, N) Jacobian of one loop. A row is one sequence of a batch.
"""
import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from train import BelowOne, Count, Share, Size, UserError, check_fields, cross_entropy

Placement = Literal["pre", "post", "pre_sandwich", "post_sandwich"]
NormKind = Literal["layernorm", "rmsnorm", "simple"]
LoopSampling = Literal["fixed", "lognormal", "poisson", "uniform"]


@dataclass
class Config:
    vocab_size: Size = 15  # types; fixed by the data
    block_size: Size = 16  # tokens in a window, T; fixed by the data
    digits: Annotated[int, 2, 8] = 4  # digits of each operand of the sums, 2 to 8
    n_layer: Count = 1  # layers in the stack that is looped
    n_prelude: Annotated[int, 0, 10_000] = 0  # layers before the loop
    n_coda: Annotated[int, 0, 10_000] = 0  # layers after the loop
    n_head: Count = 4  # attention heads
    n_embd: Size = 128  # width of the state, D
    mlp_width: Size = 512  # hidden width of the MLP
    placement: Placement = "post_sandwich"  # where a sublayer has its norms
    norm: NormKind = "layernorm"  # of the loop; simple: LayerNorm without gain or bias
    residual_scale: float = 1.0  # a in a x + f(x); DeepNorm: (2 layers)^(1/4)
    state_norm: bool = False  # normalise the state after each loop, for readout and next loop
    dropout: BelowOne = 0.0  # on the embeddings and on each sublayer's output
    num_loops: Count = 4  # loops when fixed, the Poisson mean, and the loops of an evaluation
    loop_sampling: LoopSampling = "lognormal"  # how t, the loops of a training step, is drawn
    loop_mu: Annotated[float, -10, 10] = 1.4  # log-normal: log of the median
    loop_sigma: float = 0.5  # log-normal: std of the log
    min_loops: Count = 1  # random t are raised to at least this; uniform ones start here
    max_loops: Count = 16  # random t are lowered to at most this; uniform ones end here
    l2_penalty: float = 0.0  # weight of mean ||h^(t) - h^(t-1)||, a remedy that fails
    jsrr_lambda: Share = 0.1  # weight of JSRR against the cross-entropy, 0 to 1; 0: none
    jsrr_rows: Annotated[float, 0.001, 1] = 0.25  # share of the rows where J is taken, at least one
    jsrr_detach: bool = False  # no gradient of JSRR through the state, as in the authors' release
    jsrr_after: int = 0  # steps before JSRR sets in; in the authors' release those of the warm-up

    def __post_init__(self):
        check_fields(self)
        if self.min_loops > self.max_loops:
            raise UserError(f"--min_loops={self.min_loops} is more than "
                            f"--max_loops={self.max_loops}")
        if self.n_embd % self.n_head:
            raise UserError(f"--n_embd={self.n_embd} is not divisible by --n_head={self.n_head}")


TOY = dict(dataset="addition", optimizer="muon", muon_lr=0.008, lr=2e-3, max_steps=1800,
           batch_size=256, schedule="wsd", decay_share=0.4, warmup_steps=20, log_interval=25,
           eval_interval=250, eval_batches=4)
PRESETS = {
    "addition": TOY | dict(jsrr_after=400),  # from step 1 on it may stop learning
    "small": TOY | dict(digits=3, n_embd=64, mlp_width=256, batch_size=128, max_steps=2000,
                        eval_interval=100),
    "baseline": TOY | dict(loop_sampling="fixed", jsrr_lambda=0.0),
    "paper": dict(dataset="addition", n_head=8, n_embd=512, mlp_width=1024, dropout=0.1,
                  loop_mu=2.0, loop_sigma=0.7, max_loops=100, num_loops=8, jsrr_rows=1.0,
                  jsrr_detach=True, jsrr_after=2000, lr=1e-4, warmup_steps=2000, schedule="cosine",
                  grad_clip=0.0, max_steps=10_000, batch_size=512, log_interval=50,
                  eval_interval=500, eval_batches=4),
}
SHOW = ("loops", "jsrr", "val_exact")  # printed beside the loss
CURVES = (("loss", "log", ("train_loss", "val_loss")),  # the panels of curves.png
          ("exact match", "linear", ("val_exact",)), ("JSRR, mean ||J^T v||^2", "log", ("jsrr",)))
LOOPS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)  # where a trained model is measured


# --------------------------------------------------------------------------------------------------
# The model

class Norm(nn.Module):
    """layernorm: (h - mean) / std * gain + bias. rmsnorm: h / rms * gain. simple: (h - mean) / std
    """

    def __init__(self, kind, D):
        super().__init__()
        self.kind = kind
        self.gain = nn.Parameter(torch.ones(D)) if kind != "simple" else None
        self.bias = nn.Parameter(torch.zeros(D)) if kind == "layernorm" else None

    def forward(self, h):
        width = h.shape[-1:]
        if self.kind == "rmsnorm":
            h = h.to(self.gain.dtype)  # float32 under autocast
            return F.rms_norm(h, width, self.gain, 1e-6)
        return F.layer_norm(h, width, self.gain, self.bias, 1e-6)


class Attention(nn.Module):
    """Causal, in elementary operations: PyTorch's fused attention can be differentiated only once,
    and JSRR takes the gradient of a product with a Jacobian."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None, start=0):
        """x (B, T, D) at positions start ..; cache: this layer's keys and values in this loop."""
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, -1)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, nh, T, hs)
        if cache is not None:  # (2, B, nh, block_size, hs)
            cache[0, :, :, start:start + T] = k
            cache[1, :, :, start:start + T] = v
            k, v = cache[:, :, :, :start + T]
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // self.n_head)  # (B, nh, T, start + T)
        future = torch.ones(T, start + T, dtype=torch.bool, device=x.device).triu(start + 1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        y = weights.to(v.dtype) @ v  # (B, nh, T, hs)
        return self.dropout(self.out(y.transpose(1, 2).reshape(B, T, D)))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention, then MLP: each a sublayer f, with norms where the placement has them (the paper's
    normalisation study). Internal norms (pre, pre_sandwich) let the state grow; external ones, of
    the sum (post, post_sandwich), bound it. norm1, norm2: around attention; norm3, norm4: around
    the MLP."""

    def __init__(self, config):
        super().__init__()
        D = config.n_embd
        self.placement = config.placement
        self.a = config.residual_scale
        self.attn = Attention(config)
        self.mlp = MLP(config)
        if self.placement != "post":  # norms before the sublayers
            self.norm1 = Norm(config.norm, D)
            self.norm3 = Norm(config.norm, D)
        if self.placement != "pre":  # norms after them
            self.norm2 = Norm(config.norm, D)
            self.norm4 = Norm(config.norm, D)

    def forward(self, x, cache=None, start=0):
        match self.placement:
            case "pre":
                x = self.skip(x) + self.attn(self.norm1(x), cache, start)
                x = self.skip(x) + self.mlp(self.norm3(x))
            case "pre_sandwich":
                x = self.skip(x) + self.norm2(self.attn(self.norm1(x), cache, start))
                x = self.skip(x) + self.norm4(self.mlp(self.norm3(x)))
            case "post":
                x = self.norm2(self.skip(x) + self.attn(x, cache, start))
                x = self.norm4(self.skip(x) + self.mlp(x))
            case "post_sandwich":
                x = self.norm2(self.skip(x) + self.attn(self.norm1(x), cache, start))
                x = self.norm4(self.skip(x) + self.mlp(self.norm3(x)))
            case _:
                raise UserError(f"--placement={self.placement}: no such placement of the norms")
        return x

    def skip(self, x):
        """The residual path, a x, where DeepNorm has an a above 1."""
        return x if self.a == 1 else self.a * x


class LoopedTransformer(nn.Module):
    """Embeddings, prelude, one stack of layers applied t times, coda, readout."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # the readout's matrix too
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        n_layers = config.n_prelude + config.n_layer + config.n_coda
        self.blocks = nn.ModuleList([Block(config) for _ in range(n_layers)])
        self.prelude = range(config.n_prelude)  # which blocks
        self.looped = range(config.n_prelude, config.n_prelude + config.n_layer)
        self.coda = range(config.n_prelude + config.n_layer, n_layers)
        # Before the readout: an affine LayerNorm whatever the blocks' norms are, as in the authors'
        # release; but where it is applied in every loop it is one of the loop's norms.
        self.norm = Norm(config.norm if config.state_norm else "layernorm", config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def run_blocks(self, h, layers, cache, loop, start):
        for layer in layers:
            slot = None if cache is None else cache[loop, layer]
            h = self.blocks[layer](h, slot, start)
        return h

    def embed(self, idx, cache=None, start=0):
        """h^(0), (B, T, D), of tokens (B, T) at positions start ..: embeddings, then prelude."""
        end = start + idx.shape[1]
        if end > self.config.block_size:
            raise UserError(f"{end} tokens are more than the model's window of "
                            f"{self.config.block_size}, --block_size: cut the text into windows")
        positions = self.wpe.weight[start:end]
        h = self.dropout(self.wte(idx) + positions)
        return self.run_blocks(h, self.prelude, cache, 0, start)

    def step(self, h, cache=None, loop=0, start=0):
        """The loop map Phi, (B, T, D) -> (B, T, D), each row for itself. It does not see the tokens
        again: the question is only in h^(0). So Phi may contract only near each answer's fixed
        point, not everywhere."""
        h = self.run_blocks(h, self.looped, cache, loop, start)
        if self.config.state_norm:
            h = self.norm(h)
        return h

    def readout_input(self, h, cache=None, start=0):
        """What the readout's matrix is multiplied with: coda, then the final norm."""
        h = self.run_blocks(h, self.coda, cache, 0, start)
        if self.config.state_norm and not self.coda:
            return h  # the loop has applied the norm
        return self.norm(h)

    def readout(self, h, cache=None, start=0):
        """Logits, (B, T, D) -> (B, T, V)."""
        return F.linear(self.readout_input(h, cache, start), self.wte.weight)

    def loss(self, idx, targets, num_loops=None, num_targets=None, with_jsrr=True):
        """(loss, metrics) of idx and targets (B, T), targets -1 where there is no loss, after
        num_loops loops.

        In training (1 - lambda) CE + lambda JSRR, plus l2_penalty * mean ||h^(t) - h^(t-1)||;
        metrics: loops, jsrr. In evaluation CE; metrics: exact. num_targets: what the sum of the CEs
        is divided by, by default how many targets there are here.
        """
        c = self.config
        t = num_loops or c.num_loops
        h = self.embed(idx)
        for _ in range(t):
            before = h
            h = self.step(h)

        answer = (targets >= 0).flatten().to(self.wte.weight.dtype)  # 1 where there is a target
        if num_targets is None:
            num_targets = answer.sum()
        ce, _ = cross_entropy(self.readout_input(h).flatten(0, 1), self.wte.weight,
                              targets.clamp_min(0).flatten(), answer / num_targets)
        if not self.training:
            return ce, {"exact": self.exact(h, targets)}

        loss = ce
        # Made on the device: copying a number there would make the CPU wait for it.
        metrics = {"loops": torch.full((), float(t), device=idx.device)}
        if c.jsrr_lambda and with_jsrr:
            jsrr = self.jsrr(h)
            loss = (1 - c.jsrr_lambda) * ce + c.jsrr_lambda * jsrr
            metrics["jsrr"] = jsrr
        if c.l2_penalty:
            loss = loss + c.l2_penalty * (h - before).float().norm(dim=-1).mean()
        return loss, metrics

    def jsrr(self, h):
        """L_JSRR^(t): the mean of ||J^T v||^2 over rows of h = h^(t), v a random unit vector each.

        J at h^(t) is the Jacobian of loop t + 1, which is run for it, of the first jsrr_rows of the
        rows only. J^T v, in reverse mode, has the same mean square as J v, costs less here, and has
        a right gradient where F.layer_norm's J v has not (see jacobian_product). The gradient flows
        into the weights and, through h, into the loops before, unless jsrr_detach.
        """
        h = h[:max(1, round(self.config.jsrr_rows * len(h)))]
        if self.config.jsrr_detach:
            h = h.detach()
        with torch.compiler.set_stance("force_eager"):  # torch.compile has no second derivatives
            _, JTv = jacobian_product(self.step, h, random_directions(h), "vjp")
        return JTv.square().sum() / len(h)

    def exact(self, h, targets):
        """The share of rows that are right at every target, given the last state: by induction over
        the tokens, the share whose whole answer greedy decoding gets right."""
        right = self.readout(h).argmax(-1) == targets
        return (right | (targets < 0)).all(1).float().mean()

    def flops_per_token(self):
        """Training FLOPs per token at the mean loop count, without JSRR's: 6 per weight used, 6 T D
        per attention."""
        c = self.config
        matrices = sum(p.numel() for p in self.blocks[0].parameters() if p.ndim == 2)
        layer = matrices + c.block_size * c.n_embd
        mean_loops = sample_loops(c, np.random.default_rng(0), 10_000).mean().item()
        n_layers = c.n_prelude + mean_loops * c.n_layer + c.n_coda
        return 6 * (layer * n_layers + c.vocab_size * c.n_embd)

    def new_cache(self, B, num_loops):
        """{(loop, layer): keys and values, (2, B, nh, block_size, hs)}: a layer has other ones in
        each loop. Prelude and coda, which run once, have theirs at loop 0."""
        c = self.config
        shape = 2, B, c.n_head, c.block_size, c.n_embd // c.n_head
        cache = {}
        for loop in range(num_loops):
            for layer in range(len(self.blocks)):
                if loop == 0 or layer in self.looped:
                    cache[loop, layer] = self.wte.weight.new_empty(shape)
        return cache

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, num_loops=None, use_cache=True):
        """Continue idx (B, T) greedily by max_new_tokens, to block_size + 1 tokens at most."""
        num_loops = num_loops or self.config.num_loops
        cache = self.new_cache(len(idx), num_loops) if use_cache else None
        start = 0  # how many tokens are in the cache
        for _ in range(max_new_tokens):
            h = self.embed(idx[:, start:], cache, start)
            for loop in range(num_loops):
                h = self.step(h, cache, loop, start)
            next_token = self.readout(h, cache, start)[:, -1:].argmax(-1)  # (B, 1)
            if use_cache:
                start = idx.shape[1]
            idx = torch.cat([idx, next_token], dim=1)
        return idx


def sample_loops(config, rng, n=1):
    """n loop counts t, an int array, from a numpy Generator: clip(round(LogNormal(mu, sigma)), min,
    max), or of another distribution."""
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


# --------------------------------------------------------------------------------------------------
# The task

class AdditionData:
    """Sums made on the fly, `1750+4733= 3846§`: two numbers of `digits` digits, the answer
    reversed so that carries run forwards, an end mark. Targets are -1 where there is no loss: up to
    the =, and after the end mark, where rows are padded with _.

    What a right answer is, only `symbol` and `result` say: training and every report ask them.

    A pair is held out if a hash of it, the same for a + b and b + a, falls into one bucket of 32:
    no training batch draws such a pair, and the validation split no other, the same at every seed.
    """
    symbol = "+"
    vocab = [*"0123456789", symbol, *"= §_"]

    @staticmethod
    def result(a, b):
        return a + b

    def __init__(self, options, config):
        self.options = options
        self.digits = config.digits
        self.T = 3 * config.digits + 4  # of `5750+4733= 38401§`, without its last token
        self.tokenizer = train.Tokenizer("char", self.vocab)
        self.vocab_size = self.tokenizer.vocab_size
        self.least, self.most = 10 ** (self.digits - 1), 10 ** self.digits - 1
        pairs = (self.most + 1 - self.least) ** 2
        self.steps_per_epoch = max(1, pairs // options.step_rows)

    def text(self, a, b):
        """The whole of it, question, right answer and end mark."""
        return f"{a}{self.symbol}{b}= {str(self.result(a, b))[::-1]}§"

    def parse(self, question):
        """`1750+4733`, perhaps with an = behind it -> (1750, 4733)."""
        number = rf"([1-9]\d{{{self.digits - 1}}})"  # of exactly `digits` digits
        pattern = rf"\s*{number}\s*{re.escape(self.symbol)}\s*{number}\s*=?\s*"
        match = re.fullmatch(pattern, question, re.ASCII)
        if not match:
            example = f"{'17504733'[:self.digits]}{self.symbol}{'47331750'[:self.digits]}"
            raise UserError(f"--ask={question!r}: this model was trained on sums of two numbers of "
                            f"{self.digits} digits each, from {self.least} to {self.most}, written "
                            f"like {example}")
        return int(match[1]), int(match[2])

    @staticmethod
    def held_out(a, b):
        """Whether each pair of operands belongs to the validation split."""
        low = np.minimum(a, b).astype(np.uint64)
        high = np.maximum(a, b).astype(np.uint64)
        mixed = low * np.uint64(0x9E3779B97F4A7C15) + high  # modulo 2^64, as all of this
        return (mixed * np.uint64(0xD1B54A32D192ED03)) >> np.uint64(59) == 0

    def operands(self, split, i, n):
        """n pairs of operands, (2, n), of batch i of a split. Pairs of the other split are drawn
        again."""
        rng = train.stream(self.options, split, i)
        pairs = rng.integers(self.least, self.most, (2, n), endpoint=True)
        wrong = self.held_out(*pairs) == (split == "train")
        while wrong.any():
            pairs[:, wrong] = rng.integers(self.least, self.most, (2, wrong.sum()), endpoint=True)
            wrong = self.held_out(*pairs) == (split == "train")
        return pairs

    def encode(self, a, b):
        """The sums as (idx, targets), each (n, T) int64."""
        length = self.T + 1
        ids = self.tokenizer.ids  # of each character
        texts = [self.text(x, y).ljust(length, "_") for x, y in zip(a.tolist(), b.tolist())]
        tokens = [ids[character] for character in "".join(texts)]
        rows = torch.tensor(tokens).view(len(texts), length)
        idx, targets = rows[:, :-1], rows[:, 1:].clone()
        targets[targets == ids["_"]] = -1
        targets[:, :2 * self.digits + 1] = -1  # the question, its = included
        return idx, targets

    def batch(self, split, i):
        return self.encode(*self.operands(split, i, self.options.step_rows))


DATA = {"addition": AdditionData}  # {--dataset=NAME: class}; what it must have: see train.py's Data


# --------------------------------------------------------------------------------------------------
# Training. train.py's Run does the rest: devices, data, optimiser, schedule, evaluation, log,
# checkpoints.

def train_model(run):
    c = run.config
    model = run.prepare(LoopedTransformer(c))  # to its device, compiled; with --resume, as saved
    while run.step < run.max_steps:
        run.begin_step()  # and set its learning rate
        # The step's own random numbers: a resumed run draws the same t, and so does every process.
        rng = np.random.default_rng([run.options.seed, run.step, 1])
        t = int(sample_loops(c, rng)[0])
        with_jsrr = run.step > c.jsrr_after
        for idx, targets, num_targets in run.micro_batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, t, num_targets, with_jsrr)
            run.backward(loss, metrics)
        run.average_gradients()  # over the processes of torchrun
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.options.max_grad_norm)
        run.optimizer_step(grad_norm)
        run.end_step()  # log, evaluate, save; exit here if Ctrl-C has asked for it
    run.finish()
    last = [row for row in run.rows if "val_exact" in row][-1]
    run.say(f"{last['val_exact']:.2%} of the held-out answers exactly right at {c.num_loops} "
            f"loops: see {run.out}/curves.png, then run\npython stars.py {run.out}")


# --------------------------------------------------------------------------------------------------
# Products with the Jacobian, for JSRR too, and what is measured with them. Each row of a state
# (B, T, D) has its own Jacobian, (N, N), which is never built.

def normalize(v):
    """Each row of v (B, T, D) as a unit vector of N dimensions."""
    norms = v.flatten(1).norm(dim=1)
    return v / norms.clamp_min(torch.finfo(v.dtype).tiny)[:, None, None]


def random_directions(h, generator=None):
    """One unit v per row of h, uniform on the sphere."""
    return normalize(torch.randn(h.shape, dtype=h.dtype, device=h.device, generator=generator))


def jacobian_product(f, h, v, mode):
    """(f(h), J v) for mode jvp, forward mode; (f(h), J^T v) for vjp, reverse mode. Both can be
    differentiated again; but the gradient of F.layer_norm's J v is wrong in PyTorch 2.13."""
    with sdpa_kernel(SDPBackend.MATH):  # for an f with fused attention, as Ouro's: take it apart
        if mode == "jvp":
            return torch.func.jvp(f, (h,), (v,))
        after, pull_back = torch.func.vjp(f, h)
        return after, pull_back(v.to(after.dtype))[0]


@torch.no_grad()
def power_iteration(model, h, steps, mode, generator=None):
    """||J v||, or ||J^T v|| for vjp, at each of `steps` power steps, (steps, B), from a random unit
    v: the square of the first is what JSRR averages.

    With v <- J v (jvp) or J^T v (vjp) they tend to rho, or circle it where a complex pair
    dominates; with v <- J^T J v (both) they rise to sigma_max.
    """
    v = random_directions(h, generator)
    gains = []
    for _ in range(steps):
        _, Jv = jacobian_product(model.step, h, v, "vjp" if mode == "vjp" else "jvp")
        gains.append(Jv.flatten(1).norm(dim=1))
        if mode == "both":
            _, JTJv = jacobian_product(model.step, h, Jv, "vjp")
            v = normalize(JTJv)
        else:
            v = normalize(Jv)
    return torch.stack(gains)


def jacobian_gain(model, h, draws=64, generator=None):
    """||J||_F / sqrt(N) of each row of h, (B,): the root of the mean of ||J v||^2 over random v."""
    total = 0
    for _ in range(draws):
        total = total + power_iteration(model, h, 1, "jvp", generator)[0].square()
    return (total / draws).sqrt()


def sigma_max(model, h, steps=64, generator=None):
    """The largest singular value of each row's J, (B,), from below: power iteration on J^T J."""
    return power_iteration(model, h, steps, "both", generator)[-1]


def spectral_radius_power(model, h, steps=256, generator=None):
    """rho of each row's J, (B,): the geometric mean growth of ||J^k v|| over the last half of many
    power steps, in which a complex pair's circling averages out."""
    gains = power_iteration(model, h, steps, "jvp", generator)
    return gains[steps // 2:].log().mean(0).exp()


@torch.no_grad()
def spectral_radius_arnoldi(model, h, size=48, generator=None):
    """rho of each row's J, (B,): the largest |Ritz value| of a Krylov space of `size` dimensions,
    by J v products only. Q: its orthonormal basis, (B, j + 1, N). H: J in it, (B, size + 1, size).
    """
    size = min(size, h[0].numel())
    Q = random_directions(h, generator).flatten(1)[:, None]
    H = h.new_zeros(len(h), size + 1, size)
    for j in range(size):
        _, Jq = jacobian_product(model.step, h, Q[:, j].view_as(h), "jvp")
        w = Jq.flatten(1)  # (B, N)
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
    """(num_loops, 2), for t = 0 ..: the relative step ||h^(t+1) - h^(t)|| / ||h^(t)||, mean over
    rows; ||h^(t+1)||, mean over tokens."""
    rows = []
    for before, h in itertools.pairwise(trajectory(model, idx, num_loops)):
        change = (h - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
        rows.append(torch.stack([change.mean(), h.norm(dim=-1).mean()]))
    return torch.stack(rows).cpu()


@torch.no_grad()
def exact_match(model, idx, targets, loops):
    """{t: share of the sums, idx and targets (n, T), that are right after t loops} for loops t."""
    right = dict.fromkeys(sorted(loops), 0.0)
    for rows, wanted in zip(idx.split(250), targets.split(250)):  # what a processor's cache holds
        for t, h in enumerate(trajectory(model, rows, max(loops))):
            if t in right:
                right[t] += model.exact(h, wanted).item() * len(rows) / len(idx)
    return right


def held_out_sums(model, options, n):
    """n held-out sums, or rows of the run's own task, as (idx, targets), each (n, T), always the
    same, on the model's device."""
    data = train.load_data(replace(options, batch_size=n, grad_accum=1), model.config)
    device = model.wte.weight.device
    idx, targets = data.batch("val", 0)
    return idx.to(device), targets.to(device)


# --------------------------------------------------------------------------------------------------
# python stars.py RUN

def load_run(path):
    """(model, options) of a run that was trained on sums, or on another task in DATA."""
    model, options, _ = train.load_model(path, "stars", LoopedTransformer)
    if options.dataset not in DATA:
        raise UserError(f"{path} was trained on {options.dataset}, and this needs a model that was "
                        f"trained on sums, or on another task in DATA: python train.py stars")
    return model, options


def against_loops(model, idx, targets, loops):
    """Print exact match, relative step and norm (of the first 250 sums) at each loop count. Returns
    the exact matches, and `convergence` up to one loop more than the largest count."""
    c = model.config
    print(f"{c.placement} {c.norm}, {c.loop_sampling} loops, lambda {c.jsrr_lambda}; {len(idx)} "
          f"held-out rows", flush=True)
    with train.waiting_for(f"running {max(loops) + 1} loops"):
        accuracy = exact_match(model, idx, targets, loops)
        dynamics = convergence(model, idx[:250], max(loops) + 1)
    print("loops t   exact match   ||h^(t+1) - h^(t)|| / ||h^(t)||   mean ||h^(t)||")
    for t, exact in accuracy.items():
        relative_step, norm = dynamics[t, 0], dynamics[t - 1, 1]
        print(f"{t:7d}   {exact:11.2%}   {relative_step:31.2e}   {norm:14.2f}")
    return accuracy, dynamics


def ask(model, data, question, loops):
    """Print the model's answer to one sum at each loop count."""
    if not hasattr(data, "parse"):
        raise UserError(f"--ask is for sums: {type(data).__name__} has no parse(question)")
    a, b = data.parse(question)
    prompt = f"{a}{data.symbol}{b}="
    idx = torch.tensor([data.tokenizer.encode(prompt)], device=model.wte.weight.device)
    for t in loops:
        tokens = model.generate(idx, data.T + 1 - idx.shape[1], t)[0].tolist()
        text, end, _ = data.tokenizer.decode(tokens).partition("§")
        answer = text[len(prompt):].strip()[::-1]
        verdict = "right" if text + end == data.text(a, b) else "wrong"
        print(f"loops {t:4d}:  {text + end:{data.T + 1}}  {answer}, {verdict}")


@dataclass
class Arguments:
    ask: str = ""  # a sum to answer, as 1750+4733; without it, the table is printed
    loops: str = None  # loop counts, separated by commas; by default 1 to 256

    __post_init__ = check_fields


def main(argv):
    usage = "python stars.py RUN [--ask=1750+4733] [--loops=1,2,4]"
    path, a = train.parse_run(usage, Arguments, argv)
    model, options = load_run(path)
    loops = train.loop_counts(a.loops) or LOOPS
    if a.ask:
        return ask(model, train.load_data(options, model.config), a.ask, loops)
    against_loops(model, *held_out_sums(model, options, 2000), loops)


if __name__ == "__main__":
    train.command_line(main)
