"""The proof that a run trained as a single process does: a comparison of their losses, gradients and first update."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.config.strategy import AXES
from harness.cost_model.activations import visible_scores
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import stages_of_rank
from harness.proof.bounds import NoiseFloors, noise_floors, proven_steps, shows_scaled_matrix
from harness.proof.deviations import Aspect, differences, grad_norms, relative_difference
from harness.records.rank_report import FUSED_KERNELS, RankReport

MOST_DEVIATIONS = 6  # standard deviations of a share of zeros that are drawn at random
SAME_TOLERANCE = 1e-6  # relative; the same operations on the same numbers may differ by this


@dataclass(frozen=True)
class Check:
    """A deviation in one aspect, where it is, and beside it the noise floor and the bound.

    Of each aspect there are two, or one that is both: the largest deviation, and the one nearest to its bound.
    A bound of None means that rounding alone may deviate too far for a proof.
    """

    aspect: Aspect
    deviation: float
    where: str
    floor: float
    bound: float | None

    @property
    def excess(self) -> float:
        """The deviation relative to its bound, an error above 1; 0 where there is no bound and it is finite."""
        if math.isinf(self.deviation):
            return math.inf
        return self.deviation / self.bound if self.bound else 0.0


@dataclass(frozen=True)
class Comparison:
    """The comparison of a run with its reference."""

    checks: Sequence[Check]
    is_floor_measured: bool  # whether the reference trained a second time with other rounding
    floor_multiple: float
    proven_steps: int  # from the first step on

    def of_loss(self) -> list[Check]:
        """Return the checks of every step's loss."""
        return [check for check in self.checks if check.aspect.measure == "loss"]

    def of_gradient(self) -> list[Check]:
        """Return the checks of global norms, and of every parameter's gradient at the first and last step."""
        moments = ("first_gradients", "first_moments", "last_gradients", "gradients")
        return [c for c in self.checks if c.aspect.moment in moments or c.aspect.measure == "global norm"]

    def of_update(self) -> list[Check]:
        """Return the checks of the first change of every parameter."""
        return [check for check in self.checks if check.aspect.moment == "first_updates"]

    def of_update_norm(self) -> list[Check]:
        """Return the checks of how large the first change of every matrix is."""
        return [check for check in self.of_update() if check.aspect.measure == "norm" and not check.aspect.of_vectors]


def compare_training(
    reference: RankReport, ranks: Sequence[RankReport], compute: str, floor_multiple: float
) -> Comparison:
    """Compare a run with its reference: losses, norms, every parameter's gradient at the first and last step.

    Every parameter's first update is compared as well. No step is proven where rounding would hide a scaled matrix.
    """
    floors = NoiseFloors()
    if reference.perturbed is not None:
        floors = noise_floors(reference, reference.perturbed, compute)
    by_aspect: dict[Aspect, list[Check]] = defaultdict(list)
    for difference in differences(reference, ranks, compute):
        aspect, deviation, where = difference
        bound = floors.bound(difference, floor_multiple, compute)
        by_aspect[aspect._replace(kind="")].append(
            Check(aspect, deviation, where, floors.aspect(aspect, compute), bound)
        )
    largest = [max(checks, key=lambda check: check.deviation) for checks in by_aspect.values()]
    nearest = [max(checks, key=lambda check: check.excess) for checks in by_aspect.values()]
    checks = list(dict.fromkeys([*largest, *nearest]))
    bounds = {check.aspect: check.bound for check in largest}
    every = [check for of_aspect in by_aspect.values() for check in of_aspect]
    is_sensitive = all(shows_scaled_matrix(check.aspect, check.bound, compute) for check in every)
    steps = proven_steps(bounds, len(reference.losses)) if is_sensitive else 0
    return Comparison(checks, bool(floors.of_aspects), floor_multiple, steps)


