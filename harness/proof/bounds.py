"""The bounds of honest deviations, from what rounding did to the reference when it trained a second time.

How far apart two honest trainings come grows with width, depth, learning rate and steps, and no fixed bound suits all
of them. A reference therefore trains twice with different rounding (harness.worker.perturbed_training). How far its two
trainings are apart is the noise floor, and other trainings may deviate by a multiple of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from harness.proof.deviations import ROUNDING, ROUTER, Aspect, Difference, differences
from harness.records.rank_report import TrainingReport

LARGEST_BOUND = 0.1  # where honest trainings may deviate by more, a comparison proves nothing

# In 16 bits a rounding gives some tokens in a hundred to another expert, now more of them and now fewer: of 60 runs
# with 96 to 3,000 tokens, honest directions deviated by up to 0.21, and by up to 7 floors. Of norms the least bound is
# then the one that shows a scaled matrix.
LARGEST_ROUTED_BOUND = 0.3

# A matrix whose gradient or update is scaled by 1.01 in fp32, by 1.1 in 16 bits, or by 1.2 in float8, must be an error
# at any size. Its norm then deviates by this much, and the bound is half of it.
SENSITIVITY = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1, "float8": 0.2}

LOSS, GLOBAL_NORM = Aspect("loss", "step"), Aspect("global norm", "step")

FIRST_MOMENTS = ("first_gradients", "first_moments", "first_updates")  # while all trainings have the same weights

# The largest of some hundred differences is seldom twice that of as many others of the same kind.
FEW_FLOORS = 3

# An update in another direction deviates by 1 or more. In 16 bits some signs of a vector's elements are those of
# rounding: of 96 elements, six that differ deviate by 0.5.
UPDATE_DIRECTION_BOUND, NARROW_VECTORS_BOUND = 0.5, 0.75

# The floors of losses and of gradients where no second training measured them, as in older records.
ASSUMED_FLOORS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-3, 1e-2), "float16": (1e-3, 1e-2), "float8": (1e-3, 3e-2)}


@dataclass(frozen=True)
class NoiseFloors:
    """How far the reference's two trainings are apart: in every aspect, and at every single place."""

    of_aspects: Mapping[Aspect, float] = field(default_factory=dict)
    of_places: Mapping[str, float] = field(default_factory=dict)  # by the `where` of a difference
    has_routers: bool = False  # whether experts compute the tokens that routers give them

    def aspect(self, aspect: Aspect, compute: str) -> float:
        """Return the floor of an aspect, which is assumed where the reference trained once."""
        of_loss, of_gradient = ASSUMED_FLOORS[compute]
        return self.of_aspects.get(aspect, of_loss if aspect.measure == "loss" else of_gradient)

    def bound(self, difference: Difference, multiple: float, compute: str) -> float | None:
        """Return the largest honest value of a difference; None where rounding alone may deviate too far."""
        aspect, of_place = difference.aspect, self.of_places.get(difference.where, 0.0)
        floor, is_routed = self.aspect(aspect, compute), self.has_routers and compute != "float32"
        largest = LARGEST_ROUTED_BOUND if is_routed and aspect.measure == "direction" else LARGEST_BOUND
        bound = deviation_bound(aspect, floor, multiple, compute, of_place, largest)
        if bound is None or not is_routed or aspect.measure != "norm":
            return bound
        return max(bound, SENSITIVITY[compute] / 2)


def noise_floors(reference: TrainingReport, perturbed: TrainingReport, compute: str) -> NoiseFloors:
    """Return how far the reference's two trainings are apart.

    Losses and global norms are single values, and their difference may be zero by chance. Their floor, like that of
    each kind of gradient of any step, is therefore the largest difference until one step later. That of the global norm
    starts at the floor of the norms of tensors, and that of a kind of gradient at the median of all kinds.
    """
    perturbation = list(differences(reference, [perturbed], compute))
    floors: dict[Aspect, float] = {}
    for aspect, value, _ in perturbation:
        floors[aspect] = max(value, floors.get(aspect, 0.0))
    steps = len(reference.losses)
    first_norm = floors.get(Aspect("norm", "first_gradients"), 0.0)
    kinds = {aspect._replace(step=0) for aspect in floors if aspect.moment == "gradients"}
    for of_step, least in ((LOSS, 0.0), (GLOBAL_NORM, first_norm), *((kind, 0.0) for kind in kinds)):
        series = [of_step._replace(step=step) for step in range(steps)]
        values = [floors.get(aspect, 0.0) for aspect in series]
        floors |= {aspect: max(least, *values[: step + 2]) for step, aspect in enumerate(series)}
    for step in range(steps if kinds else 0):
        of_kinds = {kind: floors[kind] for kind in (kind._replace(step=step) for kind in kinds)}
        floors |= {kind: max(floor, median(of_kinds.values())) for kind, floor in of_kinds.items()}
    has_routers = any(entry.name.endswith(ROUTER) for entry in reference.first_gradients)
    return NoiseFloors(floors, {difference.where: difference.value for difference in perturbation}, has_routers)


