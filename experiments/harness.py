"""EleutherAI's lm-evaluation-harness for the models here that have a tokenizer for it.

    pip install -r experiments/requirements.txt
    python experiments/harness.py RUN --eval=lambada_openai --loops=1,2,3,4      # of looped_gpt
    python experiments/harness.py RUN --eval=gsm8k --mode=standard,soft,fused    # of fullbandwidth
    python experiments/harness.py RUN --eval=gsm8k,minerva_math500 --loops=4,8   # of ouro
    python experiments/harness.py DIRECTORY --eval=gsm8k --loops=4,8             # of Ouro's files
    python experiments/harness.py RUN --eval=PATH.yaml                           # a task of yours

Which script's model it is stands in the checkpoint. Results: a table for each setting, and
eval.json beside the run. Decoding is greedy: a task that samples, searches with beams or runs what
the model wrote is refused.

In the order below: the models, each as `score` and `generate`; greedy decoding with a KV cache; a
model as the harness sees it; the tasks; the command line.
"""
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from train import Count, Size, UserError, check_fields

try:
    from lm_eval import simple_evaluate, tasks
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (maybe_truncate, normalize_gen_kwargs,
                                      postprocess_generated_text)
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError:
    sys.exit("error: this needs the package lm-eval: pip install --upgrade lm-eval")


# --------------------------------------------------------------------------------------------------
# The models, each under one setting. score(idx (B, T), n): logits (B, T - n + 1, V) at positions
# n - 1 ..; generate(prompts, limits, stop): greedy continuations of at most limits[i] tokens, up to
# the first token of `stop`. Prompts and continuations are lists of tokens.

def device_of(model):
    return next(model.parameters()).device


class Looped:
    """A looped model that exits after num_loops loops. Below it, one class for each script, with
    states(idx (B, T), cache, start) -> (B, T, D) and readout(h) -> logits."""

    def __init__(self, model, num_loops):
        self.model, self.num_loops = model, num_loops

    def new_cache(self, B, S):
        """Room for the keys and values of S tokens."""
        return self.model.new_cache(B, S, self.num_loops)

    def score(self, idx, n):
        states = self.states(idx.to(device_of(self.model)))
        return self.readout(states[:, n - 1:])

    def generate(self, prompts, limits, stop):
        return decode(self, prompts, limits, stop)


class LoopedGPT(Looped):
    def states(self, idx, cache=None, start=0):
        return self.model.states(idx, self.num_loops, cache=cache, start=start)[-1]

    def readout(self, h):
        return self.model.readout(h, final=self.num_loops >= self.model.config.num_loops)


class Ouro(Looped):
    def states(self, idx, cache=None, start=0):
        return self.model.final(idx, self.num_loops, cache, start)

    def readout(self, h):
        return self.model.readout(h)


class FullBandwidth:
    """Under one decoding mode, log-likelihoods too: those of soft and fused read the continuation
    token by token, each fused with the state before it."""

    def __init__(self, model, mode, prefill_passes):
        if mode != "standard":
            model.need_feedback(f"--mode={mode}")
        self.model, self.mode, self.prefill_passes = model, mode, prefill_passes

    def score(self, idx, n):
        idx = idx.to(device_of(self.model))
        prompt_length = idx.shape[1] if self.mode == "standard" else n
        fused_passes = self.prefill_passes if self.mode == "fused" else 0
        h = self.model.recurrent(idx, prompt_length, fused_passes)
        return self.model.readout(h[:, n - 1:])

    def generate(self, prompts, limits, stop):
        return self.model.generate(prompts, max(limits), self.mode, self.prefill_passes,
                                   temperature=0, stop=stop)


def load(path):
    """(name of the script, model, tokenizer) of a run, or of a directory of Ouro's files."""
    if (Path(path) / "tokenizer.json").exists():
        from experiments import ouro
        model, _, tokenizer = ouro.load(path)
        return "ouro", model, tokenizer
    ckpt = train.load_checkpoint(path)
    name = ckpt["model"]
    if name == "looped_gpt":
        import looped_gpt
        model, _, tokenizer = train.restore_model(ckpt, path, name, looped_gpt.LoopedGPT)
    elif name == "fullbandwidth":
        import fullbandwidth
        model, _, tokenizer = fullbandwidth.load_model(path)
    elif name == "ouro":
        from experiments import ouro
        model, _, tokenizer = train.restore_model(ckpt, path, name, ouro.Ouro)
    else:
        raise UserError(f"{path}: a model of {name}.py has no tokenizer for the harness's tasks")
    return name, model, tokenizer


