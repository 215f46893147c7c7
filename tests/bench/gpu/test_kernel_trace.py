"""How traced kernels are told apart, and how overlapping ones share the time that passed."""

from __future__ import annotations

from forerun.bench.gpu.kernel_trace import GAP, Kernel, cut_up, idle, kernels_of, kind_of, said, traced


def _named(kernel: Kernel) -> str:
    return kernel.name


def test_overlapping_kernels_share_the_time_and_what_nobody_ran_in_is_a_gap() -> None:
    kernels = [
        Kernel("b", (), 12.0, 30.0),  # started early, waited for a
        Kernel("a", (), 10.0, 20.0),
        Kernel("a", (), 35.0, 40.0),
        Kernel("inside", (), 36.0, 38.0),
    ]
    spent = cut_up(kernels, _named)
    assert spent == {"a": 12.0, "b": 10.0, GAP: 5.0, "inside": 3.0}
    assert sum(spent.values()) == 40.0 - 10.0


def test_nothing_takes_no_time() -> None:
    assert cut_up([], _named) == {}
    assert idle([], 1.0) == (0, 0.0)


def test_a_device_is_idle_while_no_kernel_runs() -> None:
    kernels = [
        Kernel("last", (), 70.0, 75.0),
        Kernel("long", (), 10.0, 40.0),
        Kernel("inside", (), 12.0, 15.0),
        Kernel("soon", (), 42.0, 50.0),
    ]
    assert idle(kernels, 5.0) == (1, 20.0)
    assert idle(kernels, 1.0) == (2, 22.0)


def test_events_of_the_host_are_left_out() -> None:
    events = [
        {"cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 2},
        {"cat": "kernel", "name": "linear", "ts": 5.5, "dur": 2.0, "args": {"grid": [1, 96, 4]}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 3, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    assert kernels_of(events) == [
        Kernel("linear", (1, 96, 4), 5.5, 7.5),
        Kernel("Memcpy HtoD (Pinned -> Device)", (), 3.0, 4.0),
    ]


def test_products_are_told_apart_by_their_grids() -> None:
    products = {(96, 4): "qkv"}
    reduce = (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float> > >"
    )
    copy = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"
    names = {
        "qkv": Kernel("linear", (1, 96, 4), 0, 1),
        "other products": Kernel("linear", (1, 97, 4), 0, 1),
        "argmax": Kernel(reduce, (), 0, 1),
        "torch unrolled_elementwise_kernel": Kernel(copy, (), 0, 1),
        "Memcpy HtoD": Kernel("Memcpy HtoD (Pinned -> Device)", (), 0, 1),
        "verdict": Kernel("follow", (), 0, 1),
        "attention": Kernel("combine", (), 0, 1),
    }
    assert {kind_of(kernel, products) for kernel in names.values()} == names.keys()
    assert all(kind_of(kernel, products) == kind for kind, kernel in names.items())


def test_short_parts_are_said_together() -> None:
    assert said({"a": 8.0, "b": 3.0, "c": 3.0}, 2, 2.0) == "a 4, others 3"


def test_without_a_gpu_the_work_is_done_and_nothing_is_traced() -> None:
    done: list[int] = []
    kernels = traced(lambda: done.append(1))
    assert done == [1]
    assert all(isinstance(one, Kernel) for one in kernels)
