"""The driver that looped_gpt.py, stars.py and fullbandwidth.py share. Read those first: they hold
the papers.

    python train.py MODEL [--preset=NAME] [--field=value ...]   # looped_gpt, stars, fullbandwidth
    python train.py MODEL --resume                              # go on where it stopped
    torchrun --nproc_per_node=4 train.py MODEL ...              # data-parallel
    python train.py MODEL --help                                # every field and its default

In the order below: what a value may be, options and command line, files, text and tokenizers,
batches, cross-entropy, device and optimiser, checkpoints, log, the run. A script brings
`Config`, `PRESETS`, `SHOW`, `CURVES`, `DATA` where it has tasks of its own, and `train_model(run)`,
its visible training loop; its model brings `blocks`, `loss(idx, targets)` and `flops_per_token()`.
"""
import argparse
import base64
import collections
import contextlib
import csv
import dataclasses
import difflib
import functools
import hashlib
import http.client
import importlib
import inspect
import io
import json
import math
import os
import pydoc_data.topics
import re
import shlex
import signal
import sys
import threading
import time
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MODELS = ("looped_gpt", "stars", "fullbandwidth")


class UserError(ValueError):
    """A mistake that its message explains; the command line prints that line, and no traceback."""


# --------------------------------------------------------------------------------------------------
# What a value may be, by the annotation of its field. It may come from the command line, from a
# file, or from Python.

Count = Annotated[int, 1, 10_000]  # how often something is done again: layers, loops, passes
Size = Annotated[int, 1, 10_000_000]  # how much there is at a time: tokens, widths, sequences
Token = Annotated[int, -1, 10_000_000]  # the id of a token; -1: of none
Seed = Annotated[int, 0, 2**63 - 1]
Share = Annotated[float, 0, 1]
BelowOne = Annotated[float, 0, 0.9999]
RANGES = {int: (0, 10_000_000), float: (0, 10**9)}  # of a field that is just `int` or `float`


def type_and_range(kind):
    """(type, least, most) of a number's annotation, (type,) of another one."""
    if get_origin(kind) is Annotated:
        return get_args(kind)
    return (kind, *RANGES.get(kind, ()))


def check_value(name, value, kind):
    """UserError unless the value is of this type, in its range, or one of a Literal's choices."""
    of_type, *limits = type_and_range(kind)
    if get_origin(kind) is Literal:
        valid = value in get_args(kind)
        expected = f"one of {', '.join(get_args(kind))}"
    elif limits:
        least, most = limits
        is_number = isinstance(value, (int, of_type)) and not isinstance(value, bool)
        valid = is_number and least <= value <= most  # false for nan
        whole = "whole " if of_type is int else ""
        expected = f"a {whole}number from {least:,} to {most:,}"
    elif of_type is str:  # it may name a file, or be printed
        valid = isinstance(value, str) and "\0" not in value
        valid = valid and value.encode(errors="ignore").decode() == value
        expected = "text in UTF-8"
    else:
        valid = isinstance(value, of_type)
        expected = f"a value of type {of_type.__name__}"
    if not valid:
        raise UserError(f"{name}={value!s:.60}: expected {expected}")


def check_fields(config):
    """check_value of every field of a dataclass; None where that is the default."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value is not None or f.default is not None:
            check_value(f"--{f.name}", value, f.type)


# --------------------------------------------------------------------------------------------------
# Options and the command line. A field's comment is its help text.

@dataclasses.dataclass
class Options:
    dataset: str = "python-docs"  # shakespeare, wikitext-2, wikitext-103, a text file, a task
    tokenizer: Literal["char", "regex", "gpt2"] = "char"  # of a text; a task has its own
    data_dir: str = "data"  # where downloads and token caches are kept
    out_dir: str = ""  # the run directory; empty: out/MODEL-PRESET
    max_steps: int = 600  # optimiser steps; 0: as many as `epochs` takes
    epochs: Count = 1  # passes over the training windows, when max_steps is 0
    batch_size: Size = 32  # sequences per forward pass, over all processes together
    grad_accum: Count = 1  # forward passes per optimiser step
    stride: int = 0  # tokens between windows, shuffled each epoch; 0: windows start at random
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: the blocks' matrices; AdamW for the rest
    lr: float = 3e-4  # peak learning rate of AdamW
    muon_lr: float = 0.01  # peak learning rate of Muon
    weight_decay: float = 0.01  # on matrices only
    beta2: BelowOne = 0.999  # AdamW's second moment decay
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    schedule: Literal["constant", "cosine", "wsd"] = "constant"  # cosine and wsd end at 0
    warmup_steps: int = 0  # steps of linear warm-up
    decay_share: Share = 0.25  # wsd decays in this share of all steps, warm-up included: the last
    log_interval: Size = 10  # steps between progress lines (and rows of log.csv)
    eval_interval: Size = 100  # steps between evaluations, each followed by a checkpoint
    eval_batches: Count = 10  # an evaluation has as many sequences as this many training steps
    seed: Seed = 42  # seeds initialisation, data order and dropout
    device: str = "auto"  # auto, cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where that is fast
    compile: Literal["auto", "on", "off"] = "auto"  # auto: on CUDA, and on CPUs above 10M weights
    resume: bool = False  # go on from out_dir's last checkpoint
    overwrite: bool = False  # start again in an out_dir that holds a run

    __post_init__ = check_fields

    @property
    def max_grad_norm(self):
        return self.grad_clip or math.inf

    @property
    def step_rows(self):
        """Sequences per optimiser step."""
        return self.batch_size * self.grad_accum


DATA_DIR = Options.data_dir  # the command line's: what a run has saved must not say where we write


def nearest(word, known):
    """'did you mean a, b?', or all that is known."""
    close = difflib.get_close_matches(word, known, 3, 0.5)
    return f"did you mean {', '.join(close)}?" if close else f"choose from {', '.join(known)}"


FIRST = ("dataset", "max_steps", "batch_size", "lr", "out_dir")  # what people change first
ELSEWHERE = {"learning_rate": "lr", "context_length": "block_size", "d_model": "n_embd",
             "hidden_size": "n_embd"}  # the names of other projects: our own


class Parser(argparse.ArgumentParser):
    """--field=value for every field of the dataclasses. values: {field: what it will be} where
    that is not the dataclass's default."""

    def __init__(self, usage, *classes, values=None, epilog=None):
        super().__init__(usage=usage, epilog=epilog, allow_abbrev=False,
                         formatter_class=argparse.RawTextHelpFormatter)
        self.fields = []
        self.values = values or {}
        first = self.add_argument_group("changed most often")
        for cls in classes:
            comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))
            rest = self.add_argument_group(f"{cls.__module__}.{cls.__name__}")
            for f in dataclasses.fields(cls):
                self.add_field(first if f.name in FIRST else rest, f, comments.get(f.name, ""))

    def add_field(self, group, field, comment):
        if field.type is bool:
            takes = {"action": argparse.BooleanOptionalAction}  # --resume, --no-resume
        elif get_origin(field.type) is Literal:
            takes = {"choices": get_args(field.type)}
        else:
            takes = {"type": type_and_range(field.type)[0]}
        value = self.values.get(field.name, field.default)
        help_text = f"{comment} [{value}]".replace("%", "%%")
        group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=help_text, **takes)
        self.fields.append(f"--{field.name}")

    def error(self, message):
        raise UserError(message)

    def plain_flag(self, word):
        """--resume or --no-resume for --resume=True or --resume=false; any other word as it is."""
        name, _, value = word.partition("=")
        is_flag = f"--no-{name[2:]}" in self._option_string_actions
        if not is_flag or value.lower() not in ("true", "false"):
            return word
        return name if value.lower() == "true" else f"--no-{name[2:]}"

    def parse(self, argv):
        """The fields that argv sets, as a dict; UserError names the nearest to an unknown one."""
        global DATA_DIR
        values, unknown = self.parse_known_args([self.plain_flag(word) for word in argv])
        if unknown:
            word = unknown[0].split("=")[0]
            name = word.lstrip("-").replace("-", "_")
            advice = nearest(f"--{ELSEWHERE.get(name, name)}", self.fields)
            if word == "--sweep":
                advice = "type python experiments/NAME.py SWEEP; experiments/README.md lists them"
            raise UserError(f"{word}: no such field; {advice}")
        DATA_DIR = getattr(values, "data_dir", Options.data_dir)
        return vars(values)


