"""Ouro in Hugging Face's layout, supervised fine-tuning, and lm-evaluation-harness; small files of the real formats, made
here. What needs an optional package is skipped without it."""
import copy, dataclasses, functools, itertools, json, math, random, re, sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fullbandwidth, looped_gpt, stars, train
from conftest import step_gradients
from train import UserError

WIDTH, LAYERS, HEADS, MLP, VOCAB, LOOPS = 64, 2, 4, 96, 512, 4
SHAPE = ["--n_layer=2", "--n_head=4", "--n_embd=64", "--mlp_width=96", "--vocab_size=512"]
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
PROSE = "\n\n".join(f"What is {a} plus {b}? The answer is {a + b}, since {a} and {b} make {a + b}. Don't worry: naïve café 日本 "
                    f"  \t tabs\n\n" for a in range(12) for b in range(12))


def tensors(dtype=torch.float32, seed=0):
    """{name: random tensor} of a tiny model of Ouro's form, in the names and shapes of its files."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,),
              "model.early_exit_gate.weight": (1, WIDTH), "model.early_exit_gate.bias": (1,)}
    for i in range(LAYERS):
        layer = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
        layer |= {"mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP)}
        layer |= {f"{name}layernorm{n}": (WIDTH,) for name in ("input_", "post_attention_") for n in ("", "_2")}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: ((1 + 0.3 * torch.randn(shape, generator=g)) if "norm" in name else
                   torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(dtype) for name, shape in shapes.items()}


def config_json(dtype="float32", **changed):
    return json.dumps(dict(
        architectures=["OuroForCausalLM"], model_type="ouro", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, intermediate_size=MLP, hidden_act="silu", rms_norm_eps=1e-6,
        rope_theta=1000000.0, tie_word_embeddings=False, total_ut_steps=LOOPS, torch_dtype=dtype) | changed, indent=2)


def tokenizer_files():
    """Byte-level BPE with digits apart and the special tokens first, as Ouro's tokenizer.json has it."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator([PROSE], tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return {"tokenizer.json": bpe.to_str(),
            "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML})}


def write_hub(directory, weights=None, dtype="float32", shards=1):
    """A Hugging Face directory: single-file, or with an index over shards."""
    safetensors = pytest.importorskip("safetensors.torch")
    weights = tensors(getattr(torch, dtype)) if weights is None else weights
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (tokenizer_files() | {"config.json": config_json(dtype)}).items():
        (directory / name).write_text(text, encoding="utf-8")
    names, index = sorted(weights), {}
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        safetensors.save_file({n: weights[n] for n in names[i::shards]}, directory / file, metadata={"format": "pt"})
        index |= {n: file for n in names[i::shards]}
    if shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


CHAT = [{"role": "user", "content": "2 + 2?"}]


def chat_tokenizer(template=CHATML, **config):
    """The tokenizer of these tests with another end of text than the template's end mark."""
    config = {"eos_token": "<|endoftext|>", "chat_template": template} | config
    return train.HubTokenizer(tokenizer_files() | {"tokenizer_config.json": json.dumps(config)})


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write_hub(tmp_path_factory.mktemp("hub"))


# The model and its files

def test_diagnostics_of_a_hugging_face_directory_are_refused_in_one_line(hub):
    with pytest.raises(train.UserError, match="is a Hugging Face directory, not a run with held-out rows: add --eval=TASK"):
        stars.main([str(hub)])