def settings(name, model, arguments):
    """{label: the model under a setting that the arguments ask for}."""
    if name == "fullbandwidth":
        if arguments.loops is not None:
            raise UserError("--loops: a model of fullbandwidth.py has no loops; choose --mode")
        modes = (arguments.mode or "standard").split(",")
        for mode in modes:
            if mode not in ("standard", "soft", "fused"):
                raise UserError(f"--mode={mode}: choose from standard, soft, fused")
        passes = arguments.prefill_passes or 1
        return {mode: FullBandwidth(model, mode, passes) for mode in modes}
    if arguments.mode is not None or arguments.prefill_passes is not None:
        raise UserError(f"--mode and --prefill_passes are fullbandwidth.py's: a model of {name}.py "
                        f"is decoded in one way; choose --loops")
    looped = {"looped_gpt": LoopedGPT, "ouro": Ouro}[name]
    loops = train.loop_counts(arguments.loops) or [model.config.num_loops]
    return {f"loops={n}": looped(model, n) for n in loops}


@torch.no_grad()
def decode(model, prompts, limits, stop):
    """Greedy continuations of prompts, lists of tokens, by a Looped model with a KV cache: each of
    up to limits[i] tokens and up to the first token of `stop`.

    Rows of several lengths need no padding and no mask: all start at the shortest one's length, and
    a row takes its own tokens while it has some left.
    """
    def unfinished(i):
        return len(new[i]) < limits[i] and not (new[i] and new[i][-1] in stop)

    new = [[] for _ in prompts]
    cache = model.new_cache(len(prompts), max(len(p) + n for p, n in zip(prompts, limits)))
    shortest = min(len(prompt) for prompt in prompts)
    idx = torch.tensor([prompt[:shortest] for prompt in prompts], device=cache.device)
    length = 0  # how many tokens are in the cache
    while any(unfinished(i) for i in range(len(prompts))):
        h = model.states(idx, cache, length)[:, -1]  # (B, D)
        length += idx.shape[1]
        tokens = model.readout(h).argmax(-1).tolist()
        for i, prompt in enumerate(prompts):
            if length < len(prompt):
                tokens[i] = prompt[length]
            elif unfinished(i):
                new[i].append(tokens[i])
        idx = torch.tensor(tokens, device=cache.device)[:, None]  # (B, 1)
    return new


# --------------------------------------------------------------------------------------------------
# A model as the harness sees it

def greedy_settings(generation_kwargs, task="a task"):
    """(most new tokens, texts to stop at) of a task's generation_kwargs. UserError where it asks
    for what greedy decoding is not: sampling, beams and the like."""
    wanted = normalize_gen_kwargs(generation_kwargs)
    limit, until = wanted.pop("max_gen_toks"), wanted.pop("until")
    if not wanted["do_sample"] or wanted.get("temperature") == 0:  # then these have no effect
        for name in ("do_sample", "temperature", "top_p", "top_k", "min_p"):
            wanted.pop(name, None)
    if wanted.get("num_beams") == 1:
        wanted.pop("num_beams")
    if wanted:
        raise UserError(f"--eval: {task} asks for {wanted}, but decoding here is greedy: choose "
                        f"another task, or copy its .yaml without it")
    if limit < 1:
        raise UserError(f"--eval: {task} asks for answers of {limit} tokens")
    return limit, tuple(text for text in until if text)


def batches(items, size, key, length):
    """(key, items) of at most `size` items that have this key, and similar lengths."""
    ordered = sorted(items, key=lambda item: (key(item), length(item)))
    for value, group in itertools.groupby(ordered, key):
        group = list(group)
        for i in range(0, len(group), size):
            yield value, group[i:i + size]


class ToScore(NamedTuple):
    request: int  # which of the requests it is
    tokens: list  # context and continuation
    n: int  # tokens of the context


class ToAnswer(NamedTuple):
    request: int
    prompt: list
    room: int  # most tokens of the answer that the window leaves
    limit: int  # and that the task wants
    until: tuple  # texts to stop at


