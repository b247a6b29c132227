"""Speed and memory of the three models beside the plain way to write them: one table, one JSON.

    python tests/bench.py                                     # 15 minutes on 2 CPU cores; --device=cuda on a GPU
    python tests/bench.py --quick                             # tiny models, one round: does it all work here?
    python tests/bench.py --only=training,decoding            # of matmul, training, stars, decoding, growth, data

Machines are noisy, so what is compared is measured in turn, in rounds: every variant has a process of its own (its peak
memory is the process's), set up first, which then waits for its turn. A row gives the median over rounds (min .. max) and
the median of each round's ratio to the base variant (min .. max). Training counts forward, backward and the update, the
update as often as the preset has it: once per batch_size x grad_accum sequences. Dropout is 0, tokens are random. MFU is
against a large square matmul, measured in the same round and dtype.

The plain versions are what a reader of the papers would write first: attention with an explicit mask, norms by hand,
every loop's or pass's logits whole, `.item()` in each loop, JSRR by an extra loop and double backward, decoding without a
cache. Before it is timed, each one is checked to give the same loss.
"""
import argparse, contextlib, functools, itertools, json, math, os, platform
import re, select, statistics, subprocess, sys, time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import fullbandwidth
import looped_gpt
import stars
import train

CLASSES = {"looped_gpt": looped_gpt.LoopedGPT, "stars": stars.LoopedTransformer,
           "fullbandwidth": fullbandwidth.FullBandwidthGPT}
WAYS = {"plain fp32": ("plain", "float32", "off"), "plain bf16": ("plain", "bfloat16", "off"),
        "eager fp32": ("ours", "float32", "off"), "eager bf16": ("ours", "bfloat16", "off"),
        "compiled bf16": ("ours", "bfloat16", "on")}  # name: whose code, dtype, torch.compile


# ---------------------------------------------------------------------------------------------------------------------
# The plain versions. Each takes (model, idx, targets) and gives the training loss of our model's weights.

def plain_norm(norm, h):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.gain


def plain_attention(q, k, v):
    """Causal, of (B, nh, T, hs), by a (T, T) mask: (B, T, D)."""
    B, _, T, hs = q.shape
    mask = torch.tril(torch.ones(T, T, device=q.device)) == 0
    weights = (q @ k.transpose(-2, -1) / math.sqrt(hs)).masked_fill(mask, -math.inf).softmax(dim=-1)
    return (weights @ v).transpose(1, 2).reshape(B, T, -1)


def plain_swiglu(mlp, x):
    gate, up = mlp.gate_up(x).chunk(2, dim=-1)
    return mlp.down(F.silu(gate) * up)


def plain_looped_gpt(model, idx, targets):
    """per_loop supervision through RMSNorm, without dropout."""
    c, (B, T) = model.config, idx.shape
    h = model.wte(idx) + model.wpe(torch.arange(T, device=idx.device))
    losses, log = [], []
    for _ in range(c.num_loops):
        for block in model.blocks:
            q, k, v = (x.view(B, T, c.n_head, -1).transpose(1, 2)
                       for x in block.attn.qkv(plain_norm(block.norm1, h)).chunk(3, dim=-1))
            h = h + block.attn.out(plain_attention(q, k, v))
            h = h + plain_swiglu(block.ffn, plain_norm(block.norm2, h))
        logits = plain_norm(model.norm, h) @ model.wte.weight.T
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        log.append(losses[-1].item())
    return sum(losses) / c.num_loops


def plain_stars(model, idx, targets):
    """A fixed number of loops; J^T v at the last loop's state, as stars.py has it."""
    c, h, log = model.config, model.embed(idx), []
    for _ in range(c.num_loops):
        h = model.step(h)
        log.append(h.norm(dim=-1).mean().item())
    loss = F.cross_entropy(model.readout(h).flatten(0, 1), targets.flatten(), ignore_index=-1)
    if not c.jsrr_lambda:
        return loss
    at = h[:max(1, round(c.jsrr_rows * len(h)))]
    v = stars.random_directions(at)
    Jv, = torch.autograd.grad(model.step(at), at, v, create_graph=True)
    jsrr = Jv.square().sum() / len(at)
    return (1 - c.jsrr_lambda) * loss + c.jsrr_lambda * jsrr


