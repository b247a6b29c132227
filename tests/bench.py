"""Speed and memory beside the plain way to write looped_gpt. python tests/bench.py [--quick] [--rounds=3] [--out=bench.json]

Every figure is a ratio between processes run in turn, since machines are noisy: each round starts one process per variant,
which takes some steps and reports its tokens/s and its peak memory. The table gives the median over rounds (min .. max).
"""
import argparse, json, math, platform, resource, statistics, subprocess, sys, time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import looped_gpt
import train

BATCH, VOCAB = 8, 20_000
TRAIN = {"plain fp32": ("plain", "float32", "off"), "eager fp32": ("ours", "float32", "off"),
         "eager bf16": ("ours", "bfloat16", "off"), "compiled bf16": ("ours", "bfloat16", "on")}


def plain_norm(norm, h):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.gain


def plain_loss(model, idx, targets):
    """The loss as a reader of the paper would first write it: an explicit mask, every loop's logits whole."""
    c, (B, T) = model.config, idx.shape
    h = model.wte(idx) + model.wpe(torch.arange(T, device=idx.device))
    mask = torch.tril(torch.ones(T, T, device=idx.device)) == 0
    losses = []
    for _ in range(c.num_loops):
        for block in model.blocks:
            q, k, v = (x.view(B, T, c.n_head, -1).transpose(1, 2)
                       for x in block.attn.qkv(plain_norm(block.norm1, h)).chunk(3, dim=-1))
            attention = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(mask, -math.inf).softmax(dim=-1)
            h = h + block.attn.out((attention @ v).transpose(1, 2).reshape(B, T, -1))
            gate, up = block.ffn.gate_up(plain_norm(block.norm2, h)).chunk(2, dim=-1)
            h = h + block.ffn.down(F.silu(gate) * up)
        logits = plain_norm(model.norm, h) @ model.wte.weight.T
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    return sum(losses) / c.num_loops


def build(preset):
    """A random model of a preset's shape. Embeddings of std 0.02: at N(0, 1) the plain softmax underflows, and computing
    with denormal numbers makes the plain version several times slower still."""
    torch.manual_seed(0)
    fields, = train.split_fields(looped_gpt.PRESETS[preset] | dict(vocab_size=VOCAB, dropout=0.0, embd_std=0.02),
                                 looped_gpt.Config)
    return looped_gpt.LoopedGPT(looped_gpt.Config(**fields))


def train_steps(preset, variant, steps):
    """One process's share: `steps` timed training steps on random tokens."""
    way, dtype, compiled = TRAIN[variant]
    model, device = build(preset), torch.device("cpu")
    optimizers = train.build_optimizers(model, train.Options())
    if way == "plain":
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4)]
    train.compile_blocks(model, device, compiled)
    dtype = getattr(torch, dtype)
    seconds, T = [], model.config.block_size
    for _ in range(steps + 2):  # two to warm up
        rows = torch.randint(VOCAB, (BATCH, T + 1))
        start = time.perf_counter()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            idx, targets = rows[:, :-1], rows[:, 1:]
            loss = plain_loss(model, idx, targets) if way == "plain" else model.loss(idx, targets)[0]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    speed = BATCH * T / statistics.median(seconds[2:])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    peak = train.matmul_peak(device, dtype)
    return {"tokens_per_sec": speed, "peak_gb": memory, "mfu": model.flops_per_token() * speed / peak, "peak_tflops": peak / 1e12}


def generate_tokens(preset, variant, tokens):
    """Tokens/s of continuing an 8-token prompt, greedily."""
    model = build(preset).eval()
    start = time.perf_counter()
    model.generate(torch.arange(8)[None], tokens, temperature=0, use_cache=variant == "cached")
    return {"tokens_per_sec": tokens / (time.perf_counter() - start)}


def rounds(function, variants, n, *arguments):
    """{variant: {figure: [one per round]}}, the variants' processes in turn."""
    results = {v: {} for v in variants}
    for _ in range(n):
        for variant in variants:
            call = json.dumps([function, variant, *arguments])
            output = subprocess.run([sys.executable, __file__, "--call", call], check=True, capture_output=True, text=True).stdout
            print(f"{variant}: {output.splitlines()[-1]}", file=sys.stderr, flush=True)
            for name, value in json.loads(output.splitlines()[-1]).items():
                results[variant].setdefault(name, []).append(value)
    return results


def print_table(title, results, base):
    print(f"\n{title}")
    for variant, figures in results.items():
        cells = [f"{name} {statistics.median(v):.4g} ({min(v):.4g} .. {max(v):.4g})" for name, v in figures.items()]
        for name in ("tokens_per_sec", "peak_gb"):
            if name in figures and variant != base:
                ratios = [a / b for a, b in zip(figures[name], results[base][name])]
                cells.append(f"{name} x {statistics.median(ratios):.2f} of {base} ({min(ratios):.2f} .. {max(ratios):.2f})")
        print(f"  {variant:14}" + "\n                ".join(cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny preset, one round")
    parser.add_argument("--rounds", type=int, default=3, help="processes per variant")
    parser.add_argument("--out", default="bench.json")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        function, variant, preset, n = json.loads(arguments.call)
        return print(json.dumps(globals()[function](preset, variant, n)))
    preset, n = ("tiny", 1) if arguments.quick else ("44m", arguments.rounds)
    model, rows = build(preset), torch.randint(VOCAB, (2, 33))
    with torch.no_grad():
        ours, plain = (f(rows[:, :-1], rows[:, 1:]) for f in (lambda *b: model.loss(*b)[0], lambda *b: plain_loss(model, *b)))
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
          f"the plain loss {plain:.6f} is ours {ours:.6f}")
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=0)
    report = {"train": rounds("train_steps", TRAIN, n, preset, 3),
              "generate": rounds("generate_tokens", ["uncached", "cached"], n, preset, 256)}
    print_table(f"looped_gpt {preset}, training, batch {BATCH}, V {VOCAB}, per_loop, AdamW, dropout 0", report["train"], "plain fp32")
    print_table(f"looped_gpt {preset}, 256 new tokens from an 8-token prompt, fp32", report["generate"], "uncached")
    Path(arguments.out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
