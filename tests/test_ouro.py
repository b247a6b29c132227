"""experiments/ouro.py: Ouro in Hugging Face's layout, and supervised fine-tuning; small files of the real formats, made
here. What needs an optional package is skipped without it."""
import dataclasses, json, math, re, sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stars, test_values, train
from conftest import step_gradients
from experiments import ouro
from train import UserError

WIDTH, LAYERS, HEADS, MLP, VOCAB, LOOPS = 64, 2, 4, 96, 512, 4
SHAPE = dict(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, mlp_width=MLP, vocab_size=VOCAB)
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
    return ouro.HubTokenizer(tokenizer_files() | {"tokenizer_config.json": json.dumps(config)})


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write_hub(tmp_path_factory.mktemp("hub"))


# The model and its files

def test_diagnostics_of_a_hugging_face_directory_are_refused_in_one_line(hub):
    with pytest.raises(train.UserError, match="is a Hugging Face directory, not a run with held-out rows: "
                                              "measure it with python experiments/harness.py .* --eval=TASK"):
        ouro.main([str(hub)])


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
    model, _, _ = ouro.load(hub)
    model, idx = model.cpu().double(), torch.randint(VOCAB, (1, 9))
    for h, expected in zip(list(stars.trajectory(model, idx, 5))[1:], naive_logits(tensors(), idx[0], 5), strict=True):
        assert (model.readout(h)[0] - expected).abs().max() < 1e-9


