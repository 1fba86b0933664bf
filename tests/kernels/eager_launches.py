"""A program: launches on a GPU that is not there, by Python and then by eager.cpp, which must be the same. Prints how many.

The library in the cache must be one that takes tensors of the CPU for tensors of a GPU. The driver's function that launches is
replaced by one that notes what it got.
"""

import ctypes
import itertools
from functools import partial

import torch

import pwlu
from pwlu import ops
from pwlu.kernels import cuda, dispatch, eager
from pwlu.kernels.cuda import driver, plan
from pwlu.ops import norm as norm_ops

LAUNCHES = []  # (function, blocks, threads, shared, addresses, numbers)
HANDLES = {}
FAILURES = []  # what the next launches return
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)


@_SIGNATURE
def launch(function, x, y, z, threads, _y, _z, shared, stream, arguments, _extra):
    packed = ctypes.string_at(ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0], driver._PACK.size)
    *addresses, numbers = driver._PACK.unpack(packed)
    LAUNCHES.append((function, (x, y, z), threads, shared, addresses, numbers))
    return FAILURES.pop() if FAILURES else 0


def pretended():
    """The kernels of a GPU, without one."""
    kernel = cuda.Kernel(0, plan.Processor("sm_90", 132, 2048, 228 << 10, 227 << 10))

    def load(name):
        if name not in kernel._loaded:
            kernel._loaded[name] = driver.Loaded.__new__(driver.Loaded)
            kernel._loaded[name].index, kernel._loaded[name].handle = 0, HANDLES.setdefault(name, len(HANDLES) + 1)
        return kernel._loaded[name]

    kernel.load = load
    driver.Loaded.resident = lambda self, threads, shared: plan.by_shared_memory(kernel.processor, threads, shared)
    driver.launcher = cuda.calls.launcher = lambda: launch
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    return kernel


def launched(call, known):
    """What a call launches: addresses as places in known tensors; in what it allocates itself, as places relative to the first
    gradient."""
    LAUNCHES.clear()
    call()
    found = []
    for *rest, (*addresses, pair), numbers in LAUNCHES:  # the pair is two floats
        gradient = addresses[8] if place(addresses[8], known, 0) == ("new", None) else 0
        found.append((*rest, [place(a, known, gradient) for a in addresses], pair, numbers))
    return found


def place(address, known, gradient):
    if not address:
        return None
    for name, tensor in known.items():
        if tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes:
            return name, address - tensor.data_ptr()
    return "new", address - gradient if gradient and 0 <= address - gradient < known["weight"].nbytes else None


def cases():
    shapes = {(8, 64, 14, 14): 1, (4, 3): -1, (16, 128, 7, 7): 1, (4096, 64): -1, (2, 5, 6, 8): 1, (33,): 0, (70, 8, 3, 4): 1}
    for (shape, dim), layout in itertools.product(shapes.items(), ("contiguous", "channels_last")):
        for dtype, kind, intervals in itertools.product(
            (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (1, 16)
        ):
            x = torch.randn(shape, dtype=dtype)
            if layout == "channels_last":
                if x.ndim != 4:
                    continue
                x = x.contiguous(memory_format=torch.channels_last)
            yield x, 1 if x.ndim == 1 else shape[dim], dim, kind, intervals


def step(operator, x, weight, rest, grad, need_input, need_weight):
    """Forward and backward."""
    y = operator(x.detach().requires_grad_(need_input), weight.detach().requires_grad_(need_weight), *rest)
    torch.autograd.backward((y,), (grad,))


def calls_of(x, grad, weight, intervals, pool, fused, dim):
    """Every way to call a kernel."""
    training = partial(step, ops.forward, x, weight, (intervals, dim), grad)
    return {
        "forward": partial(ops.forward, x, weight, intervals, dim),
        "backward": partial(ops.backward, grad, x, weight, intervals, dim, True, True),
        "observe": partial(ops.observe, x, weight, intervals, dim, pool),
        "lookup": partial(ops.lookup, x, *fused, dim),
        "training": partial(training, True, True),
        "training, x fixed": partial(training, False, True),
        "training, weight fixed": partial(training, True, False),
        "Phase I": partial(step, ops.observe, x, weight, (intervals, dim, pool), grad, True, True),
    }


def norm_step(x, residual, weight, intervals, vectors, training, pool, grad):
    """Forward and backward behind a norm."""
    gamma, beta, mean, variance, batches = vectors
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, residual, weight, gamma, beta)]
    y, _ = norm_ops.norm_act(*leaves[:3], intervals, *leaves[3:], mean, variance, batches, 0.1, 1e-5, training, pool)
    torch.autograd.backward((y,), (grad,))


