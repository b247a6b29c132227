"""STARS on Ouro-1.4B (Yang et al., arXiv 2605.26733): a pretrained looped language model, tuned on
problems and solutions so that more loops than it was trained with do not hurt.

    pip install -r experiments/requirements.txt
    python experiments/ouro.py train --init_from=DIRECTORY       # Ouro-1.4B's files; one 80 GB GPU
    python experiments/ouro.py train --resume                    # go on where it stopped
    python experiments/ouro.py train --help                      # every field and its meaning
    python experiments/ouro.py out/ouro-1.4b --loops=1,2,4,8     # held-out solutions against loops
    python experiments/ouro.py out/ouro-1.4b --export=DIRECTORY  # back to Hugging Face's layout
    python experiments/harness.py out/ouro-1.4b --eval=gsm8k     # real benchmarks

The model is Ouro's: one stack of layers, applied num_loops times; the norm after each loop is both
read out and fed back. The loss is STARS', with stars.py's own functions: t loops drawn from a
log-normal, then (1 - lambda) CE + lambda ||J v||^2, J the Jacobian of one loop at h^(t) and v a
random unit vector.

Letters: B batch, T tokens, D width, nh heads of width hs = D / nh, V types; h^(t) the (B, T, D)
state after loop t.
"""
import collections
import datetime
import functools
import hashlib
import importlib
import json
import math
import re
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from stars import jacobian_product, random_directions, sample_loops
from train import Count, Share, Size, UserError, check_fields, cross_entropy


@dataclass
class Config:
    vocab_size: Size = 49_152  # types, V
    block_size: Size = 2048  # tokens in a window, T
    n_layer: Count = 24  # layers in the stack that is looped
    n_head: Count = 16  # attention heads
    n_embd: Size = 2048  # width of the state, D
    mlp_width: Size = 5632  # hidden width of the MLP
    rope_theta: Annotated[float, 1, 10**9] = 1e6  # the slowest period is about 2 pi theta
    num_loops: Count = 4  # loops when fixed, the Poisson mean, and the loops of an evaluation
    loop_sampling: Literal["fixed", "lognormal", "poisson", "uniform"] = "lognormal"  # of t
    loop_mu: Annotated[float, -10, 10] = 1.7  # log-normal: log of the median
    loop_sigma: float = 0.4  # log-normal: std of the log
    min_loops: Count = 1  # random t are clipped from below, and uniform ones start here
    max_loops: Count = 16  # and from above, and end here
    jsrr_lambda: Share = 0.1  # weight of JSRR against the cross-entropy, 0 to 1; 0: none
    jsrr_rows: Annotated[float, 0.001, 1] = 1.0  # share of the rows at which J is taken, 1 at least
    checkpointing: bool = True  # keep each layer's input only, and run the layer again backwards
    init_from: str = ""  # a Hugging Face directory of Ouro's layout, tokenizer included

    def __post_init__(self):
        check_fields(self)
        if self.min_loops > self.max_loops:
            raise UserError(f"--min_loops={self.min_loops} is more than "
                            f"--max_loops={self.max_loops}")
        if self.n_embd % self.n_head:
            raise UserError(f"--n_embd={self.n_embd} is not divisible by --n_head={self.n_head}")
        if self.n_embd // self.n_head % 2:
            raise UserError(f"RoPE needs heads of an even width, not {self.n_embd // self.n_head}")


# what the weights fix
ARCHITECTURE = ("vocab_size", "n_layer", "n_head", "n_embd", "mlp_width", "rope_theta")
PRESETS = {
    "1.4b": dict(dataset="AI-MO/NuminaMath-1.5", batch_size=2, grad_accum=16, max_steps=12_500,
                 lr=1e-6, beta2=0.95, weight_decay=0.0, schedule="wsd", warmup_steps=1250,
                 decay_share=0.1, log_interval=10, eval_interval=500, eval_batches=32),
}
SHOW = ("loops", "jsrr")  # printed beside the loss
CURVES = (("loss", "log", ("train_loss", "val_loss")), ("JSRR", "log", ("jsrr",)))  # in curves.png
ANSWER_LOOPS = (1, 2, 3, 4, 6, 8, 12, 16)  # where held-out solutions are measured


# --------------------------------------------------------------------------------------------------
# The model. Below the blocks, which every model here calls so, its modules are named as in Ouro's
# files: state_dict() is their content.

