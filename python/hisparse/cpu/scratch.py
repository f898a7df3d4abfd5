"""How much temporary memory one operator may hold.

Prefill operators work on blocks of queries, because the natural tensors grow with the square of the prompt: the
indexer's scores of a 16,384-token prompt with 4 heads are 4 GiB, its gathered rows at top-k 256 3 GiB.
"""

BLOCK_BYTES = 64 * 2**20
"""Bytes that the tensors of one block may take together, as the operator estimates them from its shapes.

With the tensors that grow only linearly with the prompt, an operator's peak stays under 256 MiB at 16,384 tokens; tests
hold it to that.
"""


def rows_per_block(bytes_per_row: int) -> int:
    """How many rows (queries) fit a block; at least one, so that a single huge row still runs."""
    return max(1, BLOCK_BYTES // max(1, bytes_per_row))