def naive_logits(w, idx, loops):
    """Ouro's layer from its description, one position and one head at a time, in float64: logits after each loop. The
    rotation's table is rounded to float32, as it is kept."""
    w = {name: tensor.double() for name, tensor in w.items()}
    hs = WIDTH // HEADS

    def norm(x, gain):
        return x / torch.sqrt((x * x).mean() + 1e-6) * gain

    def turn(x, position):
        y = torch.empty_like(x)
        for i in range(hs // 2):
            angle = position * 1e6 ** (-2 * i / hs)
            cos, sin = (float(np.float32(f(angle))) for f in (math.cos, math.sin))
            y[i], y[i + hs // 2] = x[i] * cos - x[i + hs // 2] * sin, x[i + hs // 2] * cos + x[i] * sin
        return y

    def layer(xs, i):
        at = lambda name: w[f"model.layers.{i}.{name}.weight"]
        normed = [norm(x, at("input_layernorm")) for x in xs]
        q, k, v = ([[part for part in (at(f"self_attn.{name}_proj") @ x).split(hs)] for x in normed] for name in "qkv")
        out = []
        for t, x in enumerate(xs):
            heads = []
            for h in range(HEADS):
                scores = torch.stack([turn(q[t][h], t) @ turn(k[s][h], s) / math.sqrt(hs) for s in range(t + 1)])
                heads.append(sum(p * v[s][h] for s, p in enumerate(scores.softmax(0))))
            x = x + norm(at("self_attn.o_proj") @ torch.cat(heads), at("input_layernorm_2"))
            y = norm(x, at("post_attention_layernorm"))
            gate = at("mlp.gate_proj") @ y
            y = at("mlp.down_proj") @ (gate / (1 + torch.exp(-gate)) * (at("mlp.up_proj") @ y))
            out.append(x + norm(y, at("post_attention_layernorm_2")))
        return out

    xs, logits = [w["model.embed_tokens.weight"][token] for token in idx], []
    for _ in range(loops):
        for i in range(LAYERS):
            xs = layer(xs, i)
        xs = [norm(x, w["model.norm.weight"]) for x in xs]  # read out and fed back
        logits.append(torch.stack([w["lm_head.weight"] @ x for x in xs]))
    return logits


def test_logits_at_every_loop_equal_a_naive_model_of_ouros_layer(hub):
    model, _, _ = stars.load(hub)
    model, idx = model.cpu().double(), torch.randint(VOCAB, (1, 9))
    for h, expected in zip(list(stars.trajectory(model, idx, 5))[1:], naive_logits(tensors(), idx[0], 5), strict=True):
        assert (model.readout(h)[0] - expected).abs().max() < 1e-9


def test_long_windows_give_the_same_as_short_ones(hub):
    model, _, _ = stars.load(hub)  # above 64 tokens attention is fused, and split again where it is differentiated
    model, idx = model.cpu().double(), torch.randint(VOCAB, (2, 80))
    h = model.embed(idx)
    v = stars.random_directions(h)
    parts = [stars.product(model.step, x, u, "jvp")[1] for x, u in ((h[:, :60], v[:, :60]),)]
    whole, product = stars.product(model.step, h, v, "jvp")
    assert torch.allclose(product[:, :60], parts[0], atol=1e-10) and torch.allclose(whole, model.step(h), atol=1e-10)
    assert torch.allclose(model.step(h)[:, :60], model.step(h[:, :60]), atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_gives_the_same_bits_back_whether_read_from_shards_or_one_file(tmp_path, dtype):
    safetensors = pytest.importorskip("safetensors.torch")
    one, many = write_hub(tmp_path / "one", dtype=dtype), write_hub(tmp_path / "many", dtype=dtype, shards=3)
    (a, _, _), (b, _, _) = stars.load(one), stars.load(many)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    stars.main([str(many), f"--export={tmp_path / 'out'}"])
    before, after = safetensors.load_file(one / "model.safetensors"), safetensors.load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (one / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_generation_with_a_cache_slot_per_loop_and_layer_equals_generation_without(hub):
    model, _, _ = stars.load(hub)
    model, idx = model.cpu().double(), torch.randint(VOCAB, (3, 70))
    assert len(model.new_cache(1, 1, LOOPS)) == LOOPS * LAYERS
    for loops in (1, 4, 6):
        cached = model.generate(idx, 12, loops)
        assert torch.equal(cached, model.generate(idx, 12, loops, use_cache=False)) and cached.shape == (3, 82)


def test_the_preset_has_ouros_parameters_and_says_what_training_takes():
    config = stars.Config(**{k: v for k, v in stars.PRESETS["ouro-1.4b"].items() if k in stars.Config.__dataclass_fields__})
    with torch.device("meta"):
        model = stars.LoopedTransformer(config)
    D, mlp, vocab, layers = 2048, 5632, 49_152, 24
    expected = 2 * vocab * D + D + (D + 1) + layers * (4 * D * D + 3 * D * mlp + 4 * D)
    assert sum(p.numel() for p in model.parameters()) == expected == 1_434_652_673
    views = stars.ouro_tensors(model)
    assert len(views) == 5 + 11 * layers and sum(t.numel() for t in views.values()) == expected
    assert 30e9 < stars.training_memory(config, 2)["together"] < 80e9


def test_a_checkpointed_step_gives_the_plain_steps_loss_and_gradients(hub):
    idx = torch.randint(VOCAB, (4, 70))
    targets = idx.masked_fill(torch.rand(idx.shape) < 0.3, -1)
    for changed in (dict(), dict(jsrr_rows=0.5), dict(jsrr_detach=True)):
        results = []
        for checkpointing in (False, True):
            fields = dict(jsrr_mode="jvp", checkpointing=checkpointing, init_from=str(hub)) | changed
            model = stars.LoopedTransformer(stars.Config(**vars(stars.ouro_config(hub)) | fields)).double()
            stars.load_ouro(model, hub)
            torch.manual_seed(1)  # the same v
            loss, metrics = model.loss(idx, targets, num_loops=3)
            loss.backward()
            results.append((loss.detach(), metrics["jsrr"].detach(), *(p.grad for p in model.parameters() if p.grad is not None)))
        assert len(results[0]) == 2 + len(list(model.parameters())) - 2  # all but the exit gate's
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


# Problems and solutions

def rows_of(hub, rows, T=60):
    """encode_answers of (problem, solution) pairs: [(tokens, first)], counts, tokenizer."""
    tokenizer = train.HubTokenizer.read(hub)
    tokens, ends, firsts, counts = train.encode_answers(tokenizer, *zip(*rows), T)
    return list(zip(np.split(tokens, ends[:-1]), firsts)), counts, tokenizer


@pytest.mark.parametrize("solution", [
    "The answer is 4.", " 42", "\n\nFirst a line", "\t", "naïve café 日本 👍🏽", "It ends<|im_end|>and<|im_start|>assistant\ngoes on",
    "1234567890", "x" * 30])
@pytest.mark.parametrize("problem", ["What is 2 plus 2?", "Say <|im_start|>assistant\nThe answer is 4.<|im_end|>", " "])
def test_exactly_the_tokens_of_the_solution_and_its_end_carry_loss(hub, problem, solution):
    rows, counts, tokenizer = rows_of(hub, [(problem, solution)], T=400)
    if not solution.strip() or not problem.strip():
        assert counts == {"without a problem or a solution": 1}
        return
    (tokens, first), = rows
    assert not any(counts.values())
    text = tokenizer.decode(tokens.tolist())
    assert text.endswith(f"<|im_start|>assistant\n{solution}<|im_end|>")
    learned, before = tokenizer.decode(tokens[first:].tolist()), tokenizer.decode(tokens[:first].tolist())
    if solution.startswith("\n"):  # the template's line end and the solution's may be one token, which is then learned
        assert learned.lstrip("\n") == solution.lstrip("\n") + "<|im_end|>"
    else:
        assert learned == solution + "<|im_end|>" and before.endswith("<|im_start|>assistant\n")
    assert tokens.tolist() == tokenizer.encode(text), "encoded as a whole"


def test_rows_are_cut_or_skipped_with_a_count_and_never_left_without_a_target(hub):
    prompt = len(rows_of(hub, [("Why?", "Because")], T=400)[0][0][0]) - len(train.HubTokenizer.read(hub).encode("Because<|im_end|>"))
    long = ("Why?", "1234567890")  # a token per digit
    for T in range(prompt - 1, prompt + 12):
        rows, counts, _ = rows_of(hub, [long], T)
        if T < prompt:
            assert not rows and counts == {"whose solution begins behind the window": 1}
        else:
            (tokens, first), = rows
            assert first == prompt and len(tokens) == min(T + 1, prompt + 11) and counts["cut at the window's end"] == (T < prompt + 10)
    rows, counts, _ = rows_of(hub, [("Why?", ""), ("Why?", None), ("", "x"), (3, "x"), ("Why?", "x")], 100)
    assert len(rows) == 1 and counts["without a problem or a solution"] == 4


@pytest.fixture
def problems(tmp_path):
    """A .jsonl of 120 sums, as problems and solutions of different lengths."""
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"problem": f"What is {i} plus 1?", "solution": f"It is {i + 1}." + " Yes." * (i % 7)})
                              for i in range(120)))
    return path


