"""torch.compile: few graphs, whatever the windows' lengths and however many models a process trains, and the losses that
there are without it. The graphs are traced, counted and run, but not turned into machine code: that takes seconds each."""
import functools, itertools
from typing import get_args

import pytest
import torch

import bench
import stars
import train
from test_bench import TINY, tiny_batch

CPU = torch.device("cpu")


@pytest.fixture
def graphs(monkeypatch):
    """The graphs compiled so far."""
    found = []

    def back_end(graph, inputs):
        found.append(graph)
        return graph
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=back_end))
    monkeypatch.setattr(train, "compute_chunk", train.compute_chunk)
    yield found
    torch.compiler.reset()


def compile_blocks(model, graphs):
    train.compile_blocks(model, CPU, "on")
    graphs.clear()  # of the attempt whether anything can be compiled


def losses(model, idx, targets):
    """Training loss, norm of its gradient, validation loss."""
    torch.manual_seed(1)
    model.zero_grad()
    loss, _ = model.train().loss(idx, targets)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    with torch.no_grad():
        return loss.item(), gradient.norm().item(), model.eval().loss(idx, targets)[0].item()


def tiny_stars(**fields):
    torch.manual_seed(0)
    return stars.LoopedTransformer(stars.Config(n_embd=8, n_head=2, mlp_width=8, num_loops=2, loop_sampling="fixed", **fields))


def rows(T, B=4):
    return torch.randint(15, (B, T)), torch.randint(15, (B, T))


@pytest.mark.parametrize("name", TINY)
def test_a_block_is_one_graph_for_training_and_one_for_validation(name, graphs):
    model, idx, targets = tiny_batch(name)
    eager = losses(model, idx, targets)
    compile_blocks(model, graphs)
    assert losses(model, idx, targets) == pytest.approx(eager, rel=1e-5)
    assert len(graphs) == 3  # and one of the cross-entropy, for training


def test_fourteen_models_in_one_process_are_all_compiled(graphs):
    conditions = [dict(placement=placement, norm=norm) for placement, norm in itertools.product(
        *(get_args(stars.Config.__annotations__[field]) for field in ("placement", "norm")))]
    conditions += [dict(residual_scale=2.0), dict(state_norm=True)]
    assert len(conditions) == 14
    for fields in conditions:
        model, batch = tiny_stars(**fields), rows(16)
        eager = losses(model, *batch)
        compile_blocks(model, graphs)
        assert losses(model, *batch) == pytest.approx(eager, rel=1e-5), fields
        assert len(graphs) == 3, fields


def test_windows_of_thirty_lengths_take_four_graphs(graphs):
    model = tiny_stars(block_size=128)
    batches = [rows(T) for T in (54, 69, 38, *range(31, 112, 3))]  # on both sides of 64
    assert len({idx.shape[1] for idx, _ in batches}) == 30
    eager = [losses(model, *batch) for batch in batches]
    compile_blocks(model, graphs)
    for batch, expected in zip(batches, eager):
        assert losses(model, *batch) == pytest.approx(expected, rel=1e-5)
    assert len(graphs) == 6  # two of them of the cross-entropy


def test_beyond_the_limit_of_graphs_a_run_goes_on_uncompiled_with_one_warning(graphs, caplog):
    model = tiny_stars(block_size=128)
    batches = [rows(T) for T in (54, 69, 38)]
    eager = [losses(model, *batch) for batch in batches]
    compile_blocks(model, graphs)
    with torch._dynamo.config.patch(recompile_limit=2):
        for batch, expected in zip(batches, eager):
            assert losses(model, *batch) == pytest.approx(expected, rel=1e-5)
    assert len(graphs) == 4
    warning, = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "hit config.recompile_limit" in warning
