"""How to repeat a comparison: the commands and the commit that made its runs, and the configurations of the runs."""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping

from harness.config.fingerprint import result_affecting_keys
from harness.config.from_dict import flattened
from harness.records.provenance import command_text, commit_text
from harness.records.schema import Record
from harness.report.document import Paragraph, Section, Table, bullets, section
from harness.report.text import sentence
from harness.report.view import View

_UNSET = "null"  # as keys that not every configuration has


def repeating(view: View) -> list[Section]:
    """Return the section with the commands, the commit and the configurations, as far as they are recorded."""
    commands, commits = (
        list(dict.fromkeys(filter(None, map(text_of, view.records)))) for text_of in (command_text, commit_text)
    )
    codes = list(dict.fromkeys(str(code) for record in view.records if (code := record.versions.get("code"))))
    settings = {line.label: _settings(line.record) for line in view.lines if line.record.config}
    keys = dict.fromkeys(key for flat in settings.values() for key in flat)
    usual = {key: statistics.mode(flat.get(key, _UNSET) for flat in settings.values()) for key in keys}
    groups: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for key, text in usual.items():
        group, _, name = key.rpartition(".") if "." in key else ("run", "", key)
        groups[group] |= {name: text} if text != _UNSET else {}
    own = {
        label: {key: text for key in keys if (text := flat.get(key, _UNSET)) != usual[key]}
        for label, flat in settings.items()
    }
    tables = {("group", "settings that most configurations have"): groups, ("configuration", "its other settings"): own}
    return section(
        "Repeating this comparison",
        Paragraph(sentence("repeating", commands=commands, commits=commits, codes=codes))
        if commands or commits
        else None,
        bullets([*(f"git checkout {commit.partition(' ')[0]}" for commit in commits), *commands]),
        *(
            Table(header, [(name, _text(group)) for name, group in of.items() if group], label_columns=2)
            for header, of in tables.items()
            if any(of.values())
        ),
    )


def _settings(record: Record) -> dict[str, str]:
    """Return the keys that affect a run, but for the number of its repeat, with their values as text."""
    flat = flattened(result_affecting_keys(record.config)) | {"data.fingerprint": record.corpus or None}
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items() if key != "repeat"
    }


def _text(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={text}" for key, text in settings.items())
