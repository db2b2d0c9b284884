"""Products and look-ups over stored weights, against the gguf package's numbers in double precision."""

from __future__ import annotations

import copy
import io
import multiprocessing
import threading
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from cutaway.errors import RequestError
from cutaway.formats.quants import block_type, dequantise
from cutaway.kernels import Stored, missing, multiply, stored_matrix
from cutaway.kernels.stored import FORMATS

KINDS = {number: gguf.GGMLQuantizationType(number) for number in FORMATS}
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


def random_bytes(number: int, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Rows of a format with every code in them: random bits, and scales of about one."""
    random = np.random.default_rng(seed)
    if number in PLAIN:
        numbers = torch.from_numpy(random.normal(size=(rows, cols)).astype(np.float32))
        return numbers.to(PLAIN[number]).view(torch.uint8)
    size, n_bytes = FORMATS[number]
    blocks = random.integers(0, 256, (rows, cols // size, n_bytes), dtype=np.uint8)

    def halves(scale: float) -> np.ndarray:
        return (
            (random.normal(size=blocks.shape[:2]) * scale)
            .astype(np.float16)
            .view(np.uint8)
            .reshape(*blocks.shape[:2], 2)
        )

    if number == 14:
        blocks[..., 208:210] = halves(0.01)
    else:
        blocks[..., :2] = halves(0.1 if size == 32 else 0.01)
        if number in (3, 7, 12, 13):  # a minimum too
            blocks[..., 2:4] = halves(0.1 if size == 32 else 0.01)
    return torch.from_numpy(blocks.reshape(rows, -1))


def numbers_of(raw: Tensor, number: int) -> Tensor:
    """What a reader that is not ours makes of them."""
    if number in PLAIN:
        return raw.view(PLAIN[number]).float()
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), KINDS[number]))


@pytest.fixture(autouse=True)
def _library_and_threads() -> Iterator[None]:
    assert not missing()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("number", FORMATS, ids=lambda n: KINDS[n].name)
def test_the_same_numbers(number: int) -> None:
    """Bit for bit, whole and by rows; and the plain PyTorch twin has them too."""
    cols = 57 if number in PLAIN else 768
    raw = random_bytes(number, 37, cols)
    wanted = numbers_of(raw, number)
    stored = Stored(raw, number, cols)
    assert torch.equal(stored.dense(), wanted)
    assert torch.equal(torch.from_numpy(dequantise(raw.numpy(), block_type(number), cols)), wanted)
    ids = torch.tensor([[3, 0, 36], [36, 5, 5]])
    assert torch.equal(F.embedding(ids, stored), wanted[ids])
    assert stored.shape == (37, cols)
    assert stored.raw.nbytes == raw.nbytes


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("number", FORMATS, ids=lambda n: KINDS[n].name)
def test_products(number: int, threads: int) -> None:
    """Close to double precision, and the same bits for a row alone and among others, on one thread or two."""
    torch.set_num_threads(threads)
    for rows, cols in [(1, 32), (3, 64), (70, 1056), (257, 1536), (23, 768)]:
        if number in PLAIN and rows != 23:
            cols += 7  # a row need not be whole groups
        elif FORMATS[number][0] == 256:
            cols = -(-cols // 256) * 256
        raw = random_bytes(number, rows, cols, seed=rows)
        weight, wanted = Stored(raw, number, cols), numbers_of(raw, number).double()
        bias = torch.randn(rows)
        x = torch.randn(101, cols, generator=torch.Generator().manual_seed(1))
        whole = F.linear(x, weight, bias)
        true = F.linear(x.double(), wanted, bias.double())
        bound = 1e-6 * F.linear(x.double().abs(), wanted.abs()) + 1e-6  # of sums that may cancel
        assert bool(((whole - true).abs() <= bound).all())
        for n in (*range(1, 27), 97, 100):  # few rows of x, and many, are multiplied in different ways
            assert torch.equal(F.linear(x[:n], weight, bias), whole[:n])
        assert torch.equal(F.linear(x, weight) + bias, whole)
        assert torch.equal(F.linear(x, weight, bias.double()), F.linear(x, weight) + bias.double())
        assert torch.equal(F.linear(x[None, :4], weight), F.linear(x[:4], weight)[None])
        torch.set_num_threads(3 - threads)
        assert torch.equal(F.linear(x, weight, bias), whole)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("number", [0, 3, 12], ids=lambda n: KINDS[n].name)
def test_many_rows(number: int) -> None:
    """So many that rows of x are handed out rather than rows of W: the bits of each by itself."""
    rows, cols, many = 37, 256, 1700
    weight = stored_matrix(random_bytes(number, rows, cols), number, cols)
    x = torch.randn(many, cols)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whole = F.linear(x, weight)
        for row in (0, 1, 191, 192, 1698, 1699):
            assert torch.equal(F.linear(x[row : row + 1], weight)[0], whole[row])
        few = torch.cat([F.linear(part, weight) for part in x.split(100)])
        assert torch.equal(few, whole)
    torch.set_num_threads(1)


def test_scales_that_are_no_numbers() -> None:
    """Case G21: what a block with a NaN or an infinite scale stands for is passed on, and stays in its row."""
    raw = random_bytes(8, 6, 64)
    raw[2, :2] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    raw[4, :2] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    weight = Stored(raw, 8, 64)
    for n in (1, 5):
        y = F.linear(torch.ones(n, 64), weight)
        assert y[:, [0, 1, 3, 5]].isfinite().all()
        assert y[:, 2].isnan().all()
        assert not y[:, 4].isfinite().any()


def test_gradients_reach_what_is_multiplied() -> None:
    raw = random_bytes(3, 8, 64)
    weight, dense = Stored(raw, 3, 64), numbers_of(raw, 3)
    x = torch.randn(5, 64, requires_grad=True)
    F.linear(x, weight).square().sum().backward()
    mine = x.grad
    x.grad = None
    F.linear(x, dense).square().sum().backward()
    assert mine is not None
    assert x.grad is not None
    assert torch.allclose(mine, x.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, for tangents
@pytest.mark.parametrize("grad", [True, False])
def test_tangents_and_transforms(grad: bool) -> None:
    """Forwards as backwards, and in ``torch.func``, whose tensors lie nowhere."""
    raw = random_bytes(3, 8, 64)
    weight, dense = Stored(raw, 3, 64), numbers_of(raw, 3)
    x, along = torch.randn(2, 5, 64)
    bias = torch.randn(8)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, along)
        for w in (weight, nn.Parameter(dense, requires_grad=False)):
            tangent = forward_ad.unpack_dual(multiply(dual, w, bias)).tangent
            assert torch.allclose(tangent, F.linear(along, dense), atol=1e-5)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).square().sum()

    assert torch.allclose(torch.func.grad(loss)(x, weight), torch.func.grad(loss)(x, dense), atol=1e-4)
    assert torch.allclose(torch.vmap(lambda row: F.linear(row, weight))(x), F.linear(x, dense), atol=1e-5)
    ids = torch.tensor([[3, 1]])
    table = torch.func.grad(lambda s: (F.embedding(ids + s.long() * 0, weight) * s).sum())(torch.tensor(1.0))
    assert torch.allclose(table, dense[[3, 1]].sum(), atol=1e-5)


def test_as_a_parameter() -> None:
    """It is moved, copied and written like any other, and counts as what it stands for."""
    raw = random_bytes(2, 8, 64)
    dense = numbers_of(raw, 2)
    layer = nn.Linear(64, 8, bias=False).requires_grad_(False)
    layer.load_state_dict({"weight": Stored(raw, 2, 64)}, assign=True)
    assert isinstance(layer.weight, Stored)
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, Stored)
    assert twin.weight.raw.data_ptr() != layer.weight.raw.data_ptr()
    assert torch.equal(twin(torch.ones(2, 64)), layer(torch.ones(2, 64)))
    assert sum(p.numel() for p in layer.parameters()) == 512
    assert layer.weight.dtype is torch.float32
    for changed, wanted in [
        (layer.weight * 2, dense * 2),
        (layer.weight.t(), dense.t()),
        (layer.weight[3], dense[3]),
        (torch.cat([layer.weight, layer.weight]), torch.cat([dense, dense])),
        (layer.weight.double(), dense.double()),
        (layer.weight.detach(), dense),
    ]:
        assert torch.equal(changed if not isinstance(changed, Stored) else changed.dense(), wanted)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert not isinstance(half.weight, Stored)
    assert torch.equal(half.weight, dense.bfloat16())
    with pytest.raises(TypeError, match="float32"):
        layer.weight.data = dense


def test_it_cannot_be_made_to_learn() -> None:
    """Not by itself, not as a module's, not as a new parameter: it would be asked for a gradient that never comes."""
    stored = Stored(random_bytes(2, 8, 64), 2, 64)
    layer = nn.Linear(64, 8, bias=False).requires_grad_(False)
    layer.load_state_dict({"weight": stored}, assign=True)

    def assigned(weight: Tensor) -> None:
        weight.requires_grad = True

    for learn in (
        lambda: stored.requires_grad_(),
        lambda: stored.requires_grad_(True),
        lambda: stored.requires_grad_(requires_grad=True),
        lambda: assigned(layer.weight),
        lambda: layer.requires_grad_(),
        lambda: nn.Parameter(stored),
    ):
        with pytest.raises(RequestError, match="dtype='float32'") as caught:
            learn()
        assert caught.value.field == "requires_grad"
        assert caught.value.hint is not None
    with pytest.raises(RuntimeError, match="no gradient of their own"):  # in PyTorch's own words for a state dict
        nn.Linear(64, 8, bias=False).load_state_dict({"weight": stored}, assign=True)
    layer.weight.requires_grad = False
    assert not layer.requires_grad_(False).weight.requires_grad


@pytest.mark.parametrize(
    ("raw", "number", "cols"),
    [
        (torch.zeros(4, 17, dtype=torch.uint8), 2, 32),
        (torch.zeros(4, 18, dtype=torch.uint8), 2, 64),
        (torch.zeros(4, 18, dtype=torch.uint8), 2, 33),
        (torch.zeros(72, dtype=torch.uint8), 2, 32),
        (torch.zeros(4, 18), 2, 32),
    ],
)
def test_bytes_that_do_not_fit(raw: Tensor, number: int, cols: int) -> None:
    with pytest.raises(ValueError, match="are not rows of"):
        Stored(raw, number, cols)


def test_rows_that_are_not_there() -> None:
    weight = Stored(random_bytes(8, 6, 64), 8, 64)
    for ids in ([6], [-1], [0, 2**40]):
        with pytest.raises(IndexError):
            F.embedding(torch.tensor(ids), weight)


def test_from_several_threads() -> None:
    """Calls take turns, and none gets another's result."""
    weights = [Stored(random_bytes(number, 64, 512, seed=i), number, 512) for i, number in enumerate((2, 3, 8, 14))]
    x = torch.randn(7, 512)
    wanted = [F.linear(x, weight) for weight in weights]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(200):
            if not torch.equal(F.linear(x, weights[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _in_child(queue: multiprocessing.Queue[float]) -> None:
    torch.set_num_threads(2)
    queue.put(float(F.linear(torch.ones(1, 512), Stored(random_bytes(8, 512, 512), 8, 512)).sum()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_in_a_forked_process() -> None:
    torch.set_num_threads(2)
    wanted = float(F.linear(torch.ones(1, 512), Stored(random_bytes(8, 512, 512), 8, 512)).sum())
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[float] = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == wanted
    child.join(timeout=60)
    assert child.exitcode == 0
