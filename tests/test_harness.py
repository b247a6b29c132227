"""experiments/harness.py: lm-evaluation-harness on tiny models, against direct computation. Skipped without the package."""
import copy, functools, itertools, json, math, random, re, runpy, sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lm_eval")

import fullbandwidth, looped_gpt, stars, test_values, train
from experiments import harness, ouro
from test_ouro import CHAT, CHATML, PROSE, VOCAB, chat_tokenizer, hub, tokenizer_files, write_hub
from train import UserError

TASKS = {"sums_choice": """output_type: multiple_choice
doc_to_text: "{{question}}\\nThe answer is"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""", "sums_generate": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "er"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""", "sums_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""}


@functools.cache
def task_manager():
    """The harness's index of its own tasks, which it reads from thousands of files: once is enough."""
    return harness.tasks.TaskManager()


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """--eval=.. of three tasks in the harness's own YAML, on a JSONL of 7 sums."""
    manager = task_manager()
    monkeypatch.setattr(harness.tasks, "TaskManager", lambda: copy.copy(manager))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"What is {i} plus {i * i}?", "choices": [f"{i + i * i}", f"{i}.", "no number"]} for i in range(7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
            f"test_split: test\n{text}")
    return "--eval=" + ",".join(str(tmp_path / f"{name}.yaml") for name in TASKS), rows


class Request:
    def __init__(self, *args):
        self.args = args


def greedy(logits, tokens, n):
    """Continue tokens by n, one full forward pass each."""
    for _ in range(n):
        tokens = [*tokens, int(logits(torch.tensor([tokens]))[0, -1].argmax())]
    return tokens


def check_adapter(tokenizer, block_size, model, logits, teacher=None):
    """The adapter against one forward pass per text: logits(idx (1, T)) -> (1, T, V), or teacher(tokens, n) where the
    continuation is read in another way than the context."""
    texts = [("What is 1 plus 2?", " 3"), ("What is 1 plus 2? ", "12"), ("a", "bc"), ("", "What is"), ("What is 1 plus", " 2?"),
             ("What is 1 plus 3?", " " + "4 " * 12), ("no" * 40, "yes")]
    results = []
    for rows in (1, 4):
        adapter = harness.Adapter(tokenizer, block_size, model, rows)
        for order in (range(len(texts)), reversed(range(len(texts)))):
            order = list(order)
            found = dict(zip(order, adapter.loglikelihood([Request(*texts[i]) for i in order])))
            generated = dict(zip(order, adapter.generate_until([Request(texts[i][0], {"until": ["er", "?"], "max_gen_toks": 5})
                                                                for i in order])))
            results.append(([found[i] for i in range(len(texts))], [generated[i] for i in range(len(texts))]))
    for found, generated in results[1:]:
        assert generated == results[0][1]
        assert [g for _, g in found] == [g for _, g in results[0][0]]
        assert np.allclose([x for x, _ in found], [x for x, _ in results[0][0]], rtol=1e-9)
    teacher = teacher or (lambda tokens, n: logits(torch.tensor([tokens]))[0, n - 1:])
    for (context, continuation), (total, is_greedy) in zip(texts, results[0][0]):
        body = context.rstrip()
        tokens, n = tokenizer.encode(context + continuation), len(tokenizer.encode(body))
        if tokens[:n] != tokenizer.encode(body):  # a token spans the join
            tokens = tokenizer.encode(body) + tokenizer.encode((context + continuation)[len(body):])
        if not body:
            tokens, n = [getattr(tokenizer, "eos", None) or tokenizer.encode("\n")[0], *tokens], 1
        if len(tokens) > block_size + 1:
            tokens, n = tokens[-block_size - 1:], n - (len(tokens) - block_size - 1)
        p = teacher(tokens[:-1], n).log_softmax(-1)
        direct = sum(p[i, token].item() for i, token in enumerate(tokens[n:]))
        assert abs(total - direct) < 1e-9 * abs(direct), (context, continuation)
        assert is_greedy == (p.argmax(-1).tolist() == tokens[n:])
    long = "What is 1 plus 2? " * 12
    total, = adapter.loglikelihood_rolling([Request(long)])
    tokens, direct = [getattr(tokenizer, "eos", None) or tokenizer.encode("\n")[0], *tokenizer.encode(long)], 0.0
    for i in range(1, len(tokens), block_size):  # every token once, with all the context that a window leaves for its piece
        end = min(i + block_size, len(tokens))
        start = max(0, end - 1 - block_size)
        p = teacher(tokens[start:end - 1], i - start).log_softmax(-1)
        direct += sum(p[j, token].item() for j, token in enumerate(tokens[i:end]))
    assert len(tokens) > 2 * block_size and abs(total - direct) < 1e-9 * abs(direct)
    return texts, results[0][1], [adapter.generate_until([Request("What is", {"until": [], "max_gen_toks": 5})])[0]]


