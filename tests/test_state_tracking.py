"""experiments/state_tracking.py: the programs are right and held out, the probes find what is there and no more."""
import itertools, re

import pytest
import torch
import torch.nn.functional as F

import train
from conftest import step_gradients
from experiments import state_tracking
from fullbandwidth import Config, FullBandwidthGPT
from test_fullbandwidth import TINY, no_benchmark, small


# The programs

def execute(text):
    """What a statetrack program answers."""
    state = {}
    for line in text.splitlines():
        name, _, value = line.partition(" = ")
        if line.startswith("scratch "):
            continue
        if line == "Status:":
            return " done" if state["required"] == state["completed"] else " more"
        if line == "# final state:":
            return {"0": " zero", "1": " one"}[state["state"]]
        if line == "Value:":
            return f" {state[state['query']]}"
        state[name] = value


def test_statetrack_answers_are_what_the_programs_compute():
    data = train.load_data(train.Options(dataset="statetrack", batch_size=60), Config(block_size=150))
    idx, targets = data.batch("train", 0)
    questions = set()
    for row, answer in zip(idx, targets):
        at, = (answer >= 0).nonzero()[:, 0]
        text = data.tokenizer.decode(row[:at + 1].tolist())
        assert data.tokenizer.decode([answer[at].item()]) == execute(text) and not row[at + 1:].any()
        questions.add((text.splitlines()[-1], text.count("scratch += 0")))
    assert questions >= {("Status:", 0), ("Status:", 32), ("# final state:", 8), ("Value:", 8)}


def statetrack_programs(data, split, n):
    """{task: program texts of all sizes, no-ops left out}, of the first n programs; registers short enough to repeat."""
    cases = {"completion": (8, 32), "memory": (8, 32), "registers": (1,)}
    return {task: {data.program(split, task, i, size, 8)[0].replace("scratch += 0\n", "")
                   for size in sizes for i in range(n)} for task, sizes in cases.items()}


def test_no_training_batch_contains_a_program_that_the_evaluation_uses():
    data = train.load_data(train.Options(dataset="statetrack", batch_size=32), Config(block_size=150))
    evaluated, trained = statetrack_programs(data, "val", 1200), statetrack_programs(data, "train", 1200)
    for task, texts in trained.items():  # nearly all that there are: 123 and 463, 22 and 42, 256 together
        assert not texts & evaluated[task] and len(texts | evaluated[task]) > {"completion": 550}.get(task, 60)
    for split, own, other in (("train", trained, evaluated), ("val", evaluated, trained)):
        drawn = set()
        for i in range(10):
            for row, answer in zip(*data.batch(split, i)):
                text = data.tokenizer.decode(row[:int((answer >= 0).nonzero()) + 1].tolist())
                drawn.add(text.replace("scratch += 0\n", ""))
        known = {text for task in ("completion", "memory") for text in own[task]}
        assert len(drawn & known) > 30 and not drawn & set().union(*other.values())


def test_what_is_held_out_gives_no_answer_away_and_leaves_no_number_unknown():
    data = state_tracking.StateTrackData(train.Options(), Config())
    for split in ("train", "val"):
        programs = statetrack_programs(data, split, 1200)
        numbers = [re.findall(r"\d", text) for text in programs["completion"]]
        equal, unequal = ({(place, n[place], n[2]) for n in numbers for place in (0, 1) if (n[0] == n[1]) == same}
                          for same in (True, False))
        assert equal == unequal, "a number in a place, with a scratch, is equal in some programs and unequal in others"
        assert all(len({n[place] for n in numbers}) == 10 for place in range(3))
        bits = [re.findall(r"\d", text) for text in programs["memory"]]
        assert all({n[place] for n in bits} == {"0", "1"} for place in (0, *range(2, 7)))