def deviation_bound(
    aspect: Aspect,
    floor: float,
    multiple: float,
    compute: str,
    floor_of_place: float = 0.0,
    largest: float = LARGEST_BOUND,
) -> float | None:
    """Return the largest deviation of an aspect that is no error; None where rounding alone may deviate too far.

    At the first step all trainings have the same weights, and gradients always have a bound. The norm of a matrix
    hardly changes by rounding, so that its bound shows a scaled matrix whatever the floor of others is. Where kernels
    that sum in 16 bits do change a norm, `floor_of_place` tells for which tensor, and a few of it are its bound: no
    step is proven where that hides a scaled matrix (shows_scaled_matrix). The norm of a vector's first update does
    change in 16 bits: an element whose gradient rounds to zero has no update, and any other has a whole one. Other
    deviations have a bound of `largest` where ten floors are more, as long as a few are not: honest ones were at
    most 2.4 floors. A few floors are that of a first direction beyond it. That of an update has a wide bound, because
    AdamW's first update is little more than the signs of gradients, of which a rounding flips a few or none.
    """
    is_narrow_vector = aspect.moment == "first_updates" and aspect.of_vectors and compute != "float32"
    if aspect.moment == "first_updates" and aspect.measure == "direction":
        few = FEW_FLOORS * floor
        return max(NARROW_VECTORS_BOUND if is_narrow_vector else UPDATE_DIRECTION_BOUND, few) if few <= 1 else None
    bound = max(multiple * floor, _least_bound(aspect, compute))
    if is_narrow_vector:
        bound = max(bound, SENSITIVITY[compute] / 2)
    is_first = aspect.moment in FIRST_MOMENTS
    if is_first and aspect.measure == "norm":
        least = LARGEST_BOUND if aspect.of_vectors else SENSITIVITY[compute] / 2
        return min(bound, max(least, FEW_FLOORS * floor_of_place))
    most = max(largest, FEW_FLOORS * floor)
    return min(bound, most) if is_first or most == largest else None


def _least_bound(aspect: Aspect, compute: str) -> float:
    """Return the bound where the floor is zero: some roundings of the dtype in which the aspect is computed.

    Losses are means over tokens in fp32. Global norms are exact to 5e-6 (harness.tensors.fp32_sums).
    """
    if aspect.measure == "loss":
        return max(32 * ROUNDING["float32"], ROUNDING[compute] / 4)
    return max(256 * ROUNDING["float32"], 2 * ROUNDING[compute])


def shows_scaled_matrix(aspect: Aspect, bound: float | None, compute: str) -> bool:
    """Return whether this bound shows a matrix that is scaled as in SENSITIVITY, if it is one of a matrix's first norm.

    The scaled matrix deviates by at least SENSITIVITY less what rounding may add, and that is the bound itself.
    """
    is_first_norm = aspect.measure == "norm" and aspect.moment in FIRST_MOMENTS and not aspect.of_vectors
    return not is_first_norm or (bound is not None and bound <= SENSITIVITY[compute] / 2)


def proven_steps(bounds: Mapping[Aspect, float | None], steps: int) -> int:
    """Return how many steps from the first on are proven: those whose loss and global norm have a bound.

    The last step counts only if the norms of matrices' gradients have a bound, too.
    """
    for step in range(steps):
        of_step = [LOSS._replace(step=step), GLOBAL_NORM._replace(step=step)]
        if step == steps - 1:
            of_step.append(Aspect("norm", "last_gradients"))
        if any(bounds.get(aspect, 0.0) is None for aspect in of_step):
            return step
    return steps