def settings_of(monkeypatch, argv, block_size=None):
    """What the command line hands to harness.evaluate, in float64: {label: model}, and its tokenizer and window."""
    caught, load = {}, harness.load

    def load_double(path):
        name, model, tokenizer = load(path)
        model.config.block_size = block_size or model.config.block_size
        return name, model.cpu().double(), tokenizer
    monkeypatch.setattr(harness, "load", load_double)
    monkeypatch.setattr(harness, "evaluate", lambda path, a, tokenizer, T, models: caught.update(
        tokenizer=tokenizer, T=T, settings=models))
    harness.main(argv)
    return caught


def test_the_adapter_of_ouro_equals_direct_computation(hub, monkeypatch):
    caught = settings_of(monkeypatch, [str(hub), "--eval=x", "--loops=1,3"], block_size=40)
    tokenizer = caught["tokenizer"]
    assert list(caught["settings"]) == ["loops=1", "loops=3"]
    for t, adapted in zip((1, 3), caught["settings"].values()):
        model = adapted.model
        logits = lambda idx: model.readout(list(stars.trajectory(model, idx, t))[-1])
        texts, generated, (free,) = check_adapter(tokenizer, caught["T"], adapted, logits)
        start = tokenizer.encode("What is")
        assert free == tokenizer.decode(greedy(logits, start, 5)[len(start):]).split("<|im_end|>")[0]
        for (context, _), text in zip(texts, generated):
            start = (tokenizer.encode(context) or [tokenizer.eos])[-35:]
            new = greedy(logits, start, 5)[len(start):]
            new = new[:new.index(tokenizer.eos)] if tokenizer.eos in new else new
            assert text == tokenizer.decode(new).split("?")[0].split("er")[0]


def run_of(tmp_path, name, model, text, tokenizer="char", **options):
    """A run directory of an untrained model with a tokenizer of the text's types."""
    types = sorted(set(train.Tokenizer.patterns[tokenizer].findall(text)))
    tokenizer = train.Tokenizer(tokenizer, types + ["<unk>"] * (tokenizer == "regex"))
    (tmp_path / name).mkdir()
    torch.save({"model": name, "preset": "tiny", "config": vars(model.config), "step": 600, "max_steps": 600, "best": 0.0, "tokenizer": tokenizer.spec,
                "options": vars(train.Options(**options)), "weights": model.state_dict()}, tmp_path / name / "ckpt.pt")
    return tmp_path / name, tokenizer


CHARACTERS = "What is 0123456789 plus? abcdefghijklmnopqrstuvwxyzT.\n"


def test_the_adapter_of_looped_gpt_equals_direct_computation(tmp_path, monkeypatch):
    V = len(set(CHARACTERS))
    model = looped_gpt.LoopedGPT(looped_gpt.Config(vocab_size=V, block_size=30, n_layer=1, n_head=2, n_embd=16, num_loops=3,
                                                   readout="final_only"))
    path, tokenizer = run_of(tmp_path, "looped_gpt", model, CHARACTERS)
    model = model.double().eval()
    caught = settings_of(monkeypatch, [str(path), "--eval=x", "--loops=1,3"])
    for K, adapted in zip((1, 3), caught["settings"].values(), strict=True):
        logits = lambda idx: model.readout(model.states(idx, K)[-1], final=K >= 3)
        _, _, (free,) = check_adapter(tokenizer, 30, adapted, logits)
        assert free == tokenizer.decode(greedy(logits, tokenizer.encode("What is"), 5)[7:])


