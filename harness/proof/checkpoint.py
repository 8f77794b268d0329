"""The proof that a run goes on from its checkpoint: the step after it is the same, bit by bit and on every rank."""

from collections.abc import Iterator, Sequence

from harness.config.schema import RunConfig
from harness.records.rank_report import RankReport


def checkpoint_problems(config: RunConfig, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield a line for each rank whose step after loading is another than without an interruption."""
    if config.train.save == "none":
        return
    for rank in ranks:
        if rank.checkpoint is None:
            yield f"checkpoint: rank {rank.rank} reports none"
            continue
        expected, actual = rank.checkpoint.uninterrupted, rank.checkpoint.resumed
        differing = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
        if differing or not expected:
            first = differing[0] if differing else "nothing"
            yield (
                f"checkpoint: in the step after loading {first} differs on rank {rank.rank}, and"
                f" {max(len(differing) - 1, 0)} other values of {len(expected)}"
            )
