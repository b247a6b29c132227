"""experiments/tiny_ouro.py: fine-tunings of one base model, and what is measured of them."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stars, train
from experiments import ouro, tiny_ouro
from train import UserError

FEW = dict(n_embd=8, n_head=2, mlp_width=8, batch_size=8, eval_batches=2, eval_interval=1, device="cpu", compile="off")
STEPS = {"base": 3, "random+jsrr": 1}


def data(cls, split, n=200):
    """(a, b, text of the row, text of its targets) of n rows of a task."""
    task = cls(train.Options(batch_size=n), ouro.Config())
    idx, targets = task.batch(split, 0)
    for row, wanted in zip(idx, targets):
        text = task.tokenizer.decode(row.tolist())
        a, b = task.parse(text.partition("=")[0])
        yield a, b, text, task.tokenizer.decode(wanted[wanted >= 0].tolist())


@pytest.mark.parametrize("cls, sign, value", [(tiny_ouro.Sums, "+", lambda a, b: a + b),
                                              (tiny_ouro.Differences, "-", lambda a, b: 100 + a - b)])
def test_both_tasks_are_right_and_hold_out_the_same_pairs(cls, sign, value):
    pairs = {}
    for split in ("train", "val"):
        for a, b, text, answer in data(cls, split):
            assert text.startswith(f"{a}{sign}{b}=") and answer == f" {str(value(a, b))[::-1]}§"
            pairs.setdefault(split, set()).add((min(a, b), max(a, b)))
    assert not pairs["train"] & pairs["val"]
    other = {(min(a, b), max(a, b)) for task in (tiny_ouro.Sums, tiny_ouro.Differences) for a, b, *_ in data(task, "val")}
    assert not pairs["train"] & other, "what the base has seen is not held out of the tuning, nor the other way round"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of the sweep, with the base and one tuning of a few steps."""
    out = tmp_path_factory.mktemp("out") / "scratch"
    sweep = tiny_ouro.SWEEPS["scratch"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "conditions", {name: sweep.conditions[name] | FEW | dict(max_steps=n) for name, n in STEPS.items()})
        tiny_ouro.main(["scratch", "--seeds=1,2", f"--out_dir={out}"])
    return out


def run_of(swept, name):
    model, batches = tiny_ouro.load(swept / name)
    return model.cpu(), torch.cat([idx for idx, _ in batches]), torch.cat([targets for _, targets in batches])


def test_a_tuning_starts_from_the_base_of_its_seed(swept):
    for seed in (1, 2):
        base, *_ = run_of(swept, f"base-seed{seed}")
        tuned, idx, targets = run_of(swept, f"random+jsrr-seed{seed}")
        first = train.read_csv(swept / f"random+jsrr-seed{seed}/log.csv")[0]
        assert first["step"] == 0 and first["val_loss"] == pytest.approx(base.loss(idx, targets)[0].item(), rel=1e-5)
        assert not torch.equal(tuned.lm_head.weight, base.lm_head.weight)


def test_the_conditions_are_the_four_corners_of_random_loops_and_jsrr():
    corners = {}
    for name, fields in tiny_ouro.SCRATCH.items():
        fields = tiny_ouro.PRESETS["sums"] | fields
        corners[name] = fields["loop_sampling"], fields["jsrr_lambda"]
    assert corners == {"base": ("fixed", 0.0), "fixed": ("fixed", 0.0), "random": ("lognormal", 0.0), "jsrr": ("fixed", 0.1),
                       "random+jsrr": ("lognormal", 0.1)}
    t = stars.sample_loops(ouro.Config(), np.random.default_rng(0), 10_000)
    assert t.min() >= 1 and t.max() == 16 < max(tiny_ouro.LOOPS)


def test_the_csv_has_what_a_loop_by_loop_computation_gives(swept):
    cells = {}
    for cell in train.read_csv(swept / "scratch.csv"):
        cells[cell["condition"], cell["seed"], cell["table"], cell["column"]] = cell["value"]
    assert len(cells) == 2 * len(STEPS) * (4 * len(tiny_ouro.LOOPS) + 2)
    for name in STEPS:
        model, idx, targets = run_of(swept, f"{name}-seed2")
        model, learned = model.double(), targets >= 0
        h = model.embed_tokens(idx)
        for t in range(1, max(tiny_ouro.LOOPS) + 1):
            for block in model.blocks:
                h = block(h, model.rope)
            h = model.norm(h)
            if t not in tiny_ouro.LOOPS:
                continue
            logits = h[learned] @ model.lm_head.weight.T
            after = model.norm(model.blocks[0](h, model.rope))
            expected = {tiny_ouro.CE: F.cross_entropy(logits, targets[learned]),
                        tiny_ouro.RIGHT: (logits.argmax(-1) == targets[learned]).double().mean(),
                        tiny_ouro.STEP: ((after - h).flatten(1).norm(dim=1) / h.flatten(1).norm(dim=1)).mean()}
            for title, value in expected.items():
                assert cells[name, 2, title, t] == pytest.approx(value.item(), rel=1e-3, abs=1e-5), (name, title, t)

        settled = model.final(idx[:8], 16).detach()
        T, D = settled.shape[1:]
        radii = []
        for row in settled:
            J = torch.autograd.functional.jacobian(lambda x: model.step(x.view(1, T, D)).flatten(), row.flatten())
            radii.append(torch.linalg.eigvals(J).abs().max().item())
        assert cells[name, 2, "J at loop 16", "rho"] == pytest.approx(np.mean(radii), rel=0.02)
        assert cells[name, 2, "J at loop 16", "largest rho"] == pytest.approx(max(radii), rel=0.02)


def test_a_run_prints_its_table(swept, capsys):
    tiny_ouro.main([str(swept / "random+jsrr-seed1")])
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[1:]] == list(tiny_ouro.LOOPS)


def test_without_the_base_one_line_says_what_to_train(tmp_path):
    with pytest.raises(UserError, match="base-seed42 is not there to start from: train base first"):
        tiny_ouro.main(["scratch", "--only=fixed", f"--out_dir={tmp_path}/out", "--batch_size=2", "--device=cpu"])


def test_a_run_that_was_stopped_goes_on_as_it_says(tmp_path, capsys, monkeypatch):
    save = train.save_training

    def save_and_ask(run, name):
        save(run, name)
        run.interrupts.asked = 15
    fields = FEW | dict(max_steps=2, out_dir=str(tmp_path / "run"))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train, "save_training", save_and_ask)
        train.launch("tiny_ouro", tiny_ouro, "sums", fields)
    command = capsys.readouterr().out.splitlines()[-1].partition("go on with: python experiments/tiny_ouro.py ")[2]
    tiny_ouro.main(command.split())
    assert train.load_checkpoint(tmp_path / "run", "tiny_ouro")["step"] == 2