def norm_calls_of(x, grad, weight, intervals, pool, vectors):
    """Every way to call the kernels of a unit behind a norm."""
    call = partial(norm_step, x, weight=weight, intervals=intervals, vectors=vectors, grad=grad)
    return {
        f"norm{', added' * (r is not None)}{', training' * training}{', Phase I' * (p is not None)}": partial(
            call, r, training=training, pool=p
        )
        for r in (None, grad)
        for training in (True, False)
        for p in (None, pool)
    }


def dynamic_step(act, x, grad, needs):
    """Forward and backward of a dynamic unit, if its parameters learn."""
    for p in act.parameters():
        p.grad = None
        p.requires_grad_(needs)
    y = act(x.detach().requires_grad_(needs))
    if needs:
        torch.autograd.backward((y,), (grad,))


def dynamic_calls_of(x, grad, intervals, dim):
    """Yield every way to call the kernels of a dynamic unit, and the tensors that the kernels get."""
    for channels, mixing, needs in itertools.product((x.shape[dim], 1), ("channel", "layer"), (True, False)):
        act = pwlu.DynamicPWLU(channels, intervals, features=x.shape[dim], mixing=mixing, channel_dim=dim)
        known = {"x": x, "grad": grad, **dict(act.named_parameters())}
        yield f"dynamic, {channels} channels, {mixing}, {needs}", partial(dynamic_step, act, x, grad, needs), known


def check(name, call, known, by_python):
    """Call it three times: by Python, by eager.cpp, and by eager.cpp if a launch fails. Return the number of launches."""
    eager.forget()
    by_python.clear()
    expected = launched(call, known)
    assert len(by_python) == len(expected) > 0, f"{name} came to eager.cpp before it could know it"
    found = launched(call, known)
    assert len(by_python) == len(expected), f"{name} came to Python again"
    assert found == expected, f"{name}:\n{expected}\n{found}"
    FAILURES.append(201)  # a thread without a context: Python knows what to do
    again = launched(call, known)
    assert len(by_python) > len(expected)
    assert again[0] == expected[0] == again[1]
    return len(found)


def main():
    assert eager.library is not None
    kernel = pretended()
    dispatch._kernel_for_device = lambda device: kernel
    by_python = []
    call_ = driver.Loaded.__call__
    driver.Loaded.__call__ = lambda self, *arguments: (by_python.append(self), call_(self, *arguments))
    count = 0
    for x, channels, dim, kind, intervals in cases():
        one, weight = torch.ones(channels, dtype=kind), torch.randn(channels * (intervals + 5), dtype=kind)
        pool = torch.zeros(3, channels)
        table = torch.randn(channels, intervals + 2, dtype=kind)
        fused = {"left": -one, "inv_step": one.clone(), "slopes": table, "offsets": table.clone()}
        grad = torch.randn_like(x)
        calls = calls_of(x, grad, weight, intervals, pool, fused.values(), dim)
        vectors = [*torch.rand(4, channels).clone().unbind(), torch.tensor(0)] if dim == 1 else []
        if vectors and kind == torch.float32:
            calls |= norm_calls_of(x, grad, weight, intervals, pool, vectors)
        what, known = f"{tuple(x.shape)}, {x.dtype}, {kind}", {"x": x, "grad": grad, "weight": weight, "pool": pool, **fused}
        known |= {f"vector {i}": vector for i, vector in enumerate(vectors)}
        count += sum(check(f"{name} of {what}", call, known, by_python) for name, call in calls.items())
        if x.ndim > 1 and kind == torch.float32:
            for name, call, known in dynamic_calls_of(x, grad, intervals, dim):
                count += check(f"{name} of {what}", call, known, by_python)
    eager.forget()
    eager._MAX_LAUNCHES = 5
    for x, channels, dim, kind, intervals in cases():  # more than it may remember
        ops.forward(x, torch.ones(channels * (intervals + 5), dtype=kind), intervals, dim)
        assert 0 < len(eager._known) <= 5
    print(count)


if __name__ == "__main__":
    main()