class Adapter(TemplateLM):
    """`model` has score and generate, as above. Batches for `score` have contexts of one length, so
    that n is one number, and are padded at their ends, where causal attention cannot look; so no
    result depends on its batch."""
    tokenizer_name = "its own"

    def __init__(self, tokenizer, block_size, model, eval_rows):
        super().__init__()
        self.own_tokenizer = tokenizer  # TemplateLM's `tokenizer` is one of transformers
        self.block_size = block_size
        self.model = model
        self.eval_rows = eval_rows
        self.stop_tokens_of = {}  # {texts to stop at: tokens}, since finding them takes a while
        self.cut = 0  # how many contexts lost their beginning, or answers their end, to fit
        self.unknown = set()  # types that were read as <unk>

    @property
    def eot_token_id(self):
        return self.own_tokenizer.eos

    @property
    def prefix_token_id(self):
        """What stands before a text without a context."""
        if self.own_tokenizer.eos is None:
            return self.tok_encode("\n")[0]
        return self.own_tokenizer.eos

    def tok_encode(self, string, add_special_tokens=None):
        if self.own_tokenizer.spec["name"] == "regex":
            self.unknown.update(self.own_tokenizer.missing(string))
        return self.own_tokenizer.encode(string)

    def _encode_pair(self, context, continuation):
        """As in the harness, except where a token would span the join, or there is no context: what
        belongs to the continuation is then encoded by itself, so that all of it is scored."""
        text = context + continuation
        start = len(context.rstrip())  # white space belongs to what follows
        if not self.tok_encode(text[:start]):
            return [self.prefix_token_id], self.tok_encode(text)
        before, after = super()._encode_pair(context, continuation)
        if before + after != self.tok_encode(text):
            after = self.tok_encode(text[start:])
        return before, after

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = []
        for request in requests:
            context, continuation = request.args
            pairs.append((request.args, *self._encode_pair(context, continuation)))
        return self._loglikelihood_tokens(pairs)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """For (texts, context, continuation): (sum of the continuation's log-probabilities, whether
        greedy decoding gives all of it)."""
        rows, results = [], [None] * len(requests)
        for i, (texts, before, after) in enumerate(requests):
            if not 0 < len(after) <= self.block_size:
                raise UserError(f"--eval: a task asks how likely {texts[1][:50]!r} is, "
                                f"{len(after)} tokens long: from 1 to the window's "
                                f"{self.block_size} can be scored")
            tokens = (before + after)[-self.block_size - 1:]
            self.cut += len(tokens) < len(before + after)
            rows.append(ToScore(i, tokens, len(tokens) - len(after)))
        key, length = (lambda row: row.n), (lambda row: len(row.tokens))
        for n, batch in batches(rows, self.eval_rows, key, length):
            T = len(batch[-1].tokens) - 1  # of the longest
            padded = [row.tokens[:-1] + [0] * (T + 1 - len(row.tokens)) for row in batch]
            logits = self.model.score(torch.tensor(padded), n)  # (B, T - n + 1, V)
            for row, row_logits in zip(batch, logits):
                results[row.request] = self.score_row(row_logits, row.tokens[n:])
        return results

    @staticmethod
    def score_row(logits, continuation):
        target = torch.tensor(continuation, device=logits.device)
        logits = logits[:len(target)].to(torch.promote_types(logits.dtype, torch.float32))
        total = -F.cross_entropy(logits, target, reduction="sum").item()
        return total, bool((logits.argmax(-1) == target).all())

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Of whole texts: each token once, with all the context that a window leaves its piece."""
        windows = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(*request.args)
            prefix = self.prefix_token_id
            for window in get_rolling_token_windows(tokens, prefix, self.block_size, 1):
                windows.append((i, *make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        for (i, _, _), (total, _) in zip(windows, self._loglikelihood_tokens(windows)):
            totals[i] += total
        return totals

    def stop_tokens(self, until):
        """The tokens that complete an answer: end marks, and those that hold a text of `until`.
        (One of several tokens does not stop the decoding, but still ends the answer.)"""
        if until not in self.stop_tokens_of:
            found = set(self.own_tokenizer.ends)
            for token in range(self.own_tokenizer.vocab_size):
                text = self.own_tokenizer.decode([token])
                if any(stop in text for stop in until):
                    found.add(token)
            self.stop_tokens_of[until] = found
        return self.stop_tokens_of[until]

    def generate_until(self, requests, disable_tqdm=False):
        """The window is shared so: an answer may be as long as wanted if the prompt leaves room,
        else it gets the room that there is, but half of the window at least, for which the prompt
        loses its beginning."""
        rows, answers = [], [None] * len(requests)
        for i, request in enumerate(requests):
            context, wanted = request.args
            limit, until = greedy_settings(wanted)
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            least_room = max(1, min(limit, self.block_size // 2))
            prompt, room = maybe_truncate(tokens, limit, self.block_size, least_room,
                                          shrink_gen_toks=True, verbose=False)
            self.cut += len(prompt) < len(tokens)
            rows.append(ToAnswer(i, prompt, room, limit, until))
        key, length = (lambda row: row.until), (lambda row: len(row.prompt))
        for until, batch in batches(rows, self.eval_rows, key, length):
            stop = self.stop_tokens(until)
            prompts, limits = [row.prompt for row in batch], [row.room for row in batch]
            new = self.model.generate(prompts, limits, stop)
            for row, tokens in zip(batch, new):
                tokens = tokens[:row.room]
                if len(tokens) == row.room < row.limit and tokens[-1] not in stop:
                    self.cut += 1
                if tokens[-1] in self.own_tokenizer.ends:
                    tokens = tokens[:-1]
                text = self.own_tokenizer.decode(tokens)
                answers[row.request] = postprocess_generated_text(text, list(until), None)
        return answers

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """The prompt for an answer; or, without a generation prompt, for one that goes on from the
        last message."""
        text = self.own_tokenizer.chat(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        begun = chat_history[-1]["content"]
        if not begun.strip() or begun.strip() not in text:
            raise UserError(f"the chat template does not write the beginning of an answer, "
                            f"{begun[:50]!r}")
        return text[:text.rindex(begun.strip())] + begun.lstrip()


# --------------------------------------------------------------------------------------------------
# The tasks

def load_tasks(arguments):
    """A TaskManager that holds the tasks, checked before anything is computed, and their names."""
    manager, names = tasks.TaskManager(), arguments.eval.split(",")
    if not hasattr(manager, "load"):
        raise UserError("--eval needs a newer lm-evaluation-harness: pip install --upgrade lm-eval")
    for name in names:
        if name.endswith(".yaml"):
            if not Path(name).is_file():
                raise UserError(f"--eval={name}: no such file")
        elif name not in manager.all_tasks:
            raise UserError(f"--eval={name}: lm-evaluation-harness has no such task; "
                            f"{train.nearest(name, manager.all_tasks)}")
    try:
        loaded = manager.load(names)
    except Exception as error:  # tasks are programs: of the network, of imports, of anything
        reason = f"{type(error).__name__}, {' '.join(str(error).split())[:300]}"
        raise UserError(f"--eval={arguments.eval}: a task could not be read: {reason}") from None
    manager.load = lambda names: loaded  # once for all settings
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"--eval: {name} runs the code that a model writes, or needs images or "
                            f"sound: not here")
        if arguments.fewshot > 0 and task.get_config("num_fewshot") == 0:
            raise UserError(f"--fewshot={arguments.fewshot}: {name} is without examples by "
                            f"definition")
        greedy_settings(task.get_config("generation_kwargs") or {}, name)
    return manager, names


@torch.no_grad()
def evaluate(path, arguments, tokenizer, block_size, models):
    """Run the tasks with each of models {label: model under a setting}; print the harness's table
    for each and add the results to eval.json beside the run. A tokenizer's chat template is used if
    there is one."""
    manager, names = load_tasks(arguments)
    chat = tokenizer.template is not None
    out = train.run_directory(path) / "eval.json"
    results = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for label, model in models.items():
        adapter = Adapter(tokenizer, block_size, model, arguments.eval_rows)
        found = simple_evaluate(
            adapter, tasks=names, task_manager=manager, log_samples=False,
            num_fewshot=arguments.fewshot if arguments.fewshot >= 0 else None,
            limit=arguments.limit or None,
            apply_chat_template=chat,
            system_instruction=tokenizer.system if chat else None)
        print(f"{path}, {label}\n{make_table(found)}", flush=True)
        if adapter.cut:
            print(f"{adapter.cut} prompts lost their beginning, or answers their end, to fit into "
                  f"{block_size} tokens")
        if adapter.unknown:
            print(f"{len(adapter.unknown)} words and signs of these tasks are not in the "
                  f"vocabulary: read as <unk>")
        for task, values in found["results"].items():
            results.setdefault(task, {})[label] = values
        train.write_json(out, results)
    print(f"written to {out}")


# --------------------------------------------------------------------------------------------------

@dataclass
class Arguments:
    eval: str = ""  # tasks, separated by commas; one of your own: the path of its .yaml file
    loops: str = None  # of a looped model: loop counts, as 1,2,4; by default the trained number
    mode: str = None  # of fullbandwidth: standard, soft, fused, or several; by default standard
    prefill_passes: Count = None  # of fullbandwidth: fused passes over the prompt, by default one
    fewshot: Annotated[int, -1, 1000] = -1  # worked examples before a question; -1: the task's
    limit: int = 0  # questions of each task; 0: all
    eval_rows: Size = 16  # sequences computed together

    __post_init__ = check_fields


def main(argv):
    usage = "python experiments/harness.py RUN --eval=TASK,.. [--field=value ...]"
    path, arguments = train.parse_run(usage, Arguments, argv)
    if not arguments.eval:
        raise UserError("add --eval=TASK, as in --eval=gsm8k; lm-eval ls tasks prints all names")
    name, model, tokenizer = load(path)
    models = settings(name, model, arguments)
    device = device_of(model)
    in_bfloat16 = name == "ouro" and device.type == "cuda"  # as it was trained
    with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
        evaluate(path, arguments, tokenizer, model.config.block_size, models)


if __name__ == "__main__":
    train.command_line(main)