def test_statetrack_programs_are_balanced_and_share_a_length_within_a_group():
    data = state_tracking.StateTrackData(train.Options(), Config())
    for task, sizes in data.sizes.items():
        for size in sizes:
            programs = [data.program("val", task, i, size) for i in range(400)]
            assert len({len(data.tokenizer.encode(text)) for text, *_ in programs}) == 1
            labels = [label for _, label, _ in programs]
            assert labels.count(1) == 200 if task != "registers" else 160 < labels.count(1) < 240
            if task == "completion":  # (a, a), (a, b), (b, a), (b, b)
                assert labels[:4] == [1, 0, 0, 1] and len({group for *_, group in programs[:4]}) == 1
    for size, writes in ((1, 16), (8, 64)):
        text, *_ = data.program("val", "registers", 5, size, writes)
        assert [text.count(f"r{i} = ") for i in range(size)] == [writes // size] * size


# As a data set: a step's rows, and a split's

def test_a_step_on_programs_is_the_same_however_it_is_split():
    """The rows, their loss, the gradients and the validation rows, of micro-batches and of processes."""
    fields = dict(n_layer=1, n_head=2, n_kv_head=2, n_embd=8, mlp_width=16, block_size=90, jitter=0.0, prefix_mix=False)
    results, rows = [], []
    for batch_size, grad_accum, world in ((8, 1, 1), (4, 2, 1), (1, 8, 1), (8, 1, 2), (4, 2, 2)):
        data = train.load_data(train.Options(dataset="statetrack", batch_size=batch_size, grad_accum=grad_accum), Config(**fields))
        torch.manual_seed(0)
        model = FullBandwidthGPT(Config(**fields | dict(vocab_size=data.vocab_size, block_size=data.T))).double()
        results.append(step_gradients(model, data, world, num_passes=2))
        rows.append((torch.cat([data.batch(split, i)[j] for split, i in (("train", 0), ("train", 77), ("val", 0), ("val", 1))
                                for j in range(2)]), data.steps_per_epoch))
    model.zero_grad()
    model.loss(*data.batch("train", 3), num_passes=2)[0].backward()  # all at once
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for result, (drawn, steps_per_epoch) in zip(results, rows):
        assert torch.equal(drawn, rows[0][0]) and steps_per_epoch == rows[0][1]
        assert (result - whole).norm() < 1e-12 * whole.norm()


def test_no_training_batch_of_any_seed_is_a_validation_batch():
    draws = {"train": set(), "val": set()}
    for seed in range(50):
        data = train.load_data(train.Options(dataset="statetrack", seed=seed, batch_size=2), Config(block_size=90))
        for i in (0, 1, 2, seed):
            draws["train"].add(data.batch("train", i)[0].numpy().tobytes())
            draws["val"].add(data.batch("val", i)[0].numpy().tobytes())
    assert len(draws["train"]) > 140 and not draws["train"] & draws["val"]


def test_a_run_is_trained_and_read_again_through_the_scripts_table_of_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(state_tracking.StateTrackData, "sizes", {"registers": (1,)})
    monkeypatch.setattr(state_tracking.SWEEPS["statetrack"], "report", lambda runs, out: None)
    smaller = [word for word in TINY if word not in ("--overwrite", "--dataset=running-sum")]
    state_tracking.main(["statetrack", *smaller, "--only=feedback", "--max_steps=1", f"--out_dir={tmp_path}"])
    model, options, data, _ = state_tracking.fullbandwidth.load_run(tmp_path / "feedback-seed42")
    assert isinstance(data, state_tracking.StateTrackData) and options.dataset == "statetrack"
    assert data.tokenizer.decode(data.tokenizer.encode("query = r3\nValue:")) == "query = r3\nValue:"
    monkeypatch.delitem(train.Tokenizer.patterns, "words")  # as `python fullbandwidth.py RUN` would read it
    with pytest.raises(train.UserError, match="tokenizer 'words' is an experiment's, as experiments/state_tracking.py"):
        state_tracking.fullbandwidth.main([str(tmp_path / "feedback-seed42")])


# The probes

def test_probe_finds_what_is_linear_and_learns_no_group_by_heart():
    groups = [str(i // 4) for i in range(200)]
    labels = torch.tensor([i // 4 % 2 for i in range(200)])
    labels = labels[torch.randperm(50) * 4].repeat_interleave(4)  # a label for each group, at random
    identity = F.one_hot(torch.tensor([int(g) for g in groups])).double()
    assert state_tracking.probe(identity, labels, groups) < 0.7  # a group's name says nothing about other groups
    assert state_tracking.probe(identity, labels, torch.randperm(200).tolist()) > 0.95  # every row a group of its own
    features = torch.randn(200, 8).double()
    features[:, 3] += 6 * labels
    assert state_tracking.probe(features, labels, groups) > 0.95


def test_probe_trains_on_every_number_in_each_fold_when_pairs_are_held_out():
    """Whether a 0 is in a pair is linear in which numbers are; folds in order hold out all pairs with a 0 at once."""
    pairs = list(itertools.combinations(range(10), 2))
    features = torch.tensor([[float(number in pair) for number in range(10)] for pair in pairs])
    labels = torch.tensor([int(0 in pair) for pair in pairs])
    assert state_tracking.probe(features, labels, [f"{a} {b}" for a, b in pairs]) == 1


def test_recurrent_prefill_hands_the_last_token_a_state_that_standard_prefill_keeps_from_it():
    data = state_tracking.StateTrackData(train.Options(), Config())
    model, *_ = small(torch.float32, vocab_size=data.vocab_size, block_size=102, window=0)
    texts, labels, groups = zip(*(data.program("val", "memory", i, 0) for i in range(64)))
    idx = torch.tensor([data.tokenizer.encode(text) for text in texts])
    table = state_tracking.probe_depths(model, idx, torch.tensor(labels), groups, (0, 1, None))
    assert table.shape == (3, 4)
    assert abs(table[0, 0] - 0.5) < 0.01  # the input at the last token is the same for every program
    for last, differs in ((0, False), (1, True), (idx.shape[1] - 1, True)):
        stream = state_tracking.residual_stream(model, idx[:2], idx.shape[1] - last)
        assert len(stream) == model.config.n_layer + 1
        assert (stream[0][0] - stream[0][1]).abs().max().gt(0) == differs


def test_probes_stand_beside_those_of_the_model_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(state_tracking.StateTrackData, "sizes", {"memory": (0,), "registers": (1, 2, 4, 8)})
    arguments = ["fullbandwidth", *TINY, "--dataset=statetrack", "--feedback_from=0", "--max_steps=1"]
    train.main([*arguments, "--lr=0", f"--out_dir={tmp_path}/same"])
    train.main([*arguments, "--lr=0.1", f"--out_dir={tmp_path}/other"])
    for name in ("same", "other"):
        rows = list(state_tracking.statetrack(tmp_path / name, n=32))
        assert {title for title, *_ in rows if "right" in title} == {
            "memory, size 0: right answers", *(f"registers, size {m}, 16 writes: right answers" for m in (1, 2, 4, 8))}
        probes = {(title, row): values.tolist() for title, _, row, values in rows if "probes" in title}
        trained = {key: values for key, values in probes.items() if "untrained" not in key[1]}
        assert len(trained) == 5 * 5 == len(probes) / 2
        same = all(values == probes[title, f", untrained{row}"] for (title, row), values in trained.items())
        assert same == (name == "same")