def cross_rank_mismatches(layout: Layout, ranks: Sequence[RankReport]) -> list[str]:
    """Return what differs between ranks and must not: the norm, the loss of the same data, copies of parameters."""
    values: dict[tuple[str, str], list[Sequence[float | None]]] = defaultdict(list)
    for rank in ranks:
        values["the global gradient norm", ""].append(grad_norms(rank))
        values["the loss of the same data", str(layout.data_rank(rank.rank))].append(rank.losses)
        for kind, fingerprints in (("parameter", rank.last_parameters), ("master", rank.last_masters)):
            for name, _, box, square, projection in fingerprints:
                values[f"the {kind} of {name}", str(box)].append([square, projection])
    return [
        f"{quantity} is not the same on all ranks that have it"
        for (quantity, _), lists in values.items()
        if any(are_different(lists[0], other) for other in lists[1:])
    ]


def are_different(values: Sequence[float | None], others: Sequence[float | None]) -> bool:
    """Return whether the values of two ranks differ by more than the same operations may make them differ."""
    return any(relative_difference(a, b) > SAME_TOLERANCE for a, b in zip(values, others, strict=True))


def overflow_problems(reference: RankReport, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield a problem if other steps were skipped than in the reference; sums over smaller parts overflow later.

    Where the reference trained fewer steps, their norms tell, which are 0 where a step was skipped.
    """
    skipped, expected = ranks[0].skipped_steps, reference.skipped_steps
    if skipped != expected and len(reference.losses) == len(ranks[0].losses):
        yield (
            f"{skipped} steps were skipped because gradients overflowed, and {expected} by the reference: choose a"
            " smaller precision.initial_loss_scale to compare them"
        )


def optimizer_problems(config: RunConfig, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield where an optimizer stepped with other settings than configured, left elements out, or updated otherwise."""
    rules = config.optimizer.spec.rules
    states, classes = {rule.gradient_state for rule in rules}, " and ".join(rule.name for rule in rules)
    for rank in ranks:
        state = [shard for shard in rank.optimizer_shards if shard.state_name in states]
        expected = sum(math.prod(stop - start for start, stop in shard.box) for shard in state)
        updates = config.train.total_steps - rank.skipped_steps
        for steps, update in ((1, rank.after_first_update), (updates, rank.after_last_update)):
            for key, value in dict.fromkeys(setting for group in update.settings for setting in group):
                configured = config.optimizer_setting(key)
                if value != configured:
                    yield (
                        f"optimizer: rank {rank.rank} updated parameters with {key}={value} in step {steps}, and"
                        f" {configured} is configured"
                    )
            elements = sum(elements for count, elements in update.elements if count >= steps)
            if elements < expected:
                yield (
                    f"optimizer: rank {rank.rank} updated {elements} elements by {classes} in each of {steps} steps,"
                    f" and {expected} have its state"
                )
        if rank.worst_first_update.excess > 1:
            yield (
                f"optimizer: rank {rank.rank}'s first update of {rank.worst_first_update.name} is not that of"
                f" {classes}: it differs by {rank.worst_first_update.excess / 2:.1e} of the weight decay"
            )


def frozen_problems(model: ModelConfig, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield which frozen parameters the first update changed on a rank, or of which it has no fingerprint."""
    frozen = {name for name in model_profile(model).parameter_shapes if not model.adapter.trains(name)}
    for rank in ranks:
        changes = {entry.name: entry.square for entry in rank.first_updates if entry.name in frozen}
        changed = sorted(name for name, square in changes.items() if square != 0)
        if changed:
            yield f"adapter: rank {rank.rank} changed {changed[0]}, which adapter={model.adapter.name} freezes"
    unseen = frozen - {entry.name for rank in ranks for entry in rank.first_updates}
    if unseen:
        yield f"adapter: no rank has compared {min(unseen)} with its initial values"


def dropout_mask_problems(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield where a rank drew masks of another size, dropped another share, or recomputed with other masks.

    The project's models drop each layer's two branches and the embedding, and attention's weights unless a fused kernel
    has them. Those of a library drop where they choose, perhaps with several probabilities, and compiled layers draw
    inside their own kernels.
    """
    model, dropped = config.model, config.model.dropout
    shape = micro_batch_shape(config, layout, "cpu")
    branch, passes = shape.residual_tokens * model.hidden_size, layout.grad_accumulation_steps(config.train)
    is_known = model_profile(model).is_project_decoder and not config.train.compile
    for rank in ranks:
        masks = rank.profiled.masks
        stages = stages_of_rank(model, layout, rank.rank)
        is_fused = not {*FUSED_KERNELS}.isdisjoint(rank.profiled.attention_kernels)
        layer = 2 * branch + visible_scores(shape) * (not is_fused)
        expected = passes * sum(layer * stage.layers + branch * stage.holds_embedding for stage in stages)
        if is_known and masks.elements != expected:
            yield f"dropout: rank {rank.rank} drew masks of {masks.elements} elements, and {expected} are expected"
        share = 1 - masks.nonzero / max(masks.elements, 1)
        if is_known and abs(share - dropped) > MOST_DEVIATIONS * math.sqrt(dropped / max(masks.elements, 1)):
            yield f"dropout: rank {rank.rank} dropped {share:.4f} of its activations, and model.dropout={dropped}"
        if masks.changed:
            yield (
                f"dropout: {masks.changed} of {masks.second} masks of rank {rank.rank}'s second forwards are not those"
                " of the first ones"
            )


def dropout_rng_problems(layout: Layout, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield where ranks that share activations drew different dropout masks, and where others drew the same."""
    separate_axes = [axis for axis in AXES if axis != "tp" or layout.sequence_parallel]
    by_mask: dict[float, set[tuple[int, ...]]] = defaultdict(set)
    by_coordinates: dict[tuple[int, ...], set[float]] = defaultdict(set)
    for rank in ranks:
        coordinates = tuple(layout.coordinates(rank.rank)[axis] for axis in separate_axes)
        mask = rank.profiled.masks.last or float(rank.dropout_seed or 0)  # compiled layers draw unseen
        by_mask[mask].add(coordinates)
        by_coordinates[coordinates].add(mask)
    if any(len(masks) > 1 for masks in by_coordinates.values()):
        yield "dropout: ranks that share activations drew different masks"
    if any(len(coordinates) > 1 for coordinates in by_mask.values()):
        yield "dropout: ranks with different data, layers or parts of the sequence drew the same masks"
    shares_sequence = layout.tp_enabled and not layout.sequence_parallel
    for rank in ranks:
        expected = [layout.coordinates(rank.rank)["tp"]] if shares_sequence else [None]
        if list(rank.dropout_rng_ranks) != expected:
            yield (
                f"dropout: the heads of rank {rank.rank} drew the masks of tensor-parallel ranks"
                f" {list(rank.dropout_rng_ranks)}, and {expected} are expected"
            )


def deviation_problems(comparison: Comparison) -> Iterator[str]:
    """Yield the earliest deviation above its bound of losses, of gradients and of updates, a line each.

    Later ones may follow from it. Of those at one step it is the farthest above its bound; the lines are in this order.
    """

    def order(entry: tuple[str, Check]) -> tuple[float, float]:
        _, check = entry
        return math.inf if check.aspect.moment == "last_gradients" else check.aspect.step, -check.excess

    quantities = {"loss": comparison.of_loss(), "gradient": comparison.of_gradient(), "update": comparison.of_update()}
    above = [[(name, check) for check in checks if check.excess > 1] for name, checks in quantities.items()]
    for quantity, check in sorted((min(checks, key=order) for checks in above if checks), key=order):
        bound = "" if check.bound is None else f", above the bound of {check.bound:.1e}"
        floor = "measured" if comparison.is_floor_measured else "assumed"
        yield (
            f"{quantity} deviates by {check.deviation:.2e} ({check.where}){bound}; the {floor} noise floor is"
            f" {check.floor:.1e}"
        )
