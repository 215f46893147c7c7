"""Products with weights of every format on this GPU: are they right, are a row's bits its own, how fast are they?

python lab/weight_products.py check FORMAT ...     against float64, and bits of a row beside any number of others
python lab/weight_products.py time OUT.json ...    every product of an 8B shape by number of rows, in a graph, over
                                                   copies of the weight that do not fit the cache together
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forerun.models.cuda.cubin.packing import (
    Strips,
    pack_bf16,
    pack_bytes,
    pack_e4m3,
    pack_int4,
    pair_gates,
)
from forerun.models.cuda.cubin.products import Cut, Products, quantise_rows

COPY = 4.28e12  # bytes a second of a copy on an H200, read and written
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096), "alone": (16896, 128), "cut": (4224, 512)}
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)
FORMATS = ("bf16", "e4m3", "e4m3_blocks", "int8", "e4m3_weights", "int4_128", "int4_32", "int4_zeros_128", "int4_zeros_32")
MOST_ROWS = 1024


def make(name: str, outputs: int, depth: int, gated: bool = False) -> tuple[Strips, Tensor]:
    """A random weight in a format, and the numbers it stands for [N, K] in float32."""
    order = pair_gates if gated else (lambda given: given)
    weight = torch.randn(outputs, depth, device="cuda") * torch.rand(outputs, 1, device="cuda").add(0.1) / depth**0.5
    if name == "bf16":
        held = weight.bfloat16()
        packed, numbers = pack_bf16(order(held)), held.float()
    elif name in ("int8", "e4m3_weights", "e4m3"):
        scales = weight.abs().amax(1) / (127.0 if name == "int8" else 448.0)
        data = weight / scales[:, None]
        data = data.round().to(torch.int8) if name == "int8" else data.to(torch.float8_e4m3fn)
        if name == "e4m3":
            packed = pack_e4m3(order(data.view(torch.uint8)).view(data.dtype), order(scales))
        else:
            packed = pack_bytes(order(data.view(torch.uint8)).view(data.dtype), order(scales))
        numbers = data.float() * scales[:, None]
    elif name == "e4m3_blocks":
        tiles = weight.view(-(-outputs // 128), -1, depth // 128, 128)
        scales = tiles.abs().amax((1, 3)) / 448.0
        data = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        numbers = (data.float() * scales[:, None, :, None]).view(outputs, depth)
        packed = pack_e4m3(data.view(outputs, depth), None, scales)
    else:
        group = int(name.rsplit("_", 1)[1])
        parts = weight.view(outputs, -1, group)
        zeros = torch.full(parts.shape[:2], 8, device="cuda")
        if "zeros" in name:
            zeros = torch.randint(4, 13, parts.shape[:2], device="cuda")
        dtype = torch.float16 if group == 32 else torch.bfloat16
        scales = (parts.abs().amax(2) / 7.0).to(dtype)
        data = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
        numbers = ((data - zeros[..., None]) * scales.float()[..., None]).view(outputs, depth)
        given = zeros if "zeros" in name else None
        packed = pack_int4(
            order(data.view(outputs, depth).to(torch.uint8)), order(scales), None if given is None else order(given)
        )
    return replace(packed, gated=gated), numbers


class Rows:
    """Random rows, also as e4m3 where the weight is."""

    def __init__(self, depth: int, count: int = MOST_ROWS) -> None:
        spread = torch.rand(count, depth, device="cuda").mul(6).sub(4).exp2()
        self.plain = (torch.randn(count, depth, device="cuda") * spread).bfloat16()
        self.bytes = torch.zeros(count, depth, device="cuda", dtype=torch.uint8)
        self.scales = torch.zeros(-(-depth // 128), count, device="cuda")
        if depth % 128 == 0:
            quantise_rows(self.plain, count, self.bytes, self.scales)

    def numbers(self, weight: Strips) -> Tensor:
        if weight.format != "e4m3":
            return self.plain.double()
        return (
            self.bytes.view(torch.float8_e4m3fn).double()
            * self.scales.T.double().repeat_interleave(128, 1)[:, : self.bytes.shape[1]]
        )


def multiply(products: Products, weight: Strips, rows: Rows, count: int, out: Tensor, cut: Cut | None = None) -> None:
    if weight.format == "e4m3":
        products.multiply(weight, rows.bytes, count, out, cut, rows.scales)
    else:
        products.multiply(weight, rows.plain, count, out, cut)


def new_out(weight: Strips, count: int) -> Tensor:
    wide = weight.outputs // 2 if weight.gated else weight.outputs
    return torch.full((count, wide), float("nan"), device="cuda", dtype=torch.bfloat16 if weight.gated else torch.float32)


def check(name: str) -> list[str]:
    torch.manual_seed(1)
    products, said = Products(torch.device("cuda")), []
    for outputs, depth in ((256, 256), (4096, 4096), (6144, 1024), (1000, 1536), (28672, 4096)):
        if name == "e4m3_blocks" and outputs % 128:
            continue
        weight, numbers = make(name, outputs, depth)
        rows = Rows(depth, 520)
        wanted = rows.numbers(weight) @ numbers.double().T
        results = {}
        for count in (1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300, 520):
            out = new_out(weight, count)
            multiply(products, weight, rows, count, out)
            results[count] = out
        off = float((results[520].double() - wanted).norm() / wanted.norm())
        differ = {n: int((out != results[520][:n]).sum()) for n, out in results.items()}
        differ = {n: d for n, d in differ.items() if d}
        cut = products.choose(weight, 520)
        others = []
        groups = max(1, min(products.processors // cut.splits, weight.strips))
        for other in (
            replace(cut, whole=not cut.whole, groups=groups if cut.whole else products.processors),
            Cut(cut.splits, products.processors, 64, 8, 1, whole=True),
            Cut(cut.splits, groups, 64, 8, 1),
            Cut(cut.splits, groups // 2 or 1, 16),
            Cut(cut.splits, groups, 32, together=1),
        ):
            out = new_out(weight, 520)
            multiply(products, weight, rows, 520, out, other)
            others.append(int((out != results[520]).sum()))
        said.append(f"{name} {outputs}x{depth}: off {off:.2e}, rows differ {differ}, cuts differ {others}, counters {int(products.counters.sum())}")
        print(said[-1], flush=True)
    weight, numbers = make("int4_128" if "blocks" in name else name, 2048, 1024, gated=True)
    rows = Rows(1024, 100)
    found = rows.numbers(weight) @ numbers.double().T
    wanted = torch.nn.functional.silu(found[:, 0::2]) * found[:, 1::2]
    out = new_out(weight, 100)
    multiply(products, weight, rows, 100, out)
    said.append(f"{name} gated: off {float((out.double() - wanted).norm() / wanted.norm()):.2e}")
    print(said[-1], flush=True)
    return said


def compare_with_bf16() -> None:
    """Weights of one byte give the bits of the same numbers in bf16, before the outputs' scale."""
    products = Products(torch.device("cuda"))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        data = torch.randn(4096, 4096, device="cuda").mul(40).clamp(-127, 127).to(dtype)
        packed = replace(pack_bytes(data, torch.ones(4096, device="cuda")), channel=None)
        rows, outs = Rows(4096, 64), []
        for given in (packed, pack_bf16(data.bfloat16())):
            outs.append(new_out(given, 64))
            multiply(products, given, rows, 64, outs[-1])
        print(f"{dtype} beside bf16 of the same numbers: {int((outs[0] != outs[1]).sum())} differ", flush=True)