def split_fields(values, *classes):
    """One dict per dataclass, of the values that are its fields."""
    parts = []
    for cls in classes:
        names = [f.name for f in dataclasses.fields(cls)]
        parts.append({name: values[name] for name in names if name in values})
    return parts


def parse_run(usage, cls, argv):
    """(RUN, a cls) of a script's own command line, which names a run or a checkpoint in it."""
    parser = Parser(usage, cls)
    parser.add_argument("run", metavar="RUN", help="a run directory, or a checkpoint in it")
    parser.add_argument("--data_dir", default=argparse.SUPPRESS,
                        help="where downloads and token caches are kept [data]")
    values = parser.parse(argv or ["--help"])
    path = values.pop("run")
    values.pop("data_dir", None)  # which parse has noted
    if values and hasattr(cls, "prompt") and "prompt" not in values:
        raise UserError(f"--{next(iter(values))} has no effect here: it goes with --prompt")
    return path, cls(**values)


def loop_counts(text):
    """'1,2,4' -> [1, 2, 4]; [] of None, that is of a field left at its default."""
    if text is None:
        return []
    try:
        counts = [int(n) for n in text.split(",")]
    except ValueError:
        raise UserError(f"--loops={text:.60}: expected a number, or some as in 1,2,4") from None
    for n in counts:
        check_value("--loops", n, Count)
    return counts


# --------------------------------------------------------------------------------------------------
# Files

# What a run directory may hold, in the order in which --overwrite deletes it: a run without its
# config.json goes on from its checkpoint, so a kill in between leaves the old run, or none, but
# never a mixture.
RUN_FILES = ("config.json", "ckpt.pt", "best.pt", "log.csv", "log.csv.old", "eval.json",
             "curves.png", "diagnostics.png", "passes.csv", "passes.png", "decoding.csv",
             "decoding.png", "running_sum.csv", "running_sum.png", "statetrack.csv",
             "statetrack.png")


def run_directory(path):
    """The directory of a run that is named by it or by a checkpoint in it."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


@contextlib.contextmanager
def atomic_write(path, mode="wb"):
    """open(path, mode), but under another name, flushed to disk and renamed at the end: `path` is
    never half-written, even if we are killed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path, *names, wait=True):
    """Hold the lock file at `path`, which goes with its process however that ends, and remove the
    temporary files that a kill has left of the files `names` beside it. If another process has it,
    wait for it, or raise UserError."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "a"))
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in names:
                for left in path.parent.glob(f"{name}.[0-9]*.tmp"):
                    left.unlink()
        except BlockingIOError:
            raise UserError(f"another process is training in {path.parent}: wait for it, or choose "
                            f"another --out_dir") from None
        except OSError:  # read-only, or a file system without locks
            pass
        yield


def write_json(path, value):
    with atomic_write(path, "w") as f:
        json.dump(value, f, indent=1, ensure_ascii=False, default=str)


def write_csv(path, rows):
    """Rows (dicts) under the union of their columns."""
    columns = []
    if "step" in rows[0]:  # log.csv: these first, in this order
        columns = ["step", "tokens", "train_loss", "val_loss", "lr", "tokens_per_sec"]
    for row in rows:
        columns += [name for name in row if name not in columns]
    with atomic_write(path, "w") as f:
        writer = csv.DictWriter(f, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path):
    """The rows of a CSV of numbers and words, empty cells left out, numbers as they were."""
    if not path.exists():
        return []
    # A spreadsheet may have saved it, with a mark at its beginning or in another encoding.
    text = path.read_text(encoding="utf-8-sig", errors="replace").replace("\0", "")
    rows = []
    for row in csv.DictReader(io.StringIO(text)):
        rows.append({name: number_or_word(cell) for name, cell in row.items() if name and cell})
    return rows


def number_or_word(cell):
    try:
        return int(cell) if cell.lstrip("-").isdigit() else float(cell)
    except ValueError:
        return cell


# --------------------------------------------------------------------------------------------------
# Text, read whole into memory once; then its tokens are read from a cache on disk.

DOWNLOADS = {  # address, size in bytes, SHA-256, where known
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        1115394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "wikitext-2": ("https://wikitext.smerity.com/wikitext-2-raw-v1.zip", None, None),
    "wikitext-103": ("https://wikitext.smerity.com/wikitext-103-raw-v1.zip", 191984949, None),
}
GPT2_RANKS = ("https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken", 835554,
              "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930")


def download(path, url, size=None, sha256=None):
    """Fetch url into path, whole or not at all. What is there, perhaps by hand, is verified too."""
    if path.exists():
        return verify(path, path, size, sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(path.parent / "data.lock", path.name), atomic_write(path) as f:
            fetch(url, f, path.name)
            verify(path, f.name, size, sha256)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"no download: {error}. Put {url} at {path} by hand, or use "
                        f"--dataset=python-docs --tokenizer=char, which need none") from None


def fetch(url, f, name):
    """Write what is at url into the open file f, with a progress line."""
    with urllib.request.urlopen(url, timeout=30) as reply:
        total = int(reply.headers.get("Content-Length") or 0)
        while chunk := reply.read(1 << 20):
            f.write(chunk)
            progress = f"\r{name}: {f.tell() / 1e6:.1f} of {total / 1e6:.1f} MB"
            print(progress, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if f.tell() < total:  # urllib says nothing of a connection that ends early
        raise ConnectionError(f"the connection ended after {f.tell():,} of {total:,} bytes")
    f.flush()


def verify(path, file, size, sha256):
    """UserError, about `path`, unless the file has this size and this checksum."""
    content = Path(file)
    if size and content.stat().st_size != size:
        raise UserError(f"{path} should have {size:,} bytes and has {content.stat().st_size:,}: "
                        f"delete it and try again")
    if sha256 and hashlib.sha256(content.read_bytes()).hexdigest() != sha256:
        raise UserError(f"{path} has another SHA-256 than it should: delete it and try again")


def find_source(dataset, data_dir):
    """The file that holds the text: the user's own, or a named data set's, downloaded once."""
    if dataset == "python-docs":
        return Path(pydoc_data.topics.__file__)
    if dataset in DOWNLOADS:
        url = DOWNLOADS[dataset][0]
        path = data_dir / f"{dataset}{Path(url).suffix}"
        download(path, *DOWNLOADS[dataset])
        return path
    if not Path(dataset).is_file():
        raise UserError(f"--dataset={dataset}: no such data set or file, nor a task of this model; "
                        f"{nearest(dataset, ('python-docs', *DOWNLOADS))}")
    return Path(dataset)


def read_splits(dataset, source):
    """{split: text} of a data set that find_source has found."""
    if dataset == "python-docs":
        return python_docs()
    try:
        if source.suffix == ".zip":
            return wikitext(dataset, source)
        text = source.read_bytes().decode("utf-8-sig")  # without some editors' byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error})") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise UserError(f"{source} is not the WikiText archive ({error}): delete it and try again"
                        ) from None
    # About the last tenth is for validation, from the start of a line where there is one.
    cut = len(text) * 9 // 10
    next_line = text.find("\n", cut, (cut + len(text)) // 2) + 1
    cut = next_line or cut
    return {"train": text[:cut], "val": text[cut:]}


def python_docs():
    """English prose that ships with CPython; every tenth of its help topics is held out."""
    texts = {"train": "", "val": ""}
    for i, (_, topic) in enumerate(sorted(pydoc_data.topics.topics.items())):
        split = "val" if i % 10 == 9 else "train"
        texts[split] += topic.strip() + "\n\n"
    return texts


def wikitext(dataset, source):
    """WikiText's own splits, each line a document, empty lines dropped, joined by a blank line
    (arXiv 2606.24898)."""
    texts = {}
    with zipfile.ZipFile(source) as archive:
        for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
            with archive.open(f"{dataset}-raw/wiki.{name}.raw") as f:
                lines = [line.strip() for line in io.TextIOWrapper(f, "utf-8")]
            texts[split] = "".join(line + "\n\n" for line in lines if line)
    return texts


def blocks(text, size=1 << 20):
    """The text in pieces of about `size` characters, each cut before a run of white space: no token
    of any tokenizer here reaches from a non-space into one, so that pieces can be encoded apart.
    (All of WikiText-103 takes a few minutes, once; as one list of Python's ints it takes 5 GB.)"""
    before_space = re.compile(r"\S(?=[ \t\r\n])")
    start = 0
    while start < len(text):
        found = before_space.search(text, start + size)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


# --------------------------------------------------------------------------------------------------
# Tokenizers: encode(text) -> list of int, decode(ids) -> text, `spec` to rebuild them from a
# checkpoint, `eos` (the token that ends a text) and the chat `template`, or None; `ends`, all
# tokens that end an answer.

class Tokenizer:
    """A list of types. char: one token per character, and an unknown one is an error. regex: the
    paper's (arXiv 2606.24898), runs of white space, words, single other characters; an unknown one
    becomes <unk>, and is lost."""
    patterns = {"char": re.compile(r"(?s)."),
                "regex": re.compile(r"\s+|[A-Za-z0-9_]+|[^\w\s]|\w")}  # |\w: beyond ASCII
    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    eos = template = None
    ends = ()

    def __init__(self, name, vocab):
        self.split = self.patterns[name].findall
        self.vocab = vocab
        self.ids = {t: i for i, t in enumerate(vocab)}
        self.vocab_size = len(vocab)
        self.spec = {"name": name, "vocab": vocab}

    def encode(self, text):
        unknown = self.ids.get("<unk>")
        if unknown is None and (missing := self.missing(text)):
            raise UserError(f"these characters are not in the vocabulary: {''.join(missing)!r}")
        return [self.ids.get(t, unknown) for t in self.split(text)]

    def missing(self, text):
        """The types of the text that the vocabulary lacks."""
        return sorted(set(self.split(text)) - set(self.ids))

    def decode(self, ids):
        return "".join(self.vocab[i] for i in ids)


class GPT2Tokenizer:
    """GPT-2's byte-level BPE through tiktoken: 50,257 types, round-trips every text. The package
    openai-whisper holds the file of ranks too, as whisper/assets/gpt2.tiktoken."""
    spec = {"name": "gpt2"}
    vocab_size = 50_257
    eos = 50_256
    ends = (eos,)
    template = None

    def __init__(self, data_dir="data"):
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str
        path = Path(data_dir) / "gpt2.tiktoken"
        download(path, *GPT2_RANKS)
        ranks = {}
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        self.bpe = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                                     special_tokens={"<|endoftext|>": self.eos})

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.bpe.decode(list(ids))


