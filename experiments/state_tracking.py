"""Which state a model keeps, and which it uses (arXiv 2608.08888, section 4.4 and appendix F).

Short programs end in a question about their state. Linear probes read the answer off the residual
stream at the last token: at depth 0, the stack's input, standard prefill leaves nothing to read,
since every program ends in the same token; one recurrent step brings the state there. Readable is
not the same as used, and a random model's state is readable too: hence the model's own answers,
and the model before training.

    python experiments/state_tracking.py statetrack
    python experiments/state_tracking.py out/fullbandwidth-statetrack-statetrack/feedback-seed42
"""
import functools, hashlib, re, sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fullbandwidth, train
from experiments import feedback, sweeps

# --------------------------------------------------------------------------------------------------
# The programs

class StateTrackData:
    """The state-tracking tasks of appendix F: short programs, then a question about their state.

        completion  required = 4 | completed = 9 | scratch = 7 | size x (scratch += 0)
                    | Status: more
        memory      state = 1 | scratch = 0 | 5 x (scratch ^= 0 or 1) | size x (scratch += 0)
                    | # final state: one
        registers   writes x (r3 = 0 or 1), of `size` registers | 8 x (scratch += 0) | query = r3
                    | Value: 1

    (| stands for a line's end.) A token is a word or a sign. Targets are -1 except at the answer,
    the last token.

    The validation split's programs are held out by a hash of what they are about, whatever their
    size: of memory the five xors, of registers all lines, of completion each of the two numbers
    with the scratch, (required, scratch) and (completed, scratch). Both must be held out there, and
    neither in training. Pairs of numbers would not do: all nine pairs of a number share its equal
    programs. Nor would whole programs: a number and a scratch whose equal program is held out would
    always be unequal in training, which gives the answer away.
    """
    answers = {"completion": (" more", " done"), "memory": (" zero", " one"),
               "registers": (" 0", " 1")}
    sizes = {"completion": (0, 8, 32, 128, 256), "memory": (0, 8, 32, 128, 256),
             "registers": (1, 2, 4, 8)}
    versions = {"completion": 4, "memory": 2, "registers": 1}  # programs of a group
    vocab = ["<pad>", "\n", ":", "#", " =", " +=", " ^=", *(f" {i}" for i in range(10)),
             *(f"r{i}" for i in range(8)), *(f" r{i}" for i in range(8)), "required", "completed",
             "scratch", "state", "query", "Status", "Value", " final", " state", " done", " more",
             " zero", " one"]

    def __init__(self, options, config):
        self.options = options
        self.tokenizer = train.Tokenizer("words", self.vocab)
        self.vocab_size = len(self.vocab)
        self.T = max(config.block_size, self.length("registers", 8))
        self.fitting = {}  # the sizes of each task that fit into T tokens
        for task, sizes in self.sizes.items():
            self.fitting[task] = [size for size in sizes if self.length(task, size) <= self.T]
        self.steps_per_epoch = max(1, 1_000_000 // options.step_rows)

    def length(self, task, size):
        """Tokens of a task's program of this size."""
        text, _, _ = self.program("val", task, 0, size)
        return len(self.tokenizer.encode(text))

    @staticmethod
    def held_out(about):
        """Whether a text falls into the validation split's share of all texts, two in five."""
        return hashlib.sha256(about.encode()).digest()[0] % 5 < 2

    def program(self, split, task, i, size, writes=16):
        """Program i of a split and a task, (text up to the colon, label: which of the two answers,
        group). The programs of a group share what a probe could learn by heart, a pair of numbers
        or the xors: folds must not divide it."""
        i, version = divmod(i, self.versions[task])
        rng = np.random.default_rng([size, i])
        while True:
            match task:
                case "completion":
                    text, label, group, about = self.completion(rng, version, size)
                case "memory":
                    text, label, group, about = self.memory(rng, version, size)
                case "registers":
                    text, label, group, about = self.registers(rng, size, writes)
            if {self.held_out(part) for part in about} == {split != "train"}:
                return text, label, group

    # A program of each task at random: (text, label, group, texts that say what it is about).

    @staticmethod
    def completion(rng, version, size):
        a, b = rng.choice(10, 2, replace=False)
        scratch = rng.integers(10)
        required, completed = ((a, a), (a, b), (b, a), (b, b))[version]
        text = (f"required = {required}\ncompleted = {completed}\nscratch = {scratch}\n"
                + "scratch += 0\n" * size + "Status:")
        about = f"{a} with {scratch}", f"{b} with {scratch}"  # of all four versions
        return text, int(required == completed), f"{min(a, b)} {max(a, b)}", about

    @staticmethod
    def memory(rng, version, size):
        xors = "".join(f"scratch ^= {bit}\n" for bit in rng.integers(0, 2, 5))
        noops = "scratch += 0\n" * size
        text = f"state = {version}\nscratch = 0\n{xors}{noops}# final state:"
        return text, version, xors, (xors,)

    @staticmethod
    def registers(rng, size, writes):
        order = rng.permutation(np.arange(writes) % size)  # every register equally often
        bits = rng.integers(0, 2, writes)
        query = rng.integers(size)
        lines = "".join(f"r{register} = {bit}\n" for register, bit in zip(order, bits))
        text = lines + "scratch += 0\n" * 8 + f"query = r{query}\nValue:"
        return text, int(bits[order == query][-1]), text, (text,)

    def batch(self, split, i):
        """Each row a random program of a random task, of a size that fits into T tokens."""
        n = self.options.step_rows
        rng = train.stream(self.options, split, i)
        idx = torch.zeros(n, self.T, dtype=torch.int64)
        targets = torch.full((n, self.T), -1)
        for row in range(n):
            task = rng.choice(list(self.sizes))
            size = rng.choice(self.fitting[task])
            text, label, _ = self.program(split, task, int(rng.integers(1 << 40)), int(size))
            tokens = self.tokenizer.encode(text)
            idx[row, :len(tokens)] = torch.tensor(tokens)
            targets[row, len(tokens) - 1] = self.tokenizer.ids[self.answers[task][label]]
        return idx, targets


fullbandwidth.DATA["statetrack"] = StateTrackData
fullbandwidth.PRESETS["statetrack"] = fullbandwidth.SMALL | dict(
    dataset="statetrack", block_size=166, max_steps=3000, batch_size=16)
train.Tokenizer.patterns["words"] = re.compile(r"\n| ?\w+| ?[^\w\s]+")


# --------------------------------------------------------------------------------------------------
# The probes

def probe(features, labels, groups, folds=4, l2=1.0):
    """Held-out accuracy of L2-regularised logistic regression of labels (N,), 0 or 1, on features
    (N, D). Groups are held out whole, in folds drawn at random: in order, a fold could hold all
    groups of one number."""
    names = np.random.default_rng(0).permutation(sorted(set(groups))).tolist()
    fold = [names.index(group) * folds // len(names) for group in groups]
    fold = torch.tensor(fold, device=labels.device)
    right = 0
    for i in range(folds):
        held = fold == i
        x = features.double()
        z = (x - x[~held].mean(0)) / x[~held].std(0).clamp_min(1e-6)
        w = fit_logistic(z[~held], labels[~held].double(), l2)
        right += ((z[held] @ w[1:] + w[0] > 0) == (labels[held] > 0)).sum().item()
    return right / len(labels)


def fit_logistic(z, y, l2):
    """The weights (1 + D,), bias first, that minimise the summed CE of y (N,) on z (N, D), plus
    l2 / 2 times their squares but the bias's."""
    w = torch.zeros(1 + z.shape[1], dtype=z.dtype, device=z.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(z @ w[1:] + w[0], y, reduction="sum")
        loss = loss + l2 / 2 * w[1:].square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
    return w.detach()


def residual_stream(model, idx, prompt_length):
    """The residual stream at the last token of idx (N, T), after a standard prefill of the prompt
    and recurrence over the rest: n_layer + 1 tensors (N, D), 0 the stack's input."""
    depths = [*model.blocks, model.norm]  # the input of block i is the stream at depth i
    residuals = {}

    def keep(module, inputs):
        residuals[depths.index(module)] = inputs[0][:, -1]  # the last call is the last token's
    hooks = [module.register_forward_pre_hook(keep) for module in depths]
    model.recurrent(idx, prompt_length)
    for hook in hooks:
        hook.remove()
    return [residuals[depth] for depth in range(len(depths))]


def probe_depths(model, idx, labels, groups, recurrent=(0, 1, 2, 4, None)):
    """State accessibility (section 4.4): probe accuracy at the last token of idx (N, T), at each
    depth of the residual stream, (len(recurrent), n_layer + 1), after a recurrent prefill of the
    last so many tokens (None: of all). Readable is not the same as used."""
    T = idx.shape[1]
    table = []
    for last in recurrent:
        stream = residual_stream(model, idx, 1 if last is None else T - last)
        table.append([probe(x, labels, groups) for x in stream])
    return torch.tensor(table)


# --------------------------------------------------------------------------------------------------
# The report

PREFILLS = {"standard prefill": 0, "last 1 recurrent": 1, "last 2 recurrent": 2,
            "last 4 recurrent": 4, "recurrence": None}


def statetrack(run, n=400):
    """For every task and size that fits, right answers under each decoder and what probes read at
    the last token, at each depth of the residual stream; beside it the same of the model before
    training."""
    model, options, data, _ = fullbandwidth.load_run(run)
    torch.manual_seed(options.seed)
    untrained = fullbandwidth.FullBandwidthGPT(model.config).to(model.wte.weight.device).eval()
    prefills = PREFILLS if model.W_U is not None else {"standard prefill": 0}
    cases = [(task, size, 16) for task, sizes in data.sizes.items() for size in sizes]
    for task, size, writes in [*cases, ("registers", 8, 32), ("registers", 8, 64)]:
        programs = [data.program("val", task, i, size, writes) for i in range(n)]
        texts, labels, groups = zip(*programs)
        prompts = [data.tokenizer.encode(text) for text in texts]
        if len(prompts[0]) > data.T:
            continue
        case = f"{task}, size {size}"
        if task == "registers":
            case += f", {writes} writes"
        right = right_answers(model, data, task, prompts, labels)
        yield f"{case}: right answers", fullbandwidth.MODES, "", right
        idx = torch.tensor(prompts, device=model.wte.weight.device)
        labels = torch.tensor(labels, device=idx.device)
        for who, probed in (("", model), (", untrained", untrained)):
            table = probe_depths(probed, idx, labels, groups, prefills.values())
            for prefill, row in zip(prefills, table):
                depths = [f"depth {i}" for i in range(len(row))]
                yield f"{case}: probes", depths, f"{who}, {prefill}", row


def right_answers(model, data, task, prompts, labels):
    """The share of right answers under each decoder that the model has."""
    answers = [data.tokenizer.ids[data.answers[task][label]] for label in labels]
    shares = []
    for mode in model.modes():
        new = model.generate(prompts, 1, mode, temperature=0)
        right = [token == answer for (token,), answer in zip(new, answers)]
        shares.append(sum(right) / len(right))
    return shares


def report(path):
    """Every table of one run."""
    dataset = train.load_checkpoint(path, "fullbandwidth")["options"]["dataset"]
    if dataset != "statetrack":
        raise train.UserError(f"{path} was trained on {dataset}, not on programs: "
                              f"python experiments/feedback.py {path}")
    feedback.report(path, statetrack)


CONDITIONS = feedback.with_baselines({"feedback": "0.5,0.4,0.1"}, dataset="statetrack")
SWEEPS = {"statetrack": sweeps.Sweep(
    CONDITIONS, functools.partial(sweeps.tabulate, statetrack, {}), preset="statetrack")}


def main(argv):
    sweeps.main(argv, fullbandwidth, SWEEPS, report)


if __name__ == "__main__":
    train.command_line(main)