class RMSNorm(nn.Module):
    """h / rms(h) * gain, in the gain's float32 where autocast has made h a bfloat16."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))

    def forward(self, h):
        return F.rms_norm(h.to(self.weight.dtype), h.shape[-1:], self.weight, 1e-6)


def rope_table(config):
    """cos and sin, (2, block_size, hs), of position times theta^(-2i / hs): pairs hs / 2 apart."""
    hs = config.n_embd // config.n_head
    frequencies = config.rope_theta ** (-torch.arange(0, hs, 2, dtype=torch.float64) / hs)
    angles = torch.arange(config.block_size)[:, None] * frequencies  # (block_size, hs / 2)
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2).float()


def rotate(x, rope):
    """Queries or keys (B, nh, T, hs), each pair (x1, x2) turned by its position's angle."""
    cos, sin = rope
    x1, x2 = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-x2, x1], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D = config.n_embd
        self.n_head = config.n_head
        self.q_proj = nn.Linear(D, D, bias=False)
        self.k_proj = nn.Linear(D, D, bias=False)
        self.v_proj = nn.Linear(D, D, bias=False)
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(self, x, rope, cache=None, start=0):
        """x (B, T, D) at positions start ..; cache (2, B, nh, S, hs): the keys and values so far of
        this loop and layer."""
        B, T, D = x.shape
        q = rotate(self.heads(self.q_proj(x)), rope)
        k = rotate(self.heads(self.k_proj(x)), rope)
        v = self.heads(self.v_proj(x))
        if cache is not None:
            cache[0, :, :, start:start + T] = k
            cache[1, :, :, start:start + T] = v
            k, v = cache[:, :, :, :start + T]
        past = None
        if start:  # new tokens behind old ones: each sees those, and no new one after itself
            past = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=past, is_causal=not start)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, D))

    def heads(self, x):
        B, T, D = x.shape
        return x.view(B, T, self.n_head, D // self.n_head).transpose(1, 2)  # (B, nh, T, hs)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + N(f(N(x))) for f attention, then the MLP: stars.py's placement pre_sandwich."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config)  # before attention
        self.input_layernorm_2 = RMSNorm(config)  # after it
        self.post_attention_layernorm = RMSNorm(config)  # before the MLP
        self.post_attention_layernorm_2 = RMSNorm(config)  # after it

    def forward(self, x, rope, cache=None, start=0):
        y = self.self_attn(self.input_layernorm(x), rope, cache, start)
        x = x + self.input_layernorm_2(y)
        y = self.mlp(self.post_attention_layernorm(x))
        return x + self.post_attention_layernorm_2(y)


class Ouro(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.norm = RMSNorm(config)
        self.early_exit_gate = nn.Linear(config.n_embd, 1)  # carried along, not used
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.register_buffer("rope", rope_table(config), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def recomputes(self):
        return self.config.checkpointing and self.training and torch.is_grad_enabled()

    def embed(self, idx):
        """h^(0), (B, T, D), of tokens (B, T)."""
        return self.embed_tokens(idx)

    def step(self, h, cache=None, start=0):
        """The loop map Phi, (B, T, D) -> (B, T, D); without a cache a function of the state."""
        rope = self.rope[:, start:start + h.shape[1]]
        for i, block in enumerate(self.blocks):
            if self.recomputes():
                h = checkpoint(block, h, rope, use_reentrant=False)
            else:
                h = block(h, rope, None if cache is None else cache[i], start)
        return self.norm(h)

    def readout(self, h):
        """Logits, (.., D) -> (.., V). The loop has applied the norm already."""
        return self.lm_head(h)

    def final(self, idx, num_loops, cache=None, start=0):
        """h^(num_loops), (B, T, D), of tokens (B, T) at positions start .."""
        h = self.embed(idx)
        for t in range(num_loops):
            h = self.step(h, None if cache is None else cache[t], start)
        return h

    def new_cache(self, B, S, num_loops):
        """Room for the keys and values of S tokens, a slot per (loop, layer): a layer's keys differ
        from loop to loop."""
        c = self.config
        device, dtype = self.lm_head.weight.device, self.lm_head.weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        shape = (num_loops, c.n_layer, 2, B, c.n_head, S, c.n_embd // c.n_head)
        return torch.empty(shape, device=device, dtype=dtype)

    def loss(self, idx, targets, num_loops=None, num_targets=None):
        """(loss, metrics) for idx and targets (B, T), targets -1 where there is no loss.

        In training (1 - lambda) CE + lambda JSRR, after num_loops loops; metrics: loops, jsrr. In
        evaluation CE. num_targets: what the CEs' sum is divided by, by default how many there are.
        """
        c = self.config
        t = num_loops or c.num_loops
        h = self.final(idx, t)
        learned = (targets >= 0).flatten().to(self.lm_head.weight.dtype)  # (B T)
        if num_targets is None:
            num_targets = learned.sum()
        share = learned / num_targets  # of each token in the mean
        ce, _ = cross_entropy(h.flatten(0, 1), self.lm_head.weight, targets.clamp_min(0).flatten(),
                              share)
        if not self.training:
            return ce, {}
        metrics = {"loops": torch.full((), float(t), device=idx.device)}  # made there: no waiting
        if not c.jsrr_lambda:
            return ce, metrics
        jsrr = self.jsrr(h)
        metrics["jsrr"] = jsrr
        return (1 - c.jsrr_lambda) * ce + c.jsrr_lambda * jsrr, metrics

    def jsrr(self, h):
        """L_JSRR^(t): the mean of ||J v||^2 over the first jsrr_rows of the rows of h = h^(t), v a
        random unit vector each, J the Jacobian of loop t + 1. Its gradient flows into h too."""
        n = max(1, round(self.config.jsrr_rows * len(h)))
        Jv = self.jacobian_step(h[:n], random_directions(h[:n]))
        return Jv.to(torch.promote_types(Jv.dtype, torch.float32)).square().sum() / n

    def jacobian_step(self, h, v):
        """J v of one loop at h. J is the product of the layers' Jacobians and the norm's, so v goes
        from layer to layer beside the state, and each layer can be run again backwards."""
        rope = self.rope[:, :h.shape[1]]

        def through(block, h, v):
            # uncompiled, since torch.compile has no second derivatives; set in here, since the
            # backward pass runs this function again
            with torch.compiler.set_stance("force_eager"):
                return jacobian_product(lambda x: block(x, rope), h, v, "jvp")
        for block in self.blocks:
            if self.recomputes():
                h, v = checkpoint(through, block, h, v, use_reentrant=False)
            else:
                h, v = through(block, h, v)
        _, Jv = jacobian_product(self.norm, h, v, "jvp")
        return Jv

    def flops_per_token(self):
        """Training FLOPs per token at the mean loop count, without JSRR's: 6 per weight used, 6 T D
        per attention."""
        c = self.config
        weights = sum(p.numel() for p in self.blocks[0].parameters() if p.ndim == 2)
        loops = sample_loops(c, np.random.default_rng(0), 10_000).mean().item()
        stack = c.n_layer * (weights + c.block_size * c.n_embd)
        return 6 * (stack * loops + c.vocab_size * c.n_embd)


# --------------------------------------------------------------------------------------------------
# Ouro's files as Hugging Face lays them out: config.json, weights in safetensors (one file, or
# shards with an index), tokenizer.json and its like.

def optional(module):
    """A module of an optional package; UserError says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"this needs the package {package}: pip install {package}") from None


def one_line(error, length=300):
    """An exception of another library as text without line ends."""
    return f"{type(error).__name__}, {' '.join(str(error).split())[:length]}"


def hub_config(directory):
    """The Config of a Hugging Face directory; UserError where it asks for another model than this.
    The window stays at the default's block_size."""
    path = Path(directory) / "config.json"
    try:
        hub = json.loads(path.read_text(encoding="utf-8"))
        rope_theta = check_hub_config(hub)
        return Config(
            vocab_size=hub["vocab_size"],
            n_layer=hub["num_hidden_layers"],
            n_head=hub["num_attention_heads"],
            n_embd=hub["hidden_size"],
            mlp_width=hub["intermediate_size"],
            rope_theta=rope_theta,
            num_loops=hub["total_ut_steps"])
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"{path} does not describe a model of Ouro's form ({type(error).__name__}: "
                        f"{error})") from None


def check_hub_config(hub):
    """RoPE's theta of a config.json; ValueError names what differs from the model here."""
    heads, layers = hub["num_attention_heads"], hub["num_hidden_layers"]
    required = {
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False}
    may_be_left_out = {
        "model_type": "ouro",
        "head_dim": hub["hidden_size"] // heads,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * layers,
        "early_exit_threshold": 1}
    found = may_be_left_out | {name: value for name, value in hub.items() if value is not None}
    if hub.get("use_sliding_window") is False:
        found["sliding_window"] = None  # its width then means nothing

    rope = {"rope_type": "default", "rope_theta": hub.get("rope_theta")}
    rope |= hub.get("rope_scaling") or {}  # of older files
    rope |= hub.get("rope_parameters") or {}  # of newer ones
    rope_theta = rope.pop("rope_theta")
    found["rope_scaling"] = rope

    expected = required | may_be_left_out | {"rope_scaling": {"rope_type": "default"}}
    differing = [f"{name} is {found[name]}, not {value}"
                 for name, value in expected.items() if found[name] != value]
    if differing:
        raise ValueError("; ".join(differing))
    hub_dtype(hub)
    return rope_theta


def hub_dtype(hub):
    """The dtype of a config.json, given as "bfloat16" or "torch.bfloat16"; by default float32."""
    name = str(hub.get("dtype") or hub.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise UserError(f"torch_dtype is {name}, not one of float16, bfloat16, float32, float64")
    return getattr(torch, name)


def file_tensors(model):
    """{name in Ouro's files: the model's tensor}, to be read and written."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith("lm_head."):
            name = "model." + name.replace("blocks.", "layers.")
        tensors[name] = tensor
    return tensors


def read_tensors(directory):
    """{name: tensor} of model.safetensors, or of the shards that its index lists."""
    load_file = optional("safetensors.torch").load_file
    path = directory / "model.safetensors.index.json"
    tensors, files = {}, ["model.safetensors"]
    try:
        if path.exists():
            index = json.loads(path.read_text(encoding="utf-8"))
            files = sorted(set(index["weight_map"].values()))
        for file in files:
            path = directory / file
            tensors |= load_file(path)
    except Exception as error:  # of the disk, of JSON or of safetensors: absent, truncated, foreign
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    tables = [name for name in tensors if re.search(r"\.rotary_emb\.\w+$", name)]
    for name in tables:  # of rotations, which are computed here
        del tensors[name]
    return tensors


@torch.no_grad()
def load_weights(model, directory):
    """Copy a Hugging Face directory's weights, of any float dtype, into the model. UserError names
    the tensors that are missing, extra or of another shape."""
    there = hub_config(directory)
    differing = [f"--{name}={getattr(there, name)}" for name in ARCHITECTURE
                 if getattr(there, name) != getattr(model.config, name)]
    if differing:
        raise UserError(f"{directory} has another architecture than this run: "
                        f"add {' '.join(differing)}")
    ours, theirs = file_tensors(model), read_tensors(Path(directory))
    wrong = []
    for name in sorted(ours.keys() ^ theirs.keys()):
        wrong.append(f"{name} is {'extra' if name in theirs else 'missing'}")
    for name in sorted(ours.keys() & theirs.keys()):
        if theirs[name].shape != ours[name].shape:
            wrong.append(f"{name} is {[*theirs[name].shape]}, not {[*ours[name].shape]}")
        if not theirs[name].is_floating_point():
            wrong.append(f"{name} is {str(theirs[name].dtype)[6:]}, not of floats")
    if wrong:
        more = " .." if len(wrong) > 4 else ""
        raise UserError(f"{directory}: {len(wrong)} tensors do not fit; "
                        f"{'; '.join(wrong[:4])}{more}")
    for name, tensor in ours.items():
        tensor.copy_(theirs[name])


def export(model, tokenizer, directory):
    """Write the model as load_weights reads it, in the dtype of its config.json, with the files
    that it came with."""
    save, directory = optional("safetensors.torch").save, Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"--export={directory} is not empty: choose another directory")
    files = tokenizer.spec["files"]
    dtype = hub_dtype(json.loads(files["config.json"]))
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_bytes(text.encode())
    tensors = {name: tensor.to("cpu", dtype) for name, tensor in file_tensors(model).items()}
    path = directory / "model.safetensors"
    with train.atomic_write(path) as f:
        f.write(save(tensors, metadata={"format": "pt"}))
    print(f"{len(tensors)} tensors in {str(dtype)[6:]} written to {path}")


def is_hub_directory(path):
    return (Path(path) / "tokenizer.json").exists()


def load(path):
    """(model, options, tokenizer) of a run, or of a Hugging Face directory of Ouro's layout."""
    if not is_hub_directory(path):
        return train.load_model(path, "ouro", Ouro)
    model, tokenizer = Ouro(hub_config(path)), HubTokenizer.read(path)
    load_weights(model, path)
    return model.to(train.pick_device("auto")).eval(), train.Options(), tokenizer


# --------------------------------------------------------------------------------------------------
# Its tokenizer, and chats as its template writes them

# of every chat
SYSTEM = "You are a helpful assistant who reasons carefully before giving the answer."


class HubTokenizer:
    """The tokenizer and chat template of a Hugging Face directory. spec["files"]: its text files,
    {name: text}, so that a checkpoint is complete and can be exported.

    The library `tokenizers` reads tokenizer.json, which is exact. tiktoken would join any two
    neighbours whose bytes are a token, where tokenizer.json lists the pairs, and normaliser,
    pre-tokeniser and added tokens would all be ours to redo.
    """
    system = SYSTEM

    def __init__(self, files):
        library = optional("tokenizers")
        self.spec = {"name": "hub", "files": files}
        try:
            strange = [name for name in files if not self.is_carried(name)]
            if strange:
                raise ValueError(f"unexpected names {strange}")
            self.bpe = library.Tokenizer.from_str(files["tokenizer.json"])
            self.read_config(json.loads(files.get("tokenizer_config.json", "{}")))
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(f"the tokenizer's files cannot be read: {one_line(error)}") from None
        self.vocab_size = 1 + max(self.bpe.get_vocab().values())

    def read_config(self, config):
        """The special tokens and the chat template, None without one."""
        self.specials = {}
        for name in ("bos_token", "eos_token"):
            token = config.get(name)
            if token:
                self.specials[name] = token["content"] if isinstance(token, dict) else token
        self.eos = self.bpe.token_to_id(self.specials.get("eos_token", ""))
        template = self.spec["files"].get("chat_template.jinja") or config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {each["name"]: each["template"] for each in template}["default"]
        self.template = chat_environment().from_string(template) if template else None

    @staticmethod
    def is_carried(name):
        """Whether a file is carried along: a bare name, so that an export writes into its own
        directory only."""
        return (not set(name) & set("/\\:\0") and name.endswith((".json", ".jinja", ".py", ".txt"))
                and not name.endswith((".index.json", "eval.json")))

    @classmethod
    def read(cls, directory):
        files = {}
        for path in sorted(Path(directory or "?").glob("*.*")):
            if cls.is_carried(path.name):
                files[path.name] = path.read_bytes().decode("utf-8")
        if "tokenizer.json" not in files:
            raise UserError(f"--init_from={directory}: expected a Hugging Face directory, with "
                            f"tokenizer.json in it")
        return cls(files)

    def encode(self, text):
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.bpe.decode(ids, skip_special_tokens=False)

    def chat(self, messages, add_generation_prompt):
        """Messages, [{"role", "content"}, ..], as the template writes them; with the beginning of
        an answer, or not."""
        if not self.template:
            raise UserError("this tokenizer has no chat template: put one into chat_template.jinja "
                            "beside tokenizer.json")
        try:
            return self.template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None,
                documents=None, **self.specials)
        except Exception as error:  # a template is a program: it may fail, or refuse on purpose
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the chat template does not write a chat of {roles}: "
                            f"{str(error)[:200]}") from None

    @functools.cached_property
    def ends(self):
        """The tokens that end an answer: the end of a text, and the mark that the template writes
        behind an answer."""
        ends = {self.eos}
        if self.template:
            chat = [*question("?"), {"role": "assistant", "content": "ANSWER"}]
            _, _, behind = self.chat(chat, add_generation_prompt=False).rpartition("ANSWER")
            mark = self.encode(behind.strip())[:1]
            ends |= set(mark) & self.bpe.get_added_tokens_decoder().keys()
        return ends


train.TOKENIZERS["hub"] = HubTokenizer  # so that train.py rebuilds it from a checkpoint


def question(problem):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]


def chat_environment():
    """Where chat templates run: a sandbox, with what Hugging Face's templates may call."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # torch requires jinja2

    def raise_exception(message):
        raise UserError(message)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    # jinja2's own escapes HTML
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment


# --------------------------------------------------------------------------------------------------
# Problems and solutions

def read_problems(dataset):
    """Two lists, problems and solutions, of a .jsonl or .parquet file or of a hub data set's split
    "train"."""
    suffix = Path(dataset).suffix
    if suffix in (".jsonl", ".parquet") and not Path(dataset).is_file():
        raise UserError(f"--dataset={dataset}: no such file")
    load_dataset = optional("datasets").load_dataset if suffix != ".jsonl" else None
    try:
        if suffix == ".jsonl":
            with open(dataset, encoding="utf-8-sig") as f:  # without some editors' byte order mark
                rows = [json.loads(line) for line in f if line.strip()]
            columns = {name for row in rows for name in row}
            found = {name: [row.get(name) for row in rows] for name in columns}
        elif suffix == ".parquet":
            found = load_dataset("parquet", data_files=dataset, split="train")
            columns = found.column_names
        else:
            found = load_dataset(dataset, split="train")
            columns = found.column_names
        problems = found["problem"][:] if "problem" in columns else []
        solutions = found["solution"][:] if "solution" in columns else []
    except Exception as error:  # network, hub, Arrow and JSON errors of all kinds
        raise UserError(f"--dataset={dataset} cannot be read: {one_line(error)}") from None
    if not (problems and solutions):
        raise UserError(f"--dataset={dataset}: expected rows with the columns `problem` and "
                        f"`solution`")
    return problems, solutions


def write_chat(tokenizer, problem, solution):
    """(the chat of a problem and its solution, the number of characters before the solution)."""
    chat = question(problem)
    prompt = tokenizer.chat(chat, add_generation_prompt=True)
    chat.append({"role": "assistant", "content": solution})
    text = tokenizer.chat(chat, add_generation_prompt=False).rstrip("\n")
    if not text.startswith(prompt):
        raise UserError("the chat template writes an answer that does not begin where its prompt "
                        "for one ends")
    return text, len(prompt)


def is_text(value):
    return isinstance(value, str) and value.strip() != ""


def encode_answers(tokenizer, problems, solutions, T):
    """(tokens, ends, firsts, counts): the rows' tokens in one array, where each row ends in it, and
    which of its tokens is the first to be learned; counts of rows {skipped for a reason, or cut}.

    A row is a chat, encoded as a whole; it is learned from the first token that holds a character
    of the solution on, end mark included. At most T + 1 tokens are kept. A row whose solution is
    empty, or would begin behind them, is skipped: none is left without a target.
    """
    rows, firsts, counts = [], [], collections.Counter()
    for i in range(0, len(problems), 1000):  # at a time: the library encodes them on all cores
        texts, starts = [], []
        for problem, solution in zip(problems[i:i + 1000], solutions[i:i + 1000]):
            if is_text(problem) and is_text(solution):
                text, start = write_chat(tokenizer, problem, solution)
                texts.append(text)
                starts.append(start)
            else:
                counts["without a problem or a solution"] += 1
        encodings = tokenizer.bpe.encode_batch(texts, add_special_tokens=False)
        for encoding, start in zip(encodings, starts):
            learned = (j for j, (_, end) in enumerate(encoding.offsets) if end > start)
            first = next(learned, T + 1)
            if first > T:
                counts["whose solution begins behind the window"] += 1
                continue
            if len(encoding.ids) > T + 1:
                counts["cut at the window's end"] += 1
            rows.append(np.array(encoding.ids[:T + 1], np.uint32))
            firsts.append(first)
    tokens = np.concatenate([np.empty(0, np.uint32), *rows])
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return tokens, ends, np.array(firsts, np.int64), counts


def read_arrays(path):
    """The arrays of an .npz file, checksums verified, or None where it is absent or damaged."""
    if not path.exists():
        return None
    try:
        with np.load(path) as saved:
            return dict(saved)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        print(f"{path} is damaged: built again")


class AnswerData:
    """Supervised fine-tuning: problems and solutions, of which every 50th row is held out. Targets
    are -1 before the solution. A batch's rows are sorted by length, so that a micro-batch has rows
    of similar lengths."""
    ragged = True

    def __init__(self, options, config):
        self.options = options
        self.T = config.block_size
        self.vocab_size = config.vocab_size
        self.tokenizer = HubTokenizer.read(config.init_from)
        if self.tokenizer.vocab_size > self.vocab_size:
            raise UserError(f"--init_from={config.init_from}: its tokenizer has "
                            f"{self.tokenizer.vocab_size:,} types, more than "
                            f"--vocab_size={self.vocab_size}")
        saved = self.encoded(*read_problems(options.dataset))
        self.tokens, self.ends, self.firsts = saved["tokens"], saved["ends"], saved["firsts"]
        self.starts = np.concatenate([[0], self.ends])[:-1]
        n = len(self.ends)
        if n < 50:
            raise UserError(f"--dataset={options.dataset}: {n} usable rows; every 50th is held "
                            f"out: give more")
        held_out = np.arange(n) % 50 == 49
        self.splits = {"train": np.flatnonzero(~held_out), "val": np.flatnonzero(held_out)}
        self.steps_per_epoch = max(1, len(self.splits["train"]) // options.step_rows)

    def encoded(self, problems, solutions):
        """encode_answers' arrays, by name, through a file in data_dir that is named by all that
        they depend on."""
        digest = hashlib.sha256(json.dumps([self.tokenizer.spec, SYSTEM, self.T]).encode())
        for text in (*problems, *solutions):
            digest.update(json.dumps(text).encode() + b"\n")
        self.digest = digest.hexdigest()  # a resumed run must find the same
        cache = Path(self.options.data_dir) / f"answers-{self.digest[:16]}.npz"
        cache.parent.mkdir(parents=True, exist_ok=True)
        with train.locked(cache.parent / "data.lock", cache.name):
            saved = read_arrays(cache)
            if saved is not None:
                return saved
            tokens, ends, firsts, counts = encode_answers(self.tokenizer, problems, solutions,
                                                          self.T)
            with train.atomic_write(cache) as f:
                np.savez(f, tokens=tokens, ends=ends, firsts=firsts)
        notes = [f"{len(problems):,} rows", f"{len(ends):,} used"]
        notes += [f"{n:,} {what}" for what, n in counts.items()]
        print(f"{self.options.dataset}: {', '.join(notes)}")
        return {"tokens": tokens, "ends": ends, "firsts": firsts}

    @functools.lru_cache(2)
    def permutation(self, epoch):
        return np.random.default_rng([self.options.seed, epoch]).permutation(self.splits["train"])

    def rows(self, split, i):
        """The rows of batch i: of the training split in an order new in each epoch, in which none
        is left out; of the other spread over all of it."""
        n, size = len(self.splits[split]), self.options.step_rows
        if split == "train":
            positions = range(i * size, (i + 1) * size)
            drawn = np.array([self.permutation(p // n)[p % n] for p in positions])
        else:
            batches = self.options.eval_batches
            spread = np.linspace(0, n - 1, batches * size).astype(np.int64)
            drawn = self.splits[split][spread[i::batches]]
        lengths = self.ends[drawn] - self.starts[drawn]
        return drawn[np.argsort(lengths, kind="stable")]

    def batch(self, split, i):
        rows = self.rows(split, i)
        longest = (self.ends[rows] - self.starts[rows]).max()
        idx = torch.zeros(len(rows), longest - 1, dtype=torch.int64)
        targets = torch.full_like(idx, -1)
        for j, row in enumerate(rows):
            tokens = self.tokens[self.starts[row]:self.ends[row]].astype(np.int64)
            tokens = torch.from_numpy(tokens)
            n, first = len(tokens), self.firsts[row]
            idx[j, :n - 1] = tokens[:-1]
            targets[j, first - 1:n - 1] = tokens[first:]
        return idx, targets


DATA = {"*": AnswerData}  # of any name: a file, or a data set of the hub


# --------------------------------------------------------------------------------------------------
# Fine-tuning, and what comes of it

def training_memory(config, rows):
    """{part: bytes} of a training step with checkpointing on `rows` full windows, with AdamW, in
    bfloat16: an estimate at max_loops, and the total."""
    c, tokens = config, rows * config.block_size
    with torch.device("meta"):
        P = sum(p.numel() for p in Ouro(c).parameters())
    jsrr_rows = math.ceil(rows * c.jsrr_rows) if c.jsrr_lambda else 0
    parts = {"weights, gradients and AdamW's moments": 16 * P,
             "bfloat16 weights": 2 * P,
             "layer inputs": 4 * tokens * c.n_embd * c.n_layer * (c.max_loops + 1),
             "one layer": tokens * (90 * c.n_embd + 16 * c.mlp_width),
             "J v of one layer": 48 * jsrr_rows * c.n_head * c.block_size ** 2,
             "logits": 12 * min(train.CHUNK["cuda"], tokens * c.vocab_size)}
    return parts | {"together": sum(parts.values())}


def train_model(run):
    c, o = run.config, run.options
    if c.checkpointing:
        parts = training_memory(c, o.batch_size // run.world)
        sizes = [f"{part} {n / 1e9:.2f} GB" for part, n in parts.items()]
        run.say(f"estimated memory: {', '.join(sizes)}")
    model = Ouro(c)
    if not run.resumes:
        load_weights(model, c.init_from)
    model = run.prepare(model)  # to its device, compiled; with --resume, as it was saved
    while run.step < run.max_steps:
        run.begin_step()  # and set its learning rate
        # of the step alone: a resumed run, and every process, draws the same t
        rng = np.random.default_rng([o.seed, run.step, 1])
        t = int(sample_loops(c, rng)[0])
        for idx, targets, num_targets in run.micro_batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, t, num_targets)
            run.backward(loss, metrics)
        run.average_gradients()  # over the processes of torchrun
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm)
        run.optimizer_step(grad_norm)
        run.end_step()  # log, evaluate, save; exit here if Ctrl-C has asked for it
    run.finish()
    if c.checkpointing:
        run.say(f"measured at the peak: {train.peak_memory(run.device) / 1e9:.2f} GB")
    if run.is_main_process:
        _, batches = train.validation_batches(o, run.data.tokenizer, model, o.eval_batches)
        diagnose_answers(model.eval(), batches, ANSWER_LOOPS)
    run.say(f"see {run.out}/curves.png, then run\n"
            f"python experiments/harness.py {run.out} --eval=gsm8k --loops=1,2,4,8")


@torch.no_grad()
def answer_sums(model, idx, targets, loops):
    """(len(loops), 4), sums over a batch at each loop count: over the solutions' tokens of CE and
    of right ones; over the rows of the relative change by one more loop and of ||J v||."""
    learned, sums = targets >= 0, []
    generator = torch.Generator(idx.device).manual_seed(0)
    h = model.embed(idx)
    for t in range(1, max(loops) + 1):
        h = model.step(h)
        if t in loops:
            logits = model.readout(h[learned]).float()
            ce = F.cross_entropy(logits, targets[learned], reduction="sum")
            right = (logits.argmax(-1) == targets[learned]).sum()
            v = random_directions(h, generator)
            after, Jv = jacobian_product(model.step, h, v, "jvp")
            change = (after - h).flatten(1).norm(dim=1) / h.flatten(1).norm(dim=1)  # (B)
            gain = Jv.flatten(1).norm(dim=1)
            sums.append(torch.stack([ce, right, change.sum(), gain.sum()]))
    return torch.stack(sums).cpu()


@torch.compiler.set_stance("force_eager")  # compiled blocks have no J v
def answer_means(model, batches, loops):
    """(len(loops), 4), on held-out rows in batches of (idx, targets), at each of the loop counts in
    rising order: CE of solutions' tokens, the share of them that greedy decoding gets right given
    those before, and, as means over the rows, how far one more loop moves the state and the
    one-step gain ||J v||."""
    device = model.lm_head.weight.device.type
    table, tokens, rows = torch.zeros(len(loops), 4), 0, 0
    for idx, targets in batches:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            table += answer_sums(model, idx, targets, loops)
        tokens += int((targets >= 0).sum())
        rows += len(idx)
    return table / torch.tensor([tokens, tokens, rows, rows])


def diagnose_answers(model, batches, loops):
    """Print answer_means."""
    loops = sorted(set(loops))
    table = answer_means(model, batches, loops)
    print("loops t       CE   right tokens   ||h^(t+1) - h^(t)|| / ||h^(t)||   one-step ||J v||")
    for t, (ce, right, change, gain) in zip(loops, table.tolist()):
        print(f"{t:7d}   {ce:6.4f}   {right:12.2%}   {change:31.2e}   {gain:16.4f}")


# --------------------------------------------------------------------------------------------------

@dataclass
class Arguments:
    export: str = ""  # a directory to write the model to, in Hugging Face's layout
    loops: str = None  # without it: loop counts of the table that is printed, separated by commas

    __post_init__ = check_fields


def main(argv):
    module = sys.modules[__name__]
    if argv[:1] == ["train"]:
        usage = "python experiments/ouro.py train --init_from=DIRECTORY [--field=value ...]"
        given = train.training_parser(usage, module).parse(argv[1:])
        return train.launch("ouro", module, given.pop("preset"), given)
    usage = ("python experiments/ouro.py train --init_from=DIRECTORY [--field=value ...]\n"
             "       python experiments/ouro.py RUN [--loops=1,2,4 | --export=DIRECTORY]")
    path, arguments = train.parse_run(usage, Arguments, argv)
    loops = train.loop_counts(arguments.loops) or ANSWER_LOOPS
    if is_hub_directory(path) and not arguments.export:
        raise UserError(f"{path} is a Hugging Face directory, not a run with held-out rows: "
                        f"measure it with python experiments/harness.py {path} --eval=TASK")
    model, options, tokenizer = load(path)
    if arguments.export:
        return export(model, tokenizer, arguments.export)
    _, batches = train.validation_batches(options, tokenizer, model, options.eval_batches)
    diagnose_answers(model, batches, loops)


if __name__ == "__main__":
    train.command_line(main)
