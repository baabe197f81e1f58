"""The text of emitted code: traced graphs, what is looked up for them, and for which sizes."""

from __future__ import annotations

import enum
import textwrap

import torch

from rose_compiler.codegen import emit, load
from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.ir.sizes import SIZES, Items, Shape, Sizes, refused
from rose_compiler.runtime.support import Runtime
from tests.codegen.texts import program


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Sequential(torch.nn.Linear(3, 3))
        self.register_buffer("mean", torch.ones(3))


GRAPH = """
@op(kind="graph", reads=["w", "b", "m"], writes=[], may_raise=False, results=2)
def layer(x, w, b, m):
    # y = net(x)
    h = torch.nn.functional.linear(x, w, b)
    h1 = torch.tanh(h)
    k = constant([1.0, 2.0, 3.0], torch.float32, torch.device("cpu"))
    h2 = h1 - m
    h3 = torch.Tensor.clamp(h2, min=-1.0, max=float("inf"))
    s = h3 * k
    top = torch.max(s, 1)
    idx = top[1]
    part = s[:, 0:2]
    return part, idx

@op(reads=[], writes=["net"])
def train(net): ...

def fn(x, *, net):
    for t in loop0(0, 2, 1):
        w = state(net, "lin.0.weight")
        b = state(net, "lin.0.bias")
        m = state(net, "mean")
        p, i = layer(x, w, b, m)
        train(net)
    w2 = state(net, "lin.0.weight")
    b2 = state(net, "lin.0.bias")
    m2 = state(net, "mean")
    q, j = layer(x, w2, b2, m2)
    return q, j
"""


class Key(enum.Enum):
    """A key of a dict that has no text."""

    A = 1


def test_no_variable_hides_what_the_question_of_sizes_calls() -> None:
    p = program("""
    @op(kind="graph", reads=[], writes=[], may_raise=False)
    def add(list, len_1, key):
        hasattr_2 = list + len_1
        return hasattr_2

    def fn(x, y, z):
        list = add(x, y, z)
        len_1 = add(list, y, z)
        return len_1
    """)
    op = next(op_of(n) for n in p.nodes() if is_call(n))
    plain, dicts = Shape((2,)), Items(((Key.A, Shape((2,))),), dict)
    known = {"list": plain, "len_1": plain, "key": dicts}
    op.attributes[SIZES] = Sizes(known, lambda *args: "others", refused)
    x = torch.ones(2)
    assert torch.equal(load(emit(p))(Runtime(), x, x, {Key.A: x}), torch.full((2,), 3.0))
    op.attributes[SIZES] = Sizes({"list": Items(((0, plain),), list)}, lambda *args: "o", refused)
    assert load(emit(p))(Runtime(), x, x, None) == "o"


def test_a_traced_operation_is_written_out() -> None:
    def train(net: Net) -> None:
        with torch.no_grad():
            net.lin[0].weight.mul_(2)
        net.mean = net.mean + 1  # another tensor under the same name

    net = Net()
    p = parse(GRAPH, {"train": train})
    p.objects["net"] = net
    text = emit(p).source
    assert textwrap.dedent("""\
        # y = net(x)
        def layer(x, w, b, m):
            h = F.linear(x, w, b)
            h = torch.tanh(h)
            h = h - m
            h = torch.clamp(h, min=-1.0, max=float("inf"))
            h = h * layer_constant
            h_2 = torch.max(h, 1)
            h_2 = h_2[1]
            h = h[:, 0:2]
            return h, h_2
        """) in text.replace("h.clamp(", "torch.clamp(h, ")
    # parameters stay where they are; a buffer may be replaced by whoever writes the module
    assert 'net_lin_0_weight = rt.state(net, "lin.0.weight")' in text
    assert text.count('rt.state(net, "lin.0.weight")') == 1
    assert text.count('rt.state(net, "mean")') == 2
    x, twin = torch.randn(4, 3), Net()
    twin.load_state_dict(net.state_dict())
    want = interp.run(p, (x,), {"net": twin})
    got = load(emit(p))(Runtime(), x, net)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_the_user_assigns_is_looked_up_where_it_is_used() -> None:
    p = parse(GRAPH, {"train": lambda net: None})
    p.objects["net"] = Net()
    text = emit(p).source
    assert 'net_lin_0_bias = rt.state(net, "lin.0.bias")' in text
    import ast

    p.ops.by_name["train"].attributes["stmts"] = tuple(ast.parse("net.lin[0].bias = q").body)
    text = emit(p).source
    assert "net_lin_0_bias" not in text
    assert 'rt.state(net, "lin.0.bias")' in text