def plain_fullbandwidth(model, idx, targets):
    """All the mix's passes, of a model with as many key heads as query heads and without windows, gates, documents."""
    c, (B, T) = model.config, idx.shape
    hs, kind = c.n_embd // c.n_head, dict(dtype=model.wte.weight.dtype, device=idx.device)
    angles = torch.arange(T, **kind)[:, None] * c.rope_theta ** (-torch.arange(0, hs, 2, **kind) / hs)
    rope = angles.cos(), angles.sin()

    def stack(x):
        x = plain_norm(model.norm_in, x)
        for block in model.blocks:
            q, k, v = (y.view(B, T, c.n_head, hs).transpose(1, 2)
                       for y in block.attn.qkv(plain_norm(block.norm1, x)).chunk(3, dim=-1))
            q, k = (fullbandwidth.rotate(plain_norm(norm, y), rope)
                    for norm, y in ((block.attn.q_norm, q), (block.attn.k_norm, k)))
            x = x + block.scale * plain_norm(block.norm2, block.attn.out(plain_attention(q, k, v)))
            x = x + block.scale * plain_norm(block.norm4, plain_swiglu(block.mlp, plain_norm(block.norm3, x)))
        return plain_norm(model.norm, x)

    e = plain_norm(model.norm_in, model.wte(idx))
    cut = torch.randint(T, (B, 1), device=idx.device) if c.prefix_mix else torch.zeros(B, 1, device=idx.device)
    plain = torch.arange(T, device=idx.device) < cut.clamp_min(1)
    h, losses, log = None, [], []
    for _ in c.shares:
        if h is None:
            h = stack(e)
        else:
            h = h + torch.empty_like(h).uniform_(-c.jitter, c.jitter)
            before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)
            h = stack(torch.where(plain[..., None], e, model.W_U(before) * torch.sigmoid(model.W_G(e))))
        losses.append(F.cross_entropy((h @ model.wte.weight.T).flatten(0, 1), targets.flatten()))
        log.append(losses[-1].item())
    return losses[0] + sum(losses[1:]) / max(1, len(losses) - 1)


@torch.no_grad()
def plain_decode(model, prompt, n, soft):
    """n greedy tokens after prompt (B, T), (B, n), by fullbandwidth's model: every input again for every token."""
    x, new = model.embed(prompt), []
    for _ in range(n):
        h = model.stack(x)
        new.append(model.readout(h)[:, -1:].argmax(-1))
        e = model.embed(new[-1])
        x = torch.cat([x, model.fuse(e, h[:, -1:]) if soft else e], dim=1)
    return torch.cat(new, dim=1)


PLAIN = {"looped_gpt": plain_looped_gpt, "stars": plain_stars, "fullbandwidth": plain_fullbandwidth}


def our_loss(model, idx, targets):
    return model.loss(idx, targets)[0]


def both_losses(name, model, idx, targets):
    """(ours, plain), from the same random numbers."""
    losses = []
    for loss_of in (our_loss, PLAIN[name]):
        torch.manual_seed(1)
        losses.append(loss_of(model, idx, targets))
    return losses


# ---------------------------------------------------------------------------------------------------------------------
# What a process measures: generators that set up, yield {}, and then yield {variant: {figure: value}} in each round.

def build(name, preset, fields, device):
    """A random model of a preset's shape, and its Options. looped_gpt gets embeddings of std 0.02: at N(0, 1) the plain
    softmax underflows, and computing with denormal numbers makes the plain version several times slower still."""
    module = sys.modules[CLASSES[name].__module__]
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as train.py has it
    fields = module.PRESETS[preset] | {"dropout": 0.0, "embd_std": 0.02} | fields
    config, options = train.split_fields(fields, module.Config, train.Options)
    with device:
        return CLASSES[name](module.Config(**config)), train.Options(**options)


