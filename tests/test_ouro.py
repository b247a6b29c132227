"""Ouro in Hugging Face's layout, supervised fine-tuning, and lm-evaluation-harness; small files of the real formats, made
here. What needs an optional package is skipped without it."""
import json, math, sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fullbandwidth, looped_gpt, stars, train
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


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write_hub(tmp_path_factory.mktemp("hub"))


# The model and its files

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
