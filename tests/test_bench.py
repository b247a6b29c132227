"""What the benchmark compares must compute the same: the plain versions give our losses and gradients, in float64."""
import math, os, re, subprocess, sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import bench
import stars
import train

CPU, ROOT = torch.device("cpu"), Path(__file__).parent.parent
TINY = {"looped_gpt": ("tiny", dict(vocab_size=50, block_size=12, n_embd=32, num_loops=3)),
        "stars": ("addition", dict(n_embd=32, mlp_width=48, loop_sampling="fixed", num_loops=3)),
        "fullbandwidth": ("tiny", dict(vocab_size=50, block_size=12, n_embd=32, n_layer=2, mlp_width=48, mix="0,0,1"))}


def tiny_batch(name, device=CPU):
    """(model, idx, targets) at seconds' size, weights shaken so that no gain is 1 and no path negligible."""
    preset, fields = TINY[name]
    model, options = bench.build(name, preset, fields, device)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    if name == "stars":
        return model, *(t[:8].to(device) for t in stars.AdditionData(options, model.config).batch("train", 0))
    rows = torch.randint(model.config.vocab_size, (8, model.config.block_size + 1), device=device)
    return model, rows[:, :-1], rows[:, 1:]


@pytest.mark.parametrize("name", TINY)
def test_the_plain_version_gives_the_same_loss_and_gradient(name):
    model, idx, targets = tiny_batch(name)
    model.double()
    gradients = []
    losses = bench.both_losses(name, model, idx, targets)
    for loss in losses:
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*losses, rtol=1e-7, atol=0)  # stars.py's weights of the targets are float32
    for ours, plain, (parameter, _) in zip(*gradients, model.named_parameters()):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-10, msg=lambda text: f"{parameter}: {text}")


@pytest.mark.parametrize("mode", ["standard", "soft"])
def test_decoding_without_a_cache_gives_the_same_tokens(mode):
    model, idx, _ = tiny_batch("fullbandwidth")
    model.double().eval()
    plain = bench.plain_decode(model, idx[:, :4], 8, mode == "soft")
    assert model.generate(idx[:, :4].tolist(), 8, mode, temperature=0) == plain.tolist()


def test_ratios_are_taken_round_by_round_and_the_slope_is_that_of_the_logarithms():
    results = {"plain": {"tokens/s": [10.0, 20.0, 40.0]}, "ours": {"tokens/s": [20.0, 60.0, 80.0], "MFU": [0.1, 0.5, 0.2]}}
    _, ours = bench.table(results, "tokens/s", "plain")
    assert re.sub(" +", " ", ours) == " ours 60 (20 .. 80) 2 x (2 .. 3) MFU 0.2"
    assert math.isclose(bench.slope([1, 2, 4], [3, 3 * 2**1.5, 3 * 4**1.5]), 1.5)


def test_a_section_runs_alone_and_writes_its_json(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "tests/bench.py", "--quick", "--only=matmul"], text=True, capture_output=True,
                          cwd=tmp_path)
    assert done.returncode == 0 and re.search(r"own shapes, bfloat16 +[\d.]+ ", done.stdout), done.stdout + done.stderr
    assert '"TFLOP/s"' in (tmp_path / "bench.json").read_text()
    with pytest.raises(train.UserError, match="--only=matmull: choose from matmul, training"):
        bench.main(["--only=matmull"])


@pytest.mark.parametrize("name", TINY)
def test_a_training_step_never_reads_a_number_back(name):
    with FakeTensorMode():  # tensors without numbers: .item() and the like raise
        model, idx, targets = tiny_batch(name)
        loops = [] if name == "looped_gpt" else [3]  # its config has them
        model.loss(idx, targets, *loops)[0].backward()
        with pytest.raises(DataDependentOutputException):  # the plain versions do
            bench.PLAIN[name](model, idx, targets)


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU: tests/gpu.sh runs these; elsewhere they are skipped.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def loss_and_gradient(model, idx, targets, dtype):
    """The training loss, and all gradients as one vector, from the same random numbers each time."""
    torch.manual_seed(1)
    loss = bench.forward_backward(bench.our_loss, model, idx, targets, dtype)()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()


@needs_cuda
@pytest.mark.parametrize("name", TINY)
def test_cuda_bf16_is_fp32_to_its_precision(name):
    batch = tiny_batch(name, DEVICE)
    (loss, gradient), (low_loss, low_gradient) = (loss_and_gradient(*batch, t) for t in (torch.float32, torch.bfloat16))
    assert math.isclose(loss, low_loss, rel_tol=0.02) and cosine(gradient, low_gradient) > 0.99


@needs_cuda
@pytest.mark.parametrize("name", TINY)
def test_cuda_compiled_equals_eager(name, monkeypatch):
    monkeypatch.setattr(train, "compute_chunk", train.compute_chunk)  # compile_blocks replaces it
    batch = tiny_batch(name, DEVICE)
    loss, gradient = loss_and_gradient(*batch, torch.float32)
    train.compile_blocks(batch[0], DEVICE, "on")
    compiled_loss, compiled_gradient = loss_and_gradient(*batch, torch.float32)
    assert math.isclose(loss, compiled_loss, rel_tol=1e-3) and cosine(gradient, compiled_gradient) > 0.9999  # TF32


@needs_cuda
@pytest.mark.parametrize("name", TINY)
def test_cuda_never_waits_inside_a_step(name, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "compute_chunk", train.compute_chunk)
    module, updates = sys.modules[bench.CLASSES[name].__module__], []
    begin_step, end_step = train.Run.begin_step, train.Run.end_step

    def watched_begin(run):
        begin_step(run)
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("error" if run.step > 2 else "default")  # the first ones compile

    def watched_end(run):
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")  # between steps the run logs and evaluates
        updates.append(run.step)
        end_step(run)
    monkeypatch.setattr(train.Run, "begin_step", watched_begin)
    monkeypatch.setattr(train.Run, "end_step", watched_end)
    try:
        train.launch(name, module, TINY[name][0], dict(
            out_dir=str(tmp_path / "run"), data_dir=str(tmp_path / "data"), max_steps=6, eval_batches=1, device=DEVICE.type))
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert updates == [1, 2, 3, 4, 5, 6]


@needs_cuda
def test_cuda_torchrun_with_one_process_trains_the_same(tmp_path):
    losses = []
    for start in ([sys.executable], [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]):
        out = tmp_path / str(len(losses))
        subprocess.run([*start, ROOT / "train.py", "looped_gpt", "--max_steps=3", "--log_interval=1", "--eval_batches=1",
                        f"--out_dir={out}", f"--data_dir={tmp_path}", f"--device={DEVICE.type}", "--compile=off"],
                       check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        losses.append([row["train_loss"] for row in train.read_csv(out / "log.csv")[1:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 3