def seconds_of(work: Callable[[int], None], launches: int, repeats: int = 12) -> float:
    """Median seconds of one launch in a graph of `launches`."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                work(i)
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2] / launches


def cuts_for(products: Products, weight: Strips, count: int, sweep: bool) -> list[Cut]:
    chosen, n = products.choose(weight, count), products.processors
    found = [chosen]
    if not sweep:
        return found
    groups = max(1, min(n // chosen.splits, weight.strips))
    if count <= 32:
        found += [replace(chosen, together=together) for together in (1, 3)]
        found += [Cut(splits, n // splits, chosen.width) for splits in (1, 2, 4) if splits != chosen.splits and weight.strips * splits >= 3 * n]
        if count == 1:
            found += [replace(chosen, groups=2 * groups, together=2), replace(chosen, groups=2 * groups, together=3)]
    elif count <= 64:
        found += [replace(chosen, warps=8), Cut(chosen.splits, groups, 32, together=1)]
    else:
        found += [Cut(chosen.splits, groups, 64, 16, 1, together=1), Cut(chosen.splits, n, 64, 8, 1, True, 1)]
        found += [Cut(chosen.splits, groups, 128, 8, 1, False, 1)] if chosen.whole else [Cut(chosen.splits, n, 128, 8, 1, True, 1)]
    return list(dict.fromkeys(found))


def time_all(path: str, formats: list[str], names: list[str], counts: list[int], sweep: bool) -> None:
    products, lines = Products(torch.device("cuda")), []
    products._provide(1 << 27, 1)
    for name in formats:
        for product in names:
            outputs, depth = SHAPES[product]
            weight, _ = make(name, outputs, depth, gated=product == "gate" and "blocks" not in name)
            del _
            rows = Rows(depth)
            copies = [weight]
            for _ in range(min(31, max(3, 400_000_000 // weight.nbytes))):
                copies.append(replace(weight, data=weight.data.clone()))
            launches = len(copies)
            for count in counts:
                out, best = new_out(weight, count), None
                for cut in cuts_for(products, weight, count, sweep):
                    seconds = seconds_of(lambda i, cut=cut, out=out, count=count: multiply(products, copies[i], rows, count, out, cut), launches)
                    line = {
                        "format": name, "product": product, "rows": count, "us": seconds * 1e6,
                        "share": weight.nbytes / seconds / COPY, "tflops": 2e-12 * count * outputs * depth / seconds,
                        "width": cut.width, "whole": cut.whole, "together": cut.together, "groups": cut.groups,
                        "splits": cut.splits, "warps": cut.warps,
                    }  # fmt: skip
                    lines.append(line)
                    best = line if best is None or line["us"] < best["us"] else best
                    if sweep:
                        print(_said(line), flush=True)
                print(("best " if sweep else "") + _said(best), flush=True)
            del copies, weight
        with open(path, "w") as file:
            json.dump(lines, file)


def time_layers(formats: list[str], counts: list[int]) -> None:
    """The four products of a layer one after another, as in a pass but for attention: several layers in a graph."""
    products = Products(torch.device("cuda"))
    products._provide(1 << 27, 1)
    for name in formats:
        made = {}
        for product in ("qkv", "o", "gate", "down"):
            weight, _ = make(name, *SHAPES[product], gated=product == "gate" and "blocks" not in name)
            copies = [weight] + [replace(weight, data=weight.data.clone()) for _ in range(5)]
            made[product] = copies, Rows(SHAPES[product][1])
        size = sum(copies[0].nbytes for copies, _ in made.values())
        for count in counts:
            outs = {product: new_out(copies[0], count) for product, (copies, _) in made.items()}

            def layer(i: int, count: int = count, outs: dict[str, Tensor] = outs, made: dict = made) -> None:
                for product, (copies, rows) in made.items():
                    multiply(products, copies[i], rows, count, outs[product])

            seconds = seconds_of(layer, 6)
            print(f"{name:>14} layer {count:5d} rows {seconds * 1e6:8.1f} us {size / seconds / COPY:6.1%} {size / 1e6:.0f} MB", flush=True)


def _said(line: dict) -> str:
    how = f"{line['groups']}x{line['splits']} /{line['together']} {line['warps']} warps" + (" whole" if line["whole"] else "")
    return f"{line['format']:>14} {line['product']:>5} {line['rows']:5d} rows {line['us']:8.1f} us {line['share']:6.1%} {line['tflops']:6.0f} TFLOP/s width {line['width']} {how}"


def copy_rate() -> None:
    given = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(given)
    seconds = seconds_of(lambda i: out.copy_(given), 4)
    print(f"copy: {2 * given.numel() / seconds / 1e12:.2f} TB/s, {torch.cuda.get_device_name()}", flush=True)


def profile() -> None:
    """Single launches for a profiler to look at."""
    products = Products(torch.device("cuda"))
    for name, product in (("int4_128", "gate"), ("int4_128", "o"), ("int8", "gate"), ("e4m3", "gate"), ("e4m3", "o")):
        weight, _ = make(name, *SHAPES[product])
        rows, out = Rows(SHAPES[product][1]), new_out(weight, 1)
        torch.cuda.synchronize()
        for _ in range(2):
            multiply(products, weight, rows, 1, out)
            torch.cuda.synchronize()


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    what, *rest = sys.argv[1:]
    if what == "check":
        for name in rest:
            check(name)
    elif what == "bf16":
        compare_with_bf16()
    elif what == "layers":
        time_layers(rest[0].split(","), [int(one) for one in rest[1].split(",")])
    elif what == "profile":
        profile()
    elif what == "copy":
        copy_rate()
    else:
        path, *rest = rest
        given = dict(one.split("=") for one in rest if "=" in one)
        time_all(
            path,
            given.get("formats", ",".join(FORMATS)).split(","),
            given.get("products", "qkv,o,gate,down,head").split(","),
            [int(one) for one in given.get("rows", ",".join(map(str, ROWS))).split(",")],
            "sweep" in rest,
        )


if __name__ == "__main__":
    main()