TOKENIZERS = {}  # {name in a spec: class} of an experiment's own, made of the files in its spec


def build_tokenizer(spec, data_dir="data"):
    name = spec["name"]
    if name in TOKENIZERS:
        return TOKENIZERS[name](spec["files"])
    if name == "gpt2":
        return GPT2Tokenizer(data_dir)
    if name not in Tokenizer.patterns:
        raise UserError(f"tokenizer {name!r} is an experiment's, as experiments/state_tracking.py: "
                        f"run that")
    return Tokenizer(name, spec["vocab"])


def fit_tokenizer(name, texts, vocab_size, data_dir):
    """char: every character of every split. regex: the most frequent types of the training split,
    ties alphabetical; those seen once are left out."""
    if name == "gpt2":
        return GPT2Tokenizer(data_dir)
    text = "".join(texts.values()) if name == "char" else texts["train"]
    counts = collections.Counter()
    for block in blocks(text):
        counts.update(Tokenizer.patterns[name].findall(block))
    if name == "char":
        vocab = sorted(counts)
        least = 2
    else:
        frequent = [t for t, n in counts.items() if n >= 2]
        frequent.sort(key=lambda t: (-counts[t], t))
        vocab = (Tokenizer.specials + frequent)[:vocab_size]
        least = 1 + len(Tokenizer.specials)
    if text and len(vocab) < least:
        raise UserError(f"--tokenizer={name}: a vocabulary of {len(vocab)} leaves nothing to "
                        f"learn: take another text, or a --vocab_size of at least {least}")
    return Tokenizer(name, vocab)


def encode_prompt(tokenizer, text):
    """The tokens of a text to continue, with a warning where <unk> stands for some of it."""
    if tokenizer.spec["name"] == "regex" and (missing := tokenizer.missing(text)):
        print(f"warning: read as <unk>, since the training text lacks them: {missing}",
              file=sys.stderr)
    return tokenizer.encode(text)


def sample_token(logits, temperature, top_k, generator):
    """(B, 1) tokens from logits (B, V); the likeliest at temperature 0. top_k 0: from all."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature < 1e-6:  # or the division overflows
        return logits.argmax(-1, keepdim=True)
    if top_k:
        kth_largest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth_largest, -math.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


# A token cache is a folder of SPLIT.bin, the tokens, and tokenizer.json, which is written last.

def encode_block(tokenizer, text):
    return np.array(tokenizer.encode(text), token_dtype(tokenizer))


def token_dtype(tokenizer):
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def cache_digest(cache, spec):
    """The checksum of a token cache: of its tokenizer and of its tokens."""
    digest = hashlib.sha256(json.dumps(spec).encode())
    for path in sorted(cache.glob("*.bin")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_cache(cache):
    """The tokenizer's spec of a token cache, or None where that is not what was written."""
    path = cache / "tokenizer.json"
    if not path.exists():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["sha256"] == cache_digest(cache, saved["spec"]):
            return saved["spec"]
    print(f"{cache} is damaged: built again")
    return None


def build_cache(cache, tokenizer, dataset, texts):
    """Write the tokens of {split: text}, and print how many there are."""
    for split, text in texts.items():
        count = unknown = 0
        with atomic_write(cache / f"{split}.bin") as f:
            for block in blocks(text):
                tokens = encode_block(tokenizer, block)
                f.write(tokens)
                count += len(tokens)
                unknown += np.sum(tokens == Tokenizer.specials.index("<unk>"))
        name = tokenizer.spec["name"]
        share = f", {unknown / count:.1%} unknown" if name == "regex" and count else ""
        print(f"{dataset}, {split}: {count:,} {name} tokens{share}")
    spec = tokenizer.spec
    write_json(cache / "tokenizer.json", {"spec": spec, "sha256": cache_digest(cache, spec)})