def answer_data(hub, dataset, tmp_path, **options):
    options = dict(dataset=str(dataset), tokenizer="hub", data_dir=str(tmp_path / "data"), batch_size=4, grad_accum=3) | options
    return train.AnswerData(train.Options(**options), stars.Config(vocab_size=VOCAB, block_size=160, init_from=str(hub)))


def test_every_row_is_seen_once_an_epoch_in_batches_of_similar_lengths(hub, problems, tmp_path, capsys):
    data = answer_data(hub, problems, tmp_path)
    assert "120 rows, 120 used" in capsys.readouterr().out
    assert data.splits["val"].tolist() == [49, 99] and len(data.splits["train"]) == 118
    steps = [data.rows("train", i) for i in range(59)]  # of 12 rows: 6 epochs
    seen, lengths = np.concatenate(steps), np.diff(data.ends, prepend=0)
    assert len(seen) == 708 and (np.bincount(seen, minlength=120)[data.splits["train"]] == 6).all()
    spread = [np.ptp(lengths[part]) for rows in steps for part in np.split(rows, 3)]
    assert np.mean(spread) < 0.5 * np.mean([np.ptp(lengths[seen[i::177]]) for i in range(177)])
    answer_data(hub, problems, tmp_path)
    assert capsys.readouterr().out == ""  # from the cache


def test_an_answers_weight_does_not_depend_on_how_a_step_is_split(hub, problems, tmp_path):
    """Rows of 30 to 50 tokens, sorted by length across the micro-batches: a mean of means would weigh them unequally."""
    torch.manual_seed(0)
    config = dataclasses.replace(stars.ouro_config(hub), jsrr_lambda=0.0)
    model, splits = stars.LoopedTransformer(config).double(), {}
    for batch_size, grad_accum, world in ((8, 1, 1), (4, 2, 1), (1, 8, 1), (4, 2, 2)):
        data = answer_data(hub, problems, tmp_path, batch_size=batch_size, grad_accum=grad_accum)
        splits[batch_size, grad_accum, world] = step_gradients(model, data, world, num_loops=3)
    idx, targets = data.batch("train", 3)
    logits = F.linear(model.final(idx, 3), model.readout_weight)
    model.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for split, gradients in splits.items():
        assert (gradients - expected).norm() < 1e-12 * expected.norm(), split


def test_a_batch_is_its_rows_shifted_and_padded(hub, problems, tmp_path):
    data = answer_data(hub, problems, tmp_path)
    for split, i in [("val", 0), *(("train", i) for i in range(30))]:  # an epoch: row 0 is among them
        idx, targets = data.batch(split, i)
        for row, x, y in zip(data.rows(split, i), idx, targets, strict=True):
            tokens = data.tokens[data.ends[row - 1] if row else 0:data.ends[row]].tolist()
            n, first = len(tokens) - 1, data.firsts[row]
            assert x[:n].tolist() == tokens[:-1] and not x[n:].any()
            assert y[first - 1:n].tolist() == tokens[first:] and (y[:first - 1] == -1).all() and (y[n:] == -1).all()


