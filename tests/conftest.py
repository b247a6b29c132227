import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

if "PYTEST_XDIST_WORKER" in os.environ:  # one process a core: torch's own threads would only compete
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def pictures():
    """A test that looks at a picture asks for this: only there are figures drawn."""


@pytest.fixture(autouse=True)
def empty_pictures(request, monkeypatch):
    """In all other tests savefig writes an empty file: drawing takes as long as a small training."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).write_bytes(b""))


@pytest.fixture
def few_products(monkeypatch):
    """The instruments of stars.py with fewer products with the Jacobian than a figure needs; Arnoldi's stay as they are."""
    stars = pytest.importorskip("stars")
    for name, few in (("jacobian_gain", dict(draws=4)), ("sigma_max", dict(steps=4)), ("spectral_radius_power", dict(steps=8))):
        monkeypatch.setattr(stars, name, functools.partial(getattr(stars, name), **few))


def step_gradients(model, data, world=1, **arguments):
    """The gradients of training step 4 as one vector: the sum of what every process does with its share of the rows."""
    model.zero_grad()
    options, cpu = data.options, torch.device("cpu")
    for rank in range(world):
        run = SimpleNamespace(rank=rank, world=world, data=data, device=cpu)
        for idx, targets, num_targets in train.share_out(run, "train", [3]):
            loss, _ = model.loss(idx, targets, num_targets=num_targets, **arguments)
            (loss / options.grad_accum / world).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