def test_the_adapter_of_fullbandwidth_equals_reading_token_by_token(tmp_path, monkeypatch):
    V = len(set(CHARACTERS))
    model = fullbandwidth.FullBandwidthGPT(fullbandwidth.Config(vocab_size=V, block_size=30, n_layer=2, n_head=2, n_kv_head=2,
                                                                n_embd=16, mlp_width=32))
    path, tokenizer = run_of(tmp_path, "fullbandwidth", model, CHARACTERS)
    model = model.double().eval()
    caught = settings_of(monkeypatch, [str(path), "--eval=x", "--mode=standard,soft,fused"])

    def teacher(mode):
        def states(tokens, n):
            """No cache: h_i for i >= n - 1, each from the inputs of all positions before, fused one after the other."""
            idx = torch.tensor([tokens])
            e, x = model.embed(idx), model.embed(idx[:, :n])
            h = model.stack(x)
            if mode == "fused":
                x = torch.cat([e[:, :1], model.fuse(e[:, 1:n], h[:, :-1])], dim=1)
                h = model.stack(x)
            last = [h[:, -1:]]
            for t in range(n, len(tokens)):
                now = e[:, t:t + 1] if mode == "standard" else model.fuse(e[:, t:t + 1], last[-1])
                x = torch.cat([x, now], dim=1)
                last.append(model.stack(x)[:, -1:])
            return model.readout(torch.cat(last, dim=1))[0]
        return states
    assert list(caught["settings"]) == ["standard", "soft", "fused"]
    with torch.no_grad():
        for mode, adapted in caught["settings"].items():
            _, _, (free,) = check_adapter(tokenizer, 30, adapted, None, teacher(mode))
            tokens = tokenizer.encode("What is")
            for _ in range(5):
                tokens = [*tokens, int(teacher(mode)(tokens, 7)[-1].argmax())]
            assert free == tokenizer.decode(tokens[7:])


def bigrams(tokenizer, block_size, continue_with=()):
    """An adapter of a model that looks at the last token only, so that a sum of log-probabilities is one of table entries;
    the table; and the calls of its decoder, which always continues with the same tokens."""
    g = torch.Generator().manual_seed(1)
    table = torch.randn(tokenizer.vocab_size, tokenizer.vocab_size, generator=g, dtype=torch.float64).log_softmax(-1)
    calls = []

    def generate(prompts, limits, stop):
        calls.append((prompts, limits))
        ends = [next((i for i, token in enumerate(continue_with, 1) if token in stop), None)] * len(prompts)
        return [list(continue_with)[:end][:limit] for end, limit in zip(ends, limits)]
    score = lambda idx, n: table[idx][:, n - 1:]
    return harness.Adapter(tokenizer, block_size, SimpleNamespace(score=score, generate=generate), 4), table, calls


def path_sum(table, tokens):
    return sum(table[a, b].item() for a, b in zip(tokens, tokens[1:]))


