"""What the operators say of bad arguments, and that they survive any bytes."""

import pytest
import torch
from capability import CAPABILITIES, capability
from hypothesis import given, settings
from hypothesis import strategies as st
from products import tokens
from samples import LAYOUTS, keep_for_the_sanitizers, weight
from test_packed import changed, pack

linear = torch.ops.unweight.linear
W = weight("trained", 64, 128)
PACKED = pack(W, "nibble")
X = tokens(2, 128)
IDS = torch.tensor([1, 2])
ops = torch.ops.unweight


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: linear(X.half(), PACKED), "x: dtype torch.float16, expected torch.bfloat16 or torch.float32"),
        (lambda: linear(X.double(), PACKED), "x: dtype torch.float64"),
        (lambda: linear(X[:, :100], PACKED), "x: .*100.*, expected 128"),
        (lambda: linear(X[0, 0], PACKED), "x: "),
        (lambda: linear(X, PACKED[None]), r"packed_w: shape \[1, 64, \d+\], expected \[out_features, row_bytes\]"),
        (lambda: linear(X, PACKED.view(torch.int8)), "packed_w: dtype torch.int8, expected torch.uint8"),
        (lambda: linear(X, W), "packed_w: dtype torch.bfloat16, expected torch.uint8"),
        (lambda: linear(X, PACKED.view(32, -1)), "packed_w: its shape says 32 out_features, its header 64"),
        (lambda: linear(X, PACKED[:32].contiguous()), "packed"),
        (lambda: linear(X, torch.zeros_like(PACKED)), "packed: not a packed weight"),
        (lambda: linear(X, changed(PACKED, 8, 3)), "packed: format version 3, this build reads version 1"),
        (lambda: linear(X, PACKED, tokens(63)), "bias: .*63.*, expected .*64"),
        (lambda: linear(X, PACKED, tokens(64).half()), "bias: dtype torch.float16"),
        (lambda: linear(X.to("meta"), PACKED), "x: device meta, expected that of packed_w, cpu"),
        (lambda: linear(X, PACKED.to("meta")), "x: device cpu, expected that of packed_w, meta"),
        (lambda: linear(X, PACKED, tokens(64).to("meta")), "bias: device meta, expected that of packed_w, cpu"),
        (lambda: ops.embedding(IDS.to("meta"), PACKED, 128), "ids: device meta, expected that of packed_w, cpu"),
        (lambda: linear(X, PACKED, layout=1), "layout: "),
        (lambda: linear(X, PACKED, layout=9), "layout: 9"),
        (
            lambda: linear(X.float(), PACKED, out_dtype=torch.bfloat16),
            "out_dtype: torch.bfloat16, expected None",
        ),
        (lambda: linear(X, PACKED, out_dtype=torch.half), "out_dtype: torch.float16, expected None, torch.float32 or"),
        (lambda: ops.supported_configs(4), "layout: 4, expected 0"),
        (lambda: ops._batch_invariant(2), "value: 2, expected -1"),
        (lambda: ops._set_tuned("H", [1, 2, 3]), "entries: 3 numbers, expected a multiple of 5"),
        (
            lambda: ops._set_tuned("H", [1, 64, 64, 1024, 9]),
            "entries: tokens 9, expected one of .0, 8, 16, 32, 64,",
        ),
        (lambda: ops.unpack(PACKED, 127, torch.bfloat16), "in_features: 127, expected 128"),
        (lambda: ops.unpack(PACKED, 128, torch.float32), "dtype: torch.float32, expected torch.bfloat16"),
        (lambda: ops.embedding(torch.tensor([1, 64]), PACKED, 128), "ids: .*64"),
        (lambda: ops.embedding(torch.tensor([-1]), PACKED, 128), "ids: .*-1"),
        (lambda: ops.embedding(IDS.float(), PACKED, 128), "ids: dtype torch.float32"),
        (lambda: ops.embedding(IDS, PACKED, 64), "embedding_dim: 64, expected 128"),
        (lambda: ops._pack(W, 7, [64, 128], 0), "layout: 7, expected 0"),
        (lambda: ops._pack(W, 2, [64, 64], 0), "shape: "),
        (lambda: ops._transcode(PACKED, 7, 0), "layout: 7, expected 0"),
        (lambda: ops._unpack(PACKED, 128, -1), "threads: -1, expected 0"),
        (lambda: ops._cpu_capability(5), "level: 5"),
    ],
)
def test_errors_name_the_argument_what_it_got_and_what_is_allowed(call, message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call()


damages = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(damage=damages, head=st.booleans(), m=st.sampled_from([1, 9, 64]))
def test_linear_and_embedding_survive_any_bytes(layout, level, damage, head, m):
    packed = pack(weight("few outsiders", 70, 260), layout)
    flat = packed.view(-1)
    for where, value in damage:
        flat[int(where * (1024 if head else flat.numel()))] = value
    keep_for_the_sanitizers(packed)
    with capability(level):
        for call in (
            lambda: linear(tokens(m, 260), packed),
            lambda: ops.embedding(torch.arange(m), packed, 260),
        ):
            try:
                assert call().shape[0] == m
            except RuntimeError as error:
                assert str(error).startswith(("packed", "x: ", "embedding_dim"))