def token_cache(options, vocab_size):
    """The tokenizer, {split: memory map of tokens} and the SHA-256 of the text. The tokens are
    built once for a text and a tokenizer, in a folder under data_dir, by one process at a time."""
    data_dir = Path(options.data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    source = find_source(options.dataset, data_dir)
    text_digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    sized = vocab_size if options.tokenizer == "regex" else 0  # the others' size is the text's
    digest = hashlib.sha256(repr((text_digest, sized)).encode()).hexdigest()[:12]
    cache = data_dir / f"{Path(options.dataset).stem}-{options.tokenizer}-{digest}"
    cache.mkdir(exist_ok=True)
    with locked(cache / "cache.lock", "train.bin", "val.bin", "test.bin", "tokenizer.json"):
        spec = read_cache(cache)
        if not spec:
            with waiting_for(f"building the token cache of {options.dataset}"):
                texts = read_splits(options.dataset, source)
                tokenizer = fit_tokenizer(options.tokenizer, texts, vocab_size, data_dir)
                build_cache(cache, tokenizer, options.dataset, texts)
            spec = tokenizer.spec
    tokenizer = build_tokenizer(spec, data_dir)
    tokens = {}
    for path in cache.glob("*.bin"):
        if path.stat().st_size:  # nothing cannot be mapped
            tokens[path.stem] = np.memmap(path, token_dtype(tokenizer), "r")
    return tokenizer, tokens, text_digest


# --------------------------------------------------------------------------------------------------
# Data: a class, made of (options, config), with `options`, `tokenizer`, `vocab_size`, `T` (tokens
# in a window), `steps_per_epoch` and `batch(split, i)`, which gives (idx, targets), each (B, T)
# int64, of a whole step. That may be split into micro-batches and shared out between processes.
# Batch i is a pure function of the seed and i, so that resuming is exact, and of the sequences in a
# step, however they are split. Targets are -1 where there is no loss.

VALIDATION = 2 ** 96 - 1  # in the place of a seed: the validation split is the same at every seed


def stream(options, split, i):
    """The random numbers of batch i of a split."""
    return np.random.default_rng([options.seed if split == "train" else VALIDATION, i])


class TextData:
    """Windows of block_size + 1 tokens from a text's tokens."""

    def __init__(self, options, config):
        self.options = options
        self.T = config.block_size
        self.tokenizer, self.tokens, self.digest = token_cache(options, config.vocab_size)
        self.vocab_size = self.tokenizer.vocab_size
        for split in ("train", "val"):
            n = len(self.tokens.get(split, ()))
            if n <= self.T:
                raise UserError(f"{options.dataset}: its {split} split has {n} tokens and a window "
                                f"takes {self.T + 1}: use a longer text or a smaller --block_size")
        stride = options.stride or self.T
        self.windows = (len(self.tokens["train"]) - 1 - self.T) // stride + 1
        self.steps_per_epoch = self.windows // options.step_rows

    def starts(self, split, i):
        """Where the windows of batch i begin, (B,)."""
        o = self.options
        n = len(self.tokens[split]) - self.T  # places where a window can begin
        if split != "train":  # evenly spread, the same at every evaluation
            spread = np.linspace(0, n - 1, o.eval_batches * o.step_rows).astype(np.int64)
            return spread[i::o.eval_batches]
        if not o.stride:
            return stream(o, split, i).integers(0, n, o.step_rows)
        epoch, i = divmod(i, self.steps_per_epoch)
        windows = self.permutation(epoch)[i * o.step_rows:(i + 1) * o.step_rows]
        return windows * o.stride

    @functools.lru_cache(1)
    def permutation(self, epoch):
        return np.random.default_rng([self.options.seed, 1 << 32, epoch]).permutation(self.windows)

    def batch(self, split, i):
        positions = self.starts(split, i)[:, None] + np.arange(self.T + 1)  # (B, T + 1)
        windows = torch.from_numpy(self.tokens[split][positions].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


def load_data(options, config):
    """The data of `options.dataset`, which then fixes config.vocab_size and config.block_size: a
    text, or a task of the script that the config is of. The script has the task's class in its
    DATA; under "*" one for every other name."""
    tasks = getattr(sys.modules[type(config).__module__], "DATA", {})
    data_class = tasks.get(options.dataset) or tasks.get("*") or TextData
    return data_class(options, config)


def micro_batches(data, split, i):
    """Batch i of a split in grad_accum parts (idx, targets), each cut to its longest sequence where
    their lengths differ."""
    step_idx, step_targets = data.batch(split, i)
    parts = data.options.grad_accum
    for idx, targets in zip(step_idx.chunk(parts), step_targets.chunk(parts)):
        T = idx.shape[1]
        if getattr(data, "ragged", False):
            T = int((targets >= 0).any(0).nonzero().max()) + 1
        yield idx[:, :T], targets[:, :T]


def validation_batches(options, tokenizer, model, n=None):
    """A trained run's data, and on the model's device the first n of the micro-batches on which
    training evaluates, by default all."""
    total = options.eval_batches * options.grad_accum
    n = min(n or total, total)
    print(f"validation split of {options.dataset}, the data that the run names: {n} of the {total} "
          f"batches of an evaluation in training", file=sys.stderr)
    data = load_data(options, model.config)
    if data.tokenizer.spec != tokenizer.spec:
        raise UserError(f"--dataset={options.dataset} now has another vocabulary than the run was "
                        f"trained with")
    device = next(model.parameters()).device
    batches = []
    for i in range(options.eval_batches):
        for idx, targets in micro_batches(data, "val", i):
            if len(batches) < n:
                batches.append((idx.to(device), targets.to(device)))
    return data, batches


# --------------------------------------------------------------------------------------------------
# Cross-entropy of large vocabularies, without keeping the logits.
#
# For one state h, with p = softmax(E h) and the target t, CE = -log p_t, and in closed form
#     dCE/dlogits = p - onehot(t),   dCE/dh = E^T (p - onehot(t)),   dCE/dE = (p - onehot(t)) h^T.
# So a chunk of the states is enough to compute their losses and their gradients at once, after
# which its logits can go. autograd would keep the logits of all of them until the backward pass.

# Logits alive at a time: 16 MB of float32, or 512 MB where each launch of a kernel costs more.
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}


def chunk_length(E):
    """How many states have CHUNK logits together."""
    return max(1, CHUNK.get(E.device.type, 1 << 24) // E.shape[0])


def cross_entropy_chunk(h, E, targets, weights):
    """CE of states (n, D), (n,), and the gradients of (weights * CE).sum() by h and by E (V, D)."""
    logits = h @ E.T  # (n, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - logits.amax(-1, keepdim=True)
    target_logits = logits.gather(-1, targets[:, None])
    exp = logits.clamp_min(-60).exp()  # denormal numbers are slow
    z = exp.sum(-1, keepdim=True)
    ce = (z.log() - target_logits)[:, 0]
    # weights * (p - onehot), the gradient by the logits
    grad_logits = exp * (weights[:, None] / z)
    grad_logits = grad_logits.scatter_add(-1, targets[:, None], -weights[:, None]).to(h.dtype)
    return ce, grad_logits @ E, grad_logits.T @ h


compute_chunk = cross_entropy_chunk  # or its compiled form, as compile_blocks has it


class ChunkedCrossEntropy(torch.autograd.Function):
    """(weights * CE).sum(), and CE. All gradients are computed in the forward pass, chunk by chunk;
    the backward pass only multiplies them with the gradient of the sum."""

    @staticmethod
    def forward(ctx, h, E, targets, weights, dtype):
        n = chunk_length(E)
        low_h = h.to(dtype)
        low_E = E.to(dtype)
        ce = weights.new_empty(len(h))
        grad_h = torch.empty_like(h)
        grad_E = torch.zeros_like(E)
        for i in range(0, len(h), n):
            s = slice(i, i + n)
            ce[s], grad_h[s], chunk_grad_E = compute_chunk(low_h[s], low_E, targets[s], weights[s])
            grad_E += chunk_grad_E
        ctx.save_for_backward(grad_h, grad_E, ce)
        ctx.mark_non_differentiable(ce)
        return (ce * weights).sum(), ce

    @staticmethod
    def backward(ctx, grad, _):
        # create_graph=True. (PyTorch's once_differentiable lets a constant `grad` pass.)
        if torch.is_grad_enabled():
            raise RuntimeError("cross_entropy has no second derivative: its gradient is kept as "
                               "numbers")
        grad_h, grad_E, ce = ctx.saved_tensors
        return grad * grad_h, grad * grad_E, None, grad * ce, None


def cross_entropy(h, E, targets, weights):
    """sum_i weights_i CE(E h_i, target_i), and each state's CE without gradient.

    h (N, D); E (V, D); targets (N,) int64; weights (N,), zero where there is nothing to predict,
    themselves differentiable. The softmax is float32 at least; the matrices are multiplied in
    autocast's dtype.
    """
    device = h.device.type
    weights = weights.to(torch.promote_types(h.dtype, torch.float32))
    if torch.is_grad_enabled():
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else h.dtype
        return ChunkedCrossEntropy.apply(h, E, targets, weights, dtype)
    n = chunk_length(E)
    losses = []
    for i in range(0, len(h), n):
        logits = F.linear(h[i:i + n], E).to(weights.dtype)
        losses.append(F.cross_entropy(logits, targets[i:i + n], reduction="none"))
    ce = torch.cat(losses)
    return (ce * weights).sum(), ce


# --------------------------------------------------------------------------------------------------
# Device and precision

def pick_device(name):
    """'auto' -> cuda, mps or cpu, whichever is there first; UserError for a device that is not."""
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else name
    try:
        one = torch.ones(1, device=name)
        one.item()  # which the device "meta" cannot give back
        return one.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device={name} cannot be used here: {reason}") from None


def start_process(name, world):
    """This process's device, a GPU of its own; it is connected with the others."""
    if world > 1 and torch.cuda.is_available() and name in ("auto", "cuda"):
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    device = pick_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def pick_dtype(name, device):
    """'auto' -> bfloat16 where the hardware multiplies it faster than float32: GPUs that have it,
    CPUs with AVX-512 bf16 or AMX."""
    if name == "auto":
        fast = False
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(False)
        elif device.type == "cpu":
            has = torch.cpu.get_capabilities()
            fast = has.get("avx512_bf16") or has.get("amx_bf16")
        name = "bfloat16" if fast else "float32"
    return getattr(torch, name)


def matmul_peak(device, dtype):
    """FLOP/s of a large square matmul, measured: what MFU is against."""
    n = 8192 if device.type == "cuda" else 2048
    if dtype == torch.bfloat16 and pick_dtype("auto", device) != dtype:
        n = 256  # emulated, a hundred times slower than float32
    # A generator of its own: a run's random numbers are not moved on. Random factors, since a
    # matrix of ones draws less power, and runs faster.
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(n, n, device=device, dtype=dtype, generator=generator)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds)


def peak_memory(device):
    """The most bytes that this process has held so far, on the GPU if it computes there; NaN where
    nobody counts them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # on Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def compile_blocks(model, device, choice):
    """Compile each block in place: one graph serves every layer and any number of loops, and no
    weight is renamed. There are at most four: with and without gradients, of windows of one length
    and, from the second length on, of any."""
    global compute_chunk
    compute_chunk = cross_entropy_chunk
    if choice == "auto":
        size = sum(p.numel() for p in model.parameters())
        pays = device.type == "cuda" or (device.type == "cpu" and size > 10e6)
        choice = "on" if pays else "off"
    if choice == "off":
        return
    torch.compiler.reset()  # all models of a process share PyTorch's limit of 8 graphs a function
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8, device=device))
    except Exception as error:  # no C++ compiler, no Triton: whatever the back end raises
        reason = str(error).strip().splitlines()[0]
        print(f"warning: running without torch.compile ({reason})", file=sys.stderr)
        return
    # Compute what is cheap again in the backward pass: a third of the memory.
    torch._functorch.config.ban_recompute_materialized_backward = False
    if is_main_process():
        print("torch.compile is on: the first evaluation and the first steps wait for it, up to "
              "some minutes", file=sys.stderr)
    for block in model.blocks:
        # Not fullgraph=True, with which a run ends at that limit: so it warns and goes on.
        block.compile()
    compute_chunk = torch.compile(cross_entropy_chunk)


# --------------------------------------------------------------------------------------------------
# Optimiser and schedule

def build_optimizers(model, o):
    """AdamW, decaying matrices only; with --optimizer=muon the matrices of the blocks and of the
    feedback go to Muon."""
    muon, matrices, vectors = [], [], []
    for name, p in model.named_parameters():
        if p.ndim == 2 and name.startswith(("blocks.", "W_")) and o.optimizer == "muon":
            muon.append(p)
        elif p.ndim >= 2:
            matrices.append(p)
        else:
            vectors.append(p)
    groups = [{"params": matrices, "weight_decay": o.weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    optimizers = [torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, o.beta2), fused=True)]
    if muon:
        optimizers.append(torch.optim.Muon(muon, lr=o.muon_lr, weight_decay=o.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def schedule(o, step, max_steps):
    """The share of the peak rate at steps 1 .. max_steps."""
    if step <= o.warmup_steps:
        return step / o.warmup_steps
    if o.schedule == "cosine":
        t = (step - o.warmup_steps - 1) / (max_steps - o.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * t))
    if o.schedule == "wsd":
        return min(1.0, (max_steps - step + 1) / max(o.decay_share * max_steps, 1))
    return 1.0


# --------------------------------------------------------------------------------------------------
# Checkpoints. best.pt: weights, config, tokenizer. ckpt.pt: also all that --resume needs to go on
# bit for bit.

CHECKPOINT = {"model": str, "preset": str, "config": dict, "options": dict, "tokenizer": dict,
              "weights": dict, "step": int, "max_steps": int,
              "best": Annotated[float, -math.inf, math.inf]}  # ckpt.pt has more


@contextlib.contextmanager
def restoring(what):
    """Whatever goes wrong inside, as a file may hold anything, is one line that begins so."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}, {error}"
        raise UserError(f"{what}: {' '.join(reason.split()):.400}") from None


def training_command(name):
    """What trains a model `name`: the driver, or an experiment."""
    if name in MODELS:
        return f"python train.py {name}"
    return f"python experiments/{name}.py train"


def load_checkpoint(path, name=None):
    """The checkpoint dict at `path` (a file, or a run directory's ckpt.pt), if model `name` wrote
    it, or any of them; tensors on the CPU."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    if not path.exists():
        command = training_command(name or MODELS[0])
        if (path.parent / "config.json").exists():  # it was stopped before its first checkpoint
            command += f" {shlex.quote(f'--out_dir={path.parent}')} --resume"
        raise UserError(f"{path}: no such checkpoint; train one with: {command}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes checksums, and does not look at them
            if damaged := archive.testzip():
                raise ValueError(damaged)
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        found = ckpt["model"]
    except Exception as error:  # of pickle, zip, torch: truncated, foreign, or with objects inside
        raise UserError(f"{path} is not a checkpoint of this project, or is damaged "
                        f"({type(error).__name__})") from None
    if name not in (None, found):
        raise UserError(f"{path} is a checkpoint of {found}, not of {name}")
    with restoring(f"{path} does not fit {found}.py as it is now"):
        for key, kind in CHECKPOINT.items():
            check_value(key, ckpt[key], kind)
        for key, weight in ckpt["weights"].items():
            check_value(key, weight, torch.Tensor)
    return ckpt


def load_model(path, module, model_class):
    """A trained model in eval mode, its Options and its tokenizer, of a run or a checkpoint."""
    return restore_model(load_checkpoint(path, module), path, module, model_class)


def restore_model(ckpt, path, module, model_class):
    """What load_model gives, from the checkpoint that was read from path."""
    with restoring(f"{path} does not fit {module}.py as it is now"):
        options = Options(**ckpt["options"] | {"data_dir": DATA_DIR})
        config = sys.modules[model_class.__module__].Config(**ckpt["config"])
        model = model_class(config)
        model.load_state_dict(ckpt["weights"])
        tokenizer = build_tokenizer(ckpt["tokenizer"], options.data_dir)
        tokenizer.decode(list(range(config.vocab_size)))  # every token that the model may give
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(f"its tokenizer has {tokenizer.vocab_size:,} types, its model "
                             f"{config.vocab_size:,}")
    return model.to(pick_device("auto")).eval(), options, tokenizer


def save_training(run, name):
    """Write best.pt or ckpt.pt. All processes must call it, since each has random numbers."""
    state = run.record | {
        "given": run.record["config"],  # what was asked for
        "config": vars(run.config),  # with the sizes that the data have
        "step": run.step,
        "tokenizer": run.data.tokenizer.spec,
        "text": getattr(run.data, "digest", None),
        "max_steps": run.max_steps,
        "best": run.best,
        "weights": run.model.state_dict(),
    }
    if name == "ckpt.pt":
        rng = [torch.get_rng_state(), None]
        if run.device.type == "cuda":
            rng[1] = torch.cuda.get_rng_state(run.device)
        every_rng = [rng] * run.world
        if run.world > 1:
            dist.all_gather_object(every_rng, rng)
        state["optimizers"] = [optimizer.state_dict() for optimizer in run.optimizers]
        state["tokens"] = run.tokens
        state["rng"] = every_rng
    if not run.is_main_process:
        return
    with atomic_write(run.out / name) as f:
        try:
            torch.save(state, f)
        except RuntimeError as error:  # torch's own, which hides the disk's
            reason = error.__context__ or str(error).splitlines()[0]
            raise OSError(f"{run.out / name} cannot be written: {reason}") from None


def load_training(run):
    """Go on from ckpt.pt: everything that save_training put there, and the rows of log.csv."""
    ckpt = load_checkpoint(run.out, run.name)
    with restoring(f"{run.out}/ckpt.pt does not fit {run.name}.py and these options; resume it as "
                   f"it was, or choose another --out_dir"):
        check_same_training(run, ckpt)
        run.model.load_state_dict(ckpt["weights"])
        for optimizer, state in zip(run.optimizers, ckpt["optimizers"], strict=True):
            load_optimizer(optimizer, state)
        check_value("tokens", ckpt["tokens"], Seed)
        run.step = ckpt["step"]
        run.tokens = ckpt["tokens"]
        sizes = ("batch_size", "grad_accum", "eval_batches")
        if all(ckpt["options"][size] == getattr(run.options, size) for size in sizes):
            run.best = ckpt["best"]  # else of other validation windows, which tell nothing of these
        load_random_state(run, ckpt["rng"])
        was = ckpt["optimizers"][0]["param_groups"][0]["lr"]
        now = run.options.lr * schedule(run.options, run.step, run.max_steps)
        if was != now:
            run.say(f"warning: the learning rate of step {run.step} was {was:.2g} there and is "
                    f"{now:.2g} here: it goes on from that")
    load_log(run)
    run.say(f"resuming after step {run.step}")


def check_same_training(run, ckpt):
    """ValueError unless model, optimizer, text and tokenizer are those of the checkpoint."""
    text = getattr(run.data, "digest", None)
    here = vars(run.config) | {"optimizer": run.options.optimizer, "text": text}
    saved = type(run.config)(**ckpt["config"])  # a field that is new since has its default
    there = vars(saved) | {"optimizer": ckpt["options"]["optimizer"],
                           "text": ckpt.get("text", text)}
    changed = []
    for field, value in here.items():
        if there[field] != value:
            changed.append(f"{field}: {there[field]} there, {value} here")
    if changed:
        raise ValueError("; ".join(changed))
    if ckpt["tokenizer"] != run.data.tokenizer.spec:
        raise ValueError("another tokenizer")
    if ckpt["step"] > run.max_steps:
        raise ValueError(f"step {ckpt['step']} there, --max_steps={run.max_steps} here")


def load_optimizer(optimizer, state):
    """The saved moments; but rates and decay are those of the command line now."""
    optimizer.load_state_dict(state | {"param_groups": optimizer.state_dict()["param_groups"]})
    shapes = []
    for p, moments in optimizer.state.items():
        for moment in moments.values():
            if moment.ndim:  # not the number of steps
                shapes.append((moment.shape, p.shape))
    keeps_moments = optimizer.defaults.get("momentum") != 0  # plain SGD has none
    if keeps_moments and not shapes or any(moment != p for moment, p in shapes):
        raise ValueError("the optimizer's state is of another model")


def load_random_state(run, every_rng):
    """This process's random numbers, of [[CPU's, CUDA's or None] for each process]."""
    if run.rank < len(every_rng):
        cpu, cuda = every_rng[run.rank]
        torch.set_rng_state(cpu)
        if cuda is not None and run.device.type == "cuda":
            torch.cuda.set_rng_state(cuda, run.device)
    if len(every_rng) != run.world:
        run.say(f"warning: {len(every_rng)} processes there, {run.world} here: random numbers, as "
                f"dropout's, go on otherwise than they would have")


# --------------------------------------------------------------------------------------------------
# log.csv, the lines that are printed, and curves.png

LOGGERS = []  # functions of a row of log.csv, a dict: LOGGERS.append(wandb.log) sends all to W&B


@contextlib.contextmanager
def waiting_for(what):
    """Say what a wait is for, once it has taken 10 seconds."""
    timer = threading.Timer(10, print, [f"{what} .."], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if is_main_process():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


SIGPIPE = 13  # where there is one: nobody reads our output


def mute():
    """Print nothing from now on, since nobody can read it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Interrupts:
    """Ctrl-C, SIGTERM, a terminal or a reader that is gone: each asks the run to stop after this
    step, which saves it."""

    def __init__(self):
        self.asked = 0  # the signal that asked
        self.speaking = False  # whether a line is being printed
        self.old = {}  # the handlers to go back to

    def listen(self):
        if threading.current_thread() is not threading.main_thread():  # no signals elsewhere
            return
        signals = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signals.append(signal.SIGHUP)  # nohup ignores it, and so do we then
        for number in signals:
            self.old[number] = signal.signal(number, self.handle)

    def close(self):
        for number, handler in self.old.items():
            signal.signal(number, handler)
        self.old = {}

    def handle(self, number, frame):
        """The first signal asks to stop after this step; the second stops at once, unsaved."""
        if self.asked and not self.speaking:
            raise KeyboardInterrupt
        self.asked = self.asked or number
        if self.speaking:  # perhaps into a pipe that nobody empties: give that line up
            raise BlockingIOError
        if sys.stdout.isatty():
            self.say(" stopping: saving first (again: at once, keeping the last checkpoint)")

    def say(self, text):
        """Print a line. Where nobody can read it, as in `| head`, that asks to stop as well."""
        self.speaking = True
        try:
            print(text, flush=True)
        except OSError:
            self.asked = self.asked or SIGPIPE
            mute()
        self.speaking = False


class Log:
    """The clock between two rows of log.csv, and the line that each row is printed as."""

    def __init__(self, show, curves):
        self.show = show  # the script's own quantities in the line
        self.curves = curves  # and the panels of its curves.png

    def start_clock(self, step, tokens):
        """From here on speed is measured."""
        self.started = step, tokens, time.perf_counter()

    def speed(self, step, tokens):
        """(seconds per step, tokens per second) since the clock was started."""
        first_step, first_tokens, start = self.started
        seconds = time.perf_counter() - start
        return seconds / (step - first_step), (tokens - first_tokens) / seconds

    def line(self, row, max_steps, seconds_left):
        shown = [name for name in self.show if name in row]
        line = f"step {row['step']:>6}/{max_steps}"
        if "train_loss" in row:
            line += f"  loss {row['train_loss']:.4f}"
            line += "".join(f"  {name} {row[name]:.3g}" for name in shown if "val_" not in name)
            line += f"  {row['tokens_per_sec']:,.0f} tok/s"
            line += f"  mfu {row['mfu']:.1%}" if "mfu" in row else ""
            line += f"  {seconds_left // 60}:{seconds_left % 60:02} left"
        if "val_loss" in row:
            line += f"  val {row['val_loss']:.4f}"
            line += "".join(f"  {name} {row[name]:.4g}" for name in shown if "val_" in name)
        return line


def load_log(run):
    """The rows of log.csv up to the step that the run resumes after. Where they cannot be read, as
    after a spreadsheet has saved them, a new log.csv begins."""
    path = run.out / "log.csv"
    rows = []
    for row in read_csv(path):
        has_words = any(isinstance(value, str) for value in row.values())
        if "step" in row and not has_words and row["step"] <= run.step:
            rows.append(row)
    if rows and rows[-1]["step"] == run.step:
        run.rows = rows
    elif run.is_main_process and path.exists():
        os.replace(path, path.with_name("log.csv.old"))
        run.say(f"warning: {path} is damaged: kept as log.csv.old, and a new one begins")


def draw_curves(run):
    """curves.png: a panel for each (label, scale of y, columns of log.csv) of the script's CURVES
    of which something was logged."""
    logged = set().union(*run.rows)
    panels = [panel for panel in run.log.curves if logged & set(panel[2])]
    figure, axes = new_figure(len(panels))
    for axis, (label, scale, names) in zip(axes, panels):
        late = []  # the values after the first twentieth, which may start far above the rest
        for name in names:
            points = [(row["step"], row[name]) for row in run.rows if name in row]
            style = "o-" if name.startswith("val_") else "-"
            axis.plot(*zip(*points), style, markersize=3, alpha=0.8, label=name)
            late += [value for step, value in points if step >= run.max_steps / 20]
        if scale == "linear" and late:
            margin = 0.05 * (max(late) - min(late)) or 0.05
            axis.set_ylim(min(late) - margin, max(late) + margin)
        axis.set(xlabel="step", ylabel=label, yscale=scale, xlim=(0, run.max_steps))
        axis.legend()
    figure.suptitle(f"{run.name}-{run.preset}")
    figure.savefig(run.out / "curves.png", dpi=120)


def new_figure(panels):
    """A matplotlib figure with a row of panels; nothing opens on the screen."""
    from matplotlib.figure import Figure  # here, since it costs most of a second
    figure = Figure((5 * panels, 3.6), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def perplexity(ce):
    """exp of a cross-entropy in nats; inf where a float overflows."""
    return math.exp(ce) if ce < 700 else math.inf


# --------------------------------------------------------------------------------------------------
# The run

def is_main_process():
    """Whether this process prints and writes; torchrun numbers its processes by RANK."""
    return os.environ.get("RANK", "0") == "0"


def own_part(run, batch):
    """This process's part of a batch (idx, targets): every world-th sequence."""
    parts = [t[run.rank::run.world] for t in batch]
    if run.device.type == "cuda":  # pinned, so that the copy runs beside the computation
        return [t.pin_memory().to(run.device, non_blocking=True) for t in parts]
    return [t.to(run.device) for t in parts]


def average(tensors, world):
    """Replace each tensor by its mean over the processes."""
    if world == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= world
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view_as(tensor))


def share_out(run, split, indices):
    """(idx, targets, num_targets) for every micro-batch of some batches of a split: this process's
    part, and what the sum over its targets is divided by, so that the mean over micro-batches and
    processes is that over all targets."""
    parts = [part for i in indices for part in micro_batches(run.data, split, i)]
    total = sum(int((targets >= 0).sum()) for _, targets in parts)
    num_targets = total / len(parts) / run.world
    for part in parts:
        idx, targets = own_part(run, part)
        yield idx, targets, num_targets


class Run:
    """One training run; `prepare` to `finish` stand in the order in which a script calls them."""

    def __init__(self, name, preset, config, options, show, curves):
        self.name = name
        self.preset = preset
        self.options = options
        self.out = Path(options.out_dir)
        self.record = {"model": name, "preset": preset, "config": vars(config),
                       "options": vars(options)}  # config.json
        self.model = None
        self.step = 0  # optimiser steps so far, the one in progress included
        self.tokens = 0  # that they have seen, of all processes
        self.best = math.inf  # validation loss
        self.rows = []  # of log.csv
        self.log = Log(show, curves)
        self.interrupts = Interrupts()
        self.rank = int(os.environ.get("RANK", 0))  # both set by torchrun
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main_process = is_main_process()
        if options.batch_size % self.world:
            raise UserError(f"--batch_size={options.batch_size} cannot be shared by {self.world} "
                            f"processes")
        self.device = start_process(options.device, self.world)
        self.dtype = pick_dtype(options.dtype, self.device)
        for turn in (True, False):  # the main process builds the token cache, the others find it
            if self.is_main_process == turn:
                self.data = load_data(options, config)
            if self.world > 1:
                dist.barrier()
        self.config = dataclasses.replace(config, vocab_size=self.data.vocab_size,
                                          block_size=self.data.T)
        steps_per_epoch = self.data.steps_per_epoch
        self.max_steps = options.max_steps or options.epochs * steps_per_epoch
        if not self.max_steps or (options.stride and not steps_per_epoch):
            raise UserError(f"{options.dataset} has not one step of {options.batch_size} x "
                            f"{options.grad_accum} windows")
        torch.manual_seed(options.seed)

    @property
    def resumes(self):
        """Whether it goes on from a checkpoint, weights included."""
        return self.options.resume and (self.out / "ckpt.pt").exists()

    def prepare(self, model):
        """The model on its device, compiled, with optimisers; with --resume, as it was saved."""
        check_value("--max_steps", self.max_steps, int)  # however many epochs come to
        self.model = model.to(self.device)
        self.optimizers = build_optimizers(model, self.options)
        self.bad_step = torch.zeros((), device=self.device)  # the first that was not finite
        self.peak = None  # FLOP/s of the GPUs
        if self.rank:
            torch.manual_seed(self.options.seed + self.rank)  # dropout differs between processes
        prepare_directory(self)
        compile_blocks(model, self.device, self.options.compile)
        size = sum(p.numel() for p in model.parameters())
        line = (f"{self.name}-{self.preset} on {self.options.dataset}: {size / 1e6:.2f}M "
                f"parameters, {self.device}, {str(self.dtype)[6:]}, into {self.out}")
        if self.device.type == "cuda":  # a CPU is shared with others: no peak, and so no MFU
            self.peak = matmul_peak(self.device, self.dtype) * self.world
            line += f", matmul peak {self.peak / 1e12:.2f} TFLOP/s"
        self.say(line)
        self.interrupts.listen()
        self.log.start_clock(self.step, self.tokens)
        if not self.rows:  # at the start, or where log.csv is gone
            self.say(log_step(self, validate=True))
        return model

    def begin_step(self):
        """Count the step and set its learning rate."""
        self.step += 1
        share = schedule(self.options, self.step, self.max_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * share
        self.loss = 0.0
        self.metrics = {}

    def micro_batches(self):
        """(idx, targets, num_targets) for each of the step's micro-batches: see share_out."""
        for idx, targets, num_targets in share_out(self, "train", [self.step - 1]):
            self.tokens += idx.numel() * self.world
            yield idx, targets, num_targets

    def autocast(self):
        """bfloat16 where the hardware is fast at it, or what --dtype says."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=enabled)

    def backward(self, loss, metrics):
        """Add the gradients of this micro-batch's part of the step's loss."""
        part = 1 / self.options.grad_accum
        (loss * part).backward()
        self.loss = self.loss + loss.detach() * part
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value.detach() * part

    def average_gradients(self):
        """Over the processes of torchrun. A loop's gradients are ready only now: no overlap."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        average(gradients, self.world)

    def optimizer_step(self, grad_norm):
        """Update the weights; note a loss that is not finite, as to look would wait for the GPU."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        is_first_bad = ~torch.isfinite(self.loss + grad_norm) & (self.bad_step == 0)
        this_step = torch.full_like(self.bad_step, self.step)
        self.bad_step = torch.where(is_first_bad, this_step, self.bad_step)

    def end_step(self):
        """Log, evaluate and save, each at its interval; save and exit if the run is to stop."""
        stop = self.asked_to_stop()
        validate = self.step == self.max_steps or self.step % self.options.eval_interval == 0
        line = ""
        if validate or stop or self.step % self.options.log_interval == 0:
            line = log_step(self, validate)
        if validate or stop:
            save_training(self, "ckpt.pt")
            self.log.start_clock(self.step, self.tokens)
            stop = self.asked_to_stop()  # during the evaluation
        self.say(line)  # last, since nobody may be there to read it
        if stop:
            self.finish()

    def finish(self):
        """Draw curves.png. A run that was asked to stop ends here."""
        self.interrupts.close()
        if self.is_main_process:
            draw_curves(self)
        if self.interrupts.asked or self.step < self.max_steps:
            where = [f"--out_dir={self.out}"]
            if self.options.data_dir != Options.data_dir:
                where.append(f"--data_dir={self.options.data_dir}")
            command = f"{training_command(self.name)} {shlex.join(where)} --resume"
            self.say(f"stopped after step {self.step}, saved; go on with: {command}")
            sys.exit(128 + (self.interrupts.asked or signal.SIGTERM))

    def say(self, text):
        """Print a line, in the main process only."""
        if self.is_main_process and text:
            self.interrupts.say(text)

    def asked_to_stop(self):
        """Whether any of the processes was."""
        asked = torch.tensor(float(self.interrupts.asked))  # on the CPU: no wait for the device
        return self.mean(asked) > 0

    def mean(self, value):
        """A scalar tensor, averaged over the processes, as a float."""
        value = value.detach().clone()
        average([value], self.world)
        return float(value)


@torch.no_grad()
def evaluate(run):
    """Mean loss, over targets, and metrics of the validation windows, as val_* columns; without
    autocast, so that a report on the run finds the same numbers."""
    o = run.options
    run.model.eval()
    totals = collections.Counter()
    for idx, targets, num_targets in share_out(run, "val", range(o.eval_batches)):
        loss, metrics = run.model.loss(idx, targets, num_targets=num_targets)
        for name, value in {"loss": loss, **metrics}.items():
            totals[f"val_{name}"] += run.mean(value) / (o.eval_batches * o.grad_accum)
    run.model.train()
    return dict(totals)


def prepare_directory(run):
    """Load what the run resumes from, or delete what it overwrites; write config.json."""
    if run.resumes:
        load_training(run)
    elif run.options.overwrite and run.is_main_process:
        for name in RUN_FILES:
            (run.out / name).unlink(missing_ok=True)
    # Only now: a run that cannot be resumed so, or that is finished, keeps its own.
    path = run.out / "config.json"
    if run.is_main_process and (run.step < run.max_steps or not path.exists()):
        write_json(path, run.record)


def log_step(run, validate):
    """Add a row to log.csv, with an evaluation if `validate`; return it as a line. UserError if a
    loss or a gradient was not finite."""
    check_finite(run)
    row = {"step": run.step, "tokens": run.tokens}
    seconds_left = None
    first_step, *_ = run.log.started
    if run.step > first_step:
        seconds_per_step, tokens_per_sec = run.log.speed(run.step, run.tokens)
        seconds_left = int((run.max_steps - run.step) * seconds_per_step)
        row["train_loss"] = run.mean(run.loss)
        for name, value in run.metrics.items():
            row[name] = run.mean(value)
        row["lr"] = run.optimizers[0].param_groups[0]["lr"]
        row["tokens_per_sec"] = tokens_per_sec
        if run.peak:
            row["mfu"] = run.model.flops_per_token() * tokens_per_sec / run.peak
    if validate:
        with waiting_for("evaluating"):
            row |= evaluate(run)
    run.rows.append(row)
    if run.is_main_process:
        write_csv(run.out / "log.csv", run.rows)
        for log in LOGGERS:
            log(row)
        if validate and row["val_loss"] < run.best:
            run.best = row["val_loss"]
            save_training(run, "best.pt")
    run.log.start_clock(run.step, run.tokens)
    return run.log.line(row, run.max_steps, seconds_left)


def check_finite(run):
    """UserError if the loss or a gradient of any step so far was not finite."""
    step = int(run.bad_step)
    if step == 0:
        return
    advice = "try a lower --lr" if step > 1 else "no update was made before, so it is not --lr"
    if (run.out / "ckpt.pt").exists():
        advice += f"; {run.out} keeps its last good checkpoint"
    raise UserError(f"the loss or its gradient was not finite at step {step}: {advice}")


# --------------------------------------------------------------------------------------------------
# Starting a run. `overrides`: {field: value}, what the user has set.

def read_config(out, name):
    """What config.json of a run directory holds or, where that is gone or damaged, what its
    checkpoint does. None where there is neither."""
    path = out / "config.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        saved = json.loads(path.read_text(encoding="utf-8-sig"))
        saved = {key: saved[key] for key in ("model", "preset", "config", "options")}
        for key, value in saved.items():
            check_value(key, value, CHECKPOINT[key])
        return saved
    if (out / "ckpt.pt").exists():
        ckpt = load_checkpoint(out, name)
        config = ckpt.get("given", ckpt["config"])
        check_value("given", config, dict)
        return {"model": name, "preset": ckpt["preset"], "config": config,
                "options": ckpt["options"]}
    if path.exists():
        raise UserError(f"{path} is damaged, and there is no checkpoint to take its place: add "
                        f"--overwrite to start again, or choose another --out_dir")
    return None


def launch(name, module, preset, overrides):
    """Train one run: the preset's fields under the overrides; with resume, the saved run's."""
    default = next(iter(module.PRESETS))
    out = Path(overrides.get("out_dir") or f"out/{name}-{preset or default}")
    if overrides.get("resume") and overrides.get("overwrite"):
        raise UserError("--resume and --overwrite: choose one")
    if not overrides.get("resume"):
        out.mkdir(parents=True, exist_ok=True)
    lock = contextlib.nullcontext()
    if is_main_process():
        lock = locked(out / "run.lock", *RUN_FILES, wait=False)
    with lock:
        if overrides.get("resume"):
            preset, fields = saved_fields(out, name, preset)
        else:
            if not overrides.get("overwrite"):
                refuse_a_run(out)
            preset = preset or default
            fields = module.PRESETS[preset]
        fields = fields | overrides | {"out_dir": str(out)}
        config, options = split_fields(fields, module.Config, Options)
        run = Run(name, preset, module.Config(**config), Options(**options), module.SHOW,
                  module.CURVES)
        try:
            module.train_model(run)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise UserError(f"out of memory: {memory_advice(run)}") from None
        finally:
            run.interrupts.close()


def saved_fields(out, name, preset):
    """The preset and the fields of the run in `out`, which is to be of model `name`."""
    saved = read_config(out, name)
    if not saved:
        raise UserError(f"{out} holds no run to resume: neither config.json nor ckpt.pt is there")
    if saved["model"] != name or preset not in (None, saved["preset"]):
        wanted = f"{name}-{preset}" if preset else name
        raise UserError(f"{out} holds a run of {saved['model']}-{saved['preset']}, not of {wanted}")
    fields = saved["config"] | saved["options"]
    # But not its data_dir, which may be of another machine, or somebody else's.
    return saved["preset"], fields | {"overwrite": False, "data_dir": Options.data_dir}


def refuse_a_run(out):
    for file in RUN_FILES:
        if (out / file).exists():
            raise UserError(f"{out} already holds a run ({file}): add --resume to go on with it, "
                            f"--overwrite to start again, or choose another --out_dir")


def memory_advice(run):
    if run.model is None or run.options.batch_size == run.world:
        return ("the model is too large for it: lower --n_embd, --n_layer, --vocab_size or "
                "--block_size")
    return "halve --batch_size and double --grad_accum, which trains the same"


def out_of_memory(error):
    """Whether this is CUDA's, Python's, a Mac's or torch's way to say that memory is short."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "out of memory" in str(error) or "allocate memory" in str(error)


def training_parser(usage, module):
    """A Parser for --preset and for every field of a script's Config and of Options. The help shows
    the values of the first preset, which is the default."""
    default = next(iter(module.PRESETS))
    out_dir = f"out/{Path(module.__file__).stem}-{default}"
    lines = ["presets, the first by default, and what they set:"]
    for name, fields in module.PRESETS.items():
        lines.append(f"  {name}: " + " ".join(f"--{k}={v}" for k, v in fields.items()))
    epilog = "\n".join(lines).replace("%", "%%")
    parser = Parser(usage, module.Config, Options, epilog=epilog,
                    values=module.PRESETS[default] | {"out_dir": out_dir})
    parser.add_argument("--preset", choices=module.PRESETS,
                        help=f"a set of values, listed at the end [{default}]")
    return parser


def main(argv):
    usage = "python train.py MODEL [--preset=NAME] [--field=value ...]"
    if not argv or argv[0] in ("-h", "--help"):
        usage += (f"\nMODEL is one of {', '.join(MODELS)}; python train.py MODEL --help adds its "
                  f"own fields.")
        return Parser(usage, Options).print_help()
    name, *argv = argv
    if name not in MODELS:
        raise UserError(f"{name!r}: no such model; {nearest(name, MODELS)}")
    module = importlib.import_module(name)
    overrides = training_parser(usage, module).parse(argv)
    preset = overrides.pop("preset")
    launch(name, module, preset, overrides)


def command_line(function):
    """Call function(arguments); a UserError becomes one line and exit status 1."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))
    sys.stdout.reconfigure(errors="replace")  # a console or file that cannot show every character
    try:
        function(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as behind `| head`
        mute()
        sys.exit(128 + SIGPIPE)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        sys.exit("error: out of memory: ask for fewer loops or passes, a shorter text, or a lower "
                 "--eval_rows")


if __name__ == "__main__":
    import train  # the module that the scripts import, not a second copy called __main__
    train.command_line(train.main)