def test_parquet_and_jsonl_are_read_alike(hub, problems, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([json.loads(line) for line in problems.read_text().splitlines()]).to_parquet(tmp_path / "a.parquet")
    assert train.read_problems(str(tmp_path / "a.parquet")) == train.read_problems(str(problems))


@pytest.mark.parametrize("text", ["", " ", "a  b\n\n\n c", "\r\n\t x", "naïve café", "日本語 テスト", "👍🏽 e\u0301", "12345.67", "don't I'LL",
                                  "<|im_end|>", "<|im_start|>user\n<|endoftext|>", "<|im_end", "\u00a0\u3000x", "a\x00b", "ﬁ½²"])
def test_tokens_are_the_librarys_and_decode_to_the_text(hub, text):
    tokenizers = pytest.importorskip("tokenizers")
    ours, theirs = train.HubTokenizer.read(hub), tokenizers.Tokenizer.from_file(str(hub / "tokenizer.json"))
    assert ours.encode(text) == theirs.encode(text).ids and ours.decode(ours.encode(text)) == text


@pytest.fixture
def fine_tune(hub, problems, tmp_path):
    """fine_tune('--field=value', ..) trains the tiny model into tmp_path/run and returns that path."""
    def run(*arguments):
        train.main(["stars", "--preset=ouro-1.4b", *SHAPE, "--block_size=160", f"--init_from={hub}", f"--dataset={problems}",
                    f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}", "--batch_size=4", "--grad_accum=1",
                    "--max_steps=4", "--warmup_steps=1", "--eval_batches=1", "--eval_interval=2", "--log_interval=1",
                    "--lr=1e-3", "--max_loops=2", "--device=cpu", "--dtype=float32", "--compile=off", *arguments])
        return tmp_path / "run"
    return run


def test_fine_tuning_starts_from_the_files_resumes_bit_for_bit_and_can_be_exported(fine_tune, hub, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    out = fine_tune("--lr=0", "--max_steps=1")
    assert "estimated memory" in (text := capsys.readouterr().out) and "measured at the peak" in text
    stars.main([str(out), f"--export={tmp_path / 'same'}"])
    for name, tensor in safetensors.load_file(tmp_path / "same/model.safetensors").items():
        assert torch.equal(tensor, tensors()[name]), name
    fine_tune("--overwrite", "--schedule=constant")
    whole = train.load_checkpoint(out, "stars")["weights"]
    assert not torch.equal(whole["blocks.0.attn.qkv.weight"], stars.load(hub)[0].state_dict()["blocks.0.attn.qkv.weight"].cpu())
    fine_tune("--overwrite", "--schedule=constant", "--max_steps=2")
    fine_tune("--resume", "--max_steps=4")
    resumed = train.load_checkpoint(out, "stars")["weights"]
    assert resumed.keys() == whole.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    trained, data_dir = capsys.readouterr().out, f"--data_dir={tmp_path / 'data'}"
    stars.main([str(out), "--loops=1,2,5", data_dir])
    assert "right tokens" in (table := capsys.readouterr().out) and len(table.splitlines()) == 5
    stars.main([str(out), data_dir])
    assert (table := capsys.readouterr().out) in trained and len(table.splitlines()) == 10, "what training ended with"
    assert "exactly right" not in trained


def test_the_diagnosis_of_answers_is_a_mean_over_their_tokens(hub, capsys):
    model, _, _ = stars.load(hub)
    idx, targets = torch.randint(VOCAB, (2, 4, 30))
    targets[:2, :25] = -1  # 5 targets in each of two rows, 30 in the others
    rows = list(zip(idx.split(2), targets.split(2)))
    stars.diagnose_answers(model.cpu(), rows, [2])
    logits = model.readout(list(stars.trajectory(model, idx, 2))[-1])[targets >= 0]
    ce = F.cross_entropy(logits, targets[targets >= 0]).item()
    right = (logits.argmax(-1) == targets[targets >= 0]).float().mean().item()
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["2", f"{ce:.4f}", f"{right:.2%}"]


@pytest.mark.parametrize("damage, message", [
    (lambda d: (d / "model.safetensors").unlink(), "hub/model.safetensors cannot be read: FileNotFoundError"),
    (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-1000]),
     "hub/model.safetensors cannot be read"),
    (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'),
     "hub/model-00002-of-00002.safetensors cannot be read: FileNotFoundError"),
    (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "hub/model.safetensors.index.json cannot be read"),
    (lambda d: (d / "config.json").write_text("{}"), "does not describe a model of Ouro's form (KeyError"),
    (lambda d: (d / "config.json").write_text(config_json(num_key_value_heads=2)), "num_key_value_heads is 2, not 4"),
    (lambda d: (d / "config.json").write_text(config_json(num_attention_heads=0)), "Ouro's form (ZeroDivisionError"),
    (lambda d: (d / "tokenizer.json").write_text('{"model": {"type": "Other"}}'), "the tokenizer's files cannot be read"),
    (lambda d: (d / "tokenizer_config.json").write_text("{}"), "has no chat template"),
    (lambda d: (d / "tokenizer.json").unlink(), "no such checkpoint"),
])
def test_a_damaged_directory_is_one_clear_line(tmp_path, damage, message):
    directory = write_hub(tmp_path / "hub")
    damage(directory)
    with pytest.raises(UserError) as error:
        stars.load(directory)[2].chat([], True)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("changed, reason", [
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling is {"),
    (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling is {'rope_type': 'dynamic', 'factor': 2.0}"),
    (dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}), "rope_scaling is {'rope_type': 'yarn'"),
    (dict(use_sliding_window=True), "use_sliding_window is True"), (dict(sliding_window=64), "sliding_window is 64"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types is ['full_attention', 'sliding_attention']"),
    (dict(head_dim=32), "head_dim is 32, not 16"), (dict(early_exit_threshold=0.9), "early_exit_threshold is 0.9"),
    (dict(model_type="llama"), "model_type is llama"), (dict(torch_dtype="int8"), "torch_dtype is int8"),
    (dict(torch_dtype="auto"), "torch_dtype is auto")])
def test_a_config_that_asks_for_another_model_is_refused(tmp_path, changed, reason):
    (tmp_path / "config.json").write_text(config_json(**changed))
    with pytest.raises(UserError) as error:
        stars.ouro_config(tmp_path)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_config_that_says_what_is_so_anyway_is_read(tmp_path):
    said = dict(rope_scaling=None, use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * LAYERS,
                head_dim=WIDTH // HEADS, early_exit_threshold=1.0, max_position_embeddings=65536)
    for changed in ({}, said, dict(use_sliding_window=False, sliding_window=64), dict(rope_scaling={"rope_type": "default"}),
                    dict(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})):
        (tmp_path / "config.json").write_text(config_json(**changed))
        theta = 5e5 if "rope_parameters" in changed else 1e6
        assert stars.ouro_config(tmp_path) == stars.Config(**stars.OURO | dict(
            vocab_size=VOCAB, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, mlp_width=MLP, rope_theta=theta, num_loops=LOOPS))


def test_the_dtype_may_be_written_with_torch_before_it(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    directory = write_hub(tmp_path / "hub", dtype="bfloat16")
    (directory / "config.json").write_text(config_json("torch.bfloat16"))
    stars.main([str(directory), f"--export={tmp_path / 'out'}"])
    for name, tensor in safetensors.load_file(tmp_path / "out/model.safetensors").items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, tensors(torch.bfloat16)[name])


def test_tables_of_rotations_in_the_files_are_passed_over_and_integers_are_refused(tmp_path):
    weights = tensors()
    tables = {f"model.{where}rotary_emb.inv_freq": torch.ones(8) for where in ("", "layers.0.self_attn.")}
    model, _, _ = stars.load(write_hub(tmp_path / "hub", weights | tables))
    assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in stars.ouro_tensors(model).items())
    for dtype in (torch.int8, torch.int64, torch.bool):
        wrong = {"lm_head.weight": weights["lm_head.weight"].to(dtype)}
        with pytest.raises(UserError, match=f"1 tensors do not fit; lm_head.weight is {str(dtype)[6:]}, not of floats"):
            stars.load(write_hub(tmp_path / str(dtype), weights | wrong))


