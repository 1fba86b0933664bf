"""The mathematics of a dynamic PWLU in plain PyTorch: a PWLU whose heights depend on the input.

For sample b and channel c, the heights are

    Y(x)_bc = Y_c + sum over m = 1..M of a_m(x)_bc D_mc

and bounds and outer slopes are those of the channel. The coefficients a_m(x) lie in (-1, 1). A small network computes them from
the means p of the input over all positions of a sample, as in squeeze-and-excitation:

    a(x) = tanh(W_2 relu(W_1 p + b_1) + b_2)

A PWLU is linear in its heights. So the output equals PWLU(x; Y) + sum of a_m(x) PWLU(x; D_m), where the functions of D_m have
the same bounds and outer slopes of 0.

Shapes: x is (B, ...), with the samples in dimension 0. Y is (C, N+1), D is (M, C, N+1), and C is the size of ``channel_dim`` or
1. The means are (B, F), and the coefficients (B, M, R). R is 1 (per layer) or F (per channel).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pwlu import reference


def means(x: Tensor, features: int, channel_dim: int) -> Tensor:
    """Return the mean of each sample per channel, (B, F), or over all its elements if F is 1, in the compute dtype.

    The mean of no elements is 0, so that gradients stay finite.
    """
    dtype = reference.compute_dtype(x)
    if not x.numel():
        return x.new_zeros(x.shape[0], features, dtype=dtype)
    positions = [d for d in range(1, x.ndim) if features == 1 or d != channel_dim % x.ndim]
    found = x.mean(positions, dtype=dtype) if positions else x.to(dtype)
    return found.unsqueeze(1) if features == 1 else found


def squeeze(means: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden layer relu(W_1 p + b_1) and the output W_2 relu(W_1 p + b_1) + b_2 in the dtype of the means.

    Args:
        means: p, (B, F).
        first: W_1, (H, F).
        first_bias: b_1, (H,).
        second: W_2, (O, H).
        second_bias: b_2, (O,).

    Returns:
        The hidden layer, (B, H), and the output, (B, O).
    """
    first, first_bias, second, second_bias = (t.to(means.dtype) for t in (first, first_bias, second, second_bias))
    hidden = F.relu(F.linear(means, first, first_bias))
    return hidden, F.linear(hidden, second, second_bias)


