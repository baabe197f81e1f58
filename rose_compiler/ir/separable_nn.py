"""Rules of the separability proof for layers: convolutions, norms, embeddings, attention, cells."""

from __future__ import annotations

from typing import Any

from rose_compiler.ir.separable_base import Axis, Call, Rule, is_tensor, name_of_call, shape_of
from rose_compiler.ir.separable_math import pointwise


def _spatial(dims: int) -> Rule:
    """Convolution, pooling, resizing over the last ``dims`` axes: batch first, then channels."""

    def rule(call: Call) -> Axis:
        source = call.args[0]
        call.only(source)
        if call.row_axis(source) != 0 or len(shape_of(source)) != dims + 2:
            call.refuse("not-proven-separable", "the batch is not the first of its axes")
        return 0

    return rule


def _pooled_with_indices(dims: int) -> Rule:
    inner = _spatial(dims)
    return lambda call: ("each", inner(call))


def _layer_norm(call: Call) -> Axis:
    source, normalized = call.args[0], call.arg(1, "normalized_shape")
    call.only(source)
    axis = call.row_axis(source)
    if axis >= len(shape_of(source)) - len(normalized):
        call.coupled("normalizes over")
    return axis


def _group_norm(call: Call) -> Axis:
    call.only(call.args[0])
    if call.row_axis(call.args[0]) != 0:
        call.coupled("normalizes over")
    return 0


def _batch_norm(call: Call) -> Axis:
    """``batch_norm(x, weight, bias, mean, var, training, ...)``."""
    call.only(call.args[0])
    if call.arg(5, "training") is not False:
        call.refuse("batch-coupling", "it normalizes by statistics of the whole batch")
    if call.row_axis(call.args[0]) != 0:
        call.coupled("normalizes over")
    return 0


def _embedding(call: Call) -> Axis:
    """``embedding(weight, indices)``."""
    indices = call.arg(1, "indices")
    call.only(indices)
    return call.row_axis(indices)


def _one_hot(call: Call) -> Axis:
    classes = call.arg(1, "num_classes", -1)
    if not isinstance(classes, int) or classes < 0:
        call.refuse(
            "batch-coupling",
            "the number of classes comes from the whole batch",
            "one_hot(x, num_classes)",
        )
    return call.row_axis(call.args[0])


def _attention(call: Call) -> Axis:
    """``scaled_dot_product_attention(q, k, v, mask, dropout_p, ...)``, batch axes in front."""
    query, key, value = call.args[:3]
    axis = call.row_axis(query)
    rank = len(shape_of(query))
    if axis >= rank - 2 or any(
        call.axis(x) != axis or len(shape_of(x)) != rank for x in (key, value)
    ):
        call.coupled("attends across")
    if call.arg(4, "dropout_p", 0.0) != 0.0:
        call.refuse("draw-order", "it draws a dropout mask")
    mask = call.arg(3, "attn_mask")
    if is_tensor(mask):
        own = axis - rank + len(shape_of(mask))
        if call.axis(mask) is None and own >= 0 and shape_of(mask)[own] != 1:
            call.refuse("not-proven-separable", "the mask is not part of the batch")
        if call.axis(mask) is not None and call.row_axis(mask) != own:
            call.coupled("masks across")
    return axis


def _native_attention(call: Call) -> Axis:
    """``_native_multi_head_attention(q, k, v, ...)``: batch first, in both results."""
    if any(call.axis(x) != 0 for x in call.args[:3]):
        call.coupled("attends across")
    mask = call.arg(9, "mask")
    if is_tensor(mask) and call.axis(mask) != 0:
        call.refuse("not-proven-separable", "the mask is not part of the batch")
    return ("each", 0)


