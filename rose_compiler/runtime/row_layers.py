"""Where the rows of a minibatch lie behind layers: convolution, normalization, attention,
embedding, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from rose_compiler.runtime.row_places import SUM, Known, Place, Rows, coupled, shape


def _same(node: fx.Node, known: Known, values: Any) -> None:
    """Refuse parameters that are not the same in all tiles."""
    if any(known.place(value) is not None for value in values):
        coupled(node)


def _rows(node: fx.Node, known: Known, *values: Any) -> Rows:
    """The place that all of these values have, with the rows along the first axis."""
    place = known.place(values[0])
    if not isinstance(place, Rows) or place.axis != 0:
        coupled(node)
    if any(known.place(value) != place for value in values):
        coupled(node)
    return place


def _convolution(node: fx.Node, known: Known) -> Place:
    _same(node, known, node.args[1:3])
    return _rows(node, known, node.args[0])


def _convolution_backward(node: fx.Node, known: Known) -> Place:
    """Of the rows, and sums for weight and bias."""
    _same(node, known, node.args[2:3])
    return _rows(node, known, *node.args[:2]), SUM, SUM


def _normalized(node: fx.Node, known: Known) -> Place:
    source, over, *parameters = node.args[:4]
    _same(node, known, parameters)
    place = _rows(node, known, source)
    if len(shape(source)) <= len(over):  # type: ignore[arg-type]  # sizes
        coupled(node)
    return place, place, place


def _normalized_backward(node: fx.Node, known: Known) -> Place:
    gradient, source, over, mean, deviation, *parameters = node.args[:7]
    _same(node, known, parameters)
    place = _rows(node, known, gradient, source, mean, deviation)
    if len(shape(source)) <= len(over):  # type: ignore[arg-type]  # sizes
        coupled(node)
    return place, SUM, SUM


def _attention(results: int) -> Callable[[fx.Node, Known], Place]:
    """Queries, keys and values of one row of the batch meet each other alone."""

    def rule(node: fx.Node, known: Known) -> Place:
        return (_rows(node, known, *node.all_input_nodes),) * results

    return rule


def _embedding(node: fx.Node, known: Known) -> Place:
    _same(node, known, node.args[:1])
    return known.place(node.args[1])


def _embedding_backward(node: fx.Node, known: Known) -> Place:
    gradient, places, _, _, by_frequency = node.args
    _rows(node, known, gradient, places)
    return coupled(node) if by_frequency else SUM


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
RULES: dict[str, Callable[[fx.Node, Known], Place]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_layer_norm": _normalized,
    "native_layer_norm_backward": _normalized_backward,
    FLASH: _attention(2),
    f"{FLASH}_backward": _attention(3),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
}
