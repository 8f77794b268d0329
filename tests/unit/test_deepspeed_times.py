"""The planned time and bytes of DeepSpeed's settings: what reductions wait for, and what they send."""

import pytest

from harness.cost_model.prediction import Prediction
from tests.support.planned import planned


def predicted(strategy: str, *settings: str) -> Prediction:
    """Return the prediction for a strategy on eight H100, one sequence a micro-batch."""
    words = ("model=7b", "cluster=8xh100", "train.global_batch=32", "train.micro_batch=1", "train.seq_len=4096")
    return planned(*words, f"strategy={strategy}", *settings).predictions[0]


def exposed(prediction: Prediction) -> float:
    return sum(prediction.time.exposed_communication_seconds.values())


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_settings_of_the_papers_wait_for_what_tuned_ones_hide(stage: int) -> None:
    """Reductions that nothing overlaps take their whole time, in stages 2 and 3 in every micro-batch.

    In stage 1 of mixed precision DeepSpeed reduces after the last backward whatever the settings are.
    """
    papers, tuned = predicted(f"zero{stage}"), predicted(f"zero{stage}_tuned")
    if stage == 1:
        assert exposed(papers) < exposed(tuned) < 2.5 * exposed(papers)
    else:
        assert exposed(papers) > 3 * exposed(tuned)
        assert tuned.time.hidden_communication_seconds > papers.time.hidden_communication_seconds
    assert (papers.time.hidden_communication_seconds == 0) is (stage < 3)


@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("precision", ("fp32", "bf16_mixed"))
def test_gradients_that_all_ranks_get_are_sent_twice(stage: int, precision: str) -> None:
    """Of an all-reduce each rank sends twice the bytes of a reduction; parameters are gathered as they were."""
    settings = (f"precision={precision}", "train.global_batch=8")
    papers, tuned = (predicted(f"zero{stage}{name}", *settings).sent_bytes for name in ("", "_tuned"))
    assert tuned == papers | {"dp_shard reduce": 2 * papers["dp_shard reduce"]}
    if precision == "fp32":
        assert sum(tuned.values()) == pytest.approx(1.5 * sum(papers.values()))
