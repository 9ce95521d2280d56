"""What true-on-policy costs: each operator beside torch's own, weighted to a step of the Qwen3-0.6B shape.

Ratios of one run on one machine. On a GPU the times are those of the device: at decoding, launches cost the host more
than the kernels cost the device, and engine `local` hides them in a graph only with the switch on. On a CPU one thread
computes, in float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_core.numerics import ops
from miles_core.numerics.spans import Span, Spans

HIDDEN, INNER, HEADS, KV_HEADS, DIMS, LAYERS = 1024, 3072, 16, 8, 128, 28
Work = Callable[[], object]


def measure(work: Work, device: str, seconds: float) -> float:
    """Median microseconds of a call, after a warm-up."""
    work()
    if device == "cuda":
        return timed_on_device(work, seconds)
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e6 * median(times)


def timed_on_device(work: Work, seconds: float) -> float:
    from triton.testing import do_bench  # type: ignore[import-not-found,unused-ignore]

    found: float = do_bench(work, warmup=10, rep=1000 * seconds, return_mode="median")
    return 1e3 * found


def operators(device: str, rows: int) -> list[tuple[str, int, Work, Work]]:
    """(name, calls a layer, ours, torch's) on `rows` tokens; all but attention."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    found: list[tuple[str, int, Work, Work]] = []

    def product(name: str, calls: int, inner: int, outer: int) -> None:
        x, w = draw(rows, inner), draw(outer, inner)
        found.append((name, calls, lambda: ops.linear(x, w), lambda: F.linear(x, w)))

    product("q", 1, HIDDEN, HEADS * DIMS)
    product("k, v", 2, HIDDEN, KV_HEADS * DIMS)
    product("o", 1, HEADS * DIMS, HIDDEN)
    product("gate, up", 2, HIDDEN, INNER)
    product("down", 1, INNER, HIDDEN)
    x, w, gate, up = draw(rows, HIDDEN), draw(HIDDEN), draw(rows, INNER), draw(rows, INNER)
    heads, narrow = draw(rows * HEADS, DIMS), draw(DIMS)
    found += [
        ("norms", 2, lambda: ops.rms_norm(x, w, 1e-6), lambda: _plain_norm(x, w)),
        ("head norms", 2, lambda: ops.rms_norm(heads, narrow, 1e-6), lambda: _plain_norm(heads, narrow)),
        ("silu * up", 1, lambda: ops.silu_mul(gate, up), lambda: F.silu(gate) * up),
    ]
    return found


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def attention(device: str, sequences: int, length: int, *, decode: bool) -> tuple[Work, Work]:
    """Sequences of one length: one query each when decoding, else all."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    queries = 1 if decode else length
    q = torch.randn(sequences * queries, HEADS, DIMS, device=device).to(dtype)
    k, v = (torch.randn(sequences * length, KV_HEADS, DIMS, device=device).to(dtype) for _ in range(2))
    spans = Spans([Span(s * queries, queries, length - queries, s * length) for s in range(sequences)])
    wide = [x.view(sequences, -1, x.shape[1], DIMS).transpose(1, 2) for x in (q, k, v)]

    def plain() -> Tensor:
        return F.scaled_dot_product_attention(*wide, is_causal=not decode, enable_gqa=True)

    return lambda: ops.attention(q, k, v, spans, DIMS**-0.5), plain


def table(device: str, name: str, sequences: int, length: int, *, decode: bool, seconds: float) -> None:
    rows = sequences if decode else sequences * length
    work = [*operators(device, rows), ("attention", 1, *attention(device, sequences, length, decode=decode))]
    print(f"\n{name}: {sequences} sequences of {length} tokens; microseconds a layer, ours and torch's")
    sums = [0.0, 0.0]
    for operator, calls, ours, plain in work:
        times = [calls * measure(each, device, seconds) for each in (ours, plain)]
        sums = [a + b for a, b in zip(sums, times, strict=True)]
        print(f"  {operator:<12} {times[0]:12,.1f} {times[1]:12,.1f}   x {times[0] / times[1]:.2f}")
    print(f"  {'a layer':<12} {sums[0]:12,.1f} {sums[1]:12,.1f}   x {sums[0] / sums[1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.05, help="of each measurement")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print(f"{time.strftime('%Y-%m-%d')}  {machine}  torch {torch.__version__}")
    with torch.no_grad():
        table(device, "decoding", options.sequences, options.length, decode=True, seconds=options.seconds)
        few = max(1, options.sequences // 4)
        table(device, "scoring", few, options.length, decode=False, seconds=options.seconds)


if __name__ == "__main__":
    main()