def test_long_windows_give_the_same_as_short_ones(hub):
    model, _, _ = ouro.load(hub)  # above 64 tokens attention is fused, and split again where it is differentiated
    model, idx = model.cpu().double(), torch.randint(VOCAB, (2, 80))
    h = model.embed(idx)
    v = stars.random_directions(h)
    parts = [ouro.jacobian_product(model.step, x, u, "jvp")[1] for x, u in ((h[:, :60], v[:, :60]),)]
    whole, product = ouro.jacobian_product(model.step, h, v, "jvp")
    assert torch.allclose(product[:, :60], parts[0], atol=1e-10) and torch.allclose(whole, model.step(h), atol=1e-10)
    assert torch.allclose(model.step(h)[:, :60], model.step(h[:, :60]), atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_gives_the_same_bits_back_whether_read_from_shards_or_one_file(tmp_path, dtype):
    safetensors = pytest.importorskip("safetensors.torch")
    one, many = write_hub(tmp_path / "one", dtype=dtype), write_hub(tmp_path / "many", dtype=dtype, shards=3)
    (a, _, _), (b, _, _) = ouro.load(one), ouro.load(many)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    ouro.main([str(many), f"--export={tmp_path / 'out'}"])
    before, after = safetensors.load_file(one / "model.safetensors"), safetensors.load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (one / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_generation_with_a_cache_slot_per_loop_and_layer_equals_generation_without(hub):
    model, _, _ = ouro.load(hub)
    model, idx = model.cpu().double(), torch.randint(VOCAB, (3, 70))
    assert model.new_cache(1, 1, LOOPS).shape[:2] == (LOOPS, LAYERS)
    for loops in (1, 4, 6):
        cache, tokens, length = model.new_cache(3, 82, loops), idx, 0
        for _ in range(12):
            with torch.no_grad():
                h = model.final(tokens[:, length:], loops, cache, length)[:, -1]
                again = model.final(tokens, loops)[:, -1]
            assert torch.allclose(h, again, rtol=1e-9, atol=1e-9)
            assert torch.equal(model.readout(h).argmax(-1), model.readout(again).argmax(-1))
            length = tokens.shape[1]
            tokens = torch.cat([tokens, model.readout(h).argmax(-1, keepdim=True)], dim=1)
        assert tokens.shape == (3, 82)


def test_the_preset_has_ouros_parameters_and_says_what_training_takes():
    config = ouro.Config()
    with torch.device("meta"):
        model = ouro.Ouro(config)
    D, mlp, vocab, layers = 2048, 5632, 49_152, 24
    expected = 2 * vocab * D + D + (D + 1) + layers * (4 * D * D + 3 * D * mlp + 4 * D)
    assert sum(p.numel() for p in model.parameters()) == expected == 1_434_652_673
    views = ouro.file_tensors(model)
    assert len(views) == 5 + 11 * layers and sum(t.numel() for t in views.values()) == expected
    assert 30e9 < ouro.training_memory(config, 2)["together"] < 80e9


def test_a_checkpointed_step_gives_the_plain_steps_loss_and_gradients(hub):
    idx = torch.randint(VOCAB, (4, 70))
    targets = idx.masked_fill(torch.rand(idx.shape) < 0.3, -1)
    for changed in (dict(), dict(jsrr_rows=0.5)):
        results = []
        for checkpointing in (False, True):
            fields = dict(checkpointing=checkpointing) | changed
            model = ouro.Ouro(ouro.Config(**vars(ouro.hub_config(hub)) | fields)).double()
            ouro.load_weights(model, hub)
            torch.manual_seed(1)  # the same v
            loss, metrics = model.loss(idx, targets, num_loops=3)
            loss.backward()
            results.append((loss.detach(), metrics["jsrr"].detach(), *(p.grad for p in model.parameters() if p.grad is not None)))
        assert len(results[0]) == 2 + len(list(model.parameters())) - 2  # all but the exit gate's
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        h = model.final(idx, 3)[:max(1, int(4 * model.config.jsrr_rows))]
        torch.manual_seed(1)
        _, Jv = ouro.jacobian_product(model.step, h, ouro.random_directions(h), "jvp")  # of the loop as a whole
        assert torch.allclose(Jv.square().sum() / len(h), results[0][1], rtol=1e-9)


# Problems and solutions

def rows_of(hub, rows, T=60):
    """encode_answers of (problem, solution) pairs: [(tokens, first)], counts, tokenizer."""
    tokenizer = ouro.HubTokenizer.read(hub)
    tokens, ends, firsts, counts = ouro.encode_answers(tokenizer, *zip(*rows), T)
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
    prompt = len(rows_of(hub, [("Why?", "Because")], T=400)[0][0][0]) - len(ouro.HubTokenizer.read(hub).encode("Because<|im_end|>"))
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
    options = dict(dataset=str(dataset), data_dir=str(tmp_path / "data"), batch_size=4, grad_accum=3) | options
    return ouro.AnswerData(train.Options(**options), ouro.Config(vocab_size=VOCAB, block_size=160, init_from=str(hub)))


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


def test_a_damaged_cache_is_named_and_built_again(hub, problems, tmp_path, capsys):
    expected = answer_data(hub, problems, tmp_path).tokens.tolist()
    cache, = (tmp_path / "data").glob("*.npz")
    for cut in (slice(500), slice(0)):
        cache.write_bytes(cache.read_bytes()[cut])
        assert ouro.read_arrays(cache) is None
        capsys.readouterr()
        assert answer_data(hub, problems, tmp_path).tokens.tolist() == expected
        assert f"{cache} is damaged: built again" in capsys.readouterr().out
        assert ouro.read_arrays(cache)["tokens"].tolist() == expected


def test_an_answers_weight_does_not_depend_on_how_a_step_is_split(hub, problems, tmp_path):
    """Rows of 30 to 50 tokens, sorted by length across the micro-batches: a mean of means would weigh them unequally."""
    torch.manual_seed(0)
    config = dataclasses.replace(ouro.hub_config(hub), jsrr_lambda=0.0)
    model, splits = ouro.Ouro(config).double(), {}
    for batch_size, grad_accum, world in ((8, 1, 1), (4, 2, 1), (1, 8, 1), (4, 2, 2)):
        data = answer_data(hub, problems, tmp_path, batch_size=batch_size, grad_accum=grad_accum)
        splits[batch_size, grad_accum, world] = step_gradients(model, data, world, num_loops=3)
    idx, targets = data.batch("train", 3)
    logits = model.readout(model.final(idx, 3))
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
    assert ouro.read_problems(str(tmp_path / "a.parquet")) == ouro.read_problems(str(problems))


@pytest.mark.parametrize("text", ["", " ", "a  b\n\n\n c", "\r\n\t x", "naïve café", "日本語 テスト", "👍🏽 e\u0301", "12345.67", "don't I'LL",
                                  "<|im_end|>", "<|im_start|>user\n<|endoftext|>", "<|im_end", "\u00a0\u3000x", "a\x00b", "ﬁ½²"])
def test_tokens_are_the_librarys_and_decode_to_the_text(hub, text):
    tokenizers = pytest.importorskip("tokenizers")
    ours, theirs = ouro.HubTokenizer.read(hub), tokenizers.Tokenizer.from_file(str(hub / "tokenizer.json"))
    assert ours.encode(text) == theirs.encode(text).ids and ours.decode(ours.encode(text)) == text


@pytest.fixture
def fine_tune(hub, problems, tmp_path):
    """fine_tune('--field=value', ..) trains the tiny model into tmp_path/run and returns that path."""
    def run(*arguments):
        ouro.main(["train", *(f"--{name}={n}" for name, n in SHAPE.items()), "--block_size=160", f"--init_from={hub}",
                   f"--dataset={problems}", f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}",
                   "--batch_size=4", "--grad_accum=1", "--max_steps=4", "--warmup_steps=1", "--eval_batches=1",
                   "--eval_interval=2", "--log_interval=1", "--lr=1e-3", "--max_loops=2", "--device=cpu",
                   "--dtype=float32", "--compile=off", *arguments])
        return tmp_path / "run"
    return run


def test_fine_tuning_starts_from_the_files_resumes_bit_for_bit_and_can_be_exported(fine_tune, hub, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    out = fine_tune("--lr=0", "--max_steps=1")
    assert "estimated memory" in (text := capsys.readouterr().out) and "measured at the peak" in text
    ouro.main([str(out), f"--export={tmp_path / 'same'}"])
    for name, tensor in safetensors.load_file(tmp_path / "same/model.safetensors").items():
        assert torch.equal(tensor, tensors()[name]), name
    fine_tune("--overwrite", "--schedule=constant")
    whole = train.load_checkpoint(out, "ouro")["weights"]
    name = "blocks.0.self_attn.q_proj.weight"
    assert not torch.equal(whole[name], ouro.load(hub)[0].state_dict()[name].cpu())
    fine_tune("--overwrite", "--schedule=constant", "--max_steps=2")
    fine_tune("--resume", "--max_steps=4")
    resumed = train.load_checkpoint(out, "ouro")["weights"]
    assert resumed.keys() == whole.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    trained, data_dir = capsys.readouterr().out, f"--data_dir={tmp_path / 'data'}"
    ouro.main([str(out), "--loops=1,2,5", data_dir])
    assert "right tokens" in (table := capsys.readouterr().out) and len(table.splitlines()) == 4
    ouro.main([str(out), data_dir])
    assert (table := capsys.readouterr().out) in trained and len(table.splitlines()) == 9, "what training ended with"
    assert "exactly right" not in trained


def test_a_stopped_run_says_how_to_go_on(fine_tune, capsys, monkeypatch):
    save = train.save_training

    def save_and_ask(run, name):
        save(run, name)
        run.interrupts.asked = 15
    monkeypatch.setattr(train, "save_training", save_and_ask)
    with pytest.raises(SystemExit):
        fine_tune()
    assert "go on with: python experiments/ouro.py train --out_dir=" in capsys.readouterr().out


def test_muon_takes_the_blocks_matrices(hub):
    model, _, _ = ouro.load(hub)
    _, muon = train.build_optimizers(model, train.Options(optimizer="muon"))
    matrices = {id(p) for p in model.blocks.parameters() if p.ndim == 2}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == matrices and len(matrices) == 7 * LAYERS


def test_the_diagnosis_of_answers_is_a_mean_over_their_tokens(hub, capsys):
    model, _, _ = ouro.load(hub)
    idx, targets = torch.randint(VOCAB, (2, 4, 30))
    targets[:2, :25] = -1  # 5 targets in each of two rows, 30 in the others
    rows = list(zip(idx.split(2), targets.split(2)))
    ouro.diagnose_answers(model.cpu(), rows, [2])
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
        ouro.load(directory)[2].chat([], True)
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
        ouro.hub_config(tmp_path)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_config_that_says_what_is_so_anyway_is_read(tmp_path):
    said = dict(rope_scaling=None, use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * LAYERS,
                head_dim=WIDTH // HEADS, early_exit_threshold=1.0, max_position_embeddings=65536)
    for changed in ({}, said, dict(use_sliding_window=False, sliding_window=64), dict(rope_scaling={"rope_type": "default"}),
                    dict(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})):
        (tmp_path / "config.json").write_text(config_json(**changed))
        theta = 5e5 if "rope_parameters" in changed else 1e6
        assert ouro.hub_config(tmp_path) == ouro.Config(**SHAPE, rope_theta=theta, num_loops=LOOPS)


def test_the_dtype_may_be_written_with_torch_before_it(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    directory = write_hub(tmp_path / "hub", dtype="bfloat16")
    (directory / "config.json").write_text(config_json("torch.bfloat16"))
    ouro.main([str(directory), f"--export={tmp_path / 'out'}"])
    for name, tensor in safetensors.load_file(tmp_path / "out/model.safetensors").items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, tensors(torch.bfloat16)[name])


def test_tables_of_rotations_in_the_files_are_passed_over_and_integers_are_refused(tmp_path):
    weights = tensors()
    tables = {f"model.{where}rotary_emb.inv_freq": torch.ones(8) for where in ("", "layers.0.self_attn.")}
    model, _, _ = ouro.load(write_hub(tmp_path / "hub", weights | tables))
    assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in ouro.file_tensors(model).items())
    for dtype in (torch.int8, torch.int64, torch.bool):
        wrong = {"lm_head.weight": weights["lm_head.weight"].to(dtype)}
        with pytest.raises(UserError, match=f"1 tensors do not fit; lm_head.weight is {str(dtype)[6:]}, not of floats"):
            ouro.load(write_hub(tmp_path / str(dtype), weights | wrong))


@pytest.mark.parametrize("name", ["../../../escaped.txt", "{tmp}/escaped.txt", "below/escaped.txt", "..\\escaped.txt",
                                  "C:escaped.txt", "escaped.sh", "..", "model.safetensors.index.json"])
def test_an_export_writes_bare_names_only(hub, tmp_path, name):
    model, options, tokenizer = ouro.load(hub)
    spec = {"name": "hub", "files": tokenizer.spec["files"] | {name.format(tmp=tmp_path): "echo hi"}}
    (tmp_path / "run").mkdir()
    torch.save({"model": "ouro", "preset": "x", "config": vars(model.config), "step": 1, "max_steps": 1, "best": 0.0,
                "tokenizer": spec, "options": vars(options), "weights": model.state_dict()}, tmp_path / "run/ckpt.pt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="the tokenizer's files cannot be read: ValueError, unexpected names"):
        ouro.main([str(tmp_path / "run"), f"--export={tmp_path / 'a/b/c/out'}"])
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
        ouro.load(write_hub(tmp_path / "hub", weights))
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
                               (["--jsrr_mode=vjp"], "--jsrr_mode: no such field")):  # the loop is run again in jvp
        with pytest.raises(UserError, match=message):
            fine_tune(*arguments)
    with pytest.raises(UserError, match="not empty"):
        ouro.main([str(hub), f"--export={tmp_path}"])


def test_without_an_optional_package_the_command_says_which_to_install(hub, monkeypatch):
    for module, package, call in (("safetensors.torch", "safetensors", lambda: ouro.load(hub)),
                                  ("tokenizers", "tokenizers", lambda: ouro.HubTokenizer.read(hub)),
                                  ("datasets", "datasets", lambda: ouro.read_problems("someone/rows"))):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(UserError, match=f"this needs the package {package}: pip install {package}$"):
                call()


@pytest.mark.parametrize("template, config, ends", [
    (CHATML, {}, {"<|endoftext|>", "<|im_end|>"}), (CHATML, {"eos_token": "<|im_end|>"}, {"<|im_end|>"}),
    (CHATML.replace("<|im_end|>", ""), {}, {"<|endoftext|>"}), (None, {}, {"<|endoftext|>"})])
def test_an_answer_ends_at_the_end_of_text_and_at_the_templates_end_mark(template, config, ends):
    tokenizer = chat_tokenizer(template, **config)
    assert {tokenizer.decode([token]) for token in tokenizer.ends} == ends


def test_the_presets_rates_rise_stay_and_decay():
    o = train.Options(**ouro.PRESETS["1.4b"])
    warmup, decaying = 1250, 1250
    rates = [train.schedule(o, s, o.max_steps) for s in range(warmup + 1, o.max_steps + 1)]
    stable = o.max_steps - warmup - decaying
    assert rates == pytest.approx([1] * stable + [k / decaying for k in range(decaying, 0, -1)])


@pytest.mark.parametrize("cls", [ouro.Config, ouro.Arguments])
def test_every_field_refuses_what_its_annotation_does_not_allow(cls):
    test_values.test_every_field_refuses_what_its_annotation_does_not_allow(cls)
