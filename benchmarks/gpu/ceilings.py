"""What the device can do at most: large products in BF16 and FP8, its memory, copies from and to the host."""

from __future__ import annotations

import torch

from benchmarks.gpu.record import Found, Skipped, rounded, throughput

FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = 448.0


def product(rows: int, inner: int, columns: int, *, device: torch.device, fp8: bool, budget_s: float) -> Found:
    """One product [rows, inner] x [inner, columns] of random numbers (zeros run faster), BF16 out. FP8: e4m3, one scale
    a side, by ``torch._scaled_mm``."""
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn((rows, inner), generator=generator, device=device)
    right = torch.randn((columns, inner), generator=generator, device=device)
    if fp8:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            raise Skipped("FP8 products need a GPU of compute capability 8.9 or later")
        scale, other = (part.abs().max() / _LARGEST_FP8 for part in (left, right))
        codes, others = (left / scale).to(FP8), (right / other).to(FP8)

        def multiply() -> torch.Tensor:
            return torch._scaled_mm(codes, others.T, scale, other, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        narrow = [part.bfloat16() for part in (left, right)]

        def multiply() -> torch.Tensor:
            return torch.nn.functional.linear(narrow[0], narrow[1])

    expected = left[:64].double() @ right[:64].double().T
    error = (multiply()[:64, :64].double() - expected).norm() / expected.norm()
    if not error < (0.1 if fp8 else 0.02):
        raise ValueError(f"the product is off by {error:.3f}")
    found = throughput(multiply, device, budget_s=budget_s)
    return {
        **found,
        "tflops": rounded(2 * rows * inner * columns / found["ms"] / 1e9),
        "relative_error": round(float(error), 5),
    }


def memory(num_bytes: int, *, device: torch.device, budget_s: float) -> Found:
    """A copy within the device; bytes read and bytes written both count."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = throughput(lambda: target.copy_(source), device, budget_s=budget_s)
    return {**found, "gb_per_s": rounded(2 * num_bytes / found["ms"] / 1e6)}


def copies(num_bytes: int, *, device: torch.device, to_device: bool, budget_s: float) -> Found:
    """A copy between pinned memory of the host and the device."""
    if device.type != "cuda":
        raise Skipped("copies between host and device need a GPU")
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    held = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target, source = (held, host) if to_device else (host, held)
    found = throughput(lambda: target.copy_(source, non_blocking=True), device, budget_s=budget_s)
    return {**found, "gb_per_s": rounded(num_bytes / found["ms"] / 1e6)}
