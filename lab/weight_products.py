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

from forerun.models.cuda.cubin.packing import Strips, pack_bf16, pack_bytes
from forerun.models.cuda.cubin.products import Cut, Products
from tests.gpu.packed_weights import FORMATS, Rows, make, multiply, new_out

COPY = 4.28e12  # bytes a second of a copy on an H200, read and written
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "alone": (16896, 128),
    "cut": (4224, 512),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)


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
            Cut(cut.splits, products.processors, 64, whole=True),
            Cut(cut.splits, groups, 64),
            Cut(cut.splits, groups // 2 or 1, 16),
            Cut(cut.splits, groups, 32),
            Cut(cut.splits, groups, 128),
            Cut(cut.splits, products.processors, 128, whole=True),
        ):
            out = new_out(weight, 520)
            multiply(products, weight, rows, 520, out, other)
            others.append(int((out != results[520]).sum()))
        said.append(
            f"{name} {outputs}x{depth}: off {off:.2e}, rows differ {differ}, cuts differ {others}, counters {int(products.counters.sum())}"
        )
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
        print(
            f"{dtype} beside bf16 of the same numbers: {int((outs[0] != outs[1]).sum())} differ", flush=True
        )


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
        found += [replace(chosen, together=together) for together in (1, 2)]
        if weight.strips / chosen.groups > 8:
            found += [replace(chosen, together=2, tall=8)]
        if count > 16 and weight.format != "e4m3":
            found += [replace(chosen, four=True), replace(chosen, four=True, together=2)]
        found += [
            replace(chosen, splits=splits, groups=n // splits)
            for splits in (1, 2, 4, 8)
            if 3 * n <= weight.strips * splits <= 12 * n
        ]
        if count == 1:
            found += [replace(chosen, groups=2 * groups, together=2)]
            found += [Cut(2, n, 8, together=2)] if chosen.splits == 1 else []
    elif count <= 64:
        found += [Cut(chosen.splits, groups, 32)]
    else:
        wide = (128, 256) if weight.format in ("bf16", "int8", "e4m3_weights") else (128,)
        found += [Cut(chosen.splits, groups, 64)]
        found += [
            Cut(chosen.splits, n if whole else groups, width, whole)
            for width in wide
            for whole in (True, False)
            if width <= count
        ]
    return [cut for cut in dict.fromkeys(found) if products.room(weight, cut)[0] >= 2]


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
                    seconds = seconds_of(
                        lambda i, cut=cut, out=out, count=count: multiply(
                            products, copies[i], rows, count, out, cut
                        ),
                        launches,
                    )
                    line = {
                        "format": name, "product": product, "rows": count, "us": seconds * 1e6,
                        "share": weight.nbytes / seconds / COPY, "tflops": 2e-12 * count * outputs * depth / seconds,
                        "width": cut.width, "whole": cut.whole, "together": cut.together, "groups": cut.groups,
                        "splits": cut.splits, "tall": cut.tall, "four": cut.four,
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
            said = []
            for how in ("chosen", "1", "2", "gate x2") if count <= 16 else ("chosen",):
                cuts = {product: products.choose(copies[0], count) for product, (copies, _) in made.items()}
                if how == "gate x2":
                    cuts["gate"] = replace(cuts["gate"], groups=2 * products.processors, together=2)
                elif how != "chosen":
                    for product, (copies, _) in made.items():
                        other = replace(cuts[product], together=int(how))
                        if products.room(copies[0], other)[0] >= 2:
                            cuts[product] = other

                def layer(
                    i: int, count: int = count, outs: dict = outs, made: dict = made, cuts: dict = cuts
                ) -> None:
                    for product, (copies, rows) in made.items():
                        multiply(products, copies[i], rows, count, outs[product], cuts[product])

                seconds = seconds_of(layer, 6)
                said.append(f"{how} {seconds * 1e6:6.1f} us {size / seconds / COPY:6.1%}")
            print(f"{name:>14} layer {count:5d} rows {size / 1e6:.0f} MB: " + "; ".join(said), flush=True)


def _said(line: dict) -> str:
    how = (
        f"{line['groups']}x{line['splits']} /{line['together']}"
        + (" whole" if line["whole"] else "")
        + (" four" if line["four"] else "")
        + (" low" if line["tall"] == 8 else "")
    )
    return f"{line['format']:>14} {line['product']:>5} {line['rows']:5d} rows {line['us']:8.1f} us {line['share']:6.1%} {line['tflops']:6.0f} TFLOP/s width {line['width']} {how}"


def copy_rate() -> None:
    given = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(given)
    seconds = seconds_of(lambda i: out.copy_(given), 4)
    print(f"copy: {2 * given.numel() / seconds / 1e12:.2f} TB/s, {torch.cuda.get_device_name()}", flush=True)


def profile() -> None:
    """Single launches for a profiler to look at."""
    products = Products(torch.device("cuda"))
    for name, product, count in (("int4_128", "gate", 1), ("e4m3", "gate", 1024)):
        weight, _ = make(name, *SHAPES[product])
        rows, out = Rows(SHAPES[product][1]), new_out(weight, count)
        torch.cuda.synchronize()
        for _ in range(2):
            multiply(products, weight, rows, count, out)
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