def timed(function, device, calls=1):
    """The seconds that some calls of a function take."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return time.perf_counter() - start


def stopwatch(function, device, seconds):
    """A function that gives the seconds per call of `function`, over calls that last about `seconds`, but at least one. One
    call is made here: it compiles and warms up."""
    timed(function, device)
    calls = 1

    def measure():
        nonlocal calls
        while (elapsed := timed(function, device, calls)) < seconds / 2:
            calls = math.ceil(calls * seconds / elapsed)
        return elapsed / calls
    return measure


def forward_backward(loss_of, model, idx, targets, dtype):
    """A function without arguments that does both, with autocast to dtype, and returns the loss."""
    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast(idx.device.type, dtype, enabled=dtype != torch.float32):
            loss = loss_of(model, idx, targets)
        loss.backward()
        return loss
    return step


def training(variant, model, preset, fields, batch, way, device, seconds):
    device, (whose, dtype, compiled), name = torch.device(device), WAYS[way], model
    (model, options), dtype = build(name, preset, fields, device), getattr(torch, dtype)
    if options.dataset == "addition":
        options.batch_size = batch
        idx, targets = (t.to(device) for t in stars.AdditionData(options, model.config).batch("train", 0))
    else:
        rows = torch.randint(model.config.vocab_size, (batch, model.config.block_size + 1), device=device)
        idx, targets = rows[:, :-1], rows[:, 1:]
    if whose == "plain":
        ours, plain = (loss.item() for loss in both_losses(name, model, *(t[:max(1, batch // 16)] for t in (idx, targets))))
        if not math.isclose(ours, plain, rel_tol=1e-5 if device.type == "cpu" else 1e-3):  # TF32 on GPUs
            raise SystemExit(f"{variant}: the plain loss is {plain}, ours {ours}")
    train.compile_blocks(model, device, compiled)
    optimizers = train.build_optimizers(model, options)
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["lr"] = 0.0  # all the work, and the same weights in every round

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        for optimizer in optimizers:
            optimizer.step()

    loss_of = PLAIN[name] if whose == "plain" else our_loss
    step = stopwatch(forward_backward(loss_of, model, idx, targets, dtype), device, seconds)
    step_update = functools.cache(stopwatch(update, device, seconds / 10))  # Muon's is long: in the first round only
    yield {}
    while True:
        duration = step() + step_update() * batch / (options.batch_size * options.grad_accum)
        memory = train.peak_memory(device)
        speed = idx.numel() / duration
        yield {variant: {"tokens/s": speed, "ms/step": 1e3 * duration, "peak GB": memory / 1e9,
                         "MFU": model.flops_per_token() * speed / train.matmul_peak(device, dtype)}}


def matmul(preset, rows, device, seconds):
    """FLOP/s of a large square, and of looped_gpt's matrices (each, and all together) with `rows` tokens at a time."""
    device, (model, _) = torch.device(device), build("looped_gpt", preset, {}, torch.device(device))
    weights = [m.weight for m in model.blocks[0].modules() if isinstance(m, torch.nn.Linear)] + [model.wte.weight]
    yield {}
    while True:
        figures = {}
        for dtype in (torch.float32, torch.bfloat16):
            shapes, total = {}, 0
            for w in (w.detach().to(dtype) for w in weights):
                x = torch.randn(rows, w.shape[1], device=device, dtype=dtype)
                once = stopwatch(lambda: F.linear(x, w), device, seconds / len(weights))()
                shapes["x".join(map(str, w.shape[::-1]))], total = 2 * rows * w.numel() / once / 1e12, total + once
            figures[f"square, {str(dtype)[6:]}"] = {"TFLOP/s": train.matmul_peak(device, dtype) / 1e12}
            all_flops = 2 * rows * sum(w.numel() for w in weights)
            figures[f"own shapes, {str(dtype)[6:]}"] = {"TFLOP/s": all_flops / total / 1e12} | shapes
        yield figures


