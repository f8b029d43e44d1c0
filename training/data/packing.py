"""Documents of token ids as blocks of a fixed length. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Block:
    """Inputs of a language model with what each is to predict.

    Args:
        input_ids: tokens ``[length]`` of one or several documents, or parts of them, one behind the other.
        labels: the token that comes next in the same document, for each of them; the block need not hold it as an input.
        starts: places where a document, or a part of one, begins.
        shares: of each of them, the number of its document and the share of that document's predictions that are here.
    """

    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    shares: list[tuple[int, float]] = field(default_factory=list)


def packed(documents: Iterable[Sequence[int]], length: int, *, packing: bool = True) -> Iterator[Block]:
    """Cut documents into blocks so that every token behind a document's first is predicted exactly once.

    A document that does not fit into what is left of a block goes on in the next one, where it sees nothing of its beginning.
    Of the documents no more are asked for than the next block needs.

    Args:
        documents: ids of each, from the token that it begins with to the one that it ends with; at least two.
        length: of a block.
        packing: whether a block may hold several documents.

    >>> found = packed([[1, 5, 2], [1, 6, 7, 8, 2]], 4)
    >>> [(block.input_ids, block.labels, block.starts) for block in found]
    [([1, 5, 1, 6], [5, 2, 6, 7], [0, 2]), ([7, 8], [8, 2], [0])]
    >>> [block.input_ids for block in packed([[1, 5, 2], [1, 6, 7, 8, 2]], 4, packing=False)]
    [[1, 5], [1, 6, 7, 8]]
    """
    block = Block()
    for number, ids in enumerate(documents):
        first, predictions = 0, len(ids) - 1
        if not packing and block.input_ids:
            yield block
            block = Block()
        while first < predictions:
            last = min(predictions, first + length - len(block.input_ids))
            block.starts.append(len(block.input_ids))
            block.input_ids += ids[first:last]
            block.labels += ids[first + 1 : last + 1]
            block.shares.append((number, (last - first) / predictions))
            first = last
            if len(block.input_ids) == length:
                yield block
                block = Block()
    if block.input_ids:
        yield block


def positions(starts: Sequence[int], length: int) -> list[int]:
    """The place of every token in its document, or part of one, ``[length]``: it starts again at each of ``starts``.

    >>> positions([0, 2], 5)
    [0, 1, 0, 1, 2]
    """
    ends = [*starts[1:], length]
    return [place for start, end in zip(starts, ends, strict=True) for place in range(end - start)]