def _python_attention(call: Call) -> Axis:
    """``F.multi_head_attention_forward(query, key, value, ...)``: tokens, batch, features."""
    if any(call.axis(x) != 1 or len(shape_of(x)) != 3 for x in call.args[:3]):
        call.coupled("attends across")
    call.only(*call.args[:3], call.node.kwargs.get("key_padding_mask"))
    if call.arg(13, "training", True) and call.arg(10, "dropout_p", 0.0):
        call.refuse("draw-order", "it draws a dropout mask")
    padding = call.node.kwargs.get("key_padding_mask")
    mask: Any = call.node.kwargs.get("attn_mask")
    if (is_tensor(padding) and call.axis(padding) != 0) or (
        is_tensor(mask) and len(shape_of(mask)) != 2
    ):
        call.refuse("not-proven-separable", "a mask is not part of the batch")
    return (1, 0)


def _encoder_layer(call: Call) -> Axis:
    """``_transformer_encoder_layer_fwd(src, ...)``: batch first."""
    call.only(call.args[0])
    if call.row_axis(call.args[0]) != 0:
        call.coupled("attends across")
    return 0


def _cell(call: Call) -> Axis:
    """Recurrent cells: ``cell(x, state, weights...)``, all batched along axis 0."""
    states = call.args[1] if isinstance(call.args[1], tuple | list) else (call.args[1],)
    if any(call.axis(x) != 0 for x in (call.args[0], *states)):
        call.refuse("not-proven-separable", "input and state are not both batched along axis 0")
    call.only(call.args[0], *states)
    return ("each", 0) if isinstance(call.args[1], tuple | list) else 0


def _recurrent(call: Call) -> Axis:
    """``lstm`` or ``gru(x, state, weights, biases, layers, dropout, train, bidirectional,
    batch_first)``: states have their batch along axis 1."""
    states = call.args[1] if isinstance(call.args[1], tuple | list) else (call.args[1],)
    axis = 0 if call.arg(8, "batch_first", False) else 1
    if call.axis(call.args[0]) != axis or any(call.axis(s) != 1 for s in states):
        call.refuse("not-proven-separable", "input and state are not both batched")
    call.only(call.args[0], *states)
    if call.arg(5, "dropout", 0.0) and call.arg(6, "train", False):
        call.refuse("draw-order", "it draws dropout masks")
    return (axis, *(1 for _ in states))


def _pad(call: Call) -> Axis:
    """``pad(x, sizes)``: two sizes an axis, from the last one on."""
    axis = call.row_axis(call.args[0])
    if axis >= len(shape_of(call.args[0])) - len(call.arg(1, "pad")) // 2:
        call.coupled("pads")
    return axis


def _pixels(call: Call) -> Axis:
    axis = call.row_axis(call.args[0])
    if axis >= len(shape_of(call.args[0])) - 3:
        call.coupled("rearranges")
    return axis


def _loss(call: Call) -> Axis:
    """Losses that are not reduced are pointwise."""
    positions = {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}
    reduction = call.arg(positions.get(name_of_call(call.node), 2), "reduction", 1)
    if reduction not in (0, "none"):
        call.coupled("reduces over")
    return pointwise(call)


RULES: dict[str, Rule] = {
    **{
        f"{kind}{dims}d": _spatial(dims)
        for dims in (1, 2, 3)
        for kind in (
            *("conv", "conv_transpose", "avg_pool", "max_pool", "lp_pool", "adaptive_avg_pool"),
            *("upsample_nearest", "reflection_pad", "replication_pad", "mkldnn_max_pool"),
        )
    },
    **{
        f"{kind}{dims}d{more}": _pooled_with_indices(dims)
        for dims in (1, 2, 3)
        for kind, more in (("max_pool", "_with_indices"), ("adaptive_max_pool", ""))
    },
    "upsample_linear1d": _spatial(1),
    "upsample_bilinear2d": _spatial(2),
    "upsample_bicubic2d": _spatial(2),
    "upsample_trilinear3d": _spatial(3),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "embedding": _embedding,
    "one_hot": _one_hot,
    "scaled_dot_product_attention": _attention,
    "_native_multi_head_attention": _native_attention,
    "multi_head_attention_forward": _python_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    **dict.fromkeys(("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "pad": _pad,
    "constant_pad_nd": _pad,
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), _pixels),
    **dict.fromkeys(
        (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        ),
        _loss,
    ),
}