def decoding(model, preset, batch, loops, dtype, device, n):
    """ms per token of every row: of n tokens after the first, of looped_gpt from the middle of its window, of fullbandwidth
    from a prompt of 16; uncached, of the token in the middle of the window, or after 128."""
    device, name = torch.device(device), model
    model = build(name, preset, {}, device)[0].eval().to(getattr(torch, dtype))
    draw = lambda length: torch.randint(model.config.vocab_size, (batch, length), device=device)
    cached, uncached = {}, {}
    if name == "looped_gpt":
        prompt = draw(model.config.block_size // 2)
        for K in loops:
            cached[f"K = {K}"] = lambda n, K=K: model.generate(prompt, n, K, temperature=0)
            uncached[f"K = {K}, uncached"] = lambda K=K: model.generate(prompt, 1, K, temperature=0, use_cache=False)
    else:
        prompt, window = draw(16).tolist(), draw(128)
        for mode in fullbandwidth.MODES:
            cached[mode] = lambda n, mode=mode: model.generate(prompt, n, mode, temperature=0)
        if batch == 1:
            uncached = {f"{mode}, uncached": lambda mode=mode: plain_decode(model, window, 1, mode == "soft")
                        for mode in ("standard", "soft")}
    for function in cached.values():
        function(2)
    yield {}
    while True:
        figures = {}
        for variant, function in cached.items():
            first, every = (timed(lambda: function(m), device) for m in (1, 1 + n))
            figures[variant] = {"ms/token": 1e3 * (every - first) / n, "ms to the first": 1e3 * first}
        yield figures | {variant: {"ms/token": 1e3 * timed(function, device)} for variant, function in uncached.items()}


def growth(base, sweeps, dtype, device, seconds):
    """The slope of log(seconds per step) against log(FLOPs per step) of looped_gpt, forward and backward, eager: 1 where
    the cost grows as counted, less where small shapes waste time."""
    yield {}
    device = torch.device(device)
    while True:
        figures = {}
        for field, values in sweeps.items():
            flops, times, speeds = [], [], {}
            for value in values:
                fields = base | {field: value}
                size = fields.pop("batch"), fields["block_size"] + 1
                model, _ = build("looped_gpt", "tiny", fields | {"n_head": fields["n_embd"] // 64}, device)
                rows = torch.randint(model.config.vocab_size, size, device=device)
                step = forward_backward(our_loss, model, rows[:, :-1], rows[:, 1:], getattr(torch, dtype))
                times.append(stopwatch(step, device, seconds)())
                tokens = rows[:, 1:].numel()
                flops.append(tokens * model.flops_per_token())
                speeds[f"tokens/s at {value}"] = tokens / times[-1]
            figures[field] = {"slope": slope(flops, times)} | speeds
        yield figures


def slope(x, y):
    """Of the least-squares line through (log x, log y)."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def data(data_dir, need, seconds):
    """Tokens/s of every tokenizer and every loader, each in one process, and how many times what the trainer takes."""
    options, cpu, functions = train.Options(data_dir=data_dir, batch_size=64), torch.device("cpu"), {}
    Path(data_dir).mkdir(parents=True, exist_ok=True)
    texts, counter = train.read_splits("python-docs", train.find_source("python-docs", Path(data_dir))), itertools.count()
    for name in ("char", "regex", "gpt2"):
        try:
            tokenizer = train.fit_tokenizer(name, texts, 20_000, data_dir)
            functions[f"tokenizer {name}"] = lambda tokenizer=tokenizer: train.encode_block(tokenizer, texts["train"])
        except (train.UserError, ImportError) as error:
            print(f"tokenizer {name}: not measured: {error}", file=sys.stderr)
    for name, loader in (("looped_gpt", train.TextData(options, looped_gpt.Config(block_size=256))),
                         ("stars", stars.AdditionData(options, stars.Config())),
                         ("fullbandwidth", train.TextData(options, fullbandwidth.Config(block_size=1024)))):
        functions[f"loader {name}"] = lambda loader=loader: loader.batch("train", next(counter))[0].numpy()
    yield {}
    while True:
        figures = {}
        for name, function in functions.items():
            speed = function().size / stopwatch(function, cpu, seconds)()
            figures[name] = {"tokens/s": speed} | {f"times {model}'s trainer": speed / trainer
                                                   for model, trainer in need.items() if name.split()[1] in (model, "char")}
        yield figures


# ---------------------------------------------------------------------------------------------------------------------
# Processes in turn, and the table.

class Worker:
    """A process that measures when asked: one of the generators above, by name, with its arguments."""

    def __init__(self, what, arguments):
        self.name = arguments.get("variant", what)
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", json.dumps([what, arguments])],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self):
        with contextlib.suppress(BrokenPipeError):  # it has been killed meanwhile, for memory say
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self, limit=300):
        """The next figures; None, and the process is ended, if it failed or takes more than `limit` seconds."""
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        print(f"{self.name}: {'failed' if ready else f'gave up after {limit} s'}", flush=True)
        self.close()

    def close(self):
        self.process.kill()
        self.process.wait()


def work(what, arguments):
    """A Worker's process."""
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints may get between
    for figures in globals()[what](**arguments):
        print(json.dumps(figures), file=answers, flush=True)
        if not sys.stdin.readline():
            return


class Report:
    """Cases, measured within `minutes`: printed as they are done, written into the JSON after every round."""

    def __init__(self, path, minutes, machine):
        self.path, self.machine, self.cases, self.end = Path(path), machine, {}, time.monotonic() + 60 * minutes
        print(", ".join(f"{k} {v}" for k, v in machine.items()), flush=True)

    def measure(self, case, figure, base, rounds, workers):
        """The variants of one case in turn; its rows show `figure` first and compare it with the variant `base`."""
        start, results = time.monotonic(), {}
        if start > self.end:
            return print(f"\n{case}: not measured, the time is over", flush=True)
        workers = [Worker(*worker) for worker in workers]
        try:
            workers = [worker for worker in workers if worker.answer() is not None]  # set up, all at the same time
            for _ in range(rounds):
                answers = {worker: worker.ask() for worker in workers}
                workers = [worker for worker in workers if answers[worker]]
                for variant, figures in (item for answer in answers.values() if answer for item in answer.items()):
                    for name, value in figures.items():
                        results.setdefault(variant, {}).setdefault(name, []).append(value)
                self.cases[case] = {"figure": figure, "base": base, "variants": results}
                self.path.write_text(json.dumps({"machine": self.machine, "cases": self.cases}, indent=1))
                if time.monotonic() > self.end:
                    break
        finally:
            for worker in workers:
                worker.close()
        print(f"\n{case}, {figure}" + (f", x {base}" if base else "") + f"   [{time.monotonic() - start:.0f} s]")
        print(*table(results, figure, base), sep="\n", flush=True)

    def fastest(self, model):
        """The best tokens/s in training so far, or None."""
        return max((speed for case, c in self.cases.items() if case.startswith(f"{model} ") and "training" in case
                    for figures in c["variants"].values() for speed in figures["tokens/s"]), default=None)


def table(results, figure, base):
    """A line per variant: the figure, its ratio to the base in the same round, the medians of the other figures."""
    for variant, figures in results.items():
        cells = [f"  {variant:22}{spread(figures[figure]):32}"]
        if base in results:
            cells.append(f"{spread([a / b for a, b in zip(figures[figure], results[base][figure])], ' x'):28}")
        cells += [f"{name} {number(statistics.median(values))}" for name, values in figures.items() if name != figure]
        if "peak GB" in figures and base in results:
            cells.append(f"({figures['peak GB'][-1] / results[base]['peak GB'][-1]:.2f} x)")
        yield "  ".join(cells)


def number(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(values, unit=""):
    """'median (min .. max)'"""
    return f"{number(statistics.median(values)):>9}{unit} ({number(min(values))} .. {number(max(values))})"


# ---------------------------------------------------------------------------------------------------------------------
# The cases.

SECTIONS = ("matmul", "training", "stars", "decoding", "growth", "data")


def benchmark(report, only, device, quick, data_dir):
    cuda, dtype = device == "cuda", str(train.pick_dtype("auto", torch.device(device)))[6:]
    seconds, rounds = (0.1, 1) if quick else (0.5, 3) if cuda else (1.5, 3)
    looped, full = ("tiny", "tiny") if quick else ("44m", "124m")

    def trainers(model, preset, batch, variants):
        """One worker per {variant: (way, fields)}."""
        return [("training", dict(variant=variant, model=model, preset=preset, fields=fields, batch=batch, way=way,
                                  device=device, seconds=seconds)) for variant, (way, fields) in variants.items()]

    if "matmul" in only:
        report.measure(f"matmul, looped_gpt {looped}", "TFLOP/s", None, rounds, [
            ("matmul", dict(preset=looped, rows=16_384 if cuda else 1024, device=device, seconds=seconds))])
    if "training" in only:
        two_ways = "plain fp32", "compiled bf16"
        shapes = [(looped, 64 if cuda else 4, two_ways if quick else WAYS)]
        if not quick:
            shapes.append(("129m", 32 if cuda else 2, WAYS if cuda else two_ways))
        for preset, batch, ways in shapes:
            report.measure(f"looped_gpt {preset}, training, batch {batch}", "tokens/s", "plain fp32", rounds,
                           trainers("looped_gpt", preset, batch, {way: (way, {}) for way in ways}))
        ways, (batch, T) = two_ways, (4, 1024) if cuda else (2, 256)
        if quick:
            ways, (batch, T) = ("plain fp32", "eager bf16"), (4, 64)
        fields = dict(feedback_from=0.0, block_size=T, grad_accum=16 * 1024 // T)  # as many tokens an update
        mixes = {passes: fields | dict(mix=mix) for passes, mix in ((1, "1"), (2, "0,1"), (3, "0,0,1"))}
        for passes in (2,) if quick else mixes:
            report.measure(f"fullbandwidth {full}, training, passes {passes}, batch {batch} x {T}", "tokens/s", "plain fp32",
                           min(rounds, 2), trainers("fullbandwidth", full, batch, {way: (way, mixes[passes]) for way in ways}))
        report.measure(f"fullbandwidth {full}, training, {ways[-1]}, batch {batch} x {T}", "ms/step", "1 passes", rounds,
                       trainers("fullbandwidth", full, batch, {f"{passes} passes": (ways[-1], mixes[passes])
                                                               for passes in ((1, 2) if quick else mixes)}))
    if "stars" in only:
        loops, batch = dict(loop_sampling="fixed", num_loops=6), 32 if quick else 256
        shapes = [("width 128", batch, loops)]
        if not quick:
            shapes.append(("width 512", batch, loops | dict(n_embd=512, n_head=8, mlp_width=1024)))
            shapes.append(("44m language model", 16 if cuda else 2, loops | dict(  # of 44m's weights, without gates
                dataset="random", vocab_size=20_000, block_size=256, n_layer=8, n_embd=512, n_head=8, mlp_width=3072)))
        for shape, batch, fields in shapes:
            for way in ("eager fp32", "compiled bf16")[:1 if quick else 2]:
                variants = {"without JSRR": (way, fields | dict(jsrr_lambda=0.0)), "JSRR": (way, fields)}
                if way == "eager fp32":
                    variants |= {"plain JSRR": ("plain fp32", fields)}
                report.measure(f"stars {shape}, training, batch {batch}, 6 loops, {way}", "ms/step", "without JSRR", rounds,
                               trainers("stars", "addition", batch, variants))
    if "decoding" in only:
        cases = ((1, "float32"), (1, "bfloat16"), (32, "bfloat16" if cuda else "float32"))
        for batch, weights in cases[:1 if quick else 3]:
            for model, preset, base, n in (("looped_gpt", looped, "K = 4", 32), ("fullbandwidth", full, "standard", 24)):
                arguments = dict(model=model, preset=preset, batch=batch, loops=(1, 2, 4) if batch == 1 else (4,),
                                 dtype=weights, device=device, n=4 if quick else n)
                report.measure(f"{model} {preset}, decoding, batch {batch}, {weights}", "ms/token", base,
                               1 if quick else 5 if batch == 1 else 2, [("decoding", arguments)])
    if "growth" in only:
        base = dict(n_layer=2, n_embd=1024 if cuda else 256, block_size=256, num_loops=4, vocab_size=4096,
                    batch=16 if cuda else 2)
        sweeps = dict(num_loops=(1, 2, 4, 8, 16), block_size=(128, 256, 512, 1024, 2048), batch=(1, 2, 4, 8, 16),
                      n_embd=(256, 512, 1024, 2048) if cuda else (128, 256, 512, 1024))
        if quick:
            base, sweeps = base | dict(n_embd=64, block_size=64), dict(num_loops=(1, 2, 4))
        report.measure(f"looped_gpt, growth, eager {dtype}", "slope", None, rounds, [
            ("growth", dict(base=base, sweeps=sweeps, dtype=dtype, device=device, seconds=seconds / 10))])
    if "data" in only:
        need = {model: speed for model in CLASSES if (speed := report.fastest(model))}
        report.measure("data, one core", "tokens/s", None, rounds, [
            ("data", dict(data_dir=data_dir, need=need, seconds=seconds / 4))])


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny models, few cases, one round")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--minutes", type=float, default=20, help="after this no further case is begun")
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--out", default="bench.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        return work(*json.loads(arguments.worker))
    only = arguments.only.split(",")
    if unknown := set(only) - set(SECTIONS):
        raise train.UserError(f"--only={','.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}")
    device, cpu = train.pick_device(arguments.device), Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else []
    name = torch.cuda.get_device_name() if device.type == "cuda" else [*names, platform.machine()][0]
    report = Report(arguments.out, arguments.minutes, {
        "machine": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__})
    benchmark(report, only, device.type, arguments.quick, arguments.data_dir)


if __name__ == "__main__":
    train.command_line(main)
