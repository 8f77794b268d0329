"""Formulas and texts of tables, such as derivations.toml and the report's claims.toml, over quantities of a run."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import jinja2

from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.model import ModelConfig
from harness.config.schema import RECOMPUTING_MODES
from harness.cost_model import communication, flops
from harness.cost_model.memory import estimate_memory
from harness.cost_model.rank_memory import rank_stages
from harness.cost_model.shard_groups import local_parameter_count, optimizer_parameter_count
from harness.engines.base import load_engine
from harness.layout import model_profile
from harness.layout.layout import Layout
from harness.metrics import columns, memory, step_time, traffic
from harness.records import rank_report
from harness.records.schema import Record
from harness.util.errors import UserError
from harness.util.text import count_text

EXACT = 0.05  # the relative tolerance of bytes, counts and operations

Quantities = dict[str, Any]  # those of a run that are known, by their names


def quantities(record: Record, formulas: Mapping[str, str]) -> Quantities:
    """Return what formulas may name of a run, without what is unknown: the columns of its row, and the following.

    They are the record, `config`, `layout`, `widths` and `device`, which the cost model needs, as far as this version
    of the harness can read them, and the given formulas by their names, each of which may name those before it.
    """
    known = record.row | {"record": record, "device": "cpu" if record.row.get("measured_on") == "cpu" else "cuda"}
    with suppress(UserError):  # no figure depends on the training text
        known["config"] = read_run_config(record.config | {"data": {"name": "any", "kind": "synthetic"}})
    with suppress(UserError):
        known["layout"] = from_dict(Layout, record.layout or {})
    with suppress(UserError, KeyError):
        config, layout = known["config"], known["layout"]
        layout.grad_accumulation_steps(config.train)  # raises UserError for a batch that leaves a remainder
        known["widths"] = load_engine(layout.engine).state_widths(config, layout)
    known = {name: value for name, value in known.items() if value is not None}
    for name, formula in formulas.items():
        value = value_of(formula, known)
        known |= {} if value is None else {name: value}
    return known


def most_parameters(model: ModelConfig, layout: Layout, of_optimizer: bool = False) -> int:
    """Return the number of parameters on the rank that has most of them, before they are sharded.

    `of_optimizer` is for those whose optimizer state a rank has.
    """
    stages = [rank_stages(model, layout, pp_rank) for pp_rank in range(layout.pp)]
    if of_optimizer:
        return max(optimizer_parameter_count(model, layout, own) for own in stages)
    tp, vocabulary_tp = layout.tp, layout.vocabulary_tp
    return max(sum(local_parameter_count(model, stage, tp, vocabulary_tp) for stage in own) for own in stages)


ENVIRONMENT = jinja2.Environment(undefined=jinja2.ChainableUndefined)  # what is unknown has unknown attributes
ENVIRONMENT.globals |= {"recomputing_modes": RECOMPUTING_MODES} | {
    named.__name__.rpartition(".")[2]: named
    for named in (
        *(columns, communication, flops, memory, model_profile, rank_report, step_time, traffic),
        *(estimate_memory, most_parameters, count_text),
    )
}
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
