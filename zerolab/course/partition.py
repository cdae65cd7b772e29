"""Who owns which elements: the sharding rules in use, as counts of real elements per rank."""

from collections.abc import Sequence

from zerolab.theory.values import whole


def even_shards(numel: int, ranks: int, multiple: int = 1) -> tuple[int, ...]:
    """Flatten, pad to a multiple of ranks·multiple, cut in equal chunks: real elements per rank.

    FSDP1 and DeepSpeed's stage 3 pad to N; DeepSpeed's stages 1 and 2 to 2N (multiple=2). Trailing
    ranks may be empty: 2 elements over 4 are 1, 1, 0, 0.
    """
    size, n, step = whole("numel", numel), whole("ranks", ranks, 1), whole("multiple", multiple, 1)
    chunk = -(-size // (n * step)) * step
    return tuple(min(chunk, max(0, size - rank * chunk)) for rank in range(n))


def row_shards(rows: int, ranks: int) -> tuple[int, ...]:
    """FSDP2: torch.chunk on dimension 0, ceil(d/N) rows each; 9 rows over 4 are 3, 3, 3, 0."""
    return even_shards(rows, ranks)


def greedy_shards(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """ZeroRedundancyOptimizer: whole parameters, largest first, each to the emptiest rank."""
    loads = [0] * whole("ranks", ranks, 1)
    for size in sorted((whole("a parameter's size", s) for s in sizes), reverse=True):
        loads[loads.index(min(loads))] += size
    return tuple(loads)


def touched_shards(sizes: Sequence[int], ranks: int, multiple: int = 1) -> tuple[int, ...]:
    """Elements of the whole parameters that each rank's chunk of a flat buffer has a part of.

    The buffer is cut as by `even_shards`. DeepSpeed's stage 2 keeps so much of the gradients: 3 and
    3 elements over 2 ranks are 3 and 3, but 2 and 4 are 6 and 4.
    """
    loads = [0] * whole("ranks", ranks, 1)
    chunk, start = -(-sum(sizes) // (ranks * multiple)) * multiple or 1, 0
    for size in sizes:
        stop = start + whole("a parameter's size", size)
        for rank in range(start // chunk, -(-stop // chunk)):
            loads[rank] += size
        start = stop
    return tuple(loads)