@pytest.mark.parametrize("name", ["../../../escaped.txt", "{tmp}/escaped.txt", "below/escaped.txt", "..\\escaped.txt",
                                  "C:escaped.txt", "escaped.sh", "..", "model.safetensors.index.json"])
def test_an_export_writes_bare_names_only(hub, tmp_path, name):
    model, options, tokenizer = stars.load(hub)
    spec = {"name": "hub", "files": tokenizer.spec["files"] | {name.format(tmp=tmp_path): "echo hi"}}
    (tmp_path / "run").mkdir()
    torch.save({"model": "stars", "preset": "x", "config": vars(model.config), "step": 1, "max_steps": 1, "best": 0.0,
                "tokenizer": spec, "options": vars(options), "weights": model.state_dict()}, tmp_path / "run/ckpt.pt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="the tokenizer's files cannot be read: ValueError, unexpected names"):
        stars.main([str(tmp_path / "run"), f"--export={tmp_path / 'a/b/c/out'}"])
    assert sorted(tmp_path.rglob("*")) == before


def test_chat_templates_may_be_named_and_call_what_hugging_faces_may(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    assert chat_tokenizer(named).chat(CHAT, True) == chat_tokenizer(CHATML).chat(CHAT, True)
    year = chat_tokenizer("{{ strftime_now('%Y') }}").chat(CHAT, True)
    assert re.fullmatch("20[0-9][0-9]", year)
    assert chat_tokenizer("{% for m in messages %}{% break %}{% endfor %}{{ tools is none }}").chat(CHAT, True) == "True"
    assert chat_tokenizer("{{ messages[0] | tojson }}").chat([{"role": "user", "content": "<é>"}], True) == (
        '{"role": "user", "content": "<é>"}')


@pytest.mark.parametrize("template, message", [
    ("{{ raise_exception('roles must alternate') }}", "the chat template does not write a chat of user: roles must alternate"),
    ("{{ nothing() }}", "the chat template does not write a chat of user: 'nothing' is undefined"),
    ("{{ 1 / 0 }}", "the chat template does not write a chat of user: division by zero"),
    ("{{ messages.append(1) }}", "the chat template does not write a chat of user: "),
    ([{"name": "tool_use", "template": "no"}], "the tokenizer's files cannot be read: KeyError, 'default'"),
    ("{% if %}", "the tokenizer's files cannot be read: TemplateSyntaxError"),
    (3, "the tokenizer's files cannot be read: TypeError")])
def test_chat_templates_that_fail_or_refuse_are_one_clear_line(template, message):
    with pytest.raises(UserError) as error:
        chat_tokenizer(template).chat(CHAT, True)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    weights = tensors()
    del weights["model.norm.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(WIDTH, MLP)
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(MLP, WIDTH)
    with pytest.raises(UserError) as error:
        stars.load(write_hub(tmp_path / "hub", weights))
    for part in ("3 tensors", "model.norm.weight is missing", "model.layers.2.mlp.up_proj.weight is extra",
                 "model.layers.0.mlp.up_proj.weight is [64, 96], not [96, 64]"):
        assert part in str(error.value)


@pytest.mark.parametrize("rows, message", [
    (['{"problem": "a"}'], "expected rows with the columns `problem` and `solution`"), ([], "expected rows with the columns"),
    (['{"problem": "a"'], "cannot be read: JSONDecodeError"), (['{"problem": "a", "solution": "b"}'] * 49, "49 usable rows"),
    (['{"problem": "a", "solution": ""}'] * 50, "0 usable rows")])
def test_rows_that_cannot_be_learned_are_one_clear_line(hub, tmp_path, rows, message):
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    with pytest.raises(UserError, match=message):
        answer_data(hub, tmp_path / "rows.jsonl", tmp_path)


def test_mistakes_of_fine_tuning_are_one_clear_line(hub, problems, tmp_path, fine_tune):
    for arguments, message in ((["--n_layer=3"], "add --n_layer=2"), (["--init_from="], "expected a Hugging Face directory"),
                               (["--vocab_size=100"], "types, more than --vocab_size=100"),
                               ([f"--dataset={tmp_path}/none.jsonl"], "no such file"),
                               (["--jsrr_mode=vjp"], "--checkpointing needs --jsrr_mode=jvp")):
        with pytest.raises(UserError, match=message):
            fine_tune(*arguments)
    with pytest.raises(UserError, match="not empty"):
        stars.main([str(hub), f"--export={tmp_path}"])


def test_without_an_optional_package_the_command_says_which_to_install(hub, monkeypatch):
    for module, package, call in (("lm_eval", "lm-eval", lambda: stars.main([str(hub), "--eval=gsm8k"])),
                                  ("safetensors.torch", "safetensors", lambda: stars.load(hub)),
                                  ("tokenizers", "tokenizers", lambda: train.HubTokenizer.read(hub)),
                                  ("datasets", "datasets", lambda: train.read_problems("someone/rows"))):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(UserError, match=f"this needs the package {package}: pip install {package}$"):
                call()


# lm-evaluation-harness

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
    import lm_eval.tasks
    return lm_eval.tasks.TaskManager()


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """--eval=.. of three tasks in the harness's own YAML, on a JSONL of 7 sums."""
    harness = pytest.importorskip("lm_eval.tasks")
    manager = task_manager()
    monkeypatch.setattr(harness, "TaskManager", lambda: copy.copy(manager))
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


def check_adapter(tokenizer, block_size, score, generate, logits, teacher=None):
    """The adapter against one forward pass per text: logits(idx (1, T)) -> (1, T, V), or teacher(tokens, n) where the
    continuation is read in another way than the context."""
    texts = [("What is 1 plus 2?", " 3"), ("What is 1 plus 2? ", "12"), ("a", "bc"), ("", "What is"), ("What is 1 plus", " 2?"),
             ("What is 1 plus 3?", " " + "4 " * 12), ("no" * 40, "yes")]
    results = []
    for rows in (1, 4):
        adapter = train.harness_adapter(tokenizer, block_size, score, generate, rows)
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


def settings_of(monkeypatch, main, argv):
    """What a script hands to train.evaluate: {label: (score, generate)}, and its tokenizer and window."""
    caught = {}
    monkeypatch.setattr(train, "evaluate", lambda path, e, tokenizer, T, settings: caught.update(
        tokenizer=tokenizer, T=T, settings=settings))
    main(argv)
    return caught


def test_the_adapter_of_stars_equals_direct_computation(hub, monkeypatch):
    pytest.importorskip("lm_eval")
    load = stars.load

    def load_double(path):
        model, options, tokenizer = load(path)
        model.config.block_size = 40
        return model.cpu().double(), options, tokenizer
    monkeypatch.setattr(stars, "load", load_double)
    model, _, tokenizer = stars.load(hub)
    caught = settings_of(monkeypatch, stars.main, [str(hub), "--eval=x", "--loops=1,3"])
    assert list(caught["settings"]) == ["loops=1", "loops=3"]
    for t, functions in zip((1, 3), caught["settings"].values()):
        logits = lambda idx: model.readout(list(stars.trajectory(model, idx, t))[-1])
        texts, generated, (free,) = check_adapter(tokenizer, caught["T"], *functions, logits)
        start = tokenizer.encode("What is")
        assert free == tokenizer.decode(greedy(logits, start, 5)[len(start):]).split("<|im_end|>")[0]
        for (context, _), text in zip(texts, generated):
            start = (tokenizer.encode(context) or [tokenizer.eos])[-35:]
            new = greedy(logits, start, 5)[len(start):]
            new = new[:new.index(tokenizer.eos)] if tokenizer.eos in new else new
            assert text == tokenizer.decode(new).split("?")[0].split("er")[0]


def run_of(tmp_path, name, model, text, tokenizer="char", **options):
    """A run directory of an untrained model with a tokenizer of the text's types."""
    tokenizer = train.Tokenizer(tokenizer, sorted(train.count_types(tokenizer, text)) + ["<unk>"] * (tokenizer == "regex"))
    (tmp_path / name).mkdir()
    torch.save({"model": name, "preset": "tiny", "config": vars(model.config), "step": 600, "max_steps": 600, "best": 0.0, "tokenizer": tokenizer.spec,
                "options": vars(train.Options(**options)), "weights": model.state_dict()}, tmp_path / name / "ckpt.pt")
    return tmp_path / name, tokenizer


CHARACTERS = "What is 0123456789 plus? abcdefghijklmnopqrstuvwxyzT.\n"


def test_the_adapter_of_looped_gpt_equals_direct_computation(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    V = len(set(CHARACTERS))
    model = looped_gpt.LoopedGPT(looped_gpt.Config(vocab_size=V, block_size=30, n_layer=1, n_head=2, n_embd=16, num_loops=3,
                                                   readout="final_only"))
    path, tokenizer = run_of(tmp_path, "looped_gpt", model, CHARACTERS)
    double, load = model.double().eval(), train.load_model
    monkeypatch.setattr(train, "load_model", lambda *a: (double, *load(*a)[1:]))
    caught = settings_of(monkeypatch, looped_gpt.main, [str(path), "--eval=x", "--loops=1,3"])
    for K, functions in zip((1, 3), caught["settings"].values(), strict=True):
        logits = lambda idx: model.readout(model.states(idx, K)[-1], final=K >= 3)
        _, _, (free,) = check_adapter(tokenizer, 30, *functions, logits)
        assert free == tokenizer.decode(greedy(logits, tokenizer.encode("What is"), 5)[7:])


def test_the_adapter_of_fullbandwidth_equals_reading_token_by_token(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    V = len(set(CHARACTERS))
    model = fullbandwidth.FullBandwidthGPT(fullbandwidth.Config(vocab_size=V, block_size=30, n_layer=2, n_head=2, n_kv_head=2,
                                                                n_embd=16, mlp_width=32))
    path, tokenizer = run_of(tmp_path, "fullbandwidth", model, CHARACTERS)
    double, load = model.double().eval(), fullbandwidth.load_model
    monkeypatch.setattr(fullbandwidth, "load_model", lambda path: (double, *load(path)[1:]))
    caught = settings_of(monkeypatch, fullbandwidth.main, [str(path), "--eval=x", "--mode=standard,soft,fused"])

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
        for mode, functions in caught["settings"].items():
            _, _, (free,) = check_adapter(tokenizer, 30, *functions, None, teacher(mode))
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
    return train.harness_adapter(tokenizer, block_size, score, generate, 4), table, calls


def path_sum(table, tokens):
    return sum(table[a, b].item() for a, b in zip(tokens, tokens[1:]))


def one_word_tokenizer():
    """Byte-level BPE in which "Ans" and "Answer" are each one token."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(["Answer\nAns\n"] * 9, tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return train.HubTokenizer({"tokenizer.json": bpe.to_str()})


def test_a_choice_that_merges_with_the_question_is_scored_by_its_own_tokens_instead_of_winning_with_zero():
    pytest.importorskip("lm_eval")
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
    model = pytest.importorskip("lm_eval.api.model")
    tokenizer = {"hub": lambda: train.HubTokenizer(tokenizer_files()), "one word": one_word_tokenizer,
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
            assert model.TemplateLM._encode_pair(adapter, text[:split], text[split:]) == (before, whole[len(before):])
        else:
            spanned += 1
            expected = path_sum(table, before[-1:] + tokenizer.encode(text[len(body):]))
        assert abs(total - expected) < 1e-9 and total < -1, (text, split)
    assert (spanned > 30) == (name == "hub")


def test_what_has_no_tokens_or_does_not_fit_is_refused_instead_of_scored():
    pytest.importorskip("lm_eval")
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
    pytest.importorskip("lm_eval")
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
    pytest.importorskip("lm_eval")
    tokenizer = chat_tokenizer()
    adapter, _, _ = bigrams(tokenizer, 100, tokenizer.encode("The answer is 4.<|im_end|>\n5.<|endoftext|>6"))
    if answer is UserError:
        with pytest.raises(UserError, match=f"--eval: a task asks for .*{[*wanted][-1] if 'max_gen_toks' not in wanted else '0 tokens'}"):
            adapter.generate_until([Request("2 + 2?", wanted)])
    else:
        assert adapter.generate_until([Request("2 + 2?", wanted)] * 2) == [answer] * 2


@pytest.mark.parametrize("template, config, ends", [
    (CHATML, {}, {"<|endoftext|>", "<|im_end|>"}), (CHATML, {"eos_token": "<|im_end|>"}, {"<|im_end|>"}),
    (CHATML.replace("<|im_end|>", ""), {}, {"<|endoftext|>"}), (None, {}, {"<|endoftext|>"})])
def test_an_answer_ends_at_the_end_of_text_and_at_the_templates_end_mark(template, config, ends):
    tokenizer = chat_tokenizer(template, **config)
    assert {tokenizer.decode([token]) for token in tokenizer.ends} == ends


@pytest.mark.parametrize("name", ["char", "regex"])
def test_texts_to_stop_at_may_be_absent_from_the_vocabulary(name):
    """A character tokenizer could not encode them; of the regex one they were <unk>, at which it then stopped."""
    pytest.importorskip("lm_eval")
    vocab = list("The answr is4.Q:<unk>") if name == "char" else ["The", " ", "answer", "<unk>", "4", ".", "\n", "is"]
    tokenizer = train.Tokenizer(name, sorted(set(vocab)) if name == "char" else vocab)
    answer = tokenizer.encode("The answer is 4.") if name == "char" else [0, 1, 2, 1, 3, 1, 4, 5]
    adapter, _, _ = bigrams(tokenizer, 60, answer)
    until = ["\n\n", "Question:", "日"]
    text = tokenizer.decode(answer)
    assert adapter.generate_until([Request("The", {"until": until})]) == [text]
    assert adapter.generate_until([Request("The", {"until": [*until, "4"]})]) == [text[:-2]]


def test_a_prompt_and_its_answer_share_the_window():
    pytest.importorskip("lm_eval")
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
    model, _, _ = stars.load(hub)
    model = model.cpu().double()
    states = lambda idx, cache, start: model.final(idx, 2, cache, start)
    readout = lambda h: F.linear(h, model.readout_weight)
    prompts = torch.randint(VOCAB, (3, 9)).tolist()
    prompts, limits = [prompts[0][:4], prompts[1], prompts[2][:6]], [7, 1, 4]
    new = train.decode(states, readout, lambda B, S: model.new_cache(B, S, 2), prompts, limits, {-1})
    for row, prompt, limit in zip(new, prompts, limits, strict=True):
        assert prompt + row == greedy(lambda idx: readout(model.final(idx, 2)), prompt, limit)


def test_the_harness_runs_its_own_tasks_and_the_results_stand_beside_the_run(hub, tasks, tmp_path, capsys):
    directory = write_hub(tmp_path / "hub")
    tables = []
    for rows in (1, 16):
        stars.main([str(directory), tasks[0], "--loops=1,4", f"--eval_rows={rows}"])
        tables.append(json.loads((directory / "eval.json").read_text()))
        (directory / "eval.json").unlink()
    assert "sums_choice" in (out := capsys.readouterr().out) and "loops=4" in out
    for task, loops in itertools.product(TASKS, ("loops=1", "loops=4")):  # the batch does not matter, but for rounding
        one, many = (table[task][loops] for table in tables)
        assert one.keys() == many.keys()
        assert all(x == y or math.isclose(x, y, rel_tol=1e-5) for x, y in zip(one.values(), many.values()))
    assert set(tables[0]) == set(TASKS) and set(tables[0]["sums_choice"]) == {"loops=1", "loops=4"}
    model, _, tokenizer = stars.load(directory)
    right = 0
    for row in tasks[1]:  # the choice task by hand, at 4 loops
        prompt = tokenizer.chat([{"role": "system", "content": train.SYSTEM},
                                 {"role": "user", "content": row["question"] + "\nThe answer is"}], True)
        totals = []
        for choice in row["choices"]:
            tokens, n = tokenizer.encode(prompt + choice), len(tokenizer.encode(prompt.rstrip()))
            logits = F.linear(model.final(torch.tensor([tokens[:-1]], device=model.wte.weight.device), 4), model.readout_weight)
            totals.append(-F.cross_entropy(logits[0, n - 1:].cpu(), torch.tensor(tokens[n:]), reduction="sum").item())
        right += totals.index(max(totals)) == 0
    assert tables[0]["sums_choice"]["loops=4"]["acc,none"] == right / 7


def test_a_task_that_does_not_exist_is_one_clear_line(hub, tmp_path, tasks):
    with pytest.raises(UserError, match="--eval=gsm8: lm-evaluation-harness has no such task; did you mean"):
        stars.main([str(hub), "--eval=gsm8"])
    with pytest.raises(UserError, match="no such file"):
        stars.main([str(hub), f"--eval={tmp_path}/none.yaml"])


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
            stars.main([str(hub), f"--eval={path}", *arguments])
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
    train.evaluate(tmp_path / "run", train.Evaluation(names, limit=2), tokenizer, 400, {"x": (score, generate)})
    assert len(prompts) == 2 * 3 + 2 and all(text.endswith("<|im_start|>assistant\nThe best answer is") for text in prompts)
    assert "fit into" not in capsys.readouterr().out


def test_what_the_window_cut_and_what_was_read_as_unknown_is_said(tasks, tmp_path, capsys):
    model = looped_gpt.LoopedGPT(looped_gpt.Config(vocab_size=6, block_size=12, n_layer=1, n_head=2, n_embd=16, num_loops=2))
    path, _ = run_of(tmp_path, "looped_gpt", model, "What is\n?", tokenizer="regex")
    looped_gpt.main([str(path), tasks[0], "--limit=2"])
    out = capsys.readouterr().out
    assert re.search(r"\d+ prompts lost their beginning, or answers their end, to fit into 12 tokens", out)
    assert re.search(r"\d+ words and signs of these tasks are not in the vocabulary: read as <unk>", out)


def test_a_stop_that_the_vocabulary_lacks_is_one_clear_line(tmp_path):
    model = fullbandwidth.FullBandwidthGPT(fullbandwidth.Config(vocab_size=6, block_size=12, n_layer=1, n_head=2, n_kv_head=2,
                                                                n_embd=16, mlp_width=16))
    path, _ = run_of(tmp_path, "fullbandwidth", model, "What is\n?", tokenizer="regex")
    with pytest.raises(UserError, match=r"--stop='!\?': the vocabulary lacks \['!'\]"):
        fullbandwidth.main([str(path), "--prompt=What", "--stop=!?"])