def squeeze_backward(
    grad: Tensor, means: Tensor, hidden: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the five arguments of :func:`squeeze`, given that of its output."""
    of_hidden = (grad @ second.to(grad.dtype)).masked_fill(hidden <= 0, 0.0)
    return of_hidden @ first.to(grad.dtype), of_hidden.mT @ means, of_hidden.sum(0), grad.mT @ hidden, grad.sum(0)


def without_autocast(x: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that computes in the compute dtype of x, also under autocast."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # torch has no autocast for the meta device
        with torch.autocast(x.device.type, enabled=False):
            return function(*arguments)
    return function(*arguments)


def along_samples(values: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """Reshape values (B, R) so that they broadcast against x. R is 1 or the number of channels."""
    shape = [x.shape[0], *[1] * (x.ndim - 1)]
    if values.shape[1] > 1:
        shape[channel_dim] = values.shape[1]
    return values.reshape(shape)


# The parameters are flat tensors as in the module: the weight, the directions, W_1, b_1, W_2 and b_2.


def _matrices(weight: Tensor, directions: Tensor, coefficients: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Return the directions (M, C, N+1) and the coefficients (B, M, R), in the dtype of the latter."""
    channels = weight.shape[0] // (intervals + 5)
    directions = directions.view(-1, channels, intervals + 1)
    return directions.to(coefficients.dtype), coefficients.unflatten(1, (directions.shape[0], -1))


def mix(weight: Tensor, directions: Tensor, coefficients: Tensor, intervals: int) -> Tensor:
    """Return the weight of the functions of all samples: the heights are Y + sum over m of a_m D_m.

    Args:
        weight: the weight of C functions; see :func:`pwlu.reference.pack`.
        directions: D, (M C (N+1),).
        coefficients: a, (B, M R). C and R are equal, or one of them is 1.
        intervals: N.

    Returns:
        The weight of B max(C, R) functions, those of the first sample first, in the dtype of the coefficients.
    """
    matrices, rates = _matrices(weight, directions, coefficients, intervals)
    _, channels, knots = matrices.shape
    outer, heights = weight.to(rates.dtype).split([4 * channels, channels * knots])
    mixed = heights.view(channels, knots)
    for of_sample, direction in zip(rates.unbind(1), matrices.unbind(), strict=True):
        mixed = torch.addcmul(mixed, of_sample[:, :, None], direction)
    rows = mixed.shape[:2]
    return torch.cat([outer.view(4, 1, channels).expand(4, *rows).reshape(-1), mixed.reshape(-1)])


def mix_backward(
    grad: Tensor, weight: Tensor, directions: Tensor, coefficients: Tensor, intervals: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the weight, the directions and the coefficients of :func:`mix`, given that of its result."""
    matrices, rates = _matrices(weight, directions, coefficients, intervals)
    samples, _, of_sample = rates.shape
    _, channels, knots = matrices.shape
    functions = max(channels, of_sample)
    outer, heights = grad.split([4 * samples * functions, samples * functions * knots])
    outer = outer.view(4, samples, functions).sum(1).sum_to_size(4, channels)
    heights = heights.view(samples, functions, knots)
    of_rates = torch.stack([(heights * d).sum(2) for d in matrices.unbind()], 1).sum_to_size(rates.shape)
    of_matrices = torch.stack([(heights * a[:, :, None]).sum(0) for a in rates.unbind(1)]).sum_to_size(matrices.shape)
    of_weight = torch.cat([outer.reshape(-1), heights.sum(0).sum_to_size(channels, knots).reshape(-1)])
    return of_weight, of_matrices.reshape(-1), of_rates.flatten(1)


# The whole unit.


def layers(x: Tensor, first: Tensor, first_bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the means (B, F), the hidden layer (B, H) and the coefficients (B, M R)."""
    second, second_bias, channel_dim = rest
    p = means(x, first.shape[1], channel_dim)
    hidden, output = squeeze(p, first, first_bias, second, second_bias)
    return p, hidden, output.tanh()


def apply(
    evaluate: Callable[..., Tensor], x: Tensor, weight: Tensor, directions: Tensor, *rest: Any
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return y and the result of :func:`layers`.

    `evaluate` returns y, given the weight of :func:`mix`. `rest` holds the parameters of the network, N and `channel_dim`.
    """
    *network, intervals, channel_dim = rest
    found = without_autocast(x, layers, x, *network, channel_dim)
    return evaluate(x, mix(weight, directions, found[2], intervals), intervals, channel_dim), found


def gradients(
    backward: Callable[..., tuple[Tensor, Tensor]],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    directions: Tensor,
    network: Sequence[Tensor],
    found: tuple[Tensor, Tensor, Tensor],
    intervals: int,
    channel_dim: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of x and of the six parameters.

    `found` is the result of :func:`layers`. `backward` returns the gradients of x and of the weight of :func:`mix`.
    """
    p, hidden, coefficients = found
    first, _, second, _ = network
    mixed = mix(weight, directions, coefficients, intervals)
    grad_x, of_mixed = backward(grad, x, mixed, intervals, channel_dim, True, True)
    of_weight, of_directions, of_coefficients = mix_backward(of_mixed, weight, directions, coefficients, intervals)
    of_means, *of_network = squeeze_backward(of_coefficients * (1 - coefficients.square()), p, hidden, first, second)
    positions = max(x.numel() // max(p.numel(), 1), 1)
    grad_x = grad_x + along_samples((of_means / positions).to(x.dtype), x, channel_dim)
    parameters = zip((of_weight, of_directions, *of_network), (weight, directions, *network), strict=True)
    return (grad_x, *(g.to(parameter.dtype) for g, parameter in parameters))


def fold(x: Tensor, functions: int, channel_dim: int) -> Tensor:
    """Return x with one entry of dimension 0 for each of the functions of all samples, B or B C."""
    return x if functions == x.shape[0] else x.movedim(channel_dim, 1).flatten(0, 1)


def unfold(y: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """Return y, the result of a function of :func:`fold`, in the shape of x."""
    return y if y.shape == x.shape else y.reshape(x.movedim(channel_dim, 1).shape).movedim(1, channel_dim)


def forward(x: Tensor, left: Tensor, *rest: Any) -> Tensor:
    """Compute y as :func:`pwlu.reference.forward` does. The parameters are those of the weight of :func:`mix`."""
    *others, channel_dim = rest
    arguments = [fold(x, left.shape[0], channel_dim), left, *others, 0]
    return unfold(reference.forward(*arguments), x, channel_dim)


def backward(grad: Tensor, x: Tensor, left: Tensor, *rest: Any, **need: Any) -> tuple[Tensor | None, list[Tensor] | None]:
    """Return the gradients of x and of the parameters; `need` is as for :func:`pwlu.reference.backward`."""
    *others, channel_dim = rest
    arguments = [*(fold(t, left.shape[0], channel_dim) for t in (grad, x)), left, *others, 0]
    grad_x, grads = reference.backward(*arguments, **need)
    return None if grad_x is None else unfold(grad_x, x, channel_dim), grads
