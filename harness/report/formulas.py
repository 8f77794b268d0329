"""Formulas and texts of the tables claims.toml and derivations.toml, over quantities of a run by their names."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2

from harness.config.checkpointing import RECOMPUTING_MODES
from harness.cost_model.flops import executed_flops_with, takes_fused_kernel
from harness.layout.model_profile import parameter_count
from harness.records.rank_report import FUSED_KERNELS
from harness.report.setting import most_parameters
from harness.report.speeds import is_undisturbed

EXACT = 0.05  # the relative tolerance of bytes, counts and operations

Quantities = dict[str, Any]  # those of a run that are known, by their names

ENVIRONMENT = jinja2.Environment(undefined=jinja2.ChainableUndefined)  # what is unknown has unknown attributes
ENVIRONMENT.globals |= {
    function.__name__: function
    for function in (executed_flops_with, takes_fused_kernel, parameter_count, most_parameters, is_undisturbed)
}
ENVIRONMENT.globals |= {"fused_kernels": FUSED_KERNELS, "recomputing_modes": RECOMPUTING_MODES}
ENVIRONMENT.tests["near"] = lambda value, expected: abs(value - expected) <= EXACT * expected


_compiled, _template = cache(ENVIRONMENT.compile_expression), cache(ENVIRONMENT.from_string)


def value_of(formula: str, known: Mapping[str, Any]) -> Any:
    """Return what a formula gives; None where it names something unknown, or divides by zero."""
    try:
        return _compiled(formula)(known)
    except (jinja2.UndefinedError, ZeroDivisionError):
        return None


def text_of(template: str, known: Mapping[str, Any]) -> str:
    """Return the text of a template."""
    return _template(template).render(known) if "{" in template else template