def one_word_tokenizer():
    """Byte-level BPE in which "Ans" and "Answer" are each one token."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(["Answer\nAns\n"] * 9, tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return ouro.HubTokenizer({"tokenizer.json": bpe.to_str()})


def test_a_choice_that_merges_with_the_question_is_scored_by_its_own_tokens_instead_of_winning_with_zero():
    tokenizer = one_word_tokenizer()
    assert len(tokenizer.encode("Ans")) == len(tokenizer.encode("Answer")) == 1
    adapter, table, _ = bigrams(tokenizer, 30)
    choices = ["wer", "nope", "x", "wer is", " wer"]
    for choice, (total, greedy) in zip(choices, adapter.loglikelihood([Request("Ans", choice) for choice in choices])):
        expected = path_sum(table, tokenizer.encode("Ans") + tokenizer.encode(choice))
        assert abs(total - expected) < 1e-9 and total < -1 and not greedy


@pytest.mark.parametrize("name", ["hub", "one word", "char"])
def test_of_texts_split_anywhere_every_character_behind_the_split_is_scored(name):
    """Against direct sums over the whole encoding, which is also the harness's own pair, where no token spans the split;
    else over the encodings of both parts. Mid-word splits, half of these, used to score a rest, or nothing at all."""
    tokenizer = {"hub": lambda: ouro.HubTokenizer(tokenizer_files()), "one word": one_word_tokenizer,
                 "char": lambda: train.Tokenizer("char", sorted(set(PROSE)))}[name]()
    adapter, table, _ = bigrams(tokenizer, 200)
    rng, spanned = random.Random(0), 0
    for _ in range(300):
        start = rng.randrange(len(PROSE) - 60)
        text = PROSE[start:start + rng.randrange(2, 60)]
        split = rng.randrange(1, len(text))
        (total, _), = adapter.loglikelihood([Request(text[:split], text[split:])])
        body = text[:split].rstrip()  # white space belongs to what follows
        before, whole = tokenizer.encode(body), tokenizer.encode(text)
        if not body:
            before = tokenizer.encode("<|im_end|>" if name == "hub" else "\n")
            expected = path_sum(table, before + whole)
        elif whole[:len(before)] == before:
            expected = path_sum(table, whole) - path_sum(table, before)
            assert harness.TemplateLM._encode_pair(adapter, text[:split], text[split:]) == (before, whole[len(before):])
        else:
            spanned += 1
            expected = path_sum(table, before[-1:] + tokenizer.encode(text[len(body):]))
        assert abs(total - expected) < 1e-9 and total < -1, (text, split)
    assert (spanned > 30) == (name == "hub")


def test_what_has_no_tokens_or_does_not_fit_is_refused_instead_of_scored():
    adapter, _, _ = bigrams(train.Tokenizer("char", list("abc\n")), 8)
    for context, continuation in (("a", ""), ("", ""), ("a", "abcabcabc")):
        with pytest.raises(UserError, match="--eval: a task asks how likely .* can be scored"):
            adapter.loglikelihood([Request("a", "b"), Request(context, continuation)])
    (total, _), = adapter.loglikelihood([Request("", "\n")])  # the same token as the one that stands for no context
    assert total < 0 and adapter.cut == 0
    adapter.loglikelihood([Request("abc", "abcabcab")])
    assert adapter.cut == 1


@pytest.mark.parametrize("begun", ["The best answer is", "Here it is:\n```python\ndef f():\n", " The"])
def test_an_answer_that_is_begun_is_left_open_by_the_chat_template(begun):
    adapter, _, _ = bigrams(chat_tokenizer(), 100)
    open_answer = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert adapter.apply_chat_template(CHAT) == open_answer
    chat = [*CHAT, {"role": "assistant", "content": begun}]
    assert adapter.apply_chat_template(chat, add_generation_prompt=False) == open_answer + begun
    trimming, _, _ = bigrams(chat_tokenizer(CHATML.replace("m['content']", "m['content'] | trim")), 100)
    assert trimming.apply_chat_template(chat, add_generation_prompt=False) == open_answer + begun.lstrip()
    forgetful, _, _ = bigrams(chat_tokenizer("{{ messages[0]['content'] }}"), 100)
    with pytest.raises(UserError, match="does not write the beginning of an answer"):
        forgetful.apply_chat_template(chat, add_generation_prompt=False)


@pytest.mark.parametrize("wanted, answer", [
    ({}, "The answer is 4."), ({"max_new_tokens": 3}, "The answer"), ({"max_tokens": 3, "do_sample": False}, "The answer"),
    ({"until": ["", "swer"]}, "The an"), ({"until": ""}, "The answer is 4."), ({"until": None}, "The answer is 4."),
    ({"until": ["日本"]}, "The answer is 4."), ({"until": ["<|im_start|>", " is 4"]}, "The answer"),
    ({"do_sample": False, "temperature": 1.0, "top_p": 0.9, "num_beams": 1}, "The answer is 4."),
    ({"do_sample": True, "temperature": 0.0}, "The answer is 4."),
    ({"do_sample": True}, UserError), ({"temperature": 0.2}, UserError), ({"num_beams": 10}, UserError),
    ({"repetition_penalty": 1.2}, UserError), ({"max_length": 9}, UserError), ({"max_gen_toks": 0}, UserError)])
def test_generation_settings_are_honoured_or_refused(wanted, answer):
    tokenizer = chat_tokenizer()
    adapter, _, _ = bigrams(tokenizer, 100, tokenizer.encode("The answer is 4.<|im_end|>\n5.<|endoftext|>6"))
    if answer is UserError:
        with pytest.raises(UserError, match=f"--eval: a task asks for .*{[*wanted][-1] if 'max_gen_toks' not in wanted else '0 tokens'}"):
            adapter.generate_until([Request("2 + 2?", wanted)])
    else:
        assert adapter.generate_until([Request("2 + 2?", wanted)] * 2) == [answer] * 2


@pytest.mark.parametrize("name", ["char", "regex"])
def test_texts_to_stop_at_may_be_absent_from_the_vocabulary(name):
    """A character tokenizer could not encode them; of the regex one they were <unk>, at which it then stopped."""
    vocab = list("The answr is4.Q:<unk>") if name == "char" else ["The", " ", "answer", "<unk>", "4", ".", "\n", "is"]
    tokenizer = train.Tokenizer(name, sorted(set(vocab)) if name == "char" else vocab)
    answer = tokenizer.encode("The answer is 4.") if name == "char" else [0, 1, 2, 1, 3, 1, 4, 5]
    adapter, _, _ = bigrams(tokenizer, 60, answer)
    until = ["\n\n", "Question:", "日"]
    text = tokenizer.decode(answer)
    assert adapter.generate_until([Request("The", {"until": until})]) == [text]
    assert adapter.generate_until([Request("The", {"until": [*until, "4"]})]) == [text[:-2]]


def test_a_prompt_and_its_answer_share_the_window():
    tokenizer = train.Tokenizer("char", list("ab\n"))
    adapter, _, calls = bigrams(tokenizer, 40, [0] * 99)
    prompts = ["ab", "ab" * 10, "ab" * 15, "ab" * 30]
    for limit, expected in ((5, [(2, 5), (20, 5), (30, 5), (35, 5)]), (30, [(2, 30), (20, 20), (20, 20), (20, 20)]),
                            (500, [(2, 38), (20, 20), (20, 20), (20, 20)])):
        calls.clear()
        answers = adapter.generate_until([Request(prompt, {"max_gen_toks": limit}) for prompt in prompts])
        assert [(len(prompt), n) for prompt, n in zip(*calls[0])] == expected, "in one batch"
        assert [len(answer) for answer in answers] == [n for _, n in expected]
        assert all(tokenizer.decode(cut) == prompt[-len(cut):] for cut, prompt in zip(calls[0][0], prompts))


def test_rows_are_decoded_to_their_own_limits(hub):
    model, _, _ = ouro.load(hub)
    model = model.cpu().double()
    prompts = torch.randint(VOCAB, (3, 9)).tolist()
    prompts, limits = [prompts[0][:4], prompts[1], prompts[2][:6]], [7, 1, 4]
    new = harness.decode(harness.Ouro(model, 2), prompts, limits, {-1})
    for row, prompt, limit in zip(new, prompts, limits, strict=True):
        assert prompt + row == greedy(lambda idx: model.readout(model.final(idx, 2)), prompt, limit)


def test_the_harness_runs_its_own_tasks_and_the_results_stand_beside_the_run(hub, tasks, tmp_path, capsys):
    directory = write_hub(tmp_path / "hub")
    tables = []
    for rows in (1, 16):
        harness.main([str(directory), tasks[0], "--loops=1,4", f"--eval_rows={rows}"])
        tables.append(json.loads((directory / "eval.json").read_text()))
        (directory / "eval.json").unlink()
    assert "sums_choice" in (out := capsys.readouterr().out) and "loops=4" in out
    for task, loops in itertools.product(TASKS, ("loops=1", "loops=4")):  # the batch does not matter, but for rounding
        one, many = (table[task][loops] for table in tables)
        assert one.keys() == many.keys()
        assert all(x == y or math.isclose(x, y, rel_tol=1e-5) for x, y in zip(one.values(), many.values()))
    assert set(tables[0]) == set(TASKS) and set(tables[0]["sums_choice"]) == {"loops=1", "loops=4"}
    model, _, tokenizer = ouro.load(directory)
    right = 0
    for row in tasks[1]:  # the choice task by hand, at 4 loops
        prompt = tokenizer.chat([{"role": "system", "content": ouro.SYSTEM},
                                 {"role": "user", "content": row["question"] + "\nThe answer is"}], True)
        totals = []
        for choice in row["choices"]:
            tokens, n = tokenizer.encode(prompt + choice), len(tokenizer.encode(prompt.rstrip()))
            idx = torch.tensor([tokens[:-1]], device=model.lm_head.weight.device)
            logits = model.readout(model.final(idx, 4))
            totals.append(-F.cross_entropy(logits[0, n - 1:].cpu(), torch.tensor(tokens[n:]), reduction="sum").item())
        right += totals.index(max(totals)) == 0
    assert tables[0]["sums_choice"]["loops=4"]["acc,none"] == right / 7


def test_a_task_that_does_not_exist_is_one_clear_line(hub, tmp_path, tasks):
    with pytest.raises(UserError, match="--eval=gsm8: lm-evaluation-harness has no such task; did you mean"):
        harness.main([str(hub), "--eval=gsm8"])
    with pytest.raises(UserError, match="no such file"):
        harness.main([str(hub), f"--eval={tmp_path}/none.yaml"])


def test_tasks_that_cannot_be_run_as_they_ask_are_refused_before_anything_is_computed(hub, tmp_path, tasks):
    rows = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n"
    sums = (tmp_path / "sums_generate.yaml").read_text()
    for name, text, arguments, message in (
            ("sampled", sums.replace("do_sample: false", "do_sample: true, temperature: 0.7"), [], "sampled asks for {'do_sample': True"),
            ("fixed", sums + "num_fewshot: 0\n", ["--fewshot=2"], "--fewshot=2: fixed is without examples"),
            ("absent", sums.replace(f"{tmp_path}/rows.jsonl", "none.jsonl"), [], "a task could not be read: FileNotFoundError"),
            ("broken", f"task: broken\n{rows}output_type: nonsense\n", [], "a task could not be read"),
            ("unsafe", sums + "unsafe_code: true\n", [], "unsafe runs the code that a model writes")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text.replace("task: sums_generate", f"task: {name}"))
        with pytest.raises(UserError) as error:
            harness.main([str(hub), f"--eval={path}", *arguments])
        assert message in str(error.value) and "\n" not in str(error.value)


def test_a_begun_answer_reaches_the_model_open_through_the_harness_itself(tasks, tmp_path, capsys):
    for name in ("choice", "generate"):
        path = tmp_path / f"sums_{name}.yaml"
        path.write_text(path.read_text() + "gen_prefix: The best answer is\n")
    tokenizer, prompts = chat_tokenizer(), []

    def score(idx, n):
        prompts.extend(tokenizer.decode(row[:n].tolist()) for row in idx)
        return torch.zeros(*idx.shape, VOCAB)[:, n - 1:]

    def generate(rows, limits, stop):
        prompts.extend(map(tokenizer.decode, rows))
        return [tokenizer.encode("<|im_end|>") for _ in rows]
    (tmp_path / "run").mkdir()
    names = tasks[0].removeprefix("--eval=").rpartition(",")[0]
    model = SimpleNamespace(score=score, generate=generate)
    harness.evaluate(tmp_path / "run", harness.Arguments(names, limit=2), tokenizer, 400, {"x": model})
    assert len(prompts) == 2 * 3 + 2 and all(text.endswith("<|im_start|>assistant\nThe best answer is") for text in prompts)
    assert "fit into" not in capsys.readouterr().out


def test_what_the_window_cut_and_what_was_read_as_unknown_is_said(tasks, tmp_path, capsys):
    model = looped_gpt.LoopedGPT(looped_gpt.Config(vocab_size=6, block_size=12, n_layer=1, n_head=2, n_embd=16, num_loops=2))
    path, _ = run_of(tmp_path, "looped_gpt", model, "What is\n?", tokenizer="regex")
    harness.main([str(path), tasks[0], "--limit=2"])
    out = capsys.readouterr().out
    assert re.search(r"\d+ prompts lost their beginning, or answers their end, to fit into 12 tokens", out)
    assert re.search(r"\d+ words and signs of these tasks are not in the vocabulary: read as <unk>", out)


def test_a_field_of_another_model_or_no_task_is_one_clear_line(hub, tmp_path):
    model = fullbandwidth.FullBandwidthGPT(fullbandwidth.Config(vocab_size=6, block_size=12, n_layer=1, n_head=2, n_kv_head=2,
                                                                n_embd=16, mlp_width=16))
    path, _ = run_of(tmp_path, "fullbandwidth", model, "What is\n?", tokenizer="regex")
    adder, _ = run_of(tmp_path, "stars", stars.LoopedTransformer(stars.Config()), "".join(stars.AdditionData.vocab))
    for argv, message in (([str(hub)], "add --eval=TASK"), ([str(hub), "--limit=2"], "add --eval=TASK"),
                          ([str(hub), "--eval=x", "--mode=soft"], "choose --loops"),
                          ([str(hub), "--eval=x", "--prefill_passes=2"], "choose --loops"),
                          ([str(path), "--eval=x", "--loops=2"], "choose --mode"),
                          ([str(path), "--eval=x", "--mode=softly"], "--mode=softly: choose from standard, soft, fused"),
                          ([str(adder), "--eval=x"], "a model of stars.py has no tokenizer for the harness's tasks"),
                          ([str(tmp_path / "none"), "--eval=x"], "no such checkpoint")):
        with pytest.raises(UserError, match=message):
            harness.main(argv)


def test_every_field_refuses_what_its_annotation_does_not_allow():
    test_values.test_every_field_refuses_what_its_annotation_does_not_allow(harness.Arguments)


def test_without_the_package_the_command_says_which_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match="this needs the package lm-eval: pip install --upgrade lm-eval$"):
        runpy.run_path(harness.__file__)
